"""The fit of the stacked weight of experts, a few experts at a time.

The factors and products of all experts of a large model would take tens of gigabytes: of a weight of Mixtral-8x7B, one
copy in float64 takes 7.5 GB.
"""

__all__ = ["fit_stack", "num_joint_experts", "stack_sensitivity"]

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import TargetFit
from panther.compression.forms.metric import RIDGE, Fit, factor, metric_of, wide_dtype
from panther.compression.forms.rounding import (
    JOINT_ENTRIES,
    QuantizedFit,
    RoundingTask,
    fit_quantized,
    join_weights,
    sensitivity,
)
from panther.compression.forms.tables import fit_table, table_sensitivity
from panther.compression.moments import Moments, TableMoments
from panther.compression.moments.tables import Use


def fit_stack(
    target: Target,
    moments: Moments | None,
    widths: Sequence[int],
    group_size: int | None,
    *,
    symmetric: bool = False,
    ridge: float = RIDGE,
) -> TargetFit:
    """Round the weight of each expert to each of the widths, in bits, in its own moments.

    Where moments are diagonals (``target.is_large``), the rows of a weight are rounded independently, as in a table.
    """
    fits = []
    for part, part_moments in _parts(target, moments, len(widths)):
        if isinstance(part_moments, TableMoments):
            fits.append(fit_table(part, part_moments, widths, group_size, symmetric=symmetric))
            continue
        metric, dtype = metric_of(part, part_moments, ridge=ridge), wide_dtype(target)
        components = factor(metric.source, metric, most=0, seed=0, dtype=dtype)
        part_codes: Mapping[int, QuantizedFit] = {}
        if widths:
            (part_codes,) = fit_quantized([RoundingTask(metric, widths, 0, 0, dtype)], group_size, symmetric=symmetric)
        fits.append(TargetFit(components, part_codes))
    codes = {
        bits: QuantizedFit(
            join_weights([fit.codes[bits].weight for fit in fits]), _joined([fit.codes[bits].residual for fit in fits])
        )
        for bits in widths
    }
    return TargetFit(_joined([fit.components for fit in fits]), codes)


def stack_sensitivity(target: Target, moments: Moments | None, ridge: float = RIDGE) -> float:
    """Return the loss of the quantized weights, up to a factor that depends on their width alone."""
    return sum(
        table_sensitivity(part, part_moments)
        if isinstance(part_moments, TableMoments)
        else sensitivity(metric_of(part, part_moments, ridge=ridge))
        for part, part_moments in _parts(target, moments, 1)
    )


def num_joint_experts(target: Target, num_widths: int) -> int:
    """Return how many experts are fitted at once: as many as are rounded jointly, and one where rows are."""
    count = JOINT_ENTRIES // (max(num_widths, 1) * target.inner * target.outer)
    return 1 if target.is_large else min(max(count, 1), target.groups)


def _parts(
    target: Target, moments: Moments | None, num_widths: int
) -> Iterator[tuple[Target, Moments | TableMoments | None]]:
    """Yield a target of a few experts, and their moments, until all experts have been yielded."""
    count = num_joint_experts(target, num_widths)
    for start in range(0, target.groups, count):
        part = target.experts(start, start + count)
        if moments is None:
            yield part, None
            continue
        experts = slice(start, start + part.groups)
        A, G = (_of_experts(x, experts) for x in (moments.A, moments.G))
        assert A is not None
        if G is not None and moments.shares is not None:
            G = G * moments.shares[experts].view(-1, *[1] * (G.dim() - 1))
        if target.is_large:
            rows = None if G is None else G[0]
            yield part, TableMoments((Use(1.0, rows, A[0], None, A[0]),), 1.0)
        else:
            yield part, Moments(A, moments.mean[experts], G, moments.positions)


def _of_experts(moments: Tensor | None, experts: slice) -> Tensor | None:
    """Return the moments of some experts; all experts may share one matrix."""
    if moments is None or moments.dim() == 2 or len(moments) > 1:
        return None if moments is None else moments[experts]
    return moments.expand(experts.stop - experts.start, -1, -1)


def _joined(fits: Sequence[Fit]) -> Fit:
    """Return the fit of all experts, whose losses are sums over the experts."""
    if len(fits) == 1:
        return fits[0]

    def total(losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).sum(0)

    return Fit(
        torch.cat([fit.left for fit in fits]),
        torch.cat([fit.right for fit in fits]),
        total([fit.tails for fit in fits]),
        total([fit.local_tails for fit in fits]),
        total([fit.rounding for fit in fits]),
        None,  # the layers that stand for stacked weights have no bias
    )
