"""The machines that a plan is made for, in the figures of their data sheets."""

__all__ = ["ClusterSpec"]

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from panther.errors import check_size


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Devices, and the links between them.

    Presets, by :meth:`preset`, have NVIDIA's published figures: ``"a100-80gb"``, ``"h100-80gb"`` and ``"h200"`` as
    SXM modules, eight to a node, without sparsity, NVLink in one direction, one network card a GPU (InfiniBand of 200
    Gb/s beside an A100, of 400 Gb/s beside the others). Latencies and ``efficiency`` are on no data sheet: they are
    assumptions. ``"cpu"`` is a guess at one core of a server, for tests and first tries.

    Example:
        >>> cluster = ClusterSpec.preset("h100-80gb", gpus=16)
        >>> cluster.nodes, cluster.bandwidth(8), cluster.bandwidth(16)
        (2, 450000000000.0, 50000000000.0)
    """

    gpus: int
    """Devices in all, one a rank."""
    memory_bytes: float
    """Of each device."""
    gpus_per_node: int = 8
    """Devices that the fast links join; neighbouring ranks share a node."""
    intra_bandwidth: float = 450e9
    """Bytes a second that a device sends inside a node."""
    inter_bandwidth: float = 50e9
    """Bytes a second that a device sends to other nodes."""
    intra_latency: float = 5e-6
    """Seconds before the first byte arrives, inside a node."""
    inter_latency: float = 15e-6
    """Seconds before the first byte arrives, between nodes."""
    peak_flops: float = 989.4e12
    """A second, of a device, in half precision."""
    peak_flops_fp32: float = 66.9e12
    """The same in float32; torch's default leaves TF32 off."""
    efficiency: float = 0.4
    """Share of the peak that matrix products reach in training."""
    overlap: float = 0.7
    """Share of the shorter of computing and data-parallel sending that hides behind the other."""
    usable: float = 0.9
    """Share of the memory that a plan may fill: the rest is for temporaries, the driver and gaps between blocks."""

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, least=1)
        check_size("gpus_per_node", self.gpus_per_node, least=1)
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number, not {type(value).__name__}")
            if not (value >= 0 if field.name.endswith("latency") or field.name == "overlap" else value > 0):
                raise ValueError(f"{field.name}={value} must be positive")
            if field.name in ("efficiency", "overlap", "usable") and value > 1:
                raise ValueError(f"{field.name}={value} is a share and must be at most 1")

    @classmethod
    def preset(cls, name: str, gpus: int, **changes: Any) -> Self:
        """Figures of known devices.

        Args:
            name: ``"a100-80gb"``, ``"h100-80gb"``, ``"h200"`` or ``"cpu"``.
            gpus: How many.
            **changes: Fields to set otherwise.

        Raises:
            ValueError: If the name is unknown.
        """
        if name not in _PRESETS:
            raise ValueError(f"preset {name!r} is unknown: use one of {', '.join(map(repr, _PRESETS))}")
        return cls(**{**_PRESETS[name], "gpus": gpus, **changes})

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.gpus // self.gpus_per_node)

    def link(self, span: int) -> str:
        """``"intra"`` if so many neighbouring ranks share a node, else ``"inter"``."""
        return "intra" if span <= self.gpus_per_node and self.gpus_per_node % span == 0 else "inter"

    def bandwidth(self, span: int) -> float:
        """Bytes a second along an axis whose groups lie within so many neighbouring ranks."""
        return self.intra_bandwidth if self.link(span) == "intra" else self.inter_bandwidth

    def latency(self, span: int) -> float:
        """Seconds before the first byte arrives there."""
        return self.intra_latency if self.link(span) == "intra" else self.inter_latency

    def flops(self, dtype_bytes: int) -> float:
        """A second that a device is taken to reach, computing in numbers of so many bytes."""
        return (self.peak_flops if dtype_bytes <= 2 else self.peak_flops_fp32) * self.efficiency


_HOPPER = {"peak_flops": 989.4e12, "peak_flops_fp32": 66.9e12, "intra_bandwidth": 450e9, "inter_bandwidth": 50e9}
_PRESETS: dict[str, dict[str, Any]] = {
    "a100-80gb": {
        "memory_bytes": 80e9,
        "peak_flops": 312e12,
        "peak_flops_fp32": 19.5e12,
        "intra_bandwidth": 300e9,
        "inter_bandwidth": 25e9,
    },
    "h100-80gb": {"memory_bytes": 80e9, **_HOPPER},
    "h200": {"memory_bytes": 141e9, **_HOPPER},
    "cpu": {
        "memory_bytes": 4e9,
        "peak_flops": 5e10,
        "peak_flops_fp32": 5e10,
        "intra_bandwidth": 1e9,
        "inter_bandwidth": 1e9,
        "intra_latency": 1e-4,
        "inter_latency": 1e-4,
        "gpus_per_node": 8,
    },
}
