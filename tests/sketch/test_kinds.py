"""What is particular to one kind of sketch: its golden values, its distribution, its sparsity."""

import math

import pytest
import torch
from panther.kernels import hadamard_transform, philox_4x32
from tolerances import assert_close

from panther.errors import ShapeError
from panther.sketch import SRHT, Axis, GaussianSketch, SignSketch, SparseSketch, UniformSketch

SEED = 2**63 - 1
COMMON = {"seed": SEED, "stream": 1, "scale": False, "dtype": torch.float64}


def words_of(row: int, count: int, kind: int, seed: int = SEED, stream: int = 1) -> list[int]:
    """The first words of a row of a stream of version 1, one Philox call at a time."""
    words: list[int] = []
    for call in range(-(-count // 4)):
        counter = tuple(torch.tensor(c) for c in (row, call, stream, (1 << 16) + kind))
        words += [int(word) for word in philox_4x32(counter, seed)]
    return words[:count]


def test_golden_gaussians():
    row = GaussianSketch(2, 9, **COMMON).dense()[1]
    golden = [0.221846, 0.312670, -1.077214, -0.738304, -0.055913, -0.770056, -0.193002, 0.246905, 1.426936]
    assert torch.allclose(row, torch.tensor(golden, dtype=torch.float64), atol=5e-7, rtol=0)


def test_gaussians_are_those_of_box_and_muller():
    S = GaussianSketch(3, 10, **COMMON).dense()
    words = words_of(2, 10, kind=2)
    for j in range(0, 10, 2):
        radius = math.sqrt(-2 * math.log((words[j] + 0.5) / 2**32))
        angle = 2 * math.pi * (words[j + 1] + 0.5) / 2**32
        assert math.isclose(S[2, j], radius * math.cos(angle), rel_tol=1e-14)
        assert math.isclose(S[2, j + 1], radius * math.sin(angle), rel_tol=1e-14)


def test_golden_uniforms_are_exact():
    row = UniformSketch(2, 9, **COMMON).dense()[1]
    assert row[:3].tolist() == [
        float.fromhex("-0x1.fe49dcc4p-2"),
        float.fromhex("0x1.8c16a714p-2"),
        float.fromhex("0x1.a52ece98p-3"),
    ]
    assert row.tolist() == [(2 * w + 1 - 2**32) / 2**32 for w in words_of(1, 9, kind=3)]


def test_golden_sparse_sketches():
    S = SparseSketch(4, 9, 2, Axis.Long, **COMMON).dense().int().tolist()
    assert S[0] == [1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert S[1] == [0, 0, 0, 0, 1, 0, 0, 0, -1]
    assert S[2] == [-1, 0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(("d", "m", "k", "axis"), [(7, 20, 3, "short"), (20, 7, 3, "long"), (7, 20, 5, "long")])
def test_sparse_entries_are_those_documented(d, m, k, axis):
    S = SparseSketch(d, m, k, axis, **COMMON).dense()
    vectors = S.T if (axis == "short") == (d <= m) else S
    n = vectors.shape[1]
    for v, vector in enumerate(vectors):
        shift, *rest = words_of(v, k + 1, kind=4)
        expected = torch.zeros(n, dtype=torch.float64)
        for i, word in enumerate(rest):
            low, high = i * n // k, (i + 1) * n // k
            position = (low + ((word // 2) * (high - low) >> 31) + (shift * n >> 32)) % n
            expected[position] = -1 if word % 2 else 1
        assert torch.equal(vector, expected)


def test_golden_srht():
    S = SRHT(4, 13, **COMMON)
    assert S._kept_rows().tolist() == [1, 2, 9, 12]
    assert S.dense()[0].int().tolist() == [1, -1, -1, 1, -1, -1, 1, -1, -1, 1, 1, -1, -1]


def test_moments():
    """Mean, variance and fourth moment of 2^20 entries within 6 deviations; neighbours uncorrelated."""
    n = 1 << 20
    for kind, fourth in ((GaussianSketch, 3.0), (UniformSketch, 9 / 5), (SignSketch, 1.0)):
        x = kind(1, n, seed=3, dtype=torch.float64).dense()[0]
        assert abs(x.mean()) < 6 / math.sqrt(n)
        assert abs(x.square().mean() - 1) < 6 * math.sqrt((fourth - 1) / n) + 1e-12
        assert abs(x.pow(4).mean() - fourth) < 6 * math.sqrt(100 / n)
        assert abs((x[1:] * x[:-1]).mean()) < 6 / math.sqrt(n)
    x = GaussianSketch(1, n, seed=3, dtype=torch.float64).dense()[0]
    for t in (0.5, 1.0, 2.0, 3.0):
        p = math.erfc(t / math.sqrt(2))
        assert abs((x.abs() > t).double().mean() - p) < 6 * math.sqrt(p / n)


@pytest.mark.parametrize(("d", "m"), [(6, 40), (40, 6), (8, 8), (1, 5), (5, 1)])
@pytest.mark.parametrize("axis", list(Axis))
def test_vectors_have_vec_nnz_entries(d, m, axis):
    by_column = (axis is Axis.Short) == (d <= m)
    length = d if by_column else m
    for k in range(1, min(length, 5) + 1):
        S = SparseSketch(d, m, k, axis, seed=k, scale=False)
        nonzero = S.dense() != 0
        assert set(nonzero.sum(dim=0 if by_column else 1).tolist()) == {k}
        assert S.nnz == int(nonzero.sum())
        assert torch.equal(S.to_sparse().to_dense(), S.dense())
        assert S.to_sparse().is_coalesced()
        assert set(S.to_sparse().values().abs().tolist()) == {1.0}
    full = SparseSketch(d, m, length, axis, seed=0)
    assert int((full.dense() == 0).sum()) == 0
    with pytest.raises(ShapeError, match=f"must be at most {length}, the length of the"):
        SparseSketch(d, m, length + 1, axis)


@pytest.mark.parametrize("vec_nnz", [1, 4])
def test_products_in_parts(vec_nnz):
    """Beyond 4096 columns a product goes over groups of them."""
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.bfloat16):
        S = SparseSketch(50, 9000, vec_nnz, seed=0, dtype=dtype)
        A = torch.randn(2, 9000, 3).to(dtype)
        assert len(S._parts()) == 3
        assert_close(S @ A, S.dense().double() @ A.double(), dtype)
    assert len(SparseSketch(8000, 9000, seed=0)._parts()) == 2


def test_positions_and_signs_are_uniform():
    """Counts of 40,000 draws over 7 positions, which 3 does not divide: chi-square of 6 degrees below 33 (p = 1e-5)."""
    S = SparseSketch(7, 40_000, 3, seed=0, scale=False).dense()
    expected = 3 * 40_000 / 7
    assert ((S != 0).sum(dim=1) - expected).square().sum() / expected < 33
    assert abs(S.sum()) < 6 * math.sqrt(3 * 40_000)


def test_bad_sparse_sketches():
    with pytest.raises(ShapeError, match="vec_nnz=0 must be at least 1"):
        SparseSketch(4, 5, 0)
    with pytest.raises(ShapeError, match="vec_nnz=-1 must be at least 1"):
        SparseSketch(4, 5, -1)
    with pytest.raises(TypeError, match="vec_nnz must be an integer, not float"):
        SparseSketch(4, 5, 2.0)
    with pytest.raises(ValueError, match="axis='wide' must be 'short' or 'long'"):
        SparseSketch(4, 5, 2, "wide")


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (32, 1), (512, 1), (64, 7), (3, 128, 2), (2, 5, 1024, 1), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hadamard_transform_equals_the_matrix(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < shape[-2]:
        H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), H)
    y = hadamard_transform(x.to(dtype))
    assert y.shape == x.shape
    assert torch.allclose(y.double(), H @ x, atol=1e-4 if dtype == torch.float32 else 1e-11)
    strided = torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.float64).mT
    assert torch.allclose(hadamard_transform(strided), H @ strided)


def test_hadamard_transform_refuses_different_lengths():
    for n in (0, 3, 12):
        with pytest.raises(ValueError, match=f"the length {n} of a Hadamard transform must be a power of two"):
            hadamard_transform(torch.ones(n, 1))


@pytest.mark.parametrize("m", [1, 5, 64, 1000])
def test_a_full_srht_is_an_isometry(m):
    N = 1 << (m - 1).bit_length()
    x = torch.randn(3, m, 2, dtype=torch.float64)
    S = SRHT(N, m, seed=4, dtype=torch.float64)
    assert torch.allclose((S @ x).norm(dim=-2), x.norm(dim=-2))
    assert torch.allclose(S.T @ (S @ x), x)


def test_srht_rows_are_distinct_and_uniform():
    counts = torch.zeros(16)
    for seed in range(2000):
        rows = SRHT(5, 16, seed=seed)._kept_rows()
        assert len(rows.unique()) == 5
        counts[rows] += 1
    assert ((counts - 625).square() / 625).sum() < 50  # 15 degrees of freedom: p = 1e-5


def test_half_precision_srht_is_computed_in_float32():
    """Near float16's largest number, where partial sums of the transform leave its range."""
    S = SRHT(64, 4096, seed=0, dtype=torch.float16)
    x = (60000 * S.dense()[5].sign()).half()
    assert (torch.ones(4096, dtype=torch.float16) * 60000).sum().isinf()
    y = S @ torch.stack((x, -x / 1000), 1)
    assert y[5, 0].isinf()  # 8 * 60000 * 64 / 8 is beyond float16, and the rest is not
    exact = S.dense().double() @ x.double()
    others = torch.arange(64) != 5
    assert torch.allclose(y[others, 0].double(), exact[others], rtol=1e-3, atol=1e-3 * 60000)
    assert bool(y[others].isfinite().all())
