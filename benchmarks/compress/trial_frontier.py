"""pr.compress on pretrained models: quality against bits a weight, beside quantization and SVD of equal bytes.

The models and what is measured are described in frontier_tasks.py. Every row compresses a fresh copy with one CPU
thread. *Bits a weight* are 8 times the bytes on disk of the layers' weights, with scales, zero points and factors, over
the number of the dense weights; biases, embeddings and norms stay as they are and do not count. *nearest* is rounding
to the nearest code in groups of 128 columns (int8: one scale a row), the range of each group searched; *GPTQ* is the
same with error feedback in the metric of the inputs, ``method="activation"``; *SVD* is a truncated SVD of the weights,
its factors in float32 or int8; *panther* is what pr.compress chooses among all quantized forms, and *low rank* and *low
rank, int8* are its two-sided fit with such factors, *pivot rows* the same in the form "interpolative", at a higher rank
in as many bytes; *by time* asks for a speed in place of a size; *int8 inputs* rounds inputs while the model runs, too.
*+ healing* is a distillation: 500 steps on the same batches for quantized layers; for low-rank ones, which have more to
learn, 640 steps on four times as many others besides. No row uses labels.

Times are CPU seconds of compressing, healing included. ``peak_mb`` is by how much the process's memory rose at most.
Rows are kept in the cache: a row is computed again if its options changed, or with --again.
"""

__all__ = ["CASES", "Case", "kept_model", "rise_mb", "run"]

import argparse
import collections
import copy
import ctypes
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS, Subject
from benchmarks.harness import commit, figure, print_table, write_csv
from panther.errors import NumericalWarning, PerformanceWarning

FORMS = (
    "int8_low_rank", "int8", "int6", "int5", "int4", "int3", "int2", "int5+low_rank", "int4+low_rank", "int3+low_rank",
)  # fmt: skip
WIDTHS = (8, 4, 3)
BITS = (3.25, 3.75, 4.25, 4.75, 6.0, 8.0)
FRACTIONS = (0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Case:
    """One way to compress: a row of the table.

    Attributes:
        method: As in the module's description.
        size: What was asked for: a width, bits a weight, or a fraction of the numbers.
        options: Of ``pr.compress``.
        heal_steps: Of healing, if any.
        further: Batches to compress with besides those of all rows.
    """

    method: str
    size: str
    options: dict[str, Any] = field(default_factory=dict)
    heal_steps: int = 0
    further: int = 0

    @property
    def name(self) -> str:
        """Return a name that is unique among the cases of a model."""
        return f"{self.method}, {self.size}"


def _low_rank(fractions: tuple[float, ...], pivots: bool = False) -> list[Case]:
    cases = []
    for kept in fractions:
        size = f"{kept:.0%} of the numbers"
        cases.append(Case("SVD", size, {"method": "svd", "budget": kept, "forms": "low_rank"}))
        cases.append(Case("low rank", size, {"budget": kept, "forms": ("dense", "low_rank")}))
        if pivots:
            cases.append(Case("pivot rows", size, {"budget": kept, "forms": ("dense", "interpolative")}))
    return cases


def _quantized(bits: tuple[float, ...], depthwise: bool = False) -> list[Case]:
    """Return the rows with codes and factors in int8; ``depthwise`` layers of 9 or 25 columns stay dense with those."""
    low_rank = ("dense", "int8_low_rank") if depthwise else "int8_low_rank"
    cases = []
    for width in WIDTHS:  # every layer in this width, whose scales take less than the bits that are left for them
        most = width + (0.5 if depthwise else 0.25)
        own = {"forms": f"int{width}", "bits": most, "group_size": None if width == 8 else 128}
        cases.append(Case("nearest", f"int{width}", {"method": "svd", **own}))
        cases.append(Case("GPTQ", f"int{width}", {"method": "activation", **own}))
    cases += [Case("panther", f"{each:g} bits", {"bits": each, "forms": FORMS}) for each in bits]
    for each in (8.0, 6.0, 4.25):
        size = f"{each:g} bits"
        cases.append(Case("SVD, int8", size, {"method": "svd", "bits": each, "forms": low_rank}))
        cases.append(Case("low rank, int8", size, {"bits": each, "forms": low_rank}))
    return cases


def _healed(cases: list[Case], names: tuple[str, ...], steps: int = 500, further: int = 0) -> list[Case]:
    """Return those of the cases with such names, healed."""
    found = [case for case in cases if case.name in names]
    return [replace(case, method=f"{case.method} + healing", heal_steps=steps, further=further) for case in found]


_ENCODER = [*_quantized(BITS), *_low_rank(FRACTIONS, pivots=True)]
_PIVOTS = ("pivot rows, 50% of the numbers", "pivot rows, 25% of the numbers")
CASES: dict[str, list[Case]] = {
    "encoder": [
        *_ENCODER,
        *(
            Case("panther, int8 inputs", f"{bits:g} bits", {"bits": bits, "forms": FORMS, "activations": "int8"})
            for bits in (3.25, 4.25, 6.0)
        ),
        Case("panther, by time", "1.5 times as fast", {"speedup": 1.5, "forms": None, "measure_speed": True}),
        *_healed(_ENCODER, ("panther, 3.25 bits",)),
        *_healed(_ENCODER, _PIVOTS, 640, 128),
    ],
    "encoder-3": _ENCODER,
    "smollm2": _low_rank((0.9, 0.75, 0.5)),
    "images": [*_quantized(BITS, depthwise=True), *_low_rank(FRACTIONS)],
}
QUICK: dict[str, list[Case]] = {
    "encoder": [case for case in _quantized((4.25,)) if case.name.endswith((", int4", "panther, 4.25 bits"))],
    "encoder-3": _healed(_low_rank((0.5,)), ("low rank, 50% of the numbers",)),
    "smollm2": _low_rank((0.5,)),
    "images": [
        *_low_rank((0.5,)),
        *(case for case in _quantized((6.0,), True) if "int4" in case.size or "6" in case.size),
    ],
}


def run(
    task: str, quick: bool, cache: Path | None, again: str = "", only: Sequence[str] = ("*",)
) -> list[dict[str, Any]]:
    """Return the rows of a task: those in the cache, unless ``again`` matches their names, and others computed.

    Only rows whose names match a glob of ``only`` are computed; others are left out if they are not in the cache.
    """
    subject, rows = SUBJECTS[task](quick), []
    original = subject.evaluate(subject.model)
    rows.append(_row(task, Case("original", "float32"), original, {"bits": 32.0, "kept": 1.0}))
    for case in (QUICK if quick else CASES)[task]:
        file = None if cache is None else _file(cache, task, case)
        if file is not None and file.exists() and not (again and fnmatch(case.name, again)):
            cached = json.loads(file.read_text(encoding="utf-8"))
            rows.append({column: cached.get(column, "") for column in rows[0]})  # it may be of an earlier version
            continue
        if not any(fnmatch(case.name, glob) for glob in only):
            continue
        row, model = _compress(task, subject, case, quick)
        rows.append(row)
        print_table(rows[-1:])
        if file is not None:
            pr.save_compressed(model, file.with_suffix(""))
            file.write_text(json.dumps(row), encoding="utf-8")
    return rows


def kept_model(task: str, name: str, subject: Subject, cache: Path) -> nn.Module | None:
    """Return the compressed model of a row from the cache; None if that was not computed."""
    (case,) = (case for case in CASES[task] if case.name == name)
    file = _file(cache, task, case)
    return pr.load_compressed(file.with_suffix(""), copy.deepcopy(subject.model)) if file.exists() else None


def _file(cache: Path, task: str, case: Case) -> Path:
    content = repr((case.name, case.options, case.heal_steps, *[case.further] * (case.further > 0)))
    file_name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    return cache / f"frontier-{task}" / f"{file_name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"


def _row(task: str, case: Case, quality: dict[str, float], figures: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": task, "method": case.method, "size": case.size}
    row |= {"bits": "", "kept": ""} | {name: round(value, 5) for name, value in quality.items()}
    row |= dict.fromkeys(("rel_error", "cpu_s", "peak_mb", "forms"), "")
    return row | figures | {"row_commit": commit()}


def _compress(task: str, subject: Subject, case: Case, quick: bool) -> tuple[dict[str, Any], nn.Module]:
    """Compress a copy; return the row and the model."""
    model = copy.deepcopy(subject.model)
    steps = min(case.heal_steps, 4) if quick else case.heal_steps
    heal = pr.HealConfig(max_steps=steps) if steps else None
    batches = [*subject.calibration, *subject.further(1 if quick else case.further)] if case.further else None
    arguments: dict[str, Any] = {"calibration": batches or subject.calibration, "seed": 0, "measure_speed": False}
    arguments["heal"] = heal
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # a question of size here: times have a table of their own
        if quick:
            warnings.simplefilter("ignore", NumericalWarning)  # few positions
        report, peak_mb = rise_mb(lambda: pr.compress(model, **arguments | subject.options | case.options))
    seconds = time.process_time() - start
    for note in report.notes:
        print(f"note: {note}")
    error = report.measured_error if heal is None else report.healed_error
    kept = report.eligible_ratio
    weights = sum(layer.bytes_before for layer in report.layers) // 4  # float32
    counted = collections.Counter(layer.form for layer in report.layers)
    figures = {
        "bits": round(8 * report.eligible_bytes_after / weights, 3),
        "kept": round(kept, 4),
        "rel_error": "" if error is None else figure(error),
        "cpu_s": figure(seconds),
        "peak_mb": peak_mb,
        "forms": " ".join(f"{form}:{count}" for form, count in counted.most_common()),
    }
    return _row(task, case, subject.evaluate(model.eval()), figures), model


def rise_mb(call: Callable[[], Any]) -> tuple[Any, float | str]:
    """Return what a call returns, and by how many MB the process's memory rose at most; empty where Linux is not."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest mark starts again from here
    except OSError:
        return call(), ""
    first_mb = _memory("VmRSS")
    return call(), figure(max(_memory("VmHWM") - first_mb, 1e-3))


def _memory(name: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panther" / "trials"
    parser.add_argument("--task", choices=list(SUBJECTS), nargs="+", default=list(SUBJECTS))
    parser.add_argument("--cache", type=Path, default=folder, help="folder of rows and compressed models")
    parser.add_argument("--again", default="", help="glob of names of rows to compute again, such as 'panther*'")
    parser.add_argument("--only", nargs="+", default=["*"], help="globs of names of rows to compute")
    parser.add_argument("--quick", action="store_true", help="small random models, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.task:
        cache = None if arguments.quick else arguments.cache
        found = run(name, arguments.quick, cache, arguments.again, arguments.only)
        print_table(found)
        if not arguments.quick:
            print(f"written to {write_csv(f'frontier-{name}', found, device='cpu')}")
