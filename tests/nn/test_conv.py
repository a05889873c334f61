"""SKConv1d, SKConv2d, SKConv3d: the formula, and everything that nn.Conv2d takes, against the dense kernel."""

import warnings

import pytest
import torch
from compressed_layers import with_stored_sketches
from covering import all_pairs
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close
from torch.nn import functional as F

from panther.errors import DTypeError, PerformanceWarning, ShapeError
from panther.nn import SKConv1d, SKConv2d, SKConv3d, SKLinear
from panther.nn.conv.product import runs_dense
from panther.nn.functional import sketched_conv
from panther.sketch import SignSketch

LAYERS = {1: SKConv1d, 2: SKConv2d, 3: SKConv3d}
MODES = ["zeros", "reflect", "replicate", "circular"]
quiet = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 128, 3, 1), 24),  # 26 rounded down to a multiple of 8
        ((16, 16, 3, 1), 3),  # fewer than 8 are kept as they are
        ((64, 64, 1, 1), 8),
        ((3, 64, 7, 1), 8),
        ((1, 1, 1, 1), 1),  # at least 1
        ((128, 128, 3, 4), 28),  # of groups, where a multiple of 8 groups is too much
        ((256, 256, 3, 2), 48),
        ((32, 32, 3, 32), 32),  # at least groups
    ],
)
@quiet
def test_the_default_size_costs_at_most_half(shape, expected):
    in_channels, out_channels, k, g = shape
    layer = SKConv2d(in_channels, out_channels, k, groups=g)
    assert (layer.num_terms, layer.low_rank) == (1, expected)
    inner, out = in_channels // g * k * k, out_channels // g
    if g == k == 1:
        assert SKLinear(in_channels, out_channels, sketch="signs").low_rank == expected

    def fits(K):
        return 2 * K * (inner + out) <= inner * out_channels / 2

    step = 8 * g if fits(8 * g) else g
    assert expected == g or fits(expected)
    assert not fits(expected + step)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("fitted", [False, True])
def test_the_stacked_formula_holds(groups, fitted):
    L, K = 2, 4
    layer = SKConv2d(16, 32, 3, groups=groups, num_terms=L, low_rank=K, dtype=torch.float64)
    if fitted:
        layer = with_stored_sketches(layer)
    assert layer.S1s.shape == (2 * L * K, 16 // groups, 3, 3)
    assert layer.U1s.shape == (2 * L, K, 32)
    x = torch.randn(3, 16, 7, 6, dtype=torch.float64)
    y = layer.bias[:, None, None]
    for i in range(2 * L):
        z = F.conv2d(x, layer.S1s[i * K : (i + 1) * K], groups=groups)
        y = y + torch.einsum("ko,nkhw->nohw", layer.U1s[i], z) / (2 * L)
    assert_close(layer(x), y)
    blocks = layer.U1s.unflatten(1, (groups, -1)).unflatten(3, (groups, -1)) != 0  # (2 L, group, K / g, group, out / g)
    own = torch.eye(groups, dtype=torch.bool)[None, :, None, :, None]
    assert not (blocks & ~own).any()
    assert (blocks | ~own).all()
    if not fitted:
        assert_close(layer.U1s.abs()[blocks.flatten(3).flatten(1, 2)], torch.full((2 * L * K * 32 // groups,), 0.5))
    for name in ("weight", "S1s", "U1s"):
        with pytest.raises(AttributeError, match=f"{name} of SKConv2d is computed from S, U .* from_conv"):
            setattr(layer, name, torch.nn.Parameter(torch.zeros(1)))


def test_storage_and_seed():
    layer = SKConv2d(64, 128, 3, num_terms=2, low_rank=4, seed=12)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"S": (16, 64, 3, 3), "bias": (128,)}
    assert {name: tuple(b.shape) for name, b in layer.named_buffers()} == {"U": (16, 128), "sketch_seed": (4,)}
    assert torch.equal(layer.U, SignSketch(16, 128, seed=12, scale=False).dense())
    assert layer.scale == 1 / 8
    assert layer.S1s.data_ptr() == layer.S.data_ptr()
    torch.manual_seed(3)
    drawn = SKConv2d(64, 128)
    torch.manual_seed(3)
    assert SKConv2d(64, 128).seed == drawn.seed
    assert type(drawn.seed) is int


@st.composite
def configurations(draw):
    """Shapes on both sides of runs_dense, with everything nn.ConvNd knows."""
    dim = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    sizes = st.tuples(*[st.integers(1, 4 if dim < 3 else 2)] * dim)
    stride = draw(st.one_of(st.integers(1, 3), sizes))
    unit = stride in (1, (1,) * dim)
    padding_modes = ["valid", "same"] if unit else ["valid"]
    return {
        "dim": dim,
        "in_channels": groups * draw(st.integers(1, 16)),
        "out_channels": groups * draw(st.sampled_from([1, 3, 24, 40])),
        "kernel_size": draw(st.one_of(st.integers(1, 4 if dim < 3 else 2), sizes)),
        "stride": stride,
        "padding": draw(
            st.one_of(st.sampled_from(padding_modes), st.integers(0, 2), sizes.map(lambda s: tuple(x - 1 for x in s)))
        ),
        "dilation": draw(st.one_of(st.integers(1, 2), st.tuples(*[st.integers(1, 2)] * dim))),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(MODES)),
        **draw(st.sampled_from([{}, {"sketch_size": 3 * groups}, {"num_terms": 2, "low_rank": 8 * groups}])),
        "batch": draw(st.sampled_from([None, 1, 3])),
        "fitted": draw(st.booleans()),
    }


@fuzz
@given(configurations())
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's, of its own
@quiet
def test_output_and_gradients_against_the_dense_layer(config):
    torch.manual_seed(0)
    dim, batch, fitted = (config.pop(name) for name in ("dim", "batch", "fitted"))
    layer = LAYERS[dim](**config, dtype=torch.float64)
    if fitted:
        layer = with_stored_sketches(layer)
    dense = layer.to_conv()
    assert repr(dense).startswith(f"Conv{dim}d(")
    size = (13, 11, 12)[:dim] if dim < 3 else (5, 6, 7)
    x = torch.randn(*([] if batch is None else [batch]), config["in_channels"], *size, dtype=torch.float64)
    x.requires_grad_()
    ours, theirs = layer(x), dense(x)
    assert ours.shape == theirs.shape
    assert_close(ours, theirs)
    grad = torch.randn_like(theirs)
    kernel = torch.autograd.grad(theirs, [x, dense.weight], grad)
    assert_close(torch.autograd.grad(ours, x, grad, retain_graph=True)[0], kernel[0])
    # The chain rule through the effective kernel gives the gradients of the factors.
    factors = [layer.S, layer.U] if fitted else [layer.S]
    chained = torch.autograd.grad(layer.weight, factors, kernel[1])
    for result, exact in zip(torch.autograd.grad(ours, factors, grad, retain_graph=True), chained, strict=True):
        assert_close(result, exact)
    if layer.bias is not None:
        (result,) = torch.autograd.grad(ours, layer.bias, grad)
        assert_close(result, grad.movedim(-dim - 1, 0).flatten(1).sum(1))


# One shape that mixes in NCHW, one in groups, one that fills groups up to vectors, one that forms the dense kernel.
SHAPES = [{"low_rank": 8}, {"low_rank": 16, "groups": 2}, {"low_rank": 6, "groups": 2}, {"low_rank": 4, "groups": 4}]


def layer_of(shape, **kwargs):
    torch.manual_seed(0)
    return SKConv2d(32, 48, 3, **{"padding": 1, **shape, **kwargs})


def test_the_shapes_take_all_ways():
    assert [runs_dense(layer.S, layer.U, layer.groups) for layer in map(layer_of, SHAPES)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("kernel_size", "dilation", "mode"), all_pairs([2, 4, (2, 3), (4, 1)], [1, 2, (1, 3)], MODES))
def test_same_padding_of_even_kernels_says_nothing_and_is_torchs(kernel_size, dilation, mode):
    layer = SKConv2d(32, 48, kernel_size, padding="same", dilation=dilation, padding_mode=mode, low_rank=4)
    x = torch.randn(2, 32, 11, 12)
    out = layer(x)
    assert out.shape[2:] == x.shape[2:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(out, layer.double().to_conv()(x.double()), torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_channels_last_is_kept(shape, mode):
    layer = layer_of(shape, padding_mode=mode)
    dense = layer.to_conv()
    x = torch.randn(2, 32, 9, 8)
    expected = layer(x)
    assert expected.is_contiguous()
    for last in (False, True):  # of the kernel
        if last:
            layer, dense = layer.to(memory_format=torch.channels_last), dense.to(memory_format=torch.channels_last)
        for value in (x, x.to(memory_format=torch.channels_last)):
            out = layer(value)
            assert out.stride() == dense(value).stride()
            assert_close(out, expected.double(), torch.float32)
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.square().sum().backward()
    assert layer.S.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_last_is_kept_in_three_dimensions(shape):
    layer = SKConv3d(32, 48, 3, padding=1, **shape)
    x = torch.randn(2, 32, 4, 5, 6)
    last = x.to(memory_format=torch.channels_last_3d)
    out, dense = layer(last), layer.to_conv()
    assert out.stride() == dense(last).stride()
    assert layer(x).is_contiguous()
    assert_close(out, dense.double()(x.double()), torch.float32)


def test_to_conv_keeps_the_kernels_format():
    layer = layer_of(SHAPES[0]).to(memory_format=torch.channels_last)
    assert layer.to_conv().weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("last", [False, True])
def test_float16_overflows_no_earlier_than_the_dense_layer(last):
    torch.manual_seed(0)
    layer = SKConv2d(256, 128, 3, num_terms=4, low_rank=8)
    for size in (1500.0, 1e-4):
        x = size * torch.randn(1, 256, 5, 5)
        if last:
            x = x.to(memory_format=torch.channels_last)
        exact = layer.double().to_conv()(x.half().double())
        assert_close(layer.half()(x.half()), exact)


SPREAD = [
    (SKConv2d, (64, 128, 3), 1, 24),
    (SKConv2d, (32, 64, 3), 3, 4),
    (SKConv2d, (64, 64, 5), 2, 16),
    (SKConv1d, (64, 96, 7), 1, 8),
]


@pytest.mark.parametrize(("kind", "groups", "fitted"), all_pairs(SPREAD, [1, 4], [False, True]))
@quiet
def test_fresh_output_has_the_dense_layers_spread(kind, groups, fitted):
    """Within 5 % in the mean of 30 seeds; the deviation of that mean is about 1 % for these sizes."""
    layer, shape, terms, rank = kind
    torch.manual_seed(0)
    ratios = []
    ours = layer(*shape, num_terms=terms, low_rank=rank, groups=groups)
    if fitted:
        ours = with_stored_sketches(ours)
    for _ in range(30):
        theirs = ours.dense_class(*shape, groups=groups)
        if not fitted:
            ours = layer(*shape, num_terms=terms, low_rank=rank, groups=groups)
        ours.reset_parameters()
        x = torch.randn(4, shape[0], *[8] * ours.dim)
        ratios.append((ours(x).std() / theirs(x).std()).item())
    assert abs(sum(ratios) / 30 - 1) < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_the_functional_form(shape):
    layer, x = layer_of(shape), torch.randn(2, 32, 8, 8)
    ours = sketched_conv(x, layer.S, layer.U, layer.bias, 1, "same", 1, layer.groups, scale=layer.scale)
    assert torch.equal(ours, layer(x))


def test_a_sketch_larger_than_the_layer_warns_once_and_works():
    with pytest.warns(
        PerformanceWarning, match=r"1,280 numbers, and a dense layer of 64 .* over 9 inputs, by 576.*nn\.Conv2d"
    ) as record:
        layer = SKConv2d(64, 64, 3, groups=64)
    assert len(record) == 1
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(2, 64, 5, 5))
        SKConv2d(64, 128)


def test_extra_repr():
    assert repr(SKConv2d(64, 48, low_rank=3, seed=5)) == (
        "SKConv2d(64, 48, kernel_size=(3, 3), stride=(1, 1), num_terms=1, low_rank=3, seed=5)"
    )
    assert repr(SKConv1d(64, 48, 3, 1, "same", 2, 2, False, "circular", sketch_size=4, seed=5)) == (
        "SKConv1d(64, 48, kernel_size=(3,), stride=(1,), padding='same', dilation=(2,), groups=2, "
        "padding_mode='circular', bias=False, num_terms=1, low_rank=4, seed=5)"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((0, 8), {}, ShapeError, "in_channels=0 must be at least 1"),
        ((8, 2.0), {}, TypeError, "out_channels must be an integer, not float"),
        ((8, 8, 0), {}, ShapeError, "kernel_size=0 must be at least 1"),
        ((8, 8, (3, 3, 3)), {}, ShapeError, r"kernel_size=\(3, 3, 3\) must be one integer or 2 of them"),
        ((8, 8, (3, 0)), {}, ShapeError, r"kernel_size\[1\]=0 must be at least 1"),
        ((8, 8, "3"), {}, TypeError, "kernel_size must be an integer, not str"),
        ((8, 8, 3, 0), {}, ShapeError, "stride=0 must be at least 1"),
        ((8, 8, 3, 1, -1), {}, ShapeError, "padding=-1 must be at least 0"),
        ((8, 8, 3, 1, "full"), {}, ValueError, "padding='full' is unknown: use 'same', 'same_upper',"),
        ((8, 8, 3, (1, 2), "same"), {}, ShapeError, r"padding='same' keeps .* stride=\(1, 2\) does not: use stride=1"),
        ((8, 8), {"dilation": 0}, ShapeError, "dilation=0 must be at least 1"),
        ((8, 8), {"groups": 0}, ShapeError, "groups=0 must be at least 1"),
        ((8, 8), {"groups": 3}, ShapeError, "in_channels=8 must be divisible by groups=3"),
        ((9, 8), {"groups": 3}, ShapeError, "out_channels=8 must be divisible by groups=3"),
        ((8, 8), {"groups": 4, "low_rank": 2}, ShapeError, "low_rank=2 must be divisible by groups=4"),
        ((8, 8), {"padding_mode": "wrap"}, ValueError, "padding_mode='wrap' is unknown: use one of 'zeros', 'reflect'"),
        ((8, 8), {"num_terms": 0, "low_rank": 1}, ShapeError, "num_terms=0 must be at least 1"),
        ((8, 8), {"num_terms": 2}, ShapeError, "num_terms=2: give either sketch_size.* or both num_terms and low_rank"),
        ((8, 8), {"device": torch.ones(2)}, TypeError, "device must be a torch.device or its name, not Tensor: use"),
        ((8, 8), {"low_rank": 0}, ShapeError, "low_rank=0 must be at least 1"),
        ((8, 8), {"dtype": torch.int32}, DTypeError, "dtype=torch.int32 must be a floating dtype"),
        ((8, 8), {"seed": -3}, ValueError, r"seed=-3 must be in \[0, 2\^63\)"),
    ],
)
def test_bad_construction(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        SKConv2d(*args, **kwargs)


def test_bad_input_says_the_rule_the_values_and_the_fix():
    layer = SKConv2d(64, 128)
    for shape in [(2, 63, 8, 8), (64, 8), (), (1, 2, 64, 8, 8)]:
        with pytest.raises(
            ShapeError, match=r"the input must be \(N, 64, H, W\) or \(64, H, W\) for in_channels=64, not"
        ):
            layer(torch.zeros(shape))
    with pytest.raises(DTypeError, match=r"the input is torch.float64 and the layer torch.float32: cast the input"):
        layer(torch.zeros(1, 64, 8, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"the input must be a tensor, not list: use torch\.as_tensor"):
        layer([1.0])
    S, U, x = torch.ones(4, 3, 3), torch.ones(4, 6), torch.ones(2, 3, 8)
    with pytest.raises(ShapeError, match="groups=0 must be at least 1"):
        sketched_conv(x, S, U, groups=0)
    with pytest.raises(ShapeError, match=r"rows divisible by groups=1: got S \(4, 3, 3\), U \(3, 6\)"):
        sketched_conv(x, S, U[:3])
    with pytest.raises(ShapeError, match=r"bias must have shape \(6,\), not \(5,\)"):
        sketched_conv(x, S, U, torch.ones(5))
    with pytest.raises(DTypeError, match="S, U and bias must share a dtype"):
        sketched_conv(x, S, U.double())
