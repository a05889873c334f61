"""SKLinear: its forms, its formula, and what it promises of its values."""

import math
import warnings

import pytest
import torch
from compressed_layers import with_stored_sketches
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from tolerances import KERNEL_RMS, assert_close
from torch import nn

from panther.errors import DTypeError, PerformanceWarning, ShapeError
from panther.nn import SKLinear
from panther.nn.sketch_record import plain_state
from panther.sketch import SignSketch, signs

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((256, 128, 4), {}, (1, 4)),
        ((256, 128), {"sketch_size": 4}, (1, 4)),
        ((256, 128, 2, 4), {}, (2, 4)),
        ((256, 128, 2), {"low_rank": 4}, (2, 4)),
        ((256, 128), {"num_terms": 2, "low_rank": 4}, (2, 4)),
        ((), {"in_features": 256, "out_features": 128, "num_terms": 2, "low_rank": 4, "bias": False}, (2, 4)),
        ((256, 128), {"low_rank": 4}, (1, 4)),
        ((256, 128), {}, (1, 40)),  # R (in + out) is at most half of in * out, and R a multiple of 8
        ((256, 128), {"sketch": "signs"}, (1, 16)),  # and here 2 R (in + out)
    ],
)
def test_both_call_forms(args, kwargs, expected):
    layer = SKLinear(*args, **kwargs)
    assert (layer.num_terms, layer.low_rank) == expected
    sizes = {name: kwargs[name] for name in ("num_terms", "low_rank", "sketch_size", "sketch") if name in kwargs}
    converted = SKLinear.from_linear(nn.Linear(256, 128), *args[2:], **sizes)
    assert (converted.num_terms, converted.low_rank) == expected
    assert (layer.in_features, layer.out_features) == (256, 128)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((64, 64, 2, 1, False), {}, TypeError, "3 positional sketch sizes are given, and there are at most two"),
        ((64, 64, 2), {"device": torch.ones(2)}, TypeError, "device must be a torch.device or its name, not Tensor"),
        ((64, 64, 2), {"dtype": "float16"}, TypeError, "dtype must be a torch.dtype, not str"),
        ((8, 8), {"num_terms": 2}, ShapeError, "num_terms=2: give either sketch_size.* or both num_terms and low_rank"),
        ((8, 8, 2, 3), {"sketch_size": 4}, ShapeError, "num_terms=2, low_rank=3, sketch_size=4: give"),
        ((8, 8, 2), {"sketch_size": 4}, ShapeError, "sketch_size=2, sketch_size=4: give"),
        ((8, 8, 2), {"num_terms": 2}, ShapeError, "sketch_size=2, num_terms=2: give"),
        ((0, 8, 2), {}, ShapeError, "in_features=0 must be at least 1"),
        ((8, -1, 2), {}, ShapeError, "out_features=-1 must be at least 1"),
        ((8, 8, 0), {}, ShapeError, "sketch_size=0 must be at least 1"),
        ((8, 8, 0, 1), {}, ShapeError, "num_terms=0 must be at least 1"),
        ((8, 8, 1, 0), {}, ShapeError, "low_rank=0 must be at least 1"),
        ((8.0, 8, 2), {}, TypeError, "in_features must be an integer, not float"),
        ((8, 8, True), {}, TypeError, "sketch_size must be an integer, not bool"),
        ((64, 64, 2), {"dtype": torch.int32}, DTypeError, "dtype=torch.int32 must be a floating dtype"),
        ((64, 64, 2), {"sketch": "dense"}, ValueError, "sketch='dense' is unknown: use one of 'signs', 'sparse'"),
        ((64, 64, 2), {"seed": -3}, ValueError, r"seed=-3 must be in \[0, 2\^63\)"),
    ],
)
def test_bad_construction(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        SKLinear(*args, **kwargs)


def test_a_sketch_larger_than_the_layer_warns_once_and_works():
    for rank, kind in ((8, {}), (4, {"sketch": "signs"})):
        with pytest.warns(
            PerformanceWarning, match=r"128 numbers, and a dense layer of 8 .* by 64: .* nn\.Linear"
        ) as record:
            layer = SKLinear(8, 8, rank, **kind)
        assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(2, 8))
        SKLinear(64, 64, 31)  # R (in + out) = 3968 < 4096
        SKLinear(64, 64, 15, sketch="signs")  # 2 R (in + out) = 3840


@pytest.mark.parametrize(
    ("sketch", "held", "entry"),
    [
        ("signs", {"U1": (6, 200), "U2": (300, 6)}, 1 / math.sqrt(3)),
        ("sparse", {"U1_signs": (200,), "U2_signs": (300,)}, 1 / 2),
    ],
)
def test_storage_and_stacked_views(sketch, held, entry):
    layer = SKLinear(300, 200, num_terms=2, low_rank=3, sketch=sketch)
    parameters = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    buffers = {name: tuple(b.shape) for name, b in layer.named_buffers()}
    assert parameters == {"S1": (300, 6), "S2": (6, 200), "bias": (200,)}
    assert buffers == held | {"sketch_seed": (4,)}
    assert (layer.U1.shape, layer.U2.shape) == ((6, 200), (300, 6))
    assert layer.S1s.shape == layer.U2s.shape == (2, 300, 3)
    assert layer.U1s.shape == layer.S2s.shape == (2, 3, 200)
    assert torch.allclose(layer.U1s[layer.U1s != 0].abs(), torch.tensor(entry))
    assert (layer.U1s != 0).sum() == (200 if sketch == "sparse" else 1200)
    stored = ", ".join(["S1", "S2", *held])
    for name in ("weight", "S1s", "S2s", "U1s", "U2s"):
        for value in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
            with pytest.raises(AttributeError, match=f"{name} of SKLinear is computed from {stored} and cannot be"):
                setattr(layer, name, value)


@pytest.mark.parametrize("kind", ["sparse", "signs", "fitted"])
def test_the_stacked_formula_holds(kind):
    options = {} if kind == "fitted" else {"sketch": kind}
    layer = SKLinear(30, 20, num_terms=2, low_rank=1, dtype=torch.float64, **options)
    if kind == "fitted":
        layer = with_stored_sketches(layer)
    terms = zip(layer.S1s, layer.U1s, layer.U2s, layer.S2s, strict=True)
    W = sum(S1 @ U1 + U2 @ S2 for S1, U1, U2, S2 in terms) / (2 * layer.num_terms)
    assert_close(layer.weight, W.T)
    x = torch.randn(7, 30, dtype=torch.float64)
    assert_close(layer(x), x @ W + layer.bias)


def test_num_terms_is_only_a_scale():
    one, two = SKLinear(64, 48, 1, 4, seed=1), SKLinear(64, 48, 2, 2, seed=1)
    two.load_state_dict({**plain_state(one), "sketch_seed": two.sketch_seed})
    assert_close(two.weight / two.scale, one.weight.double() / one.scale)


def test_sketches_are_streams_0_and_1_of_the_seed():
    layer = SKLinear(64, 48, 4, sketch="signs", seed=12)
    assert torch.equal(layer.U1, SignSketch(4, 48, seed=12, scale=False).dense())
    assert torch.equal(layer.U2, SignSketch(64, 4, seed=12, stream=1, scale=False).dense())
    sparse = SKLinear(64, 48, 5, seed=12)
    rows, places = torch.arange(64), torch.arange(64) % 5
    assert torch.equal(sparse.U2[rows, places], SignSketch(1, 64, seed=12, stream=1, scale=False).dense()[0])
    assert torch.equal(sparse.U1[places[:48], rows[:48]], SignSketch(1, 48, seed=12, scale=False).dense()[0])
    torch.manual_seed(3)
    drawn = SKLinear(64, 48, 4)
    torch.manual_seed(3)
    assert SKLinear(64, 48, 4).seed == drawn.seed
    assert type(drawn.seed) is int


def test_golden_signs_of_a_new_layer():
    """A seed in a checkpoint means these signs, in rows and columns ``mod R``; changing them makes it unreadable."""
    layer = SKLinear(20, 12, 4, seed=12345)
    assert "".join("+" if sign > 0 else "-" for sign in layer.U1_signs) == "--+-++++--+-"
    assert "".join("+" if sign > 0 else "-" for sign in layer.U2_signs) == "+++-+-++++-++--+--+-"
    assert layer.U1[:, 4:8].tolist() == layer.U1_signs[4:8].diag().tolist()
    assert layer.U2[16:].tolist() == layer.U2_signs[16:].diag().tolist()
    assert layer.scale == 0.25


@fuzz
@given(
    n_in=st.integers(1, 40),
    n_out=st.integers(1, 40),
    terms=st.integers(1, 3),
    rank=st.integers(1, 5),
    batch=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    kind=st.sampled_from(["sparse", "signs", "fitted"]),
)
@pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
def test_forward_and_gradients_against_the_dense_weight(n_in, n_out, terms, rank, batch, dtype, bias, kind):
    torch.manual_seed(0)
    sketch = "sparse" if kind == "sparse" else "signs"
    layer = SKLinear(n_in, n_out, terms, rank, bias=bias, sketch=sketch, dtype=dtype)
    if kind == "fitted":
        with_stored_sketches(layer)
    x = torch.randn(*batch, n_in).to(dtype).requires_grad_()
    exact = nn.functional.linear(
        x.detach().double(),
        layer.weight.detach().double() if dtype == torch.float64 else layer.double().weight.detach(),
        layer.bias.detach().double() if bias else None,
    )
    layer.double()
    # The halves of a term may cancel, and what is rounded is each of them: errors are measured by their sizes.
    sizes = layer.scale * (layer.S1.abs() @ layer.U1.abs() + layer.U2.abs() @ layer.S2.abs()).detach()  # (in, out)
    size = x.detach().double().abs() @ sizes + (layer.bias.detach().abs() if bias else 0)
    layer.to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    assert_small(out.detach() - exact, size, dtype)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    gradient = layer.double().weight.detach().sum(0).expand(x.shape)
    assert_small(x.grad - gradient, sizes.sum(1).expand(x.shape), dtype)


def assert_small(deviation, size, dtype):
    """Root mean square of the deviation against that of what was added up."""
    assert deviation.shape == size.shape
    if size.numel():
        assert deviation.double().square().mean().sqrt() <= KERNEL_RMS[dtype] * size.square().mean().sqrt()


@pytest.mark.parametrize(("n_in", "n_out", "terms", "rank"), [(512, 512, 1, 16), (300, 700, 3, 2), (1024, 64, 2, 1)])
@pytest.mark.parametrize("kind", ["sparse", "signs", "fitted"])
def test_fresh_output_has_nn_linears_spread(n_in, n_out, terms, rank, kind):
    """Within 5 % in the mean of 30 seeds; the deviation of that mean is below 1 % for these sizes."""
    torch.manual_seed(0)
    ratios = []
    options = {} if kind == "fitted" else {"sketch": kind}
    layer = SKLinear(n_in, n_out, terms, rank, **options)
    if kind == "fitted":
        layer.set_fitted_({name: torch.zeros(shape) for name, shape in layer.sketch_shapes().items()})
    for _ in range(30):
        if kind != "fitted":
            layer = SKLinear(n_in, n_out, terms, rank, **options)
        layer.reset_parameters()
        x = torch.randn(64, n_in)
        ratios.append((layer(x).std() / nn.Linear(n_in, n_out)(x).std()).item())
    assert abs(sum(ratios) / 30 - 1) < 0.05


def test_weight_is_differentiable_and_dense():
    layer = SKLinear(30, 20, 2)
    assert layer.weight.shape == (20, 30)
    layer.weight.sum().backward()
    assert layer.S1.grad is not None


def test_to_linear_copies():
    layer = SKLinear(64, 48, 4).eval()
    linear = layer.to_linear()
    x = torch.randn(5, 64)
    assert_close(linear(x), layer.double()(x.double()), torch.float32)
    assert not linear.training
    assert linear.bias.data_ptr() != layer.bias.data_ptr()
    assert SKLinear(64, 48, 4, bias=False).to_linear().bias is None


@pytest.mark.parametrize(("sketch", "numbers"), [("sparse", [48, 64]), ("signs", [4 * 48, 64 * 4])])
def test_signs_are_drawn_once(monkeypatch, sketch, numbers):
    drawn = []

    def counted(seed, stream, rows, cols, **options):
        drawn.append(len(rows) * len(cols))
        return signs(seed, stream, rows, cols, **options)

    for module in ("base", "linear"):
        monkeypatch.setattr(f"panther.nn.{module}.signs", counted)
    SKLinear(64, 48, 4, sketch=sketch)
    assert drawn == numbers


def test_extra_repr():
    expected = "SKLinear(in_features=64, out_features=48, num_terms=2, low_rank=3, bias=True, seed=5"
    assert repr(SKLinear(64, 48, 2, 3, seed=5)) == f"{expected}, sketch='sparse')"
    assert repr(SKLinear(64, 48, 2, 3, sketch="signs", seed=5)) == f"{expected})"
    assert "fitted" in repr(with_stored_sketches(SKLinear(64, 48, 2, 3)))


def test_sparse_sketches_are_read_while_factors_are_emptied():
    """DeepSpeed's stage 3 holds parameters of no entries between calls."""
    layer = SKLinear(12, 8, 3, seed=1)
    U1, U2 = layer.U1, layer.U2
    layer.S1.data, layer.S2.data = torch.empty(0), torch.empty(0)
    assert torch.equal(layer.U1, U1)
    assert torch.equal(layer.U2, U2)
