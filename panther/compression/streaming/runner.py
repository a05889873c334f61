"""A runner whose steps are parts of the model, so that one part and one batch are in memory at a time."""

__all__ = ["StreamingRunner"]

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import counted
from panther.compression.calibration.runner import Runner, relative_error, squares
from panther.compression.calibration.scores import ScoreFill
from panther.compression.calibration.steps import Step, Watch, send
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import Target
from panther.compression.streaming.parts import PartRun, Parts, dispatched
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError
from panther.nn.quantized.stacked import StackedExperts

_SAME = 1e-3  # largest relative difference of outputs of the whole model and of its parts, also in 16 bits


class StreamingRunner(Runner):
    """A model and batches, whose steps run part by part: all batches through one part before the next part.

    Forward, the results of each part are kept in files. Backward, a part is run again from the results of the parts
    before it, and gets the gradients of the parts after it.
    """

    is_streaming = True

    def __init__(self, *args: Any, spool: Spool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spool = spool
        self._parts: Parts | None = None

    def kept(self, value: Any) -> Any:
        """Return the same value, with its tensors in files."""
        return self._spool.kept(value)

    def steps(
        self, passes: Sequence[tuple[Any, int]], targets: Sequence[Target], *, gradients: bool, description: str = ""
    ) -> Iterator[Step]:
        """Yield the steps of one part after another: with gradients backward, and otherwise forward."""
        parts = self._divide(targets)
        numbers = [self._number_of(batch) for batch, _ in passes]
        places_of = {target: self._places_of(parts, target) for target in targets}
        places = range(len(parts.calls))
        if not gradients:
            for place in self.over(places, description) if description else places:
                yield from self._forward_steps(parts, passes, numbers, place, places_of)
            return
        self._record(parts, passes, numbers, description)
        slopes = _Slopes(self._spool)
        try:
            for place in self.over(places[::-1], description) if description else places[::-1]:
                yield from self._backward_steps(parts, passes, numbers, place, places_of, slopes)
        finally:
            slopes.remove()

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
        slopes: "_Slopes",
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
                    outputs = slopes.take(number, place, run.results)
                leaves, run = run.leaves, PartRun()
                if outputs:
                    send(outputs, watch, leaves.values())
                    slopes.add(number, leaves)
                return bool(outputs)

            completed_now = completed if number == len(passes) - 1 else ()
            yield Step(number, batch, called, forward, backward, place, completed_now)

    def _record(
        self, parts: Parts, passes: Sequence[tuple[Any, int]], numbers: Sequence[int], description: str
    ) -> None:
        """Run the batches forward, part by part, where the results of a part are not kept yet."""
        batches = dict(zip(numbers, (batch for batch, _ in passes), strict=True))
        places = range(len(parts.calls) - 1)
        with torch.no_grad():
            for place in self.over(places, f"forward before {description}") if description else places:
                for number, batch in batches.items():
                    if not parts.is_recorded(place, number):
                        parts.run(partial(self.output, batch), place, number, record=True)

    def _divide(self, targets: Sequence[Target]) -> Parts:
        """Return the parts of the model, which are found at the first call."""
        if self._parts is None:
            layers = {module for target in targets for module in target.modules}
            holders = {layer.place[0] for layer in layers if isinstance(layer, StackedExperts) and layer.place}
            plain = {layer for layer in layers if not isinstance(layer, StackedExperts)}
            blocks = [parent.get_submodule(name) for parent, name in blocks_of(self.model, layers)]
            inside = {module for block in blocks for module in block.modules()}
            units = [*dict.fromkeys(blocks), *(layer for layer in (*plain, *holders) if layer not in inside)]
            calls, output = self._called(units)
            if not calls:
                raise CompressionError(
                    "the forward of the model calls none of its layers, so that it cannot run part by part: compress "
                    "it in memory, with pr.compress"
                )
            names = {module: name for name, module in self.model.named_modules()}
            self._parts = Parts(calls, names, self._spool)
            self._check_parts(self._parts, output)
        return self._parts

    def _check_parts(self, parts: Parts, expected: Tensor) -> None:
        """Raise CompressionError if the parts, run one by one, do not give the output of the model."""
        forward = partial(self.output, self.batches[0])
        last = len(parts.calls) - 1
        with torch.no_grad():
            for place in range(last):
                parts.run(forward, place, 0, record=True)
            output = parts.run(forward, last, 0).output
        assert output is not None
        difference = inf
        if output.shape == expected.shape:
            rows = self.mask(self.batches[0])
            output, expected = counted(output, rows), counted(expected, rows)
            fill = ScoreFill.of(expected)
            change = fill.replaced(output) - fill.replaced(expected)
            difference = relative_error(squares(change), squares(fill.scores(expected)))
        if not difference <= _SAME:
            raise CompressionError(
                f"the output of the model changes by {difference:.2g} if its {len(parts.calls)} parts, from "
                f"{parts.name(0)} to {parts.name(last)}, run one by one: they pass something to each other beside "
                "arguments and results, such as attributes. Compress the model in memory, with pr.compress"
            )

    def _called(self, units: Sequence[nn.Module]) -> tuple[list[nn.Module], Tensor]:
        """Return the modules that are called for the first batch, in the order of the calls, and the output."""
        calls: list[nn.Module] = []
        depth = 0

        def call(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                calls.append(module)
            depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                depth -= 1

        with torch.no_grad(), dispatched(units, call):
            output = self.output(self.batches[0]).clone()
        return calls, output

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
        modules = {m.place[0] if isinstance(m, StackedExperts) and m.place else m for m in target.modules}
        return [place for place, unit in enumerate(parts.calls) if not modules.isdisjoint(unit.modules())]


class _Slopes:
    """The gradients at the results of parts, by pass, part and index, until the part has taken them."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._result_indices: dict[tuple[int, int], list[int]] = {}

    def add(self, number: int, leaves: dict[tuple[int, int], Tensor]) -> None:
        """Add the gradients of leaves to those of the results that the leaves are."""
        by_place: dict[int, dict[int, Tensor]] = {}
        for (place, index), leaf in leaves.items():
            if leaf.grad is not None:
                by_place.setdefault(place, {})[index] = leaf.grad
                leaf.grad = None
        for place, new in by_place.items():
            sums = self._stored(number, place)
            for index, gradient in new.items():
                sums[index] = sums[index] + gradient if index in sums else gradient
            self._spool.write(self._name(number, place), sums.values())
            self._result_indices[number, place] = [*sums]

    def take(self, number: int, place: int, results: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the results of a part that have gradients, with these gradients, which are then forgotten."""
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for index, gradient in self._stored(number, place).items():
            if results[index].requires_grad:
                pairs.append((results[index], gradient))
        self._forget(number, place)
        return pairs

    def remove(self) -> None:
        """Remove the gradients that no part has taken."""
        for number, place in [*self._result_indices]:
            self._forget(number, place)

    def _stored(self, number: int, place: int) -> dict[int, Tensor]:
        indices = self._result_indices.get((number, place))
        return {} if indices is None else dict(zip(indices, self._spool.read(self._name(number, place)), strict=True))

    def _forget(self, number: int, place: int) -> None:
        if self._result_indices.pop((number, place), None) is not None:
            self._spool.remove(self._name(number, place))

    def _name(self, number: int, place: int) -> str:
        return f"gradients-{place}-{number}"
