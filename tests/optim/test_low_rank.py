"""Updates of low rank: singular directions, error feedback, deficient gradients, and bad ranks."""

import math

import pytest
import torch
from torch import nn

from panther.errors import ShapeError
from panther.optim import MuonAdamW

LR, SCALE = 0.5, 0.2  # the rate, and the root mean square of the entries of an update


def step_of(p, optimizer, gradient):
    """The change of a parameter, in units in which orthonormal columns have norm 1."""
    first_value = p.detach().clone()
    p.grad = gradient.clone()
    optimizer.step()
    return (first_value - p.detach()) / (LR * SCALE * math.sqrt(max(p.shape[-2:])))


def optimizer_of(p, rank, momentum=0.95):
    return MuonAdamW([p], lr=LR, weight_decay=0.0, orthogonalize=True, rank=rank, momentum=momentum)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (3, 12, 7), (8, 8)])
def test_repeated_gradients_give_the_leading_singular_directions(shape):
    """Power iteration with mu = 0: the momentum is what the last update left out, plus the gradient."""
    rank = 3
    M = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    S = torch.logspace(0, -3, S.shape[-1], dtype=torch.float64)
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = optimizer_of(p, rank, momentum=0.0)
    for _ in range(40):
        # Without the left-out part of earlier steps, which would turn the leading directions.
        if optimizer.state:
            optimizer.state[p]["momentum_buffer"].zero_()
        update = step_of(p, optimizer, U * S @ Vh)
    best = U[..., :rank] @ Vh[..., :rank, :]
    torch.testing.assert_close(update, best, rtol=0, atol=1e-6)
    values = torch.linalg.svdvals(update)
    torch.testing.assert_close(values[..., :rank], torch.ones_like(values[..., :rank]), rtol=0, atol=1e-6)
    assert values[..., rank:].max() < 1e-12


def test_the_momentum_keeps_what_an_update_leaves_out():
    M = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = nn.Parameter(torch.zeros(12, 8, dtype=torch.float64))
    optimizer = optimizer_of(p, 2, momentum=0.9)
    update = step_of(p, optimizer, M)
    P = torch.linalg.qr(update @ torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], M - 0.1 * P @ (P.T @ M))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_deficient_gradients_change_only_the_directions_that_exist(dtype):
    p = nn.Parameter(torch.zeros(9, 6, dtype=dtype))
    optimizer = optimizer_of(p, 4)
    assert not step_of(p, optimizer, torch.zeros(9, 6, dtype=dtype)).any()
    update = step_of(p, optimizer, torch.ones(9, 6, dtype=dtype)).double()
    torch.testing.assert_close(update, torch.full_like(update, 1 / math.sqrt(54)), rtol=0, atol=4e-3)
    assert optimizer.state[p]["basis"].dtype is dtype
    assert optimizer.state[p]["basis"].isfinite().all()


def test_the_full_rank_has_all_directions():
    M = torch.randn(10, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = nn.Parameter(torch.zeros(10, 6, dtype=torch.float64))
    values = torch.linalg.svdvals(step_of(p, optimizer_of(p, 6), M))
    assert values.min() > 0.05


@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (0, ShapeError, "rank=0 must be at least 1"),
        (5, ShapeError, r"rank=5 must be at most the sides of every matrix, and one has the shape \(4, 6\)"),
        (2.5, TypeError, "rank must be an integer"),
    ],
)
def test_ranks_that_cannot_be(rank, error, message):
    with pytest.raises(error, match=message):
        MuonAdamW([nn.Parameter(torch.zeros(4, 6))], orthogonalize=True, rank=rank)
