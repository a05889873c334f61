"""Compile every Triton kernel for GPUs that are not there, and check what each takes of them.

The launchers themselves are driven, on meta tensors, under a driver that only names a target; every kernel that they
launch is compiled by Triton and read back from the machine code. A kernel fails that spills registers, takes more
shared memory than the chip has, or multiplies matrices without the matrix units. Exit code 1 names them.

    python -m benchmarks.gpu.kernel_resources [--quick] [--write] [--only TEXT] [--chip NAME] [--processes 2]

What was compiled is in Triton's cache, so that a second run reads it back in a fraction of the time. The version of
Triton is the version that Python finds; ``make .triton-oldest/.stamp`` installs the oldest version that Panther
supports into a folder for PYTHONPATH. The table has the rows of both versions.
"""

__all__ = ["TARGETS", "Target", "Variant", "compile_case", "kernels", "launches", "violations"]

import argparse
import contextlib
import csv
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

# Before Triton is imported: kernels must be compiled, not interpreted, with the fusion that is Triton's default.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import panther.kernels._triton
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from benchmarks.gpu.kernel_cases import CASES, Case
from benchmarks.harness import RESULTS

_TABLE = RESULTS / "kernel_resources.csv"
_SUMMARY = _TABLE.with_stem("kernel_resources_summary")
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_NVIDIA_MMA = re.compile(r"\b((?:HGMMA|QGMMA|HMMA|IMMA|DMMA|QMMA|OMMA|UTC\w*MMA)[\w.]*)")
_AMD_MMA = re.compile(r"\b(v_mfma_\w+)")


@dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    name: str
    gpu: GPUTarget
    shared_limit: int
    """Bytes of shared memory that one program may have."""
    allowed_spills: int = 0
    """Loads and stores of spilled registers that a kernel may have."""


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 166912),
    Target("sm_90", GPUTarget("cuda", 90, 32), 232448),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 65536),
    # The tiles were chosen for sm_90. Triton 3.6 and 3.9 spill up to eight registers here, in different kernels, which
    # take 64 to 128 of 255. Better tiles would have to be chosen by measurements on such a chip.
    Target("sm_100", GPUTarget("cuda", 100, 32), 232448, allowed_spills=8),
)


@dataclass(frozen=True)
class Variant:
    """What one compiled kernel takes; for a kernel that did not compile, ``error`` says why."""

    kernel: str
    case: str
    dtype: str
    precision: str
    target: str
    config: str
    warps: int
    stages: int
    registers: int = 0
    """A thread; on AMD the vector registers, those of the matrix units included."""
    stack_bytes: int = 0
    """Local memory a thread: the stack frame, or AMD's private segment."""
    spills: int = 0
    """Loads and stores of local memory; on AMD, vector registers spilled."""
    scalar_spills: int = 0
    """On AMD, scalar registers kept in lanes of vector registers: a move each, and no memory, so no violation. What
    goes on to memory counts as stack."""
    shared_bytes: int = 0
    shared_limit: int = 0
    dots: int = 0
    """Matrix products in Triton's own representation."""
    matrix_instructions: int = 0
    matrix_instruction: str = ""
    """The most frequent of them."""
    error: str = ""
    triton: str = triton.__version__


class _Driver:
    """Stands for a GPU: it tells the compiler what to compile for, and can run nothing."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> str:
        return self.target.name  # Triton keeps what it compiled by device

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": self.target.shared_limit, "multiprocessor_count": 132}


@contextlib.contextmanager
def _launches_go_to(handle: Callable[..., None]) -> Iterator[None]:
    """Make ``kernel[grid](*args, **kwargs)`` call ``handle(kernel, grid, args, kwargs)`` inside."""

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: handle(kernel, grid, args, kwargs)

    previous_launcher = KernelInterface.__getitem__
    KernelInterface.__getitem__ = getitem
    try:
        yield
    finally:
        KernelInterface.__getitem__ = previous_launcher


def _named_kernels() -> dict[str, Any]:
    """Return by ``module.name`` the functions of ``panther.kernels._triton`` that Triton compiles."""
    found = {}
    package = panther.kernels._triton
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and name.endswith("_kernel"):
                found[f"{info.name}.{name}"] = value
    return found


def kernels() -> set[str]:
    """Return every kernel: the module-level functions whose name ends in ``_kernel``."""
    return set(_named_kernels())


def _name(kernel: Any) -> str:
    return next((name for name, value in _named_kernels().items() if value is kernel), kernel.fn.__name__)


def launches(case: Case, dtype: torch.dtype, precision: str, target: Target = TARGETS[1]) -> set[str]:
    """Return the kernels that a case launches, none of them compiled."""
    found = set()
    driver.set_active(_Driver(target))
    torch.set_float32_matmul_precision(precision)
    with _launches_go_to(lambda kernel, *_: found.add(_name(kernel))):
        case.launch(dtype)
    return found


def compile_case(
    case: Case, dtype: torch.dtype, precision: str, target: Target, only: Sequence[str] | None = None
) -> list[Variant]:
    """Compile all that one launch may run, and read what it takes.

    Args:
        case: What to launch.
        dtype: Of the operands.
        precision: For ``torch.set_float32_matmul_precision``.
        target: The chip.
        only: Names of the kernels to compile; None compiles all.
    """
    found = []

    def compile_all(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if only is None or _name(kernel) in only:
            found.append(_compile(kernel, grid, args, kwargs))

    def _compile(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        variant = Variant(
            _name(kernel), case.name, str(dtype).removeprefix("torch."), precision, target.name, "",
            kwargs.get("num_warps", 0), kwargs.get("num_stages", 0), shared_limit=target.shared_limit,
        )  # fmt: skip
        try:
            compiled = kernel.warmup(*args, grid=grid, **kwargs)
        except Exception as error:  # whatever the compiler throws is the finding
            return replace(variant, error=f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
        return replace(variant, **_read(compiled))

    driver.set_active(_Driver(target))
    torch.set_float32_matmul_precision(precision)
    with _launches_go_to(compile_all), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        case.launch(dtype)
    return found


def _read(compiled: Any) -> dict[str, Any]:
    """Return the resources of a compiled kernel, as fields of a :class:`Variant`."""
    metadata, parameters = compiled.metadata, compiled.src.fn.params
    constants = {index[0]: value for index, value in compiled.src.constants.items() if len(index) == 1}
    config = {p.name: constants.get(p.num) for p in parameters if p.is_constexpr}
    read = _read_nvidia if "cubin" in compiled.asm else _read_amd
    return {
        "config": " ".join(f"{name}={_plain(value)}" for name, value in config.items()),
        "warps": metadata.num_warps,
        "stages": metadata.num_stages,
        "shared_bytes": metadata.shared,
        "dots": len(re.findall(r"\btt\.dot(?:_scaled)?\b", compiled.asm["ttir"])),
        **read(compiled.asm),
    }


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _read_nvidia(asm: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    figures = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(figures["REG"]),
        "stack_bytes": int(figures["STACK"]) + int(figures["LOCAL"]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        **_most_frequent(_NVIDIA_MMA.findall(code)),
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _read_amd(asm: Any) -> dict[str, Any]:
    code = asm["amdgcn"]
    figures = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", code, flags=re.M)}
    return {
        "registers": figures["vgpr_count"],
        "stack_bytes": figures["private_segment_fixed_size"],
        "spills": figures["vgpr_spill_count"],
        "scalar_spills": figures["sgpr_spill_count"],
        **_most_frequent(_AMD_MMA.findall(code)),
    }


def _most_frequent(instructions: list[str]) -> dict[str, Any]:
    (name, _), *_ = Counter(instructions).most_common(1) or [("", 0)]
    return {"matrix_instructions": len(instructions), "matrix_instruction": name}


def violations(variant: Variant) -> list[str]:
    """Return the rules that a compiled kernel breaks, one sentence each."""
    broken = []
    if variant.error:
        broken.append(f"does not compile: {variant.error}")
    allowed = next((target.allowed_spills for target in TARGETS if target.name == variant.target), 0)
    if variant.spills > allowed or (variant.stack_bytes and not allowed):
        broken.append(f"spills registers: {variant.spills} spills, {variant.stack_bytes} bytes of stack")
    if variant.shared_bytes > variant.shared_limit:
        broken.append(f"takes {variant.shared_bytes} bytes of shared memory, and there are {variant.shared_limit}")
    if variant.dots and not variant.matrix_instructions:
        broken.append(f"has {variant.dots} matrix products and no instruction of the matrix units")
    place = f"{variant.kernel} for {variant.target}, {variant.case}, {variant.dtype}, precision {variant.precision}"
    setting = f"{variant.config}, {variant.warps} warps, {variant.stages} stages"
    return [f"{place} ({setting}): {sentence}" for sentence in broken]


Task = tuple[Case, torch.dtype, str, Target, Sequence[str] | None]


def _tasks(cases: Sequence[Case], quick: bool, targets: Sequence[Target]) -> list[Task]:
    if not quick:
        return [
            (case, dtype, precision, target, None)
            for case in cases
            for dtype, precision in case.variants()
            for target in targets
        ]
    tasks: list[Task] = []
    seen: set[str] = set()
    for case in cases:
        for dtype, precision in case.variants():
            if new := launches(case, dtype, precision) - seen:
                tasks.append((case, dtype, precision, TARGETS[1], sorted(new)))
                seen |= new
    return tasks


def _run_task(index: int) -> list[Variant]:
    return compile_case(*_TASKS[index])


_TASKS: list[Task] = []  # filled before the processes fork, as launches cannot be pickled


def compile_all(
    cases: Sequence[Case], quick: bool = False, targets: Sequence[Target] = TARGETS, processes: int = 2
) -> list[Variant]:
    """Compile the cases for all targets, or, if ``quick``, only the first case of each kernel for sm_90."""
    _TASKS[:] = _tasks(cases, quick, targets)
    variants: list[Variant] = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, found in enumerate(pool.imap(_run_task, range(len(_TASKS))), 1):
            variants += found
            case, dtype, precision, target, _ = _TASKS[done - 1]
            progress = f"{done}/{len(_TASKS)} {case.name}, {dtype}, {precision}, {target.name}: {len(found)} compiled"
            print(progress, file=sys.stderr, flush=True)
            for sentence in (sentence for variant in found for sentence in violations(variant)):
                print(sentence, file=sys.stderr, flush=True)
    return variants


def summary(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a row for each kernel and chip: the largest figures over dtypes, configurations and versions of Triton."""
    groups: dict[tuple[str, str], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.kernel, variant.target), []).append(variant)
    return [
        {
            "kernel": kernel,
            "chip": chip,
            "compiled": len(group),
            "registers": max(v.registers for v in group),
            "spills": sum(v.spills + v.stack_bytes for v in group),
            "shared memory, KB": round(max(v.shared_bytes for v in group) / 1024, 1),
            "of": round(group[0].shared_limit / 1024),
            "matrix instructions": ", ".join(
                sorted({re.split(r"[.]|_\d", v.matrix_instruction)[0] for v in group if v.matrix_instruction})
            ),
        }
        for (kernel, chip), group in groups.items()
    ]


def _merge_table(variants: Sequence[Variant]) -> list[Variant]:
    """Return the rows of the table with these variants in place of earlier rows, of the oldest and newest Triton only.

    A variant replaces all rows of its case, chip and version. Cases that are gone lose their rows.
    """
    order = [case.name for case in CASES]
    compiled = {(v.case, v.target, v.triton) for v in variants}
    types = {field.name: int if field.type == "int" or field.type is int else str for field in fields(Variant)}
    rows = []
    if _TABLE.exists():
        with open(_TABLE, newline="", encoding="utf-8") as file:
            rows = [
                Variant(**{name: convert(row[name]) for name, convert in types.items()})  # type: ignore[arg-type]
                for row in csv.DictReader(file)
            ]
    table = [row for row in rows if row.case in order and (row.case, row.target, row.triton) not in compiled]
    table += variants
    versions = sorted({row.triton for row in table}, key=lambda version: [int(part) for part in version.split(".")])
    table = [row for row in table if row.triton in (versions[0], versions[-1])]
    return sorted(table, key=lambda row: (order.index(row.case), versions.index(row.triton)))


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {path}")


def main() -> int:
    """Compile, print one row a kernel and chip, name each violation; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="sm_90 alone, and of each kernel only the first case")
    parser.add_argument("--write", action="store_true", help="write what was compiled into the table of all rows")
    parser.add_argument("--only", metavar="TEXT", default="", help="the cases whose name contains this")
    parser.add_argument("--chip", choices=[target.name for target in TARGETS], help="one chip")
    parser.add_argument("--processes", type=int, default=2, help="processes that compile")
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("--write would write a part of the figures with --quick: give one of them")
    cases = [case for case in CASES if options.only in case.name]
    targets = [target for target in TARGETS if target.name == options.chip] or TARGETS
    variants = compile_all(cases, options.quick, targets, options.processes)
    rows = summary(variants)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items() if value != ""))
    broken = sum(len(violations(variant)) for variant in variants)
    uncompiled = set() if options.only else kernels() - {variant.kernel for variant in variants}
    for name in sorted(uncompiled):
        print(f"{name} is launched by no case", file=sys.stderr)
    if options.write:
        table = _merge_table(variants)
        _write(_TABLE, [asdict(variant) for variant in table])
        _write(_SUMMARY, summary(table))
    print(f"{len(variants)} compiled with triton {triton.__version__}, {broken + len(uncompiled)} violations")
    return 1 if broken or uncompiled else 0


if __name__ == "__main__":
    sys.exit(main())
