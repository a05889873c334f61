"""Which modules act on every entry of a tensor alone, and which blocks do nothing else between two layers.

Between the layers of a pair that is sharded, every rank has a part of the features. Functions of single entries are
right on such a part; anything else, a softmax or a sum, is wrong without an error. So a pair is sharded only if a
symbolic trace of the block's forward shows nothing but elementwise functions of sharded tensors. A forward that
cannot be traced, or has optional arguments and so more ways through than one, is left alone.
"""

__all__ = ["is_elementwise", "reason_against_pair"]

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

_MODULES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish, nn.ReLU6,
    nn.Dropout, nn.Identity,
)  # fmt: skip
_NAMES = (
    "abs", "add", "clamp", "clone", "contiguous", "cos", "detach", "div", "dropout", "elu", "erf", "exp", "float",
    "gelu", "half", "hardsigmoid", "hardswish", "hardtanh", "iadd", "imul", "isub", "itruediv", "leaky_relu", "log",
    "log1p", "logsigmoid", "mish", "mul", "multiply", "neg", "pos", "pow", "relu", "relu6", "rsqrt", "selu", "sigmoid",
    "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to", "true_divide", "truediv", "type_as",
)  # fmt: skip
_METHODS = {*_NAMES, *(f"{name}_" for name in _NAMES)}
_FUNCTIONS = {
    function
    for name in _METHODS
    for space in (torch, F, operator)
    if callable(function := getattr(space, name, None)) and not isinstance(function, type)
}
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def reason_against_pair(block: nn.Module, firsts: Sequence[nn.Module], last: nn.Module) -> str | None:
    """Return why ``firsts`` and ``last``, layers of a block, cannot be sharded as a pair; None if they can."""
    method, own = "forward", type(block).__module__.startswith("transformers.")
    if any(type(block).forward is layer.forward for layer in _TORCH_LAYERS):
        method = "_ff_block"  # all that its forward does with the two layers, once its fast path is off
    elif own and hasattr(block, "feed_forward_chunk"):
        method = "feed_forward_chunk"  # the same in transformers' BERT and its relatives
    try:
        for training in (True, False):
            # The options of transformers' blocks are about attention; those of other blocks may be about anything.
            tracer = _trace(block, method, training, firsts=firsts, last=last, with_options=own)
            if _check(tracer, firsts, last, _REPLICATED) == _SHARDED:
                return "an intermediate activation of the pair is also returned by its block"
            if not {*firsts, last} <= set(tracer.modules.values()):
                return "its block's forward does not call both layers of the pair"
    except _RefusedError as error:
        return str(error)
    return None


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a module without parameters acts on every entry of its input alone."""
    if type(module) in _MODULES:
        return True
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    if type(module).forward is nn.Sequential.forward:
        return all(map(is_elementwise, module.children()))
    try:
        return all(_check(_trace(module, "forward", mode), (), None, _SHARDED) == _SHARDED for mode in (True, False))
    except _RefusedError:
        return False


class _RefusedError(Exception):
    """The pair cannot be sharded; the message is for the report."""


class _Value(fx.Proxy):
    """A symbol for a tensor, which has the dtype and device of the block's layers."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tracer.like.dtype  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return self.tracer.like.device  # type: ignore[attr-defined]


class _Tracer(fx.Tracer):
    """Trace through the modules that contain layers of the pair, and take all others as single operations."""

    def __init__(self, method: str, opened: set[nn.Module], like: Any) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]  # wrapping all of `math` takes longer than a trace
        self.traced_func_name, self.opened, self.like = method, opened, like
        self.modules: dict[str, nn.Module] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m not in self.opened:
            self.modules[module_qualified_name] = m
        return m not in self.opened

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        # fx would also pass a symbol for every optional argument, and so miss what happens without it.
        required = list(_required(root_fn))[1:]
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in required)]


def _required(function: Any, with_options: bool = True) -> list[str]:
    """Return the names of the arguments that have no default."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(names) < len(parameters) and not with_options:
        raise _RefusedError("its block's forward has optional arguments, which may change what is between the layers")
    return names


def _trace(
    block: nn.Module,
    method: str,
    training: bool,
    *,
    firsts: Sequence[nn.Module] = (),
    last: nn.Module | None = None,
    with_options: bool = False,
) -> _Tracer:
    """Trace a method of a block with symbols in place of its required arguments."""
    layers = {*firsts} if last is None else {*firsts, last}
    if "forward" in vars(block):
        raise _RefusedError("its block's forward was replaced")
    _required(getattr(type(block), method), with_options or method != "forward")
    # The forward runs on a copy of the block and of the modules that are opened: it may change their attributes. Not
    # copy.copy: the __setstate__ of nn.TransformerDecoderLayer sets the activation to relu if that is a module.
    found = [old for old in block.modules() if old is block or set(old.modules()) & (layers - {old})]
    opened = {old: type(old).__new__(type(old)) for old in found}
    for old, new in opened.items():
        for key, value in vars(old).items():
            new.__dict__[key] = copy.copy(value) if type(value) in (dict, list, set) else value
        children = old._modules.items()
        new._modules = {name: None if child is None else opened.get(child, child) for name, child in children}
        new.training = training
        new._forward_hooks, new._forward_pre_hooks = OrderedDict(), OrderedDict()
    like = next((parameter for layer in layers for parameter in layer.parameters()), torch.empty(0))
    tracer = _Tracer(method, set(opened.values()), like)
    try:
        with torch.random.fork_rng(devices=[]):
            tracer.trace(opened[block])
    except fx.proxy.TraceError as error:
        raise _RefusedError("its block's forward branches on a tensor") from error
    except Exception as error:
        raise _RefusedError(f"its block's forward cannot be traced ({type(error).__name__})") from error
    return tracer


_REPLICATED, _SHARDED = "replicated", "sharded"


def _check(tracer: _Tracer, firsts: Sequence[nn.Module], last: nn.Module | None, given: str) -> str:
    """Return whether the output of a trace is sharded if its inputs are ``given``; refuse what would be wrong."""
    states: dict[fx.Node, str] = {}
    own = {id(parameter) for layer in (*firsts, last) if layer is not None for parameter in layer.parameters()}
    for node in tracer.graph.nodes:
        inputs = {states[other] for other in node.all_input_nodes}
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")
        module = tracer.modules.get(name) if node.op == "call_module" else None
        states[node] = _REPLICATED
        if node.op == "placeholder":
            states[node] = given
        elif node.op == "get_attr":
            if node.users and id(operator.attrgetter(name)(tracer.root)) in own:
                raise _RefusedError(f"its block reads {name!r}")
        elif module is not None and module in firsts:
            if _SHARDED in inputs:
                raise _RefusedError("its input is already sharded by another layer of its block")
            states[node] = _SHARDED
        elif module is not None and module is last:
            if inputs != {_SHARDED} or len(node.args) != 1:
                raise _RefusedError("the second layer of the pair also gets tensors that do not come from the first")
        elif _SHARDED in inputs:
            _check_elementwise(node, name, module, inputs)
            states[node] = _SHARDED
    kept = tree_leaves([dict(vars(module)) for module in tracer.opened])
    if any(isinstance(value, fx.Proxy) and states[value.node] == _SHARDED for value in kept):
        raise _RefusedError("its block keeps an intermediate activation of the pair in an attribute")
    return states[next(iter(reversed(tracer.graph.nodes)))]


def _check_elementwise(node: fx.Node, name: str, module: nn.Module | None, inputs: set[str]) -> None:
    if node.op == "output":
        return
    if module is not None:
        known, name = is_elementwise(module), type(module).__name__
    else:
        known = name in _METHODS if node.op == "call_method" else node.target in _FUNCTIONS
    if not known:
        raise _RefusedError(f"its block applies {name!r} between the layers of the pair, which is not elementwise")
    if _REPLICATED in inputs:
        raise _RefusedError(f"its block combines a replicated tensor with a sharded one in {name!r}")
