"""Sizes of the updates of SketchedAdamW: huge gradients, few samples, and steps with few rows."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from panther.distributed import make_mesh
from panther.errors import TrainingError
from panther.optim import SketchedAdamW
from panther.optim.sketched_update import UPDATES

SHAPES = [(40, 24), (24, 40), (32, 32)]


def make(shape, dtype=torch.float32, **settings):
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    return p, SketchedAdamW([{"params": [("weight", p)], "rank": 2}], **{"lr": 1e-3, "weight_decay": 0.0} | settings)


def gradient(shape, number, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def change(p, optimizer, value):
    """Return the change of a parameter by a step with a gradient, divided by the rate."""
    first_value = p.detach().clone()
    p.grad = value
    optimizer.step()
    return (p.detach() - first_value) / optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [1e20, "largest", "all largest"])
def test_finite_gradients_give_finite_steps(update, dtype, number):
    """One entry of 1e20 made all weights NaN, because the squares of norms were infinite."""
    largest = torch.finfo(dtype).max
    for shape in SHAPES:
        p, optimizer = make(shape, dtype, update=update)
        twin = nn.Parameter(p.detach().to(torch.promote_types(dtype, torch.float32), copy=True))
        adamw = torch.optim.AdamW([twin], lr=1e-3)
        for step in range(5):
            G = gradient(shape, step, dtype)
            if step in (0, 2, 3):
                size = min(number, largest) if number == 1e20 else largest
                if number == "all largest":
                    G = G.sign() * size
                else:
                    G[step, 2] = size * (-1) ** step
            twin.grad = G.to(twin.dtype)
            adamw.step()
            values = change(p, optimizer, G)
            assert twin.isfinite().all() or number == "all largest"  # AdamW subtracts moments of the other sign
            assert p.isfinite().all()
            # Entries of Adam's quotient are below sqrt(1000) / 10, and each column has this root mean square at most.
            assert values.double().norm() < 3.3 * p.numel() ** 0.5
        for key in ("sketch_avg", "sketch_avg_sq", "update_norm"):
            assert optimizer.state[p][key].isfinite().all()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("exponent", "tolerance"), [(-30, 0), (40, 0), (120, 1e-5)])
def test_a_first_step_does_not_depend_on_the_scale(update, exponent, tolerance):
    changes = []
    for scale in (1.0, 2.0**exponent):
        p, optimizer = make((40, 24), update=update, eps=0.0)
        changes.append(change(p, optimizer, gradient(p.shape, 0) * scale))
    torch.testing.assert_close(*changes, rtol=0, atol=tolerance)


@pytest.mark.distributed
def test_shards_of_huge_gradients_give_the_step_of_one_process():
    def steps(update, shape, place):
        p, optimizer = make(shape, update=update)
        p = nn.Parameter(place(p.detach()))
        optimizer = SketchedAdamW([{"params": [("weight", p)], "rank": 2}], lr=1e-3, update=update)
        for step in range(3):
            G = gradient(shape, step)
            G[3, 5] = torch.finfo(G.dtype).max if step != 1 else 1e20
            G[-1] *= 1e37
            p.grad = place(G)
            optimizer.step()
        return p.detach()

    def rank():
        errors = {}
        for name, sizes, placements in (
            ("rows", {"dp": 4}, [Shard(0)]),
            ("columns", {"tp": 4}, [Shard(1)]),
            ("both", {"dp": 2, "tp": 2}, [Shard(0), Shard(1)]),
            ("hybrid", {"replicate": 2, "dp": 2}, [Replicate(), Shard(0)]),
        ):
            mesh = make_mesh(**sizes)
            for update in UPDATES:
                for shape in SHAPES:
                    expected = steps(update, shape, lambda tensor: tensor)
                    result = steps(
                        update,
                        shape,
                        lambda tensor, mesh=mesh, placements=placements: distribute_tensor(tensor, mesh, placements),
                    ).full_tensor()
                    errors[name, update, shape] = (result - expected).abs().max().item()
        return errors

    for errors in on_ranks(rank, 4):
        assert all(error < 1e-6 for error in errors.values()), errors


@pytest.mark.parametrize(("update", "rank"), [("tensor", 1), ("channel", 1), ("channel", 4), ("tensor", 8)])
def test_the_first_step_has_the_size_of_the_step_of_adamw(update, rank):
    """The norm of a sketch of rank 1 may be near zero, which made a step 530 times as large."""
    for G in (gradient((64, 48), 0), gradient((64, 1), 1) @ gradient((1, 48), 2)):  # batches of many and of one sample
        for seed in range(40):
            p, _ = make((64, 48))
            optimizer = SketchedAdamW(
                [{"params": [("weight", p)], "rank": rank}], lr=1e-3, seed=seed, update=update, weight_decay=0.0
            )
            size = change(p, optimizer, G).square().mean().sqrt()
            assert 0.9 < size < 1.01


@pytest.mark.parametrize("update", ["channel", "tensor"])
@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_a_step_with_few_rows_does_not_shrink_the_next_ones(update, shape):
    """FluxML/Optimisers.jl#196 has a minimum for its limit, too."""
    (p, optimizer), (twin, other) = (make(shape, update=update, lr=1e-2) for _ in range(2))
    sizes = []
    for step in range(40):
        G = gradient(shape, step)
        expected = change(twin, other, G.clone()).norm()
        few = G.clone()
        few[2:] = 0
        few[:, 2:] = few[:, 2:] if shape[0] > shape[1] else 0
        sizes.append(change(p, optimizer, few if step < 3 or step == 20 else G).norm() / expected)
    assert max(sizes[:3]) < 0.2  # steps with few rows are small
    assert min(sizes[4:20]) > 0.5
    assert min(sizes[21:]) > 0.5


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_that_is_not_finite_is_refused_before_parameters_change(update):
    named = [(f"layers.{i}", nn.Parameter(torch.ones(8, 6))) for i in range(3)]
    optimizer = SketchedAdamW([{"params": named, "rank": 2}], update=update)
    for step in range(2):
        for _, p in named:
            p.grad = gradient(p.shape, step)
        first_values = [copy.deepcopy(p.detach()) for _, p in named]
        if step == 1:
            optimizer.state[named[2][1]]["sketch_avg_sq"][3] = float("nan")
            with pytest.raises(TrainingError, match=r"the update of layers\.2 \(1 in all\) is not finite"):
                optimizer.step()
            assert all(torch.equal(p, q) for (_, p), q in zip(named, first_values, strict=True))
        else:
            optimizer.step()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_not_hidden(update, value):
    p, optimizer = make((40, 24), update=update)
    G = gradient(p.shape, 0)
    G[3, 5] = value
    change(p, optimizer, G)
    assert not p[3].isfinite().all()
