"""Run one part of a model at a time: all parts before it return what they returned when they ran.

The parts are calls of modules in the order of the model's forward. A part is run by the model's own forward, from its
beginning to the end of the part. Between the parts, a model only makes masks and passes tensors on, so that this costs
little, and whatever it passes on (masks, rotary tables, the encoder's output) needs no description.
"""

__all__ = ["DROPPED", "RESULTS", "PartRun", "Parts", "ResultGradients", "dispatched", "named_blocks"]

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import Alias, tree_flatten, tree_unflatten, version_of
from panther.compression.calibration.eligibility import is_selected, selectors_of
from panther.compression.calibration.steps import SKIPPED_CALL, forward_replaced
from panther.compression.calibration.targets import Selector
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError

RESULTS = "results-"  # the beginning of the names of files with the results of a part for a batch
DROPPED = "dropped-"  # the same, where the floating tensors of the results have been removed
_NANS = "nan-"  # the beginning of the names of files with NaN, which take the place of removed tensors


class _End(BaseException):
    """End a forward after a part has run. It is not an Exception, which the runner would report."""


@dataclass(frozen=True)
class _Removed:
    """The dtype and the shape of a tensor that has been removed from a record."""

    dtype: torch.dtype
    shape: torch.Size


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

    def changed(self, change: Callable[[Any], Any]) -> "_Record":
        """Return the record with changed leaves of the output and changed values of arguments."""
        leaves, structure = tree_flatten(self.output)
        written = {index: change(value) for index, value in self.written.items()}
        return replace(self, output=tree_unflatten([change(leaf) for leaf in leaves], structure), written=written)


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

    def read_places(self) -> set[int]:
        """Return the places of the parts whose results were read, by the graph of the output or of the results."""
        results = self.results if self.output is None else [self.output]
        nodes = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        reached = {id(node): node for node in nodes}
        leaves: set[int] = set()
        while nodes:
            node = nodes.pop()
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.add(id(leaf))
            for following, _ in node.next_functions:
                if following is not None and id(following) not in reached:
                    reached[id(following)] = following
                    nodes.append(following)
        return {place for (place, _), leaf in self.leaves.items() if id(leaf) in leaves}


class Parts:
    """The parts of a model.

    Args:
        calls: The modules that are called, in the order of the calls.
        names: Names of the modules.
        spool: Where the results of the parts are kept.
    """

    def __init__(self, calls: Sequence[nn.Module], names: dict[nn.Module, str], spool: Spool) -> None:
        self.calls, self._names, self._spool = list(calls), names, spool

    def is_recorded(self, place: int, batch_number: int) -> bool:
        """Return whether the results of a part for a batch are kept, or were dropped and are still on the disk."""
        return self._spool.recover(_file_name(place, batch_number))

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
        """Return the results of a part for a batch, with mapped tensors. Tensors that were dropped are NaN."""
        record: _Record
        if _file_name(place, batch_number) in self._spool:
            record = self._spool.read(_file_name(place, batch_number))
            return record
        record = self._spool.read(_file_name(place, batch_number, DROPPED))
        return record.changed(lambda entry: self._nans(entry) if isinstance(entry, _Removed) else entry)

    def num_bytes(self, place: int, batch_number: int) -> int:
        """Return the bytes of the results of a part for a batch, which are kept."""
        return self._spool.size(_file_name(place, batch_number))

    def drop(self, places: Iterable[int], batch_numbers: Iterable[int]) -> None:
        """Drop the floating tensors of the results of parts for batches, where they are kept.

        The forwards of later parts get NaN in their place.
        """
        for place, batch_number in product(places, dict.fromkeys(batch_numbers)):
            if _file_name(place, batch_number) not in self._spool:
                continue
            if (dropped_name := _file_name(place, batch_number, DROPPED)) not in self._spool:
                self._spool.write(dropped_name, self.recorded(place, batch_number).changed(_removed))
            self._spool.remove(_file_name(place, batch_number))

    def _nans(self, removed: _Removed) -> Tensor:
        """Return NaN in the shape of a removed tensor. They are mapped, so that they take no memory until written."""
        prefix, numel = f"{_NANS}{removed.dtype}-", removed.shape.numel()
        name = next((each for each in self._spool.names(prefix) if int(each.removeprefix(prefix)) >= numel), None)
        if name is None:
            for smaller in self._spool.names(prefix):
                self._spool.remove(smaller)
            name = f"{prefix}{numel}"
            self._spool.write(name, torch.full((numel,), torch.nan, dtype=removed.dtype))
        nans: Tensor = self._spool.read(name)
        return nans[:numel].view(removed.shape)


def _removed(entry: Any) -> Any:
    is_floating = isinstance(entry, Tensor) and entry.is_floating_point()
    return _Removed(entry.dtype, entry.shape) if is_floating else entry


def _file_name(place: int, batch_number: int, prefix: str = RESULTS) -> str:
    return f"{prefix}{place}-{batch_number}"


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
def dispatched(
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


def named_blocks(model: nn.Module, blocks: Selector | Sequence[Selector]) -> list[nn.Module]:
    """Return the modules that selectors name as blocks, in the order of the model; a glob names the outermost matches.

    Raises:
        CompressionError: If a selector matches no module, or a block contains another block.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    selected: dict[nn.Module, None] = {}
    for selector in selectors_of("blocks", blocks, ()):
        matches = [module for module, places in names.items() if is_selected(selector, places, module)]
        if not matches:
            raise CompressionError(
                f"blocks={selector!r} matches no module of the model: give names of model.named_modules(), globs of "
                "names such as 'layers.*', types, or functions of a module and its name"
            )
        if isinstance(selector, str):
            matches = _outermost(matches)
        selected |= dict.fromkeys(matches)
    for block in selected:
        if inner := next((module for module in block.modules() if module is not block and module in selected), None):
            raise CompressionError(
                f"blocks name {names[block][0]!r} and {names[inner][0]!r} within it, and blocks run one after another: "
                "name only one of the two"
            )
    return [module for module in names if module in selected]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are in none of the others: the star of a glob also stands for dots."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


class ResultGradients:
    """The gradients at the results of parts, by pass, part and index, until the part has taken them.

    A file is named after the part that sent the last of its gradients, and is not changed: a part that is run again,
    because the process was killed, finds the sums without its own gradients.

    Args:
        spool: Where the gradients are kept.
        description: The name of the backward pass.
        is_new: Whether the pass begins; otherwise it continues with the gradients of the last commit.
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

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the gradients that wait."""
        return self._spool.size_of(self._prefix)

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
