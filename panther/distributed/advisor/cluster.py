"""The devices and links of a cluster, with figures from data sheets."""

__all__ = ["ClusterSpec"]

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from panther.errors import check_flag, check_size


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The devices of a cluster, and the links between them.

    The presets of :meth:`preset` have NVIDIA's published figures: ``"a100-80gb"``, ``"h100-80gb"`` and ``"h200"`` are
    SXM modules, eight per node, without sparsity, with NVLink in one direction and one network card per GPU (InfiniBand
    at 200 Gb/s for the A100, 400 Gb/s for the others). Data sheets have neither latencies nor ``efficiency``: these are
    assumptions. ``"cpu"`` is a guess for one core of a server, for tests.

    Example:
        >>> cluster = ClusterSpec.preset("h100-80gb", gpus=16)
        >>> cluster.nodes, cluster.bandwidth(8), cluster.bandwidth(16)
        (2, 450000000000.0, 50000000000.0)
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
    """Share of the memory that a plan may use; the rest is for workspace, the driver and fragmentation."""
    calibrated: bool = False
    """Whether the speeds were measured; those of a preset are from data sheets, and times that follow from them are
    good for a ranking only."""

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, least=1)
        check_size("gpus_per_node", self.gpus_per_node, least=1)
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if field.name == "calibrated":
                check_flag(field.name, value)
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number, not {type(value).__name__}")
            if not (value >= 0 if field.name.endswith("latency") or field.name == "overlap" else value > 0):
                raise ValueError(f"{field.name}={value} must be positive")
            if field.name in ("efficiency", "overlap", "usable") and value > 1:
                raise ValueError(f"{field.name}={value} is a share and must be at most 1")

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

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    def link(self, span: int) -> str:
        """Return ``"intra"`` if groups of ``span`` neighbouring ranks lie within nodes, else ``"inter"``."""
        return "intra" if span <= self.gpus_per_node and self.gpus_per_node % span == 0 else "inter"

    def bandwidth(self, span: int) -> float:
        """Return the bytes per second along an axis whose groups span this many neighbouring ranks."""
        return self.intra_bandwidth if self.link(span) == "intra" else self.inter_bandwidth

    def latency(self, span: int) -> float:
        """Return the latency along that axis, in seconds."""
        return self.intra_latency if self.link(span) == "intra" else self.inter_latency

    def flops(self, dtype_bytes: int) -> float:
        """Return the assumed flops per second for numbers of ``dtype_bytes`` bytes."""
        return (self.peak_flops if dtype_bytes <= 2 else self.peak_flops_fp32) * self.efficiency


_HOPPER = {"peak_flops": 989.4e12, "peak_flops_fp32": 66.9e12, "intra_bandwidth": 450e9, "inter_bandwidth": 50e9}
_A100 = {"peak_flops": 312e12, "peak_flops_fp32": 19.5e12, "intra_bandwidth": 300e9, "inter_bandwidth": 25e9}
_CPU = {"intra_bandwidth": 1e9, "inter_bandwidth": 1e9, "intra_latency": 1e-4, "inter_latency": 1e-4}
_PRESETS: dict[str, dict[str, Any]] = {
    "a100-80gb": {"memory_bytes": 80e9, **_A100},
    "h100-80gb": {"memory_bytes": 80e9, **_HOPPER},
    "h200": {"memory_bytes": 141e9, **_HOPPER},
    "cpu": {"memory_bytes": 4e9, "peak_flops": 5e10, "peak_flops_fp32": 5e10, **_CPU},
}
