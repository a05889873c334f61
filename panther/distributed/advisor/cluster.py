"""The devices and links of a cluster, with figures from data sheets or measured on all ranks at the same time."""

__all__ = ["ClusterSpec", "optimizer_bytes"]

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from panther.distributed.comm.bandwidth import median_seconds, profile_communication_overhead
from panther.distributed.comm.mesh import physical_memory
from panther.distributed.comm.ranks import in_process_group, new_subgroup, transport
from panther.errors import check_size
from panther.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The devices of a cluster, and the links between them.

    The presets of :meth:`preset` have NVIDIA's published figures: ``"a100-80gb"``, ``"h100-80gb"`` and ``"h200"`` are
    SXM modules, eight per node, without sparsity, with NVLink in one direction and one network card per GPU (InfiniBand
    at 200 Gb/s for the A100 and at 400 Gb/s for the H100 and H200). Data sheets contain neither latencies nor
    ``efficiency``, so that these are assumptions. ``"cpu"`` is a guess for one core of a server, for tests.

    Example:
        >>> cluster = ClusterSpec.preset("h100-80gb", gpus=16)
        >>> cluster.nodes, cluster.speed(8), cluster.speed(16)
        (2, (5e-06, 450000000000.0), (1.5e-05, 50000000000.0))
    """

    gpus: int
    """Number of devices, one per rank."""
    memory_bytes: float
    """Memory of each device."""
    gpus_per_node: int = 8
    """Number of devices per node, which neighbouring ranks share."""
    intra_bandwidth: float = 450e9
    """Bytes per second that a device sends within a node."""
    inter_bandwidth: float = 50e9
    """Bytes per second that a device sends to other nodes."""
    intra_latency: float = 5e-6
    """Latency within a node, in seconds."""
    inter_latency: float = 15e-6
    """Latency between nodes, in seconds."""
    peak_flops: float = 989.4e12
    """Peak flops per second of a device in half precision."""
    peak_flops_fp32: float = 66.9e12
    """Peak flops per second in float32, without TF32, which torch leaves off by default."""
    efficiency: float = 0.4
    """Share of the peak flops that training reaches."""
    overlap: float = 0.7
    """Share of the shorter of computing and data-parallel communication that is hidden behind the other."""
    usable: float = 0.9
    """Share of the memory that a plan may use; the rest is reserved for workspace, the driver and fragmentation."""
    memory_bandwidth: float = 3.35e12
    """Bytes per second that operations on a device read and write."""
    operation_seconds: float = 0.0
    """Time of an operation that does not depend on its size; 0 if devices queue operations faster than they run."""
    host_seconds: float = 0.0
    """Time in which the host of a GPU queues an operation, while the GPU runs earlier ones."""
    optimizer_bandwidth: float | None = None
    """Bytes per second that the optimizer's step reads and writes; None is ``memory_bandwidth``."""
    collectives: tuple[tuple[str, float, float], ...] = ()
    """Latency and bandwidth of single collectives, for links within nodes (``"intra all_gather"``) and between nodes
    (``"inter all_gather"``). A collective without an entry has the latency and bandwidth of the link."""
    measured_gpus: int = 0
    """Number of devices on which :meth:`measure` measured the speeds; 0 if they are from data sheets, so that predicted
    times are good for a ranking only."""

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, least=1)
        check_size("gpus_per_node", self.gpus_per_node, least=1)
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if field.name == "collectives" or (value is None and field.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number, not {type(value).__name__}")
            if not (value >= 0 if field.name.endswith("latency") or field.name in _MAY_BE_0 else value > 0):
                raise ValueError(f"{field.name}={value} must be positive")
            if field.name in ("efficiency", "overlap", "usable") and value > 1:
                raise ValueError(f"{field.name}={value} is a share and must be at most 1")
        for entry in self.collectives:
            is_named = len(entry) == 3 and isinstance(entry[0], str)
            if not (is_named and entry[1] >= 0 and entry[2] > 0):
                raise ValueError(
                    f"collectives has the entry {entry!r}: it must be a name, a latency and a bandwidth above 0"
                )

    @classmethod
    def preset(cls, name: str, gpus: int, **changes: Any) -> Self:
        """Return the figures of a known device.

        Args:
            name: ``"a100-80gb"``, ``"h100-80gb"``, ``"h200"`` or ``"cpu"``.
            gpus: Number of devices.
            **changes: Fields with different values.

        Raises:
            ValueError: If the name is unknown.
        """
        if name not in _PRESETS:
            raise ValueError(f"preset {name!r} is unknown: use one of {', '.join(map(repr, _PRESETS))}")
        return cls(**{**_PRESETS[name], "gpus": gpus, **changes})

    @classmethod
    def measure(cls, *, repetitions: int = 10, **changes: Any) -> Self:
        """Measure the devices of the current process group and their links. Every rank must call it.

        All ranks multiply matrices in bfloat16 and float32, and run other operations, small operations and collectives
        at the same time, so that they share cores, memory and links as in training. A figure is the median over
        repetitions on the slowest rank. Without a process group, one device is measured.

        Args:
            repetitions: Number of timed repetitions of each measurement, after two that do not count.
            **changes: Fields with different values.

        Returns:
            The same figures on every rank, with as many devices as ranks.

        Raises:
            ShapeError: If ``repetitions`` is not positive.

        Cost: some seconds within a node. Two nodes send each other 0.8 GB, which takes a minute at 100 Mbit/s.

        Example:
            >>> cluster = ClusterSpec.measure(repetitions=2)
            >>> cluster.gpus, cluster.calibrated
            (1, True)
        """
        fields = _measured_fields(check_size("repetitions", repetitions, least=1))
        return cls(**{**fields, **changes})

    def save(self, path: str | Path) -> None:
        """Write the figures to a JSON file, for :meth:`load`. Call it on one rank."""
        write_json(path, {"format": _FORMAT, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def load(cls, path: str | Path, gpus: int | None = None, **changes: Any) -> Self:
        """Read the figures of a file that :meth:`save` wrote.

        Args:
            path: The file.
            gpus: Number of devices; None means as many as in the file.
            **changes: Fields with different values.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is not a file of :meth:`save`, or a figure is not valid.
        """
        try:
            values = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a file of ClusterSpec.save: it is not JSON ({error})") from error
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError(f'{path} is not a file of ClusterSpec.save: it has no "format": {_FORMAT!r}')
        # Earlier versions measured additions as memory_bandwidth, and products of narrow matrices.
        if operation_bandwidth := values.pop("operation_bandwidth", None):
            values["memory_bandwidth"] = operation_bandwidth
        values.pop("narrow_products", None)
        field_names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - field_names):
            raise ValueError(f"{path} has fields that ClusterSpec does not have: {', '.join(unknown)}")
        if "gpus" not in values or "memory_bytes" not in values:
            raise ValueError(f"{path} must have gpus and memory_bytes")
        try:
            values["collectives"] = tuple(map(tuple, values.get("collectives", ())))  # JSON has lists
            cls(**values)
        except TypeError as error:
            raise ValueError(f"{path} has a figure that is not valid ({error}): measure the cluster again") from None
        return cls(**{**values, **({} if gpus is None else {"gpus": gpus}), **changes})

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    def link(self, span: int) -> str:
        """Return ``"intra"`` if groups of ``span`` neighbouring ranks are within a node, and otherwise ``"inter"``."""
        within = self.gpus <= self.gpus_per_node or (span <= self.gpus_per_node and self.gpus_per_node % span == 0)
        return "intra" if within else "inter"

    @property
    def calibrated(self) -> bool:
        """Whether the speeds were measured."""
        return self.measured_gpus > 0

    def speed(self, span: int, operation: str = "all_reduce") -> tuple[float, float]:
        """Return latency and bandwidth of a collective, along an axis whose groups span this many neighbouring ranks.

        They are those of the link if the collective was not measured.
        """
        link = self.link(span)
        speeds = {name: (latency, bandwidth) for name, latency, bandwidth in self.collectives}
        of_link = (self.intra_latency, self.intra_bandwidth), (self.inter_latency, self.inter_bandwidth)
        return speeds.get(f"{link} {operation}", of_link[link == "inter"])

    def flops(self, dtype_bytes: int) -> float:
        """Return the assumed flops per second for numbers of ``dtype_bytes`` bytes."""
        return (self.peak_flops if dtype_bytes <= 2 else self.peak_flops_fp32) * self.efficiency


_FORMAT = "panther-cluster-1"
_MAY_BE_0 = ("overlap", "operation_seconds", "host_seconds", "measured_gpus")
# Measured with kernels replaced by stubs (benchmarks/gpu/host.py): forward and backward of nn.Linear take 85 us of an
# AMD EPYC for eight operations, including modules and autograd. No GPU has confirmed it.
_HOST_SECONDS = 1e-5
_A100 = {
    "memory_bandwidth": 2.039e12,
    "peak_flops": 312e12,
    "peak_flops_fp32": 19.5e12,
    "intra_bandwidth": 300e9,
    "inter_bandwidth": 25e9,
    "host_seconds": _HOST_SECONDS,
}
_CPU = {
    "memory_bandwidth": 1e10,
    "operation_seconds": 5e-6,
    "intra_bandwidth": 1e9,
    "inter_bandwidth": 1e9,
    "intra_latency": 1e-4,
    "inter_latency": 1e-4,
}
_PRESETS: dict[str, dict[str, Any]] = {
    "a100-80gb": {"memory_bytes": 80e9, **_A100},
    # The defaults of the other fields are the figures of an H100.
    "h100-80gb": {"memory_bytes": 80e9, "host_seconds": _HOST_SECONDS},
    "h200": {"memory_bytes": 141e9, "host_seconds": _HOST_SECONDS, "memory_bandwidth": 4.8e12},
    "cpu": {"memory_bytes": 4e9, "peak_flops": 5e10, "peak_flops_fp32": 5e10, **_CPU},
}


_SMALL, _LARGE = 2**12, 2**24  # bytes of the messages that measure latency and bandwidth
# Rounds of each collective over n ranks, in multiples of n - 1; None is a single round.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": None}
_BLOCKS = 16  # blocks of the model that measures the time of an operation


def _measured_fields(repetitions: int) -> dict[str, Any]:
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
        "memory_bandwidth": _memory_bandwidth(timer),
        "optimizer_bandwidth": _optimizer_bandwidth(timer),
        # The host of a GPU queues operations while the GPU runs earlier ones, so that the longer time counts.
        "host_seconds" if device.type == "cuda" else "operation_seconds": _operation_seconds(timer),
        "peak_flops": _flops(timer, torch.bfloat16),
        "peak_flops_fp32": _flops(timer, torch.float32),
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
    x, w = (torch.ones(n, n, dtype=dtype, device=timer.device) for _ in range(2))
    y = x @ w

    def work() -> None:  # the three products of a linear layer, with results that are allocated
        x @ w
        y @ w.t()
        x.t() @ y

    return 3 * 2 * n**3 / timer(work)


def _memory_bandwidth(timer: _Timer) -> float:
    """Return the bytes per second of the operations of a transformer except for products."""
    # Results are allocated, as in a model.
    x = torch.ones(2**16 if timer.device.type == "cuda" else 2**10, 2**10, device=timer.device)

    def work() -> None:
        y = F.gelu(x + x)
        y = F.layer_norm(y + x, y.shape[1:])
        F.softmax(y + x, -1)

    return 15 * x.nbytes / timer(work)


def optimizer_bytes(trained: float, states: float) -> float:
    """Return the bytes that the optimizer's step reads and writes for parameters and states of so many bytes.

    SGD reads a parameter and its gradient and writes the parameter; each moment of Adam takes about 8 accesses.
    """
    return 3 * trained + 8 * states


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
            fitted = _profiled(group, timer.repetitions)
        finally:
            if group is not None:
                dist.destroy_process_group(group)
        fields[f"{link}_latency"], fields[f"{link}_bandwidth"] = fitted["all_reduce"]
        speeds += [(f"{link} {name}", *fit) for name, fit in fitted.items()]
    return {**fields, "collectives": tuple(speeds)}


def _profiled(group: Any, repetitions: int) -> dict[str, tuple[float, float]]:
    """Return latency and bandwidth of collectives in preallocated buffers."""
    profile = profile_communication_overhead((_SMALL, _LARGE), repetitions=repetitions, group=group, show=False)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, profile)
    # The figures of the slowest node are used for the entire cluster.
    slowest = max(gathered, key=lambda each: sum(timing.time_ms for timing in each.timings))
    times: dict[str, dict[int, float]] = {}
    for timing in slowest.timings:
        times.setdefault(timing.operation, {})[timing.message_bytes] = timing.time_ms / 1e3
    return {name: _fit(name, times[name], slowest.world_size) for name in _ROUNDS}


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
