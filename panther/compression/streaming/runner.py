"""A runner whose steps are parts of the model, so that one part and one batch are in memory at a time."""

__all__ = ["StreamingRunner"]

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from panther._text import format_bytes
from panther.compression.calibration.batches import entries_of
from panther.compression.calibration.runner import MOMENTS, Runner, return_freed_memory
from panther.compression.calibration.steps import Step, Watch, send
from panther.compression.calibration.targets import Selector, Target, holder_of
from panther.compression.streaming.disk import DiskPlan, Sections, TargetBytes, predict_disk_bytes
from panther.compression.streaming.division import SAME_OUTPUT, checked_part_modules, output_difference
from panther.compression.streaming.parts import DROPPED, RESULTS, PartRun, Parts, ResultGradients
from panther.compression.streaming.source import SourceFiles
from panther.compression.streaming.spool import BLOCK, Spool, check_free, full_disk
from panther.errors import CompressionError
from panther.files.tensors import bytes_of

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")

_AFTER = "-after-"  # in the names of files, between the name of a value and the part after which its work was saved


class StreamingRunner(Runner):
    """A model and batches, whose steps run part by part: all batches through one part before the next part.

    Forward, the results of each part are kept in files. Backward, a part is run again from the results of the parts
    before it, and gets the gradients of the parts after it. If the files would take too much of the disk, the model has
    sections: the results within a section are dropped, and the section is run forward again before it runs backward.
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
        self._sections = Sections(())
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
                if self._sections.drops:
                    parts.drop(self._sections.read_last(place), numbers)
            return
        if places:
            self._record(parts, passes, numbers, places[-1], description)
        result_gradients = ResultGradients(self.spool, description or "other", is_new=after is None)
        for place in self.over(places[::-1], description, 0.0) if description else places[::-1]:
            self._record(parts, passes, numbers, place)
            return_freed_memory()
            waiting_bytes = result_gradients.num_bytes
            yield from self._backward_steps(parts, passes, numbers, place, places_of, result_gradients)
            if self._sections.drops:
                parts.drop([place], numbers)
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
        description: str = "",
    ) -> None:
        """Run the batches forward, part by part, up to a part, where results that it needs are not kept.

        With a description, what has been run is safe part by part. Otherwise the backward pass may have begun, whose
        gradients in files must be those of the last fits.
        """
        batches = dict(zip(numbers, (batch for batch, _ in passes), strict=True))
        sections = self._sections
        section_start = start = sections.start(place)
        while start and not all(
            parts.is_recorded(each, number) for each in sections.read_from(start) for number in batches
        ):
            start = sections.start(start - 1)
        if description:
            start = min(self.gathered(start))  # so that all ranks commit alike
        places = range(start, place)
        with torch.no_grad():
            for earlier in self.over(places, f"forward before {description}", 0.0) if description else places:
                missing = [number for number in batches if not parts.is_recorded(earlier, number)]
                for number in missing:
                    parts.run(partial(self.output, batches[number]), earlier, number, record=True)
                parts.drop(sections.droppable(earlier, section_start), numbers)
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
        plan = self.remembered(name, partial(self._plan_disk, sizes, measured, new_layers, gradients=gradients))
        self.disk_bytes, self._sections = max(self.disk_bytes, plan.needed), plan.sections
        self.keeps_moments = plan.keeps_moments
        if not plan.keeps_moments:
            for file in self.spool.names(MOMENTS):
                self.spool.remove(file)
            _log.info("the disk has no room for the moments of all weights: each weight is fitted in all widths")
        phases = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in plan.phases.items())
        _log.info("predicted peak of the files that are kept on disk: %s (%s)", format_bytes(plan.needed), phases)
        if plan.sections.drops:
            _log.info(
                "the model runs in %d sections, and runs forward once more in each section but the last",
                plan.sections.number,
            )
        check_free(self.gathered(self.spool.needs(plan.needed)))

    def _plan_disk(
        self, sizes: Mapping[Target, tuple[int, int]], measured: Sequence[Any], new_layers: int, *, gradients: bool
    ) -> DiskPlan:
        """Return what to keep on disk: as much as there is room for, in the order of what saves most time."""
        parts = self._divide(list(sizes))
        last = len(parts.calls) - 1
        all_places = [self._places_of(parts, target) or [0 if gradients else last] for target in sizes]
        targets = [
            TargetBytes(fit, moments, [last - place if gradients else place for place in places])
            for places, (fit, moments) in zip(all_places, sizes.values(), strict=True)
        ]
        batch_bytes = [parts.num_bytes(place, 0) for place in range(last)]
        result_bytes = [self._scaled(size, self.batches) for size in batch_bytes]
        gradient_bytes = self._scaled(self._gradient_bytes, self.batches)
        measured_batches = {id(batch): batch for batch in measured}.values()  # each has several passes
        measured_bytes = [self._scaled(size, measured_batches) for size in batch_bytes]
        measured_gradients = self._scaled(self._gradient_bytes, measured)
        # Of an earlier fit with another ridge, there are fits, and maybe moments, which no fit changes.
        moments_present = self.spool.size_of(MOMENTS)
        present = self.spool.num_bytes - self.spool.size_of(RESULTS) - moments_present
        commits = {(min if gradients else max)(places) for places in all_places}

        def predict(sections: Sections, *, keeps_moments: bool = False) -> DiskPlan:
            forward, held = sections.held_bytes(result_bytes, commits, gradients=gradients)
            # The results stay while forms are compared, unless they are dropped.
            compared, beside = forward, present
            if sections.drops:
                compared_forward, compared_held = sections.held_bytes(measured_bytes, commits, gradients=True)
                compared = max(compared_forward, *compared_held)
                beside += self.spool.size_of(DROPPED) * len(self.batches)
            phases = predict_disk_bytes(
                targets,
                (forward, held),
                gradient_bytes,
                (compared, measured_gradients),
                new_layers,
                keeps_moments=keeps_moments,
            )
            return DiskPlan(beside + max(phases.values()), phases, sections, keeps_moments)

        one_section = Sections([last] * last)
        plans = [predict(one_section)]
        for plan in (predict(one_section, keeps_moments=True), *plans):
            if self._has_room(plan.needed):
                return plan
        last_reads = self._last_reads(parts)
        for number in range(2, last + 2):
            plans.append(predict(Sections(last_reads, number)))
            if self._has_room(plans[-1].needed):
                return plans[-1]
        # No plan has room. All ranks take the plan for which the rank with the most files needs least.
        needs = [max(self.gathered(plan.needed)) for plan in plans]
        fewest = min(needs)
        if self._max_disk_bytes is not None and self._max_disk_bytes < fewest:
            raise CompressionError(
                f"max_disk_bytes={self._max_disk_bytes:,} is too little, because what is kept on disk takes "
                f"{fewest:,} bytes at least: give as much, or fewer or shorter batches"
            )
        return plans[needs.index(fewest)]  # the disk is too small for it, and check_disk says so

    def _has_room(self, needed: int) -> bool:
        """Return whether the files may take this number of bytes, on the disks of all ranks."""
        folders = self.gathered(self.spool.needs(needed))
        limit = self._max_disk_bytes
        return full_disk(folders) is None and (limit is None or all(each.needed <= limit for each in folders))

    def _last_reads(self, parts: Parts) -> list[int]:
        """Return for each part but the last the last part that reads its results, in the first batches of all ranks.

        Raises:
            CompressionError: If the output changes without the results that no later part reads.
        """
        forward = partial(self.output, self.batches[0])
        last_reads = list(range(len(parts.calls) - 1))
        for place in range(len(parts.calls)):
            for read in parts.run(forward, place, 0).read_places():
                last_reads[read] = place
        last_reads = [max(places) for places in zip(*self.gathered(last_reads), strict=True)]
        with torch.no_grad():
            expected = forward().clone()
        rows = self.mask(self.batches[0])
        difference = output_difference(parts, forward, expected, rows, Sections(last_reads).read_last)
        if not all(each <= SAME_OUTPUT for each in self.gathered(difference)):
            raise CompressionError(
                "what is kept on disk does not fit there unless results of blocks are dropped, and the model reads "
                "some of them without gradients, in blocks after the next one: free some of the disk, name a folder "
                "of a larger disk, or give fewer or shorter batches"
            )
        return last_reads

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
