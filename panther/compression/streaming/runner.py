"""Compress a model whose weights are mapped from files, with one part of it and one batch in memory at a time."""

__all__ = ["StreamingRunner", "compress_streamed"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from panther._descriptions import describe_function
from panther._version import __version__
from panther.compression._compress import compress_with, plain_tensors
from panther.compression.calibration.descriptions import described_batches, shortened
from panther.compression.calibration.model_state import without_compiled_blocks
from panther.compression.calibration.runner import Runner, return_freed_memory
from panther.compression.calibration.steps import Step, Watch, send
from panther.compression.calibration.survey import check_adapters, check_model
from panther.compression.calibration.targets import Target, holder_of
from panther.compression.config import CompressConfig
from panther.compression.report import CompressionReport
from panther.compression.streaming.parts import PartRun, Parts, ResultGradients, checked_part_modules
from panther.compression.streaming.source import SourceFiles
from panther.compression.streaming.spool import Spool, freed_blocks_returned
from panther.errors import CompressionError
from panther.sketch import check_seed

_Value = TypeVar("_Value")

_AFTER = "-after-"  # in the names of files, between the name of a value and the part after which its work was saved
_NOT_COMPARED = ("calibration", "group", "progress", "seed")  # fields of the settings


class StreamingRunner(Runner):
    """A model and batches, whose steps run part by part: all batches through one part before the next part.

    Forward, the results of each part are kept in files. Backward, a part is run again from the results of the parts
    before it, and gets the gradients of the parts after it.
    """

    is_streaming = True

    def __init__(self, *args: Any, scratch: Path, source: SourceFiles | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = source
        self.spool = spool = Spool(scratch)
        self._parts: Parts | None = None
        self._is_within = False
        modules = {f"module {name}": module for name, module in self.model.named_modules()}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        spool.references |= modules | {f"tensor {name}": tensor for name, tensor in tensors}
        self.output_name = spool.notes.get("output_name", "")
        self.difference = spool.notes.get("difference")
        self._num_samples = {int(number): count for number, count in spool.notes.get("num_samples", {}).items()}

    def kept(self, value: _Value) -> _Value:
        """Return the same value, with its tensors in files."""
        return self.spool.kept(value)

    def register(self, targets: Sequence[Target]) -> None:
        """Let files refer to targets, and to the layers that stand for stacked weights."""
        for target in targets:
            self.spool.references[f"target {target.name}"] = target
            if target.is_stacked:
                self.spool.references[f"layer {target.name}"] = target.modules[0]

    def remembered(self, name: str, make: Callable[[], _Value]) -> _Value:
        """Return the value of a name, which is in a file. It is made where no process before this one has done so.

        Values that are made within the call of ``make`` for another value are safe with that value.
        """
        if name not in self.spool:
            is_outermost, self._is_within = not self._is_within, True
            try:
                self.spool.write(name, make())
            finally:
                self._is_within = not is_outermost
            for saved in self.spool.names(f"{name}{_AFTER}"):
                self.spool.remove(saved)
            if is_outermost:
                self._commit()
        value: _Value = self.spool.read(name)
        return value

    def progress_of(self, name: str) -> tuple[int, Any] | None:
        """Return the part after which the work on a remembered value was saved last, and what was saved."""
        for saved in self.spool.names(f"{name}{_AFTER}"):
            return int(saved.rpartition(_AFTER)[2]), self.spool.read(saved)
        return None

    def save_progress(self, name: str, part: int, value: Any) -> None:
        """Save the work on a remembered value, after all steps of a part."""
        before = self.spool.names(f"{name}{_AFTER}")
        self.spool.write(f"{name}{_AFTER}{part}", value)
        for saved in before:
            self.spool.remove(saved)
        self._commit()

    def check_source(self, *, is_end: bool = False) -> None:
        """Raise CompressionError if the files of the weights have changed."""
        if self._source is not None and (change := self._source.change(is_end=is_end)):
            raise CompressionError(change)

    def _commit(self) -> None:
        self.check_source()  # so that nothing counts that was made of something else
        self.spool.notes |= {
            "output_name": self.output_name, "difference": self.difference, "num_samples": self._num_samples,
        }  # fmt: skip
        self.spool.commit()

    def steps(
        self,
        passes: Sequence[tuple[Any, int]],
        targets: Sequence[Target],
        *,
        gradients: bool,
        description: str = "",
        after: int | None = None,
    ) -> Iterator[Step]:
        """Yield the steps of one part after another: with gradients backward, and otherwise forward."""
        parts = self._divide(targets)
        numbers = [self._number_of(batch) for batch, _ in passes]
        places_of = {target: self._places_of(parts, target) for target in targets}
        places = range(len(parts.calls))
        if after is not None:
            places = places[:after] if gradients else places[after + 1 :]
        if not gradients:
            for place in self.over(places, description, 0.0) if description else places:
                yield from self._forward_steps(parts, passes, numbers, place, places_of)
            return
        if places:
            self._record(parts, passes, numbers, places[-1], description)
        result_gradients = ResultGradients(self.spool, description or "other", is_new=after is None)
        for place in self.over(places[::-1], description, 0.0) if description else places[::-1]:
            return_freed_memory()
            yield from self._backward_steps(parts, passes, numbers, place, places_of, result_gradients)
        result_gradients.remove()

    def _forward_steps(
        self,
        parts: Parts,
        passes: Sequence[tuple[Any, int]],
        numbers: Sequence[int],
        place: int,
        places_of: dict[Target, list[int]],
    ) -> Iterator[Step]:
        called = [target for target, places in places_of.items() if place in places]
        is_last = place == len(parts.calls) - 1
        completed = [t for t, places in places_of.items() if max(places, default=len(parts.calls) - 1) == place]
        for number, (batch, _) in enumerate(passes):

            def forward(batch: Any = batch, number: int = number) -> Tensor | None:
                record = not is_last and not parts.is_recorded(place, numbers[number])
                return parts.run(partial(self.output, batch), place, numbers[number], record=record).output

            completed_now = completed if number == len(passes) - 1 else ()
            yield Step(number, batch, called, forward, lambda output, watch: False, place, completed_now)

    def _backward_steps(
        self,
        parts: Parts,
        passes: Sequence[tuple[Any, int]],
        numbers: Sequence[int],
        place: int,
        places_of: dict[Target, list[int]],
        result_gradients: ResultGradients,
    ) -> Iterator[Step]:
        called = [target for target, places in places_of.items() if place in places]
        completed = [target for target, places in places_of.items() if min(places, default=0) == place]
        for number, (batch, seed) in enumerate(passes):
            run = PartRun()

            def forward(batch: Any = batch, number: int = number) -> Tensor | None:
                nonlocal run
                run = parts.run(partial(self.output, batch), place, numbers[number])
                return run.output

            def backward(
                output: Tensor | None, watch: Watch, batch: Any = batch, seed: int = seed, number: int = number
            ) -> bool:
                nonlocal run
                if output is not None:
                    if not output.requires_grad:
                        return False
                    outputs = [self.differentiated(output, batch, seed)]
                else:
                    outputs = result_gradients.take(number, place, run.results)
                leaves, run = run.leaves, PartRun()
                if outputs:
                    send(outputs, watch, leaves.values())
                    result_gradients.add(number, place, leaves)
                return bool(outputs)

            completed_now = completed if number == len(passes) - 1 else ()
            yield Step(number, batch, called, forward, backward, place, completed_now)

    def _record(
        self, parts: Parts, passes: Sequence[tuple[Any, int]], numbers: Sequence[int], place: int, description: str
    ) -> None:
        """Run the batches forward up to a part, where results are not kept; with a description, commit each part."""
        batches = dict(zip(numbers, (batch for batch, _ in passes), strict=True))
        places = range(place)
        with torch.no_grad():
            for earlier in self.over(places, f"forward before {description}", 0.0) if description else places:
                missing = [number for number in batches if not parts.is_recorded(earlier, number)]
                for number in missing:
                    parts.run(partial(self.output, batches[number]), earlier, number, record=True)
                if description and missing:
                    self._commit()

    def _divide(self, targets: Sequence[Target]) -> Parts:
        """Return the parts of the model, which are found at the first call."""
        if self._parts is None:
            names = {module: name for name, module in self.model.named_modules()}
            calls = self.remembered(
                "parts",
                lambda: checked_part_modules(
                    self.model, targets, partial(self.output, self.batches[0]), self.mask(self.batches[0]), self.spool
                ),
            )
            self._parts = Parts(calls, names, self.spool)
        return self._parts

    def _places_of(self, parts: Parts, target: Target) -> list[int]:
        """Return the places of the parts that contain a target."""
        modules = set(map(holder_of, target.modules))
        return [place for place, unit in enumerate(parts.calls) if not modules.isdisjoint(unit.modules())]


def compress_streamed(
    model: nn.Module, config: CompressConfig, scratch: Path, source: SourceFiles | None = None
) -> CompressionReport:
    """Compress a model in place, as :func:`panther.compress` does, with all that is large in files of ``scratch``.

    If ``scratch``, which belongs to this call, has files of a process that was killed, their contents are used. The new
    layers are mapped from files that are removed already. Nothing may write to ``source``, the files of the weights.
    """
    check_model(model)
    check_adapters(model)
    with freed_blocks_returned(), plain_tensors() as forward_device, without_compiled_blocks(model):
        runner = StreamingRunner(
            model, config.calibration, config.forward_fn, config.mask_fn, None, config.progress, config.loss_fn,
            forward_device, scratch=scratch, source=source,
        )  # fmt: skip
        spool = runner.spool
        description = {
            "source": f"{source}", **_described(config, runner),
        }  # fmt: skip
        before = spool.notes.setdefault("description", description)
        seed = spool.notes.setdefault("seed", check_seed(config.seed))
        if config.seed not in (None, seed):
            description, before = description | {"seed": str(config.seed)}, before | {"seed": str(seed)}
        differing = [name for name in description if description[name] != before[name]]
        if differing:
            name = differing[0]
            raise CompressionError(
                f"{scratch} has the work of a run that was killed, with {name} {before[name]}, and now it is "
                f"{description[name]}: give what that run had, or remove {scratch} to begin anew"
            )
        spool.commit()
        report = compress_with(runner, replace(config, seed=seed))
        runner.check_source(is_end=True)
        return report


def _described(config: CompressConfig, runner: StreamingRunner) -> dict[str, str]:
    """Return what must not change if a run is continued."""
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _NOT_COMPARED}
    return {
        "panther": __version__,
        "torch": torch.__version__,
        "calibration": described_batches([*runner.batches, *runner.held_out]),
        **{name: shortened(_described_setting(value)) for name, value in settings.items()},
    }


def _described_setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described_setting, value))
    return describe_function(value) if callable(value) else f"{value}"
