"""A form of `pr.compress` as somebody else would add it: one layer, one form, one registration."""

import torch
from torch import nn

from panther.compression.forms import Form, register
from panther.compression.forms.base import replace_layers
from panther.nn.protocol import CompressedModule

# Quantiles of a normal distribution that contain zero, scaled to [-1, 1].
_PROBABILITIES = torch.cat((torch.linspace(0.03, 0.5, 8)[:-1], torch.linspace(0.5, 0.97, 9)))
LEVELS = torch.special.ndtri(_PROBABILITIES) / torch.special.ndtri(_PROBABILITIES).abs().max()


class TableLinear(CompressedModule):
    """A linear layer whose weight has sixteen levels, times a scale for each group of a row's columns."""

    dense_class = nn.Linear
    dense_arguments = ("in_features", "out_features", "bias")
    size_arguments = ("group_size",)
    saved_buffer_names = ("codes", "scales")

    def __init__(self, in_features, out_features, group_size, *, bias=True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        columns, groups = -(-in_features // 2), -(-in_features // group_size)
        self.register_buffer("codes", torch.zeros(out_features, columns, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.ones(out_features, groups, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    @property
    def weight(self):
        """The weight, (out, in)."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)[:, : self.in_features]
        scales = self.scales.repeat_interleave(self.group_size, 1)[:, : self.in_features]
        return LEVELS.to(scales)[codes.long()] * scales

    @property
    def dtype(self):
        """The dtype of the weight."""
        return self.scales.dtype

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def stored_names(self):
        return self.saved_buffer_names

    def check_record(self):
        pass


class Table(Form):
    """Sixteen levels, rounded to the nearest."""

    name = "nf4"
    layers = (TableLinear,)
    bits = 4

    def accepts(self, target):
        return not isinstance(target.modules[0], nn.Conv2d)

    def stored_bytes(self, target, rank, settings):
        groups = -(-target.inner // (settings.group_size or target.inner))
        return target.outer * (-(-target.inner // 2) + target.weight.itemsize * groups)

    def fit(self, metric, settings, seed):
        W = metric.source[0]
        size = settings.group_size or W.shape[1]
        parts = W.split(size, 1)
        scales = torch.stack([part.abs().amax(1) for part in parts], 1)
        spread = scales.clamp_min(1e-30).repeat_interleave(size, 1)[:, : W.shape[1]]
        codes = ((W / spread)[..., None] - LEVELS.double()).abs().argmin(-1)
        E = W - LEVELS.double()[codes] * spread
        local = E if metric.L is None else E @ metric.L[0]
        lost = local if metric.R is None else metric.R[0] @ local
        packed = nn.functional.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
        losses = lost.square().sum().item(), local.square().sum().item()
        return (packed[..., 0] + 16 * packed[..., 1]).byte(), scales, *losses

    def loss(self, fit, option):
        return fit.special[self.name][2:]

    def convert(self, target, option, fit, settings, seed):
        codes, scales, *_ = fit.special[self.name]

        def make(module):
            layer = self.random_layer(target, module, option, settings)
            layer.codes.copy_(codes)
            layer.scales.copy_(scales)
            return layer

        return replace_layers(target, make, share_buffers=True)

    def random_layer(self, target, module, option, settings):
        size = settings.group_size or target.inner
        like = target.weight
        return TableLinear(
            target.inner, target.outer, size, bias=module.bias is not None, device=like.device, dtype=like.dtype
        )


register(Table())
