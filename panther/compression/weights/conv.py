"""Weights of nn.Conv2d, as one matrix for each group of channels that multiplies the unfolded input."""

__all__ = ["ConvKind"]

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.compression.calibration.batches import Masks
from panther.compression.calibration.targets import Target, register_kind
from panther.compression.forms.base import FormSettings
from panther.compression.weights.linear import MatrixKind
from panther.nn import LowRankConv2d, QuantizedConv2d, SKConv2d
from panther.nn.conv.geometry import take_format_
from panther.nn.conv.padded import only_convolves, pad_input
from panther.nn.factors import overrides_forward
from panther.nn.quantized import stored_bytes

_CHUNK = 2**22  # entries of unfolded input at a time


class ConvKind(MatrixKind):
    """A kernel (out, in / groups, height, width); rows of the input are the places of the output."""

    classes = (nn.Conv2d,)
    takes_every_form = True
    reads_positions = False

    def why_other_forward(self, module: nn.Module, named_types: Sequence[type]) -> str | None:
        """Return the reason for a subclass whose forward does more than convolve, unless ``include`` names it."""
        # A subclass may pad its input in its forward, so that only its own type counts, and not that of its base.
        if only_convolves(module) or any(each not in nn.Conv2d.__mro__ for each in named_types):
            return None
        return (
            "is a subclass, whose forward may do more than convolve with its padding: name its type in include= if it "
            "does not"
        )

    def shape(self, module: Any) -> tuple[int, int, int]:
        """Return the groups, and the sizes of a group's matrix."""
        return module.groups, module.weight[0].numel(), module.out_channels // module.groups

    def geometry(self, module: Any) -> tuple[Any, ...]:
        """Return all that says how a convolution unfolds its input."""
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        # As text, because subclasses may have lists.
        return *map(str, sizes), module.groups, module.padding_mode

    def input_rows(self, module: Any, x: Tensor, groups: int) -> Iterator[Tensor]:
        """Yield the unfolded input in chunks of images."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x if x.dim() == 4 else x[None]  # Conv2d also takes a single image without a batch dimension
        geometry = module.kernel_size, module.stride, module.padding, module.dilation, module.padding_mode
        x, padding = pad_input(x, *geometry)
        per_sample = max(1, x[0].numel() * module.weight[0, 0].numel()) if len(x) else 1
        for images in x.split(max(1, _CHUNK // per_sample)):
            columns = F.unfold(
                images, module.kernel_size, module.dilation, padding, module.stride
            )  # (N, in * kernel, places)
            yield columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)

    def gradient_rows(self, target: Target, module: nn.Module, gradient: Tensor, masks: Masks) -> Tensor:
        """Return the gradients at all places of the output."""
        return gradient.movedim(-3, -1).reshape(-1, target.groups, target.outer).movedim(1, 0)

    def code_bytes(self, target: Target, width: int | None, rank: int, group_size: int | None) -> int:
        """Return the bytes of a QuantizedConv2d."""
        rows = target.groups * target.outer
        return stored_bytes(target.inner, rows, width, group_size=group_size, low_rank=rank, conv=True)

    def quantized_layer(
        self, target: Target, module: nn.Module, bits: int | None, rank: int, settings: FormSettings
    ) -> QuantizedConv2d:
        """Return a QuantizedConv2d."""
        return QuantizedConv2d.in_place_of(module, bits=bits, group_size=settings.group_size, low_rank=rank)

    def low_rank_layer(self, module: Any, left: Tensor, right: Tensor, seed: int) -> LowRankConv2d:
        """Return a LowRankConv2d."""
        weight = module.get_parameter("weight")
        conv = LowRankConv2d(
            module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
            module.dilation, module.groups, padding_mode=module.padding_mode, rank=left.shape[2] * module.groups,
            # On the meta device, because values would be drawn only to be replaced below.
            bias=module.bias is not None, device="meta", dtype=weight.dtype,
        ).to_empty(device=weight.device)  # fmt: skip
        conv.set_factors_(left, right, seed)
        take_format_(conv, weight)
        return conv

    def seeded_layer(
        self, module: Any, num_terms: int, low_rank: int, init: str, seed: int
    ) -> SKConv2d | LowRankConv2d:
        """Return a layer that ``from_conv`` makes."""
        if overrides_forward(module, nn.Conv2d):  # `include` names its type
            module = copy.copy(module)
            module.__class__ = nn.Conv2d
        if init == "svd":
            return LowRankConv2d.from_conv(module, 2 * num_terms * low_rank * module.groups, seed=seed)
        return SKConv2d.from_conv(module, num_terms, low_rank * module.groups, init=init, seed=seed)

    def seeded_numbers(self, target: Target, rank: int) -> int:
        """Return the entries of a sketched convolution: its inner kernel."""
        return rank * target.groups * target.inner


register_kind(ConvKind())
