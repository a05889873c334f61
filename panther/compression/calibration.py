r"""What a layer reads and how the model's output depends on it, from unlabelled batches.

For a layer :math:`y = x W^T + b`, the error that a change :math:`\Delta` of W makes in the model's output is, to first
order and with inputs and sensitivities taken as independent,

.. math:: n \operatorname{tr}(G \Delta A \Delta^T), \qquad A = \frac1n \sum x x^T, \quad G = \frac1n \sum g g^T

over the n positions where the layer is applied, g being the gradient at y of the output times a normal vector, so that
:math:`E\, g g^T = J^T J` (the Kronecker factorisation of J. Martens and R. Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015, arXiv:1503.05671). All sums are in float64.
"""

__all__ = ["Drifted", "Statistics", "Survey", "drift", "gather", "passes", "statistics_bytes", "survey"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.compression.planning import Target
from panther.compression.running import Runner, counted, squares
from panther.errors import CompressionError
from panther.nn._conv import same_padding

Loss = Callable[[Tensor, Any], Tensor]

_DOUBLE = torch.float64.itemsize
_CHUNK = 2**22  # entries of unfolded input at a time


@dataclass
class Statistics:
    """Moments of one target, in float64.

    Attributes:
        A: Second moment of its inputs, (groups, inner, inner).
        mean: Of its inputs, (groups, inner).
        G: Second moment of the gradients at its outputs, (groups, outer, outer), or None.
        positions: How often the layer was applied, over all batches.
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    positions: float


@dataclass
class Drifted:
    """Moments of what a target reads in the compressed model, in float64.

    Attributes:
        A: Second moment of it, (groups, inner, inner).
        mean: Of it, (groups, inner).
        cross: Of the original's input with it, (groups, inner, inner): original in rows.
    """

    A: Tensor
    mean: Tensor
    cross: Tensor


@dataclass
class Survey:
    """What one batch says about the targets.

    Attributes:
        inputs: Sets of targets that read the same input, in the order in which they run.
        calls: How often each target runs in a batch.
        idle: Targets that are never called.
        blind: Targets that no gradient reaches.
        differentiable: Whether the output has a gradient at all.
    """

    inputs: list[list[Target]]
    calls: dict[Target, int]
    idle: set[Target]
    blind: set[Target]
    differentiable: bool


def survey(runner: Runner, targets: Sequence[Target], loss_fn: Loss | None) -> Survey:
    """Run the first batch, and see what is called, what reads the same input, and what gradients reach."""
    keys: dict[Target, list[Any]] = {}  # in the order of the first calls
    alive = []  # so that addresses stay distinct

    def note(target: Target, module: nn.Module, x: Tensor) -> None:
        alive.append(x)
        key = (x.data_ptr(), x.shape, x.stride(), _version(x), _geometry(module))
        keys.setdefault(target, []).append(key)

    batch = runner.batches[0]
    with _watched(targets, note) as watch:
        output = runner.output(batch)
        gradients = _gradients(runner, output, batch, watch, 0, loss_fn) if output.requires_grad else []
    inputs: dict[Any, list[Target]] = {}
    for target, found in keys.items():
        inputs.setdefault(tuple(found), []).append(target)
    blind, differentiable = set(keys), output.requires_grad
    if differentiable:
        found_at = zip(watch.taps, gradients, strict=True)
        blind -= {target for (target, _, _), g in found_at if g is not None and g.any()}
    calls = {target: len(found) for target, found in keys.items()}
    return Survey(list(inputs.values()), calls, set(targets) - set(keys), blind, differentiable)


def statistics_bytes(targets: Sequence[Target], gradients: bool) -> int:
    """What the moments of targets that read one input take."""
    A = targets[0].groups * targets[0].inner ** 2
    return _DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))


def passes(
    inputs: Sequence[Sequence[Target]], gradients: bool, limit: int | None
) -> tuple[list[list[list[Target]]], int]:
    """Cut the sets of targets into passes whose moments fit into ``limit`` bytes; and the bytes of the largest pass.

    A set that is larger by itself has a pass of its own. None is what the three largest layers take.
    """
    if limit is None:
        each = sorted(statistics_bytes([target], gradients) for several in inputs for target in several)
        limit = sum(each[-3:])
    cut: list[list[list[Target]]] = []
    sizes: list[int] = []
    for several in inputs:
        size = statistics_bytes(several, gradients)
        if cut and sizes[-1] + size <= limit:
            cut[-1].append(list(several))
            sizes[-1] += size
        else:
            cut.append([list(several)])
            sizes.append(size)
    return cut, max(sizes, default=0)


@dataclass
class _Moments:
    A: Tensor
    total: Tensor
    rows: float = 0.0
    G: dict[Target, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return [self.A, self.total, *self.G.values()]


def gather(
    runner: Runner,
    inputs: Sequence[Sequence[Target]],
    loss_fn: Loss | None,
    *,
    gradients: bool,
    seed: int,
    what: str,
) -> tuple[dict[Target, Statistics], float]:
    """One pass over the batches: the moments of the targets in ``inputs``, and the sum of squares of the output."""
    device = runner.device
    moments: dict[Target, _Moments] = {}
    leaders: dict[Target, Target] = {}
    for several in inputs:
        groups, n = several[0].groups, several[0].inner
        own = _Moments(_zeros(groups, n, n, device=device), _zeros(groups, n, device=device))
        if gradients:
            own.G = {target: _zeros(groups, target.outer, target.outer, device=device) for target in several}
        moments[several[0]] = own
        leaders |= dict.fromkeys(several, several[0])
    compared = {target for several in inputs if len(several) > 1 for target in several}
    seen: dict[Target, list[Tensor]] = {}
    energy = torch.zeros(1, dtype=torch.float64)
    number = 0
    mask: Tensor | None = None

    def note(target: Target, module: nn.Module, x: Tensor) -> None:
        if target in compared:
            seen.setdefault(target, []).append(x)
        if leaders[target] is not target:
            return
        own = moments[target]
        for rows in input_rows(module, x, mask, target.groups):
            if not rows.isfinite().all():
                raise CompressionError(
                    f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: mend the "
                    "batch or the model, or exclude the layer"
                )
            own.A.baddbmm_(rows.mT, rows)
            own.total += rows.sum(1)
            own.rows += rows.shape[1]

    targets = [target for several in inputs for target in several]
    for number, batch in enumerate(runner.over(runner.batches, what)):
        mask = runner.mask(batch)
        seen.clear()
        with _watched(targets, note, gradients=gradients) as watch, torch.set_grad_enabled(gradients):
            output = runner.output(batch)
            found = _gradients(runner, output, batch, watch, seed + number, loss_fn) if watch.taps else []
        for several in inputs:
            for other in several[1:]:
                if not _same(seen.get(several[0], []), seen.get(other, [])):
                    raise CompressionError(
                        f"layers {several[0].name!r} and {other.name!r} read one input in the first batch and two in "
                        f"batch {number}: exclude one of them"
                    )
        size = squares(counted(output.detach(), mask))
        if not isfinite(size):
            raise CompressionError(
                f"the model's output is NaN or infinite in calibration batch {number}: mend the batch or the model, or "
                "return what is finite in forward_fn"
            )
        energy += size
        for (target, module, _), gradient in zip(watch.taps, found, strict=True):
            if gradient is not None:
                _add_gradient(moments[leaders[target]].G[target], target, module, gradient, mask, number)
        seen.clear()
    result = {}
    for leader, own in moments.items():
        rows = _zeros(1, device=device) + own.rows
        runner.sum_([*own.tensors(), rows])
        positions = max(rows.item(), 1.0)
        for moment in own.tensors():
            moment /= positions
        for target in leaders:
            if leaders[target] is leader:
                result[target] = Statistics(own.A, own.total, own.G.get(target), positions)
    runner.sum_([energy])
    return result, energy.item()


class _Stop(BaseException):
    """Ends a forward whose rest is of no interest."""


def drift(runner: Runner, several: Sequence[Target], calls: int, compressed: Callable[[], Any], what: str) -> Drifted:
    """Moments of what targets of one input read, in the original and under ``compressed``, which replaces layers."""
    leader, device = several[0], runner.device
    groups, n = leader.groups, leader.inner
    A, cross = (_zeros(groups, n, n, device=device) for _ in range(2))
    mean, rows = _zeros(groups, n, device=device), _zeros(1, device=device)

    def read(batch: Any) -> list[Tensor]:
        found: list[Tensor] = []
        mask, left = runner.mask(batch), calls

        def note(target: Target, module: nn.Module, x: Tensor) -> None:
            nonlocal left
            found.extend(input_rows(module, x, mask, groups))
            left -= 1
            if left == 0:
                raise _Stop

        with _watched([leader], note, gradients=False), suppress(_Stop):
            runner.output(batch)
        return found

    with torch.no_grad():
        for batch in runner.over(runner.batches, what):
            before = read(batch)
            with compressed():
                after = read(batch)
            for x, z in zip(before, after, strict=True):
                A.baddbmm_(z.mT, z)
                cross.baddbmm_(x.mT, z)
                mean += z.sum(1)
                rows += z.shape[1]
    runner.sum_([A, cross, mean, rows])
    return Drifted(A / rows, mean / rows, cross / rows)


@dataclass
class _Watch:
    """Outputs of the targets in one forward, in order, where gradients are taken."""

    taps: list[tuple[Target, nn.Module, Tensor]] = field(default_factory=list)
    over: bool = False  # what runs from now on is checkpointing's second forward


@contextmanager
def _watched(
    targets: Sequence[Target], note: Callable[[Target, nn.Module, Tensor], None], gradients: bool = True
) -> Iterator[_Watch]:
    """Call ``note`` with every input of the targets, and collect their outputs, where gradients are taken."""
    watch = _Watch()
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
                    return output.clone()  # which the model may change in place

                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield watch


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a layer was called with, by position or by name."""
    return next(iter((*args, *kwargs.values())))


def _gradients(
    runner: Runner,
    output: Tensor,
    batch: Any,
    watch: _Watch,
    seed: int,
    loss_fn: Loss | None,
) -> Sequence[Tensor | None]:
    """Gradients at the layers' outputs of the loss, or of the output times a normal vector."""
    watch.over = True
    at = [tap for _, _, tap in watch.taps]
    if loss_fn is not None:
        loss = loss_fn(output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise CompressionError(
                "loss_fn must return one number as a tensor with a gradient to the output, and what it returned has "
                f"{shown}{'' if getattr(loss, 'requires_grad', False) else ' and no gradient'}: end it with .mean(), "
                "and take .detach() and .item() out of it"
            )
        return torch.autograd.grad(loss, at, allow_unused=True)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
    mask = runner.mask(batch)
    if mask is not None and output.dim() > 2:
        if output.shape[:2] == mask.shape:
            direction[~mask] = 0
        elif output.shape[:2] == mask.shape[::-1]:
            direction[~mask.mT] = 0
    return torch.autograd.grad(output, at, direction, allow_unused=True)


def _add_gradient(
    G: Tensor, target: Target, module: nn.Module, gradient: Tensor, mask: Tensor | None, number: int
) -> None:
    if isinstance(module, nn.Conv2d):
        rows = gradient.movedim(-3, -1).reshape(-1, target.groups, target.outer).movedim(1, 0)
    else:
        rows = counted(gradient, mask)[None]
    rows = rows.to(torch.float64)
    if not rows.isfinite().all():
        raise CompressionError(
            f"the gradient at layer {target.name!r} is NaN or infinite in calibration batch {number}: use "
            "method='activation', or a model in float32"
        )
    G.baddbmm_(rows.mT, rows)


def input_rows(module: nn.Module, x: Tensor, mask: Tensor | None, groups: int) -> Iterator[Tensor]:
    """What a layer multiplies its weight with, (groups, rows, inner) in float64, some rows at a time."""
    if not isinstance(module, nn.Conv2d):
        yield counted(x, mask).to(torch.float64)[None]
        return
    x = x if x.dim() == 4 else x[None]
    if isinstance(module.padding, str):
        pads = same_padding(module.kernel_size, module.dilation) if module.padding == "same" else [(0, 0)] * 2
    else:
        pads = [(size, size) for size in module.padding]
    flat = [size for pair in reversed(pads) for size in pair]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if any(flat):
        x = F.pad(x, flat, mode=mode)
    per_sample = max(1, x[0].numel() * module.weight[0, 0].numel()) if len(x) else 1
    for part in x.split(max(1, _CHUNK // per_sample)):
        columns = F.unfold(part, module.kernel_size, module.dilation, 0, module.stride)  # (N, in * kernel, places)
        rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        yield rows.to(torch.float64)


def _geometry(module: nn.Module) -> Any:
    if isinstance(module, nn.Conv2d):
        return (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    return None


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        x.data_ptr() == y.data_ptr() and x.shape == y.shape and _version(x) == _version(y)
        for x, y in zip(ours, theirs, strict=True)
    )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # those of inference mode have none


def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)
