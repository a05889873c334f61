"""The command line of ``panther launch``: torchrun's own parser, with one more option, and checks before the work."""

__all__ = ["Job", "environment", "parse_arguments", "prepare"]

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig as TorchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser, parse_min_max_nnodes

from panther.distributed.comm.process_group import _check_backend
from panther.distributed.launcher._logs import RankLogs, new_folder
from panther.errors import DistributedError

LOG_DIR = "panther-logs"

# Also understood after the script, if none stands before it.
_TRAILING = {
    "backend", "master_addr", "master_port", "max_restarts", "nnodes", "node_rank", "nproc_per_node", "rdzv_backend",
    "rdzv_endpoint", "rdzv_id",
}  # fmt: skip
_USAGE = """panther launch [options] script.py [arguments of the script]
       panther launch script.py [arguments of the script] [options]
       panther launch [options] -m module [arguments of the module]"""
_EPILOG = (
    "Options and their meaning are torchrun's, and --backend. They stand before the script, or all after it; then only "
    "the names of processes, nodes, rendezvous, restarts and backend are taken from its arguments, and what follows "
    f"-- never is. Output goes to {LOG_DIR}/, a file for each rank; that of rank 0 is shown too."
)


@dataclass(frozen=True)
class Job:
    """What to start, and how."""

    config: TorchConfig
    command: str
    arguments: tuple[str, ...]
    name: str
    """Of the script, as the user wrote it."""
    nodes: tuple[int, int]
    """Least and most."""
    node_rank: int | None
    backend: str | None
    logs: LogsSpecs
    folder: Path | None
    """Where the logs of this run are, None if torch's own options say."""
    shown: frozenset[int] | None
    """Local ranks to show on the terminal; None is rank 0 of the world."""
    own_rendezvous: bool
    """Whether torch's registry has to make it, for a backend that the user named."""

    @property
    def world_sizes(self) -> tuple[int, int]:
        """Least and most."""
        least, most = self.nodes
        return least * self.config.nproc_per_node, most * self.config.nproc_per_node

    @property
    def asked(self) -> str:
        """The size of the world in words."""
        nodes = ":".join(map(str, sorted(set(self.nodes))))
        sizes = ":".join(map(str, sorted(set(self.world_sizes))))
        return f"--nnodes {nodes} times --nproc-per-node {self.config.nproc_per_node} = {sizes}"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of ``panther launch``.

    Raises:
        SystemExit: As argparse does, with 2 on a wrong option and 0 for ``--help``.
    """
    parser = get_args_parser()
    parser.prog, parser.usage, parser.epilog = "panther launch", _USAGE, _EPILOG
    parser.description = "Start a script on several processes, on one or several nodes, as torchrun does."
    parser.add_argument(
        "--backend", metavar="NAME", help="gloo or nccl, for panther.distributed.init() (default: it decides)"
    )
    for name in ("node_rank", "rdzv_backend"):  # to tell the default from what was asked for
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    parser.set_defaults(parser=parser)
    names = {
        option for action in parser._actions if action.dest in _TRAILING for option in action.option_strings
    }  # exactly as spelled
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        ours, theirs = _split(argv[1:], names)
        args = parser.parse_args([*ours, argv[0]])
        args.training_script_args = theirs
        return args
    args = parser.parse_args(argv)
    for name in sorted({text.partition("=")[0] for text in args.training_script_args} & (names - {"--backend"})):
        print(
            f"panther launch: note: {name} after {args.training_script} goes to the script: put all options before it, "
            "or all after it",
            file=sys.stderr,
        )
    return args


def _split(arguments: list[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Take the launcher's options out of a script's arguments."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            theirs += rest
        elif argument.partition("=")[0] not in names:
            theirs.append(argument)
        else:
            ours.append(argument)
            if "=" not in argument:
                ours += [value for value in [next(rest, None)] if value is not None]
    return ours, theirs


def prepare(args: argparse.Namespace, name: str | None = None) -> Job:
    """Check what was asked for and make the folder of the logs.

    Args:
        args: From :func:`parse_arguments`.
        name: What to call the run, if not by the script's name.

    Raises:
        DistributedError: If it cannot be done, in a sentence.
    """
    _check_script(args)
    nodes = _nodes(args.nnodes)
    nproc = args.nproc_per_node = _processes(args.nproc_per_node)
    if args.max_restarts < 0:
        raise DistributedError(f"--max-restarts {args.max_restarts} must be at least 0")
    _check_gpus(args.backend, nproc)
    own = not args.standalone and args.rdzv_backend not in (None, "static", "c10d")
    own |= args.rdzv_backend == "static" and nodes[1] > 1
    placed = args.rdzv_endpoint or args.master_port is not None or args.master_addr != "127.0.0.1"
    single = args.standalone or (nodes[1] == 1 and not placed and not own)
    if not single and not own:
        if nodes[1] == 1:
            args.node_rank = 0
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = _endpoint(args, bool(placed))
        if args.node_rank is not None and not 0 <= args.node_rank < nodes[1]:
            raise DistributedError(
                f"--node-rank {args.node_rank} must be in [0, --nnodes) = [0, {nodes[1]}): number the nodes from 0"
            )
        if args.local_addr is None and parse_rendezvous_endpoint(args.rdzv_endpoint, 0)[0] in (
            "127.0.0.1",
            "localhost",
        ):
            args.local_addr = "127.0.0.1"
    node_rank = args.node_rank
    config, command, arguments, logs = _torch_config(args, single)
    folder = None
    if logs is None:
        folder = _log_folder(args, name)
        logs = RankLogs(folder)
    ranks = args.local_ranks_filter
    return Job(
        config=config,
        command=command,
        # torch's agent takes ${local_rank} in them for a macro, and $$ for a $.
        arguments=tuple(text.replace("$", "$$") for text in arguments),
        name=name or args.training_script,
        nodes=(1, 1) if args.standalone else nodes,
        node_rank=node_rank,
        backend=args.backend,
        logs=logs,
        folder=folder,
        shown=frozenset(map(int, ranks.split(","))) if ranks else None,
        own_rendezvous=own,
    )


def _torch_config(args: argparse.Namespace, single: bool) -> tuple[TorchConfig, str, list[str], LogsSpecs | None]:
    """Whatever torchrun makes of the arguments; no logs if the user left them to us."""
    ours = args.tee == args.redirects == "0" and args.logs_specs is None
    ours = ours and not args.duplicate_stdout_filters and not args.duplicate_stderr_filters
    values: dict[str, Any] = {
        "nproc_per_node": str(args.nproc_per_node),
        "rdzv_backend": "c10d" if single else args.rdzv_backend,
        "rdzv_endpoint": "" if single else args.rdzv_endpoint,
        "node_rank": args.node_rank or 0,
        "master_port": 29500 if args.master_port is None else args.master_port,
        "log_dir": os.devnull if ours else args.log_dir or LOG_DIR,
        "logs_specs": args.logs_specs,
    }
    quiet = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}  # else it warns, and sets it
    given = vars(args) | values
    if values["rdzv_backend"] == "c10d":  # else it warns that these are ignored, which ours are not
        given["node_rank"] = 0
        del given["master_addr"]
    try:
        with environment(quiet):
            config, command, arguments = config_from_args(argparse.Namespace(**given))
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise DistributedError(f"torchrun's options make no sense together: {error}") from error
    if not isinstance(command, str):
        raise DistributedError(
            "--run-path is not supported here: leave it out, the script runs in a process of its own"
        )
    assert isinstance(config.logs_specs, LogsSpecs)
    logs = None if ours and isinstance(config.logs_specs, DefaultLogsSpecs) else config.logs_specs
    return config, command, arguments, logs


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if args.module:
        return
    if args.no_python:
        if shutil.which(script) is None:
            raise DistributedError(f"{script} is no program that can be run: name one in PATH, or give its path")
        return
    path = Path(script)
    if not path.exists():
        raise DistributedError(f"the script {script} does not exist (here is {Path.cwd()}): correct its path")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise DistributedError(f"{script} is a folder: name a script, or a module with -m")
    if not os.access(path, os.R_OK):
        raise DistributedError(f"the script {script} cannot be read: change its permissions")


def _nodes(text: str) -> tuple[int, int]:
    try:
        least, most = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 0 < least <= most:
        raise DistributedError(f"--nnodes {text} must be a number of nodes, or MIN:MAX with 0 < MIN <= MAX")
    return least, most


def _processes(text: str) -> int:
    try:
        nproc = determine_local_world_size(text)
    except ValueError:
        known = "a number, or 'auto', 'cpu' or 'gpu'"
        gpus = "; no GPU is visible" if text == "gpu" else ""
        raise DistributedError(f"--nproc-per-node {text} must be {known}{gpus}") from None
    if nproc < 1:
        raise DistributedError(f"--nproc-per-node {nproc} must be at least 1")
    return nproc


def _check_gpus(backend: str | None, nproc: int) -> None:
    try:
        _check_backend(backend)
    except ValueError as error:
        raise DistributedError(f"--{error}") from None
    count = torch.cuda.device_count()
    if backend is not None and "nccl" in backend and dist.is_nccl_available() and nproc > count:
        raise DistributedError(
            f"--backend {backend} needs a GPU for each process, and {count} are visible for --nproc-per-node {nproc}: "
            f"use {'--backend gloo' if count == 0 else f'--nproc-per-node {count}, or --backend gloo'}"
        )


def _endpoint(args: argparse.Namespace, placed: bool) -> str:
    endpoint = args.rdzv_endpoint
    if not endpoint and placed:
        endpoint = f"{args.master_addr}:{args.master_port or 29500}"
    if not endpoint:
        raise DistributedError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every node: name the host of node 0 "
            "and a free port there"
        )
    try:
        host, port = parse_rendezvous_endpoint(endpoint, 0)
        host.encode("idna")  # as what looks names up does, which has no sentence for what it cannot encode
    except ValueError:
        port = 0
    if not port:
        raise DistributedError(
            f"--rdzv-endpoint {endpoint} must be HOST:PORT with a port from 1 to 65535, the same on every node"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _log_folder(args: argparse.Namespace, name: str | None) -> Path:
    script = name or args.training_script
    name = script.rpartition(".")[2] if args.module and name is None else Path(script).stem
    several = args.rdzv_endpoint and not args.standalone
    root = Path(args.log_dir or LOG_DIR)
    try:
        return new_folder(root, f"{name}-{socket.gethostname()}" if several else name)
    except OSError as error:
        raise DistributedError(
            f"the folder {root} for logs cannot be written to ({error.strerror}): give another in --log-dir"
        ) from None
