"""A survey of the layers on one batch: which are called, which share an input, and which affect the output."""

__all__ = ["Watch", "hooked", "input_key", "output_gradients", "survey_targets", "watched"]

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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

    def note(target: Target, module: nn.Module, x: Tensor) -> None:
        alive.append(x)
        keys.setdefault(target, []).append(input_key(module, x))

    batch, notes = runner.batches[0], list(survey.notes)
    with watched(survey.targets, note) as watch:
        output = runner.output(batch)
        if gradients and not output.requires_grad:
            gradients = False
            notes.append("the output has no gradient, so G is the identity and ranks are uniform (method 'activation')")
            warnings.warn(f"method='two_sided' is not possible: {notes[-1]}", NumericalWarning, stacklevel=3)
        found = output_gradients(runner, output, batch, watch, 0) if gradients else []
    reached = {target for (target, _, _), g in zip(watch.taps, found, strict=False) if g is not None and g.any()}
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

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
        if not watch.over:
            note(target, module, x.detach())
        if not gradients or not torch.is_grad_enabled():
            return None
        if not output.requires_grad:  # the first layer that is watched: the graph begins here
            output.requires_grad_()
        if not watch.over:
            watch.taps.append((target, module, output))
        return output.clone()  # the model may change its own in place, and the tap must stay

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


def output_gradients(runner: Runner, output: Tensor, batch: Any, watch: Watch, seed: int) -> Sequence[Tensor | None]:
    """Return the gradients at the layers' outputs of the loss, or of the output times a normal vector."""
    watch.over = True
    at = [tap for _, _, tap in watch.taps]
    if runner.loss_fn is not None:
        loss = runner.loss_fn(output, batch)
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
    rows = rows_of(output, runner.mask(batch))
    if rows is not None:
        direction[~rows] = 0
    return torch.autograd.grad(output, at, direction, allow_unused=True)


def input_key(module: nn.Module, x: Tensor) -> Any:
    """Return what is the same for two inputs, while both live, if and only if their moments are."""
    # `_version` (private) counts writes: an address alone is the same after one. Tensors of inference mode have none.
    version = 0 if x.is_inference() else x._version
    # Two convolutions of one input can unfold it differently.
    return x.data_ptr(), x.shape, x.stride(), version, *(getattr(module, name, None) for name in GEOMETRY)
