"""Compress a model whose weights are mapped from files, with one part of it and one batch in memory at a time."""

__all__ = ["StreamingRunner", "compress_streamed"]

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther._descriptions import describe_function
from panther._text import format_bytes
from panther._version import __version__
from panther.compression._compress import compress_with, plain_tensors
from panther.compression.calibration.batches import entries_of
from panther.compression.calibration.descriptions import described_batches, shortened
from panther.compression.calibration.eligibility import check_adapters, check_model
from panther.compression.calibration.model_state import without_compiled_blocks
from panther.compression.calibration.runner import MOMENTS, Runner, return_freed_memory
from panther.compression.calibration.steps import Step, Watch, send
from panther.compression.calibration.targets import Selector, Target, holder_of
from panther.compression.config import CompressConfig
from panther.compression.memory import TargetFiles, predict_disk_bytes
from panther.compression.report import CompressionReport
from panther.compression.streaming.parts import RESULTS, PartRun, Parts, ResultGradients, checked_part_modules
from panther.compression.streaming.source import SourceFiles
from panther.compression.streaming.spool import BLOCK, Spool, check_free, freed_blocks_returned, full_disk
from panther.errors import CompressionError
from panther.files.tensors import bytes_of
from panther.sketch import check_seed

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")

_NOT_COMPARED = ("calibration", "group", "progress", "seed")  # fields of the settings
_AFTER = "-after-"  # in the names of files, between the name of a value and the part after which its work was saved


class StreamingRunner(Runner):
    """A model and batches, whose steps run part by part: all batches through one part before the next part.

    Forward, the results of each part are kept in files. Backward, a part is run again from the results of the parts
    before it, and gets the gradients of the parts after it.
    """

    is_streaming = True

    def __init__(
        self,
        *args: Any,
        scratch: Path,
        blocks: Selector | Sequence[Selector] | None = None,
        max_disk_bytes: int | None = None,
        source: SourceFiles | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._source = source
        self._blocks, self._max_disk_bytes = blocks, max_disk_bytes
        self.spool = spool = Spool(scratch, lambda number: min(self.gathered(number)))
        self._parts: Parts | None = None
        self._is_within = False
        self._num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        modules = {f"module {name}": module for name, module in self.model.named_modules()}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        spool.references |= modules | {f"tensor {name}": tensor for name, tensor in tensors}
        self.output_name = spool.notes.get("output_name", "")
        self.difference = spool.notes.get("difference")
        self._num_samples = {int(number): count for number, count in spool.notes.get("num_samples", {}).items()}
        self._gradient_bytes = spool.notes.get("gradient_bytes", 0)  # the largest of the gradients for the first batch

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

    def divide(self, targets: Sequence[Target]) -> Sequence[Target]:
        """Return the weights that this rank fits: those that take longest go round by round to all ranks."""
        costs = {target: target.dense_numbers * (target.inner + target.outer) for target in targets}
        ordered = sorted(targets, key=costs.__getitem__, reverse=True)
        fitted_here = set(ordered[self.rank :: self._num_ranks])
        return [target for target in targets if target in fitted_here]

    def exchange(self, values: dict[Target, _Value], names: Mapping[Target, str]) -> dict[Target, _Value]:
        """Return the values of the weights of all ranks, and fetch the remembered values of these names from them."""
        if self.group is None:
            return values
        of_names = {target.name: target for target in names}
        all_values: dict[Target, _Value] = {}
        for rank, rank_values in enumerate(self.gathered({target.name: value for target, value in values.items()})):
            for target_name, value in rank_values.items():
                all_values[of_names[target_name]] = value
                self._send(names[of_names[target_name]], rank)
        return {target: all_values[target] for target in names}

    def _send(self, name: str, rank: int) -> None:
        """Send a file from a rank to all others."""
        is_sender = rank == self.rank
        size = self.gathered(self.spool.size(name) if is_sender else 0)[rank]

        def received() -> Iterator[memoryview]:
            contents, remaining = self.spool.blocks(name) if is_sender else iter(()), size
            while remaining:
                block = torch.empty(min(BLOCK, remaining), dtype=torch.uint8)
                if is_sender:
                    block = torch.frombuffer(bytearray(next(contents)), dtype=torch.uint8)
                moved = block.to(self.device)
                dist.broadcast(moved, group=self.group, group_src=rank)
                remaining -= len(block)
                yield bytes_of(moved)

        if is_sender:
            for _ in received():
                pass
        else:
            self.spool.receive(name, received())

    def progress_of(self, name: str) -> tuple[int, Any] | None:
        """Return the part after which the work on a remembered value was saved last, and what was saved."""
        for saved in self.spool.names(f"{name}{_AFTER}"):
            return int(saved.rpartition(_AFTER)[2]), self.spool.read(saved)
        return None

    def save_progress(self, name: str, part: int, value: Any) -> None:
        """Save the work on a remembered value, after all steps of a part. Ranks may have no steps, and do not save."""
        if self.group is not None:
            return
        before = self.spool.names(f"{name}{_AFTER}")
        self.spool.write(f"{name}{_AFTER}{part}", value)
        for saved in before:
            self.spool.remove(saved)
        self._commit()

    def check_source(self, *, is_end: bool = False) -> None:
        """Raise CompressionError on all ranks if the files of the weights have changed on one of them."""
        change = "" if self._source is None else self._source.change(is_end=is_end)
        if self._source is not None and (changes := [each for each in self.gathered(change) if each]):
            raise CompressionError(changes[0])

    def _commit(self) -> None:
        self.check_source()  # so that nothing counts that was made of something else
        self.spool.notes |= {
            "output_name": self.output_name, "difference": self.difference, "num_samples": self._num_samples,
            "gradient_bytes": self._gradient_bytes,
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
            waiting_bytes = result_gradients.num_bytes
            yield from self._backward_steps(parts, passes, numbers, place, places_of, result_gradients)
            if numbers == [0]:
                self._gradient_bytes = max(self._gradient_bytes, waiting_bytes + result_gradients.num_bytes)
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
        self,
        parts: Parts,
        passes: Sequence[tuple[Any, int]],
        numbers: Sequence[int],
        place: int,
        description: str,
    ) -> None:
        """Run the batches forward up to a part, where results are not kept; with a description, commit each part."""
        batches = dict(zip(numbers, (batch for batch, _ in passes), strict=True))
        places = range(place)
        with torch.no_grad():
            for earlier in self.over(places, f"forward before {description}", 0.0) if description else places:
                missing = [number for number in batches if not parts.is_recorded(earlier, number)]
                for number in missing:
                    parts.run(partial(self.output, batches[number]), earlier, number, record=True)
                if description and (missing or self.group is not None):
                    self._commit()  # all ranks do so; without a description some of them may not be here

    def _divide(self, targets: Sequence[Target]) -> Parts:
        """Return the parts of the model, which are found at the first call."""
        if self._parts is None:
            names = {module: name for name, module in self.model.named_modules()}
            calls = self.remembered(
                "parts",
                lambda: checked_part_modules(
                    self.model,
                    targets,
                    self._blocks,
                    partial(self.output, self.batches[0]),
                    self.mask(self.batches[0]),
                    self.spool,
                ),
            )
            if len(set(orders := self.gathered(tuple(names[module] for module in calls)))) > 1:
                raise CompressionError(
                    f"the model calls {len(orders[0])} blocks for the first batch of rank 0, and others for that of "
                    "another rank: blocks that depend on the batch cannot be run one by one; compress it in memory, "
                    "with pr.compress"
                )
            self._parts = Parts(calls, names, self.spool)
        return self._parts

    def check_disk(
        self,
        name: str,
        sizes: Mapping[Target, tuple[int, int]],
        measured: Sequence[Any],
        new_layers: int,
        *,
        gradients: bool,
    ) -> None:
        """Predict the bytes of the files, log them, and raise CompressionError if the disk has less."""
        keeps_moments, needed, phases = self.remembered(
            name, partial(self._plan_disk, sizes, measured, new_layers, gradients=gradients)
        )
        self.disk_bytes, self.keeps_moments = max(self.disk_bytes, needed), keeps_moments
        if not keeps_moments:
            for file in self.spool.names(MOMENTS):
                self.spool.remove(file)
            _log.info("the disk has no room for the moments of all weights: each weight is fitted in all widths")
        described = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in phases.items())
        _log.info("predicted peak of the files that are kept on disk: %s (%s)", format_bytes(needed), described)
        check_free(self.gathered(self.spool.needs(needed)))

    def _plan_disk(
        self, sizes: Mapping[Target, tuple[int, int]], measured: Sequence[Any], new_layers: int, *, gradients: bool
    ) -> tuple[bool, int, dict[str, int]]:
        """Return whether the disk has room for the moments of all weights, the peak of the files, and its phases."""
        parts = self._divide(list(sizes))
        last = len(parts.calls) - 1
        targets = []
        for target, (fit, moments) in sizes.items():
            places = self._places_of(parts, target) or [0 if gradients else last]
            targets.append(TargetFiles(fit, moments, [last - place if gradients else place for place in places]))
        results = sum(self._scaled(parts.num_bytes(place, 0), self.batches) for place in range(last))
        # Of an earlier fit with another ridge, there are fits, and maybe moments, which no fit changes.
        present = self.spool.num_bytes - self.spool.size_of(RESULTS) - self.spool.size_of(MOMENTS)
        for keeps_moments in (True, False):
            phases = predict_disk_bytes(
                targets,
                last + 1,
                results,
                self._scaled(self._gradient_bytes, self.batches),
                self._scaled(self._gradient_bytes, measured),
                new_layers,
                keeps_moments=keeps_moments,
            )
            needed = present + max(phases.values())
            if self._has_room(needed):
                break
        limit, minimum = self._max_disk_bytes, max(self.gathered(needed))
        if limit is not None and limit < minimum:
            raise CompressionError(
                f"max_disk_bytes={limit:,} is too little, because what is kept on disk takes {minimum:,} bytes at "
                "least: give as much, or fewer or shorter batches"
            )
        return keeps_moments, needed, phases  # if the disk is too small even so, check_disk says that

    def _has_room(self, needed: int) -> bool:
        """Return whether the files may take this number of bytes, on the disks of all ranks."""
        folders = self.gathered(self.spool.needs(needed))
        limit = self._max_disk_bytes
        return full_disk(folders) is None and (limit is None or all(each.needed <= limit for each in folders))

    def _scaled(self, num_bytes: int, batches: Iterable[Any]) -> int:
        """Return the bytes for batches of what takes ``num_bytes`` for the first batch.

        Results and gradients have a row for each token, as the tensors of a batch do.
        """
        return int(num_bytes * sum(map(entries_of, batches)) / max(entries_of(self.batches[0]), 1))

    def divided(self, inputs: Sequence[Sequence[Target]]) -> list[list[Sequence[Target]]]:
        """Return the targets of each part, which have their moments at the same time."""
        targets = [target for group in inputs for target in group]
        parts = self._divide(targets)
        divided: dict[int, list[Sequence[Target]]] = {}
        for target in targets:
            divided.setdefault(min(self._places_of(parts, target), default=0), []).append([target])
        return [divided[place] for place in sorted(divided)]

    def _places_of(self, parts: Parts, target: Target) -> list[int]:
        """Return the places of the parts that contain a target."""
        modules = set(map(holder_of, target.modules))
        return [place for place, unit in enumerate(parts.calls) if not modules.isdisjoint(unit.modules())]


def compress_streamed(
    model: nn.Module,
    config: CompressConfig,
    scratch: Path,
    source: SourceFiles | None = None,
    blocks: Selector | Sequence[Selector] | None = None,
    max_disk_bytes: int | None = None,
) -> CompressionReport:
    """Compress a model in place, as :func:`panther.compress` does, with all that is large in files of ``scratch``.

    If ``scratch`` has files of a process that was killed, their contents are used. The new layers of the model are
    mapped from files that are removed already.

    Args:
        model: The model.
        config: The settings.
        scratch: The folder, which belongs to this call.
        source: The files of the weights, which must not change.
        blocks: The modules that run as blocks, as ``include`` selects layers; None finds them by the model's structure.
        max_disk_bytes: Bytes that the files of this process may take; None is all that the disk has free.

    Raises:
        CompressionError: As for :func:`panther.compress`; if the model cannot be run part by part; if the files of the
            weights change meanwhile; and if ``scratch`` has files of a run with other arguments, or damaged ones.
    """
    check_model(model)
    check_adapters(model)
    with freed_blocks_returned(), plain_tensors() as forward_device, without_compiled_blocks(model):
        runner = StreamingRunner(
            model, config.calibration, config.forward_fn, config.mask_fn, config.group, config.progress,
            config.loss_fn, forward_device, scratch=scratch, blocks=blocks,
            max_disk_bytes=max_disk_bytes, source=source,
        )  # fmt: skip
        spool = runner.spool
        description = {
            "source": f"{source}", "blocks": _described_setting(blocks), "max_disk_bytes": f"{max_disk_bytes}",
            **_described(config, runner),
        }  # fmt: skip
        before = spool.notes.setdefault("description", description)
        seed = spool.notes.setdefault("seed", check_seed(config.seed))
        if config.seed not in (None, seed):
            description, before = description | {"seed": str(config.seed)}, before | {"seed": str(seed)}
        differing = [name for name in description if description[name] != before[name]]
        refusals = [
            f"{scratch} has the work of a run that was killed, with {name} {before[name]}, and now it is "
            f"{description[name]}: give what that run had, or remove {scratch} to begin anew"
            for name in differing
        ]
        if refusals := [refusal for rank_refusals in runner.gathered(refusals) for refusal in rank_refusals]:
            raise CompressionError(refusals[0])
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
        "ranks": str(len(runner.gathered(None))),
        "calibration": described_batches([*runner.batches, *runner.held_out]),
        **{name: shortened(_described_setting(value)) for name, value in settings.items()},
    }


def _described_setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described_setting, value))
    return describe_function(value) if callable(value) else f"{value}"
