r"""How fast the ranks talk to one another: time and bandwidth of each operation over sizes of messages.

With S the bytes of the whole message, n ranks and t seconds, the *algorithm bandwidth* is S / t, which falls with n for
reasons that no hardware can help. The *bus bandwidth* takes these out: it is the algorithm bandwidth times the share of
S that must pass every rank's link whatever the algorithm, and can be compared with the link's own.

=================  =====================================  ==============
operation          S                                      bus factor
=================  =====================================  ==============
all_reduce         the tensor                             2 (n - 1) / n
all_gather         the gathered tensor                    (n - 1) / n
reduce_scatter     the tensor before it is scattered      (n - 1) / n
broadcast          the tensor                             1
point_to_point     the tensor, from rank 0 to the last    1
=================  =====================================  ==============

The factors are those of NCCL's performance tests (NVIDIA, nccl-tests, doc/PERFORMANCE.md).
"""

__all__ = ["CommunicationProfile", "profile_communication_overhead"]

import csv
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from panther.errors import DistributedError, check_size, require_extra

_SIZES = (2**10, 2**14, 2**18, 2**22)
_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """One operation at one size."""

    operation: str
    message_bytes: int
    time_ms: float
    """Median over the repetitions of the slowest rank's time."""
    algorithm_bandwidth_gb_s: float
    bus_bandwidth_gb_s: float


@dataclass(frozen=True)
class CommunicationProfile:
    """What :func:`profile_communication_overhead` measured, the same on every rank; ``print`` shows a table."""

    world_size: int
    backend: str
    timings: tuple[Timing, ...]

    def __str__(self) -> str:
        """The table."""
        lines = [f"{self.world_size} ranks, {self.backend}"]
        lines.append(f"{'operation':16}{'bytes':>12}{'ms':>12}{'algorithm GB/s':>16}{'bus GB/s':>12}")
        lines += [
            f"{row.operation:16}{row.message_bytes:>12,}{row.time_ms:>12.3f}{row.algorithm_bandwidth_gb_s:>16.3f}"
            f"{row.bus_bandwidth_gb_s:>12.3f}"
            for row in self.timings
        ]
        return "\n".join(lines)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a row for each timing; on one rank only."""
        path = Path(path)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Timing)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.timings)
        return path

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw bus bandwidth against size, to a file of the format that its suffix names; on one rank only.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        figure = require_extra("matplotlib.figure", "demo").Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        for operation in dict.fromkeys(row.operation for row in self.timings):
            found = [(row.message_bytes, row.bus_bandwidth_gb_s) for row in self.timings if row.operation == operation]
            axis.plot(*zip(*found, strict=True), "o-", label=operation, markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        axis.set_title(f"{self.world_size} ranks, {self.backend}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        path = Path(path)
        figure.savefig(path)
        return path


def profile_communication_overhead(
    message_sizes: Sequence[int] = _SIZES,
    *,
    operations: Sequence[str] | None = None,
    repetitions: int = 10,
    group: dist.ProcessGroup | None = None,
) -> CommunicationProfile:
    """Time collective and point-to-point operations over sizes. Every rank of the group must call it.

    Args:
        message_sizes: Bytes, rounded up to multiples of four times the number of ranks.
        operations: Of ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"`` and
            ``"point_to_point"``; None is all. The last needs two ranks.
        repetitions: Of each, after two that do not count.
        group: Process group; None is the world.

    Returns:
        Times and bandwidths; see the module for the formulas.

    Raises:
        ValueError: If an operation is unknown.
        ShapeError: If a size or ``repetitions`` is not positive.
        DistributedError: If there is no process group, or this rank is not in it.

    Cost: ``2 + repetitions`` times what is measured.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> profile = profile_communication_overhead([1024], operations=["all_reduce"])
        >>> profile.timings[0].message_bytes
        1024
        >>> pr.distributed.shutdown()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")
    n, backend = dist.get_world_size(group), dist.get_backend(group)
    check_size("repetitions", repetitions, least=1)
    chosen = tuple(_OPERATIONS) if operations is None else tuple(operations)
    for name in chosen:
        if name not in _OPERATIONS:
            raise ValueError(f"operation {name!r} is unknown: use some of {', '.join(map(repr, _OPERATIONS))}")
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    timings = []
    for name in chosen:
        prepare, factor = _OPERATIONS[name]
        if name == "point_to_point" and n < 2:
            continue
        for size in message_sizes:
            size = -(-check_size("message_sizes", size, least=1) // (4 * n)) * 4 * n
            run = prepare(torch.zeros(size // 4, device=device), n, group)
            seconds = _time(run, repetitions, device, group)
            bandwidth = size / seconds / 1e9
            timings.append(Timing(name, size, seconds * 1e3, bandwidth, bandwidth * factor(n)))
    return CommunicationProfile(n, backend, tuple(timings))


def _time(run: Callable[[], object], repetitions: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Median over repetitions of the longest time of any rank, the same number on every rank."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(_WARM_UP + repetitions):
        finish()
        dist.barrier(group=group)
        begin = time.perf_counter()
        run()
        finish()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times[_WARM_UP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return max(statistics.median(slowest.tolist()), 1e-9)


Prepare = Callable[[Tensor, int, dist.ProcessGroup | None], Callable[[], object]]


def _all_reduce(x: Tensor, n: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    return lambda: dist.all_reduce(x, group=group)


def _all_gather(x: Tensor, n: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    parts = list(x.chunk(n))
    own = parts[0].clone()
    return lambda: dist.all_gather(parts, own, group=group)


def _reduce_scatter(x: Tensor, n: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    parts = list(x.chunk(n))
    own = parts[0].clone()
    return lambda: dist.reduce_scatter(own, parts, group=group)


def _broadcast(x: Tensor, n: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    source = dist.get_global_rank(group, 0) if group is not None else 0
    return lambda: dist.broadcast(x, source, group=group)


def _point_to_point(x: Tensor, n: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    rank = dist.get_rank(group)
    first, last = (dist.get_global_rank(group, r) if group is not None else r for r in (0, n - 1))

    def run() -> None:
        if rank == 0:
            dist.send(x, last, group=group)
        elif rank == n - 1:
            dist.recv(x, first, group=group)

    return run


_OPERATIONS: dict[str, tuple[Prepare, Callable[[int], float]]] = {
    "all_reduce": (_all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": (_all_gather, lambda n: (n - 1) / n),
    "reduce_scatter": (_reduce_scatter, lambda n: (n - 1) / n),
    "broadcast": (_broadcast, lambda n: 1.0),
    "point_to_point": (_point_to_point, lambda n: 1.0),
}
