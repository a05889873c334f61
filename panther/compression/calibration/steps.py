"""Steps of a forward and a backward pass, and hooks that read the layers' inputs and the gradients at their outputs."""

__all__ = [
    "SKIPPED_CALL", "Receive", "Step", "Tap", "Watch", "forward_replaced", "hooked", "ignore", "input_key", "send",
    "watched",
]  # fmt: skip

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import is_transformed, parameters_of, version_of
from panther.compression.calibration.batches import Masks
from panther.compression.calibration.targets import Further, Target, kind_of_layer
from panther.errors import CompressionError

SKIPPED_CALL = "_panther_call_is_skipped"
"""An attribute of a module whose present call returns what an earlier call has returned: hooks ignore it."""

Receive = Callable[[Tensor], None]
"""A function that is called with the gradient at the output of one call of a layer, as soon as it is computed."""


@dataclass(frozen=True)
class Step:
    """A forward for one batch, and the backward pass to it: of the whole model, or of one part of it.

    Attributes:
        number: The number of the pass, which is a batch with a random direction.
        batch: The batch.
        targets: The targets that the step calls.
        forward: Runs the model, and returns its output; None if the step ends before the end of the model.
        backward: Takes this output and the watch over the forward, sends the gradients to the layers, and returns
            whether there were any.
        part: The place of the part of the model in the order of the forward.
        completed: The targets that no later step calls, in any pass.
    """

    number: int
    batch: Any
    targets: Sequence[Target]
    forward: Callable[[], Tensor | None]
    backward: Callable[[Tensor | None, "Watch"], bool]
    part: int = 0
    completed: Sequence[Target] = ()


class Tap(torch.autograd.Function):
    """Copy a layer's output, and pass the gradient of the copy to a function ``receive`` too.

    It is a copy, because the model may change the layer's output in place. ``anchor`` is a leaf of the graph that every
    tap depends on: computing the gradient of the anchor alone reaches all taps, without references to them.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, receive: Receive) -> Tensor:
        """Return a copy of the output."""
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Pass the gradient to ``receive``, and on."""
        if gradient is not None:
            ctx.receive(gradient)
        return gradient, None, None


@dataclass
class Watch:
    """The graph of one forward.

    Attributes:
        anchor: The leaf of the graph that all taps depend on.
        tapped: Whether any gradient will be received.
        is_backward: Whether the forward has ended; layers that run afterwards are recomputed by activation
            checkpointing.
        untracked: The calls that ran without gradients, with a copy of the input. Reentrant checkpointing runs a block
            without gradients, and again with gradients in backward.
    """

    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    tapped: bool = False
    is_backward: bool = False
    untracked: list[tuple[nn.Module, Tensor, Receive]] = field(default_factory=list)

    def after_forward(self, receive: Receive) -> Receive:
        """Return what receives a gradient only after the forward.

        A forward can compute gradients itself, as of an energy by positions, and these are not the output's gradients.
        """
        return lambda gradient: receive(gradient) if self.is_backward else None

    def receive_again(self, module: nn.Module, x: Tensor) -> Receive:
        """Return the receiver of the gradient of a recomputed call; nothing is received if the first call had one."""
        for index, (called, first, receive) in enumerate(self.untracked):
            if called is module and first.shape == x.shape and torch.equal(first, x):
                del self.untracked[index]
                return receive
        return ignore


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward within the block; a forward that was set on it is set again afterwards."""
    attributes = vars(module)
    previous_forward = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward", None)
        if previous_forward is not None:
            attributes["forward"] = previous_forward


def ignore(gradient: Tensor) -> None:
    """Receive a gradient that nothing is made of."""


def send(outputs: Sequence[tuple[Tensor, Tensor | None]], watch: Watch, leaves: Iterable[Tensor] = ()) -> None:
    """Run backward from outputs with their gradients (None for a loss), so that taps receive them.

    The gradients of ``leaves`` are then in their ``grad``.
    """
    watch.is_backward = True
    tensors, gradients = [output for output, _ in outputs], [gradient for _, gradient in outputs]
    # Reentrant checkpointing refuses a choice of inputs. Without one, nothing accumulates in parameters either, because
    # none of them requires a gradient here.
    inputs = None if watch.untracked else [*leaves, watch.anchor]
    try:
        torch.autograd.backward(tensors, gradients, inputs=inputs)
    except (CompressionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Some models can compute gradients in training mode only: their forward writes in place what backward reads.
        raise CompressionError(
            f"{type(error).__name__}: {error}: the backward pass of the model raised this, in eval mode; "
            "method='activation' needs no backward pass"
        ) from error


@contextmanager
def watched(
    targets: Sequence[Target],
    note: Callable[[Target, nn.Module, Tensor, Further], Receive | None],
    model: nn.Module | None = None,
    unreadable: dict[Target, str] | None = None,
    masks_of: Callable[[], Masks | None] | None = None,
) -> Iterator[Watch]:
    """Call ``note`` with the arguments of every call of the targets, and its result with the gradient at the output.

    With ``model``, the outputs of its layers that look up rows require gradients, as in training. Parameters do not
    require gradients here, and reentrant checkpointing computes no gradients for a block whose input does not require
    one. For ``unreadable`` and ``masks_of`` see :func:`hooked`.
    """
    watch = Watch()

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor, further: Further) -> Tensor | None:
        if watch.is_backward:
            # The same operations as in the first forward, because non-reentrant checkpointing counts saved tensors.
            if not torch.is_grad_enabled():
                return None
            return Tap.apply(output, watch.anchor, watch.receive_again(module, x.detach()))
        receive = note(target, module, x.detach(), further)
        if receive is None:
            return None
        if not torch.is_grad_enabled():
            watch.untracked.append((module, x.detach().clone(), receive))
            return None
        watch.tapped = True
        return Tap.apply(output, watch.anchor, watch.after_forward(receive))

    def start(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        tracked = isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad
        return Tap.apply(output, watch.anchor, ignore) if tracked else None

    modules = [] if model is None else [*model.modules()]
    embeddings = [m for m in modules if (kind := kind_of_layer(m)) is not None and not kind.multiplies(m)]
    with hooked(targets, hook, unreadable, masks_of), ExitStack() as hooks:
        for embedding in embeddings:
            hooks.callback(embedding.register_forward_hook(start).remove)
        yield watch


@contextmanager
def hooked(
    targets: Sequence[Target],
    hook: Callable[[Target, nn.Module, Tensor, Tensor, Further], Tensor | None],
    unreadable: dict[Target, str] | None = None,
    masks_of: Callable[[], Masks | None] | None = None,
) -> Iterator[None]:
    """Call ``hook`` with target, layer, input, output and further arguments of every call.

    A tensor that ``hook`` returns is the new output.

    A target with a call that cannot be read is added to ``unreadable``, with the reason; without this argument such a
    call is an error. ``masks_of`` returns the masks of the present batch: tokens of experts that do not count are not
    read.
    """
    with ExitStack() as hooks:
        for kind in dict.fromkeys(target.kind for target in targets):
            of_kind = [target for target in targets if target.kind is kind]
            hooks.enter_context(kind.routed(of_kind, masks_of, unreadable))
        for target in targets:
            for module in target.modules:
                weight = parameters_of(module).get("weight")

                def call(
                    module: nn.Module,
                    args: Any,
                    kwargs: Any,
                    output: Any,
                    target: Target = target,
                    weight: Tensor | None = weight,
                ) -> Any:
                    if SKIPPED_CALL in vars(module):
                        return None
                    key = None if args or not kwargs else "input" if "input" in kwargs else next(iter(kwargs))
                    x = kwargs[key] if key is not None else next(iter(args), None)
                    if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                        kind = type(x if isinstance(output, Tensor) else output).__name__
                        verb = "takes" if isinstance(output, Tensor) else "returns"
                        raise CompressionError(
                            f"layer {target.name!r} ({target.class_name}) {verb} a {kind}, and a new layer takes and "
                            "returns one tensor: exclude the layer"
                        )
                    if reason := _unreadable_reason(module, x, weight):
                        if unreadable is None:
                            raise CompressionError(f"layer {target.name!r} {reason}: exclude the layer")
                        unreadable.setdefault(target, reason)
                        return None
                    further = args[1:], {name: value for name, value in kwargs.items() if name != key}
                    return hook(target, module, x, output, further)

                hooks.callback(module.register_forward_hook(call, with_kwargs=True).remove)
        yield


def _unreadable_reason(module: nn.Module, x: Tensor, weight: Tensor | None) -> str:
    """Return why the input of a call says nothing about the layer's weight; nothing where it does."""
    if is_transformed(x):
        return "is called within vmap or grad of torch.func, where its input has no values to read"
    if x.is_nested:
        return "reads nested tensors, whose rows cannot be read here"
    if parameters_of(module).get("weight") is not weight:
        return "is called with a weight that is not its own, as by torch.func.functional_call"
    return ""


def input_key(target: Target, module: nn.Module, x: Tensor) -> Any:
    """Return a key that is equal for two inputs, while both are alive, if and only if their moments are equal."""
    # The version distinguishes the values before and after a write. Tensors of inference mode count no writes.
    version = 0 if x.is_inference() else version_of(x)
    # Two convolutions of one input can unfold it differently.
    return x.data_ptr(), x.shape, x.stride(), version, *target.kind.geometry(module)
