"""Start a script on several processes, on one node or several: ``panther launch`` and the same from Python.

torch's own launcher starts the processes, with torchrun's options.
"""

__all__ = ["DistributedLauncher", "launch_distributed_training", "run_script"]

import logging
from os import PathLike
from pathlib import Path
from typing import Any

from panther.distributed.launcher.config import LaunchConfig
from panther.errors import DistributedError

_log = logging.getLogger(__name__)


def launch_distributed_training(
    script: str | PathLike[str], *args: object, config: LaunchConfig | None = None, **options: Any
) -> Path:
    """Run a script on several processes, as ``panther launch`` and torchrun do.

    The script finds RANK, WORLD_SIZE and LOCAL_RANK in its environment, and joins the process group by
    :func:`panther.distributed.init` or ``torch.distributed.init_process_group``. The output of all ranks is written to
    files; the output of rank 0 is also shown. On one node nothing listens beyond the loopback interface.

    Args:
        script: Path of the script, or the name of a module with ``module=True``.
        *args: Arguments of the script.
        config: Settings to start the script with.
        **options: Fields of :class:`LaunchConfig`, in place of ``config``.

    Returns:
        The folder of this run, with ``attempt-A/rank-R.out`` and ``.err`` for each attempt and rank.

    Raises:
        DistributedError: If the script failed, with the traceback of the rank that failed first; if a node is missing.
        ConfigError: If the options are not valid, or cannot be met.
        TypeError: If there are both ``options`` and a ``config``.

    Cost: the import of torch in each process, about three seconds of a core.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "hello.py")
        ...     _ = script.write_text(
        ...         "import os; print('rank', os.environ['RANK'])"
        ...     )
        ...     logs = launch_distributed_training(
        ...         script, nproc_per_node=2, log_dir=folder
        ...     )
        ...     print((logs / "attempt-0" / "rank-1.out").read_text())
        rank 0
        rank 1
        <BLANKLINE>
    """
    if config is not None and options:
        raise TypeError(f"pass config or its fields ({', '.join(options)}), not both")
    config = LaunchConfig(**options) if config is None else _checked(config)
    from panther.distributed.launcher._agent import signals_followed

    with signals_followed():
        return run_script([*config.arguments(), str(script), *map(str, args)])


class DistributedLauncher:
    """Start scripts by one configuration, and return exit statuses: :func:`launch_distributed_training` as a class.

    Args:
        config: Settings to start the scripts with.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "ends.py")
        ...     _ = script.write_text("import sys; sys.exit(int(sys.argv[1]))")
        ...     launcher = DistributedLauncher(LaunchConfig(log_dir=folder))
        ...     launcher.launch(script, 0), launcher.launch(script, 3)
        (0, 1)
    """

    def __init__(self, config: LaunchConfig | None = None) -> None:
        self.config = LaunchConfig() if config is None else _checked(config)

    def launch(self, script: str | PathLike[str], *args: object) -> int:
        """Run a script with its arguments; return 0, or 1 if it failed, with the reason in the log of this module."""
        try:
            launch_distributed_training(script, *args, config=self.config)
        except DistributedError as error:
            _log.error("%s", error)
            return 1
        return 0


def _checked(config: Any) -> LaunchConfig:
    if not isinstance(config, LaunchConfig):
        raise TypeError(
            f"config must be a LaunchConfig, not {type(config).__name__}: use LaunchConfig(**settings) for a dict"
        )
    return config


def run_script(argv: list[str], name: str | None = None) -> Path:
    """Run a script by the arguments of ``panther launch``, and return the folder of the logs."""
    # torch's launcher is as slow to import as torch.
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    from panther.distributed.launcher._agent import contained, latest_failures, run_scripts
    from panther.distributed.launcher._arguments import prepare
    from panther.distributed.launcher._failures import RankLogs, explain

    with contained():
        config, command, arguments, grace_period_s = prepare(argv, name)
        logs = config.logs_specs
        assert logs is not None  # prepare sets it
        try:
            run_scripts(config, command, arguments, grace_period_s)
            return Path(logs.root_log_dir)
        except ChildFailedError:
            run = (logs.world_size, logs.attempts, logs.folder) if isinstance(logs, RankLogs) else (None, 1)
            text = explain(latest_failures(), *run)
        except (RendezvousError, dist.DistError, OSError) as error:
            reason = str(error.__cause__ or error)
            if isinstance(error, RendezvousTimeoutError):  # its text is empty
                reason = (
                    f"fewer than {config.min_nodes} nodes came within {config.rdzv_configs.get('join_timeout', 600)} s"
                )
            text = f"the launcher failed: {reason.splitlines()[0] if reason else type(error).__name__}"
            if config.rdzv_endpoint:
                text += f"; see the output of the launchers of the other nodes, which meet at {config.rdzv_endpoint}"
        finally:
            if isinstance(logs, RankLogs):
                logs.stop()
    raise DistributedError(text)  # here, so that no traceback keeps torch's objects
