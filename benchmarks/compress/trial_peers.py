"""Whole files of stock quantizers, beside trial_files.py: what they keep of the first sentence encoder.

Each quantizes the linear layers of a fresh copy in its usual settings, without calibration batches, and all other
tensors are in bfloat16, as users ship them. *GPTQ* is ``pr.compress`` with ``method="activation"`` and one width for
all linear layers, on the batches of trial_files.py, and *GPTQ+embeddings* rounds the embeddings too, as ``pr.compress``
does by default. The product of quanto's int4 fails in bfloat16 on CPUs, so that what it keeps is measured in float32.
*panther* is ``pr.compress(bits=4.5)`` as it is by default, embeddings included. *File MB* are the bytes of
``torch.save(model.state_dict())``, *cpu_s* CPU seconds without measured speeds, *peak_mb* the growth of the process. It
needs ``pip install hqq optimum-quanto torchao``; packages that are missing are left out.
"""

__all__ = ["run"]

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS, Subject
from benchmarks.compress.trial_frontier import rise_mb
from benchmarks.harness import commit, figure, print_table, write_csv
from panther.errors import MissingExtraError, require_extra


def run(quick: bool, methods: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of these methods, by default of all."""
    subject = SUBJECTS["encoder"](quick)
    for name, convert in _converters(subject).items():
        if methods and name not in methods:
            continue
        model, start = copy.deepcopy(subject.model), time.process_time()
        try:
            model, peak_mb = rise_mb(partial(convert, model.bfloat16()))
            model.eval()
        except MissingExtraError as error:
            print(error)
            continue
        seconds = time.process_time() - start
        file_mb = figure(_file_bytes(model) / 1e6)
        if name == "quanto, int4":
            model = convert(copy.deepcopy(subject.model)).eval()
        quality = subject.evaluate(model)
        yield {
            "model": "encoder",
            "method": name,
            "file_mb": file_mb,
            **{key: round(value, 5) for key, value in quality.items()},
            "cpu_s": figure(seconds),
            "peak_mb": peak_mb,
            "row_commit": commit(),
        }


def _converters(subject: Subject) -> dict[str, Callable[[nn.Module], nn.Module]]:
    return {
        "torchao, int8": _torchao,
        "quanto, int8": lambda model: _quanto(model, "qint8"),
        "quanto, int4": lambda model: _quanto(model, "qint4"),
        "hqq, 8 bits": lambda model: _hqq(model, 8),
        "hqq, 4 bits": lambda model: _hqq(model, 4),
        "GPTQ, 8 bits": lambda _: _gptq(subject, "int8"),
        "GPTQ, 4 bits": lambda _: _gptq(subject, "int4"),
        "panther, 4.5 bits": lambda _: _panther(subject),
        "GPTQ+embeddings, 5 bits": lambda _: _gptq(subject, "int5", exclude=None),
        "GPTQ+embeddings, 4 bits": lambda _: _gptq(subject, "int4", exclude=None),
    }


def _torchao(model: nn.Module) -> nn.Module:
    quantization: Any = require_extra("torchao.quantization", "torchao")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def _quanto(model: nn.Module, dtype: str) -> nn.Module:
    quanto: Any = require_extra("optimum.quanto", "optimum-quanto")
    quanto.quantize(model, weights=getattr(quanto, dtype))
    quanto.freeze(model)
    return model


def _hqq(model: nn.Module, bits: int) -> nn.Module:
    quantize: Any = require_extra("hqq.core.quantize", "hqq")
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent = model.get_submodule(name.rpartition(".")[0])
            new = quantize.HQQLinear(layer, config, compute_dtype=torch.bfloat16, device="cpu")
            setattr(parent, name.rpartition(".")[2], new)
    return model


def _gptq(subject: Subject, form: str, exclude: Any = nn.Embedding) -> nn.Module:
    model = copy.deepcopy(subject.model)
    pr.compress(
        model, budget=1.0, calibration=subject.calibration, forms=form, method="activation", seed=0,
        exclude=exclude, allow_slower=True, measure_speed=False,
    )  # fmt: skip
    return model.bfloat16()


def _panther(subject: Subject) -> nn.Module:
    model = copy.deepcopy(subject.model)
    pr.compress(model, bits=4.5, calibration=subject.calibration, seed=0, measure_speed=False)
    return model.bfloat16()


def _file_bytes(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        return Path(folder, "model.pt").stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random model, nothing written")
    parser.add_argument("--methods", nargs="+", help="all is the default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for measured in run(arguments.quick, arguments.methods):
        rows.append(measured)
        print_table(rows[-1:])
        if not arguments.quick:
            write_csv("files-peers-encoder", rows, device="cpu")
