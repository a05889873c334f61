"""Metrics over all ranks: means weighted by samples, sums and maxima."""

__all__ = ["DistributedMetricsCollector"]

import math
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from panther.distributed.comm._diagnostics import watched
from panther.distributed.comm._ranks import name_ranks, transport
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.errors import DistributedError

_REDUCTIONS = ("mean", "sum", "max")


@dataclass
class _Metric:
    reduce: str
    total: float = 0.0
    weight: float = 0.0
    largest: float = -math.inf


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
        metric = self.metrics.setdefault(name, _Metric(reduce))
        if metric.reduce != reduce:
            raise ValueError(f"metric {name!r} has reduce={metric.reduce!r} and now {reduce!r}: use two names")
        value = float(value)
        factor = weight if reduce == "mean" else 1.0
        if factor:  # a rank without samples may have NaN for a mean, and nothing to add
            metric.total += value * factor
            metric.weight += factor
        metric.largest = value if value > metric.largest or math.isnan(value) else metric.largest  # NaN stays

    def compute_global_metrics(self) -> dict[str, float]:
        """Return every metric over all ranks, on every rank; all must call it. A mean without weight is NaN.

        Raises:
            DistributedError: On every rank, if the ranks have other metrics, which are named; if a rank is gone or
                late.

        Cost: two all-reduces, of 16 bytes, and of 2 float64 numbers a metric and one a rank for a maximum.
        """
        self._check_names()
        device = transport(None)
        flat = []
        for metric in self.metrics.values():
            if metric.reduce == "max":  # a place for each rank, so that one sum serves all metrics
                flat += [metric.largest if rank == self.rank else 0.0 for rank in range(self.world_size)]
            else:
                flat += [metric.total, metric.weight]
        # float64 counts samples exactly up to 2**53
        sums = torch.tensor(flat, dtype=torch.float64, device=device)
        if self.world_size > 1 and flat:
            with watched("compute_global_metrics"):
                dist.all_reduce(sums)
        numbers = iter(sums.tolist())
        result = {}
        for name, metric in self.metrics.items():
            if metric.reduce == "max":
                found = [next(numbers) for _ in range(self.world_size)]
                result[name] = math.nan if any(map(math.isnan, found)) else max(found)
            else:
                total, weight = next(numbers), next(numbers)
                mean = total / weight if weight else math.nan
                result[name] = total if metric.reduce == "sum" else mean
        return result

    def print_metrics(self) -> dict[str, float]:
        """Reduce and return the metrics, all ranks taking part, and print them on rank 0."""
        result = self.compute_global_metrics()
        if self.rank == 0:
            for name, value in result.items():
                print(f"{name}: {value:.6g}")
        return result

    def reset(self) -> None:
        """Remove all values."""
        self.metrics.clear()

    def _check_names(self) -> None:
        if self.world_size == 1:
            return
        described = [f"{name} ({metric.reduce})" for name, metric in self.metrics.items()]
        # The maxima of c and -c are opposite exactly if all ranks have the same c: one message in place of a gather.
        code = zlib.crc32("\n".join(described).encode())
        both = torch.tensor([code, -code], dtype=torch.int64, device=transport(None))
        with watched("compute_global_metrics"):
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            if both[0] == -both[1]:
                return
            every: list[list[str]] = [[] for _ in range(self.world_size)]
            dist.all_gather_object(every, described)
        by_names: dict[str, list[int]] = {}
        for rank, names in enumerate(every):
            by_names.setdefault(", ".join(names) or "none", []).append(rank)
        found = "; ".join(f"{names} on {name_ranks(ranks)}" for names, ranks in by_names.items())
        raise DistributedError(
            f"metrics must be the same on every rank, in the same order, and are {found}: update each one everywhere, "
            "with weight=0 where there is nothing to add"
        )
