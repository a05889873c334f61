"""The command line of ``panther launch``: torchrun's own parser, with defaults that fit one node and several."""

__all__ = ["prepare"]

import argparse
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser, parse_min_max_nnodes

from panther._text import counted
from panther._torch import is_this_host, usable_cores
from panther.distributed.comm.ending import DEFAULT_GRACE_PERIOD_S
from panther.distributed.comm.process_group import check_backend, check_timeout
from panther.distributed.comm.store import Route, find_route, interface_of
from panther.distributed.launcher._agent import BACKEND, handled_signals
from panther.distributed.launcher._failures import RankLogs, new_folder
from panther.distributed.launcher.config import LOG_DIR
from panther.errors import ConfigError, check_size

_LOGGER = logging.getLogger(__name__)
_USAGE = "panther launch [options] script.py [arguments of the script]"
_EPILOG = (
    "These are torchrun's options, --backend and --grace-period. What each rank writes goes to a file in --log-dir "
    f"({LOG_DIR} by default); rank 0 is shown too."
)


def prepare(
    argv: Sequence[str], name: str | None = None
) -> tuple[LaunchConfig, Callable[..., object] | str, list[str], float]:
    """Turn the arguments of ``panther launch`` into arguments of torch's launcher, and set variables for its workers.

    The logs are a :class:`RankLogs`, unless torch's own options redirect the output.
    """
    args = _parse(argv)
    if not args.module and not args.no_python and not Path(args.training_script).exists():
        raise ConfigError(
            f"the script {args.training_script} does not exist (current folder: {Path.cwd()}): correct its path"
        )
    try:
        check_backend(args.backend)
        check_timeout("--grace-period", args.grace_period)
        nodes = parse_min_max_nnodes(args.nnodes)[1]
        nproc = check_size("nproc_per_node", determine_local_world_size(args.nproc_per_node), least=1)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"panther launch does not accept these options: {error}") from error
    if hasattr(args, "signals_to_handle"):
        names = args.signals_to_handle.split(",")
        args.signals_to_handle = ",".join(name for name in names if name != "SIGHUP" or "SIGHUP" in handled_signals())
    # A shared store keeps the addresses of an earlier attempt, which made 2 of 8 measured restarts hang.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    if args.backend is not None:
        os.environ["PANTHER_BACKEND"] = args.backend
    if (interface := _set_rendezvous(args, nodes)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if args.rdzv_backend != "static":
        del args.master_addr  # torch would warn that it is ignored
    log_dir = args.log_dir or LOG_DIR
    torchs_logs = args.tee != "0" or args.redirects != "0" or args.logs_specs or args.local_ranks_filter
    torchs_logs = torchs_logs or args.duplicate_stdout_filters or args.duplicate_stderr_filters
    args.log_dir = log_dir if torchs_logs else os.devnull
    try:
        config, command, arguments = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(f"panther launch does not accept these options: {error}") from error
    if not hasattr(config, "shutdown_timeout"):  # torch 2.11
        config.shutdown_timeout = args.shutdown_timeout
    if not torchs_logs:
        script = name or args.training_script
        stem = script.rpartition(".")[2] if args.module and name is None else Path(script).stem
        stem += f"-{time.strftime('%Y%m%d-%H%M%S')}" + (f"-{socket.gethostname()}" if nodes > 1 else "")
        try:
            folder = new_folder(Path(log_dir) / stem)
        except OSError as error:
            raise ConfigError(
                f"--log-dir {log_dir} cannot be written to ({error.strerror}): give another folder"
            ) from None
        config.logs_specs = RankLogs(folder)
        which = f" on this node, of --nnodes {args.nnodes}" if nodes > 1 else ""
        _LOGGER.info(
            "%s of %s%s; logs in %s", counted(nproc, "process", "processes"), script, which, config.logs_specs.folder
        )
    # torch's agent replaces ${local_rank} and $$ in arguments. With $$ for each $, the script gets its arguments
    # unchanged.
    return config, command, [text.replace("$", "$$") for text in arguments], args.grace_period


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()
    parser.prog, parser.usage, parser.epilog = "panther launch", _USAGE, _EPILOG
    parser.description = "Start a script on several processes, on one node or several, as torchrun does."
    parser.add_argument(
        "--backend", metavar="NAME", help="gloo or nccl, for panther.distributed.init() (default: it decides)"
    )
    parser.add_argument(
        "--grace-period", type=float, default=DEFAULT_GRACE_PERIOD_S, metavar="SECONDS",
        help="time that processes have to save and end after a second signal (default: 15)",
    )  # fmt: skip
    if "--shutdown-timeout" not in parser._option_string_actions:  # torch 2.11
        parser.add_argument(
            "--shutdown-timeout", "--shutdown_timeout", type=int, default=30, metavar="SECONDS",
            help="time that processes have to save and end after SIGTERM or Ctrl-C (default: 30)",
        )  # fmt: skip
    # None distinguishes an option that is not given from torchrun's default. That of the port is None since torch 2.13.
    for option in ("node_rank", "rdzv_backend", "master_port"):
        if f"PET_{option.upper()}" not in os.environ:  # torchrun reads options there as well
            parser.set_defaults(**{option: None})
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    options = {option for action in parser._actions for option in action.option_strings if option.startswith("--n")}
    for option in sorted({text.partition("=")[0] for text in args.training_script_args} & options):
        # Without the warning, the run would silently have one process.
        _LOGGER.warning(
            "%s after %s is passed to the script: put options of panther launch before the script",
            option,
            args.training_script,
        )
    return args


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; panther launch --help lists the options")


def _set_rendezvous(args: argparse.Namespace, nodes: int) -> str | None:
    """Choose how launchers meet, and return the interface that leads to node 0, if it is known.

    Options of torchrun keep their meaning. A single node uses the loopback interface, and several nodes use c10d if
    neither a backend nor --node-rank is given.
    """
    placed = args.rdzv_endpoint or args.master_port is not None
    if args.standalone or (nodes <= 1 and not placed and args.rdzv_backend in (None, "static")):
        args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, BACKEND, ""
        args.node_rank, args.master_port = 0, 0
        return interface_of("127.0.0.1")
    if args.rdzv_backend is None:
        args.rdzv_backend = "static" if args.node_rank is not None or nodes == 1 else "c10d"
        if args.rdzv_backend == "c10d" and not placed and args.master_addr == "127.0.0.1":
            raise ConfigError(
                f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, or --master-addr HOST --node-rank N: name "
                "the host of node 0, the same on every node"
            )
    args.node_rank = args.node_rank or 0
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nodes:  # the nodes would wait for each other
        raise ConfigError(f"--node-rank {args.node_rank} must be from 0 to {nodes - 1} with --nnodes {args.nnodes}")
    port = 29400
    if not args.rdzv_endpoint and (args.rdzv_backend == "static" or args.master_addr != "127.0.0.1"):
        port = 29500
        args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or port}"
    args.master_port = args.master_port or 29500
    if args.rdzv_backend not in ("c10d", "static"):
        return None
    try:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, port)
        host.encode("idna")  # the resolver does the same, and its error is hard to read
    except ValueError as error:
        raise ConfigError(f"the address of node 0 must be HOST:PORT, the same on every node: {error}") from None
    try:
        route = find_route(host, port)
    except OSError:  # the name has no address yet, for which torch waits
        return None
    if args.rdzv_backend == "c10d":
        _set_addresses(args, host, route)
    # A name of this host that leads to loopback, as in Debian's /etc/hosts, does not tell how other hosts reach it.
    only_this_machine = host == "localhost" or host == route.host_address
    return interface_of(route.own_address) if only_this_machine or not route.is_loopback else None


def _set_addresses(args: argparse.Namespace, host: str, route: Route) -> None:
    """Give torch's c10d rendezvous the address of this node, and say whether this node hosts the store."""
    # torch would give the other nodes this host's name.
    args.local_addr = args.local_addr or (host if route.is_loopback else route.own_address)
    settings = dict(item.split("=", 1) for item in args.rdzv_conf.split(",") if "=" in item)
    if not route.is_local:
        settings.setdefault("is_host", "False")
    elif not _is_host_for_torch(host):
        settings.setdefault("is_host", "True")
    # A launcher counts as dead after three of these intervals. torch's default interval is 5 s.
    settings.setdefault("keep_alive_interval", "3")
    args.rdzv_conf = ",".join(f"{key}={value}" for key, value in settings.items())


def _is_host_for_torch(host: str) -> bool:
    """Return whether torch itself detects that this machine hosts the store; torch then also tries to join a store."""
    try:
        return is_this_host(host)
    except OSError:
        return False
