r"""Second moments of the layers' inputs and of the output's gradients at the layers, from unlabelled batches.

For a layer :math:`y = x W^T + b`, the error that a change :math:`\Delta` of W makes in the model's output is, to first
order and with inputs and sensitivities taken as independent,

.. math:: n \operatorname{tr}(G \Delta A \Delta^T), \qquad A = \frac1n \sum x x^T, \quad G = \frac1n \sum g g^T

over the n positions where the layer is applied, g being the gradient at y of the output times a normal vector, so that
:math:`E\, g g^T = J^T J` (the Kronecker factorisation of J. Martens and R. Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015, arXiv:1503.05671).

Inputs and sensitivities are not independent: some positions matter more. Where gradients are taken, A is therefore a
weighted mean, over positions with the weight :math:`|g|^2 + c \operatorname{E} |g|^2`: without c it is the first step
from the identity towards the product nearest to :math:`\operatorname{E} x x^T \otimes g g^T` (C. Van Loan and N.
Pitsianis, "Approximation with Kronecker products", 1993), and c keeps it from resting on few positions.
"""

__all__ = ["Moments", "check_calibration", "gather_drift", "gather_moments", "moments_bytes", "split_passes"]

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import counted
from panther.compression.moments.batch import Call, gradient_rows, run_batch
from panther.compression.moments.sums import Shifted, Sums, add_products, add_squares, input_rows, square_zeros
from panther.compression.runner import Runner, squares
from panther.compression.survey import Receive, send_gradients, watched
from panther.compression.targets import Target
from panther.errors import CompressionError

_DOUBLE = torch.float64.itemsize
_CONSTANT = 1e-11  # of the square of an input is its variance at most, where rounding alone makes it vary
_EVEN = 0.25  # the c above: share of the weights that all positions have alike
_MOST = 2.0**40  # weight of a position, over the mean: its root is still far within float32


@dataclass(frozen=True)
class Moments:
    """Moments of one target, in float64.

    Attributes:
        A: Second moment of its inputs, (groups, inner, inner), weighted where there are gradients.
        mean: Mean of its inputs, (groups, inner), weighted alike.
        G: Second moment of the gradients at its outputs, (groups, outer, outer), or None.
        positions: How often the layer was applied, over all batches.
        cross: Where the inputs are those in the compressed model, the moment of the original's inputs, in rows, with
            them, (groups, inner, inner).
        roots: Roots of the weights of the positions, in the order of the batches, (groups, positions); None if all
            count alike.
        calls: How often the layer is called in each batch.
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    positions: float
    cross: Tensor | None = None
    roots: Tensor | None = None
    calls: tuple[int, ...] = ()

    @property
    def constant(self) -> bool:
        """Return whether every row of the inputs was the same, to rounding."""
        squares = self.A.diagonal(dim1=-2, dim2=-1)
        return bool((squares - self.mean.square() <= _CONSTANT * squares).all())


def check_calibration(positions: Mapping[Target, float], constant: Collection[Target]) -> tuple[str, ...]:
    """Return why the batches say too little about some layers, or raise CompressionError if they do about all.

    ``positions`` has how often each layer was applied, and ``constant`` the layers whose inputs never varied.
    """
    if positions and len(constant) == len(positions):
        raise CompressionError(
            f"every layer reads one input only at all {max(positions.values()):.0f} positions of the calibration "
            "batches (a single sample, constants or zeros), which says nothing about others: give batches like those "
            "that the model will read"
        )
    notes = []
    if constant:
        names = ", ".join(repr(target.name) for target in list(constant)[:3])
        notes.append(
            f"layers that read one input only in all calibration batches (constants or zeros): {len(constant)} of "
            f"{len(positions)} ({names}): exclude them, or give batches like those that the model will read"
        )
    few = [target for target, count in positions.items() if count < target.inner and target not in constant]
    if few:
        widest = max(few, key=lambda target: target.inner)
        notes.append(
            f"layers with more inputs than calibration positions: {len(few)} of {len(positions)} ({widest.name!r} has "
            f"{widest.inner} and was applied {positions[widest]:.0f} times): give batches with at least "
            f"{widest.inner} positions, better ten times as many"
        )
    return tuple(notes)


def moments_bytes(targets: Sequence[Target], gradients: bool) -> int:
    """Return the bytes of the moments of targets that read one input; with gradients each has its own weights."""
    A = targets[0].groups * targets[0].inner ** 2 * (len(targets) if gradients else 1)
    return _DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))


def split_passes(inputs: Sequence[Sequence[Target]], gradients: bool, limit: int) -> list[list[Sequence[Target]]]:
    """Return passes of sets of targets whose moments fit into ``limit`` bytes.

    A set that is larger by itself has a pass of its own.
    """
    split: list[list[Sequence[Target]]] = []
    sizes: list[int] = []
    for several in inputs:
        size = moments_bytes(several, gradients)
        if split and sizes[-1] + size <= limit:
            split[-1].append(several)
            sizes[-1] += size
        else:
            split.append([several])
            sizes.append(size)
    return split


def gather_moments(
    runner: Runner,
    inputs: Sequence[Sequence[Target]],
    *,
    gradients: bool,
    seed: int,
    description: str,
    keep: bool = False,
) -> tuple[dict[Target, Moments], float, Sequence[Sequence[Target]]]:
    """Pass over the batches once: return the moments, the output's squares, and the targets that share their inputs.

    Without gradients, targets of one input share its moments. With ``keep`` they have the weights of the positions.
    Targets that shared their inputs in the survey and do not share them in each batch, because the model branches, have
    moments of their own; the batches are read again for them.
    """
    while True:
        result, energy, separate = _gather_once(
            runner, inputs, gradients=gradients, seed=seed, description=description, keep=keep
        )
        if not any(separate):
            return result, energy, inputs
        inputs = [
            group
            for targets, is_separate in zip(inputs, separate, strict=True)
            for group in ([[target] for target in targets] if is_separate else [targets])
        ]


def _gather_once(
    runner: Runner, inputs: Sequence[Sequence[Target]], *, gradients: bool, seed: int, description: str, keep: bool
) -> tuple[dict[Target, Moments], float, list[bool]]:
    """Return what :func:`gather_moments` does, and which of ``inputs`` are not shared in each batch on each rank."""
    sums: dict[Target, Sums] = {}
    for several in inputs:
        for together in [[target] for target in several] if gradients else [several]:
            sums |= dict.fromkeys(together, Sums(together, gradients, runner.device, keep=keep))
    # Sharing was seen on one batch only.
    compared = {target for several in inputs if len(several) > 1 for target in several}
    levels = _levels(runner, list(sums), seed) if gradients else {}
    energy = torch.zeros(1, dtype=torch.float64)
    separate = torch.zeros(len(inputs), dtype=torch.float64)
    calls = {target: [0] * len(runner.batches) for several in inputs for target in several}

    def add(target: Target, call: Call, slope: Tensor | None) -> None:
        calls[target][call.place[0]] += 1
        roots: Tensor | float | None = _EVEN**0.5 if gradients else None
        if slope is not None:
            if not add_squares(sums[target].G[target], slope):
                raise CompressionError(
                    f"the gradient at layer {target.name!r} is NaN or infinite in calibration batch {call.place[0]}: "
                    "use method='activation', or a model in float32"
                )
            roots = _roots(slope, levels[target])
        if gradients or sums[target].leader is target:
            sums[target].add(call.module, call.x, roots, call.place)

    for number, batch in enumerate(runner.over(runner.batches, description)):
        size, seen = run_batch(
            runner, batch, list(sums), compared, add, number=number, seed=seed + number, gradients=gradients
        )
        energy += size
        for index, several in enumerate(inputs):
            separate[index] += any(seen.get(several[0]) != seen.get(other) for other in several[1:])
        if separate.any():
            break
    runner.sum_([separate])
    if separate.any():
        return {}, 0.0, (separate > 0).tolist()
    runner.sum_([energy])
    result: dict[Target, Moments] = {}
    for several in inputs:
        for target in several:
            own = sums[target]
            if own.leader is not target:
                result[target] = result[own.leader]
                continue
            own.finish_()
            weight, mean = own.inputs.weight, own.inputs.whole()
            moments = [own.A, mean, *own.G.values()]
            runner.sum_([*moments, weight, own.positions])
            positions = max(own.positions.item(), 1.0)
            weight = torch.where(weight > 0, weight, 1.0)
            own.A /= weight[..., None]
            mean /= weight
            for G in own.G.values():
                G /= positions
            own.roots.sort(key=lambda entry: entry[0])  # of calls in the order of the forwards, as drift has them
            roots = torch.cat([roots for _, roots in own.roots], 1) if own.roots else None
            result[target] = Moments(own.A, mean, own.G.get(target), positions, roots=roots, calls=tuple(calls[target]))
    return result, energy.item(), [False] * len(inputs)


def _levels(runner: Runner, targets: Sequence[Target], seed: int) -> dict[Target, float]:
    """Return the mean squares of the gradients at the targets' outputs in the first batch; 1 where there are none.

    Of layers that the first batch does not call, in the first batch that calls them. In a run of its own: weights of
    positions are relative to them, and no gradient is kept until all are known.
    """
    sums = torch.zeros(len(targets), 2, dtype=torch.float64)
    sums_of = dict(zip(targets, sums, strict=True))
    for batch in runner.batches:
        pending = [target for target in targets if not sums_of[target][1]]
        if not pending:
            break
        _add_levels(runner, batch, pending, sums_of, seed)
    runner.sum_([sums])
    means = {target: total / max(number, 1.0) for target, (total, number) in zip(targets, sums.tolist(), strict=True)}
    return {target: mean if 0 < mean < inf else 1.0 for target, mean in means.items()}


def _add_levels(
    runner: Runner, batch: Any, targets: Sequence[Target], sums_of: Mapping[Target, Tensor], seed: int
) -> None:
    masks = runner.mask(batch)

    def note(target: Target, module: nn.Module, x: Tensor) -> Receive:
        def receive(gradient: Tensor) -> None:
            rows = gradient_rows(module, gradient, masks, target)
            sums_of[target].add_(torch.tensor([squares(rows), rows.shape[0] * rows.shape[1]], dtype=torch.float64))

        return receive

    with watched(targets, note, runner.model) as watch:
        output = runner.output(batch)
        if output.requires_grad and (watch.tapped or watch.untracked):
            send_gradients(runner, output, batch, watch, seed)


def _roots(gradients: Tensor, level: float) -> Tensor:  # (groups, rows, outer) -> (groups, rows)
    """Return the roots of the weights of positions, from the gradients there and their mean square."""
    sizes = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.float64)
    return (sizes.square() / level + _EVEN).clamp_max(_MOST).sqrt().to(gradients.dtype)


class _Stop(BaseException):
    """End a forward once the layer of interest has run; not an Exception, which the runner would explain."""


def gather_drift(
    runner: Runner,
    several: Sequence[Target],
    moments: Mapping[Target, Moments],
    compressed: Callable[[], Any],
    description: str,
) -> dict[Target, Moments] | None:
    """Compare the input that targets share in the original and under ``compressed``, which replaces layers.

    Positions have the weights that they had in the targets' ``moments``. None if a batch has other positions there
    under ``compressed``, as behind a router that chooses by what the replaced layers compute.
    """
    sums, crosses, originals, starts = {}, {}, {}, dict.fromkeys(several, 0)
    for target in several:
        sums[target] = Sums([target], False, runner.device)
        crosses[target] = square_zeros(target.groups, target.inner, runner.device)
        originals[target] = Shifted(target.groups, target.inner, runner.device)

    def read(batch: Any, left: int) -> list[Tensor]:
        found: list[Tensor] = []
        masks = runner.mask(batch)

        def note(target: Target, module: nn.Module, x: Tensor) -> None:
            nonlocal left
            rows = x if isinstance(module, nn.Conv2d) else counted(x, masks, module)
            found.extend(input_rows(module, rows, target.groups))
            left -= 1
            if left == 0:
                raise _Stop

        if left:
            with watched(several[:1], note), suppress(_Stop):
                runner.output(batch)
        return found

    unpaired = torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        for number, batch in enumerate(runner.over(runner.batches, description)):
            before = read(batch, moments[several[0]].calls[number])
            with compressed():
                after = read(batch, len(before))
            if [x.shape for x in before] != [z.shape for z in after]:
                unpaired += 1
                break
            for x, z in zip(before, after, strict=True):
                for target in several:
                    start = starts[target]
                    end = starts[target] = start + x.shape[1]
                    roots = moments[target].roots
                    roots = None if roots is None else roots[:, start:end]
                    weighted = sums[target].inputs.add(z, roots)
                    add_squares(sums[target].A, weighted)
                    add_products(crosses[target], originals[target].add(x, roots), weighted)
    runner.sum_([unpaired])
    if unpaired:
        return None
    drift = {}
    for target in several:
        own, cross = sums[target], crosses[target]
        own.finish_()
        originals[target].restore_(cross, own.inputs)
        mean, weight = own.inputs.whole(), own.inputs.weight
        runner.sum_([own.A, cross, mean, weight])
        weight = torch.where(weight > 0, weight, 1.0)
        positions = moments[target].positions
        drift[target] = Moments(own.A / weight[..., None], mean / weight, None, positions, cross / weight[..., None])
    return drift
