"""A survey of the layers on one batch: which are called, which share an input, and which affect the output."""

__all__ = ["Receive", "Watch", "blocks_of", "hooked", "input_key", "send_gradients", "survey_targets", "watched"]

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import children_of, version_of
from panther.compression.runner import Runner, rows_of
from panther.compression.targets import GEOMETRY, SkippedLayer, Survey, Target
from panther.errors import CompressionError, NumericalWarning


def survey_targets(runner: Runner, survey: Survey, *, gradients: bool) -> Survey:
    """Run the first batch, and skip the layers that the batches say nothing about.

    Warns:
        NumericalWarning: If gradients are wanted, and the output has none.
    """
    keys: dict[Target, list[Any]] = {}  # in the order of the first calls
    alive = []  # so that an address is not used again by the next tensor
    reached: set[Target] = set()

    def note(target: Target, module: nn.Module, x: Tensor) -> Receive:
        alive.append(x)
        keys.setdefault(target, []).append(input_key(module, x))
        return lambda gradient: reached.update([target] if gradient.any() else [])

    batch, notes = runner.batches[0], list(survey.notes)
    with watched(survey.targets, note) as watch, torch.set_grad_enabled(gradients):
        output = runner.output(batch)
        alive.clear()
        if gradients and not output.requires_grad:
            gradients = False
            notes.append("the output has no gradient, so G is the identity and ranks are uniform (method 'activation')")
            warnings.warn(f"method='two_sided' is not possible: {notes[-1]}", NumericalWarning, stacklevel=3)
        if gradients:
            send_gradients(runner, output, batch, watch, 0)
    reasons: dict[Target, str] = {}
    for target in survey.targets:
        if target not in keys:
            reasons[target] = "is not called on the first calibration batch"
        elif gradients and target not in reached:
            reasons[target] = (
                "has no gradient: the output does not depend on it, or only through no_grad, detach or zeros"
            )
    inputs: dict[Any, list[Target]] = {}
    for target, places in keys.items():
        if target not in reasons:
            inputs.setdefault(tuple(places), []).append(target)
    return Survey(
        targets=tuple(target for target in survey.targets if target not in reasons),
        skipped=(*survey.skipped, *(SkippedLayer(t.name, t.kind, reason) for t, reason in reasons.items())),
        inputs=tuple(map(tuple, inputs.values())),
        calls={target: len(places) for target, places in keys.items()},
        gradients=gradients,
        notes=tuple(notes),
    )


Receive = Callable[[Tensor], None]
"""What is called with the gradient at the output of one call of a layer, as soon as it is known."""


class _Tap(torch.autograd.Function):
    """A copy of a layer's output, whose gradient goes to a function too: the model may change its own in place.

    ``anchor`` is where the graph begins. As every tap leads to it, the gradient of it alone reaches all of them, and
    none has to be kept for that.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, receive: Receive) -> Tensor:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is not None:
            ctx.receive(gradient)
        return gradient, None, None


@dataclass
class Watch:
    """The graph of one forward.

    Attributes:
        anchor: Where it begins.
        tapped: Whether any gradient is to be received.
        over: Whether the forward is over: what runs then is the second forward of activation checkpointing.
    """

    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    tapped: bool = False
    over: bool = False


@contextmanager
def watched(targets: Sequence[Target], note: Callable[[Target, nn.Module, Tensor], Receive | None]) -> Iterator[Watch]:
    """Call ``note`` with every input of the targets, and what it returns with the gradient at the layer's output."""
    watch = Watch()

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
        if watch.over:
            return output.clone() if torch.is_grad_enabled() else None  # the same operations as in the first forward
        receive = note(target, module, x.detach())
        if receive is None or not torch.is_grad_enabled():
            return None
        watch.tapped = True
        return _Tap.apply(output, watch.anchor, receive)

    with hooked(targets, hook):
        yield watch


@contextmanager
def hooked(
    targets: Sequence[Target], hook: Callable[[Target, nn.Module, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``hook`` with target, layer, input and output of every call; a tensor that it returns is the new output."""
    with ExitStack() as hooks:
        for target in targets:
            for module in target.modules:

                def call(module: nn.Module, args: Any, kwargs: Any, output: Tensor, target: Target = target) -> Any:
                    return hook(target, module, next(iter((*args, *kwargs.values()))), output)

                hooks.callback(module.register_forward_hook(call, with_kwargs=True).remove)
        yield


def send_gradients(runner: Runner, output: Tensor, batch: Any, watch: Watch, seed: int) -> None:
    """Run backward from the loss, or from the output times a normal vector; what was tapped is received on the way."""
    watch.over = True
    if runner.loss_fn is not None:
        loss = runner.loss_fn(output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise CompressionError(
                "loss_fn must return one number as a tensor with a gradient to the output, and its result has "
                f"{shown}{'' if getattr(loss, 'requires_grad', False) else ' and no gradient'}: end it with .mean(), "
                "and remove .detach() and .item() from it"
            )
        torch.autograd.grad(loss, watch.anchor, allow_unused=True)
        return
    # Drawn on the CPU, so that every device gets the same directions.
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
    rows = rows_of(output, runner.mask(batch))
    if rows is not None:
        direction[~rows] = 0
    torch.autograd.grad(output, watch.anchor, direction, allow_unused=True)


def input_key(module: nn.Module, x: Tensor) -> Any:
    """Return what is the same for two inputs, while both live, if and only if their moments are."""
    # An address alone is the same after a write. Tensors of inference mode count no writes.
    version = 0 if x.is_inference() else version_of(x)
    # Two convolutions of one input can unfold it differently.
    return x.data_ptr(), x.shape, x.stride(), version, *(getattr(module, name, None) for name in GEOMETRY)


def blocks_of(model: nn.Module, layers: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return where the blocks are: elements, with one of the layers, of the outermost ModuleLists and Sequentials.

    An element that wraps a stack (as a Sequential of an encoder and a head does) stands for the stack's elements; a
    stack has several elements of one class, each with some of the layers inside.
    """
    inside = {id(module) for module in model.modules() if any(child in layers for child in module.modules())}
    found: list[tuple[nn.Module, str]] = []

    def is_stack(module: nn.Module) -> bool:
        kinds = Counter(type(child) for child in module.children() if id(child) in inside and child not in layers)
        return isinstance(module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1

    def visit(module: nn.Module) -> None:
        for name, child in children_of(module).items():
            if child is None or id(child) not in inside:
                continue
            within = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
            if within and (is_stack(module) or not any(map(is_stack, child.modules()))):
                found.append((module, name))
            else:
                visit(child)

    visit(model)
    return found
