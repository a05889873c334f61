"""The compressed layers of panther.nn as one table, for the suites that every layer passes."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from panther.nn import (
    InterpolativeLinear,
    LearnedLinearAttention,
    LowRankConv2d,
    LowRankLinear,
    MonarchLinear,
    QuantizedConv2d,
    QuantizedLinear,
    RandMultiHeadAttention,
    SKConv1d,
    SKConv2d,
    SKConv3d,
    SKLinear,
)
from panther.nn.base import SketchedModule

__all__ = [
    "LAYERS",
    "LayerKind",
    "assert_unchanged",
    "every_layer",
    "exact_twin",
    "kinds_with",
    "snapshot",
    "with_stored_sketches",
]

_MEMORY_FORMATS = {3: torch.channels_last, 4: torch.channels_last_3d}  # by the dimensions of a sample


@dataclass(frozen=True)
class LayerKind:
    """A layer in one of its forms, the layer of torch.nn that it replaces, and the shape of one sample."""

    name: str
    make: Callable[..., Any]
    dense: Callable[..., nn.Module] | None
    sizes: tuple[Any, ...]
    """Positional arguments of ``make`` and of ``dense``."""
    sample: tuple[int, ...]
    form: Mapping[str, Any]
    """Keyword arguments of ``make`` that ``dense`` does not have."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of both."""
    batches: tuple[tuple[int, ...], ...] = ((), (3,), (0,))
    """Batch shapes that the layer takes."""
    fitted: bool = False
    """Whether the form is made from a dense layer, and not by the constructor."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Behaviours that the layer does not have, each with the reason."""

    def new(self, **options: Any) -> Any:
        """Return a layer by the constructor, from the present state of torch's generator."""
        return self.make(*self.sizes, **self.shared, **self.form, **options)

    def layer(self, seed: int = 0, **options: Any) -> Any:
        """Return the layer of a seed in its form, with values."""
        torch.manual_seed(seed)
        if not self.fitted:
            return self.new(**options)
        make: Any = self.make
        convert = make.from_linear if self.dense is nn.Linear else make.from_conv
        layer = convert(self.plain(**options), **self.form)
        return with_stored_sketches(layer) if isinstance(layer, SketchedModule) else layer

    def trained(self, **options: Any) -> Any:
        """Return the layer with all the parameters that it can have."""
        layer = self.layer(**options)
        return layer.train_scales_() if hasattr(layer, "train_scales_") else layer

    def in_float64(self) -> Any:
        """Return the layer with all of its floating numbers in float64, and trained."""
        layer = self.trained(dtype=torch.float64)
        if hasattr(layer, "train_scales_"):
            layer.hold_scales_(torch.float64).hold_scale_logs_(torch.float64)
        return layer

    def plain(self, **options: Any) -> nn.Module:
        """Return a new layer of torch.nn of the sizes that this layer replaces."""
        assert self.dense is not None
        return self.dense(*self.sizes, **self.shared, **options)

    def x(self, *batch: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        """Return an input of a batch shape, the same at each call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*batch, *self.sample, generator=generator).to(dtype).requires_grad_(requires_grad)

    def memory_formats(self, x: Tensor) -> list[Tensor]:
        """Return an input of batch shape (N,) in each memory format that the layer keeps."""
        last = _MEMORY_FORMATS.get(len(self.sample))
        if last is None:
            return [x]
        return [x, x.detach().contiguous(memory_format=last).requires_grad_(x.requires_grad)]


def with_stored_sketches(layer: Any) -> Any:
    """Make a sketched layer store its sketches, as a loaded checkpoint of panther-ml does; its weight stays."""
    layer.set_fitted_({name: layer.scale * getattr(layer, name) for name in layer.sketch_shapes()})
    return layer


def exact_twin(layer: nn.Module) -> nn.Module:
    """Return the dense layer of the same effective weight in float64."""
    double = copy.deepcopy(layer).double()
    return double.to_linear() if hasattr(double, "to_linear") else double.to_conv()


def snapshot(layer: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, by name."""
    return {name: tensor.clone() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}


def assert_unchanged(layer: nn.Module, original: dict[str, Tensor]) -> None:
    after = snapshot(layer)
    assert after.keys() == original.keys()
    assert all(torch.equal(after[name], original[name]) for name in original)


class SelfAttention(RandMultiHeadAttention):
    """RandMultiHeadAttention as a layer of one input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input, input, input, need_weights=False)[0]


class LearnedSelfAttention(LearnedLinearAttention):
    """LearnedLinearAttention among heads that are read from one input."""

    def forward(self, input: Tensor) -> Tensor:
        heads = input.unflatten(-1, (4, 8)).transpose(-3, -2)
        return super().forward(heads, heads, heads, is_causal=True).transpose(-3, -2).flatten(-2)


_TRACE = {"trace": "torch.fx traces no forward that branches on what it is given"}
_INTEGERS = _TRACE | {"exponential of buffers": "torch averages integers in floating point and rounds them down"}
_ROUNDED = "inputs are rounded: test_quantized_activations.py compares with the rounded formula"
_CONV = {"nested": "torch's convolutions take no nested tensors"}
_ATTENTION = _TRACE | {
    "derivatives": "test_attention.py has those of each kernel",
    "compile": "a compilation takes seconds: test_attention.py has one of each kernel",
    "dense": "no dense layer computes the same: test_attention.py forms the weights of all pairs",
    "file": "the inference format holds linear layers and convolutions",
    "input": "attention checks three inputs and masks: test_attention.py",
    "linear": "attention is not linear in its input",
    "nested": "masks tell the lengths of sequences",
    "record": "attention loads as torch's modules do, key by key: test_attention.py has the checks of its own state",
}
_LEARNED = {
    "autocast": "it computes in the dtype of its queries, keys and values",
    "export": "its program holds an operator of Panther",
}
_PACKED = _TRACE | {"ensembles": "packed signs are not buffers, which an ensemble stacks"}
_BATCHES = ((), (3,), (20,), (0,), (2, 0), (2, 3, 4))  # SKLinear multiplies 3 rows and 20 rows in different orders
_CONV_SIZES = (16, 48, (4, 2), (2, 1), (1, 0), 1, 2)


def _linear(name: str, make: Callable[..., Any], sizes: tuple[int, int] = (64, 48), **options: Any) -> LayerKind:
    fitted, exempt = options.pop("fitted", False), options.pop("exempt", {})
    return LayerKind(name, make, nn.Linear, sizes, sizes[:1], options, batches=_BATCHES, fitted=fitted, exempt=exempt)


def _sketched(name: str, **options: Any) -> LayerKind:
    return _linear(name, SKLinear, num_terms=2, low_rank=2, **options)


def _quantized(name: str, *, exempt: Mapping[str, str] = _INTEGERS, **form: Any) -> LayerKind:
    return _linear(name, QuantizedLinear, exempt=exempt, **form)


def _conv(name: str, make: Any, sizes: tuple[Any, ...], size: tuple[int, ...], **options: Any) -> LayerKind:
    exempt = _CONV | (_INTEGERS if make is QuantizedConv2d else {}) | options.pop("exempt", {})
    named = {key: options.pop(key) for key in ("fitted", "shared") if key in options}
    return LayerKind(name, make, make.dense_class, sizes, (sizes[0], *size), options, exempt=exempt, **named)


def _attention(name: str, make: Any, *sizes: int, **form: Any) -> LayerKind:
    exempt = _ATTENTION | (_LEARNED if make is LearnedSelfAttention else {})
    return LayerKind(name, make, None, sizes, (9, 32), form, batches=((3,), (0,)), exempt=exempt)


_KINDS = [
    _sketched("seeded", sketch="signs"),
    _sketched("fitted", fitted=True),
    _sketched("sparse"),
    _linear("sparse uneven", SKLinear, (52, 33), num_terms=1, low_rank=7),
    _sketched("packed", sketch="signs", packed=True, exempt=_PACKED),
    _linear("low rank", LowRankLinear, rank=8),
    _linear("low rank fitted", LowRankLinear, rank=8, fitted=True),
    _linear("monarch", MonarchLinear),
    _linear("monarch padded", MonarchLinear, (68, 37)),  # no divisor of them is near their square root
    _linear("monarch rank 3", MonarchLinear, rank=3, fitted=True),
    _linear("interpolative rows", InterpolativeLinear, low_rank=9, exempt=_INTEGERS),
    _linear("interpolative columns", InterpolativeLinear, (48, 64), low_rank=9, exempt=_INTEGERS),
    _quantized("int8", bits=8, group_size=None),
    _quantized("int4"),
    _quantized("int3+low_rank", bits=3, group_size=30, low_rank=2),
    _quantized("int8_low_rank", bits=None, low_rank=4),
    _quantized(
        "int8 activations",
        activations="int8",
        exempt=_INTEGERS | dict.fromkeys(("compile", "dense", "linear", "derivatives"), _ROUNDED),
    ),
    _conv("conv1d", SKConv1d, (32, 48, 4, 1, "same", 3), (9,), low_rank=4),  # padding differs before and after
    _conv("conv2d", SKConv2d, (32, 48, 3, 1, 1), (6, 7), low_rank=8),
    _conv("conv2d groups", SKConv2d, (32, 48, 3, 1, 1, 1, 2), (6, 7), low_rank=6),
    _conv("conv2d dense kernel", SKConv2d, (32, 48, 3, 1, 1, 1, 4), (6, 7), low_rank=4),
    _conv(
        "conv2d fitted", SKConv2d, (32, 48, (3, 2), (2, 1), (1, 2), 1, 2), (6, 7), num_terms=2, low_rank=4, fitted=True,
        shared={"padding_mode": "circular"}, exempt={"compile": "circular padding alone takes 9 s to compile"},
    ),
    _conv("conv2d low rank", LowRankConv2d, (32, 48, 3, 1, 1), (6, 7), rank=16),
    _conv(
        "conv2d low rank groups", LowRankConv2d, (32, 48, (3, 2), (2, 1), (1, 2), 1, 2), (6, 7), rank=16, fitted=True,
        shared={"padding_mode": "circular"}, exempt={"compile": "circular padding alone takes 9 s to compile"},
    ),
    _conv("conv3d", SKConv3d, (4, 32, 2), (6, 4, 3), low_rank=2),
    _conv(
        "conv2d int8", QuantizedConv2d, _CONV_SIZES, (9, 6), bits=8, group_size=None,
        shared={"padding_mode": "reflect"},
    ),
    _conv("conv2d int3+low_rank", QuantizedConv2d, _CONV_SIZES, (9, 6), bits=3, group_size=30, low_rank=2),
    _conv("conv2d int8_low_rank", QuantizedConv2d, (16, 48, 3, 1, "same"), (9, 6), bits=None, low_rank=4),
    _attention("attention", SelfAttention, 32, 4, 24),
    _attention("attention softmax", SelfAttention, 32, 4, 24, kernel_fn="softmax"),
    _attention("attention learned", LearnedSelfAttention, 4, 8, num_features=6, window=2),
]  # fmt: skip
LAYERS = {kind.name: kind for kind in _KINDS}


def kinds_with(*behaviours: str) -> list[LayerKind]:
    """Return the layers that are exempt from none of these behaviours."""
    return [kind for kind in _KINDS if not set(behaviours) & kind.exempt.keys()]


def every_layer(*behaviours: str) -> pytest.MarkDecorator:
    """Parametrise a test over the layers that are exempt from none of these behaviours."""
    return pytest.mark.parametrize("kind", kinds_with(*behaviours), ids=lambda kind: kind.name)
