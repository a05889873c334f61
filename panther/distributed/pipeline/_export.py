"""Split any model into blocks at the calls of some of its modules; torch.export traces the code between the calls.

Modules in which no block begins are *leaf modules*: their code is not traced, and stages call them with their hooks,
modes and names. Each call is one opaque operation of the exported graph; the shapes of its outputs come from a run on
fake tensors. The model's own code between the calls (position embeddings, masks, residual sums) is exported to ATen,
for the sizes of the sample. A block begins before the first call inside the module that names it. Tensors from an
earlier block are sent to the block that uses them.
"""

__all__ = ["trace_stages"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, fx, nn

from panther._process_settings import ignored_warnings
from panther._torch import (
    ASSERT_TENSOR_METADATA,
    FakeTensorMode,
    buffers_of,
    is_mutable_operator,
    parameters_of,
    tree_leaves,
    tree_map_only,
    without_forward_hooks,
)
from panther.distributed.pipeline._stage_graph import StageGraph
from panther.errors import ShapeError

_ALTERNATIVE = "write the model as an nn.Sequential of its stages, or move this code into a module inside one stage"


@dataclass
class _Call:
    """A call of a leaf module with the sample."""

    name: str
    outputs: Any
    """The outputs of the module, with fake tensors."""
    inputs: Any = None
    """The positional and keyword arguments of the module, with tensors of the trace."""


_calls: list[_Call] = []  # the calls of the model that is being traced


@torch.library.custom_op("panther::call_leaf", mutates_args=())
def _call_leaf(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    raise NotImplementedError("this operation exists in traces only")


@_call_leaf.register_fake
def _(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    tensors_out = [leaf for leaf in tree_leaves(_calls[call].outputs) if isinstance(leaf, Tensor)]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors_out]


def tensor_leaf(outputs: Any, i: int) -> Tensor:
    """Return the i-th tensor of a module's outputs."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)][i]


def trace_stages(model: nn.Module, starts: Sequence[str], sample: tuple[Tensor, ...]) -> StageGraph:
    """Trace ``model(*sample)``, with a block beginning at each of the named modules.

    Raises:
        ShapeError: If the forward cannot be exported, does not call the modules in this order, or returns no tensor.
    """
    ancestors = {""}
    for name in starts:
        while name := name.rpartition(".")[0]:
            ancestors.add(name)
    leaf_modules = dict(_leaf_modules(model, "", ancestors))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _calls[:] = _on_fake(model, leaf_modules, sample, mode)
    try:
        with ignored_warnings():  # torch 2.13 uses functions here that torch itself deprecates
            with _opaque(leaf_modules), _beside(model, sample, mode):
                # Not strict, so that the model's Python code runs and calls the replaced forwards.
                exported = torch.export.export(model, sample, strict=False)
            # Autograd refuses in-place changes of inputs.
            if any(is_mutable_operator(node.target) for node in exported.graph.nodes):
                exported = exported.run_decompositions({})
        # Guards would check the sizes on every microbatch, and PipelineSchedule checks them once per batch.
        return _divide(exported.module(check_guards=False), starts, list(leaf_modules))
    except ShapeError:
        raise
    except Exception as error:
        raise ShapeError(
            f"torch.export cannot trace the forward of {type(model).__name__} between its modules "
            f"({_first_line(error)}): {_ALTERNATIVE}"
        ) from error
    finally:
        _calls.clear()


def _leaf_modules(module: nn.Module, name: str, ancestors: set[str]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        # ModuleLists and ModuleDicts are never called, so that only their children can be leaf modules.
        if path in ancestors or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _leaf_modules(child, path, ancestors)
        else:
            yield path, child


def _on_fake(
    model: nn.Module, leaf_modules: dict[str, nn.Module], sample: tuple[Tensor, ...], mode: FakeTensorMode
) -> list[_Call]:
    """Run the model on fake tensors and record the outputs of its leaf modules."""
    calls: list[_Call] = []

    def note(name: str) -> Any:
        return lambda module, args, output: calls.append(_Call(name, output))

    handles = [module.register_forward_hook(note(name)) for name, module in leaf_modules.items()]
    state = {name: _fake(t, sample, mode) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    try:
        with mode, torch.no_grad():
            torch.func.functional_call(model, state, tuple(mode.from_tensor(x) for x in sample))
    except Exception as error:
        raise ShapeError(
            f"{type(model).__name__} cannot be run on fake tensors ({_first_line(error)}): pass the "
            f"inputs of one microbatch as sample_input=; where its forward depends on values, {_ALTERNATIVE}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _fake(tensor: Tensor, sample: tuple[Tensor, ...], mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor of the same shape; for a tensor on the meta device, it is on the device of the sample."""
    if not (tensor.is_meta and sample):
        return mode.from_tensor(tensor.detach())
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=sample[0].device)


@contextmanager
def _beside(model: nn.Module, sample: tuple[Tensor, ...], mode: FakeTensorMode) -> Iterator[None]:
    """Replace tensors on the meta device by fake ones on the sample's device, which the trace records."""
    places: Iterator[dict[str, Any]] = (p for m in model.modules() for p in (parameters_of(m), buffers_of(m)))
    previous_tensors = [(place, dict(place)) for place in places]
    fakes: dict[int, Any] = {}  # shared tensors stay shared
    for place, tensors in previous_tensors:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                if id(tensor) not in fakes:
                    fake = _fake(tensor, sample, mode)
                    trained = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
                place[name] = fakes[id(tensor)]
    try:
        yield
    finally:
        for place, tensors in previous_tensors:
            place.update(tensors)


@contextmanager
def _opaque(leaf_modules: dict[str, nn.Module]) -> Iterator[None]:
    """Replace leaf modules by single operations; their hooks run only when a stage calls them."""
    # A module may be called more than once, and export may run the model again.
    numbers = {name: cycle([i for i, call in enumerate(_calls) if call.name == name]) for name in leaf_modules}

    def stand_in(name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers[name])
            call = _calls[number]
            call.inputs = args, kwargs
            input_tensors = [leaf for leaf in tree_leaves(call.inputs) if isinstance(leaf, Tensor)]
            outputs = iter(_call_leaf(input_tensors, number))
            return tree_map_only(Tensor, lambda leaf: next(outputs), call.outputs)

        return forward

    with ExitStack() as stack:
        for name, module in leaf_modules.items():
            stack.enter_context(without_forward_hooks(module))
            stack.enter_context(_forward_replaced(module, stand_in(name)))
        yield


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of an instance within the block."""
    previous = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if previous is not None:
            module.__dict__["forward"] = previous


def _divide(exported: fx.GraphModule, starts: Sequence[str], leaf_modules: list[str]) -> StageGraph:
    graph = exported.graph
    graph.owning_module = None  # the exported module lacks modules without parameters, and fx would complain
    for node in list(graph.nodes):
        if node.target is ASSERT_TENSOR_METADATA:
            graph.erase_node(node)
        elif node.target is torch.ops.panther.call_leaf.default:
            _put_call(graph, node)
    # Calls of modules stay even if their results are unused, because their hooks and buffers may matter.
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output", "call_module") or is_mutable_operator(node.target)
    )
    (output,) = graph.output_node().args
    if not (isinstance(output, tuple | list) and len(output) == 1 and isinstance(output[0], fx.Node)):
        raise ShapeError(
            "a model that is split into stages must return a single tensor, which is passed to the loss: wrap the model"
        )
    block_of: dict[fx.Node, int] = {}
    block = 0
    for node in graph.nodes:
        if node.op == "call_module":
            later = [i for i, start in enumerate(starts) if i >= block and f"{node.target}.".startswith(f"{start}.")]
            if later and later[-1] > block:
                raise ShapeError(
                    f"the forward calls {starts[later[-1]]!r} before {starts[block]!r}: name stages in the order in "
                    "which the forward calls them"
                )
            block += bool(later)
        block_of[node] = -1 if node.op == "placeholder" else block
    if block < len(starts):
        raise ShapeError(f"the forward does not call {starts[block]!r}: begin stages at modules that it calls")
    return StageGraph(block_of, exported, list(starts), leaf_modules)


def _put_call(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the opaque operation by the call of the module."""
    tensors, number = node.args
    call = _calls[number]  # type: ignore[index]
    left = iter(tensors)  # type: ignore[arg-type]
    args, kwargs = tree_map_only(Tensor, lambda leaf: next(left), call.inputs)
    with graph.inserting_before(node):
        called = graph.call_module(call.name, args, kwargs)
    for user in list(node.users):  # getitem of each output
        with graph.inserting_before(user):
            single = isinstance(call.outputs, Tensor)
            part = called if single else graph.call_function(tensor_leaf, (called, user.args[1]))
        user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(node)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
