"""Time matrix products, memory and collectives on the devices of a process group, all ranks at the same time."""

__all__ = ["measured_fields"]

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from panther.distributed.advisor.cost.rank import optimizer_bytes
from panther.distributed.comm.bandwidth import median_seconds, profile_communication_overhead
from panther.distributed.comm.collectives import all_gather, all_reduce
from panther.distributed.comm.mesh import physical_memory
from panther.distributed.comm.ranks import in_process_group, new_subgroup, transport

_SMALL, _LARGE = 2**12, 2**24  # bytes of the messages that measure latency and bandwidth
# Rounds of each collective over n ranks, in multiples of n - 1; None is a single round.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": None}
# Bytes of typical tensors that tensor parallelism reduces (on a CPU) and gathers.
_ACTIVATIONS, _OUTPUTS = 2**21, 2**25
_BLOCKS = 16  # blocks of the model that measures the time of an operation
_WIDTHS = (4, 8, 16, 32, 64)  # smallest sizes of narrow products


def measured_fields(repetitions: int) -> dict[str, Any]:
    """Return the fields of a ClusterSpec that can be measured. Every rank of the default group must call it.

    Each figure is measured on the slowest rank, because the other ranks wait for it.
    """
    group = in_process_group()
    if group:
        device = transport(None)
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    world = dist.get_world_size() if group else 1
    # LOCAL_WORLD_SIZE is set by torchrun and panther launch; without it, all ranks are on one node.
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    timer = _Timer(device, repetitions)
    fields: dict[str, Any] = {
        "gpus": world,
        "gpus_per_node": local,
        "memory_bytes": _memory(device, local),
        **_bandwidths(timer),
        "optimizer_bandwidth": _optimizer_bandwidth(timer),
        # The host of a GPU queues operations while the GPU runs earlier ones, so that the longer time counts.
        "host_seconds" if device.type == "cuda" else "operation_seconds": _operation_seconds(timer),
        "peak_flops": _flops(timer, torch.bfloat16),
        "peak_flops_fp32": _flops(timer, torch.float32),
        "narrow_products": _narrow_products(timer),
        "efficiency": 1.0,  # measured flops need no correction
        "measured_gpus": world,
    }
    if world > 1:
        fields |= _links(local, world, timer)
        fields["overlap"] = _overlap(timer)
    return fields


@dataclass(frozen=True)
class _Timer:
    device: torch.device
    repetitions: int

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the median time of the slowest rank, in seconds, while all ranks work."""
        return median_seconds(work, self.repetitions, self.device)


def _memory(device: torch.device, local: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return physical_memory() / local


def _flops(timer: _Timer, dtype: torch.dtype) -> float:
    n = 4096 if timer.device.type == "cuda" else 512
    return _flops_of(timer, n, n, n, dtype)


def _narrow_products(timer: _Timer) -> tuple[tuple[int, float], ...]:
    """Return the slowdown of products of narrow matrices relative to wide ones with the same number of flops."""
    n = 4096 if timer.device.type == "cuda" else 512
    # Twice as many rows as features, because a batch usually has more tokens than a layer has features.
    speeds = {width: _flops_of(timer, 2 * n, n, width, torch.float32) for width in (*_WIDTHS, n)}
    return tuple((width, speeds[n] / speeds[width]) for width in _WIDTHS)


def _flops_of(timer: _Timer, rows: int, inner: int, width: int, dtype: torch.dtype) -> float:
    x, w = (torch.ones(sizes, dtype=dtype, device=timer.device) for sizes in ((rows, inner), (inner, width)))
    y = x @ w

    def work() -> None:  # the three products of a linear layer, with results that are allocated
        x @ w
        y @ w.t()
        x.t() @ y

    return 3 * 2 * rows * inner * width / timer(work)


def _bandwidths(timer: _Timer) -> dict[str, float]:
    """Return the bytes per second of additions, and of the other operations of a transformer except for products."""
    # Results are allocated, as in a model.
    x = torch.ones(2**16 if timer.device.type == "cuda" else 2**10, 2**10, device=timer.device)

    def mixed() -> None:
        y = F.gelu(x + x)
        y = F.layer_norm(y + x, y.shape[1:])
        F.softmax(y + x, -1)

    return {
        "memory_bandwidth": 3 * x.nbytes / timer(lambda: x + x),
        "operation_bandwidth": 15 * x.nbytes / timer(mixed),
    }


def _optimizer_bandwidth(timer: _Timer) -> float:
    size = 2**24 if timer.device.type == "cuda" else 2**18
    layers = [torch.zeros(size, device=timer.device, requires_grad=True) for _ in range(16)]
    for layer in layers:
        layer.grad = torch.ones_like(layer)
    adam = torch.optim.Adam(layers)
    return optimizer_bytes(16 * layers[0].nbytes, 2) / timer(adam.step)


def _operation_seconds(timer: _Timer) -> float:
    """Return the time of an operation of small modules, including the overhead of module calls and autograd."""
    blocks = [(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(_BLOCKS)]
    model = nn.Sequential(*(module for block in blocks for module in block)).to(timer.device)
    x = torch.ones(8, 8, device=timer.device)

    def work() -> None:
        model.zero_grad()
        model(x).sum().backward()

    # A block has 8 operations: forward and backward of each module, a second product in the backward pass of the linear
    # layer, and the sum for its bias.
    return timer(work) / (8 * _BLOCKS)


def _links(local: int, world: int, timer: _Timer) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    speeds = []
    for link, size in (("intra", local), ("inter", world)):
        if size == 1 or (link == "inter" and size == local):
            continue
        # A group for the ranks of each node; all nodes are measured at the same time.
        group = new_subgroup(size) if size < world else None
        try:
            fitted = {**_profiled(group, timer.repetitions), **_tensor_parallel(group, timer)}
        finally:
            if group is not None:
                dist.destroy_process_group(group)
        fields[f"{link}_latency"], fields[f"{link}_bandwidth"] = fitted["all_reduce"]
        speeds += [(f"{link} {name}", *fit) for name, fit in fitted.items()]
    return {**fields, "collectives": tuple(speeds)}


def _profiled(group: Any, repetitions: int) -> dict[str, tuple[float, float]]:
    """Return latency and bandwidth of collectives in preallocated buffers, as data parallelism uses them."""
    profile = profile_communication_overhead((_SMALL, _LARGE), repetitions=repetitions, group=group, show=False)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, profile)
    # The figures of the slowest node are used for the entire cluster.
    slowest = max(gathered, key=lambda each: sum(timing.time_ms for timing in each.timings))
    times: dict[str, dict[int, float]] = {}
    for timing in slowest.timings:
        times.setdefault(timing.operation, {})[timing.message_bytes] = timing.time_ms / 1e3
    return {name: _fit(name, times[name], slowest.world_size) for name in _ROUNDS}


def _tensor_parallel(group: Any, timer: _Timer) -> dict[str, tuple[float, float]]:
    """Return latency and bandwidth of the collectives of sharded layers, which allocate their results."""
    n = dist.get_world_size(group)
    speeds = {}
    summed = _OUTPUTS if timer.device.type == "cuda" else _ACTIVATIONS
    collectives: tuple[tuple[str, Callable[..., Tensor], int, int], ...] = (
        ("all_reduce", all_reduce, 1, summed),
        ("all_gather", all_gather, n, _OUTPUTS),  # each rank contributes one n-th of the result
    )
    for operation, run, ranks, large in collectives:
        times = {}
        for size in (_SMALL, large):
            x = torch.zeros(-(-size // (4 * ranks)), device=timer.device)
            times[x.nbytes * ranks] = timer(partial(run, x, group=group))
        speeds[f"tp {operation}"] = _fit(operation, times, n)
    return speeds


def _fit(operation: str, times: dict[int, float], n: int) -> tuple[float, float]:
    """Return latency and bandwidth, given the seconds of a small and a large message by their bytes."""
    small, large = sorted(times)
    rounds = _ROUNDS[operation]
    latency = times[small] / (1 if rounds is None else rounds * (n - 1))
    factor = 1 if rounds is None else rounds * (n - 1) / n
    seconds = max(times[large] - times[small], times[large] / 10)
    return latency, factor * (large - small) / seconds


def _overlap(timer: _Timer) -> float:
    """Return the share of the shorter one of computing and sending that is hidden behind the longer one."""
    n = 2048 if timer.device.type == "cuda" else 384
    a, message = torch.ones(n, n, device=timer.device), torch.zeros(2**20, device=timer.device)

    def compute() -> None:
        for _ in range(8):
            torch.mm(a, a)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    computing, sending, overlapped = timer(compute), timer(lambda: dist.all_reduce(message)), timer(both)
    return min(max((computing + sending - overlapped) / min(computing, sending), 0.0), 1.0)
