"""The guide's metrics over all ranks, and its choice of parallelism from the number of parameters."""

__all__ = ["DistributedMetricsCollector", "choose_parallelism_strategy"]

import math
from collections.abc import Iterable
from numbers import Real

import torch

from panther.distributed.comm.agreement import agree, gather_objects
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.errors import DistributedError

_REDUCTIONS = ("mean", "each")


class _Metric(list[float]):
    """The values of one metric on this rank, with their weights; a value that a caller appends has weight 1."""

    def __init__(self, reduce: str = "mean", values: Iterable[float] = ()) -> None:
        super().__init__(values)
        self.reduce = reduce
        self._weights: list[float] = []

    @property
    def weights(self) -> list[float]:
        num_appended = len(self) - len(self._weights)
        self._weights = self._weights[: len(self)] + [1.0] * num_appended
        return self._weights

    def add(self, value: float, weight: float) -> None:
        weights = self.weights
        self.append(value)
        weights.append(weight)

    def total(self) -> tuple[float, float]:
        """Return the weighted sum of the values, and the sum of their weights."""
        # A rank without samples may have a mean of NaN, which must not be added.
        counted = [(value, weight) for value, weight in zip(self, self.weights, strict=True) if weight]
        return sum(value * weight for value, weight in counted), sum(weight for _, weight in counted)


class DistributedMetricsCollector:
    """Collect metrics on every rank, and reduce them over all of them.

    A mean is weighted by ``weight``, for example the number of samples of a batch. So it is the mean over all samples
    for any division into batches. Values are stored until :meth:`reset`.

    Args:
        rank: This process.
        world_size: Number of processes.

    Attributes:
        metrics: The values that this rank collected, a list for each name. Values that are appended to a list have
            weight 1.

    Raises:
        DistributedError: If these are not the rank and world size of the process group.

    Example:
        >>> collector = DistributedMetricsCollector(0, 1)
        >>> collector.update_metric("loss", 1.0, weight=3)
        >>> collector.update_metric("loss", 5.0)
        >>> collector.metrics["loss"]
        [1.0, 5.0]
        >>> collector.compute_global_metrics()
        {'loss': 2.0}
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if (rank, world_size) != (get_rank(), get_world_size()):
            raise DistributedError(
                f"rank={rank!r} and world_size={world_size!r} must be those of the process group, {get_rank()} and "
                f"{get_world_size()}: pass get_rank() and get_world_size()"
            )
        self.rank, self.world_size = rank, world_size
        self.metrics: dict[str, list[float]] = {}

    def update_metric(self, name: str, value: float | torch.Tensor, weight: float = 1, *, reduce: str = "mean") -> None:
        """Add a value; nothing is sent.

        Args:
            name: Name of the metric.
            value: A number, or a tensor of one.
            weight: Weight of the value, for example its samples.
            reduce: ``"mean"`` over all ranks, or ``"each"``, the mean of each rank by itself; always the same for one
                name.

        Raises:
            ValueError: If ``reduce`` is unknown or differs from before, ``weight`` is negative, or a tensor has several
                values.
            TypeError: If the value or the weight is not a number.
        """
        if reduce not in _REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} is unknown: use one of {', '.join(map(repr, _REDUCTIONS))}")
        for quantity, number in (("value", value), ("weight", weight)):
            if isinstance(number, torch.Tensor) and number.numel() != 1:
                raise ValueError(f"the {quantity} of {name!r} has shape {tuple(number.shape)} and must be one number")
            if isinstance(number, str) or not hasattr(number, "__float__"):
                raise TypeError(
                    f"the {quantity} of {name!r} must be a number or a tensor of one, not {type(number).__name__}"
                )
        value, weight = float(value), float(weight)
        if not weight >= 0:
            raise ValueError(f"weight={weight:g} must be at least 0")
        metric = self._metric(name, reduce)
        if metric.reduce != reduce:
            raise ValueError(f"metric {name!r} has reduce={metric.reduce!r} and now {reduce!r}: use two names")
        metric.add(value, weight)

    def _metric(self, name: str, reduce: str = "mean") -> _Metric:
        metric = self.metrics.get(name)
        if not isinstance(metric, _Metric):  # it is missing, or a list of the caller
            metric = self.metrics[name] = _Metric(reduce if metric is None else "mean", metric or ())
        return metric

    def compute_global_metrics(self) -> dict[str, float]:
        """Return every metric over all ranks, on every rank; all ranks must call it. A mean without weight is NaN.

        A metric with ``reduce="each"`` has an entry for each rank, such as ``"utilization, rank 0"``.

        Raises:
            DistributedError: On every rank, if the ranks have different metrics, which the error names; if a rank has
                ended or is late.

        Cost: gathers of 16 bytes, and of the pickled totals and weights, from every rank.
        """
        reductions = {name: self._metric(name).reduce for name in self.metrics}
        if self.world_size > 1:
            agree(
                "compute_global_metrics",
                lambda: {f"metric {name!r}": reduce for name, reduce in reductions.items()},
                None,
                "update each one everywhere and in the same order, with weight=0 where there is nothing to add",
                "metrics",
            )
        with watched("compute_global_metrics"):
            totals_by_rank = gather_objects([self._metric(name).total() for name in reductions], None)
        result = {}
        for (name, reduce), totals in zip(reductions.items(), zip(*totals_by_rank, strict=True), strict=True):
            if reduce == "each":
                for rank, (value, weight) in enumerate(totals):
                    result[f"{name}, rank {rank}"] = value / weight if weight else math.nan
            else:
                total, total_weight = map(sum, zip(*totals, strict=True))
                result[name] = total / total_weight if total_weight else math.nan
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


_BYTES = 4  # bytes of a parameter in float32


def choose_parallelism_strategy(model_size: int, num_gpus: int, memory_per_gpu: float) -> list[str]:
    """Return the list of the kinds of parallelism that rules of thumb suggest; it can be empty.

    The list has ``"data_parallel"`` if the parameters in float32 need less than 70 % of a GPU; ``"model_parallel"`` if
    they need more than one GPU; ``"tensor_parallel"`` with four GPUs or more; and ``"hybrid_parallel"`` with eight or
    more, if the parameters need more than half of a GPU. Gradients, optimizer states and activations are not counted;
    with Adam they are more than three times the parameters. :func:`plan_parallelism` counts them.

    Args:
        model_size: Number of parameters of the model.
        num_gpus: Number of GPUs.
        memory_per_gpu: Memory of a GPU in bytes.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is not positive.

    Example:
        >>> choose_parallelism_strategy(7_000_000_000, 8, 80e9)
        ['data_parallel', 'tensor_parallel']
        >>> choose_parallelism_strategy(70_000_000_000, 16, 80e9)
        ['model_parallel', 'tensor_parallel', 'hybrid_parallel']
    """
    arguments = {"model_size": model_size, "num_gpus": num_gpus, "memory_per_gpu": memory_per_gpu}
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, not {type(value).__name__}")
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive: model_size in parameters, memory_per_gpu in bytes")
    needed = model_size * _BYTES
    rules = {
        "data_parallel": needed < 0.7 * memory_per_gpu,
        "model_parallel": needed > memory_per_gpu,
        "tensor_parallel": num_gpus >= 4,
        "hybrid_parallel": num_gpus >= 8 and needed > 0.5 * memory_per_gpu,
    }
    return [name for name, holds in rules.items() if holds]
