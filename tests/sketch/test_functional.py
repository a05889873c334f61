import math

import pytest
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st

from panther.errors import DTypeError, PantherError, ShapeError
from panther.sketch import (
    SRHT,
    Axis,
    DistributionFamily,
    GaussianSketch,
    SignSketch,
    SparseSketch,
    UniformSketch,
    count_skop,
    dense_sketch_operator,
    gaussian_skop,
    scaled_sign_sketch,
    sjlt_skop,
    sketch_tensor,
    sparse_sketch_operator,
    srht,
)

FORMS = {
    "scaled_sign_sketch": scaled_sign_sketch,
    "gaussian": lambda m, n, *rest, **seed: dense_sketch_operator(m, n, DistributionFamily.Gaussian, *rest, **seed),
    "uniform": lambda m, n, *rest, **seed: dense_sketch_operator(m, n, "uniform", *rest, **seed),
    "gaussian_skop": gaussian_skop,
    "count_skop": count_skop,
    "sjlt_skop": lambda m, n, *rest, **seed: sjlt_skop(m, n, 2, *rest, **seed),
    "short": lambda m, n, *rest, **seed: sparse_sketch_operator(m, n, 2, Axis.Short, *rest, **seed),
    "long": lambda m, n, *rest, **seed: sparse_sketch_operator(m, n, 2, Axis.Long, *rest, **seed),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_shape_dtype_device_and_seed(name, dtype):
    form = FORMS[name]
    S = form(4, 9, "cpu", dtype, seed=2)
    assert S.shape == (4, 9)
    assert S.dtype == dtype
    assert torch.equal(S.to_dense(), form(4, 9, torch.device("cpu"), dtype, seed=2).to_dense())
    assert form(9, 4, seed=2).shape == (9, 4)
    assert form(9, 4).dtype == torch.get_default_dtype()
    random_state = torch.get_rng_state()
    form(4, 9, seed=2)
    assert torch.equal(random_state, torch.get_rng_state())
    torch.manual_seed(1)
    first = form(4, 9).to_dense()
    torch.manual_seed(1)
    assert torch.equal(first, form(4, 9).to_dense())
    assert not torch.equal(first, form(4, 9).to_dense())


def test_forms_are_their_operators():
    assert torch.equal(scaled_sign_sketch(4, 6, seed=2), SignSketch(4, 6, seed=2).dense())
    assert torch.equal(gaussian_skop(4, 6, seed=2), GaussianSketch(4, 6, seed=2).dense())
    assert torch.equal(dense_sketch_operator(4, 6, "gaussian", seed=2), GaussianSketch(4, 6, seed=2).dense())
    assert torch.equal(
        dense_sketch_operator(4, 6, DistributionFamily.Uniform, seed=2), UniformSketch(4, 6, seed=2).dense()
    )
    assert torch.equal(sjlt_skop(4, 6, seed=2), SparseSketch(4, 6, 2, seed=2).dense())
    x = torch.randn(3, 2, 13)
    assert torch.allclose(srht(x, 5, seed=2), x @ SRHT(5, 13, seed=2).T)


@pytest.mark.parametrize(("m", "n"), [(5, 12), (12, 5), (6, 6), (1, 4), (4, 1)])
def test_count_and_sjlt_have_their_entries_in_columns(m, n):
    """The peer's sparse sketches had the wrong shape and ours keep columns whatever the shape."""
    S = count_skop(m, n, seed=0)
    assert set(S.abs().sum(dim=0).tolist()) == {1.0}
    assert set(S.unique().tolist()) <= {-1.0, 0.0, 1.0}
    for sparsity in range(1, min(m, 4) + 1):
        S = sjlt_skop(m, n, sparsity, seed=0)
        assert set((S != 0).sum(dim=0).tolist()) == {sparsity}
        assert torch.allclose(S[S != 0].abs(), torch.tensor(1 / math.sqrt(sparsity)))
    with pytest.raises(ShapeError, match=f"must be at most m={m}, the length of a column"):
        sjlt_skop(m, n, m + 1)
    with pytest.raises(ShapeError, match="sparsity=0 must be at least 1"):
        sjlt_skop(m, n, 0)


@pytest.mark.parametrize(("m", "n"), [(5, 12), (12, 5), (6, 6)])
@pytest.mark.parametrize("axis", list(Axis))
def test_sparse_sketch_operator_is_a_coo_tensor_of_the_shape_asked_for(m, n, axis):
    S = sparse_sketch_operator(m, n, 3, axis, "cpu", torch.float64, seed=1)
    assert S.layout == torch.sparse_coo
    assert S.shape == (m, n)
    assert set(S.coalesce().values().tolist()) == {-1.0, 1.0}
    dim = 0 if (axis is Axis.Short) == (m <= n) else 1
    assert set((S.to_dense() != 0).sum(dim=dim).tolist()) == {3}
    assert S._nnz() == 3 * S.shape[1 - dim]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("family", list(DistributionFamily))
def test_sketch_tensor(axis, family):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    y, S = sketch_tensor(x, axis, 3, family, seed=1)
    assert S.shape == (3, x.shape[axis])
    assert torch.equal(S, dense_sketch_operator(3, x.shape[axis], family, dtype=torch.float64, seed=1))
    expected = torch.tensordot(S, x, dims=([1], [axis])).movedim(0, axis)
    assert torch.allclose(y, expected)
    for matrix in (S, S.to_sparse()):
        assert torch.allclose(sketch_tensor(x, axis, 3, matrix), expected)
        assert torch.allclose(sketch_tensor(x, axis, 3, sketch_matrix=matrix), expected)
    operator = SparseSketch(3, x.shape[axis], 2, seed=1)
    assert torch.allclose(
        sketch_tensor(x, axis, 3, operator), sketch_tensor(x, axis, 3, operator.to(dtype=x.dtype).dense())
    )
    tall = SparseSketch(x.shape[axis], 3, 2, seed=1, dtype=x.dtype)
    assert torch.allclose(sketch_tensor(x, axis, 3, tall.T), sketch_tensor(x, axis, 3, tall.dense().T))
    assert torch.autograd.gradcheck(lambda x: sketch_tensor(x, axis, 3, S), x)


def test_sketch_tensor_converts():
    x = torch.randn(4, 5)
    y, S = sketch_tensor(x, 1, 3, DistributionFamily.Uniform, "cpu", torch.float64)
    assert y.dtype == S.dtype == torch.float64
    y, S = sketch_tensor(torch.ones(4, 5, dtype=torch.int64), 1, 3, "uniform", dtype=torch.float32)
    assert y.dtype == torch.float32
    for shape in ((0, 5), (4, 0)):
        assert sketch_tensor(torch.ones(shape), 0, 3, "gaussian")[0].shape == (3, shape[1])


def test_bad_input():
    x = torch.ones(4, 5)
    for call, error, message in (
        (lambda: sketch_tensor(x, 2, 3, "gaussian"), ShapeError, "axis=2 must be between -2 and 1"),
        (lambda: sketch_tensor(x[0, 0], 0, 3, "gaussian"), ShapeError, "input is a scalar, and must have an axis"),
        (lambda: sketch_tensor(x, 0.5, 3, "gaussian"), TypeError, "axis must be an integer, not float"),
        (lambda: sketch_tensor(x, 0, -1, "gaussian"), ShapeError, "new_size=-1 must be at least 0"),
        (lambda: sketch_tensor(x, 0, 3, "cauchy"), ValueError, "distribution='cauchy' must be DistributionFamily"),
        (lambda: sketch_tensor(x, 0, 3), TypeError, "either distribution= or sketch_matrix="),
        (lambda: sketch_tensor(x, 0, 3, x, sketch_matrix=x), TypeError, "was given two"),
        (
            lambda: sketch_tensor(x, 0, 3, x.T),
            ShapeError,
            r"the shape \(new_size, input.shape\[0\]\) = \(3, 4\)",
        ),
        (lambda: sketch_tensor(x, 0, 3, torch.ones(3, 4), seed=1), TypeError, "seed and scale have no meaning"),
        (lambda: sketch_tensor([1.0], 0, 3, "gaussian"), TypeError, "input must be a tensor, not list"),
        (lambda: sketch_tensor(x.int(), 0, 3, "gaussian"), DTypeError, "must be a floating dtype"),
        (lambda: srht(x.int(), 3), DTypeError, "must be a floating dtype"),
        (lambda: srht(torch.tensor(1.0), 3), ShapeError, "input is a scalar, and must have an axis"),
        (lambda: dense_sketch_operator(3, 4, "sign"), ValueError, "must be DistributionFamily"),
        (lambda: gaussian_skop(3, -4), ShapeError, "d=-4 must be at least 0"),
        (lambda: count_skop(3, 4, dtype=torch.int32), DTypeError, "must be a floating dtype"),
        (lambda: srht(x, -3), ShapeError, "m=-3 must be at least 0"),
        (lambda: gaussian_skop(3, 4, torch.float64), TypeError, "pass dtype=torch.float64 by name"),
        (lambda: sketch_tensor(x.to_sparse(), 0, 3, "gaussian"), TypeError, "must be dense"),
        (lambda: sketch_tensor(x, 0, 3, sketch_matrix=[1]), TypeError, "must be a tensor or a sketch, not list"),
        (lambda: sketch_tensor(x, 0, 3, torch.ones(3, 4) * 1j), DTypeError, "sketch_matrix.dtype=torch.complex64 must"),
        (lambda: count_skop(3, 4, seed=-1), ValueError, r"seed=-1 must be in \[0, 2\^63\)"),
    ):
        with pytest.raises(error, match=message):
            call()


sizes = st.one_of(st.integers(-2, 40), st.sampled_from([200, 2.0, None, True, "3"]))
dtypes = st.sampled_from([None, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
seeds = st.one_of(st.none(), st.integers(-2, 2**64))


@fuzz
@given(m=sizes, n=sizes, k=sizes, name=st.sampled_from([*FORMS, "sjlt", "sparse"]), dtype=dtypes, seed=seeds)
def test_fuzz_forms(m, n, k, name, dtype, seed):
    try:
        if name == "sjlt":
            S = sjlt_skop(m, n, k, None, dtype, seed=seed)
        elif name == "sparse":
            S = sparse_sketch_operator(m, n, k, Axis.Long, None, dtype, seed=seed)
        else:
            S = FORMS[name](m, n, None, dtype, seed=seed)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    assert S.shape == (m, n)
    assert S.dtype == (dtype or torch.get_default_dtype())
    assert bool(S.to_dense().isfinite().all())


@fuzz
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 7, 33]), max_size=4),
    axis=st.integers(-5, 5),
    new_size=sizes,
    family=st.sampled_from(["gaussian", "uniform", "sign", None]),
    dtype=dtypes,
    seed=seeds,
    special=st.sampled_from([1.0, math.nan, math.inf]),
    transpose=st.booleans(),
)
def test_fuzz_sketch_tensor(shape, axis, new_size, family, dtype, seed, special, transpose):
    x = torch.full(shape, special).to(dtype)
    x = x.mT if transpose and x.ndim > 1 else x
    try:
        y, S = sketch_tensor(x, axis, new_size, family, seed=seed)
        z = srht(x.movedim(axis, -1), new_size, seed=seed)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    expected = list(x.shape)
    expected[axis] = new_size
    assert list(y.shape) == expected
    assert list(z.movedim(-1, axis).shape) == expected
    assert S.shape == (new_size, x.shape[axis])
    if special == 1.0 or not x.numel():
        assert bool(y.isfinite().all())
        assert bool(z.isfinite().all())


def test_scale_false_gives_the_variance_of_the_peers():
    for family, largest in (("gaussian", None), ("uniform", 3**0.5)):
        S = dense_sketch_operator(40, 5000, family, dtype=torch.float64, scale=False, seed=0)
        assert abs(S.square().mean() - 1) < 0.02  # 6 standard deviations of the mean of 200,000 squares
        assert torch.allclose(S / 40**0.5, dense_sketch_operator(40, 5000, family, dtype=torch.float64, seed=0))
        assert largest is None or S.abs().max() <= largest
        x = torch.randn(5000, dtype=torch.float64)
        y, drawn = sketch_tensor(x, 0, 40, family, scale=False, seed=0)
        assert torch.equal(drawn, S)
        assert torch.allclose(y, S @ x)
    rows = srht(torch.eye(64, dtype=torch.float64), 24, scale=False, seed=0).T
    assert torch.allclose(rows @ rows.T, torch.eye(24, dtype=torch.float64))
    assert torch.allclose(rows.abs(), torch.full((24, 64), 1 / 8, dtype=torch.float64))
    with pytest.raises(TypeError, match="seed and scale have no meaning for a given sketch_matrix"):
        sketch_tensor(x, 0, 40, S, scale=False)


@pytest.mark.parametrize("device", [torch.ones(2), SignSketch(2, 3), 3.5, True, torch.float32])
def test_what_is_not_a_device_is_named(device):
    for call in (
        lambda: gaussian_skop(3, 4, device),
        lambda: sketch_tensor(torch.ones(3), 0, 2, "gaussian", device),
        lambda: SignSketch(3, 4, device=device),
    ):
        with pytest.raises(TypeError, match=r"^device[^:]* must be a") as raised:
            call()
        is_a_sentence(raised.value)
