"""A survey of the layers on one batch: which are called, which share an input, and which affect the output."""

__all__ = ["Loss", "Watch", "input_of", "output_gradients", "survey_targets", "version_of", "watched"]

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.runner import Runner
from panther.compression.targets import SkippedLayer, Survey, Target
from panther.errors import CompressionError, NumericalWarning

Loss = Callable[[Tensor, Any], Tensor]


def survey_targets(runner: Runner, survey: Survey, loss_fn: Loss | None, *, gradients: bool) -> Survey:
    """Run the first batch, and skip the layers that the batches say nothing about.

    Args:
        runner: The model and its batches.
        survey: The layers to look at.
        loss_fn: The loss whose gradients are taken, if not those of random directions.
        gradients: Whether gradients are wanted.

    Warns:
        NumericalWarning: If they are wanted, and the output has none.
    """
    keys: dict[Target, list[Any]] = {}  # in the order of the first calls
    alive = []  # so that an address is not used again by the next tensor

    def note(target: Target, module: nn.Module, x: Tensor) -> None:
        alive.append(x)
        key = (x.data_ptr(), x.shape, x.stride(), version_of(x), _geometry(module))
        keys.setdefault(target, []).append(key)

    batch, notes = runner.batches[0], list(survey.notes)
    with watched(survey.targets, note) as watch:
        output = runner.output(batch)
        if gradients and not output.requires_grad:
            gradients = False
            notes.append("the output has no gradient, so G is the identity and ranks are uniform (method 'activation')")
            warnings.warn(f"method='two_sided' is not possible: {notes[-1]}", NumericalWarning, stacklevel=3)
        found = output_gradients(runner, output, batch, watch, 0, loss_fn) if gradients else []
    reached = {target for (target, _, _), g in zip(watch.taps, found, strict=False) if g is not None and g.any()}
    targets, skipped = [], list(survey.skipped)
    inputs: dict[Any, list[Target]] = {}
    for target in survey.targets:
        if target not in keys:
            reason = "is not called on the first calibration batch"
        elif gradients and target not in reached:
            reason = "has no gradient: the output does not depend on it, or only through no_grad, detach or zeros"
        else:
            targets.append(target)
            continue
        skipped.append(SkippedLayer(target.name, target.kind, reason))
    kept = set(targets)
    for target, places in keys.items():
        if target in kept:
            inputs.setdefault(tuple(places), []).append(target)
    calls = {target: len(places) for target, places in keys.items()}
    return Survey(tuple(targets), tuple(skipped), tuple(map(tuple, inputs.values())), calls, gradients, tuple(notes))


@dataclass
class Watch:
    """Outputs of the targets in one forward, in order, where gradients are taken."""

    taps: list[tuple[Target, nn.Module, Tensor]] = field(default_factory=list)
    over: bool = False  # anything that runs after this is the second forward of activation checkpointing


@contextmanager
def watched(
    targets: Sequence[Target], note: Callable[[Target, nn.Module, Tensor], None], gradients: bool = True
) -> Iterator[Watch]:
    """Call ``note`` with every input of the targets, and collect their outputs, where gradients are taken."""
    watch = Watch()
    with ExitStack() as hooks:
        for target in targets:
            for module in target.modules:

                def hook(
                    module: nn.Module, args: Any, kwargs: Any, output: Tensor, target: Target = target
                ) -> Tensor | None:
                    if not watch.over:
                        note(target, module, input_of(args, kwargs).detach())
                    if not gradients or not torch.is_grad_enabled():
                        return None
                    if not output.requires_grad:  # the first layer that is watched: the graph begins here
                        output.requires_grad_()
                    if not watch.over:
                        watch.taps.append((target, module, output))
                    return output.clone()  # the model may change its own in place, and the tap must stay

                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield watch


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input that a layer was called with, by position or by name."""
    return next(iter((*args, *kwargs.values())))


def output_gradients(
    runner: Runner,
    output: Tensor,
    batch: Any,
    watch: Watch,
    seed: int,
    loss_fn: Loss | None,
) -> Sequence[Tensor | None]:
    """Return the gradients at the layers' outputs of the loss, or of the output times a normal vector."""
    watch.over = True
    at = [tap for _, _, tap in watch.taps]
    if loss_fn is not None:
        loss = loss_fn(output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise CompressionError(
                "loss_fn must return one number as a tensor with a gradient to the output, and its result has "
                f"{shown}{'' if getattr(loss, 'requires_grad', False) else ' and no gradient'}: end it with .mean(), "
                "and remove .detach() and .item() from it"
            )
        return torch.autograd.grad(loss, at, allow_unused=True)
    # Drawn on the CPU, so that every device gets the same directions.
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
    mask = runner.mask(batch)
    if mask is not None and output.dim() > 2:
        if output.shape[:2] == mask.shape:
            direction[~mask] = 0
        elif output.shape[:2] == mask.shape[::-1]:
            direction[~mask.mT] = 0
    return torch.autograd.grad(output, at, direction, allow_unused=True)


def _geometry(module: nn.Module) -> Any:
    """Return the settings by which two convolutions of one input unfold it differently."""
    if isinstance(module, nn.Conv2d):
        return (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    return None


def version_of(x: Tensor) -> int:
    """Return how often a tensor was changed in place: inputs are the same only while nothing wrote to them."""
    return 0 if x.is_inference() else x._version  # private; those of inference mode have none
