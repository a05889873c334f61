"""``panther doctor``: versions, devices and extras of this machine, and how to install missing extras.

With ``--nodes`` it checks the nodes of a run and the connections between them, before the run is started.
"""

__all__ = ["add_parser", "run"]

import argparse
import dataclasses
import json
import os
import platform
import re
import tempfile
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

from panther._text import counted, format_table
from panther._version import __version__
from panther.cli._arguments import add_option, positive_float
from panther.errors import PantherError, install_command
from panther.files import write_json

_DISTRIBUTION = "panther-sketch"
_MESSAGES = (2**10, 2**20, 2**24)


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "doctor",
        description="Show torch, devices, backends and extras, found or missing; with --nodes, check between nodes.",
        allow_abbrev=False,
    )
    help_text = "check interfaces and versions of all nodes, and time collectives between them; takes the options of "
    help_text += "panther launch too, such as --nnodes, --node-rank and --rdzv-endpoint"
    parser.add_argument("--nodes", action="store_true", help=help_text)
    add_option(parser, "--timeout", positive_float, "to wait for ranks, each step (default: 30)", metavar="SECONDS")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # the launcher of this node reads it
    parser.set_defaults(run=run, launch_options=None)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    if args.nodes:
        args.timeout = args.timeout or 30.0
        return _check_nodes(args)
    if args.timeout is not None:
        raise PantherError("--timeout is an option of the check between nodes: add --nodes")
    if args.launch_options:
        raise PantherError(f"{' '.join(args.launch_options)}: only with --nodes are these passed to panther launch")
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
        installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        missing = ", ".join(name for name, version in versions.items() if not version)
        state = f"found: {installed}" if not missing else f"missing {missing}: {install_command(extra)}"
        rows.append((f"extra {extra}", state))
    print(format_table(rows))
    return 0


def _check_nodes(args: argparse.Namespace) -> int:
    """Check between the ranks of a run; start the ranks first, unless a launcher has started them."""
    if "RANK" not in os.environ:
        return _launch_checks(args)
    import torch.distributed as dist

    from panther.distributed.comm.bandwidth import profile_communication_overhead
    from panther.distributed.comm.process_group import ranks_from_environment, shutdown, start_group
    from panther.distributed.comm.store import open_store
    from panther.distributed.preflight import check_nodes

    rank, world_size = ranks_from_environment()
    meeting = open_store(rank, world_size, args.timeout)
    report = check_nodes(meeting, rank, world_size)
    if rank == 0:
        print(report.text, flush=True)
    if args.result is not None and os.environ.get("LOCAL_RANK") == "0":
        write_json(args.result, dataclasses.asdict(report) | {"has_rank_0": rank == 0})
    if report.faults:
        return 0 if args.result is not None else 1
    # Whether gloo or NCCL reaches all ranks shows only in a group that communicates.
    store = dist.PrefixStore("group", meeting.store)
    group_meeting = dataclasses.replace(meeting, store=store, deadline=time.monotonic() + args.timeout)
    start_group(rank, world_size, os.environ.get("PANTHER_BACKEND"), args.timeout, group_meeting)
    profile_communication_overhead(_MESSAGES, repetitions=5)
    shutdown()
    return 0


def _launch_checks(args: argparse.Namespace) -> int:
    """Start the ranks of this node. Rank 0 prints the report; on a node without rank 0, this process prints it."""
    from panther.cli import launch

    with tempfile.TemporaryDirectory(prefix="panther-doctor-") as folder:
        result = Path(folder, "report.json")
        arguments = ["--nodes", f"--timeout={args.timeout}", f"--result={result}"]
        status = launch.start([*args.launch_options, "--module", "panther", "doctor", *arguments], "doctor")
        if status or not result.exists():
            return status
        report = json.loads(result.read_text(encoding="utf-8"))
    if not report["has_rank_0"]:
        print(report["text"])
    return 1 if report["faults"] else 0


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
    availability = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(f"{name} {'found' if is_available else 'missing'}" for name, is_available in availability.items())


def _kernels() -> str:
    from panther import kernels

    try:
        name = kernels.backend()
    except (RuntimeError, ValueError) as error:
        return str(error)
    on_cpu = "compiled" if kernels.has_compiled_kernel() else name
    return f"{name}; quantized products and sparse sketches on the CPU: {on_cpu}"


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
