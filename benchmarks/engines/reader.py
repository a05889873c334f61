"""Read what ``cases`` wrote in a process without Panther, and print a line of JSON for each folder.

It is a program: ``python -P benchmarks/engines/reader.py check|time FOLDER...``. ``check`` compares outputs and
measures memory, which is exact if ``MALLOC_MMAP_THRESHOLD_`` makes the allocator return what is freed; ``time`` times.
"""

__all__ = ["dense_layer", "sample"]

import gc
import importlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_MIN_SAMPLE_S = 2e-3
_MIN_ROUNDS = 3
_BUDGET_S = 0.05  # of processor time, for a size


def sample(family: str, size: int) -> Tensor:
    """Return an input of ``size`` rows, tokens, images or sequences."""
    generator = torch.Generator().manual_seed(1)
    if family in ("embedding", "experts"):
        sizes, limit = ([size], 8192) if family == "embedding" else ([1, size], 64)
        return torch.randint(1, limit, sizes, generator=generator)
    shape = {"linear": (1024,), "convolution": (128, 28, 28), "attention": (256, 512)}[family]
    return torch.randn(size, *shape, generator=generator)


def dense_layer(family: str) -> nn.Module:
    """Return the dense layer that forms of a family are compared with."""
    if family == "linear":
        return nn.Linear(1024, 4096)
    if family == "embedding":
        return nn.Embedding(8192, 512)
    if family == "convolution":
        return nn.Conv2d(128, 256, 3, padding=1)
    return nn.MultiheadAttention(512, 8, batch_first=True)


def _plain_model(state: dict[str, Tensor], case: dict[str, Any]) -> nn.Module:
    """Build what ``panther export --to linears`` describes: a layer is itself, or a pair."""
    pair = "0.0.weight" in state
    if case["family"] == "linear":
        weights = [state[f"0.{index}.weight"] for index in (0, 1)] if pair else [state["0.weight"]]
        layers: list[nn.Module] = []
        for index, weight in enumerate(weights):
            prefix = f"0.{index}" if pair else "0"
            with torch.device("meta"):
                layers.append(nn.Linear(weight.shape[1], weight.shape[0], f"{prefix}.bias" in state))
    elif case["family"] == "convolution" and pair:
        rank = len(state["0.0.weight"])
        layers = [nn.Conv2d(128, rank, 3, padding=1, bias=False), nn.Conv2d(rank, 256, 1)]
    else:
        layers = [dense_layer(case["family"])]
    model = nn.Sequential(nn.Sequential(*layers) if pair else layers[0])
    model.load_state_dict(state, assign=True)
    return model.eval()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = dense_layer("attention")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return output


def _load(folder: Path, case: dict[str, Any]) -> Callable[[Tensor], Any]:
    engine, out = case["engine"], folder / "out"
    if case["family"] == "experts" and engine in ("torch.export", "aotinductor"):
        # The program has an operator of transformers and returns an output class of it.
        import transformers.models.mixtral.modeling_mixtral  # noqa: F401
    if engine == "torch.export":
        return _by_name(torch.export.load(out / "model.pt2").module(), case)
    if engine == "aotinductor":
        if not (out / "compiled.pt2").is_file():
            program = torch.export.load(out / "model.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=str(out / "compiled.pt2"))
        return _by_name(torch._inductor.aoti_load_package(str(out / "compiled.pt2")), case)
    if engine == "onnxruntime":
        onnxruntime: Any = importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(out / "model.onnx", options, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        mask = {name: torch.ones for name in names if "mask" in name}
        return lambda x: session.run(
            None, {name: (mask[name](x.shape, dtype=torch.int64) if name in mask else x).numpy() for name in names}
        )
    if engine == "panther":
        return _load_panther(out, case)
    if case["family"] == "experts":
        return _load_experts(out)
    if engine == "torchao":
        importlib.import_module("torchao.quantization")  # so that torch.load can make its tensors
        state = torch.load(out / "state.pt", weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(out / "model.safetensors")
    if case["family"] == "attention":
        model = _Attention()
        model.load_state_dict(state, assign=True)
        return model.eval()
    return _plain_model(state, case)


def _by_name(program: Any, case: dict[str, Any]) -> Callable[[Tensor], Any]:
    """Return a function of the tensor alone: programs of ``panther export`` take their inputs by name."""
    if case["family"] == "experts":
        return lambda x: program(input_ids=x, attention_mask=torch.ones_like(x))
    return lambda x: program(input=x)


def _load_experts(out: Path) -> nn.Module:
    import transformers
    from safetensors.torch import load_file

    config = transformers.MixtralConfig.from_pretrained(out.parent / "small")
    model = transformers.MixtralModel(config)
    model.load_state_dict(load_file(out / "model.safetensors"))
    return model.eval()


def _load_panther(out: Path, case: dict[str, Any]) -> nn.Module:
    import panther as pr

    if case["family"] == "experts":
        return pr.from_pretrained(out).eval()
    if case["family"] == "attention":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from benchmarks.engines import architectures

        model: nn.Module = getattr(architectures, case["architecture"])()
    else:
        model = nn.Sequential(dense_layer(case["family"])).to(getattr(torch, case["dtype"]))
    return pr.load_compressed(out, model).eval()


def _language_model(folder: Path, x: Tensor) -> tuple[Any, Tensor]:
    """Load a folder of compressed-tensors, run it, which expands its codes, and return its layer and its output."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    output = model(x)[0]
    if (folder / "out" / "adapter").is_dir():
        import peft

        model = peft.PeftModel.from_pretrained(model, folder / "out" / "adapter").eval()
        output = model(x)[0]
    layers = [module for name, module in model.named_modules() if name.endswith("up_proj")]
    return layers[0], output


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        if not isinstance(output, (list, tuple, dict)) and not hasattr(output, "values"):
            output = torch.from_numpy(output)
        else:
            output = next(iter(output.values() if hasattr(output, "values") else output))
    return output


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _dense_call(case: dict[str, Any]) -> Callable[[Tensor], Any] | None:
    if case["family"] == "experts":
        return None
    layer = dense_layer(case["family"]).eval()
    if case["family"] == "attention":
        return lambda x: layer(x, x, x, need_weights=False)
    return layer


def _timed(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each call in each round, of processor time, with all calls in turns."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        repeats[name] = max(1, round(_MIN_SAMPLE_S / max(time.process_time() - start, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.process_time()
    while len(samples[next(iter(calls))]) < _MIN_ROUNDS or time.process_time() - begun < _BUDGET_S:
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.process_time() - start) / repeats[name])
    return {name: tuple(values) for name, values in samples.items()}


@torch.no_grad()
def _checked(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return the relative error of the output, and the bytes that the model takes after its first call."""
    from safetensors.torch import load_file

    compared = load_file(folder / "compared.safetensors")
    x, y = compared["x"], compared["y"].double()
    if case["engine"] == "transformers":
        _, output = _language_model(folder, x)
        return {"error": float((output.double() - y).norm() / y.norm())}
    _first_call(folder, case, x)  # It loads the engine, and its memory is free again afterwards.
    gc.collect()
    first_bytes = _resident_bytes()
    call = _first_call(folder, case, x)
    gc.collect()
    memory = _resident_bytes() - first_bytes
    output = _first(call(x)).double()
    _LOADED.append(call)  # so that the next model does not use its memory
    return {"error": float((output - y).norm() / y.norm()), "memory_bytes": memory}


_LOADED: list[Any] = []


def _first_call(folder: Path, case: dict[str, Any], x: Tensor) -> Any:
    call = _load(folder, case)
    call(x[:, :1] if case["family"] == "experts" else x[:1])
    return call


@torch.no_grad()
def _times(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each size, of the form and of the dense layer beside it."""
    if case["engine"] == "transformers":
        call: Any = _language_model(folder, torch.arange(1, 25).view(2, 12))[0]
    else:
        call = _load(folder, case)
    dense, dtype = _dense_call(case), getattr(torch, case["dtype"])
    result = {}
    for size in case["sizes"]:
        x = sample(case["family"], size)
        cast = x.to(dtype) if x.is_floating_point() else x
        calls: dict[str, Callable[[], object]] = {"form": lambda cast=cast: call(cast)}  # type: ignore[misc]
        if dense is not None:
            calls["dense"] = lambda x=x: dense(x)  # type: ignore[misc]
        samples = _timed(calls)
        times = {"time_us": statistics.median(samples["form"]) * 1e6}
        if dense is not None:
            ratios = [b / a for a, b in zip(samples["form"], samples["dense"], strict=True)]
            times |= {"dense_us": statistics.median(samples["dense"]) * 1e6, "x dense": statistics.median(ratios)}
        result[str(size)] = times
    return result


def main(mode: str, folders: list[str]) -> None:
    """Print one line for each folder, in their order."""
    torch.set_num_threads(1)
    for folder in map(Path, folders):
        case = json.loads((folder / "case.json").read_text())
        try:
            result = _times(folder, case) if mode == "time" else _checked(folder, case)
        except Exception as error:  # The line is the answer; the process reads further folders.
            result = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        if case["engine"] != "panther" and "panther" in sys.modules:
            result = {"failure": "the reader imported Panther"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
