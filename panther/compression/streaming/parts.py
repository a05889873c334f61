"""Run one part of a model at a time: all parts before it return what they returned when they ran.

The parts are calls of modules in the order of the model's forward. A part is run by the model's own forward, from its
beginning to the end of the part. Between the parts, a model only makes masks and passes tensors on, so that this costs
little, and whatever it passes on (masks, rotary tables, the encoder's output) needs no description.
"""

__all__ = ["PartRun", "Parts"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import tree_flatten, tree_unflatten, version_of
from panther.compression.calibration.steps import SKIPPED_CALL
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError


class _End(BaseException):
    """End a forward after a part has run. It is not an Exception, which the runner would report."""


class _Alias(torch.autograd.Function):
    """A tensor with the memory of a leaf of the graph, which a forward may write to, as it may not to a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True)
class _Record:
    """What a call returned, without its tensors.

    Attributes:
        structure: The structure of the output.
        entries: Its entries that are not tensors; None in the place of a tensor.
        is_tensor: Which entries are tensors.
        written: Indices of the tensors among the arguments that the call wrote to. Their values after the call follow
            the tensors of the output in the file.
        draws: Whether the call drew random numbers. The state of the generator after the call is the last tensor.
    """

    structure: Any
    entries: list[Any]
    is_tensor: list[bool]
    written: list[int]
    draws: bool


@dataclass
class PartRun:
    """One forward up to the end of a part.

    Attributes:
        output: The output of the model; None if the part is not the last one.
        results: The tensors that later parts can read: of the part's output, and arguments that it wrote to.
        leaves: The leaves of the graph, by the place of the part that returned the tensor and its index there.
    """

    output: Tensor | None = None
    results: list[Tensor] = field(default_factory=list)
    leaves: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Parts:
    """The parts of a model.

    Args:
        calls: The modules that are called, in the order of the calls.
        names: Names of the modules.
        spool: Where the results of the parts are kept.
    """

    def __init__(self, calls: Sequence[nn.Module], names: dict[nn.Module, str], spool: Spool) -> None:
        self.calls, self._names, self._spool = list(calls), names, spool
        self._records: dict[tuple[int, int], _Record] = {}  # by place and number of the batch

    def is_recorded(self, place: int, batch_number: int) -> bool:
        """Return whether the results of a part for a batch are kept."""
        return (place, batch_number) in self._records

    def run(self, forward: Callable[[], Tensor], place: int, batch_number: int, *, record: bool = False) -> PartRun:
        """Run the model to the end of a part, or to its end if the part is the last one.

        Args:
            forward: Runs the model for the batch.
            place: The place of the part. The results of all parts before it were recorded.
            batch_number: The number of the batch.
            record: Whether to keep the results of the part.
        """
        run = PartRun()
        call = _Calls(self, run, place, batch_number, record=record)
        with call.dispatched():
            try:
                run.output = forward()
            except _End:
                return run
        if not call.is_done:
            raise CompressionError(
                f"the model did not call {self.name(place)} for batch {batch_number}, and called it for another: its "
                "blocks depend on the batch, and cannot be run one by one: compress it in memory, with pr.compress"
            )
        return run

    def name(self, place: int) -> str:
        """Return the quoted name of a part's module."""
        return repr(self._names[self.calls[place]])

    def file_name(self, place: int, batch_number: int) -> str:
        """Return the name of the file of the results of a part for a batch."""
        return f"results-{place}-{batch_number}"


class _Calls:
    """The calls of the modules during one forward."""

    def __init__(self, parts: Parts, run: PartRun, place: int, batch_number: int, *, record: bool) -> None:
        self._parts, self._run, self._place, self._batch, self._record = parts, run, place, batch_number, record
        self._next_place = 0
        self._is_inside = self.is_done = False
        self._entries: tuple[list[Tensor], list[int], Tensor] | None = None

    @contextmanager
    def dispatched(self) -> Iterator[None]:
        """Let the modules' calls come here within the block."""
        with dispatched(self._parts.calls, self._call), ExitStack() as hooks:
            module = self._parts.calls[self._place]
            # After the hooks that watch the layers, so that the output has their taps.
            hooks.callback(module.register_forward_hook(self._end).remove)
            yield

    def _call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_inside or self.is_done:
            return forward(*args, **kwargs)
        place, self._next_place = self._next_place, self._next_place + 1
        calls = self._parts.calls
        if place > self._place or calls[place] is not module:
            expected = self._parts.name(place) if place < len(calls) else "the end of the model"
            raise CompressionError(
                f"the model called its blocks in a different order for batch {self._batch}, where {expected} was "
                "expected: they cannot be run one by one: compress it in memory, with pr.compress"
            )
        if place < self._place:
            vars(module)[SKIPPED_CALL] = True
            return self._restored(place, args, kwargs)
        vars(module).pop(SKIPPED_CALL, None)
        tensors = _tensors_of((args, kwargs))
        self._entries = tensors, [version_of(tensor) for tensor in tensors], torch.get_rng_state()
        self._is_inside = True
        return forward(*args, **kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the results of the part that has run, and end the forward unless the part is the last one."""
        if not self._is_inside or self.is_done:
            return
        self._is_inside, self.is_done = False, True
        assert self._entries is not None
        tensors, versions, rng_state = self._entries
        self._entries = None
        written = [
            i for i, (tensor, old) in enumerate(zip(tensors, versions, strict=True)) if version_of(tensor) != old
        ]
        leaves, structure = tree_flatten(output)
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._run.results = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [tensors[i] for i in written]
        if self._place == len(self._parts.calls) - 1:
            return
        if self._record:
            entries = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for entry in entries:
                if not isinstance(entry, (type(None), bool, int, float, str)):
                    raise CompressionError(
                        f"{self._parts.name(self._place)} returns a {type(entry).__name__}, which cannot be kept on "
                        "disk: turn it off (as use_cache=False for a cache), or compress it in memory, with pr.compress"
                    )
            after = torch.get_rng_state()
            draws = not torch.equal(after, rng_state)
            tensors = [*self._run.results, *([after] if draws else [])]
            self._parts._spool.write(self._parts.file_name(self._place, self._batch), tensors)
            key = self._place, self._batch
            self._parts._records[key] = _Record(structure, entries, is_tensor, written, draws)
        raise _End

    def _restored(self, place: int, args: Any, kwargs: Any) -> Any:
        """Return what a call returned when it ran, and write to its arguments what it wrote."""
        record = self._parts._records[place, self._batch]
        tensors = self._parts._spool.read(self._parts.file_name(place, self._batch))
        if record.draws:
            torch.set_rng_state(tensors.pop())
        if torch.is_grad_enabled():
            for index, tensor in enumerate(tensors):
                if tensor.is_floating_point():
                    leaf = self._run.leaves[place, index] = tensor.requires_grad_()
                    tensors[index] = _Alias.apply(leaf)
        num_outputs = sum(record.is_tensor)
        arguments = _tensors_of((args, kwargs)) if record.written else []
        for index, value in zip(record.written, tensors[num_outputs:], strict=True):
            arguments[index].copy_(value)
        of_output = iter(tensors[:num_outputs])
        leaves = [
            next(of_output) if is_tensor else entry
            for is_tensor, entry in zip(record.is_tensor, record.entries, strict=True)
        ]
        return tree_unflatten(leaves, record.structure)


def _tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@contextmanager
def dispatched(
    modules: Sequence[nn.Module], call: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Let ``call`` take the module, its forward and the arguments of each call of the modules within the block."""
    with ExitStack() as restored:
        for module in dict.fromkeys(modules):
            attributes = vars(module)
            before = attributes.get("forward")
            undo = partial(attributes.pop, "forward") if before is None else partial(attributes.update, forward=before)
            forward = module.forward

            def dispatch(*args: Any, module: Any = module, forward: Any = forward, **kwargs: Any) -> Any:
                return call(module, forward, args, kwargs)

            attributes["forward"] = dispatch
            restored.callback(undo)
            restored.callback(attributes.pop, SKIPPED_CALL, None)
        yield
