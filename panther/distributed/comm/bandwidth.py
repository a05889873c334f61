r"""Time and bandwidth of collective operations between ranks, over sizes of messages, and utilization of devices.

With S the bytes of the whole message, n ranks and t seconds, the *algorithm bandwidth* is S / t, which falls with n for
reasons that no hardware can change. The *bus bandwidth* removes this effect: it is the algorithm bandwidth times the
share of S that must pass every rank's link with any algorithm, so it can be compared with the bandwidth of the link.

=================  =====================================  ==============
operation          S                                      bus factor
=================  =====================================  ==============
all_reduce         the tensor                             2 (n - 1) / n
all_gather         the gathered tensor                    (n - 1) / n
reduce_scatter     the tensor before it is scattered      (n - 1) / n
broadcast          the tensor                             1
=================  =====================================  ==============

The factors are the factors of NCCL's performance tests (NVIDIA, nccl-tests, doc/PERFORMANCE.md).
"""

__all__ = ["CommunicationProfile", "DeviceUtilization", "profile_communication_overhead"]

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from panther._text import counted, format_table
from panther.distributed.comm.mesh import get_distributed_info
from panther.distributed.comm.ranks import Group, in_process_group, require_process_group, transport
from panther.errors import DistributedError, MissingExtraError, check_device, check_size, install_command

_SIZES = (2**10, 2**14, 2**18, 2**22)
_NO_GROUP = "There is no process group, so there is no communication to profile: call panther.distributed.init() first."
_WARM_UP = 2  # the first calls also open connections


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
    """Times and bandwidths, the same on every rank; ``print`` shows a table."""

    world_size: int
    """Number of ranks of the group."""
    backend: str
    """Backend of the group, such as ``"gloo"``."""
    timings: tuple[Timing, ...]
    """A row for each operation and message size."""

    def __str__(self) -> str:
        """Return the table."""
        rows = [["operation", "bytes", "ms", "algorithm GB/s", "bus GB/s"]]
        rows += [
            [
                row.operation, f"{row.message_bytes:,}", f"{row.time_ms:.3f}", f"{row.algorithm_bandwidth_gb_s:.3f}",
                f"{row.bus_bandwidth_gb_s:.3f}",
            ]
            for row in self.timings
        ]  # fmt: skip
        return f"{counted(self.world_size, 'rank')}, {self.backend}\n{format_table(rows, align='<>')}"


def profile_communication_overhead(
    message_sizes: Sequence[int] = _SIZES, *, repetitions: int = 10, group: Group = None, show: bool = True
) -> CommunicationProfile:
    """Time collective operations over sizes, and print a table on rank 0. Every rank of the group must call it.

    Without a process group, it prints that no communication can be profiled, and returns a profile without timings.

    Args:
        message_sizes: Sizes in bytes, rounded up to multiples of four times the number of ranks.
        repetitions: Timed repetitions of each operation and size, after two repetitions that are not timed.
        group: Process group; None means all ranks.
        show: Whether the first rank of the group prints.

    Returns:
        Times and bandwidths, by the formulas of this module.

    Raises:
        TypeError: If ``message_sizes`` is not a list of sizes.
        ShapeError: If a size or ``repetitions`` is not positive.
        DistributedError: If this rank is not in the group.

    Cost: ``2 + repetitions`` runs of each operation and size.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> profile = profile_communication_overhead([1024], show=False)
        >>> profile.timings[0].message_bytes
        1024
        >>> pr.distributed.shutdown()
        >>> _ = profile_communication_overhead()
        There is no process group, so there is no communication to profile: call panther.distributed.init() first.
    """
    if not in_process_group():
        if show:
            print(_NO_GROUP)
        return CommunicationProfile(1, "no backend", ())
    require_process_group(group)
    if isinstance(message_sizes, int | str) or not message_sizes:
        raise TypeError(f"message_sizes={message_sizes!r} must be a list of sizes in bytes, such as [1024]")
    n, backend = dist.get_world_size(group), dist.get_backend(group)
    check_size("repetitions", repetitions, least=1)
    device = transport(group)
    timings = []
    for size in message_sizes:
        size = -(-check_size("message_sizes", size, least=1) // (4 * n)) * 4 * n
        for name, (run, bus_factor) in _operations(torch.zeros(size // 4, device=device), group).items():
            seconds = median_seconds(run, repetitions, device, group)
            bandwidth = size / seconds / 1e9
            timings.append(Timing(name, size, seconds * 1e3, bandwidth, bandwidth * bus_factor))
    timings.sort(key=lambda timing: timing.operation)
    profile = CommunicationProfile(n, backend, tuple(timings))
    if show and dist.get_rank(group) == 0:
        print(f"Communication Profiling Results:\n{profile}")
    return profile


def median_seconds(run: Callable[[], object], repetitions: int, device: torch.device, group: Group = None) -> float:
    """Return the median over repetitions of the slowest rank's time, the same number on every rank."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(_WARM_UP + repetitions):
        finish()
        if in_process_group():
            dist.barrier(group=group)  # so that no time includes waiting for a late rank
        begin = time.perf_counter()
        run()
        finish()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times[_WARM_UP:], dtype=torch.float64, device=device)
    if in_process_group():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return max(statistics.median(slowest.tolist()), 1e-9)


def _operations(x: Tensor, group: Group) -> dict[str, tuple[Callable[[], object], float]]:
    """Return each operation on a message, and its bus factor; buffers are allocated here, before the clock starts."""
    n = dist.get_world_size(group)
    shards = list(x.chunk(n))
    shard = shards[0].clone()
    share = (n - 1) / n
    return {
        "all_reduce": (lambda: dist.all_reduce(x, group=group), 2 * share),
        "all_gather": (lambda: dist.all_gather(shards, shard, group=group), share),
        "reduce_scatter": (lambda: dist.reduce_scatter(shard, shards, group=group), share),
        "broadcast": (lambda: dist.broadcast(x, group=group, group_src=0), 1.0),
    }


class DeviceUtilization:
    """Measure the share of the time in which the device of this rank computes, inside a ``with`` block.

    For a GPU, it is the share of the time in which a kernel runs, which the driver reports for the last second at most.
    For the CPU, it is the processor time of this process divided by the elapsed time and the number of torch's threads.
    A rank that waits for other ranks, for data or for the network has a smaller share.

    Args:
        device: The device; None is that of this rank.

    Attributes:
        value: The share, from 0 to 1, once the block has ended.

    Raises:
        MissingExtraError: If the device is a GPU, and torch lacks nvidia-ml-py, by which it asks the driver.
        DistributedError: If the driver does not report it, as for a part of a GPU.

    Example:
        >>> with DeviceUtilization() as utilization:
        ...     _ = torch.ones(500, 500) @ torch.ones(500, 500)
        >>> 0 <= utilization.value <= 1
        True
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        check_device(device)
        self.device = None if device is None else torch.device(device)
        self.value = math.nan

    def __enter__(self) -> Self:
        self._device = self.device or get_distributed_info().device
        if self._device.type == "cuda":
            self._sample()  # so that an error reaches the caller before the block
        self._clocks = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.value = self.restart()

    def restart(self) -> float:
        """Return the share since the block began, or since the last call, and begin a new measurement."""
        if self._device.type == "cuda":
            return self._sample()
        previous, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        elapsed, computed = (now - then for now, then in zip(self._clocks, previous, strict=True))
        return min(computed / max(elapsed * torch.get_num_threads(), 1e-9), 1.0)

    def _sample(self) -> float:
        try:
            return torch.cuda.utilization(self._device) / 100
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "nvidia-ml-py, which reads the utilization of a GPU, is not installed: run " + install_command("gpu")
            ) from error
        except Exception as error:  # the driver fails, with classes of nvidia-ml-py
            raise DistributedError(f"the driver does not report the utilization of {self._device}: {error}") from error
