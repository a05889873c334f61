"""The Trainer: the loop around torch's engines, the same on a laptop and on many ranks.

Every decision that ranks take in the loop (to stop, to skip a step, to save) follows from numbers that
:class:`StepExchange` has summed over all ranks, so that no rank waits in a collective that other ranks do not enter.
"""

__all__ = ["Trainer"]

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._logs import logs_shown
from panther._process_settings import deterministic_algorithms, preserved_generators, seed_generators
from panther._text import list_names
from panther._torch import first_infinities
from panther.distributed import checkpoint, get_rank, get_world_size
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm, scale_gradients
from panther.distributed.data.comm_hooks import hook_state, load_hook_state
from panther.distributed.sync.replicas import built
from panther.errors import CheckpointError, ConfigError, TrainingError
from panther.train.agreement import agree_on_progress, agree_on_run, compare_samples
from panther.train.callbacks import Callback
from panther.train.checks import check_arguments, check_model, check_scheduler, knows_settings
from panther.train.config import TrainConfig
from panther.train.coordination import StepExchange, catch_signals, join_process_group, sum_over_ranks
from panther.train.engines.engine import Engine
from panther.train.history import History, Meter, peak_memory
from panther.train.loading.feed import Batch, Feed
from panther.train.loading.loader_workers import workers_needed
from panther.train.optimization.loss_weights import LossWeights
from panther.train.optimization.optimizer import Optimizer, is_extended_by_default
from panther.train.optimization.parameter_groups import ParameterGroups, saved_settings_stay
from panther.train.optimization.trainable import MAX_SAMPLES, LossParameters, TrainableSet, nonfinite_parameters
from panther.train.resuming import SAVED_ATTRIBUTES, locked_directory, read_progress, resume_run
from panther.train.strategy.building import named_parameters, set_up
from panther.train.trackers import BuiltInCallback, built_in_callbacks

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
        scheduler: A function that makes a scheduler of the optimizer, such as ``lambda optimizer: StepLR(optimizer,
            10)``. Without it, ``schedule`` in the settings sets the learning rates.

    Attributes:
        model: The model as the strategy wrapped it, once ``fit`` has begun; with a pipeline, the list of this rank's
            stages.
        optimizer: The optimizer.
        history: The records so far.
        step: Number of optimizer steps so far.
        total_steps: Number of optimizer steps when training ends, once ``fit`` has begun; None if that is unknown.
        epoch: Number of completed epochs.
        stop: Set it to True on any rank to end training on all ranks, with a checkpoint: after the present step, or
            after the next one if several ranks have no callbacks and the loss or the model sets it.

    Example:
        >>> import torch, panther as pr
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from sklearn.datasets import load_digits
        >>> x, y = map(torch.tensor, load_digits(return_X_y=True))
        >>> digits = TensorDataset(x.float() / 16, y)  # 1,797 images
        >>> model = nn.Sequential(
        ...     pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)
        ... )
        >>> trainer = pr.train.Trainer(
        ...     model,
        ...     loss_fn=nn.CrossEntropyLoss(),
        ...     config=pr.train.TrainConfig(epochs=2),
        ... )
        >>> history = trainer.fit(DataLoader(digits, 32, shuffle=True))
        >>> history.last["step"], history.last["loss"] < 1.5
        (114, True)
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
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        model = built(model)
        check_model(model)
        check_arguments(optimizer, loss_fn, config, callbacks, metrics)
        LossWeights(loss_fn, loss_weight)  # it checks loss_weight
        self.config = config or TrainConfig()
        check_scheduler(scheduler, self.config)
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loss_fn, self.callbacks, self.metrics = loss_fn, list(callbacks), dict(metrics or {})
        self.loss_weight, self.scheduler = loss_weight, scheduler
        self.history = History()
        self.step = self.epoch = 0
        self.total_steps: int | None = None
        self.stop = False
        self._ends = False  # whether all ranks have agreed to stop
        self._has_callbacks = False  # whether some rank has callbacks, which may set `stop`
        self._checked_at = 0  # the last step whose gradient is known to be finite
        self.skipped = 0
        """Number of steps that were skipped because a loss or gradient was not finite."""
        self._windows_done = 0  # in the present epoch
        self._windows_per_epoch: int | None = None  # None for streams, whose length is unknown
        # _start sets these four before anything else uses them.
        self._engine: Engine = None  # type: ignore[assignment]
        self._trainable: TrainableSet = None  # type: ignore[assignment]
        self._groups: ParameterGroups = None  # type: ignore[assignment]
        self._loss_parameters: LossParameters = None  # type: ignore[assignment]
        self._built_in: list[BuiltInCallback] = []
        self._meter = Meter()
        self._is_resumed = False  # whether a checkpoint was loaded and the callbacks have not started since then
        self._pending: Any = None  # the checkpoint that is being written
        self._validated_at = -1
        self._saved_at: tuple[int, ...] = ()
        self._activity = "the start of the run"  # for errors of ranks that wait for each other

    @knows_settings
    def fit(self, train: Any, validation: Any = None) -> History:
        """Train the model, in training mode.

        A model in evaluation mode, as ``from_pretrained`` of transformers returns it, is put into training mode by its
        ``train`` method. In a model that is in training mode, single modules in evaluation mode, such as a frozen
        BatchNorm, stay in it; a line of the log names them.

        Args:
            train: A DataLoader; or, with ``batch_size`` in the configuration, a Dataset, a list of samples or another
                object with a length that returns samples by number, such as a ``datasets.Dataset`` in torch's format.
                Its samples are divided among the data-parallel ranks; the batch size is the size on one rank.
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
            agree_on_run(self, "fit", {"training": train, "validation": validation}, self._engine is not None)
            if self.config.checkpoint_dir is not None:
                stack.enter_context(locked_directory(Path(self.config.checkpoint_dir)))
            # It is called before the lock is released, so that the checkpoint is complete before another run begins.
            stack.callback(self._finish_saving)
            if self.config.deterministic:
                stack.enter_context(deterministic_algorithms())
            stack.enter_context(workers_needed())
            exchange = stack.enter_context(catch_signals(self.config.grace_period_s))
            was_training = self.model.training if self._engine is None else None
            self._start(train)
            if (names := self._engine.train(was_training)) and get_rank() == 0:
                _log.info("%d modules stay in evaluation mode: %s", len(names), list_names(names))
            feed = self._feed(train)
            resume_run(self.config.checkpoint_dir, self.config.resume, lambda path: self._load(path, feed))
            agree_on_progress(self, self._engine.stages, "the start")
            if self._groups.scheduler is not None:
                metrics = ("loss", *self.metrics) if validation is not None else ()
                self._groups.scheduler.check_metric([f"validation_{name}" for name in metrics])
            validation_feed = None if validation is None else self._feed(validation, False)
            self._built_in = stack.enter_context(built_in_callbacks(self.config, self.step, self.history))
            self._train(feed, validation_feed, exchange)
        return self.history

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return loss and metrics of the model as it is, as means over all samples. Every rank must call it.

        It does not load a checkpoint; only ``fit`` does.
        """
        join_process_group(self.config.timeout_s)
        with watched(lambda: self._activity):
            agree_on_run(self, "evaluate", {"evaluation": data}, self._engine is not None)
            self._start(data)
            return self._evaluate(self._feed(data, False))

    def export(self, directory: str) -> Path:
        """Write the whole model for inference, from any layout, to a folder. Every rank must call it."""
        if not str(directory):
            raise ConfigError("export needs the name of a folder, and it is empty")
        return checkpoint.export(self.model, directory)

    # Starting and resuming

    def _start(self, data: Any) -> None:
        if self._engine is not None:
            return
        # Generators are seeded before the model is distributed, because lazy layers draw their weights then.
        seed_generators(self.config.seed)
        feed = partial(Feed, data, batch_size=self.config.batch_size, seed=0, rank=0, size=1)
        is_extended = is_extended_by_default(self.optimizer)
        self._loss_parameters = LossParameters(self.loss_fn, self.model)
        engine, optimizer = set_up(self.model, self.optimizer, self.loss_fn, self.config, feed, self.loss_weight)
        self._trainable = TrainableSet(named_parameters(engine))
        self._groups = ParameterGroups(optimizer, self._trainable, self.config, self.scheduler, is_extended)
        self._engine, self.model, self.optimizer = engine, engine.model, optimizer
        # Dropout and random transforms differ between ranks with different samples, and agree between ranks that share
        # layers.
        seed_generators(self.config.seed + self._engine.rank)

    def _feed(self, data: Any, training: bool = True) -> Feed:
        engine, config = self._engine, self.config
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

    def _load(self, path: Path, feed: Feed) -> int:
        """Load a checkpoint, and return the step after which it was saved."""
        # This changes buffers, gradients and generators, which loading then sets.
        self._engine.prepare_resume(lambda: next(feed.windows(0), None))
        callback_names = [type(callback).__name__ for callback in self._stateful().values()]
        read = partial(read_progress, path, scheduler=self._groups.scheduler, callback_names=callback_names)
        loaded = checkpoint.load(path, self.model, self.optimizer, check=read, rank_states=True)
        saved = read(loaded.extra)
        if self._groups.add_saved(loaded.optimizer_groups or [], saved["peak_rates"]):
            checkpoint.load(path, self.model, self.optimizer)  # again, with the states of the added groups
        if self._groups.scheduler is not None:
            self._groups.scheduler.load_state_dict(saved["scheduler"])
            self._groups.end_step()
        self.step, self.history, self._is_resumed = loaded.step, saved["history"], True
        self._meter.sums = saved["_sums"]
        self._meter.elapsed_s, self._meter.device_seconds = saved["_elapsed_s"], saved["device_seconds"]
        if restored := self._trainable.restore(saved["trainable"]):
            _log.info("frozen or unfrozen as in %s: %s", path, list_names(restored))
        for name in SAVED_ATTRIBUTES:
            setattr(self, name, saved[name])
        # A run that ends at once must not write the same checkpoint again.
        self._saved_at = (self.step, self.epoch, len(self.history))
        if saved["scaler"]:
            self._engine.scaler.load_state_dict(saved["scaler"])
        if loaded.per_rank_extra is not None:
            feed.load_state_dict(loaded.per_rank_extra["feed"])
        load_hook_state(self.model, (loaded.per_rank_extra or {}).get("hook"))
        if feed.window_samples and saved["samples"]:
            # Windows may have a different size now. Rounding down repeats some samples and leaves none out.
            self._windows_done = self._windows_done * saved["samples"] // feed.window_samples
        for (name, callback), (_, state) in zip(self._stateful().items(), saved["callbacks"], strict=True):
            # Earlier versions stored the first rank's state beside the name.
            callback.load_state_dict(state if loaded.rank_states is None else loaded.rank_states[name])
        if get_rank() == 0:
            _log.info("resuming from step %d of %s", self.step, path)
        return self.step

    def _stateful(self) -> dict[str, Any]:
        methods = ("state_dict", "load_state_dict")
        callbacks = [each for each in self.callbacks if all(hasattr(each, method) for method in methods)]
        return {f"callback {index} ({type(each).__name__})": each for index, each in enumerate(callbacks)}

    # The loop

    def _notify(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks, first of the built-in callbacks."""
        for callback in (*self._built_in, *self.callbacks):
            getattr(callback, method)(self, *arguments)

    def _train(self, feed: Feed, validation: Feed | None, exchange: StepExchange) -> None:
        config = self.config
        windows_per_epoch = self._windows_per_epoch = feed.windows_per_epoch()
        feed.warn_of_left_out("training")
        epochs = config.epochs or (math.inf if config.max_steps else 1)
        self.total_steps = config.max_steps or (windows_per_epoch and windows_per_epoch * int(epochs))
        if self.total_steps is None and config.schedule in ("linear", "cosine"):
            raise ConfigError(f"schedule={config.schedule!r} needs to know the last step: set max_steps")
        with saved_settings_stay(self.optimizer.param_groups if self._is_resumed else []):
            self._notify("on_start")
        self._is_resumed = False
        answers = gather_objects((bool(self.callbacks), bool(self.stop)), None)
        self._has_callbacks, self._ends = map(any, zip(*answers, strict=True))
        self.stop = self._ends
        self._checked_at, self._groups.quantities = self.step, {}
        self._meter.start()
        if (self.epoch >= epochs or self._is_over()) and get_rank() == 0:
            _log.warning("training is finished (step %d): raise epochs or max_steps to continue", self.step)
        # The run may have been stopped by a signal between the last step of an epoch and the end of the epoch.
        if self._windows_done and self._windows_done == windows_per_epoch:
            self._end_epoch(feed, validation)
        while self.epoch < epochs and not self._is_over():
            # A notebook, for example, may keep an exception, which would keep the loader's workers alive.
            with closing(feed.windows(self.epoch, self._windows_done)) as windows:
                for window in windows:
                    skipped = self.skipped
                    self._step(window, exchange)
                    if validation is not None and self._is_due(config.validate_every_n_steps):
                        self._validate(validation)
                    self._groups.step_scheduler("step" if self.skipped == skipped else "skipped step", self.step)
                    if exchange.stop_signal:
                        self._leave(feed, exchange.stop_signal)
                    # The last step of an epoch is saved at the end of the epoch, so that resuming does not repeat it.
                    if self._is_due(config.checkpoint_every_n_steps) and self._windows_done != windows_per_epoch:
                        self._save(feed)
                    self._agree_to_stop(exchange.stops)
                    if self._is_over():
                        break
            if self._windows_done == 0:
                raise feed.no_windows_error("training", self.epoch)
            if self._is_over() and self._windows_done != windows_per_epoch:
                break
            self._end_epoch(feed, validation)
        if self._meter.sums[1]:
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
        self._groups.step_scheduler("epoch", self.step)
        if self._has_callbacks:
            agree_on_progress(self, self._engine.stages, "the end of an epoch")
        self._agree_to_stop(self._ends)
        num_epochs = self.config.checkpoint_every_n_epochs
        if self._is_due(self.config.checkpoint_every_n_steps) or (num_epochs and self.epoch % num_epochs == 0):
            self._save(feed)

    def _agree_to_stop(self, is_agreed: bool) -> None:
        """Stop all ranks if a rank is to stop; without callbacks the exchange of the step has found out."""
        if self._has_callbacks or get_world_size() == 1:
            is_agreed = sum_over_ranks([self.stop])[0] > 0
        self._ends = is_agreed
        self.stop |= is_agreed

    def _is_over(self) -> bool:
        return self._ends or (self.config.max_steps is not None and self.step >= self.config.max_steps)

    def _is_due(self, num_steps: int | None) -> bool:
        return num_steps is not None and self.step % num_steps == 0

    def _step(self, window: list[Batch], exchange: StepExchange) -> None:
        """Take an optimizer step on the batches of a window, or skip it on every rank."""
        self._activity = f"step {self.step + 1}"
        self._groups.begin_step(self.step, self.total_steps)
        loss, samples = self._compute_gradients(window, exchange)
        logs = (self.step + 1) % self.config.log_every_n_steps == 0
        norm = self._finish_gradients(exchange, logs) if math.isfinite(loss) else None
        if norm is None:
            self._skip_or_stop(window, exchange)
            return
        has_overflowed = self._change_parameters()
        self.step, self._windows_done = self.step + 1, self._windows_done + 1
        self._meter.add_step(loss, exchange.weight * (self._engine.weight_unit or 1.0), samples)
        if has_overflowed:  # the scaler finds its scale by overflows, so this is not an error with on_nonfinite="stop"
            self.skipped += 1
            self._notify("on_skip")
        else:
            self._notify("on_step", loss)
        if logs:
            self._record(gradient_norm=norm if math.isfinite(norm) else None)

    def _compute_gradients(self, window: list[Batch], exchange: StepExchange) -> tuple[float, float]:
        """Run the forward and backward passes; return the mean loss (NaN on a fault) and the samples of all ranks."""
        engine = self._engine
        if (changed := self._trainable.changed()) and (engine.stages > 1 or engine.reduced):
            raise ConfigError(
                f"{list_names(changed)} was frozen or unfrozen in the run, and DistributedDataParallel and pipelines "
                "note at its start which gradients they send: use strategy='replicate' or 'fsdp', or freeze before fit"
            )
        samples = sum(batch.samples for batch in window)

        def start_exchange(loss_sum: float | Tensor) -> None:
            exchange.start(loss_sum, samples, engine.reports_loss, changed, weight=engine.weight, stops=self.stop)
            if changed:
                self._groups.adopt_changes(self.step, self.total_steps)

        try:
            # The exchange starts before the last backward pass and is waited for after it.
            engine.forward_backward(window, start_exchange)
        except Exception as error:  # the text of an error of the user's model or loss stays first
            error.add_note(_place_of(self.step + 1, window))
            if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
                raise ConfigError(
                    f"{error}: BatchNorm cannot be trained on one sample of a process, as a last batch may have: use "
                    "DataLoader(..., drop_last=True), or another batch_size"
                ) from error
            raise
        self._loss_parameters.check()
        return exchange.finish()

    def _finish_gradients(self, exchange: StepExchange, logs: bool) -> float | None:
        """Weigh, unscale and clip the gradients; return their norm, NaN if it is not read, or None if not finite."""
        config, scaler, step = self.config, self._engine.scaler, self.step + 1
        # A step with an infinite gradient must not reach a checkpoint, so the gradient of a step that may be saved is
        # checked.
        saves = config.checkpoint_dir is not None and (
            self._windows_per_epoch in (None, self._windows_done + 1)
            or step == config.max_steps
            or (config.checkpoint_every_n_steps is not None and step % config.checkpoint_every_n_steps == 0)
            or exchange.stop_signal
        )
        # All other gradients are neither unscaled nor cleared, and reading the groups is faster than reading the model.
        trained = self._groups.parameters
        if exchange.gradient_factor != 1.0:
            scale_gradients(trained, exchange.gradient_factor)
        scaler.unscale_(self.optimizer)
        if config.gradient_clipping is None and not (logs or saves or config.on_nonfinite == "skip"):
            return math.nan
        norm = gradient_norm(trained, stages=self._engine.stages)
        # Reading the norm waits for a GPU. A scaler skips steps that are not finite itself, and lowers its scale.
        norm_value = norm.item() if logs or not scaler.is_enabled() else math.nan
        if not scaler.is_enabled() and not math.isfinite(norm_value):
            return None
        self._checked_at = step
        if config.gradient_clipping is not None:
            clip_gradients(trained, config.gradient_clipping, norm)
        return norm_value

    def _change_parameters(self) -> bool:
        """Take the optimizer's step, and return whether the scaler skips it, because gradients are infinite."""
        scaler = self._engine.scaler
        has_overflowed = scaler.is_enabled() and any(x.item() for x in first_infinities(scaler, self.optimizer))
        scaler.step(self.optimizer)
        self._groups.end_step()
        scaler.update()
        return has_overflowed

    def _skip_or_stop(self, window: list[Batch], exchange: StepExchange) -> None:
        """Skip a step that is not finite, or raise TrainingError, depending on ``on_nonfinite``.

        A parameter that is not finite either is of an earlier step, whose gradient may not have been checked.
        """
        if names := nonfinite_parameters(named_parameters(self._engine)):
            raise TrainingError(
                f"step {self.step + 1} is not finite, because an earlier step has made parameters so: "
                f"{list_names(names)}; continue from the last checkpoint with a lower learning rate, with "
                "gradient_clipping, or with on_nonfinite='skip', which checks the gradient of every step"
            )
        fault = exchange.describe_nonfinite([index for batch in window for index in batch.indices or ()])
        if self.config.on_nonfinite == "stop":
            raise TrainingError(
                f"step {self.step + 1} is not finite: {fault}; the parameters are as before the step: lower the "
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
        cost = self._meter.cost()
        record = {"step": self.step, "epoch": completed, **quantities, **cost}
        self.history.append(record)
        self._groups.quantities |= quantities
        self._notify("on_record", record)

    def _record(self, **more: float | None) -> None:
        """Add a record of the steps since the last one to the history."""
        rate = self._groups.rate_of_step
        quantities = {
            "loss": self._meter.mean_loss,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"] if rate is None else rate),
            **more,
            "samples_per_s": self._meter.samples_per_s(),
            "memory_bytes": peak_memory(),
            "skipped": self.skipped,
        }
        self._meter.begin_record()
        self._append(quantities)

    def _validate(self, validation: Feed) -> None:
        begin = time.perf_counter()
        values = self._evaluate(validation)
        self._validated_at = self.step
        self._meter.leave_out(time.perf_counter() - begin)
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
        agree_on_progress(self, self._engine.stages, "a checkpoint")
        self._check_last_gradient()
        self._meter.count_time()
        records = json.dumps(list(self.history), default=float)  # float converts NumPy's numbers and tensors
        extra = {name: getattr(self, name) for name in SAVED_ATTRIBUTES} | {
            "_sums": self._meter.sums,
            "_elapsed_s": self._meter.elapsed_s,
            "device_seconds": self._meter.device_seconds,
            "samples": feed.window_samples,
            # The text is stored as bytes, because a checkpoint encodes nested values one by one: 100,000 records take
            # 1.7 s then, in place of 0.6 s.
            "history": torch.frombuffer(bytearray(records, "utf-8"), dtype=torch.uint8),
            "callbacks": [(type(callback).__name__, None) for callback in self._stateful().values()],
            "scaler": self._engine.scaler.state_dict(),
            "trainable": self._trainable.changes,
            "peak_rates": self._groups.peak_rates,
            "scheduler": None if self._groups.scheduler is None else self._groups.scheduler.state_dict(),
            "config": asdict(self.config),
        }
        # Ranks agree after each callback, because the next one may communicate.
        states = {
            name: run_on_all_ranks(partial(_state_of, name, callback), None)
            for name, callback in self._stateful().items()
        }
        save = checkpoint.async_save if self.config.checkpoint_asynchronously else checkpoint.save
        saved = save(
            self.config.checkpoint_dir,
            self.model,
            self.optimizer,
            step=self.step,
            extra=extra,
            per_rank_extra={"feed": feed.state_dict(), "hook": hook_state(self.model)},
            rank_states=states,
            keep=self.config.keep_checkpoints,
        )
        self._pending = None if isinstance(saved, Path) else saved
        self._notify("on_checkpoint")

    def _check_last_gradient(self) -> None:
        """Raise TrainingError if the run saves after a step whose gradient has not been checked, and is not finite."""
        if self._checked_at == self.step or self._engine.scaler.is_enabled():
            return
        norm = gradient_norm(self._groups.parameters, stages=self._engine.stages).item()
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
        """Save, and end the process on every rank, because a rank has received a signal."""
        self._save(feed)
        self._finish_saving()
        outcome = "nothing is saved, because checkpoint_dir is not set"
        if self.config.checkpoint_dir is not None:
            outcome = f"a checkpoint is in {self.config.checkpoint_dir}, and the same command resumes from it"
        if get_rank() == 0:
            _log.warning("stopped by %s after step %d: %s", signal.Signals(stop_signal).name, self.step, outcome)
        raise SystemExit(128 + stop_signal)


def _state_of(name: str, callback: Any) -> Any:
    try:
        return callback.state_dict()
    except Exception as error:
        message = f"the state_dict of {name} raised {type(error).__name__}: {error}"
        _log.error(message)  # gloo aborts the process if another rank waits in a collective of its state_dict
        raise CheckpointError(message) from error


def _place_of(step: int, window: list[Batch]) -> str:
    """Return a sentence with the step, the samples and the rank of an error."""
    indices = [str(index) for batch in window for index in batch.indices or ()]
    samples = f", on the samples {list_names(indices, MAX_SAMPLES)}" if indices else ""
    return f"This was in step {step}{samples} of rank {get_rank()}."
