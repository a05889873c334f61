"""Every form of a layer, in a model of its own, as files for every engine.

A form belongs to a family, such as linear layers, whose dense layer it is compared with. ``ARCHITECTURES`` has the
functions that ``panther export --model`` takes, and :func:`write` writes a form for an engine with the public command.
"""

__all__ = ["ENGINES", "FAMILIES", "FORMS", "RANK", "SIZES", "Form", "RefusalError", "file_bytes", "forms_of", "write"]

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from panther.cli import main as panther_command
from panther.errors import require_extra

INPUTS, OUTPUTS, GROUP, RANK = 1024, 4096, 128, 204  # The rank halves the weight twice, as 8 bits do.
SIZES: dict[str, tuple[int, ...]] = {  # rows, tokens, images or sequences that are timed
    "linear": (1, 32, 512),
    "embedding": (1, 32, 512),
    "convolution": (1, 8),
    "attention": (1, 8),
    "experts": (1, 32),
}
FAMILIES = {
    "linear": "nn.Linear(1024, 4096)",
    "embedding": "nn.Embedding(8192, 512)",
    "convolution": "nn.Conv2d(128, 256, 3, padding=1) on 28 x 28",
    "attention": "nn.MultiheadAttention(512, 8) on 256 positions",
    "experts": "8 experts of MixtralModel, 2 a token, width 256, inner width 512",
}
ENGINES = {
    "panther": "pr.save_compressed",
    "linears": "panther export --to linears",
    "torch.export": "panther export --to torch",
    "aotinductor": "panther export --to torch, and aoti_compile_and_package",
    "onnxruntime": "panther export --to onnx",
    "torchao": "panther.integrations.torchao.quantize_",
    "transformers": "panther export --to compressed-tensors",
    "vllm": "panther export --to compressed-tensors --reader vllm",
}
_MODULE = "benchmarks.engines.architectures"


class RefusalError(Exception):
    """An engine does not take a form; the text is what the command says."""


@dataclass(frozen=True)
class Form:
    """A form of a layer.

    Attributes:
        family: The key in ``FAMILIES``.
        layer: Makes the layer, with random weights.
        dtype: The dtype of the model.
    """

    family: str
    layer: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32


def _quantized(
    bits: int | None, group_size: int | None = GROUP, *, symmetric: bool = False, **options: Any
) -> nn.Module:
    layer = pr.nn.QuantizedLinear(INPUTS, OUTPUTS, bits, group_size=group_size, **options)
    if bits is not None:  # A new layer has the middle codes for zero, and a correction of zero.
        if not symmetric:
            layer.zeros = layer.zeros.clone().random_(2**bits)  # a layer refuses writes in place
        if layer.low_rank:
            layer.left = layer.left.clone().random_(-127, 128)
    return layer


FORMS = {
    "dense": Form("linear", lambda: nn.Linear(INPUTS, OUTPUTS)),
    "dense, bfloat16": Form("linear", lambda: nn.Linear(INPUTS, OUTPUTS), torch.bfloat16),
    "low rank": Form("linear", lambda: pr.nn.LowRankLinear(INPUTS, OUTPUTS, RANK)),
    "low rank, int8": Form("linear", lambda: _quantized(None, low_rank=RANK)),
    "interpolative": Form("linear", lambda: pr.nn.InterpolativeLinear(INPUTS, OUTPUTS, RANK)),
    "SKLinear": Form("linear", lambda: pr.nn.SKLinear(INPUTS, OUTPUTS, RANK // 2, sketch="signs", seed=0)),
    "int8, symmetric": Form("linear", lambda: _quantized(8, None, symmetric=True)),
    "int8, rounded inputs": Form("linear", lambda: _quantized(8, None, symmetric=True, activations="int8")),
    "int4, symmetric": Form("linear", lambda: _quantized(4, symmetric=True)),
    "int4, zero points": Form("linear", lambda: _quantized(4)),
    "int4 + low rank": Form("linear", lambda: _quantized(4, symmetric=True, low_rank=32)),
    "embedding": Form("embedding", lambda: nn.Embedding(8192, 512)),
    "embedding, int4": Form("embedding", lambda: pr.nn.QuantizedEmbedding(8192, 512)),
    "convolution": Form("convolution", lambda: nn.Conv2d(128, 256, 3, padding=1)),
    "convolution, low rank": Form("convolution", lambda: pr.nn.LowRankConv2d(128, 256, 3, padding=1, rank=64)),
    "SKConv2d": Form("convolution", lambda: pr.nn.SKConv2d(128, 256, 3, padding=1, low_rank=32, seed=0)),
    "convolution, int4": Form("convolution", lambda: pr.nn.QuantizedConv2d(128, 256, 3, padding=1)),
    "attention": Form("attention", lambda: nn.MultiheadAttention(512, 8, batch_first=True)),
    "linear attention": Form("attention", lambda: pr.nn.RandMultiHeadAttention(512, 8, 96, seed=0)),
    "linear attention, causal": Form(
        "attention", lambda: pr.nn.RandMultiHeadAttention(512, 8, 96, iscausal=True, seed=0)
    ),
    "experts": Form("experts", nn.Identity),
    "experts, int4": Form("experts", nn.Identity),
}


# Compiling a form takes ten seconds of processor time.
_COMPILED = (
    "dense", "low rank", "SKLinear", "int8, symmetric", "int4, symmetric", "int4 + low rank", "embedding, int4",
    "convolution, low rank", "convolution, int4", "linear attention",
)  # fmt: skip


def forms_of(engine: str) -> tuple[str, ...]:
    """Return the forms that are written for an engine: all of them, except for AOTInductor and torchao."""
    if engine == "torchao":
        return tuple(name for name, form in FORMS.items() if form.family not in ("attention", "experts"))
    return _COMPILED if engine == "aotinductor" else tuple(FORMS)


def model_of(name: str) -> nn.Module:
    """Return the model of a form, with weights of a fixed seed."""
    form = FORMS[name]
    torch.manual_seed(0)
    if form.family == "experts":
        model: nn.Module = _mixture()
        if name != "experts":
            pr.compress(model, budget=0.3, method="svd", forms="int4", include="*experts*", measure_speed=False, seed=0)
            layers = [module for module in model.modules() if isinstance(module, pr.nn.QuantizedExperts)]
            if len(layers) != 2:
                raise RuntimeError(f"{len(layers)} parameters of experts were quantized, and there are 2")
        return model.eval()
    if form.family == "attention":
        from benchmarks.engines.architectures import SelfAttention

        return SelfAttention(form.layer()).eval()
    return nn.Sequential(form.layer()).to(form.dtype).eval()


def _mixture() -> Any:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.MixtralModel(config)


def sample_of(name: str, size: int) -> Tensor:
    """Return an input of ``size`` rows, tokens, images or sequences, which the reader makes in the same way."""
    from benchmarks.engines.reader import sample

    return sample(FORMS[name].family, size).to(FORMS[name].dtype if FORMS[name].family == "linear" else None)


def write(name: str, engine: str, folder: Path) -> Path:
    """Write a form for an engine, with an input and its output beside it, and return the folder for the reader.

    Raises:
        RefusalError: If the command refuses the form. Nothing is left in the folder of the result then.
    """
    folder.mkdir(parents=True)
    if engine in ("transformers", "vllm"):
        return _write_language_model(name, engine, folder)
    model, x = model_of(name), sample_of(name, SIZES[FORMS[name].family][1])
    with torch.no_grad():
        y = _tensor(model(x))
    small, out = folder / "small", folder / "out"
    if FORMS[name].family == "experts":
        model.save_pretrained(small)  # type: ignore[operator]
        arguments = []
    else:
        pr.save_compressed(model, small)
        sample = "bfloat16" if FORMS[name].dtype is torch.bfloat16 else FORMS[name].family
        arguments = ["--model", f"{_MODULE}:{_architecture(name)}", "--sample", f"{_MODULE}:sample_{sample}"]
    if engine == "panther":
        small.rename(out)
    elif engine == "torchao":
        _write_torchao(model, out)
    else:
        target = {"linears": "linears", "onnxruntime": "onnx"}.get(engine, "torch")
        if target == "linears":  # which needs no sample
            arguments = arguments[:2]
        _export([str(small), "--to", target, "--out", str(out), *arguments])
    _write_record(folder, name, engine, x, y)
    return folder


def _architecture(name: str) -> str:
    family = FORMS[name].family
    if family != "attention":
        return family
    return {"attention": "attention", "linear attention": "linear_attention"}.get(name, "causal_attention")


def _export(arguments: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()) as result:
        code = panther_command(["export", *arguments])
    if code:
        raise RefusalError(printed.getvalue().removeprefix("panther: error: ").strip())
    return result.getvalue()


def _tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    first: Tensor = output[0]
    return first


def _write_record(folder: Path, name: str, engine: str, x: Tensor, y: Tensor) -> None:
    from safetensors.torch import save_file

    family = FORMS[name].family
    dtype = str(FORMS[name].dtype).removeprefix("torch.")
    record = {"engine": engine, "family": family, "sizes": SIZES[family], "dtype": dtype}
    if family == "attention" and engine == "panther":
        record["architecture"] = _architecture(name)
    (folder / "case.json").write_text(json.dumps(record))
    save_file({"x": x.contiguous(), "y": y.contiguous()}, folder / "compared.safetensors")


def _write_torchao(model: nn.Module, out: Path) -> None:
    from panther.integrations.torchao import quantize_

    quantization = require_extra("torchao.quantization", "torchao")
    report = quantize_(model, quantization.Int8WeightOnlyConfig())
    if not report.replaced:
        raise RefusalError(f"torchao quantizes nothing: {report.skipped[0][1] if report.skipped else 'no nn.Linear'}")
    out.mkdir()
    torch.save(model.state_dict(), out / "state.pt")


def _write_language_model(name: str, engine: str, folder: Path) -> Path:
    """Write a model of transformers with the form in it: readers of compressed-tensors build no other models."""
    import transformers

    torch.manual_seed(0)
    form = FORMS[name]
    if form.family in ("experts", "attention"):
        model: Any = model_of(name) if form.family == "experts" else _llama(transformers)
        if name.startswith("linear attention"):
            pr.linearize_(model, num_features=8, window=16)
    elif form.family == "convolution":
        config = transformers.ViTConfig(
            hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256, num_channels=128,
            image_size=12, patch_size=3,
        )  # fmt: skip
        model = transformers.ViTModel(config)
        patches = model.embeddings.patch_embeddings
        if name != "convolution":
            patches.projection = {
                "convolution, low rank": lambda: pr.nn.LowRankConv2d.from_conv(patches.projection, 64),
                "SKConv2d": lambda: pr.nn.SKConv2d(128, 256, 3, stride=3, low_rank=32, seed=0),
                "convolution, int4": lambda: pr.nn.QuantizedConv2d.from_conv(patches.projection),
            }[name]()
    else:
        model = _llama(transformers)
        if name == "embedding, int4":
            model.set_input_embeddings(pr.nn.QuantizedEmbedding.from_embedding(model.get_input_embeddings()))
        elif form.family == "linear":
            for block in model.model.layers:
                block.mlp.gate_proj, block.mlp.up_proj = form.layer(), form.layer()
    model = model.to(form.dtype).eval()
    small, out = folder / "small", folder / "out"
    pr.save_compressed(model, small)
    _export([str(small), "--to", "compressed-tensors", "--reader", engine, "--out", str(out)])
    x = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        _write_record(folder, name, engine, x, model(x)[0])
    return folder


def _llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=INPUTS, intermediate_size=OUTPUTS, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, mlp_bias=True, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def file_bytes(folder: Path, name: str) -> int:
    """Return the bytes of the layer in the files that the engine reads, without inputs, outputs and tokenizers."""
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    if (folder / "out" / "compiled.pt2").is_file():
        return (folder / "out" / "compiled.pt2").stat().st_size
    if (folder / "out" / "config.json").is_file() and FORMS[name].family == "linear":
        from safetensors import safe_open

        total = 0
        for path in files:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    for key in file.keys():  # noqa: SIM118  not a mapping
                        if re.search(r"\.up_proj\.", key):
                            total += file.get_tensor(key).nbytes
        return total
    return sum(
        path.stat().st_size for path in files if path.suffix in (".safetensors", ".pt2", ".onnx", ".data", ".pt")
    )
