"""InterpolativeLinear: the decomposition, and what the layer computes."""

import math

import pytest
import torch
from covering import all_pairs
from tolerances import assert_close
from torch import nn

import panther as pr
from panther.errors import DTypeError, ShapeError, SketchMismatchError
from panther.nn import InterpolativeLinear
from panther.nn.interpolative import stored_bytes
from panther.nn.sketch_record import plain_state

SIZES = [(64, 48), (48, 64), (50, 50)]  # rows kept, columns kept, columns kept


def orthonormal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64)).Q


def kahan(size, sine):
    """Kahan's matrix: pivoted QR exchanges nothing, and the last column is a combination with coefficients of 1e11."""
    upper = torch.eye(size) - math.sqrt(1 - sine**2) * torch.triu(torch.ones(size, size), 1)
    return (sine ** torch.arange(size))[:, None].double() * upper.double()


def factors(case):
    torch.manual_seed(0)
    if case == "random":
        return torch.randn(90, 20), torch.randn(20, 70)
    if case == "graded":
        values = torch.logspace(0, -6, 20, dtype=torch.float64)
        return orthonormal(90, 20) * values, values[:, None] * orthonormal(70, 20).mT
    if case == "deficient":
        left, right = torch.randn(90, 10), torch.randn(10, 70)
        return torch.cat((left, left), 1), torch.cat((right, right))
    if case == "padded":
        return torch.randn(90, 20) * (torch.arange(20) < 9), torch.randn(20, 70)
    if case == "duplicates":
        return torch.randn(15, 20)[torch.randint(15, (90,))], torch.randn(20, 70)
    if case == "scales":
        return torch.randn(90, 20) * torch.logspace(12, -12, 90)[:, None], torch.randn(20, 70)
    if case == "adversarial":
        return kahan(90, 0.95).mT[:, :89], torch.eye(89, dtype=torch.float64)
    return {
        "zero": (torch.zeros(30, 4), torch.zeros(4, 20)),
        "constant": (torch.ones(30, 4), torch.ones(4, 20)),
        "one": (torch.randn(90, 1), torch.randn(1, 70)),
        "single": (torch.randn(1, 1), torch.randn(1, 1)),
        "square": (torch.randn(20, 20), torch.randn(20, 70)),
        "huge": (torch.randn(30, 4).double() * 1e200, torch.randn(4, 20) * 1e20),
    }[case]


@pytest.mark.parametrize(
    "case",
    ["random", "graded", "deficient", "padded", "duplicates", "scales", "adversarial", "zero", "constant", "one",
     "single", "square", "huge"],
)  # fmt: skip
def test_interpolation_is_exact_and_its_coefficients_are_bounded(case):
    left, right = factors(case)
    right = nn.functional.pad(right, (0, 30))  # A weight with more columns than rows keeps rows.
    layer = InterpolativeLinear(right.shape[1], len(left), len(right), bias=False, dtype=torch.float64)
    layer.set_factors_(left, right)
    assert layer.keeps_rows
    layer.check_record()
    assert not layer.coefficients.numel() or layer.coefficients.abs().max() <= 2 + 1e-9
    exact = left.double() @ right.double()
    scale = exact.abs().max().clamp_min(1e-300)
    assert (layer.weight.detach() / scale - exact / scale).norm() <= 1e-12 * (exact / scale).norm()


@pytest.mark.parametrize(
    ("size", "rank", "bias", "dtype"),
    all_pairs(
        [*SIZES, (1, 1), (1, 31), (31, 1)], [1, 7, 48, 64], [False, True],
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ),
)  # fmt: skip
def test_forward_is_the_product_of_the_factors(size, rank, bias, dtype):
    torch.manual_seed(0)
    rank = min(rank, *size)
    linear = nn.Linear(*size, bias=bias, dtype=dtype)
    layer = InterpolativeLinear.from_linear(linear, rank)
    U, sigma, Vt = torch.linalg.svd(linear.weight.detach().double(), full_matrices=False)
    truncated = (U[:, :rank] * sigma[:rank]) @ Vt[:rank]
    assert (layer.weight.double() - truncated).norm() <= 30 * torch.finfo(dtype).eps * truncated.norm()
    twin = InterpolativeLinear(*size, rank, bias=bias, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())  # which casts
    for batch in (1, 40):
        x = torch.randn(batch, size[0], dtype=dtype)
        exact = torch.nn.functional.linear(x.double(), twin.weight, twin.bias)
        for output in (layer(x), torch.no_grad()(layer)(x)):
            assert output.dtype is dtype
            assert_close(output, exact, dtype)
        assert_close(layer.to_linear()(x), exact, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_the_skeleton_is_a_part_of_the_weight(size):
    torch.manual_seed(0)
    linear = nn.Linear(*size, dtype=torch.float64)
    left, right = torch.randn(size[1], 9).double(), torch.randn(9, size[0]).double()
    linear.weight.data = left @ right
    layer = InterpolativeLinear(*size, 9, dtype=torch.float64).set_factors_(left, right)
    if layer.keeps_rows:
        kept = linear.weight[layer.order < 9]
        found = layer.skeleton[layer.order[layer.order < 9].long()]
    else:
        kept, found = linear.weight[:, layer.order[:9]], layer.skeleton
    torch.testing.assert_close(found, kept)
    torch.testing.assert_close(layer.weight, linear.weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [*SIZES, (1, 1), (100, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_at_rest(size, dtype):
    for rank in {1, min(2, *size), min(size)}:
        layer = InterpolativeLinear(*size, rank, bias=False, dtype=dtype)
        assert sum(tensor.nbytes for tensor in plain_state(layer).values()) == stored_bytes(*size, rank, dtype)
        assert sum(parameter.numel() for parameter in layer.parameters()) == rank * (sum(size) - rank)


@pytest.mark.parametrize("size", [(400, 300), (300, 400)])
def test_a_new_layer_has_the_variance_of_a_dense_one(size):
    torch.manual_seed(0)
    weight = InterpolativeLinear(*size, 100).weight
    assert weight.std().item() == pytest.approx((1 / (3 * size[0])) ** 0.5, rel=0.25)
    assert (weight @ torch.randn(size[0])).std().item() == pytest.approx(3**-0.5, rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 3, 1), {}, ShapeError, "in_features=0 must be at least 1"),
        ((3, 3, 0), {}, ShapeError, "low_rank=0 must be at least 1"),
        ((5, 3, 4), {}, ShapeError, "low_rank=4 must be at most 3, the smaller of in_features and out_features"),
        ((3, 3, 1.0), {}, TypeError, "low_rank must be an integer"),
        ((3, 3, 1), {"bias": "no"}, TypeError, "bias must be True or False"),
        ((3, 3, 1), {"dtype": torch.int8}, DTypeError, "must be a floating dtype"),
        ((3, 3, 1), {"device": 1.5}, TypeError, "device must be a torch.device"),
    ],
)
def test_bad_arguments(arguments, options, error, match):
    with pytest.raises(error, match=match):
        InterpolativeLinear(*arguments, **options)


def test_bad_weights_and_factors_change_nothing():
    layer = InterpolativeLinear(64, 48, 3)
    first_state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    left, right = torch.randn(48, 3), torch.randn(3, 64)
    for arguments, error, match in (
        ((left[1:], right), ShapeError, r"left must have shape \(48, 3\) in this layer, not \(47, 3\)"),
        ((left, right[:2]), ShapeError, r"right must have shape \(3, 64\)"),
        ((left, right / 0), ValueError, "right has entries that are NaN or infinite"),
        (([1], right), TypeError, "left must be a tensor, not list"),
    ):
        with pytest.raises(error, match=match):
            layer.set_factors_(*arguments)
    assert all(torch.equal(tensor, first_state[name]) for name, tensor in layer.state_dict().items())
    with pytest.raises(TypeError, match=r"takes an nn\.Linear, not Conv1d"):
        InterpolativeLinear.from_linear(nn.Conv1d(3, 3, 1), 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("assign", [False, True])
def test_an_order_that_is_no_permutation_is_refused(size, assign, tmp_path):
    layer = InterpolativeLinear(*size, 9)
    first_state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for order in (torch.full_like(layer.order, 3), layer.order + 1):
        with pytest.raises(RuntimeError, match=f"order must hold each number from 0 to {len(order) - 1} once"):
            layer.load_state_dict(first_state | {"order": order}, assign=assign)
    with pytest.raises(RuntimeError, match="size mismatch for skeleton"):
        layer.load_state_dict(InterpolativeLinear(*size, 8).state_dict(), strict=False, assign=assign)
    assert all(torch.equal(tensor, first_state[name]) for name, tensor in layer.state_dict().items())
    layer.order[3] = layer.order[4]
    with pytest.raises(SketchMismatchError, match=f"order must hold each number from 0 to {len(order) - 1} once"):
        pr.save_compressed(layer, tmp_path)
    InterpolativeLinear(*size, 9, device="meta").to_empty(device="cpu").check_record()


def test_extra_repr():
    layer = InterpolativeLinear(64, 48, 9)
    assert repr(layer) == "InterpolativeLinear(in_features=64, out_features=48, low_rank=9, bias=True)"


@pytest.mark.parametrize("convert", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_input_gives_what_a_dense_one_gives(size, convert):
    torch.manual_seed(0)
    layer, x = InterpolativeLinear(*size, 9), torch.randn(7, size[0]).relu()
    torch.testing.assert_close(layer(getattr(x, convert)()), layer(x), rtol=1e-4, atol=1e-5)
