"""Name the CPU, the allocator and the environment variables that a measurement depends on.

An allocator reads its settings when a process starts, so they are environment variables of a fresh process, and the
same for every program.
"""

__all__ = ["MEMORY", "cpu_name", "cpu_slug", "memory", "stamp"]

import os
import platform
import re
from pathlib import Path

import torch

MEMORY: dict[str, dict[str, str]] = {
    "default": {},
    # glibc gives blocks above the first size back to the system at once, and the top of the heap above the second;
    # the next allocation then pays for page faults. CUDA's allocator keeps what is freed.
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)},
}
"""Settings of glibc's allocator under which the benchmarks run, by name."""

_ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
# Not all of KMP_: scikit-learn sets two of them itself.
_OTHER = ("OMP_", "GOMP_", "KMP_AFFINITY", "KMP_BLOCKTIME", "ATEN_CPU_CAPABILITY", "ONEDNN_", "DNNL_")
_LIBRARIES = re.compile(r"(jemalloc|tcmalloc|mimalloc)")
_NOISE = re.compile(r"\((r|tm)\)|\b(cpu|processor|\d+-core)\b")


def cpu_name() -> str:
    """Return the name that the CPU gives itself, such as ``"AMD EPYC 9B14"``; virtual machines often shorten it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_slug(name: str | None = None) -> str:
    """Return the name of a CPU, this one's if not given, as a part of a file name: ``"intel-xeon-2.90ghz"``."""
    name_words = _NOISE.sub(" ", (name or cpu_name()).lower())
    return re.sub(r"[^a-z0-9.]+", "-", name_words).strip("-")


def memory() -> str:
    """Return the key in MEMORY of the allocator and settings of this process, or a description of different ones."""
    found = _variables(_ALLOCATOR)
    known = next((name for name, settings in MEMORY.items() if settings == found), None)
    return known or " ".join(f"{key}={value}" for key, value in found.items())


def stamp() -> dict[str, str | int]:
    """Return the columns that say on which CPU, with which allocator and with which variables rows were measured."""
    cpu = _cpuinfo()
    family = [f"{key.removeprefix('cpu ')} {cpu[key]}" for key in ("cpu family", "model") if key in cpu]
    return {
        "device": cpu_name(),
        "vendor": " ".join([cpu.get("vendor_id", cpu.get("CPU implementer", "")), *family]),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory": memory(),
        "allocator": _allocator(),
        "huge_pages": _huge_pages(),
        "variables": " ".join(f"{key}={value}" for key, value in _variables(_ALLOCATOR + _OTHER).items()),
    }


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that begin so, without folders, which differ from machine to machine."""
    found = {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes) and value}
    if "LD_PRELOAD" in found:
        found["LD_PRELOAD"] = ":".join(Path(path).name for path in re.split("[: ]", found["LD_PRELOAD"]) if path)
    return found


def _allocator() -> str:
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    except OSError:
        paths = set()
    replaced = sorted({Path(path).name for path in paths if _LIBRARIES.search(Path(path).name)})
    return " ".join(replaced) or " ".join(platform.libc_ver()) or platform.system()


def _huge_pages() -> str:
    """Return when the kernel backs memory by huge pages: ``always``, ``madvise`` or ``never``."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", modes)
    return chosen[1] if chosen else "unknown"
