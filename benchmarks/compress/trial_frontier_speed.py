"""Latency and memory of the models that trial_frontier.py compressed, end to end, with one CPU thread.

Forwards without gradients, of inputs without padding; ratios are to the dense model in float32, 2 is twice as fast.
*int8, torch dynamic* is ``torch.ao.quantization.quantize_dynamic`` of the same layers. The rows that start with a
method's name are of the compressed models in trial_frontier.py's cache, which is to run first, as far as they are
there; low-rank ones in float32 are fused (``pr.fuse_``). ``per_s`` is tokens, or images, a second; of a language model,
1 x 1 is a step of generation with an empty cache. ``memory_mb`` is by how much a process's memory rises when the model
is copied and run once: weights, what its layers unpack, and activations.

*encoder-packed* is the encoder as a whole file, compressed here to 4.5 bits with its embeddings, as a user gets it by
default and without a compiler (``pr.pack_``), in float32 and in bfloat16.
"""

__all__ = ["run"]

import argparse
import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS, Subject
from benchmarks.compress.trial_frontier import kept_model, rise_mb
from benchmarks.harness import figure, interleave, print_table, write_csv
from benchmarks.layers.quantized import torch_alone

KEPT = {
    "encoder": (
        "low rank, 50% of the numbers", "pivot rows, 50% of the numbers", "panther, by time, 1.5 times as fast",
        "low rank, int8, 4.25 bits", "GPTQ, int8",
        "GPTQ, int4", "panther, 8 bits", "panther, 4.25 bits", "panther, 3.25 bits",
        "panther, int8 inputs, 4.25 bits", "panther, int8 inputs, 3.25 bits",
    ),
    "encoder-3": ("low rank, 50% of the numbers", "pivot rows, 50% of the numbers", "GPTQ, int8", "panther, 4.25 bits"),
    "smollm2": ("low rank, 75% of the numbers", "low rank, 50% of the numbers"),
    "images": ("low rank, 75% of the numbers", "low rank, 50% of the numbers", "GPTQ, int8", "panther, 4.25 bits"),
    "encoder-packed": (),
}  # fmt: skip


@torch.no_grad()
def run(task: str, quick: bool, cache: Path | None) -> list[dict[str, Any]]:
    """Return a row for each form and each size of the input."""
    subject = SUBJECTS[task.removesuffix("-packed")](quick)
    forms = _packed_forms(subject) if task == "encoder-packed" else _forms(task, subject, cache)
    rows: list[dict[str, Any]] = []
    sizes = subject.inputs
    if task == "encoder-packed" and not quick:
        most = sizes[32, 32]
        sizes = {(count, 32): {key: x[:count] for key, x in most.items()} for count in (1, 8, 32)}
    for (batch, tokens), inputs in sizes.items():
        memory = {}
        for name, model in forms.items():
            memory[name] = rise_mb(partial(_copy_and_run, model, inputs))[1]
        calls = {name: partial(model, **inputs) for name, model in forms.items()}
        timings = interleave(calls, budget_s=0.1 if quick else 20, min_rounds=2 if quick else 5)
        for name, timing in timings.items():
            row = {"model": task, "form": name, "batch": batch, "tokens": tokens}
            row |= {"time_ms": figure(1e3 * timing.median_s), "per_s": figure(batch * tokens / timing.median_s)}
            row["x float32"] = figure(timing.ratio_to(timings["float32"]))
            rows.append(row | {"memory_mb": memory[name], "stored_mb": figure(_stored_bytes(forms[name]) / 1e6)})
        print_table(rows[-len(forms) :])
    return rows


def _forms(task: str, subject: Subject, cache: Path | None) -> dict[str, nn.Module]:
    forms: dict[str, nn.Module] = {"float32": subject.model, "bfloat16": _Bfloat16(copy.deepcopy(subject.model))}
    if task != "images":  # torch has dynamic int8 for linear layers alone
        forms["int8, torch dynamic"] = _torch_int8(subject)
    if cache is not None:
        for name in KEPT[task]:
            if (model := kept_model(task, name, subject, cache)) is not None:
                forms[name] = model.eval()
                if any(isinstance(module, pr.nn.SKLinear) for module in model.modules()):
                    pr.fuse_(model)
    return forms


def _packed_forms(subject: Subject) -> dict[str, nn.Module]:
    forms: dict[str, nn.Module] = {"float32": subject.model, "bfloat16": _Bfloat16(copy.deepcopy(subject.model))}
    forms["int8, torch dynamic"] = _torch_int8(subject)
    model = copy.deepcopy(subject.model)
    with torch.enable_grad():
        report = pr.compress(model, bits=4.5, calibration=subject.calibration[:16], seed=0, measure_speed=False)
    print(report)
    for name, other in (("float32", copy.deepcopy(model)), ("bfloat16", _Bfloat16(copy.deepcopy(model)))):
        forms[f"4.5 bits, {name}"] = other
        with torch_alone():
            pr.pack_(without := copy.deepcopy(other), rows=32)
        forms[f"4.5 bits, {name}, no compiler"] = _WithoutKernel(without)
    return forms


class _WithoutKernel(nn.Module):
    """A model that never had the compiled kernel, because a layer keeps a prepared call of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        with torch_alone():
            return self.model(**inputs)


def _copy_and_run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    copy.deepcopy(model)(**inputs)


def _stored_bytes(model: nn.Module) -> int:
    """Return the bytes of what is saved; torch's quantized layers save tuples."""
    entries: list[Any] = list(model.state_dict().values())
    flat = [part for entry in entries for part in (entry if isinstance(entry, tuple) else (entry,))]
    return sum(part.numel() * part.element_size() for part in flat if isinstance(part, torch.Tensor))


class _Bfloat16(nn.Module):
    """A model in bfloat16 that takes float32 inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**{key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()})


def _torch_int8(subject: Subject) -> nn.Module:
    model = copy.deepcopy(subject.model)
    part = subject.options["include"].partition(".")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and torch itself has not replaced it
        quantized = torch.ao.quantization.quantize_dynamic(getattr(model, part), {nn.Linear}, dtype=torch.qint8)
    setattr(model, part, quantized)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panther" / "trials"
    parser.add_argument("--task", choices=list(KEPT), nargs="+", default=list(KEPT))
    parser.add_argument("--cache", type=Path, default=folder, help="folder in which trial_frontier.py left its models")
    parser.add_argument("--quick", action="store_true", help="small random models, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.task:
        found = run(name, arguments.quick, None if arguments.quick else arguments.cache)
        if found and not arguments.quick:
            print(f"written to {write_csv(f'frontier-speed-{name}', found, device='cpu')}")
