"""Measure every form of a layer in every engine, and write the tables of the pages on engines and on deployment.

A form is written with the public command, and read in a process without Panther. The bytes are those of the file, the
memory is what the process takes more after the model's first call, and times are processor time on one thread beside
the dense layer's in the same process. ``--engines`` measures some engines and keeps the rows of the remaining ones.
"""

__all__ = ["PAGES", "RESULTS_NAME", "Cell", "cells", "engine_cells", "gpu_microseconds", "main", "tables", "why"]

import argparse
import contextlib
import csv
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import hardware
from benchmarks.engines import cases
from benchmarks.harness import RESULTS, ROOT, commit, figure, read_csv

RESULTS_NAME = "engine-forms"
READER = Path(__file__).with_name("reader.py")
PAGES = {"engines": ROOT / "docs/howto/engines.inc", "deploy": ROOT / "docs/howto/deploy.inc"}
# Freed memory goes back to the system, so that the memory of one model is not that of the model before.
_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": "0"}
_MAX_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
_CODED_ERROR = 0.05  # torchao rounds the weights to 8 bits again

# Why a command refuses a form, by words of its message, as the page says it.
REASONS = {
    "zero points": "has zero points (symmetric=False)",
    "not codes": "readers hold quantized linear layers only",
    "low rank without codes": "is of low rank without codes",
    "rounded inputs": "rounds its inputs",
    "correction": "adapters on codes are not known to be right",
    "nothing to pack": "the model has no quantized layer",
    "linear attention": "is linear attention",
    "operators of Panther": "of linear attention, and ONNX has no such operator",
    "needs Panther": "deserializing the saved file",
    "no class": "cannot be plain",
    "has codes": "bits already",
    "no nn.Linear": "no nn.Linear",
    "not converted": "a product of experts, and ONNX has no such operator",
    "no bfloat16 on CPUs": "NOT_IMPLEMENTED",
}


@dataclass(frozen=True)
class Cell:
    """What an engine makes of a form.

    Attributes:
        form: A key of ``cases.FORMS``.
        engine: A key of ``cases.ENGINES``.
        refusal: What the command or the engine says if it does not take the form.
        file_bytes: Bytes of the layer on disk.
        memory_bytes: Bytes of the model in the process, where they were measured.
        error: The error of the output, relative to that of the model in Panther.
        times: For each size of the input, microseconds, and how many times as fast as the dense layer the form is.
    """

    form: str
    engine: str
    refusal: str = ""
    file_bytes: int = 0
    memory_bytes: int = 0
    error: float = 0.0
    times: Mapping[int, tuple[float, float]] | None = None


def engine_cells(engine: str, folder: Path, *, is_timed: bool, forms: Sequence[str] | None = None) -> list[Cell]:
    """Write all forms for an engine, read them in a fresh process, and return what it makes of each."""
    forms = cases.forms_of(engine) if forms is None else forms
    refusals, folders = {}, {}
    for number, form in enumerate(forms):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                folders[form] = cases.write(form, engine, folder / str(number))
        except cases.RefusalError as refusal:
            refusals[form] = str(refusal)
    results: dict[str, dict[str, Any]] = {form: {} for form in folders}
    if engine != "vllm":  # No vLLM has read a folder, see docs/howto/compressed-tensors.rst.
        for mode in ("check", "time")[: 2 if is_timed else 1]:
            readable = [form for form in folders if "failure" not in results[form]]
            for form, result in zip(readable, _read(mode, [folders[form] for form in readable]), strict=True):
                results[form] |= result
    found = []
    for form in forms:
        result = results.get(form, {})
        failure = refusals.get(form) or result.get("failure", "")
        if failure:
            found.append(Cell(form, engine, " ".join(failure.split())))
            continue
        limit = _CODED_ERROR if engine == "torchao" else _MAX_ERROR[_dtype(form)]
        if engine == "transformers":
            limit = 1e-3
        elif form == "int8, rounded inputs":  # Plain layers do not round their inputs.
            limit = _CODED_ERROR
        if result.get("error", 0.0) > limit:
            raise RuntimeError(f"{form!r} in {engine} has an error of {result['error']:.1e}, more than {limit:.0e}")
        times = {int(key): value for key, value in result.items() if key.isdigit()}
        found.append(
            Cell(
                form, engine, "", cases.file_bytes(folders[form], form), int(result.get("memory_bytes", 0)),
                result.get("error", 0.0),
                {size: (value["time_us"], value.get("x dense", 0.0)) for size, value in times.items()},
            )
        )  # fmt: skip
    return found


def _dtype(form: str) -> str:
    return str(cases.FORMS[form].dtype).removeprefix("torch.")


def _read(mode: str, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what the reader, a process without Panther, prints for each folder."""
    command = [sys.executable, "-P", str(READER), mode, *map(str, folders)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (_EXACT_MEMORY if mode == "check" else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(folders):
        raise RuntimeError(f"the reader ended with {done.returncode}: {done.stderr[-2000:]}")
    return lines


def cells(rows: Iterable[Mapping[str, str]]) -> list[Cell]:
    """Return the cells of the committed rows, in the order of forms and engines."""
    by_place: dict[tuple[str, str], Cell] = {}
    for row in rows:
        place = row["form"], row["engine"]
        cell = by_place.get(place) or Cell(
            *place, row["refusal"], int(row["file_bytes"] or 0), int(row["memory_bytes"] or 0),
            float(row["error"] or 0), {},
        )  # fmt: skip
        if row["size"] and cell.times is not None:
            cell = Cell(
                *place, cell.refusal, cell.file_bytes, cell.memory_bytes, cell.error,
                {**cell.times, int(row["size"]): (float(row["time_us"]), float(row["x dense"] or 0))},
            )  # fmt: skip
        by_place[place] = cell
    places = [(form, engine) for form in cases.FORMS for engine in cases.ENGINES]
    return [by_place[place] for place in places if place in by_place]


def _rows(found: Iterable[Cell]) -> list[dict[str, Any]]:
    rows = []
    for cell in found:
        family = cases.FORMS[cell.form].family
        row: dict[str, Any] = {
            "form": cell.form, "family": family, "engine": cell.engine, "refusal": cell.refusal,
            "file_bytes": cell.file_bytes or "", "memory_bytes": cell.memory_bytes or "",
            "error": f"{cell.error:.1e}" if cell.error else "", "size": "", "time_us": "", "x dense": "",
        }  # fmt: skip
        times = cell.times or {}
        rows += [row | {"size": size, "time_us": figure(us), "x dense": figure(x)} for size, (us, x) in times.items()]
        rows += [] if times else [row]
    return rows


def why(refusal: str) -> str:
    """Return the page's words for a refusal.

    Raises:
        KeyError: If ``REASONS`` has no words for it.
    """
    for reason, part in REASONS.items():
        if part in refusal:
            return reason
    raise KeyError(f"benchmarks.engines.deployment.REASONS has no words for: {refusal}")


def gpu_microseconds(form: str, rows: int) -> float | None:
    """Return the predicted time of a linear layer on an H200 in bfloat16, in microseconds; None where it has no kernel.

    It is the larger of bytes over 4.3 TB/s and flops over 790 TFLOP/s, and 2.5 microseconds a launch, the figures of
    docs/benchmarks/kernels.rst. Weights that are not coded have 2 bytes.
    """
    columns, outputs, rank = cases.INPUTS, cases.OUTPUTS, cases.RANK
    dense, ends = columns * outputs, 2 * rows * (columns + outputs)
    factors = rank * (columns + outputs)
    inner = 4 * rows * rank  # written and read
    scales = 3 * outputs * columns / cases.GROUP
    weight_bytes, flops, launches = {
        "dense, bfloat16": (2 * dense, dense, 1),
        "low rank": (2 * factors + inner, factors, 2),
        "low rank, int8": (factors + inner, factors, 2),
        "SKLinear": (factors + factors / 16 + inner, factors, 2),  # half of the factors are signs of one bit
        "int8, symmetric": (dense, dense, 1),
        "int4, symmetric": (dense / 2 + scales, dense, 1),
        "int4, zero points": (dense / 2 + scales, dense, 1),
        "int4 + low rank": (dense / 2 + scales + 32 * (columns + outputs), dense + 32 * (columns + outputs), 1),
    }.get(form, (0, 0, 0))
    if not launches:
        return None
    launches += 2 if form == "int4 + low rank" and rows > 16 else 0  # one kernel has both for up to 16 rows
    return float(max((weight_bytes + ends) / 4.3e12, 2 * rows * flops / 790e12) * 1e6 + 2.5 * launches)


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the text of each file in ``PAGES``."""
    found = {(cell.form, cell.engine): cell for cell in cells(rows)}
    return {"engines": _engine_table(found), "deploy": _deployment_tables(found)}


def _table(title: str, lines: Sequence[Sequence[str]], *, options: str = ":class: lookup") -> str:
    directive = [f".. list-table:: {title}", "   :header-rows: 1", f"   {options}", ""]
    for line in lines:
        directive += [f"   {'* -' if not number else '  -'} {cell}".rstrip() for number, cell in enumerate(line)]
    return "\n".join(directive) + "\n"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}" if size < 1e7 else f"{size / 1e6:.0f}"


def _ratio(x: float) -> str:
    return f"{x:.2g}" if x < 10 else f"{x:.0f}"


_HEADINGS = {
    "panther": "Panther", "linears": "plain torch", "torch.export": "torch.export", "aotinductor": "AOTInductor",
    "onnxruntime": "onnxruntime", "torchao": "torchao, int8", "transformers": "transformers", "vllm": "vLLM",
}  # fmt: skip


def _engine_table(found: Mapping[tuple[str, str], Cell]) -> str:
    def text(cell: Cell | None) -> str:
        if cell is None:
            return "not run"
        if cell.refusal:
            return f"no: {why(cell.refusal)}"
        if not cell.times:
            return f"{_megabytes(cell.file_bytes)}; not run"
        ratios = [_ratio(ratio) for _, ratio in cell.times.values() if ratio]
        return "; ".join([_megabytes(cell.file_bytes), *([f"{ratios[0]}, {ratios[-1]}"] if ratios else [])])

    def part(title: str, engines: Sequence[str]) -> str:  # a page is as wide as six columns
        lines = [["Form", *(_HEADINGS[engine] for engine in engines)]]
        lines += [[form, *(text(found.get((form, engine))) for engine in engines)] for form in cases.FORMS]
        return _table(title, lines)

    names = list(_HEADINGS)
    first = part("Megabytes; times as fast as dense with the smallest and the largest input", names[:5])
    return first + "\n" + part("The same in other libraries", names[5:])


_TIMED = ("panther", "linears", "torch.export", "aotinductor", "onnxruntime", "torchao", "transformers")


# Forms that keep equally much of a weight, and the memory of a form that stays as small as its file.
_KINDS: dict[str, tuple[tuple[str, ...], float]] = {
    "unchanged": (("dense", "dense, bfloat16"), 0.55),
    "8 bits": (("int8, symmetric", "int8, rounded inputs", "dense in torchao"), 0.35),
    "4 bits": (("int4, symmetric", "int4, zero points", "int4 + low rank"), 0.2),
    "low rank": (("low rank", "low rank, int8", "interpolative", "SKLinear"), 0.3),
}


def _place_name(form: str, engine: str) -> str:
    """Return the form, or a name for it in torchao, which rounds it to 8 bits."""
    return f"{form} in torchao" if engine == "torchao" else form


def _fastest(fitting: Sequence[Cell], size: int) -> str:
    best = min(fitting, key=lambda cell: (cell.times or {})[size][0], default=None)
    return f"{best.form}, {_HEADINGS[best.engine]}: {_ratio((best.times or {})[size][1])}" if best else "none"


def _deployment_tables(found: Mapping[tuple[str, str], Cell]) -> str:
    forms = [name for name, form in cases.FORMS.items() if form.family == "linear"]
    sizes = cases.SIZES["linear"]
    dense_bytes = found["dense", "linears"].memory_bytes
    lines = [["Weights", "Memory", *(f"{size} row{'s' * (size > 1)}" for size in sizes)]]
    for kind, (names, share) in _KINDS.items():
        measured = [cell for place, cell in found.items() if _place_name(*place) in names and cell.times]
        for limit, largest in (("any", None), (f"at most {share:.2g} of dense", share * dense_bytes)):
            fitting = [cell for cell in measured if largest is None or 0 < cell.memory_bytes <= largest]
            lines.append([kind, limit, *(_fastest(fitting, size) for size in sizes)])
    choice = _table("What to take: the fastest form, its engine, and times as fast as nn.Linear in float32", lines)
    lines = [["Form", "Rows", *(_HEADINGS[engine] for engine in _TIMED), "H200, predicted"]]
    for form in forms:
        for size in sizes:
            cell_texts = []
            for engine in _TIMED:
                cell = found.get((form, engine))
                times = cell.times if cell is not None else None
                cell_texts.append(f"{times[size][0] / 1e3:.3g} ms" if times else "")
            predicted = gpu_microseconds(form, size)
            lines.append([form, str(size), *cell_texts, f"{predicted:.3g} µs" if predicted else ""])
        memory = [cell.memory_bytes if (cell := found.get((form, engine))) else 0 for engine in _TIMED]
        lines.append([form, "memory", *(f"{_megabytes(size)} MB" if size > 0 else "" for size in memory), ""])
    title = "Time of a call on one CPU core, and the memory of the loaded layer"
    all_times = _table(title, lines, options=":class: lookup compact")
    return f"{choice}\n.. dropdown:: All forms and engines\n\n" + "".join(
        f"   {line}\n" if line else "\n" for line in all_times.splitlines()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the CSV, and write the tables of the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=list(cases.ENGINES), choices=list(cases.ENGINES))
    parser.add_argument("--quick", action="store_true", help="two forms, not timed, nothing written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = RESULTS / f"{RESULTS_NAME}-cpu-{hardware.cpu_slug()}-threads-1.csv"
    stamp = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), **hardware.stamp()}
    stamp |= {"torch": torch.__version__, "python": platform.python_version()}
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            forms = ("dense", "int4, symmetric") if options.quick else None
            found = engine_cells(engine, Path(folder), is_timed=not options.quick, forms=forms)
        for cell in found:
            print(cell, flush=True)
        if options.quick:
            continue
        rows: list[dict[str, Any]] = [*read_csv(path)] if path.exists() else []
        rows = [row for row in rows if row["engine"] != engine] + [row | stamp for row in _rows(found)]
        order = list(cases.FORMS), list(cases.ENGINES)
        rows.sort(key=lambda row: (order[0].index(row["form"]), order[1].index(row["engine"]), int(row["size"] or 0)))
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if not options.quick and {row["engine"] for row in read_csv(path)} == set(cases.ENGINES):
        for name, table in tables(read_csv(path)).items():
            PAGES[name].write_text(table)


if __name__ == "__main__":
    main()
