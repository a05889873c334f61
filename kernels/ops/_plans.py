"""Plans of calls: functions that are prepared for the shapes, strides, dtypes and addresses of their operands."""

__all__ = ["Plans", "forget_plans", "plan_key"]

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .._torch import float32_precision

# A plan takes about 2 KB. If there are more, all plans are forgotten, and the next call of each shape makes its plan
# again, in the time of a call without a plan.
_MOST_PLANS = 1024

_Plan = TypeVar("_Plan", bound=Callable[..., object])
_caches: list[dict[Hashable, object]] = []


class Plans(dict[Hashable, _Plan], Generic[_Plan]):
    """Plans by key, at most 1024 of them."""

    def __init__(self) -> None:
        super().__init__()
        _caches.append(self)  # type: ignore[arg-type]

    def add(self, key: Hashable, plan: _Plan) -> _Plan:
        """Remember a plan and return it."""
        if len(self) >= _MOST_PLANS:
            self.clear()
        self[key] = plan
        return plan


def plan_key(settings: Hashable, *operands: Tensor | None) -> tuple[Hashable, ...]:
    """Return all that a plan depends on: operands, except for their addresses, and settings that are not tensors.

    Of an address only counts whether it is a multiple of 16 bytes, because Triton compiles another kernel if not. The
    first operand says whether products are in float32, whose precision is a setting of torch.
    """
    union = 0
    key: list[Hashable] = [settings]
    for x in operands:
        if x is None:
            key.append(None)
        else:
            union |= x.data_ptr()
            key.append((x.shape, x.stride(), x.dtype, x.get_device()))
    if union & 15:
        key.append(tuple([x is None or x.data_ptr() & 15 == 0 for x in operands]))
    if operands[0] is not None and operands[0].dtype is torch.float32:
        key.append(float32_precision())
    return tuple(key)


def forget_plans() -> None:
    """Forget all plans, because what they were chosen by has changed."""
    for cache in _caches:
        cache.clear()
