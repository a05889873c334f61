"""The messages of compressed gradients, by the names and settings of ``comm_hook``."""

__all__ = ["UNCOMPRESSED", "GradientMessages"]

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_INDEX = 4  # bytes of an index of top-k
_HALF = 2
# torch's PowerSGD sends a tensor whole unless its factors have less than half of its numbers.
_MIN_COMPRESSION = 2


@dataclass(frozen=True)
class GradientMessages:
    """How gradients are sent between ranks that have equal parameters.

    Args:
        hook: The value of ``comm_hook``; None sends gradients uncompressed.
        settings: The settings of the hook that are not the default.

    Raises:
        ValueError: If the hook is unknown, or a setting is out of range or of another hook.
        TypeError: If a setting is unknown.
    """

    hook: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hook is None and not self.settings:
            return
        # Here, because it imports torch.distributed, which planning from stored statistics does not need.
        from panther.distributed.data.comm_hooks import DEFAULTS, check_hook

        unknown = [name for name in self.settings if name not in DEFAULTS]
        if unknown:
            raise TypeError(f"{unknown[0]!r} is not a setting of comm_hook: use one of {', '.join(DEFAULTS)}")
        check_hook(self.hook, dict(self.settings))

    def applies_to(self, strategy: str | None, replicate: int) -> bool:
        """Return whether gradients of a layout are compressed: under DDP, and between the replicas of FSDP."""
        return self.hook is not None and (strategy == "ddp" or (strategy == "fsdp" and replicate > 1))

    def payload_bytes(self, shapes: Iterable[tuple[tuple[int, ...], float]], itemsize: int) -> float:
        """Return the bytes of the messages of a rank in a step.

        Args:
            shapes: The shape of each trained tensor, and its entries on this rank.
            itemsize: Bytes of an entry.
        """
        tensors = list(shapes)
        numel = sum(entries for _, entries in tensors)
        if self.hook in ("fp16", "bf16"):
            return min(itemsize, _HALF) * numel
        if self.hook == "topk":
            return float(self._setting("topk_fraction")) * numel * (itemsize + _INDEX)
        if self.hook == "sketch":
            return float(self._setting("sketch_fraction")) * numel * itemsize
        if self.hook == "powersgd":
            return itemsize * sum(self._factor_numbers(shape) for shape, _ in tensors)
        return itemsize * numel

    def stored_bytes(self, shapes: Iterable[tuple[tuple[int, ...], float]], itemsize: int) -> float:
        """Return the bytes that a rank keeps between steps: what was not sent, and PowerSGD's factors.

        The arguments are those of :meth:`payload_bytes`.
        """
        tensors = list(shapes)
        if self.hook not in ("topk", "powersgd"):
            return 0.0
        stored = sum(entries for _, entries in tensors)
        if self.hook == "powersgd":
            factors = [(self._factor_numbers(shape), math.prod(shape)) for shape, _ in tensors]
            stored += sum(numbers for numbers, numel in factors if numbers < numel)
        return itemsize * stored

    @property
    def is_gathered(self) -> bool:
        """Whether each rank gets the messages of all ranks, in place of their sum."""
        return self.hook == "topk"

    def _factor_numbers(self, shape: tuple[int, ...]) -> float:
        numel = math.prod(shape)
        if len(shape) < 2:
            return numel
        m, n = shape[0], numel // max(1, shape[0])
        rank = min(m, n, int(self._setting("powersgd_rank")))
        factors = (m + n) * rank
        return factors if factors * _MIN_COMPRESSION < numel else numel

    def _setting(self, name: str) -> Any:
        from panther.distributed.data.comm_hooks import DEFAULTS

        return self.settings.get(name) or DEFAULTS[name]


UNCOMPRESSED = GradientMessages()
