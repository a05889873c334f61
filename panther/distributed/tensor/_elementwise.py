"""What a block's forward does between two layers that would be cut as a pair, read off its traces.

What comes from the first layers is a part of the features on every rank. It may meet functions of single entries only,
of such parts and of numbers, and has to end in the last layer. The forward is traced with symbols in the place of
tensors, training and not, with and without its optional arguments, and both ways where it branches on a tensor.
"""

__all__ = ["is_of_single_entries", "why_not_a_pair"]

import copy
import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

_ELEMENTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish, nn.ReLU6,
    nn.Dropout, nn.Identity,
)  # fmt: skip
_NAMES = [
    "abs", "add", "bfloat16", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "cos",
    "detach", "div", "divide", "double", "dropout", "elu", "eq", "erf", "exp", "expm1", "float", "ge", "gelu", "gt",
    "half", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "iadd", "imul", "isub", "itruediv", "le",
    "leaky_relu", "log", "log1p", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply",
    "nan_to_num", "ne", "neg", "negative", "pos", "pow", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid",
    "sign", "silu", "sin", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tanh",
    "tanhshrink", "threshold", "to", "true_divide", "truediv", "type_as", "where",
]  # fmt: skip
_METHODS = {*_NAMES, *(f"{name}_" for name in _NAMES)}
_FUNCTIONS = {
    function
    for name in _METHODS
    for space in (torch, F, operator)
    if callable(function := getattr(space, name, None)) and not isinstance(function, type)
}
_SAME_ON_EVERY_PART = {"ndim", "dim", "ndimension", "is_floating_point", "requires_grad", "layout"}
_PATHS, _BRANCHES = 64, 12
"""Traces of one forward, and branches in a trace, up to which it is followed."""

_WHOLE, _CUT, _FREE = "whole", "cut", "free"


def why_not_a_pair(owner: nn.Module, firsts: Sequence[nn.Module], last: nn.Module) -> str | None:
    """Why the outputs of some layers of a block, and the inputs of another, cannot be cut; None if they can."""
    method = "forward"
    if type(owner).forward in (nn.TransformerEncoderLayer.forward, nn.TransformerDecoderLayer.forward):
        method = "_ff_block"  # the whole of a forward with a fast path, which is kept off
    called: set[nn.Module] = set()
    try:
        for tracer in _traces(owner, (*firsts, last), method):
            states = _states(tracer, firsts, last, _WHOLE)
            if states[tracer.output] == _CUT:
                return "its block gives what is between to others"
            called |= tracer.called
    except _CannotFollowError as error:
        return str(error)
    return None if called.issuperset((*firsts, last)) else "is not called by its block's forward, or its partner is not"


def is_of_single_entries(module: nn.Module) -> bool:
    """Whether a module without parameters acts on every entry of what it gets alone."""
    if type(module) in _ELEMENTWISE:
        return True
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    if type(module).forward is nn.Sequential.forward:
        return all(map(is_of_single_entries, module.children()))
    try:
        return all(_states(tracer, (), None, _CUT)[tracer.output] == _CUT for tracer in _traces(module, ()))
    except _CannotFollowError:
        return False


class _CannotFollowError(Exception):
    """The reason."""


class _Value(fx.Proxy):
    """A symbol for a tensor, of the dtype and device of the block's layers."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tracer.like.dtype  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return self.tracer.like.device  # type: ignore[attr-defined]


class _Tracer(fx.Tracer):
    """Traces modules that are opened; the others are taken as they are."""

    def __init__(self, opened: set[nn.Module], like: Any, method: str, optional: bool, choices: list[bool]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]  # none, for the price of it
        self.opened, self.like, self.traced_func_name = opened, like, method
        self.optional, self.choices = optional, choices
        self.asked: list[fx.Node] = []
        self.called: set[nn.Module] = set()
        self.modules: dict[str, nn.Module] = {}

    @property
    def output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m not in self.opened:
            self.called.add(m)
            self.modules[module_qualified_name] = m
            return True
        return False

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.asked.append(obj.node)
        if len(self.asked) > _BRANCHES:
            raise _CannotFollowError(f"its block's forward branches more than {_BRANCHES} times")
        if len(self.asked) > len(self.choices):
            self.choices.append(False)
        return self.choices[len(self.asked) - 1]

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        args: list[Any] = [self.root] if is_module else []
        kwargs: dict[str, Any] = {}
        for i, parameter in enumerate(list(inspect.signature(root_fn).parameters.values())[len(args) :]):
            needed = parameter.default is parameter.empty or i == 0
            if parameter.kind is parameter.VAR_KEYWORD or not (needed or self.optional):
                continue
            symbol = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = symbol
            else:
                args.append(symbol)
        return lambda *given: root_fn(*given, **kwargs), args


def _traces(owner: nn.Module, layers: Sequence[nn.Module], method: str = "forward") -> Iterator[_Tracer]:
    """Traces of all ways through a block; what it does to itself on the way is done to a copy."""
    if "forward" in vars(owner):
        raise _CannotFollowError("its block's forward was replaced")
    closed = {
        module for module in owner.modules() if module is not owner and not set(module.modules()) & (set(layers))
    } | set(layers)
    like = next((parameter for layer in layers for parameter in layer.parameters()), torch.empty(0))
    try:
        optional = any(
            parameter.default is not parameter.empty
            for parameter in inspect.signature(getattr(type(owner), method)).parameters.values()
        )
        for training in (True, False):
            for given in (False, True) if optional else (False,):
                yield from _branches(owner, closed, like, method, given, training)
    except _CannotFollowError:
        raise
    except Exception as error:
        raise _CannotFollowError(f"its block's forward cannot be traced ({type(error).__name__})") from error


def _branches(
    owner: nn.Module, closed: set[nn.Module], like: Any, method: str, optional: bool, training: bool
) -> Iterator[_Tracer]:
    choices: list[bool] = []
    refused: Exception | None = None
    found = False
    for _ in range(_PATHS):
        block = _copy(owner, closed, training)
        tracer = _Tracer(set(block.modules()) - closed, like, method, optional, choices)
        try:
            with torch.random.fork_rng(devices=[]):
                tracer.trace(block)
        except (ValueError, AssertionError, NotImplementedError) as error:  # the forward's own, of what it refuses
            refused = error
        else:
            found = True
            yield tracer
        del choices[len(tracer.asked) :]
        while choices and choices[-1]:
            choices.pop()
        if not choices:
            break
        choices[-1] = True
    else:
        raise _CannotFollowError(f"its block's forward has more than {_PATHS} ways through")
    if refused is not None and not found and not optional:
        raise refused


def _copy(owner: nn.Module, closed: set[nn.Module], training: bool) -> nn.Module:
    """The block anew, with the same tensors, and the same modules where they are taken as they are."""
    copies = {old: type(old).__new__(type(old)) for old in owner.modules() if old not in closed}
    for old, new in copies.items():
        for key, value in vars(old).items():
            new.__dict__[key] = copy.copy(value) if type(value) in (dict, list, set) else value
        modules = {name: None if child is None else copies.get(child, child) for name, child in old._modules.items()}
        new.__dict__ |= {"_modules": modules, "training": training, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    return copies[owner]


def _states(tracer: _Tracer, firsts: Sequence[nn.Module], last: nn.Module | None, given: str) -> dict[fx.Node, str]:
    """Of every value in a trace, whether it is whole on every rank, cut, or no matter of features."""
    states: dict[fx.Node, str] = {}
    own = {id(parameter) for layer in (*firsts, last) if layer is not None for parameter in layer.parameters()}
    for node in tracer.graph.nodes:
        inputs = {states[other] for other in node.all_input_nodes}
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")
        module = tracer.modules.get(name) if node.op == "call_module" else None
        state = _WHOLE
        if node.op == "placeholder":
            state = given
        elif node.op == "get_attr":
            if node.users and id(operator.attrgetter(name)(tracer.root)) in own:
                raise _CannotFollowError(f"its block reads {name!r}")
        elif module is not None and module in firsts:
            if _CUT in inputs:
                raise _CannotFollowError("takes, in its block, what is cut")
            state = _CUT
        elif module is not None and module is last:
            if inputs != {_CUT} or len(node.args) != 1:
                raise _CannotFollowError(
                    "its block gives its partner other things than functions of its single entries"
                )
        elif _CUT in inputs:
            state = _of_cut(node, name, module, inputs)
        elif inputs == {_FREE}:
            state = _FREE
        states[node] = state
    if any(states[node] == _CUT for node in tracer.asked):
        raise _CannotFollowError("its block branches on what is between")
    kept = tree_leaves([dict(vars(module)) for module in tracer.opened])
    if any(isinstance(value, fx.Proxy) and states[value.node] == _CUT for value in kept):
        raise _CannotFollowError("its block keeps what is between")
    return states


def _of_cut(node: fx.Node, name: str, module: nn.Module | None, inputs: set[str]) -> str:
    """What comes of a part of the features."""
    if node.op == "output":
        return _CUT
    attribute = node.args[1] if node.target is getattr else name if node.op == "call_method" else None
    if attribute in _SAME_ON_EVERY_PART:
        return _FREE
    if module is not None:
        single, name = is_of_single_entries(module), type(module).__name__
    else:
        single = name in _METHODS if node.op == "call_method" else node.target in _FUNCTIONS
    if not single:
        raise _CannotFollowError(f"its block has {name!r} between, which is no function of single entries")
    if _WHOLE in inputs:
        raise _CannotFollowError(f"its block puts together, in {name!r}, what is whole and what would be cut")
    return _CUT
