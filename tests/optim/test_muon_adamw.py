"""Orthogonalised updates: against singular vectors, torch's AdamW and torch's Muon; groups; a run of the Trainer."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther.errors import CheckpointError, DTypeError, ShapeError
from panther.optim import MuonAdamW, orthogonalize, param_groups


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        pr.nn.SKLinear(96, 64, 4, seed=0), nn.ReLU(), pr.nn.SKLinear(64, 96, 4, seed=1), nn.Linear(96, 5)
    )


def take_steps(model, optimizer, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(48, 6), (6, 48), (16, 16), (2, 3, 40, 5), (7, 1), (1, 1)])
def test_orthogonalised_matrices_keep_their_singular_vectors(shape):
    M = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    P, values, Qt = torch.linalg.svd(M, full_matrices=False)
    found = P.mT @ orthogonalize(M) @ Qt.mT
    new = found.diagonal(dim1=-2, dim2=-1)
    assert (found - torch.diag_embed(new)).abs().max() < 1e-10
    big = values > 0.02 * torch.linalg.matrix_norm(M)[..., None]
    assert ((new > 0.6) & (new < 1.3))[big].all()
    assert (new < 1.3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_orthogonalised_matrices_keep_their_dtype(dtype):
    M = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = orthogonalize(M.mT).mT
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), orthogonalize(M.double()), rtol=0, atol=0.02)


def test_a_matrix_of_zeros_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 5, 3)), torch.zeros(2, 5, 3))
    assert orthogonalize(torch.zeros(0, 5, 3)).shape == (0, 5, 3)
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        orthogonalize(torch.zeros(3))


def test_groups_without_orthogonalised_updates_are_adamw():
    model = network()
    model[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    settings = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    groups = [{"params": model[0].S1, "orthogonalize": True}, {"params": list(model[1:].parameters())}]
    take_steps(model, MuonAdamW(groups, **settings))
    take_steps(twin, torch.optim.AdamW(twin[1:].parameters(), **settings))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_orthogonalised_updates_are_those_of_muon():
    """torch's Muon multiplies in bfloat16, so the two agree to that."""
    muon = pytest.importorskip("torch.optim").Muon
    start = [torch.randn(48, 6), torch.randn(6, 48), torch.randn(6, 48)]
    ours, theirs = ([nn.Parameter(M.clone()) for M in start] for _ in range(2))
    optimizer = MuonAdamW([{"params": ours, "orthogonalize": True}], lr=0.1, weight_decay=0.1)
    reference = muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for first_value, one, other in zip(start, ours, theirs, strict=True):
        assert torch.linalg.norm(one - other) < 0.05 * torch.linalg.norm(other - first_value)


def shapes(group):
    return [tuple(p.shape) for _, p in group["params"]]


def test_param_groups_know_factors_matrices_and_vectors():
    model = nn.Sequential(nn.Embedding(7, 96), nn.Linear(96, 96), network())
    model[2][0].bias.requires_grad_(False)
    groups = factors, dense, others, vectors = param_groups(model, lr=1e-3, weight_decay=0.1)
    assert shapes(factors) == [(96, 4), (4, 64), (64, 4), (4, 96)]
    assert shapes(dense) == [(96, 96)]
    assert shapes(others) == [(7, 96), (5, 96)]
    assert shapes(vectors) == [(96,), (96,), (5,)]
    assert [group["weight_decay"] for group in groups] == [0.1 / 4, 0.1 / 4, 0.1, 0.0]
    assert [group["lr"] for group in groups] == [4e-3, 4e-3, 1e-3, 1e-3]
    dense = param_groups(model[2], include=lambda name, layer: isinstance(layer, nn.Linear), factor_lr=2e-3)
    assert shapes(dense[0]) == [(5, 96)]
    assert dense[0]["weight_decay"] == 0.05
    assert [group["orthogonalize"] for group in param_groups(nn.Linear(3, 2))] == [False, False]


def test_param_groups_take_stacks_of_experts_but_no_kernels():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 6, 4))

    model = nn.Sequential(Experts(), nn.Conv1d(4, 4, 3), nn.Bilinear(2, 2, 2))
    matrices, others, _ = param_groups(model, include=lambda name, layer: True)
    assert shapes(matrices) == [(3, 6, 4)]
    assert shapes(others) == [(4, 4, 3), (2, 2, 2)]


def test_the_state_is_half_of_adamws_and_can_be_saved():
    model = network()
    optimizer = MuonAdamW(param_groups(model))
    take_steps(model, optimizer)
    factors = optimizer.param_groups[0]["params"]
    assert all(set(optimizer.state[p]) == {"momentum_buffer"} for p in factors)
    twin = network()
    twin.load_state_dict(model.state_dict())
    resumed = MuonAdamW(param_groups(twin))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the tensors
    take_steps(model, optimizer)
    take_steps(twin, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_parameter_without_a_gradient_stays_and_a_closure_is_called():
    model = network()
    optimizer = MuonAdamW(param_groups(model))
    first_values = [p.clone() for p in model.parameters()]
    assert optimizer.step(lambda: torch.tensor(2.0)).item() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first_values, strict=True))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be at least 0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\)"),
        ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\)"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be at least 0"),
        ({"orthogonalize": True}, ShapeError, r"shape \(4,\).*param_groups"),
    ],
)
def test_settings_that_cannot_be(settings, error, message):
    with pytest.raises(error, match=message):
        MuonAdamW(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).parameters(), **settings)


def test_complex_matrices_are_refused():
    """The Gram matrix without a conjugate gave a matrix that was not orthogonal."""
    p = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))
    with pytest.raises(DTypeError, match=r"complex matrix.*without orthogonalize"):
        MuonAdamW([p], orthogonalize=True)
    for matrix in (p.detach(), torch.arange(6).view(3, 2)):
        with pytest.raises(DTypeError, match="real matrices of a floating dtype"):
            orthogonalize(matrix)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Muon])
def test_states_of_other_optimizers_are_refused_before_anything_changes(make):
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    other = make([p])
    other.step()
    optimizer = MuonAdamW([p], orthogonalize=True)
    with pytest.raises(CheckpointError, match="group 0 of the state has no 'orthogonalize'"):
        optimizer.load_state_dict(other.state_dict())
    state = other.state_dict() | {"param_groups": optimizer.state_dict()["param_groups"]}
    if make is torch.optim.AdamW:
        with pytest.raises(CheckpointError, match="has no 'momentum_buffer'"):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["orthogonalize"]
    assert not optimizer.state
    optimizer.step()


def test_updates_of_low_rank_which_earlier_versions_had_are_refused_with_advice():
    p = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank': updates of low rank are no more"):
        MuonAdamW([p], orthogonalize=True, rank=2)
    with pytest.raises(ValueError, match=r"a group has rank=2.*SketchedAdamW\(rank=\) for a smaller state"):
        MuonAdamW([{"params": [p], "orthogonalize": True, "rank": 2}])
    optimizer = MuonAdamW([p], orthogonalize=True)
    state = optimizer.state_dict()
    state["param_groups"][0]["rank"] = None  # as earlier versions wrote it
    optimizer.load_state_dict(state)
    assert "rank" not in optimizer.param_groups[0]
    state["param_groups"][0]["rank"] = 2
    with pytest.raises(CheckpointError, match="group 0 of the state has updates of rank 2: updates of low rank are"):
        optimizer.load_state_dict(state)
