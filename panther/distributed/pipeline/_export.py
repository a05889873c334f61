"""Cut any model at the calls of some of its modules: torch.export traces what stands between the calls.

Modules that hold no cut are *units*: they are called as they are, with their hooks, modes and names, and what they
compute is not traced. A unit becomes one opaque operation of the exported graph; its outputs' shapes come from a run on
fake tensors. What the model's own forward does between units (embeddings of positions, masks, residual sums) is
exported to ATen, for the sample's sizes. A cut stands before the first call inside of the module that it names, and
tensors that are made before it and used after it are handed on.
"""

__all__ = ["StageGraph", "trace_stages"]

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from panther.errors import ShapeError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ALTERNATIVE = "write the model as an nn.Sequential of its stages, or make this part a module without cuts inside"


@dataclass
class _Call:
    """A call of a unit: what it was given and gave on the sample."""

    unit: str
    outputs: Any
    """As the unit gives them, tensors fake."""
    inputs: list[tuple[bool, Any]] | None = None
    """Leaves of its arguments: whether one is a tensor, and what it is if not."""
    spec: Any = None


_calls: list[_Call] = []  # of the model being traced


@torch.library.custom_op("panther::call_unit", mutates_args=())
def _call_unit(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    raise NotImplementedError("stands in traces only")


@_call_unit.register_fake
def _(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        for leaf in pytree.tree_leaves(_calls[call].outputs)
        if isinstance(leaf, Tensor)
    ]


def tensor_leaf(outputs: Any, i: int) -> Tensor:
    """The i-th tensor of what a unit gave."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)][i]


def hand_on(x: Tensor) -> Tensor:
    """A tensor that passes a stage as it is, with a place of its own in autograd's graph."""
    return x.clone()


def local(x: Tensor) -> Tensor:
    """This rank's copy of a parameter that tensor parallelism put on its mesh."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class StageGraph:
    """A model as a graph of calls, cut into segments; :meth:`module` makes any run of them a module."""

    nodes: list[fx.Node]
    segments: list[int]
    """For each node the segment it is in; inputs are in -1, and parameters are taken where they are used."""
    constants: nn.Module
    """Holds tensors that the trace made."""
    cuts: list[str]
    """Names of the modules at which segments begin, but for the first."""
    units: list[str]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def names_in(self, begin: int, end: int) -> set[str]:
        """Units and tensors that the segments from ``begin`` to ``end`` (exclusive) use."""
        found = set()
        for node, segment in zip(self.nodes, self.segments, strict=True):
            if begin <= segment < end:
                found |= {str(node.target)} if node.op == "call_module" else set()
                found |= {str(used.target) for used in node.all_input_nodes if used.op == "get_attr"}
        return found

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module:
        """The segments from ``begin`` to ``end`` (exclusive), with ``model``'s own units and tensors."""
        graph = self._graph(begin, end)
        targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        names = sorted(targets, key=lambda name: (order.get(name, -1), name))
        parts = {name: _at(model, name, self.constants) for name in names}
        stage = fx.GraphModule(parts, graph, type(model).__name__)
        if end == len(self):
            self._keep_unused(stage, model)
        _save_as(stage, model)
        stage.training = model.training  # its parts keep their own
        return stage

    def _graph(self, begin: int, end: int) -> fx.Graph:
        segment_of = dict(zip(self.nodes, self.segments, strict=True))
        last: dict[fx.Node, int] = {}
        for node in self.nodes:
            for used in node.all_input_nodes:
                last[used] = max(segment_of[node], last.get(used, -1))
        made = [node for node in self.nodes if node.op not in ("get_attr", "output")]

        def crossing(cut: int) -> list[fx.Node]:
            return [node for node in made if segment_of[node] < cut <= last.get(node, -1)]

        graph = fx.Graph()
        incoming = crossing(begin) if begin else [node for node in made if node.op == "placeholder"]
        copied = {node: graph.placeholder(node.name) for node in incoming}
        for node in self.nodes:
            if begin <= segment_of[node] < end and node.op not in ("get_attr", "output"):
                for used in node.all_input_nodes:
                    if used.op == "get_attr" and used not in copied:
                        copied[used] = graph.call_function(local, (graph.node_copy(used),))
                copied[node] = graph.node_copy(node, copied.__getitem__)
        if end == len(self):
            (result,) = self.nodes[-1].all_input_nodes
            graph.output(copied[result])
            return graph
        here = set(incoming)
        results = [
            graph.call_function(hand_on, (copied[node],)) if node in here else copied[node] for node in crossing(end)
        ]
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return graph

    def _keep_unused(self, stage: fx.GraphModule, model: nn.Module) -> None:
        """Put what the forward does not use into the last stage, so that no state_dict lacks it."""
        used = self.names_in(0, len(self))
        for unit in self.units:
            if unit not in used:
                stage.add_submodule(unit, model.get_submodule(unit))
        inside = tuple(f"{unit}." for unit in self.units)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in used and not name.startswith(inside):
                prefix, _, key = name.rpartition(".")
                if prefix and prefix not in dict(stage.named_modules()):
                    stage.add_submodule(prefix, nn.Module())
                holder = stage.get_submodule(prefix)
                if isinstance(tensor, nn.Parameter):
                    holder.register_parameter(key, tensor)
                else:
                    holder.register_buffer(key, tensor)


def trace_stages(model: nn.Module, cuts: Sequence[str], sample: tuple[Tensor, ...]) -> StageGraph:
    """Trace ``model(*sample)`` with a cut before each of the named modules.

    Raises:
        ShapeError: If the forward cannot be exported, does not come by the cuts in this order, or gives no tensor.
    """
    ancestors = {""}
    for name in cuts:
        while name := name.rpartition(".")[0]:
            ancestors.add(name)
    units = dict(_units(model, "", ancestors))
    _calls[:] = _on_fake(model, units, sample)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 warns of its own calls here
            with _opaque(units):
                exported = torch.export.export(model, sample, strict=False)
            if any(_changes(node) for node in exported.graph.nodes):  # autograd refuses that for what was received
                exported = exported.run_decompositions({})
        return _cut(exported.module(check_guards=False), cuts, list(units))
    except ShapeError:
        raise
    except Exception as error:
        raise ShapeError(
            f"torch.export cannot trace the forward of {type(model).__name__} between its modules "
            f"({_first_line(error)}): {_ALTERNATIVE}"
        ) from error
    finally:
        _calls.clear()


def _units(module: nn.Module, name: str, ancestors: set[str]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if path in ancestors or isinstance(child, nn.ModuleList | nn.ModuleDict):  # the latter are never called
            yield from _units(child, path, ancestors)
        else:
            yield path, child


def _on_fake(model: nn.Module, units: dict[str, nn.Module], sample: tuple[Tensor, ...]) -> list[_Call]:
    """Run the model without values and note what its units give."""
    calls: list[_Call] = []

    def note(unit: str) -> Any:
        return lambda module, args, output: calls.append(_Call(unit, output))

    handles = [module.register_forward_hook(note(name)) for name, module in units.items()]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state: dict[str, Tensor] = {
        name: mode.from_tensor(t.detach()) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    try:
        with mode, torch.no_grad():
            torch.func.functional_call(model, state, tuple(mode.from_tensor(x) for x in sample))
    except Exception as error:
        raise ShapeError(
            f"{type(model).__name__} cannot be run on the sample without values ({_first_line(error)}): pass the "
            f"inputs of one microbatch as sample_input=; where its forward decides by values, {_ALTERNATIVE}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _opaque(units: dict[str, nn.Module]) -> Iterator[None]:
    """Let units be single operations; their hooks run when they are called for good."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(_calls):
        numbers[call.unit].append(number)
    begun: dict[str, int] = defaultdict(int)
    saved = []

    def stand_in(name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = numbers[name][begun[name] % len(numbers[name])]  # export may run the model again
            begun[name] += 1
            call = _calls[number]
            leaves, call.spec = pytree.tree_flatten((args, kwargs))
            call.inputs = [(True, None) if isinstance(leaf, Tensor) else (False, leaf) for leaf in leaves]
            given = iter(_call_unit([leaf for leaf in leaves if isinstance(leaf, Tensor)], number))
            return pytree.tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, call.outputs)

        return forward

    for name, module in units.items():
        saved.append((module, {key: module.__dict__[key] for key in (*_HOOKS, "forward") if key in module.__dict__}))
        for key in _HOOKS:
            module.__dict__[key] = type(module.__dict__[key])()
        module.__dict__["forward"] = stand_in(name)
    try:
        yield
    finally:
        for module, state in reversed(saved):
            module.__dict__.pop("forward", None)
            module.__dict__.update(state)


def _changes(node: fx.Node) -> bool:
    """Whether an operation changes a tensor in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _cut(exported: fx.GraphModule, cuts: Sequence[str], units: list[str]) -> StageGraph:
    graph = exported.graph
    graph.owning_module = None  # which lacks modules without parameters
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.panther.call_unit.default:
            _put_call(graph, node)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output", "call_module") or _changes(node))
    nodes = list(graph.nodes)
    (output,) = nodes[-1].args
    if not (isinstance(output, tuple | list) and len(output) == 1 and isinstance(output[0], fx.Node)):
        raise ShapeError("a model that is cut into stages must give one tensor, which the loss compares: wrap it so")
    segments, segment = [], 0
    for node in nodes:
        if node.op == "call_module":
            later = [i for i, cut in enumerate(cuts) if i >= segment and f"{node.target}.".startswith(f"{cut}.")]
            if later and later[-1] > segment:
                raise ShapeError(
                    f"the forward comes to {cuts[later[-1]]!r} before {cuts[segment]!r}: begin stages in the order in "
                    "which it calls them"
                )
            segment += bool(later)
        segments.append(-1 if node.op == "placeholder" else segment)
    if segment < len(cuts):
        raise ShapeError(f"the forward does not call {cuts[segment]!r}: begin stages at modules that it calls")
    return StageGraph(nodes, segments, exported, list(cuts), units)


def _put_call(graph: fx.Graph, node: fx.Node) -> None:
    """The module's own call in place of the opaque operation."""
    tensors, number = node.args
    call = _calls[number]  # type: ignore[index]
    left = iter(tensors)  # type: ignore[arg-type]
    leaves = [next(left) if is_tensor else value for is_tensor, value in call.inputs or ()]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    with graph.inserting_before(node):
        called = graph.call_module(call.unit, args, kwargs)
    for user in list(node.users):  # getitem of each output
        with graph.inserting_before(user):
            single = isinstance(call.outputs, Tensor)
            part = called if single else graph.call_function(tensor_leaf, (called, user.args[1]))
        user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(node)


def _at(model: nn.Module, name: str, constants: nn.Module) -> Any:
    for root in (model, constants):
        found: Any = root
        for key in name.split("."):
            found = getattr(found, key, None)
        if found is not None:
            return found
    raise AttributeError(name)


def _save_as(stage: nn.Module, model: nn.Module) -> None:
    """Buffers of the model's own modules go to the state_dict if they did; constants of the trace do not."""
    originals = dict(model.named_modules())
    for prefix, module in stage.named_modules():
        original = originals.get(prefix)
        if original is not None and module is not original:
            saved = set(original._buffers) - original._non_persistent_buffers_set
            module._non_persistent_buffers_set |= set(module._buffers) - saved


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
