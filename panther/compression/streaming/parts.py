"""Run one part of a model at a time: all parts before it return what they returned when they ran.

The parts are calls of modules in the order of the model's forward. A part is run by the model's own forward, from its
beginning to the end of the part. Between the parts, a model only makes masks and passes tensors on, so that this costs
little, and whatever it passes on (masks, rotary tables, the encoder's output) needs no description.
"""

__all__ = ["RESULTS", "PartRun", "Parts", "ResultGradients", "checked_part_modules"]

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import Alias, tree_flatten, tree_unflatten, version_of
from panther.compression.calibration.batches import Masks, ScoreFill, counted
from panther.compression.calibration.runner import relative_error, squares
from panther.compression.calibration.steps import SKIPPED_CALL, forward_replaced
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import Target, holder_of
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError

RESULTS = "results-"  # the beginning of the names of files with the results of a part for a batch
_SAME_OUTPUT = 1e-3  # largest relative difference of outputs of the whole model and of its parts, also in 16 bits


class _End(BaseException):
    """End a forward after a part has run. It is not an Exception, which the runner would report."""


@dataclass(frozen=True)
class _Record:
    """What a call returned.

    Attributes:
        output: The output, and what the call put into dictionaries and lists among its arguments, as :func:`_put` has
            it, by the number of the dictionary or list.
        written: The values after the call of the tensors among the arguments that it wrote to, by their index.
        rng_state: The state of the generator after the call, if the call drew random numbers.
    """

    output: Any
    written: dict[int, Any]
    rng_state: Tensor | None


@dataclass
class PartRun:
    """One forward up to the end of a part.

    The output is None if the part is not the last one. ``results`` are the tensors that later parts can read, and
    ``leaves`` those of the graph, by the place of the part that returned the tensor and its index there.
    """

    output: Tensor | None = None
    results: list[Tensor] = field(default_factory=list)
    leaves: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Parts:
    """The parts of a model: the modules that are called, in the order of the calls; the spool keeps their results."""

    def __init__(self, calls: Sequence[nn.Module], names: dict[nn.Module, str], spool: Spool) -> None:
        self.calls, self._names, self._spool = list(calls), names, spool

    def is_recorded(self, place: int, batch_number: int) -> bool:
        """Return whether the results of a part for a batch are kept."""
        return _file_name(place, batch_number) in self._spool

    def run(self, forward: Callable[[], Tensor], place: int, batch_number: int, *, record: bool = False) -> PartRun:
        """Run the model to the end of a part; the results of all parts before it were recorded."""
        run = PartRun()
        call = _Calls(self, run, place, batch_number, record=record)
        try:
            with call.dispatched():
                run.output = forward()
        except _End:
            return run
        except CompressionError as error:
            cause = error.__cause__
            if not place or not isinstance(cause, Exception) or isinstance(cause, OSError):
                raise
            with torch.no_grad():
                forward()  # which raises the error of the model itself, if there is one
            raise CompressionError(
                f"{type(cause).__name__}: {cause}: the model raises this if its blocks before {self.name(place)} do "
                "not run, and return what they returned before: they pass something to each other beside arguments and "
                "results, such as attributes. Compress the model in memory, with pr.compress"
            ) from cause
        if not call.is_done:
            raise CompressionError(
                f"the model did not call {self.name(place)} for batch {batch_number}, and called it for another: its "
                "blocks depend on the batch, and cannot be run one by one: compress it in memory, with pr.compress"
            )
        return run

    def name(self, place: int) -> str:
        """Return the quoted name of a part's module."""
        return repr(self._names[self.calls[place]])

    def record(self, place: int, batch_number: int, record: _Record) -> None:
        """Keep the results of a part for a batch."""
        self._spool.write(_file_name(place, batch_number), record)

    def recorded(self, place: int, batch_number: int) -> _Record:
        """Return the results of a part for a batch, with mapped tensors."""
        record: _Record = self._spool.read(_file_name(place, batch_number))
        return record


def _file_name(place: int, batch_number: int) -> str:
    return f"{RESULTS}{place}-{batch_number}"


class _Calls:
    """The calls of the modules during one forward."""

    def __init__(self, parts: Parts, run: PartRun, place: int, batch_number: int, *, record: bool) -> None:
        self._parts, self._run, self._place, self._batch, self._record = parts, run, place, batch_number, record
        self._next_place = 0
        self._is_inside = self.is_done = False
        self._entries: tuple[list[Tensor], list[int], Tensor] | None = None
        self._containers: list[tuple[Any, dict[Any, Any]]] = []  # among the arguments, with what they contained

    @contextmanager
    def dispatched(self) -> Iterator[None]:
        """Let the modules' calls come here within the block."""
        with _dispatched(self._parts.calls, self._call), ExitStack() as hooks:
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
        self._containers = [(each, _items(each)) for each in _containers_of((args, kwargs))]
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
        changes = [_put(container, old) for container, old in self._containers]
        put = {number: change for number, change in enumerate(changes) if change is not None}
        self._containers = []
        leaves, structure = tree_flatten((output, put))
        self._run.results = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [tensors[i] for i in written]
        if self._place == len(self._parts.calls) - 1:
            return
        if self._record:
            for entry in leaves:
                if not isinstance(entry, (type(None), bool, int, float, str, Tensor)):
                    raise CompressionError(
                        f"{self._parts.name(self._place)} passes on a {type(entry).__name__}, which cannot be kept on "
                        "disk: turn it off (as use_cache=False for a cache), or compress it in memory, with pr.compress"
                    )
            after = torch.get_rng_state()
            detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            record = _Record(
                tree_unflatten(detached, structure),
                {index: tensors[index].detach() for index in written},
                None if torch.equal(after, rng_state) else after,
            )
            self._parts.record(self._place, self._batch, record)
        raise _End

    def _restored(self, place: int, args: Any, kwargs: Any) -> Any:
        """Return what a call returned when it ran, and write to its arguments what it wrote."""
        record = self._parts.recorded(place, self._batch)
        if record.rng_state is not None:
            torch.set_rng_state(record.rng_state)
        leaves, structure = tree_flatten(record.output)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results = [leaves[position] for position in positions] + [*record.written.values()]
        if torch.is_grad_enabled():
            for index, tensor in enumerate(results):
                if tensor.is_floating_point():
                    leaf = self._run.leaves[place, index] = tensor.requires_grad_()
                    results[index] = Alias.apply(leaf)  # a forward may not write to a leaf
        for position, result in zip(positions, results, strict=False):  # the values of arguments follow
            leaves[position] = result
        arguments = _tensors_of((args, kwargs)) if record.written else []
        for index, value in zip(record.written, results[len(positions) :], strict=True):
            arguments[index].copy_(value)
        output, put = tree_unflatten(leaves, structure)
        containers = _containers_of((args, kwargs)) if put else []
        for number, (keys, items) in put.items():
            _restore(containers[number], keys, items)
        return output


def _containers_of(tree: Any) -> list[Any]:
    """Return the dictionaries and lists in arguments, each once; blocks pass keys and values to later ones in them."""
    containers: dict[int, Any] = {}
    waiting = [*tree[0], *tree[1].values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (MutableMapping, list)) and id(value) not in containers:
            containers[id(value)] = value
            waiting += _items(value).values()
        elif isinstance(value, tuple):
            waiting += value
    return [*containers.values()]


def _items(container: Any) -> dict[Any, Any]:
    return dict(enumerate(container) if isinstance(container, list) else container)


def _put(container: Any, old: dict[Any, Any]) -> tuple[list[Any], dict[Any, Any]] | None:
    """Return the keys of a container, in its order, and its items that are new; None if it has not changed."""
    items = _items(container)
    new = {key: value for key, value in items.items() if key not in old or value is not old[key]}
    return ([*items], new) if new or [*items] != [*old] else None


def _restore(container: Any, keys: list[Any], new: dict[Any, Any]) -> None:
    """Change a container as a call did that is not made again."""
    if isinstance(container, list):
        container[:] = [new[index] if index in new else container[index] for index in keys]
        return
    for key in container.keys() - set(keys):
        del container[key]
    for key, value in new.items():
        container[key] = value
    if [*container] != keys:  # a key was removed and put again
        items = {key: container[key] for key in keys}
        container.clear()
        container.update(items)


def _tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@contextmanager
def _dispatched(
    modules: Sequence[nn.Module], call: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Let ``call`` take the module, its forward and the arguments of each call of the modules within the block."""
    with ExitStack() as restored:
        for module in dict.fromkeys(modules):
            forward = module.forward

            def dispatch(*args: Any, module: Any = module, forward: Any = forward, **kwargs: Any) -> Any:
                return call(module, forward, args, kwargs)

            restored.enter_context(forward_replaced(module, dispatch))
            restored.callback(vars(module).pop, SKIPPED_CALL, None)
        yield


def checked_part_modules(
    model: nn.Module, targets: Sequence[Target], forward: Callable[[], Tensor], rows: Masks, spool: Spool
) -> list[nn.Module]:
    """Find the modules of the parts, in the order of their calls, and check that they can run one by one.

    ``forward`` returns the model's output for the first batch; ``rows`` are the rows of it that count.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = {holder_of(module) for target in targets for module in target.modules}
    block_modules = [parent.get_submodule(name) for parent, name in blocks_of(model, layers)]
    inside = {module for block in block_modules for module in block.modules()}
    units = [*dict.fromkeys(block_modules), *(layer for layer in layers if layer not in inside)]
    calls, output = _called(units, forward)
    if not calls:
        raise CompressionError(
            "the forward of the model calls none of its layers, so that it cannot run part by part: compress "
            "it in memory, with pr.compress"
        )
    parts = Parts(calls, names, spool)
    with torch.no_grad():
        for place in range(len(calls) - 1):
            parts.run(forward, place, 0, record=not parts.is_recorded(place, 0))
        divided_output = parts.run(forward, len(calls) - 1, 0).output
    assert divided_output is not None
    difference = _relative_difference(divided_output, output, rows)
    if not difference <= _SAME_OUTPUT:
        raise CompressionError(
            f"the output of the model changes by {difference:.2g} if its {len(calls)} parts, from {parts.name(0)} to "
            f"{parts.name(len(calls) - 1)}, run one by one: they pass something to each other beside arguments and "
            "results, such as attributes. Compress the model in memory, with pr.compress"
        )
    return calls


def _relative_difference(output: Tensor, expected: Tensor, rows: Masks) -> float:
    """Return the relative difference of two outputs of the model, in the rows that count."""
    if output.shape != expected.shape:
        return inf
    output, expected = counted(output, rows), counted(expected, rows)
    fill = ScoreFill.of(expected)
    change = fill.replaced(output) - fill.replaced(expected)
    return relative_error(squares(change), squares(fill.scores(expected)))


def _called(units: Sequence[nn.Module], forward: Callable[[], Tensor]) -> tuple[list[nn.Module], Tensor]:
    """Return the modules that a forward calls, in the order of the calls, and its output."""
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

    with torch.no_grad(), _dispatched(units, call):
        output = forward().clone()
    return calls, output


class ResultGradients:
    """The gradients at the results of parts, by pass, part and index, until the part has taken them.

    A file is named after the part that sent the last of its gradients, and is not changed: a part that is run again,
    because the process was killed, finds the sums without its own gradients. A pass that is not new continues with the
    gradients of the last commit.
    """

    def __init__(self, spool: Spool, description: str, *, is_new: bool) -> None:
        self._spool, self._prefix = spool, f"gradients-{description.replace('/', ' of ')}-"
        self._names: dict[tuple[int, int], str] = {}
        for name in spool.names(self._prefix):
            if is_new:
                spool.remove(name)
            else:
                number, place, _ = map(int, name.removeprefix(self._prefix).split("-"))
                self._names[number, place] = name

    def add(self, number: int, sender: int, leaves: Mapping[tuple[int, int], Tensor]) -> None:
        """Add the gradients of leaves to those of the results that the leaves are; ``sender`` is the part that ran."""
        by_place: dict[int, dict[int, Tensor]] = {}
        for (place, index), leaf in leaves.items():
            if leaf.grad is not None:
                by_place.setdefault(place, {})[index] = leaf.grad
                leaf.grad = None
        for place, new in by_place.items():
            sums = self._stored(number, place)
            for index, gradient in new.items():
                sums[index] = sums[index] + gradient if index in sums else gradient
            name = f"{self._prefix}{number}-{place}-{sender}"
            self._spool.write(name, sums)
            self._forget(number, place)
            self._names[number, place] = name

    def take(self, number: int, place: int, results: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the results of a part that have gradients, with these gradients, which are then forgotten."""
        stored = self._stored(number, place)
        self._forget(number, place)
        return [(results[index], gradient) for index, gradient in stored.items() if results[index].requires_grad]

    def remove(self) -> None:
        """Remove the gradients that no part has taken."""
        for number, place in [*self._names]:
            self._forget(number, place)

    def _stored(self, number: int, place: int) -> dict[int, Tensor]:
        name = self._names.get((number, place))
        stored: dict[int, Tensor] = {} if name is None else self._spool.read(name)
        return stored

    def _forget(self, number: int, place: int) -> None:
        if (name := self._names.pop((number, place), None)) is not None:
            self._spool.remove(name)
