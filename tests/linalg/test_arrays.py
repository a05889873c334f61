"""Arrays and tables that people have: their memory is shared, nothing is written, and errors name a fix that exists.

pandas 3 returns read-only arrays and columns that are contiguous; a copy of one twice as large as memory is the end.
"""

import numpy as np
import pandas
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
from fuzzing import is_a_sentence

from panther.errors import DTypeError, ShapeError
from panther.linalg import (
    cholesky_qr,
    cqrrpt,
    estimate_error,
    interpolative,
    leverage_scores,
    nystrom,
    orthonormalize,
    qb,
    randomized_eigh,
    randomized_svd,
    rangefinder,
    sketch_lstsq,
)
from panther.linalg.operand import as_dense, as_operand
from panther.sketch import SignSketch, sketch_tensor

A = np.random.default_rng(0).standard_normal((60, 8))


def read_only(array):
    array = array.view()
    array.flags.writeable = False
    return array


SHARED = {
    "C order": lambda path: A.copy(),
    "read-only": lambda path: read_only(A),
    "Fortran order": lambda path: np.asfortranarray(A),
    "read-only, Fortran order": lambda path: read_only(np.asfortranarray(A)),
    "transpose": lambda path: A.T.copy().T,
    "columns of a wider one": lambda path: np.hstack((A, A))[:, :8],
    "every second row": lambda path: np.repeat(A, 2, 0)[::2],
    "bytes": lambda path: np.frombuffer(A.tobytes()).reshape(A.shape),
    "memory map": lambda path: np.memmap(path, mode="r", shape=A.shape, dtype=A.dtype),
    "one row for all": lambda path: np.broadcast_to(A[:1], A.shape),
}
COPIED = {
    "backwards": lambda array: array[::-1, ::-1],
    "another byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "unaligned": lambda array: np.frombuffer(b"x" + array.tobytes(), offset=1).reshape(array.shape),
}


@pytest.mark.parametrize("hold", SHARED)
def test_memory_is_shared(hold, tmp_path):
    A.tofile(tmp_path / "A")
    array = SHARED[hold](tmp_path / "A")
    for tensor in (as_operand(array).dense, as_dense("A", array)):
        assert tensor.data_ptr() == array.__array_interface__["data"][0]
        assert np.array_equal(tensor.numpy(), array)
    original = array.copy()
    randomized_svd(array, 3, seed=0)
    sketch_lstsq(array, read_only(array[:, 0].copy()), seed=0)
    cqrrpt(array, seed=0)
    assert np.array_equal(array, original)
    assert array.flags.writeable == original.flags.writeable or hold not in ("C order", "Fortran order")


@pytest.mark.parametrize("hold", COPIED)
def test_what_torch_cannot_share_is_copied(hold):
    array = COPIED[hold](A)
    assert np.array_equal(as_operand(array).dense.numpy(), array)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_tables_are_matrices(dtype):
    table, expected = pandas.DataFrame(A.astype(dtype)), torch.from_numpy(A.astype(dtype))
    found, wanted = randomized_svd(table, 3, seed=0), randomized_svd(expected, 3, seed=0)
    np.testing.assert_allclose(found.S, wanted.S.numpy(), rtol=1e-5)
    np.testing.assert_allclose(rangefinder(table, 3, seed=0), rangefinder(expected, 3, seed=0).numpy(), atol=1e-5)
    b = pandas.Series(A.sum(1).astype(dtype))
    np.testing.assert_allclose(sketch_lstsq(table, b, seed=0).x, np.ones(8, dtype), atol=1e-5)
    assert cqrrpt(table, seed=0).R.dtype == dtype
    Q, B = qb(table, 8, seed=0)
    assert estimate_error(table, (read_only(Q), read_only(B)), seed=0).relative < 1e-5


@pytest.mark.parametrize("hold", [np.asarray, pandas.DataFrame, scipy.sparse.csr_array])
def test_arrays_give_arrays(hold):
    """scikit-learn, scipy and NumPy take the results; a tensor among the arguments gives tensors."""
    held, X = hold(A), np.random.default_rng(1).standard_normal((8, 2))
    for result in (randomized_svd(held, 8, seed=0), qb(held, 8, seed=0), interpolative(held, 8, seed=0)):
        assert {type(part) for part in result} <= {np.ndarray, int}
        np.testing.assert_allclose(result @ X, A @ X)
        assert estimate_error(held, result, seed=0).relative < 1e-12
        assert isinstance(estimate_error(torch.from_numpy(A), result, seed=0).upper, torch.Tensor)
    if hold is not scipy.sparse.csr_array:
        np.testing.assert_allclose(cqrrpt(held, seed=0) @ X, A @ X)
    square = hold(A.T @ A)
    for driver in (randomized_eigh, nystrom):
        *parts, error = driver(square, 8, seed=0, return_error=True)
        assert {type(part) for part in (*parts, error.upper)} == {np.ndarray}
        np.testing.assert_allclose(driver(A=square, k=8, seed=0) @ X, A.T @ A @ X)
    result, error = sketch_lstsq(held, A[:, 0], seed=0, return_error=True)
    assert type(result.x) is type(error.upper) is np.ndarray
    assert isinstance(sketch_lstsq(held, torch.from_numpy(A[:, 0].copy()), seed=0).x, torch.Tensor)
    assert isinstance(leverage_scores(held, seed=0), np.ndarray)


def test_a_matrix_of_scipy_is_decomposed_as_the_same_tensor():
    """The rules of cost and of accuracy see its entries, as they see those of a tensor."""
    sparse = scipy.sparse.random_array((900, 700), density=0.01, format="csc", rng=0)
    index = torch.from_numpy(np.stack(sparse.tocoo().coords))
    tensor = torch.sparse_coo_tensor(index, torch.from_numpy(sparse.tocoo().data), (900, 700), check_invariants=False)
    ours, theirs = as_operand(sparse), as_operand(tensor)
    assert ours.values.numel() == theirs.values.numel() == sparse.nnz
    torch.testing.assert_close(ours.values.norm(), theirs.values.norm())
    first, second = randomized_svd(sparse, 5, seed=0), randomized_svd(tensor, 5, seed=0)
    np.testing.assert_allclose(first.S, second.S.numpy())
    np.testing.assert_allclose(first.U, second.U.numpy(), atol=1e-12)


def test_entries_that_scipy_stores_twice_are_no_values():
    """Their squares do not add up to the matrix's norm."""
    twice = scipy.sparse.csr_array((np.ones(4), np.array([1, 1, 0, 2]), np.array([0, 2, 3, 4])), shape=(3, 3))
    operand = as_operand(twice)
    assert operand.values is None
    assert operand.matmul(torch.eye(3, dtype=torch.float64))[0, 1] == 2
    assert as_operand(twice.tocoo()).values is None or float(as_operand(twice.tocoo()).values.max()) == 2


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse_bsr, torch.Tensor.to_sparse_bsc])
@pytest.mark.filterwarnings("ignore:Sparse BS[RC] tensor support:UserWarning")
def test_blocked_sparse_tensors_are_matrices(convert):
    dense = torch.randn(40, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense[:10] = 0
    blocked = convert(dense, (10, 5))
    torch.testing.assert_close(randomized_svd(blocked, 3, seed=0).S, randomized_svd(dense, 3, seed=0).S)
    assert rangefinder(blocked, 3, seed=0).shape == (40, 3)
    torch.testing.assert_close(sketch_lstsq(blocked, dense.sum(1), seed=0).x, torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((scipy.sparse.eye_array(9, format="csr", dtype=np.int64), 2), r"A is torch.int64 .* use A.astype\(float\)"),
        ((torch.eye(9, dtype=torch.int64), 2), r"use A.double\(\)"),
        ((np.eye(9, dtype=np.int32), 2), r"array of int32 .* use A.astype\(float\)"),
        ((pandas.DataFrame(np.eye(9, dtype=np.int64)), 2), r"array of int64 .* use A.astype\(float\)"),
        ((pandas.DataFrame({"x": [1.0, 2.0], "y": ["a", "b"]}), 1), "NumPy array of object"),
    ],
)
def test_what_is_not_floating_is_refused_with_a_fix_that_exists(arguments, message):
    with pytest.raises(DTypeError, match=message):
        randomized_svd(*arguments, seed=0)


def test_one_column_of_a_table_is_no_matrix():
    with pytest.raises(ShapeError, match="two dimensions"):
        randomized_svd(pandas.Series([1.0, 2.0]), 1, seed=0)


def test_dtypes_of_least_squares_are_told_as_their_libraries_cast():
    narrow = A.astype(np.float32)
    with pytest.raises(
        DTypeError, match=r"b is torch.float64 and A is computed in torch.float32: use b.astype\('float32'\)"
    ):
        sketch_lstsq(narrow, A[:, 0], seed=0)
    with pytest.raises(DTypeError, match=r"use b.to\(torch.float32\), or cast A"):
        sketch_lstsq(torch.from_numpy(narrow), torch.from_numpy(A[:, 0].copy()), seed=0)
    with pytest.raises(DTypeError, match="array of int64"):
        sketch_lstsq(narrow, np.arange(60), seed=0)


class WithoutDtype:
    def __init__(self, A):
        self.A, self.shape = A, A.shape

    def __matmul__(self, X):
        return self.A @ X


FEW = torch.from_numpy(A).float()
HYBRID = torch.sparse_coo_tensor(torch.arange(60)[None], FEW, FEW.shape, check_invariants=True)
FOREIGN = {  # tensors and operators that no driver takes, and what the answer says
    "meta": (FEW.to("meta"), ValueError, "has a shape and no entries"),
    "nested": (torch.nested.nested_tensor([FEW, FEW[:10]]), TypeError, "is a nested tensor.*pass one matrix at a time"),
    "jagged": (torch.nested.nested_tensor([FEW], layout=torch.jagged), TypeError, "is a nested tensor"),
    "hybrid": (HYBRID, TypeError, r"hybrid sparse tensor, whose entries are vectors: use .*to_dense\(\)"),
    "float8": (
        FEW.to(torch.float8_e4m3fn),
        DTypeError,
        r"float8_e4m3fn and must be real.*16 bits or more: use .*double",
    ),
    "mkldnn": (FEW.to_mkldnn(), TypeError, r"has the layout torch._mkldnn.*use .*to_dense\(\)"),
    "longdouble": (
        scipy.sparse.csr_array(A.astype(np.longdouble)),
        DTypeError,
        r"longdouble|float128.*astype\(float\)",
    ),
    "integers": (scipy.sparse.linalg.aslinearoperator(A.astype(int)), DTypeError, "make it from a matrix of floats"),
    "longdouble operator": (
        scipy.sparse.linalg.aslinearoperator(A.astype(np.longdouble)),
        DTypeError,
        "make it from a matrix of floats",
    ),
    "no dtype": (WithoutDtype(FEW.double()), TypeError, r"WithoutDtype, must have \.dtype.*such as torch.float64"),
}


@pytest.mark.parametrize(("operand", "error", "message"), FOREIGN.values(), ids=FOREIGN)
def test_what_torch_has_no_products_for_is_refused_in_a_sentence(operand, error, message):
    """The words of torch, NumPy and scipy came up, or advice such as A.astype(float) that an operator does not have."""
    for driver in (randomized_svd, qb, rangefinder, lambda M, k: sketch_lstsq(M, FEW[:, 0].contiguous())):
        with pytest.raises(error, match=message):
            driver(operand, 2)
    if isinstance(operand, torch.Tensor):
        for function in (cqrrpt, cholesky_qr, orthonormalize):
            with pytest.raises((TypeError, DTypeError, ValueError)) as raised:
                function(operand)
            is_a_sentence(raised.value)
        if error is TypeError and message.startswith("is a nested"):
            with pytest.raises(error, match=message):
                sketch_tensor(operand, 0, 8, "gaussian")
        if error is TypeError:
            with pytest.raises(error, match=message):
                SignSketch(8, 60, seed=0) @ operand
            with pytest.raises(error, match=message):
                operand @ SignSketch(8, 8, seed=0).T


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_of_functions_are_refused(transform):
    for driver in (
        lambda M: randomized_svd(M, 2).S.sum(),
        lambda M: cqrrpt(M).R.sum(),
        lambda M: cholesky_qr(M)[1].sum(),
    ):
        with pytest.raises(ValueError, match=r"belongs to vmap or another transform.*pass a batch"):
            getattr(torch.func, transform)(driver)(torch.stack((FEW, FEW)) if transform == "vmap" else FEW)


def test_advice_for_complex_operands_of_sketches_keeps_both_parts():
    S, C = SignSketch(8, 60, seed=0, dtype=torch.float64), torch.complex(FEW.double(), 2 * FEW.double())
    with pytest.raises(DTypeError, match=r"sketch A\.real and A\.imag, and combine them"):
        S @ C
    torch.testing.assert_close(torch.complex(S @ C.real, S @ C.imag), S.dense().to(C.dtype) @ C)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_beyond_the_range_of_the_dtype_are_refused(dtype):
    """R and eigenvalues were infinite without a word, where the entries of the matrix were not."""
    largest, tall = torch.finfo(dtype).max, torch.eye(60, 8, dtype=dtype)
    for function, A in (
        (cholesky_qr, tall.fill_(largest / 4)), (lambda A: cqrrpt(A, seed=0), tall), (lambda A: qb(A, 1, seed=0), tall),
        *((lambda A, driver=driver: driver(A, 50, seed=0), torch.full((60, 60), largest / 20, dtype=dtype))
          for driver in (randomized_svd, randomized_eigh, nystrom)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"overflow|beyond the range|out of range"):
            function(A)
