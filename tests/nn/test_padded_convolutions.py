"""Convolutions with paddings that torch.nn does not have, and subclasses of nn.Conv2d that pad their input."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther as pr
from panther.errors import ShapeError
from panther.nn.conv.padded import PaddedConv2d, only_convolves

UNEQUAL = ((0, 1), (0, 1))


class Unchanged(nn.Conv2d):
    pass


class Same(nn.Conv2d):
    """Pads as TensorFlow does, and as timm's Conv2dSame: outputs of ceil(input / stride), odd padding after."""

    def forward(self, x):
        sides = []
        for size, k, s, d in zip(x.shape[-2:], self.kernel_size, self.stride, self.dilation, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            sides = [total // 2, total - total // 2, *sides]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Standardized(nn.Conv2d):
    """Overrides the method that the forward of torch calls."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class PaddedTwice(PaddedConv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1)))


REFUSED = [Same, Scaled, Standardized, PaddedTwice]


@pytest.mark.filterwarnings("ignore:LowRankConv2d with:panther.errors.PerformanceWarning")
@pytest.mark.parametrize("padding", [0, 2, (1, 2), "same", "valid"])
@pytest.mark.parametrize("kind", [nn.Conv2d, Unchanged, PaddedConv2d])
def test_convolutions_that_only_convolve(kind, padding):
    conv, x = kind(4, 8, 3, padding=padding), torch.randn(2, 4, 9, 10)
    assert only_convolves(conv)
    layer = pr.nn.LowRankConv2d.from_conv(conv, 8)
    torch.testing.assert_close(layer(x), conv(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("include", [None, nn.Conv2d, nn.Module])
def test_subclasses_with_another_forward_stay_dense(include):
    layers = {kind.__name__: kind(32, 64, 3) for kind in (*REFUSED, Unchanged)}
    report = pr.compress(nn.ModuleDict(layers), 0.5, method="svd", forms="low_rank", include=include)
    assert [layer.names for layer in report.layers] == [("Unchanged",)]
    assert [entry.name for entry in report.skipped] == [kind.__name__ for kind in REFUSED]
    assert all("may do more than convolve with its padding" in entry.reason for entry in report.skipped)


@pytest.mark.parametrize("kind", REFUSED)
def test_subclasses_with_another_forward_make_no_layer(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} is a subclass whose forward may do more"):
        pr.nn.SKConv2d.from_conv(kind(4, 8, 3), sketch_size=4)


def test_a_named_type_is_compressed_although_its_forward_is_not_known():
    class Counting(nn.Conv2d):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(Counting(32, 64, 3)), torch.randn(16, 32, 8, 8)
    expected = model(x)
    pr.compress(model, bits=8, allow_slower=True, include=Counting, calibration=list(x.split(8)))
    assert type(model[0]) is pr.nn.QuantizedConv2d
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


def test_layers_of_one_input_that_pad_differently_have_their_own_moments():
    torch.manual_seed(0)
    x, paddings = torch.rand(64, 4, 3, 3) + 1, [((2, 0), (2, 0)), ((0, 2), (0, 2))]

    class Branches(nn.Module):
        def __init__(self, *numbers):
            super().__init__()
            self.convs = nn.ModuleList(PaddedConv2d(4, 32, 3, stride=2, padding=paddings[i]) for i in numbers)

        def forward(self, x):
            return sum(conv(x) for conv in self.convs)

    both, alone = Branches(0, 1), Branches(1)
    alone.convs[0].load_state_dict(both.convs[1].state_dict())
    for model in (both, alone):
        pr.compress(
            model, bits=4, group_size=None, allow_slower=True, method="activation", calibration=list(x.split(16))
        )
    assert torch.equal(both.convs[1].codes, alone.convs[0].codes)


@pytest.mark.parametrize("number", range(12))
def test_layers_pad_like_the_dense_layer(number):
    draw = random.Random(number)
    kernel = (draw.randint(1, 5), draw.randint(1, 5))
    options = {
        "stride": (draw.randint(1, 4), draw.randint(1, 4)), "dilation": draw.randint(1, 2),
        "groups": draw.choice([1, 2]),
    }  # fmt: skip
    torch.manual_seed(number)
    sides = tuple((draw.randint(0, 3), draw.randint(0, 3)) for _ in range(2))
    same = Same(4, 8, kernel, **options)
    for conv in (PaddedConv2d(4, 8, kernel, **options, padding=padding) for padding in ("same_upper", sides)):
        x = torch.randn(3, 4, draw.randint(10, 17), draw.randint(10, 17))
        layer = pr.nn.QuantizedConv2d.from_conv(conv, bits=8, group_size=None)
        assert layer.padding == conv.padding
        with torch.no_grad():
            conv.weight.copy_(layer.weight)
        if conv.padding == "same_upper":
            same.load_state_dict(conv.state_dict())
            torch.testing.assert_close(layer(x), same(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer(x), conv(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer(x[0]), conv(x)[0], atol=1e-5, rtol=1e-5)
        again = pr.nn.QuantizedConv2d(4, 8, kernel, **options, padding=layer.padding, bits=8, group_size=None)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again(x), layer(x))
        torch.testing.assert_close(layer.to_conv()(x), conv(x), atol=1e-5, rtol=1e-5)
        model = nn.Sequential(layer)
        pr.to_linears_(model)
        torch.testing.assert_close(model(x), conv(x), atol=1e-5, rtol=1e-5)


def test_a_model_of_padded_convolutions_is_compressed(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            PaddedConv2d(8, 32, 3, stride=2, padding="same_upper"), nn.ReLU(),
            PaddedConv2d(32, 64, 3, stride=2, padding=UNEQUAL), nn.ReLU(), Unchanged(64, 64, 1), nn.ReLU(),
            Scaled(64, 64, 1),
        )  # fmt: skip

    model, x = build(), torch.randn(40, 8, 17, 19)
    report = pr.compress(model, bits=8, allow_slower=True, calibration=list(x.split(8)))
    assert [entry.name for entry in report.skipped] == ["6"]
    assert [type(layer).__name__ for layer in model][::2] == ["QuantizedConv2d"] * 3 + ["Scaled"]
    with torch.no_grad():
        expected, output = build()(x), model(x)
    assert (output - expected).norm() < 0.02 * expected.norm()
    pr.save_compressed(model, tmp_path)
    loaded = pr.load_compressed(tmp_path, build())
    assert torch.equal(loaded(x), output)
    expanded = pr.load_compressed(tmp_path, build(), expand=True)
    torch.testing.assert_close(expanded(x), output, atol=1e-5, rtol=1e-5)
    exported = torch.export.export(model.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (pr.nn.SKConv1d(32, 64, 5, padding=((4, 0),), sketch_size=8), torch.randn(2, 32, 11)),
        (pr.nn.SKConv3d(8, 64, 3, stride=2, padding="same_upper", sketch_size=8), torch.randn(2, 8, 5, 6, 7)),
    ],
)
def test_convolutions_of_other_dimensions(layer, x):
    sizes = (-(-size // layer.stride[0]) for size in x.shape[2:])
    assert layer(x).shape == (2, 64, *sizes)
    torch.testing.assert_close(layer.to_conv()(x), layer(x), atol=1e-5, rtol=1e-4)
    again = type(layer).from_conv(layer.to_conv(), sketch_size=8)
    assert again.padding == layer.padding
    assert again(x).shape == layer(x).shape


@pytest.mark.parametrize("form", ["low_rank", "int8", "int4"])
def test_every_form_of_a_padded_convolution(form):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(
            PaddedConv2d(8, 32, 3, stride=2, padding="same_upper"),
            nn.ReLU(),
            PaddedConv2d(32, 32, 3, stride=2, padding=UNEQUAL),
        ),
        torch.randn(40, 8, 16, 18),
    )
    expected = model(x)
    pr.compress(
        model,
        budget=0.9 if form == "low_rank" else 0.3,
        calibration=list(x.split(8)),
        forms=("dense", form),
        allow_slower=True,
    )
    assert model(x).shape == expected.shape
    assert (model(x) - expected).norm() < 0.5 * expected.norm()


@pytest.mark.parametrize(
    ("padding", "message"),
    [("upper", "'same', 'same_upper', 'valid' or integers"), (((1, 2),), "padding"), (((1, 2), (0, -1)), "padding")],
)
def test_padding_that_is_refused(padding, message):
    with pytest.raises((ValueError, ShapeError), match=message):
        pr.nn.QuantizedConv2d(2, 4, 3, padding=padding)
