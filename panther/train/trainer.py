"""One trainer from a laptop to many ranks: torch's engines do the work, this is the loop around them."""

__all__ = ["Callback", "Trainer"]

import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther.distributed import checkpoint, get_rank, get_world_size
from panther.errors import CheckpointError, ConfigError, FormatError, TrainingError
from panther.train.arguments import check_arguments
from panther.train.batches import Batch, Feed
from panther.train.config import TrainConfig
from panther.train.control import Control, agree, join, on_first, signals
from panther.train.drawing import deterministic, kept_generators, seed_generators
from panther.train.history import History, peak_memory
from panther.train.layout import Built, Optimizer, build
from panther.train.locking import locked
from panther.train.profiling import profiled
from panther.train.schedules import rate_factor
from panther.train.trackers import open_trackers


class Callback:
    """What a user adds to a run; every method is called on every rank, and does nothing by itself.

    One with ``state_dict`` and ``load_state_dict`` has its state in checkpoints.
    """

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step, after resuming."""

    def on_step(self, trainer: "Trainer", loss: float) -> None:
        """After every step of the optimizer, with the mean loss of its window over all ranks."""

    def on_skip(self, trainer: "Trainer") -> None:
        """After a step that was left out as not finite, with ``nonfinite="skip"``; ``trainer.step`` counts it."""

    def on_record(self, trainer: "Trainer", record: Mapping[str, Any]) -> None:
        """After every record of the history."""

    def on_epoch(self, trainer: "Trainer") -> None:
        """After every epoch."""

    def on_checkpoint(self, trainer: "Trainer") -> None:
        """When a checkpoint of this step was asked for; an asynchronous one is still being written."""


class Trainer:
    """Train a model, on one process or on all that a launcher started.

    Args:
        model: Built alike on every rank. It is wrapped, cut or sharded as the configuration says.
        optimizer: Made from ``model.parameters()``; or a function of parameters, a class or a
            :func:`functools.partial` of one; None is AdamW.
        loss_fn: ``loss_fn(output, target)`` for batches ``(input, target)``; None for models that return their loss, or
            have it in the attribute or under the key ``loss``.
        config: The settings.
        callbacks: What is told of steps, records, epochs and checkpoints.
        metrics: ``metric(output, target)`` by name, each the mean over a batch's samples; for validation.

    Attributes:
        model: The model as the strategy made it, after ``fit`` has begun; a list of this rank's stages in a pipeline.
        optimizer: Its optimizer.
        history: What happened.
        step: Steps of the optimizer so far.
        epoch: Epochs that are over.
        stop: Set it to True, in a callback on all ranks, to end after the present step.

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

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer = None,
        loss_fn: Callable[..., Tensor] | None = None,
        config: TrainConfig | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    ) -> None:
        check_arguments(model, optimizer, loss_fn, config, callbacks, metrics, Callback)
        self.config = config or TrainConfig()
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loss_fn, self.callbacks, self.metrics = loss_fn, list(callbacks), dict(metrics or {})
        self.history = History()
        self.step = self.epoch = 0
        self.stop = False
        self.skipped = 0
        """Steps that were left out because they were not finite."""
        self._place = 0  # windows of the present epoch that are behind
        self._windows: int | None = None  # of an epoch, if it is known
        self._built: Built | None = None
        self._sums = [0.0, 0.0, 0.0]  # of losses, samples and steps since the last record
        self._pending: Any = None
        self._validated_at = -1
        self._saved_at: tuple[int, ...] = ()

    def fit(self, train: Any, validation: Any = None) -> History:
        """Train.

        Args:
            train: A DataLoader, or a Dataset with ``batch_size`` in the configuration. Its samples are shared out over
                the data-parallel ranks; batches are of a rank.
            validation: The same, for the loss and the metrics beside training.

        Returns:
            The history, alike on every rank.

        Raises:
            ConfigError: If settings, model and data do not go together.
            TrainingError: On every rank, if a loss is not finite: step, rank and samples are named; or another run has
                the checkpoint directory.
            CheckpointError: If a checkpoint cannot be written; those before it stay.
            SystemExit: On every rank, with 128 and the signal's number, after SIGTERM or SIGINT: the step is finished
                and a checkpoint written, from which the same call goes on.
        """
        with ExitStack() as stack:
            join(self.config.timeout_s)
            self.stop = False
            if self.config.checkpoint_dir is not None:
                stack.enter_context(locked(Path(self.config.checkpoint_dir)))
            stack.callback(self._finish_saving)
            if self.config.deterministic:
                stack.enter_context(deterministic())
            control = stack.enter_context(signals())
            self._start(train)
            feed = self._feed(train)
            self._resume(feed)
            with open_trackers(self.config, self.step) as trackers, profiled(self.config) as profile:
                for callback in self.callbacks:
                    callback.on_start(self)
                self._train(
                    feed, None if validation is None else self._feed(validation, False), control, trackers, profile
                )
        return self.history

    def evaluate(self, data: Any) -> dict[str, float]:
        """Loss and metrics of the model as it is, weighted by samples; every rank must call it.

        A checkpoint is taken up by ``fit`` alone.
        """
        join(self.config.timeout_s)
        self._start(data)
        return self._evaluate(self._feed(data, False))

    def export(self, directory: str) -> Path:
        """Write the whole model for inference, from any layout; every rank must call it."""
        return checkpoint.export(self.model, directory)

    # Beginning

    def _start(self, data: Any) -> None:
        if self._built is not None:
            return
        seed_generators(self.config.seed)

        def sample() -> Any:
            feed = Feed(data, batch_size=self.config.batch_size, seed=0, rank=0, size=1)
            with kept_generators():
                return next(feed.windows(0))[0].data

        self._built = build(self.model, self.optimizer, self.loss_fn, self.config, sample)
        self.model, self.optimizer = self._built.engine.parts, self._built.optimizer
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        torch.manual_seed(self.config.seed + self._built.engine.rank)  # ranks that see other samples drop other entries

    def _feed(self, data: Any, training: bool = True) -> Feed:
        assert self._built is not None
        engine, config = self._built.engine, self.config
        if not training:
            engine.check_evaluation()
        return Feed(
            data,
            batch_size=config.batch_size,
            seed=config.seed,
            rank=engine.rank,
            size=engine.size,
            accumulation=config.gradient_accumulation_steps if training else 1,
            even=training and engine.stages > 1,
            shuffle=training,
        )

    def _resume(self, feed: Feed) -> None:
        config = self.config
        if config.checkpoint_dir is None and config.resume in ("auto", "never"):
            return
        directory = Path(config.checkpoint_dir or "")
        if config.resume == "never":
            if found := on_first(lambda: list(map(str, checkpoint.checkpoints(directory)))):
                raise ConfigError(
                    f"resume='never' and {directory} has checkpoints, {found[-1]} say: name another directory"
                )
            return
        if config.resume != "auto":
            self._take_up(Path(config.resume), feed)
            later = on_first(lambda: [p.name for p in checkpoint.checkpoints(directory) if _step_of(p) > self.step])
            if config.checkpoint_dir is not None and later:
                raise ConfigError(
                    f"the run goes on from step {self.step}, and {directory} has {later[-1]}, which the next run would "
                    "take for the latest: name another checkpoint_dir, or remove the later checkpoints"
                )
            return
        for path in reversed(on_first(lambda: checkpoint.checkpoints(directory))):
            try:
                self._take_up(path, feed)
                return
            except FormatError as error:
                warnings.warn(f"{path} is passed over: {error}", UserWarning, stacklevel=3)

    def _take_up(self, path: Path, feed: Feed) -> None:
        assert self._built is not None
        self._built.engine.settle(lambda: next(feed.windows(0), None))
        restored = checkpoint.load(path, self.model, self.optimizer)
        extra = restored.extra
        if not isinstance(extra, Mapping) or "place" not in extra:
            raise CheckpointError(
                f"{path} is no Trainer's: load it by panther.distributed.checkpoint.load, and begin anew"
            )
        self.step, self.epoch, self._place = restored.step, extra["epoch"], extra["place"]
        self.skipped, self._sums, self._validated_at = extra["skipped"], extra["sums"], extra["validated_at"]
        self.history = History.from_state_dict(extra["history"])
        self._saved_at = (self.step, self.epoch, len(self.history))
        if self._built.scaler is not None and extra["scaler"] is not None:
            self._built.scaler.load_state_dict(extra["scaler"])
        if restored.rank_extra is not None:
            feed.load_state_dict(restored.rank_extra["feed"])
        if feed.window_samples and extra["samples"]:  # windows may have another size now: no sample is left out
            self._place = self._place * extra["samples"] // feed.window_samples
        kept, found = extra["callbacks"], [type(one).__name__ for one in self._stateful()]
        if [name for name, _ in kept] != found:
            raise CheckpointError(
                f"{path} has the states of the callbacks {[name for name, _ in kept]}, and the run has {found}: pass "
                "the same ones, in their order"
            )
        for callback, (_, state) in zip(self._stateful(), kept, strict=True):
            callback.load_state_dict(state)

    def _stateful(self) -> list[Any]:
        return [one for one in self.callbacks if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]

    # The loop

    def _train(self, feed: Feed, validation: Feed | None, control: Control, trackers: Any, profile: Any) -> None:
        config = self.config
        steps = self._windows = feed.steps()
        last_epoch = config.epochs or (math.inf if config.max_steps else 1)
        total = config.max_steps or (None if steps is None else steps * int(last_epoch))
        if total is None and config.schedule in ("linear", "cosine"):
            raise ConfigError(f"schedule={config.schedule!r} needs to know the last step: set max_steps")
        trackers.expect(total, self.step)
        self._clock, self._seen = time.perf_counter(), 0.0
        if (self.epoch >= last_epoch or self._over()) and get_rank() == 0:
            print(f"panther: step {self.step} was the last already: give more epochs or max_steps", file=sys.stderr)
        if self._place and self._place == steps:  # a signal came between an epoch's last step and its end
            self._end_epoch(feed, validation, trackers)
        while self.epoch < last_epoch and not self._over():
            with kept_generators():
                windows = feed.windows(self.epoch, self._place)
            began = self._place
            for window in self._agreed_windows(windows, feed):
                self._step(window, control, trackers, total)
                profile.step()
                if validation is not None and self._due(config.validate_every_n_steps):
                    self._validate(validation, trackers)
                if control.stopped:
                    self._leave(feed, control)
                if self._due(config.checkpoint_every_n_steps) and self._place != steps:  # else after the epoch's end
                    self._save(feed)
                if self._over():
                    break
            if self._place == began == 0:
                raise feed.nothing("training")
            if self._over() and (steps is None or self._place < steps):
                break
            self._end_epoch(feed, validation, trackers)
        if self._sums[2]:
            self._record(trackers, {})
        if validation is not None and self._validated_at != self.step:
            self._validate(validation, trackers)
        if config.checkpoint_dir is not None:
            self._save(feed)
            self._finish_saving()

    def _end_epoch(self, feed: Feed, validation: Feed | None, trackers: Any) -> None:
        self.epoch, self._place = self.epoch + 1, 0
        if validation is not None and self.config.validate_every_n_steps is None:
            self._validate(validation, trackers)
        for callback in self.callbacks:
            callback.on_epoch(self)
        every = self.config.checkpoint_every_n_epochs
        if self._due(self.config.checkpoint_every_n_steps) or (every and self.epoch % every == 0):
            self._save(feed)

    def _over(self) -> bool:
        return self.stop or (self.config.max_steps is not None and self.step >= self.config.max_steps)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _agreed_windows(self, windows: Iterator[list[Batch]], feed: Feed) -> Iterator[list[Batch]]:
        """Windows; of streams only while every rank has one, with the share of each in all their samples."""
        if not feed.streams or feed.size == 1:
            yield from windows
            return
        while True:
            window = next(windows, None)
            counts = agree([0 if window is None else 1, sum(b.samples for b in window or ())])
            if window is None or counts[0] < get_world_size():
                return
            everyone = counts[1] / (get_world_size() // feed.size)
            for batch in window:
                batch.share = batch.samples / everyone
            yield window

    def _step(self, window: list[Batch], control: Control, trackers: Any, total: int | None) -> None:
        assert self._built is not None
        config, engine, scaler = self.config, self._built.engine, self._built.scaler
        factor = rate_factor(config.schedule, self.step, total, config.warmup_steps)
        if config.schedule != "own":
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        self.optimizer.zero_grad()
        samples = sum(batch.samples for batch in window)
        engine.run(window, lambda loss: control.start(loss, samples, engine.speaks))
        loss, seen = control.finish()
        if not math.isfinite(loss) and not self._skip(window, control):
            return
        logs = (self.step + 1) % config.log_every_n_steps == 0
        saves = config.checkpoint_dir is not None and (
            self._windows in (None, self._place + 1)
            or self.step + 1 == config.max_steps
            or (self.step + 1) % (config.checkpoint_every_n_steps or self.step + 2) == 0
            or control.stopped
        )
        norm = None
        if config.gradient_clipping is not None or logs or saves or config.nonfinite == "skip":
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            norm = engine.gradient_norm()
            if scaler is None and not torch.isfinite(norm) and not self._skip(window, control):
                return
            if config.gradient_clipping is not None:
                engine.clip(config.gradient_clipping, norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.step, self._place = self.step + 1, self._place + 1
        self._seen += seen
        for i, value in enumerate((loss * seen, seen, 1)):
            self._sums[i] += value
        trackers.advance(self.step, loss)
        for callback in self.callbacks:
            callback.on_step(self, loss)
        if logs:
            self._record(trackers, {"gradient_norm": None if norm is None or not norm.isfinite() else norm.item()})

    def _skip(self, window: list[Batch], control: Control) -> bool:
        """Leave a step out, or stop; False tells the caller not to go on with it."""
        where = control.nonfinite(window)
        if self.config.nonfinite == "stop":
            raise TrainingError(
                f"step {self.step + 1} is not finite: {where}; the parameters are as before it: lower the learning "
                "rate, clip gradients, look at these samples, or set nonfinite='skip'"
            )
        self.skipped += 1
        self.step, self._place = self.step + 1, self._place + 1
        self.optimizer.zero_grad()
        for callback in self.callbacks:
            callback.on_skip(self)
        return False

    # What is written

    def _record(self, trackers: Any, more: Mapping[str, Any]) -> None:
        losses, samples, _ = self._sums
        now = time.perf_counter()
        record = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": losses / max(samples, 1),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **more,
            "samples_per_s": self._seen / max(now - self._clock, 1e-9),
            "memory_bytes": peak_memory(),
            "skipped": self.skipped,
        }
        self._sums, self._clock, self._seen = [0.0, 0.0, 0.0], now, 0.0
        self._tell(trackers, record)

    def _tell(self, trackers: Any, record: dict[str, Any]) -> None:
        self.history.append(record)
        trackers.record(record)
        for callback in self.callbacks:
            callback.on_record(self, record)

    def _validate(self, validation: Feed, trackers: Any) -> None:
        begun = time.perf_counter()
        values = self._evaluate(validation)
        self._validated_at = self.step
        self._clock += time.perf_counter() - begun  # the samples a second are those of training
        record = {"step": self.step, "epoch": self.epoch}
        self._tell(trackers, record | {f"validation_{name}": value for name, value in values.items()})

    def _evaluate(self, feed: Feed) -> dict[str, float]:
        assert self._built is not None
        engine = self._built.engine
        modes = [(module, module.training) for part in engine.modules() for module in part.modules()]
        sums = torch.zeros(len(self.metrics) + 2, dtype=torch.float64)
        try:
            for part in engine.modules():
                part.eval()
            with torch.no_grad(), kept_generators():
                for window in self._agreed_windows(feed.windows(0), feed):
                    for batch in window:
                        sums += engine.evaluate(batch, self.metrics)
        finally:
            for module, training in modes:
                module.training = training
        *values, samples = agree(sums.tolist())
        if not samples:
            raise feed.nothing("validation")
        return {name: value / samples for name, value in zip(("loss", *self.metrics), values, strict=True)}

    def _save(self, feed: Feed) -> None:
        assert self._built is not None
        assert self.config.checkpoint_dir is not None
        state = (self.step, self.epoch, len(self.history))
        if self._saved_at == state:
            return
        self._saved_at = state
        scaler = self._built.scaler
        extra = {
            "epoch": self.epoch,
            "place": self._place,
            "samples": feed.window_samples,
            "skipped": self.skipped,
            "sums": self._sums,
            "validated_at": self._validated_at,
            "history": self.history.state_dict(),
            "callbacks": [(type(one).__name__, one.state_dict()) for one in self._stateful()],
            "scaler": None if scaler is None else scaler.state_dict(),
            "config": self.config.to_dict(),
        }
        save = checkpoint.async_save if self.config.checkpoint_asynchronously else checkpoint.save
        saved = save(
            self.config.checkpoint_dir,
            self.model,
            self.optimizer,
            step=self.step,
            extra=extra,
            rank_extra={"feed": feed.state_dict()},
            keep=self.config.keep_checkpoints,
        )
        self._pending = None if isinstance(saved, Path) else saved
        for callback in self.callbacks:
            callback.on_checkpoint(self)

    def _finish_saving(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _leave(self, feed: Feed, control: Control) -> None:
        """Save and end all ranks, after a signal to one of them."""
        if self.config.checkpoint_dir is not None:
            self._save(feed)
            self._finish_saving()
            kept = f"a checkpoint is in {self.config.checkpoint_dir}, and the same command goes on from it"
        else:
            kept = "nothing is kept, as checkpoint_dir is not set"
        if get_rank() == 0:
            print(
                f"panther: stopped by {signal.Signals(control.stopped).name} after step {self.step}: {kept}",
                file=sys.stderr,
            )
        raise SystemExit(128 + control.stopped)


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.partition("-")[2].partition(".")[0])
