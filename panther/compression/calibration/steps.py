"""Steps of a forward and a backward pass, in which hooks receive the gradients at the layers' outputs."""

__all__ = ["SKIPPED_CALL", "Receive", "Step", "Tap", "Watch", "forward_replaced", "ignore", "send"]

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.targets import Target
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
