"""Subclasses of nn.Conv2d that pad their input, and compressed layers with the same padding."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther as pr
from panther.errors import ShapeError
from panther.nn.conv.padding import only_pads, padding_of


class Same(nn.Conv2d):
    """Pads as TensorFlow does: outputs of ceil(input / stride), odd padding after."""

    def forward(self, x):
        sides = []
        for size, k, s, d in zip(x.shape[-2:], self.kernel_size, self.stride, self.dilation, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            sides = [total // 2, total - total // 2, *sides]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Static(nn.Conv2d):
    """Has a layer for its padding, as EfficientNet-lite has."""

    def __init__(self, *args, sides=(0, 1, 0, 1), **options):
        super().__init__(*args, **options)
        self.static_padding = nn.ZeroPad2d(sides)

    def forward(self, x):
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Causal(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (self.kernel_size[1] - 1, 0)))


class Causal1d(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class Unchanged(nn.Conv2d):
    pass


class Standardized(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Clipped(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.clamp(max=1.5))


class Cropped(nn.Conv2d):
    def forward(self, x):
        return super().forward(x[..., 1:])


class Twice(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + super().forward(x)


class Reflected(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class Activated(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.relu6(x))


class Noisy(nn.Conv2d):
    """Changes its input in training only."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.1, self.training))


class Dropping(nn.Conv2d):
    """Has a child that changes the input in training only."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return super().forward(self.dropout(x))


class Widened(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.float())


class Multiple(nn.Conv2d):
    """Pads after the input only, to a multiple of 8."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8)))


class Single(Same):
    """Has an integer where layers of torch have a tuple."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dilation = 1


class Counting(nn.Conv2d):
    """Changes a buffer in its forward, so it is not tried."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Listed(Same):
    """Has a list where layers of torch have a tuple, as EfficientNet-lite has."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stride = list(self.stride)


class Remembering(Same):
    """Assigns an attribute, and draws random numbers, that its output does not depend on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        torch.rand(3), random.random()
        return super().forward(x)


REFUSED = [
    Standardized, Scaled, Clipped, Cropped, Twice, Reflected, Activated, Noisy, Dropping, Widened, Multiple, Single,
    Counting,
]  # fmt: skip


def test_what_a_forward_pads():
    assert padding_of(nn.Conv2d(2, 4, 3, padding=1)) == (1, 1)
    assert padding_of(Unchanged(2, 4, 3, padding="same")) == "same"
    assert padding_of(Same(2, 4, 3, stride=2)) == "same_upper"
    assert padding_of(Same(2, 4, 3)) == (1, 1)  # of stride 1, and so of one size
    assert padding_of(Same(2, 4, (3, 4))) == ((1, 1), (1, 2))
    assert padding_of(Static(2, 4, 3, stride=2)) == ((0, 1), (0, 1))
    assert padding_of(Static(2, 4, 3, stride=2, padding=1, sides=(3, 0, 2, 0))) == ((3, 1), (4, 1))
    assert padding_of(Causal(2, 4, (1, 3))) == ((0, 0), (2, 0))
    assert padding_of(Causal(2, 4, (1, 3)).to(torch.bfloat16)) == ((0, 0), (2, 0))
    assert padding_of(Same(2, 4, 3, stride=2, device="meta")) == "same_upper"
    assert padding_of(Same(2, 4, 3, stride=9)) == "same_upper"  # without padding for most sizes
    assert padding_of(Causal1d(2, 4, 5, dilation=2)) == ((8, 0),)
    assert padding_of(Causal(2, 4, 3, padding="same")) == ((1, 1), (3, 1))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_forward_that_does_more_is_refused(kind, is_training):
    conv = kind(2, 4, 3).train(is_training)
    state = {name: value.clone() for name, value in conv.state_dict().items()}
    assert not only_pads(conv)
    assert all(torch.equal(value, state[name]) for name, value in conv.state_dict().items())


def test_the_report_says_which_forwards_do_more():
    layers = {kind.__name__: kind(32, 64, 3) for kind in (*REFUSED, Same)}
    report = pr.compress(nn.ModuleDict(layers), 0.5, method="svd", forms="low_rank")
    assert [layer.names for layer in report.layers] == [("Same",)]
    assert [entry.name for entry in report.skipped] == [kind.__name__ for kind in REFUSED]
    assert all("may do more than pad the input and convolve" in entry.reason for entry in report.skipped)


def test_finding_the_padding_changes_nothing():
    conv = Remembering(2, 4, 3, stride=2)
    conv.register_forward_hook(lambda *_: pytest.fail("the hook was called"))
    attributes, expected = dict(vars(conv)), (torch.get_rng_state(), random.getstate())
    assert padding_of(conv) == "same_upper"
    assert vars(conv) == attributes
    assert conv.training
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


def test_a_named_type_is_compressed_although_its_forward_is_not_known():
    torch.manual_seed(0)
    model, x = nn.Sequential(Counting(32, 64, 3)), torch.randn(16, 32, 8, 8)
    expected = model(x)
    pr.compress(model, bits=8, allow_slower=True, include=Counting, calibration=list(x.split(8)))
    assert type(model[0]) is pr.nn.QuantizedConv2d
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


def test_layers_of_one_input_that_pad_differently_have_their_own_moments():
    torch.manual_seed(0)
    x, sides = torch.rand(64, 4, 3, 3) + 1, [(2, 0, 2, 0), (0, 2, 0, 2)]

    class Branches(nn.Module):
        def __init__(self, chosen):
            super().__init__()
            self.convs = nn.ModuleList(Static(4, 32, 3, stride=2, sides=sides[i]) for i in chosen)

        def forward(self, x):
            return sum(conv(x) for conv in self.convs)

    both, alone = Branches([0, 1]), Branches([1])
    alone.convs[0].load_state_dict(both.convs[1].state_dict())
    for model in (both, alone):
        pr.compress(
            model, bits=4, group_size=None, allow_slower=True, method="activation", calibration=list(x.split(16))
        )
    assert torch.equal(both.convs[1].codes, alone.convs[0].codes)


@pytest.mark.parametrize("number", range(12))
def test_layers_pad_like_the_subclass(number):
    draw = random.Random(number)
    groups = draw.choice([1, 2])
    kernel = (draw.randint(1, 5), draw.randint(1, 5))
    options = {"stride": (draw.randint(1, 4), draw.randint(1, 4)), "dilation": draw.randint(1, 2), "groups": groups}
    torch.manual_seed(number)
    sides = [draw.randint(0, 3) for _ in range(4)]
    for conv in (Same(4, 8, kernel, **options), Static(4, 8, kernel, **options, sides=sides)):
        size = [draw.randint(10, 17) for _ in range(2)]
        x = torch.randn(3, 4, *size)
        layer = pr.nn.QuantizedConv2d.from_conv(conv, bits=8, group_size=None)
        with torch.no_grad():
            conv.weight.copy_(layer.weight)
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
            Listed(8, 32, 3, stride=2), nn.ReLU(), Static(32, 64, 3, stride=2), nn.ReLU(), Unchanged(64, 64, 1),
            nn.ReLU(), Scaled(64, 64, 1),
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
        nn.Sequential(Same(8, 32, 3, stride=2), nn.ReLU(), Static(32, 32, 3, stride=2)),
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
