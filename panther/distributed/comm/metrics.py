"""Metrics over all ranks: means weighted by samples, sums and maxima."""

__all__ = ["DistributedMetricsCollector"]

import math
from dataclasses import dataclass

import torch

from panther.distributed.comm._agreement import agree, gather_objects
from panther.distributed.comm._diagnostics import watched
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.errors import DistributedError

_REDUCTIONS = ("mean", "sum", "max")


@dataclass
class _Metric:
    reduce: str
    value: float
    """The weighted total, or the maximum."""
    weight: float = 0.0


class DistributedMetricsCollector:
    """Collect metrics on every rank, and reduce them over all of them.

    A mean is weighted by ``weight``, for example the number of samples of a batch, so it is the mean over all samples
    whatever the ranks' batches were.

    Args:
        rank: This process.
        world_size: Number of processes.

    Attributes:
        metrics: The values that this rank collected, by name.

    Raises:
        DistributedError: If these are not the rank and world size of the process group.

    Example:
        >>> collector = DistributedMetricsCollector(0, 1)
        >>> collector.update_metric("loss", 1.0, weight=3)
        >>> collector.update_metric("loss", 5.0)
        >>> collector.update_metric("samples", 4, reduce="sum")
        >>> collector.compute_global_metrics()
        {'loss': 2.0, 'samples': 4.0}
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if (rank, world_size) != (get_rank(), get_world_size()):
            raise DistributedError(
                f"rank={rank} and world_size={world_size} must be those of the process group, {get_rank()} and "
                f"{get_world_size()}: pass get_rank() and get_world_size()"
            )
        self.rank, self.world_size = rank, world_size
        self.metrics: dict[str, _Metric] = {}

    def update_metric(self, name: str, value: float | torch.Tensor, weight: float = 1, *, reduce: str = "mean") -> None:
        """Add a value; nothing is sent.

        Args:
            name: Name of the metric.
            value: A number, or a tensor of one.
            weight: Weight of the value in a mean, for example its samples; the other reductions do not use it.
            reduce: ``"mean"``, ``"sum"`` or ``"max"``, always the same for one name.

        Raises:
            ValueError: If ``reduce`` is unknown or differs from before, or ``weight`` is negative.
        """
        if reduce not in _REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} is unknown: use one of {', '.join(map(repr, _REDUCTIONS))}")
        if not weight >= 0:
            raise ValueError(f"weight={weight} must be at least 0")
        metric = self.metrics.setdefault(name, _Metric(reduce, -math.inf if reduce == "max" else 0.0))
        if metric.reduce != reduce:
            raise ValueError(f"metric {name!r} has reduce={metric.reduce!r} and now {reduce!r}: use two names")
        value = float(value)
        if reduce == "max":
            metric.value = value if value > metric.value or math.isnan(value) else metric.value  # NaN stays
        elif weight or reduce == "sum":  # a rank without samples may have NaN for a mean, and nothing to add
            metric.value += value * weight if reduce == "mean" else value
            metric.weight += weight

    def compute_global_metrics(self) -> dict[str, float]:
        """Return every metric over all ranks, on every rank; all must call it. A mean without weight is NaN.

        Raises:
            DistributedError: On every rank, if the ranks have other metrics, which are named; if a rank is gone or
                late.

        Cost: gathers of 16 bytes, and of the pickled totals and weights, from every rank.
        """
        if self.world_size > 1:
            agree(
                "compute_global_metrics",
                lambda: {f"metric {name!r}": metric.reduce for name, metric in self.metrics.items()},
                None,
                "update each one everywhere and in the same order, with weight=0 where there is nothing to add",
                "metrics",
            )
        with watched("compute_global_metrics"):
            every = gather_objects(self.metrics, None)
        result = {}
        for name, metric in self.metrics.items():
            values = [metrics[name].value for metrics in every]
            if metric.reduce == "max":
                result[name] = math.nan if any(map(math.isnan, values)) else max(values)
            elif metric.reduce == "sum":
                result[name] = sum(values)
            else:
                weight = sum(metrics[name].weight for metrics in every)
                result[name] = sum(values) / weight if weight else math.nan
        return result

    def print_metrics(self) -> dict[str, float]:
        """Reduce and return the metrics, all ranks taking part, and print them on rank 0."""
        result = self.compute_global_metrics()
        if self.rank == 0:
            print("\nGlobal Metrics:")
            for name, value in result.items():
                print(f"  {name}: {value:.6f}")
        return result

    def reset(self) -> None:
        """Remove all values."""
        self.metrics.clear()
