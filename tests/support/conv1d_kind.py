"""A kind of weight of `pr.compress` as somebody else would add it: one layer, one kind, and their registrations."""

import torch
import torch.nn.functional as F
from torch import nn

from panther.compression.weights import MatrixKind, register_kind
from panther.nn.conv.geometry import ConvGeometry
from panther.nn.protocol import allow_saving
from panther.nn.quantized.matrix import QuantizedMatrix


class QuantizedConv1d(ConvGeometry, QuantizedMatrix):
    """A convolution over one dimension whose kernel is stored in few bits."""

    dense_class = nn.Conv1d
    dim = 1

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True,
        padding_mode="zeros", *, bits=4, group_size=128, low_rank=0, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self._set_geometry(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        columns = in_channels // groups * self.kernel_size[0]
        self._allocate(out_channels, columns, bits, group_size, low_rank, bias, device, dtype)

    @property
    def weight(self):
        """The kernel, (out, in / groups, kernel)."""
        return super().weight.unflatten(1, (self.in_channels // self.groups, -1))

    def forward(self, input):
        self.check_writes()
        return F.conv1d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv1dKind(MatrixKind):
    """The kernel of nn.Conv1d with zeros as padding; rows of the input are the places of the output."""

    classes = (nn.Conv1d,)
    reads_positions = False

    def shape(self, module):
        return module.groups, module.weight[0].numel(), module.out_channels // module.groups

    def geometry(self, module):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups

    def input_rows(self, module, x, groups):
        sizes = [(1, module.kernel_size[0]), (1, module.dilation[0]), (0, module.padding[0]), (1, module.stride[0])]
        columns = F.unfold(x.to(torch.promote_types(x.dtype, torch.float32))[:, :, None], *sizes)
        yield columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)

    def gradient_rows(self, target, module, gradient, masks):
        return gradient.mT.reshape(-1, target.groups, target.outer).movedim(1, 0)

    def quantized_layer(self, target, module, bits, rank, settings):
        return QuantizedConv1d.in_place_of(module, bits=bits, group_size=settings.group_size, low_rank=rank)


register_kind(Conv1dKind())
allow_saving(QuantizedConv1d)
