"""Pairs of plain layers that compute what a layer of two factors computes."""

__all__ = ["ConvPair", "LinearPair", "copied_parameter"]

from typing import Any, Self

import torch
from torch import Tensor, nn

from panther.nn.protocol import keep_own_forward


class ConvPair(nn.Sequential):
    """Two convolutions, the first without bias and the second of width 1, that replace one.

    It has the weight and the bias of the convolution that it replaces, because models read them (ViT reads the dtype).
    """

    @property
    def weight(self) -> Tensor:  # (out, in / groups, *kernel_size)
        """The product of both weights, for inspection; computed at each access."""
        first, second = self
        kernel, mix = first.get_parameter("weight"), second.get_parameter("weight")
        groups: Any = first.groups
        inner, outer = (each.flatten(1).unflatten(0, (groups, -1)) for each in (kernel, mix))
        return torch.reshape(outer @ inner, (len(mix), *kernel.shape[1:]))

    @property
    def bias(self) -> Tensor | None:  # (out,)
        """The bias of the second convolution."""
        return self[1].bias  # type: ignore[return-value]


class LinearPair(nn.Sequential):
    """Two linear layers, the first without bias, that replace one: ``x -> (x A^T) B^T + bias``.

    It has the sizes, weight and bias of the nn.Linear that it replaces, because models and tools read them (T5 reads
    the dtype of a weight), and torch's nn.TransformerEncoderLayer calls it in evaluation too.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_forward_pre_hook(keep_own_forward)

    @classmethod
    def of_factors(
        cls,
        outer: Tensor,  # (out, r)
        inner: Tensor,  # (r, in)
        bias: Tensor | None,  # (out,)
        trained: bool,
    ) -> Self:
        """Return the pair of copies of two factors and a bias; ``trained`` says whether the weights require grad."""
        # The meta device avoids drawing weights, which takes time and advances the generator.
        first = nn.Linear(inner.shape[1], len(inner), bias=False, device="meta")
        second = nn.Linear(len(inner), len(outer), bias=bias is not None, device="meta")
        first.weight, second.weight = copied_parameter(inner, trained), copied_parameter(outer, trained)
        if bias is not None:
            second.bias = copied_parameter(bias, bias.requires_grad)
        return cls(first, second)

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The product of both weights, for inspection; computed at each access."""
        first, second = self
        return second.get_parameter("weight") @ first.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:  # (out,)
        """The bias of the second layer."""
        return self[1].bias  # type: ignore[return-value]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self[0].in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self[1].out_features  # type: ignore[return-value]


def copied_parameter(tensor: Tensor, trained: bool) -> nn.Parameter:
    """Return a Parameter with a contiguous copy of a tensor; kernels that are channels_last stay so."""
    last = tensor.dim() > 3 and tensor.is_contiguous(memory_format=torch.channels_last) and tensor.shape[1] > 1
    copied = tensor.detach().clone(memory_format=torch.preserve_format if last else torch.contiguous_format)
    return nn.Parameter(copied, trained)
