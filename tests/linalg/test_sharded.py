"""Matrices sharded by rows: every driver, equal on 1, 2 and 4 ranks, near the best error, and with few bytes sent."""

import pytest
import torch
import torch.distributed as dist
from matrices import (
    MatrixFree,
    assert_eigenpairs,
    assert_orthonormal,
    assert_truncated_svd,
    gaussian,
    symmetric,
    with_spectrum,
)
from ranks import on_ranks
from tolerances import factorisation
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import panther as pr
from panther.errors import DistributedError, ShapeError
from panther.linalg import RowSharded

pytestmark = pytest.mark.distributed


def rows_of_rank(A):
    """Uneven shares, of which the second rank has none."""
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return A
    sizes = [len(A) // n + 3 * (rank % 2) for rank in range(n)]
    sizes[1] = 0
    sizes[0] += len(A) - sum(sizes)
    return A.split(sizes)[rank]


def results(A, hold=lambda rows: rows, b=None):
    """Results of all drivers on the group; sharded parts whole."""

    def whole(part):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        return torch.cat(parts)

    sharded = RowSharded(hold(rows_of_rank(A)))
    assert sharded.shape == A.shape
    svd = pr.linalg.randomized_svd(sharded, 6, seed=0, return_error=True)
    short = pr.linalg.randomized_svd(sharded, 20, 0.3, seed=0)
    qb = pr.linalg.qb(sharded, 12, block_size=5, seed=0)
    adaptive = pr.linalg.qb(sharded, tol=0.3, block_size=4, seed=0, return_error=True)
    tight = pr.linalg.qb(sharded, tol=1e-9 if A.dtype == torch.float64 else 1e-5, seed=0)
    Q = pr.linalg.rangefinder(sharded, 7, seed=0, return_error=True)
    out = {
        "svd": (whole(svd[0]), *svd[1:]),
        "svd to a tolerance": (whole(short.U), short.S, short.V),
        "qb": (whole(qb.Q), qb.B),
        "qb to a tolerance": (whole(adaptive[0]), *adaptive[1:]),
        "qb to a tight tolerance": (whole(tight.Q), tight.B),
        "rangefinder": (whole(Q[0]), Q[1]),
    }
    if b is not None:
        M = RowSharded(rows_of_rank(A))
        qr = pr.linalg.cqrrpt(M, seed=0, return_error=True)
        out["cqrrpt"] = (whole(qr[0]), *qr[1:])
        b = rows_of_rank(b)
        out["lstsq"] = pr.linalg.sketch_lstsq(M, b, seed=0)
        out["lstsq, columns"] = pr.linalg.sketch_lstsq(M, torch.stack((b, 2 * b), 1), ridge=0.5, seed=0)
    return out


def numbers(results):
    """The parts of results that do not depend on the signs and rotations of vectors."""
    U, S, V, error = results["svd"]
    out = [U, S, V, error.frobenius, error.upper, *results["svd to a tolerance"]]
    out += [results["qb"][0], results["qb"][1], results["rangefinder"][0]]
    for name in ("qb to a tolerance", "qb to a tight tolerance"):
        Q, B = results[name][:2]
        out += [torch.tensor(Q.shape), Q @ B]
    for name in ("cqrrpt", "lstsq", "lstsq, columns"):
        out += [part for part in results.get(name, ()) if isinstance(part, torch.Tensor)]
    return out


@pytest.mark.parametrize(("m", "n"), [(230, 60), (60, 150), (40, 40)])
def test_one_two_and_four_ranks_are_equal_in_float64(m, n):
    A = with_spectrum(m, n, 0.85 ** torch.arange(float(min(m, n))))
    b = gaussian(m) if m > n else None
    expected = numbers(on_ranks(results, 1, A, lambda rows: rows, b)[0])
    for ranks in (2, 4):
        for result in on_ranks(results, ranks, A, lambda rows: rows, b):
            for part, like in zip(numbers(result), expected, strict=True):
                assert part.shape == like.shape
                assert torch.allclose(part.double(), like.double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_those_of_the_whole_matrix(dtype):
    for hold in (lambda rows: rows, torch.Tensor.to_sparse, MatrixFree):
        A = with_spectrum(150, 70, 0.8 ** torch.arange(70.0), dtype)
        result = on_ranks(results, 2, A, hold)[1]
        U, S, V, error = result["svd"]
        assert_truncated_svd(A, (U, S, V), 6)
        exact = torch.linalg.norm(A - U @ torch.diag(S) @ V.mT)
        assert exact / 2 < error.frobenius < 2 * exact < 2 * error.upper
        U, S, V = result["svd to a tolerance"]
        assert 0.2 * A.norm() < torch.linalg.norm(A - U @ torch.diag(S) @ V.mT) < 0.33 * A.norm()
        tight = 1.6e-9 if dtype == torch.float64 else 1.6e-5
        for name, bound in (("qb to a tolerance", 0.33), ("qb to a tight tolerance", tight)):
            Q, B = result[name][:2]
            assert_orthonormal(Q)
            assert torch.linalg.norm(A - Q @ B) <= bound * A.norm()
        assert_orthonormal(result["rangefinder"][0])


def test_rank_deficient_and_badly_conditioned_matrices():
    b = gaussian(120)
    for sigma in (torch.logspace(0, -12, 20), torch.eye(20)[0], torch.zeros(20), torch.ones(3)):
        A = with_spectrum(120, 20, sigma.double())
        result = on_ranks(results, 2, A, lambda rows: rows, b)[0]
        Q, R, P, _ = result["cqrrpt"]
        assert_orthonormal(Q)
        assert torch.linalg.norm(A[:, P] - Q @ R) <= factorisation(A.dtype) * max(1.0, float(A.norm()))
        reference = pr.linalg.sketch_lstsq(A, b, seed=0)
        # A backward error of eps changes the residual by up to |A| |x| eps.
        rounding = 20 * torch.finfo(A.dtype).eps * (b.norm() + A.norm() * reference.x.norm())
        assert (result["lstsq"][1] - reference.residual_norm).abs() <= rounding
        U, S = result["svd"][:2]
        assert_orthonormal(U)
        assert torch.allclose(S, torch.linalg.svdvals(A)[:6], atol=1e-12)
        for name in ("qb", "qb to a tight tolerance"):
            Q, B = result[name][:2]
            assert_orthonormal(Q)
            assert torch.linalg.norm(A - Q @ B) <= 1e-8 * A.norm() or name == "qb"


def test_symmetric_matrices():
    A = symmetric(130, 0.8 ** torch.arange(130.0))

    def work(A):
        sharded = RowSharded(rows_of_rank(A))
        return (
            pr.linalg.randomized_eigh(sharded, 8, seed=0, return_error=True),
            pr.linalg.nystrom(sharded, 8, seed=0, return_error=True),
        )

    (L, V, error), (U, L2, _) = on_ranks(work, 1, A)[0]
    assert_eigenpairs(A, L, V, 8, 1.15)
    assert_eigenpairs(A, L2, U, 8, 1.15)
    exact = torch.linalg.norm(A - V @ torch.diag(L) @ V.mT)
    assert exact / 2 < error.frobenius < 2 * exact
    for ranks in (2, 4):
        for eigh, nystrom in on_ranks(work, ranks, A):
            assert all(torch.allclose(a, b) for a, b in zip(eigh[:2], (L, V), strict=True))
            assert all(torch.allclose(a, b) for a, b in zip(nystrom[:2], (U, L2), strict=True))
            assert torch.allclose(eigh[2].frobenius, error.frobenius)


def test_systems_traces_and_determinants():
    A = symmetric(61, 1 + 4 * 0.8 ** torch.arange(61.0))
    b = gaussian(61, 2)

    def work(A, b):
        sharded = RowSharded(rows_of_rank(A))
        M = pr.linalg.nystrom_preconditioner(sharded, 10, 0.1, seed=0)
        return (
            *pr.linalg.pcg(sharded, b, M, shift=0.1)[:2],
            *pr.linalg.trace(sharded, 20, seed=0),
            *pr.linalg.diag(sharded, 20, seed=0),
            *pr.linalg.diag(sharded, 61),
            *pr.linalg.logdet(sharded, 4, seed=0),
        )

    expected = on_ranks(work, 1, A, b)[0]
    assert torch.allclose(A @ expected[0] + 0.1 * expected[0], b, atol=1e-5)
    assert torch.allclose(expected[6], A.diagonal())
    for result in on_ranks(work, 2, A, b):
        assert all(torch.allclose(part, like) for part, like in zip(result, expected, strict=True))


def test_dtensors_are_accepted_where_they_are_sharded_by_rows():
    A = with_spectrum(101, 30, 0.8 ** torch.arange(30.0))

    def work(A):
        mesh = pr.distributed.make_mesh(dp=2)["dp"]
        rows = distribute_tensor(A, mesh, [Shard(0)])
        expected = RowSharded(rows.to_local())
        for call in (
            lambda A: pr.linalg.randomized_svd(A, 3, seed=0),
            lambda A: pr.linalg.qb(A, 3, seed=0),
            lambda A: pr.linalg.cqrrpt(A, seed=0),
            lambda A: pr.linalg.sketch_lstsq(A, rows.to_local()[:, 0], seed=0),
        ):
            assert all(torch.equal(a, b) for a, b in zip(call(rows)[:2], call(expected)[:2], strict=True))
        for placement in (Replicate(), Shard(1)):
            with pytest.raises(ShapeError, match="a DTensor must be sharded by rows over a mesh of one dimension"):
                pr.linalg.randomized_svd(distribute_tensor(A, mesh, [placement]), 3)

    on_ranks(work, 2, A)


def test_what_is_sent_does_not_grow_with_the_rows():
    def work(m):
        n, k, traffic = 40, 6, {}
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randn(m, n, generator=generator, dtype=torch.float64)
        A = RowSharded(rows)
        for name, call in {
            "svd": lambda: pr.linalg.randomized_svd(A, k, seed=0),
            "qb": lambda: pr.linalg.qb(A, k, seed=0),
            "cqrrpt": lambda: pr.linalg.cqrrpt(A, seed=0),
            "lstsq": lambda: pr.linalg.sketch_lstsq(A, rows[:, 0], seed=0),
        }.items():
            with pr.distributed.CommunicationCounter() as counter:
                call()
            traffic[name] = counter.bytes
        return traffic

    small, large = (on_ranks(work, 2, m)[0] for m in (60, 6000))
    assert small == large
    assert all(sent < 300_000 for sent in large.values())


def test_without_a_seed_all_ranks_use_that_of_the_first():
    A = with_spectrum(80, 60, torch.arange(1.0, 61) ** -0.5)

    def work(A):
        torch.manual_seed(dist.get_rank())
        sharded = RowSharded(rows_of_rank(A))
        _, S, V, error = pr.linalg.randomized_svd(sharded, 4, n_iter=0, return_error=True)
        scores = pr.linalg.leverage_scores(sharded, 4).sum()
        R, P, qr_error = pr.linalg.cqrrpt(sharded, return_error=True)[1:]
        return S, V, error.frobenius, pr.linalg.qb(sharded, 4).B, 0 * scores, R, P, qr_error.frobenius

    first, second = on_ranks(work, 2, A)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


DRIVERS = {
    "randomized_svd": lambda A, b, k: pr.linalg.randomized_svd(A, k),
    "qb": lambda A, b, k: pr.linalg.qb(A, k),
    "rangefinder": lambda A, b, k: pr.linalg.rangefinder(A, k),
    "cqrrpt": lambda A, b, k: pr.linalg.cqrrpt(A, rtol=k / 10),
    "sketch_lstsq": lambda A, b, k: pr.linalg.sketch_lstsq(A, b, ridge=k),
    "randomized_eigh": lambda A, b, k: pr.linalg.randomized_eigh(A, k),
    "nystrom": lambda A, b, k: pr.linalg.nystrom(A, k),
    "leverage_scores": lambda A, b, k: pr.linalg.leverage_scores(A, k),
    "estimate_error": lambda A, b, k: pr.linalg.estimate_error(A, (torch.eye(4), torch.eye(4)), probes=k),
}


class Failing(MatrixFree):
    """A matrix whose products fail on the second rank."""

    def __matmul__(self, X):
        if dist.get_rank() == 1:
            raise RuntimeError("the disk is full")
        return super().__matmul__(X)


def message(call, *kinds):
    with pytest.raises(kinds) as error:
        call()
    return type(error.value).__name__, str(error.value)


def errors():
    rank, ones = dist.get_rank(), torch.ones(2, 4)
    out = {
        "columns": message(lambda: RowSharded(torch.ones(2, 4 + rank)), DistributedError),
        "rows": message(lambda: RowSharded(ones[0] if rank else ones), ShapeError),
        "interpolative": message(lambda: pr.linalg.interpolative(RowSharded(ones), 2), ShapeError),
    }
    A, nan = RowSharded(ones), RowSharded(torch.full((2, 4), torch.nan) if rank else ones)
    failing = RowSharded(Failing(ones))
    for name, driver in DRIVERS.items():
        out[name, "rank"] = message(lambda d=driver: d(A, torch.ones(2), 2 + rank), DistributedError)
        out[name, "nan"] = message(lambda d=driver: d(nan, torch.ones(2), 2), ValueError)
        if name not in ("cqrrpt", "sketch_lstsq"):
            out[name, "fails"] = message(lambda d=driver: d(failing, torch.ones(2), 2), DistributedError)
    for name, b in {
        "rows": torch.ones(2 + rank),
        "columns": torch.ones(2, 1 + rank),
        "dimensions": torch.ones((2, 1)[: 1 + rank]),
        "dtype": torch.ones(2, dtype=(torch.float32, torch.float64)[rank]),
        "kind": "b" if rank else torch.ones(2),
    }.items():
        out["b", name] = message(lambda b=b: DRIVERS["sketch_lstsq"](A, b, 0.0), ShapeError, DistributedError)
    assert pr.linalg.randomized_svd(A, 1, seed=0).S.shape == (1,)  # No rank waits in a collective of an error.
    return out


def test_an_error_of_one_rank_is_raised_on_every_rank():
    first, second = on_ranks(errors, 2)
    assert first == second
    for (_, case), (_, text) in ((key, first[key]) for key in first if isinstance(key, tuple)):
        assert {
            "rank": "calls must be equal on all ranks",
            "nan": "A must be finite and has NaN: use torch.nan_to_num(A)",
            "fails": "rank 1: the disk is full",
            "rows": "rank 1: b, of shape (3,), must have the shape (2,)",
        }.get(case, "calls must be equal on all ranks, and are not: rank 0: sketch_lstsq(A") in text
    assert "rank 0: 4 columns of torch.float32; rank 1: 5 columns" in first["columns"][1]
    assert "rank 1: local_rows, of shape (4,), must have two dimensions" in first["rows"][1]


def test_one_process_needs_no_group():
    A = gaussian(90, 30)
    U, S, V = pr.linalg.randomized_svd(RowSharded(A), 5, n_iter=12, seed=0)
    assert_truncated_svd(A, (U, S, V), 5)
    for empty in (torch.empty(0, 4), torch.empty(0, 0), torch.empty(3, 0)):
        U, S, V = pr.linalg.randomized_svd(RowSharded(empty), 0, seed=0)
        assert (U.shape, S.shape, V.shape) == ((len(empty), 0), (0,), (empty.shape[1], 0))
        assert pr.linalg.cqrrpt(RowSharded(empty), seed=0).Q.shape == (len(empty), 0)
    with pytest.raises(TypeError, match="must be a dense tensor"):
        pr.linalg.cqrrpt(RowSharded(A.to_sparse()))
