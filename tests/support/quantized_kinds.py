"""The two quantized layers in equal terms: 48 outputs, and a weight that is a matrix of 64 columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from panther.nn import QuantizedConv2d, QuantizedLinear

__all__ = ["Kind", "both_kinds"]


@dataclass(frozen=True)
class Kind:
    """A layer, the dense one that it replaces, and the shape of a sample."""

    make: Callable[..., Any]
    dense: Callable[..., nn.Module]
    sizes: tuple[Any, ...]
    sample: tuple[int, ...]

    def new(self, form: dict[str, Any], **kwargs: Any) -> Any:
        """Return a new layer of random numbers that nobody drew before."""
        return self.make(*self.sizes, **form, **kwargs)

    def quantized(self, form: dict[str, Any], **kwargs: Any) -> Any:
        """Return the layer of seed 0."""
        torch.manual_seed(0)
        return self.new(form, **kwargs)

    def plain(self, **kwargs: Any) -> nn.Module:
        """Return a dense layer."""
        return self.dense(*self.sizes, **kwargs)

    def x(self, batch: int = 5, requires_grad: bool = False) -> Tensor:
        """Return an input, always the same."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, *self.sample, generator=generator, requires_grad=requires_grad)


LINEAR = Kind(QuantizedLinear, nn.Linear, (64, 48), (64,))
CONV = Kind(QuantizedConv2d, nn.Conv2d, (16, 48, (4, 2), (2, 1), "valid", 1, 2), (16, 9, 6))

both_kinds = pytest.mark.parametrize("kind", [LINEAR, CONV], ids=["linear", "conv"])
