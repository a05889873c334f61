"""``panther doctor``: versions, devices and extras of this machine, and how to install those that are missing."""

__all__ = ["add_parser", "run"]

import argparse
import os
import platform
import re
from collections import defaultdict
from importlib import metadata
from typing import Any

from panther._text import counted, format_table
from panther._version import __version__

_DISTRIBUTION = "panther-sketch"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("doctor", description="Show torch, devices, backends and extras, found or missing.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    import torch

    rows = [
        ("panther", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", str(torch.__version__)),
        ("cpu", f"{counted(os.cpu_count() or 1, 'core')}, torch uses {counted(torch.get_num_threads(), 'thread')}"),
        ("cuda", _cuda()),
        ("distributed", _backends()),
        ("triton", _version("triton") or "missing"),
        ("kernels", _kernels()),
    ]
    for extra, names in sorted(_extras().items()):
        versions = {name: _version(name) for name in names}
        found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        missing = ", ".join(name for name, version in versions.items() if not version)
        state = f"found: {found}" if not missing else f"missing {missing}: pip install '{_DISTRIBUTION}[{extra}]'"
        rows.append((f"extra {extra}", state))
    print(format_table(rows))
    return 0


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda
        return "no device: " + (f"torch is built for CUDA {build}" if build else "torch is built for the CPU only")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{counted(len(names), 'device')}: {', '.join(names)}"


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "not built into this torch"
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(f"{name} {'found' if there else 'missing'}" for name, there in found.items())


def _kernels() -> str:
    from panther import kernels

    try:
        return kernels.backend()
    except (RuntimeError, ValueError) as error:
        return str(error)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> dict[str, list[str]]:
    """Return the distributions that each extra requires, from the installed metadata."""
    extras = defaultdict(list)
    for requirement in metadata.requires(_DISTRIBUTION) or ():
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name:
            extras[extra[1]].append(name[0])
    return extras
