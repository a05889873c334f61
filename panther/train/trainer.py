"""The Trainer: the loop around torch's engines, the same on a laptop and on many ranks.

Every decision that ranks take in the loop (to stop, to skip a step, to save) follows from numbers that
:class:`StepExchange` has summed over all of them, so that no rank waits in a collective that others do not enter.
"""

__all__ = ["Trainer"]

import json
import logging
import math
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._logs import logs_shown
from panther._random_state import deterministic_algorithms, preserved_generators, seed_generators
from panther._torch import first_infinities
from panther.distributed import DeviceUtilization, checkpoint, get_rank, get_world_size
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks, run_on_first_rank
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm, scale_gradients
from panther.distributed.data.gradient_compression import hook_state, load_hook_state
from panther.distributed.sync.replicas import built
from panther.errors import CheckpointError, ConfigError, FormatError, TrainingError
from panther.train.agreement import agree_on_progress, agree_on_run, compare_samples
from panther.train.callbacks import BuiltInCallback, Callback, may_stop
from panther.train.checks import check_arguments, check_batches, check_model, knows_settings
from panther.train.config import TrainConfig
from panther.train.engines.engine import Engine
from panther.train.history import History, peak_memory
from panther.train.loading.feed import Batch, Feed
from panther.train.loading.loader_workers import workers_needed
from panther.train.optimization.loss_weights import LossWeights
from panther.train.optimization.optimizer import (
    Optimizer,
    clear_gradients,
    is_extended_by_default,
    learning_rate_factor,
    set_learning_rate,
    step_error,
)
from panther.train.optimization.trainable import LossParameters, TrainableSet, average_gradients, list_names
from panther.train.process import catch_signals, join_process_group
from panther.train.reductions import gather_over_ranks, sum_over_ranks
from panther.train.run_directory import locked_directory
from panther.train.step_exchange import StepExchange
from panther.train.strategy.building import named_parameters, set_up
from panther.train.trackers import built_in_callbacks

_SAVED = (
    "epoch",
    "skipped",
    "_windows_done",
    "_sums",
    "_validated_at",
    "_elapsed_s",
)  # attributes that checkpoints hold as they are
_LISTED = 16  # samples that a note on an error lists
_log = logging.getLogger(__name__)


class Trainer:
    """Train a model, on one process or on all that a launcher started.

    Args:
        model: The model, built alike on every rank. It is wrapped or sharded in place by the strategy. Or a function
            that builds it, which is called with ``torch.device("meta")``; or a model on the meta device. The strategy
            shards these first, and :func:`panther.distributed.materialize_` fills the shards.
        optimizer: An optimizer made from ``model.parameters()``, or a function of parameters that makes one, such as a
            class or a :func:`functools.partial` of it. None is AdamW.
        loss_fn: ``loss_fn(output, target)`` for batches ``(input, target)``. None for a model that returns its loss, or
            an output with the attribute or key ``loss``.
        config: The settings.
        callbacks: Called at steps, records, epochs and checkpoints.
        metrics: Functions ``metric(output, target)`` by name, each a mean over a batch's samples, for validation.
        loss_weight: How much the mean loss of a batch counts in the loss of a step, for example by its tokens: a
            function of the batch, or the key or index of an entry of the batch, whose sum is taken. None is the number
            of samples; for :class:`torch.nn.CrossEntropyLoss` and :class:`torch.nn.NLLLoss` it is the sum of the class
            weights of the labels that are not ignored.

    Attributes:
        model: The model as the strategy wrapped it, once ``fit`` has begun; with a pipeline, the list of this rank's
            stages.
        optimizer: The optimizer.
        history: The records so far.
        step: Number of optimizer steps so far.
        total_steps: Number of optimizer steps when training ends, once ``fit`` has begun; None if that is unknown.
        epoch: Number of completed epochs.
        stop: Set it to True on any rank to end training on all ranks, with a checkpoint: after the present step if the
            class of a callback does it. Where several ranks cannot know that it may be set (in a function that a
            callback calls, in a loss), training ends at the latest after the next step.

    Example:
        >>> import torch, panther as pr
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> x = torch.randn(64, 256)
        >>> data = DataLoader(TensorDataset(x, x[:, :2]), 16, shuffle=True)
        >>> model = nn.Sequential(pr.nn.SKLinear(256, 64, 4), nn.ReLU(), nn.Linear(64, 2))
        >>> trainer = pr.train.Trainer(model, loss_fn=nn.MSELoss(), config=pr.train.TrainConfig(epochs=2))
        >>> trainer.fit(data).last["step"]
        8
    """

    @knows_settings
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizer = None,
        loss_fn: Callable[..., Tensor] | None = None,
        config: TrainConfig | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        loss_weight: Callable[[Any], Any] | str | int | None = None,
    ) -> None:
        model = built(model)
        check_model(model)
        check_arguments(optimizer, loss_fn, config, callbacks, metrics)
        LossWeights(loss_fn, loss_weight)  # checks it
        self.config = config or TrainConfig()
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loss_fn, self.callbacks, self.metrics = loss_fn, list(callbacks), dict(metrics or {})
        self.loss_weight = loss_weight
        self.history = History()
        self.step = self.epoch = 0
        self.total_steps: int | None = None
        self.stop = False
        self._ends = False  # whether all ranks have agreed to stop
        self._calls = self._votes = False  # whether some rank has callbacks, and callbacks that may stop the run
        self._checked_at = 0  # the last step whose gradient is known to be finite
        self.skipped = 0
        """Number of steps that were skipped because a loss or gradient was not finite."""
        self._windows_done = 0  # in the present epoch
        self._windows_per_epoch: int | None = None  # None for streams, whose length is unknown
        self._engine: Engine = None  # type: ignore[assignment] # set by _start, which precedes everything
        self._built_in: list[BuiltInCallback] = []
        self._sums = [0.0, 0.0]  # weighted losses and weights since the last record
        self._utilization: DeviceUtilization | None = None
        self._peak_rates: list[float] = []
        self._rates_left: list[float | Tensor] = []  # by the last step
        self._trainable: TrainableSet = None  # type: ignore[assignment] # set by _start, as the next two are
        self._loss_parameters: LossParameters = None  # type: ignore[assignment]
        self._joins_by_default = False  # whether parameters that are unfrozen later become a group of the optimizer
        self._averaged_apart: list[nn.Parameter] = []  # whose gradients DDP does not average
        self._not_in_optimizer: list[nn.Parameter] = []
        self._has_stepped = False  # in this process
        self._pending: Any = None
        self._validated_at = -1
        self._elapsed_s = 0.0  # in earlier calls of fit, and in the run that this one resumes
        self._device_seconds = 0.0  # the same, times the number of processes at that time
        self._saved_at: tuple[int, ...] = ()
        self._activity = "the start of the run"  # for errors of ranks that wait for one another

    @knows_settings
    def fit(self, train: Any, validation: Any = None) -> History:
        """Train the model.

        Args:
            train: A DataLoader; or, with ``batch_size`` in the configuration, a Dataset, a list of samples or another
                object with a length that returns samples by number, such as a ``datasets.Dataset`` in torch's format.
                Its samples are divided among the data-parallel ranks; the batch size is that of one rank.
            validation: The same, for computing the loss and the metrics during training.

        Returns:
            The history, the same on every rank.

        Raises:
            ConfigError: If the settings do not suit the model or the data.
            DistributedError: On every rank, if settings, data, optimizers or versions differ between ranks.
            TrainingError: On every rank, if a loss is not finite (step, rank and samples are named), or another run
                uses the checkpoint directory.
            CheckpointError: If a checkpoint cannot be written. Earlier ones stay.
            SystemExit: On every rank, with 128 plus the signal's number, after SIGTERM, SIGINT, SIGHUP or SIGUSR1. The
                step is finished and a checkpoint written first, from which the same call continues.
        """
        with watched(lambda: self._activity), ExitStack() as stack:
            join_process_group(self.config.timeout_s)
            if self.config.progress and get_rank() == 0:
                stack.enter_context(logs_shown())
            self.stop = self._ends = False
            self._agree("fit", {"training": train, "validation": validation})
            if self.config.checkpoint_dir is not None:
                stack.enter_context(locked_directory(Path(self.config.checkpoint_dir)))
            # After the lock in the stack, so the checkpoint is complete before another run may begin.
            stack.callback(self._finish_saving)
            if self.config.deterministic:
                stack.enter_context(deterministic_algorithms())
            stack.enter_context(workers_needed())
            exchange = stack.enter_context(catch_signals(self.config.grace_period_s))
            self._start(train)
            feed = self._feed(train)
            self._resume(feed)
            self._agree_on_progress("the start")
            check_batches(self._engine.modules(), feed)
            validation_feed = None if validation is None else self._feed(validation, False)
            self._built_in = stack.enter_context(built_in_callbacks(self.config, self.step, self.history))
            if self.config.utilization:
                utilization = DeviceUtilization(self._engine.device)
                self._utilization = run_on_all_ranks(lambda: stack.enter_context(utilization), None)
            self._train(feed, validation_feed, exchange)
        return self.history

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return loss and metrics of the model as it is, as means over all samples. Every rank must call it.

        It does not load a checkpoint; only ``fit`` does.
        """
        join_process_group(self.config.timeout_s)
        with watched(lambda: self._activity):
            self._agree("evaluate", {"evaluation": data})
            self._start(data)
            return self._evaluate(self._feed(data, False))

    def export(self, directory: str) -> Path:
        """Write the whole model for inference, from any layout, to a folder. Every rank must call it."""
        if not str(directory):
            raise ConfigError("export needs the name of a folder, and it is empty")
        return checkpoint.export(self.model, directory)

    # Starting and resuming

    def _agree(self, call: str, data: Mapping[str, Any]) -> None:
        """Compare what ranks have been given, before one of them waits for what others do not do."""
        is_new = self._engine is None
        loss = {"loss_fn": self.loss_fn, "loss_weight": self.loss_weight, "metrics": self.metrics}
        agree_on_run(
            call,
            self.model if is_new else None,
            self.optimizer if is_new else None,
            loss,
            self.config,
            self.callbacks,
            data,
        )

    def _agree_on_progress(self, moment: str) -> None:
        progress = {
            "step": self.step,
            "epoch": self.epoch,
            "the number of records": len(self.history),
            # Other spellings of one folder, which agree_on_run lets pass, could not be told from other folders later.
            "checkpoint_dir": self.config.checkpoint_dir,
        }
        agree_on_progress(self.optimizer, progress, self._engine.stages, moment)

    def _start(self, data: Any) -> None:
        if self._engine is not None:
            return
        # Before the model is distributed: layers that are made lazily draw their weights then.
        seed_generators(self.config.seed)

        def feed() -> Feed:
            return Feed(data, batch_size=self.config.batch_size, seed=0, rank=0, size=1)

        self._joins_by_default = is_extended_by_default(self.optimizer)
        self._loss_parameters = LossParameters(self.loss_fn, self.model)
        self._engine, self.optimizer = set_up(
            self.model, self.optimizer, self.loss_fn, self.config, feed, self.loss_weight
        )
        self.model = self._engine.model
        self._trainable = TrainableSet(named_parameters(self._engine))
        self._note_groups()
        if self.config.schedule != "callback" and any("initial_lr" in group for group in self.optimizer.param_groups):
            raise ConfigError(
                f"the optimizer has a scheduler, and schedule={self.config.schedule!r} sets the learning rate in every "
                "step: set schedule='callback' and step the scheduler in a callback, or make the optimizer without it"
            )
        self._peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        # Dropout differs between ranks with different samples, and agrees between ranks that share layers.
        torch.manual_seed(self.config.seed + self._engine.rank)

    def _feed(self, data: Any, training: bool = True) -> Feed:
        engine, config = self._engine, self.config
        if not training:
            engine.check_evaluation()
        compare_samples("training" if training else "validation", data, get_world_size() > engine.size)
        return Feed(
            data,
            batch_size=config.batch_size,
            seed=config.seed,
            rank=engine.rank,
            size=engine.size,
            accumulation=config.gradient_accumulation_steps if training else 1,
            factor=engine.batch_factor if training else 1,
            even=training and engine.stages > 1,
            multiple=engine.num_microbatches,
            shuffle=training,
        )

    def _resume(self, feed: Feed) -> None:
        directory, resume = self.config.checkpoint_dir, self.config.resume
        checkpoint_paths = (
            [] if directory is None else run_on_first_rank(lambda: checkpoint.checkpoints(directory), None)
        )
        if resume == "never":
            if checkpoint_paths:
                raise ConfigError(
                    f"resume='never', but {directory} has checkpoints ({checkpoint_paths[-1]}): use another one"
                )
        elif resume == "auto":
            reasons = []
            for path in reversed(checkpoint_paths):
                try:
                    self._load(path, feed)
                    break
                except FormatError as error:
                    warnings.warn(f"{path} is skipped: {error}", UserWarning, stacklevel=4)
                    reasons.append(str(error))
            else:
                if reasons:
                    raise CheckpointError(
                        f"every checkpoint in {directory} is damaged, and none was removed; of the latest, "
                        f"{reasons[0]}: copy a sound one there, or name another checkpoint_dir to begin anew"
                    )
        else:
            self._load(Path(resume), feed)
            if checkpoint_paths and int(checkpoint_paths[-1].stem.removeprefix("step-")) > self.step:
                raise ConfigError(
                    f"the run resumes from step {self.step}, but {directory} has {checkpoint_paths[-1].name}, which "
                    "the next run would take for the latest: name another checkpoint_dir, or remove the later "
                    "checkpoints"
                )

    def _load(self, path: Path, feed: Feed) -> None:
        # It changes buffers, gradients and generators, which loading then sets.
        self._engine.prepare_resume(lambda: next(feed.windows(0), None))
        loaded = checkpoint.load(path, self.model, self.optimizer)
        extra = loaded.extra
        if self._add_saved_groups(loaded.optimizer_groups or [], extra):
            checkpoint.load(path, self.model, self.optimizer)  # again, with the states of these groups
        if not isinstance(extra, Mapping) or "_windows_done" not in extra:
            raise CheckpointError(
                f"{path} was not written by a Trainer: use panther.distributed.checkpoint.load and a new run"
            )
        try:
            progress = {name: extra[name] for name in _SAVED}
            history = History(json.loads(bytes(extra["history"].numpy())))
            saved_names = [name for name, _ in extra["callbacks"]]
            samples, scaler = int(extra["samples"]), extra["scaler"]
            # Earlier versions did not save it, and a run rarely continues on another number of processes.
            self._device_seconds = float(extra.get("device_seconds", extra["_elapsed_s"] * get_world_size()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{path} is damaged: it does not say how far the run was ({error!r})") from None
        self.step, self.history = loaded.step, history
        self._rates_left = []
        if restored := self._trainable.restore(extra.get("trainable", {})):
            _log.info("frozen or unfrozen as in %s: %s", path, list_names(restored))
        for name, value in progress.items():
            setattr(self, name, value)
        # So that a run that ends at once does not write the same checkpoint again.
        self._saved_at = (self.step, self.epoch, len(self.history))
        if scaler:
            self._engine.scaler.load_state_dict(scaler)
        if loaded.per_rank_extra is not None:
            feed.load_state_dict(loaded.per_rank_extra["feed"])
        load_hook_state(self.model, (loaded.per_rank_extra or {}).get("hook"))
        if feed.window_samples and samples:
            # Windows may have another size now. Rounding down repeats some samples and leaves none out.
            self._windows_done = self._windows_done * samples // feed.window_samples
        callback_names = [type(callback).__name__ for callback in self._stateful()]
        if saved_names != callback_names:
            raise CheckpointError(
                f"{path} has states of the callbacks {saved_names}, but the run has {callback_names}: pass the same "
                "callbacks in the same order"
            )
        for callback, (_, state) in zip(self._stateful(), extra["callbacks"], strict=True):
            callback.load_state_dict(state)
        if get_rank() == 0:
            _log.info("resuming from step %d of %s", self.step, path)

    def _add_saved_groups(self, groups: list[list[str]], extra: Any) -> bool:
        """Add the groups that a checkpoint's optimizer had in addition; return whether there are any."""
        count = len(self.optimizer.param_groups)
        trained = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        by_name = self._trainable.by_name
        added = groups[count:]
        if any(by_name[name] in trained for names in added for name in names if name in by_name):
            return False  # this run's optimizer has them in other groups
        rates = extra.get("peak_rates", []) if isinstance(extra, Mapping) else []
        for number, names in enumerate(added, start=count):
            # A pipeline stage has only some of the parameters.
            self.optimizer.add_param_group({"params": [by_name[name] for name in names if name in by_name]})
            self._peak_rates.append(float(rates[number]) if number < len(rates) else self._peak_rates[0])
        self._note_groups()
        return bool(added)

    def _stateful(self) -> list[Any]:
        return [
            callback
            for callback in self.callbacks
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        ]

    # The loop

    def _notify(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks, the built-in ones first."""
        for callback in (*self._built_in, *self.callbacks):
            try:
                getattr(callback, method)(self, *arguments)
            except AssertionError as error:
                if "deepcopy" not in str(error):
                    raise
                raise ConfigError(
                    f"{error} ({type(callback).__name__}.{method} copied a sharded model, as AveragedModel does: keep "
                    "copies of the values of trainer.model.named_parameters() and average these, or use "
                    "strategy='ddp')"
                ) from error

    def _train(self, feed: Feed, validation: Feed | None, exchange: StepExchange) -> None:
        config = self.config
        windows_per_epoch = self._windows_per_epoch = feed.windows_per_epoch()
        feed.warn_of_left_out("training")
        epochs = config.epochs or (math.inf if config.max_steps else 1)
        self.total_steps = config.max_steps or (windows_per_epoch and windows_per_epoch * int(epochs))
        if self.total_steps is None and config.schedule in ("linear", "cosine"):
            raise ConfigError(f"schedule={config.schedule!r} needs to know the last step: set max_steps")
        self._notify("on_start")
        self._begin_votes()
        self._checked_at = self.step
        self._clock, self._samples_seen = time.perf_counter(), 0.0
        self._counted_until = self._clock
        if (self.epoch >= epochs or self._is_over()) and get_rank() == 0:
            _log.warning("training is finished (step %d): raise epochs or max_steps to continue", self.step)
        # A signal may have come between the last step of an epoch and the end of that epoch.
        if self._windows_done and self._windows_done == windows_per_epoch:
            self._end_epoch(feed, validation)
        while self.epoch < epochs and not self._is_over():
            with preserved_generators():
                windows = feed.windows(self.epoch, self._windows_done)
            # An exception may be kept, by a notebook for example, and would keep the loader's workers alive.
            with closing(windows):
                for window in windows:
                    self._step(window, exchange)
                    if validation is not None and self._is_due(config.validate_every_n_steps):
                        self._validate(validation)
                    if exchange.stop_signal:
                        self._leave(feed, exchange.stop_signal)
                    # The last step of an epoch is saved at its end, so that resuming does not repeat that.
                    if self._is_due(config.checkpoint_every_n_steps) and self._windows_done != windows_per_epoch:
                        self._save(feed)
                    self._agree_to_stop(exchange)
                    if self._is_over():
                        break
            if self._windows_done == 0:
                raise feed.no_windows_error("training", self.epoch)
            if self._is_over() and self._windows_done != windows_per_epoch:
                break
            self._end_epoch(feed, validation)
        if self._sums[1]:
            self._record()
        if validation is not None and self._validated_at != self.step:
            self._validate(validation)
        self._save(feed)
        self._finish_saving()

    def _end_epoch(self, feed: Feed, validation: Feed | None) -> None:
        self.epoch, self._windows_done = self.epoch + 1, 0
        if validation is not None and self.config.validate_every_n_steps is None:
            self._validate(validation)
        self._notify("on_epoch")
        if self._calls:
            self._agree_on_progress("the end of an epoch")
        if self._votes:
            self._ends = self.stop = _any_rank(self.stop)
        num_epochs = self.config.checkpoint_every_n_epochs
        if self._is_due(self.config.checkpoint_every_n_steps) or (num_epochs and self.epoch % num_epochs == 0):
            self._save(feed)

    def _is_over(self) -> bool:
        return self._ends or (self.config.max_steps is not None and self.step >= self.config.max_steps)

    def _begin_votes(self) -> None:
        """Find out whether some rank has callbacks, whether they may stop the run, and whether one has done so."""
        kinds = {type(callback) for callback in self.callbacks}
        answers = [[int(bool(kinds)), int(any(map(may_stop, kinds))), int(self.stop)]]
        if get_world_size() > 1:
            answers = gather_over_ranks(answers[0])
        self._calls, self._votes, self._ends = (any(column) for column in zip(*answers, strict=True))
        self.stop = self._ends

    def _agree_to_stop(self, exchange: StepExchange) -> None:
        """Stop on every rank at the same step if one is to stop; ranks that continued would wait for it."""
        if get_world_size() == 1:
            self._ends = self.stop
        # A message of its own, which is 12 to 15 % of a step of 5 ms, only where a callback may have set it just now.
        elif self._votes:
            self._ends = _any_rank(self.stop)
        else:
            self._ends = exchange.stops
        self.stop |= self._ends

    def _is_due(self, num_steps: int | None) -> bool:
        return num_steps is not None and self.step % num_steps == 0

    def _step(self, window: list[Batch], exchange: StepExchange) -> None:
        config, engine = self.config, self._engine
        self._activity = f"step {self.step + 1}"
        scaler = engine.scaler
        self._check_learning_rates()
        self._set_learning_rates()
        clear_gradients(self.optimizer)
        for parameter in self._not_in_optimizer:
            parameter.grad = None
        if (changed := self._trainable.changed()) and engine.stages > 1:
            self._trainable.check_stage(changed)
        samples = sum(batch.samples for batch in window)
        # The exchange starts before the last backward pass and is waited for after it.
        reports, everywhere = engine.reports_loss, engine.stages == 1

        def start_exchange(loss_sum: float | Tensor) -> None:
            options: dict[str, Any] = {"everywhere": everywhere, "weight": engine.weight, "stops": self.stop}
            exchange.start(loss_sum, samples, reports, engine.carrier, changed, **options)

        try:
            engine.forward_backward(window, start_exchange)
        except Exception as error:  # of the user's model or loss: its own text stays first
            error.add_note(_place_of(self.step + 1, window))
            if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
                raise ConfigError(
                    f"{error}: BatchNorm cannot be trained on one sample of a process, as a last batch may have: use "
                    "DataLoader(..., drop_last=True), or another batch_size"
                ) from error
            raise
        self._loss_parameters.check()
        loss, samples_of_all_ranks = exchange.finish()
        if exchange.num_changed:
            self._adopt_changes()
        if self._averaged_apart:
            average_gradients(self._averaged_apart)
        step = self.step + 1
        if not math.isfinite(loss):
            self._skip_or_stop(window, exchange)
            return
        logs = step % config.log_every_n_steps == 0
        # Whether this step may be saved: parameters of a gradient that is not finite must not reach a checkpoint.
        saves = config.checkpoint_dir is not None and (
            self._windows_per_epoch in (None, self._windows_done + 1)
            or step == config.max_steps
            or (config.checkpoint_every_n_steps is not None and step % config.checkpoint_every_n_steps == 0)
            or exchange.stop_signal
        )
        # Others are neither unscaled nor cleared, and the optimizer's list is read in less time than the model.
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if exchange.gradient_factor != 1.0:
            scale_gradients(trained, exchange.gradient_factor)
        scaler.unscale_(self.optimizer)
        norm_value = math.nan
        if config.gradient_clipping is not None or logs or saves or config.on_nonfinite == "skip":
            norm = gradient_norm(trained, stages=engine.stages)
            if logs or not scaler.is_enabled():  # which waits for a GPU
                norm_value = norm.item()
            # A scaler skips such steps itself, and lowers its scale.
            if not scaler.is_enabled() and not math.isfinite(norm_value):
                self._skip_or_stop(window, exchange)
                return
            self._checked_at = step
            if config.gradient_clipping is not None:
                clip_gradients(trained, config.gradient_clipping, norm)
        overflowed = scaler.is_enabled() and _has_overflowed(scaler, self.optimizer)
        try:
            scaler.step(self.optimizer)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if self._has_stepped or (refused := step_error(self.optimizer, error)) is None:
                raise
            raise refused from error
        self._has_stepped = True
        self._rates_left = [group["lr"] for group in self.optimizer.param_groups]
        scaler.update()
        self.step, self._windows_done = step, self._windows_done + 1
        self._samples_seen += samples_of_all_ranks
        weight = exchange.weight * (engine.weight_unit or 1.0)
        self._sums = [self._sums[0] + loss * weight, self._sums[1] + weight]
        if overflowed:  # which is how the scale is found, and so also no error with on_nonfinite="stop"
            self.skipped += 1
            self._notify("on_skip")
        else:
            self._notify("on_step", loss)
        if logs:
            self._record(gradient_norm=norm_value if math.isfinite(norm_value) else None)

    def _check_learning_rates(self) -> None:
        """Raise ConfigError if a callback has set a rate that the next step would overwrite."""
        if self.config.schedule == "callback":
            return
        # Rates that are tensors are not read, which would wait for a GPU.
        for number, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates_left, strict=False)):
            if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
                raise ConfigError(
                    f"the learning rate of the optimizer's group {number} was set to {group['lr']} after step "
                    f"{self.step}, and schedule={self.config.schedule!r} sets it in every step: set schedule='callback'"
                )

    def _set_learning_rates(self) -> None:
        """Set the rates of the next step, also of groups that were added since the last one."""
        if self.config.schedule == "callback":
            return
        groups = self.optimizer.param_groups
        if len(groups) < len(self._peak_rates):
            raise ConfigError(
                f"the optimizer has {len(groups)} groups, and had {len(self._peak_rates)}: to leave parameters as they "
                "are, set requires_grad=False for them"
            )
        if len(groups) > len(self._peak_rates):
            self._peak_rates += [float(group["lr"]) for group in groups[len(self._peak_rates) :]]
            self._note_groups()
        factor = learning_rate_factor(self.config.schedule, self.step, self.total_steps, self.config.warmup_steps)
        for group, peak in zip(groups, self._peak_rates, strict=True):
            set_learning_rate(group, peak * factor)

    def _note_groups(self) -> None:
        """Note which trainable parameters the optimizer does not have, whose gradients it does not clear."""
        trained = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        parameters = self._trainable.by_name.values()
        self._not_in_optimizer = [p for p in parameters if p.requires_grad and p not in trained]

    def _adopt_changes(self) -> None:
        """Agree with the other ranks on what is trained from this step on, and give it to the optimizer."""
        trainable = self._trainable
        unfrozen = trainable.agree()
        late = trainable.late()
        if self._engine.reduced:
            self._averaged_apart = list(late.values())
        self._note_groups()
        absent = [name for name in unfrozen if name in late and any(late[name] is p for p in self._not_in_optimizer)]
        # Every rank has the same groups, also a stage that has none of the parameters.
        absent_anywhere = sorted({name for names in gather_objects(absent, None) for name in names})
        if not absent_anywhere:
            return
        if not self._joins_by_default:
            raise ConfigError(
                f"{list_names(absent_anywhere)} was unfrozen after step {self.step}, and the optimizer does not have "
                "it: add it in the same callback, by trainer.optimizer.add_param_group({'params': [...]}), or make the "
                "optimizer of all parameters, frozen ones too"
            )
        self.optimizer.add_param_group({"params": [late[name] for name in absent]})
        self._note_groups()
        self._set_learning_rates()

    def _skip_or_stop(self, window: list[Batch], exchange: StepExchange) -> None:
        """Skip a step that is not finite, or raise TrainingError, depending on ``on_nonfinite``."""
        where = exchange.describe_nonfinite([index for batch in window for index in batch.indices or ()])
        if self.config.on_nonfinite == "stop":
            raise TrainingError(
                f"step {self.step + 1} is not finite: {where}; the parameters are as before the step: lower the "
                "learning rate, clip gradients, check these samples, or set on_nonfinite='skip'"
            )
        self.skipped += 1
        self.step, self._windows_done = self.step + 1, self._windows_done + 1
        self._checked_at = self.step
        self.optimizer.zero_grad()
        self._notify("on_skip")

    # Records and checkpoints

    def _append(self, quantities: Mapping[str, Any]) -> None:
        """Add a record to the history."""
        # The last step of an epoch is recorded before the end of the epoch, which it completes.
        completed = self.epoch + (self._windows_done != 0 and self._windows_done == self._windows_per_epoch)
        elapsed = self._count_time()
        hours, price = self._device_seconds / 3600, self.config.price_per_device_hour
        cost = {"device_hours": hours} if price is None else {"device_hours": hours, "price": hours * price}
        record = {"step": self.step, "epoch": completed, **quantities, "elapsed_s": elapsed, **cost}
        self.history.append(record)
        self._notify("on_record", record)

    def _count_time(self) -> float:
        now = time.perf_counter()
        seconds, self._counted_until = now - self._counted_until, now
        self._elapsed_s += seconds
        self._device_seconds += seconds * get_world_size()
        return self._elapsed_s

    def _record(self, **more: float | None) -> None:
        losses, weight = self._sums
        seconds = max(time.perf_counter() - self._clock, 1e-9)
        quantities = {
            "loss": losses / weight,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            **more,
            "samples_per_s": self._samples_seen / seconds,
            **self._utilizations(),
            "memory_bytes": peak_memory(),
            "skipped": self.skipped,
        }
        self._sums, self._clock, self._samples_seen = [0.0, 0.0], time.perf_counter(), 0.0
        self._append(quantities)

    def _utilizations(self) -> dict[str, float]:
        """Return the share of the time since the last record in which each rank's device computed, and the mean."""
        if self._utilization is None:
            return {}
        world = get_world_size()
        shares = [0.0] * world
        shares[get_rank()] = self._utilization.restart()
        shares = sum_over_ranks(shares)
        by_rank = {f"utilization_rank_{rank}": share for rank, share in enumerate(shares)} if world > 1 else {}
        return {"utilization": sum(shares) / world, **by_rank}

    def _validate(self, validation: Feed) -> None:
        begin = time.perf_counter()
        values = self._evaluate(validation)
        self._validated_at = self.step
        self._clock += time.perf_counter() - begin  # samples_per_s is the speed of training alone
        self._append({f"validation_{name}": value for name, value in values.items()})

    def _evaluate(self, feed: Feed) -> dict[str, float]:
        self._activity = f"the evaluation after step {self.step}"
        with preserved_generators():
            feed.warn_of_left_out("validation")
            totals = self._engine.evaluate(chain.from_iterable(feed.windows(0)), self.metrics)
        loss, *values, weight, samples = sum_over_ranks(totals.tolist())
        if not samples:
            raise feed.no_windows_error("validation")
        means = {name: value / samples for name, value in zip(self.metrics, values, strict=True)}
        return {"loss": loss / weight if weight else math.nan, **means}

    def _save(self, feed: Feed) -> None:
        state = (self.step, self.epoch, len(self.history))
        if self.config.checkpoint_dir is None or self._saved_at == state:
            return
        self._saved_at = state
        self._agree_on_progress("a checkpoint")
        self._check_last_gradient()
        self._count_time()
        text = json.dumps(list(self.history), default=float)  # of NumPy's numbers, and of tensors
        extra = {name: getattr(self, name) for name in _SAVED} | {
            "samples": feed.window_samples,
            "device_seconds": self._device_seconds,
            # As bytes: a checkpoint encodes nested values one by one, 1.7 s for 100,000 records in place of 0.6 s.
            "history": torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8),
            "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in self._stateful()],
            "scaler": self._engine.scaler.state_dict(),
            "trainable": self._trainable.changes,
            "peak_rates": self._peak_rates,
            "config": asdict(self.config),
        }
        save = checkpoint.async_save if self.config.checkpoint_asynchronously else checkpoint.save
        saved = save(
            self.config.checkpoint_dir,
            self.model,
            self.optimizer,
            step=self.step,
            extra=extra,
            per_rank_extra={"feed": feed.state_dict(), "hook": hook_state(self.model)},
            keep=self.config.keep_checkpoints,
        )
        self._pending = None if isinstance(saved, Path) else saved
        self._notify("on_checkpoint")

    def _check_last_gradient(self) -> None:
        """Raise TrainingError before a step is saved that was not expected to be the last one, and is not finite."""
        if self._checked_at == self.step or self._engine.scaler.is_enabled():
            return
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = gradient_norm(trained, stages=self._engine.stages).item()
        if not math.isfinite(norm):
            raise TrainingError(
                f"the norm of the gradient of step {self.step} is {norm}, so the step is not saved: resume from the "
                "last checkpoint with a lower learning rate, or with on_nonfinite='skip'"
            )
        self._checked_at = self.step

    def _finish_saving(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _leave(self, feed: Feed, stop_signal: int) -> None:
        """Save, and end the process on every rank, because one of them received a signal."""
        self._save(feed)
        self._finish_saving()
        outcome = "nothing is saved, because checkpoint_dir is not set"
        if self.config.checkpoint_dir is not None:
            outcome = f"a checkpoint is in {self.config.checkpoint_dir}, and the same command resumes from it"
        if get_rank() == 0:
            _log.warning("stopped by %s after step %d: %s", signal.Signals(stop_signal).name, self.step, outcome)
        raise SystemExit(128 + stop_signal)


def _place_of(step: int, window: list[Batch]) -> str:
    """Return where in a run an error came."""
    indices = [str(index) for batch in window for index in batch.indices or ()]
    more = f" and {len(indices) - _LISTED} more" if len(indices) > _LISTED else ""
    samples = f", on the samples {', '.join(indices[:_LISTED])}{more}" if indices else ""
    return f"This was in step {step}{samples} of rank {get_rank()}."


def _any_rank(flag: bool) -> bool:
    """Return whether a flag is set on some rank."""
    return sum_over_ranks([flag])[0] > 0


def _has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler will skip the step of gradients that it has unscaled."""
    return any(infinity.item() for infinity in first_infinities(scaler, optimizer))
