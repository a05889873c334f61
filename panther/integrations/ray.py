"""Panther's Trainer on Ray Train: Ray places the workers, starts them again and keeps the checkpoints.

Each worker runs the same :class:`panther.train.Trainer`, in the process group that Ray makes. All workers write each
checkpoint jointly, in Panther's format, into the folder of the run in Ray's storage, and report it to Ray. If the
storage is not a mounted file system, the first worker uploads the checkpoints.
"""

__all__ = ["RayTrainer"]

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import seed_generators
from panther.distributed import checkpoint, get_rank
from panther.distributed.comm.agreement import run_on_first_rank
from panther.distributed.comm.process_group import DEFAULT_TIMEOUT_S
from panther.errors import ConfigError, DistributedError, PantherError, TrainingError, check_version, require_extra
from panther.train import Callback, History, TrainConfig, Trainer
from panther.train.checks import check_arguments
from panther.train.optimization.loss_weights import LossWeights
from panther.train.optimization.optimizer import Optimizer
from panther.tuning.runners.ray import join_cluster

ray: Any = require_extra("ray", "ray")
check_version("ray", ray.__version__, 2, least=(2, 60))
ray_train: Any = require_extra("ray.train", "ray")
ray_torch: Any = require_extra("ray.train.torch", "ray")


class RayTrainer:
    """Train a model on the workers of a Ray cluster, or on this machine.

    The arguments are the same as for :class:`panther.train.Trainer`, except that the model is built on the workers. The
    arguments are sent to the workers by cloudpickle, which also sends functions and classes of the script itself.

    Args:
        model_fn: A function without arguments that builds the model. Every worker calls it after seeding the random
            generators by ``config.seed``, so that all workers build the same model.
        optimizer: A function of parameters that makes an optimizer, such as a class. None is AdamW.
        loss_fn: ``loss_fn(output, target)``; None for a model that returns its loss.
        config: The settings. Checkpoints are written synchronously, because all workers report a checkpoint to Ray at
            the same time. ``resume`` is ``"auto"`` or a path.
        callbacks: Callbacks; every worker calls a copy of them.
        metrics: Functions ``metric(output, target)`` by name, for validation.
        loss_weight: How much the mean loss of a batch counts in the loss of a step, as for the Trainer.
        scaling_config: A ``ray.train.ScalingConfig`` with the number of workers and the resources of each worker. None
            is one worker with one core.
        run_config: A ``ray.train.RunConfig`` with storage, restarts after failures and Ray's callbacks. Without a
            ``storage_path``, the folder of the run is ``config.checkpoint_dir``. Without a number of checkpoints,
            ``config.keep_checkpoints`` are kept.
        address: The cluster: ``"ray://HOST:10001"``, ``"HOST:6379"`` or ``"auto"``. None is the cluster that
            ``ray.init`` has joined, or the address in the variable RAY_ADDRESS, which Ray sets in its jobs, or this
            node alone. ``fit`` leaves a cluster that it joined, and ends a cluster that it started.

    Raises:
        MissingExtraError: If Ray Train is not installed.
        ConfigError: If its version is not supported, or an argument has the wrong type.

    Example:
        >>> import torch
        >>> from panther.integrations.ray import RayTrainer
        >>> from panther.nn import SKLinear
        >>> trainer = RayTrainer(
        ...     lambda: SKLinear(256, 256, 8, seed=0),
        ...     loss_fn=torch.nn.MSELoss(),
        ... )
        >>> result = trainer.fit(data)  # doctest: +SKIP
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer: Optimizer = None,
        loss_fn: Callable[..., Tensor] | None = None,
        config: TrainConfig | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        loss_weight: Callable[[Any], Any] | str | int | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        address: str | None = None,
    ) -> None:
        if isinstance(model_fn, nn.Module) or not callable(model_fn):
            raise ConfigError(
                f"model_fn must be a function that builds the model on each worker, not a {type(model_fn).__name__}: "
                "pass lambda: Model(...)"
            )
        check_arguments(optimizer, loss_fn, config, callbacks, metrics)
        LossWeights(loss_fn, loss_weight)  # it checks loss_weight
        if isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "the workers build the model: pass a function of its parameters as the optimizer, as torch.optim.AdamW"
            )
        config = config or TrainConfig()
        if config.checkpoint_dir is not None:  # an absolute path, because workers run in different folders
            config = dataclasses.replace(config, checkpoint_dir=os.path.abspath(config.checkpoint_dir))
        if config.resume == "never":
            raise ConfigError(
                "resume='never' would refuse a restarted worker too: use 'auto', and a new checkpoint_dir"
            )
        for name, argument, kind in (
            ("scaling_config", scaling_config, ray_train.ScalingConfig),
            ("run_config", run_config, ray_train.RunConfig),
        ):
            if argument is not None and not isinstance(argument, kind):
                raise ConfigError(f"{name} must be a ray.train.{kind.__name__}, not a {type(argument).__name__}")
        self.scaling_config = scaling_config or ray_train.ScalingConfig()
        self.run_config = _complete_run_config(config, run_config or ray_train.RunConfig())
        self.config, self.address = config, address
        self._arguments = (
            model_fn,
            optimizer,
            loss_fn,
            list(callbacks),
            {"metrics": metrics, "loss_weight": loss_weight},
        )

    def fit(self, train: Any, validation: Any = None) -> Any:
        """Train the model, from its latest checkpoint if the run's folder has one.

        Args:
            train: Training data as for ``Trainer.fit``, which is sent to every worker, or a function that returns the
                data on the worker.
            validation: Data for validation, in the same form.

        Returns:
            Ray's Result. Its ``checkpoint`` and ``metrics`` were reported last, and its ``return_value`` is the
            :class:`~panther.train.History`. :func:`panther.distributed.checkpoint.load` reads the checkpoint's path.

        Raises:
            ConfigError: If the workers need more than this node has.
            DistributedError: If a worker was lost and no restart is left, or the cluster did not have room for the
                workers within ``config.timeout_s``.
            TrainingError: If a function of the user failed on a worker.
            PantherError: If ``Trainer.fit`` raises it on a worker.
        """
        with join_cluster(self.address) as is_local:
            if is_local:
                self._check_room()
            trainer = ray_torch.TorchTrainer(
                _train,
                train_loop_config={"arguments": self._arguments, "config": self.config, "data": (train, validation)},
                torch_config=ray_torch.TorchConfig(timeout_s=math.ceil(self.config.timeout_s or DEFAULT_TIMEOUT_S)),
                scaling_config=self.scaling_config,
                run_config=self.run_config,
            )
            try:
                return trainer.fit()
            except ray_train.TrainingFailedError as error:
                raise self._explain(error) from error

    def _check_room(self) -> None:
        """Raise if the workers need more resources than this node has, for which Ray would wait without a limit."""
        resources, count = ray.cluster_resources(), _min_workers(self.scaling_config.num_workers)
        for name, each in _per_worker(self.scaling_config).items():
            if each * count > resources.get(name, 0):
                raise ConfigError(
                    f"num_workers={count} with {each:g} {name} each need {each * count:g} {name}, and this machine has "
                    f"{resources.get(name, 0):g}: lower them in the ScalingConfig, or give the address of a cluster"
                )

    def _explain(self, error: Any) -> PantherError:
        """Return an error that explains in one sentence why Ray ended the run."""
        if not hasattr(error, "worker_failures"):
            size = f"{_min_workers(self.scaling_config.num_workers)} workers of {_per_worker(self.scaling_config)}"
            return DistributedError(
                f"Ray could not run {size} on {ray.cluster_resources()} ({_first_line(error.controller_failure)}): "
                "lower the ScalingConfig, add nodes, or raise timeout_s"
            )
        failures = dict(sorted(error.worker_failures.items()))
        for failure in failures.values():
            if isinstance(failure, PantherError) and not isinstance(failure, DistributedError):
                return failure
        # Workers that lost their connection to a lost worker fail too, and their errors do not name the cause.
        lost = [rank for rank, failure in failures.items() if hasattr(failure, "health_check_failure")]
        if lost:
            allowed = self.run_config.failure_config.max_failures
            return DistributedError(
                f"Ray lost worker {', '.join(map(str, lost))} (killed, out of memory, or its node failed) and "
                f"max_failures={allowed} leaves no restart: raise it in FailureConfig, or call fit again, which "
                f"continues from the latest checkpoint in {self.run_config.storage_path}/{self.run_config.name}"
            )
        # The same holds if a worker raised an error: errors about a connection are considered last.
        rank, failure = min(failures.items(), key=lambda item: "onnection" in str(item[1]))
        if isinstance(failure, PantherError):
            return failure
        return TrainingError(
            f"worker {rank} raised {type(failure).__name__}: {_first_line(failure)}: its traceback is above"
        )


def _complete_run_config(config: TrainConfig, run: Any) -> Any:
    """Return a RunConfig, completed by the storage, number of checkpoints and timeout of the TrainConfig."""
    changes: dict[str, Any] = {}
    if config.checkpoint_dir is not None and run.storage_path == ray_train.constants.DEFAULT_STORAGE_PATH:
        directory = Path(config.checkpoint_dir)
        changes = {"storage_path": str(directory.parent), "name": directory.name}
    if run.checkpoint_config.num_to_keep is None:
        changes["checkpoint_config"] = dataclasses.replace(run.checkpoint_config, num_to_keep=config.keep_checkpoints)
    if run.failure_config.controller_failure_limit == -1:
        # Without a limit, Ray asks the cluster for room forever, once per this number of seconds.
        each = float(os.environ.get("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", 60))
        limit = math.ceil((config.timeout_s or DEFAULT_TIMEOUT_S) / each) - 1
        changes["failure_config"] = dataclasses.replace(run.failure_config, controller_failure_limit=limit)
    return dataclasses.replace(run, **changes)


def _min_workers(num_workers: int | tuple[int, int]) -> int:
    return num_workers if isinstance(num_workers, int) else num_workers[0]


def _per_worker(scaling: Any) -> dict[str, float]:
    """Return the resources of each worker: of the ScalingConfig, or Ray's defaults."""
    return scaling.resources_per_worker or ({"GPU": 1, "CPU": 1} if scaling.use_gpu else {"CPU": 1})


def _first_line(error: Any) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# On the workers


def _train(job: dict[str, Any]) -> History:
    """Run the Trainer; the history is the same on every worker."""
    model_fn, optimizer, loss_fn, callbacks, options = job["arguments"]
    report = _Report(job["config"])
    seed_generators(report.config.seed)
    trainer = Trainer(model_fn(), optimizer, loss_fn, report.config, [*callbacks, report], **options)
    train, validation = (data() if callable(data) else data for data in job["data"])
    history = trainer.fit(train, validation)
    report.close(trainer)
    return history


class _Report(Callback):
    """A callback that reports metrics and checkpoints to Ray, on every worker at the same steps, as Ray requires."""

    def __init__(self, config: TrainConfig) -> None:
        storage = ray_train.get_context().get_storage()
        self._run = Path(storage.experiment_fs_path)
        # "local" is pyarrow's name for mounted file systems.
        is_mounted = storage.storage_filesystem.type_name == "local"
        directory = Path(config.checkpoint_dir) if config.checkpoint_dir else None
        if directory is None and not is_mounted:
            raise ConfigError(
                f"Ray's storage {self._run} is not a folder of this node: set checkpoint_dir to a folder that all "
                "workers share, from which checkpoints are uploaded"
            )
        self._uploads = not is_mounted or (directory is not None and directory.resolve() != self._run.resolve())
        self._directory = directory if self._uploads and directory is not None else self._run
        latest = ray_train.get_checkpoint()
        if self._uploads:
            run_on_first_rank(lambda: self._download(latest), None)
        self.config = dataclasses.replace(
            config,
            checkpoint_dir=str(self._directory),
            checkpoint_asynchronously=False,
            # Ray removes old checkpoints in its storage. Checkpoints that are uploaded are removed by the Trainer.
            keep_checkpoints=config.keep_checkpoints if self._uploads else None,
            resume="auto" if latest is not None or self._checkpoints() else config.resume,
        )
        self._latest: dict[str, Any] = {}
        self._reported = None if latest is None else Path(latest.path).name

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Report validations; records of training are sent with the next report, because Ray takes one per 2 s."""
        self._latest |= record
        if any(name.startswith("validation_") for name in record):
            # Asynchronous, so that training does not wait until Ray asks for the report.
            ray_train.report(dict(self._latest), checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC)

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Report the checkpoint, unless a later one of the same step replaces it at the end of the run."""
        epochs = self.config.epochs or (None if self.config.max_steps else 1)
        if not (trainer.stop or trainer.step == trainer.total_steps or trainer.epoch == epochs):
            self._report_checkpoint(trainer)

    def close(self, trainer: Trainer) -> None:
        """Report the last checkpoint, even after a restart at the end of the run."""
        if run_on_first_rank(lambda: self._checkpoints()[-1].name != self._reported, None):
            self._report_checkpoint(trainer)

    def _report_checkpoint(self, trainer: Trainer) -> None:
        saved_checkpoint = None
        if get_rank() == 0:
            path = self._checkpoints()[-1]
            self._reported, saved_checkpoint = path.name, ray_train.Checkpoint.from_directory(str(path))
        mode = ray_train.CheckpointUploadMode
        ray_train.report(
            {**self._latest, "step": trainer.step, "epoch": trainer.epoch},
            checkpoint=saved_checkpoint,
            checkpoint_dir_name=self._reported,
            checkpoint_upload_mode=mode.SYNC if self._uploads else mode.NO_UPLOAD,
        )

    def _checkpoints(self) -> list[Path]:
        return checkpoint.checkpoints(self._directory)

    def _download(self, latest: Any) -> None:
        """Download Ray's latest checkpoint if this node has none."""
        if latest is not None and not self._checkpoints():
            final = self._directory / Path(latest.path).name
            temporary = final.with_name(f"{final.name}.tmp")
            latest.to_directory(str(temporary))
            temporary.rename(final)
