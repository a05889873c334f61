"""Moments that are sketches of the gradients, of matrices that are sharded in every way, against one process."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from panther.distributed import make_mesh
from panther.errors import DistributedError
from panther.optim import SketchedAdamW
from panther.optim.sketched_update import UPDATES

pytestmark = pytest.mark.distributed

SHAPES = [(24, 10), (10, 24), (12, 12), (13, 7), (7, 13), (3, 30), (30, 3), (9,), (2, 6, 8)]
LAYOUTS = {
    "rows": ({"dp": None}, lambda tensor: [Shard(0)]),
    "columns": ({"tp": None}, lambda tensor: [Shard(tensor.dim() - 1)]),
    "replicated": ({"dp": None}, lambda tensor: [Replicate()]),
    "hybrid": ({"replicate": 2, "dp": 2}, lambda tensor: [Replicate(), Shard(0)]),
    "rows and columns": ({"dp": 2, "tp": 2}, lambda tensor: [Shard(0), Shard(tensor.dim() - 1)]),
}


def gradient(shape, step, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def trained(kind, dtype, num_steps, place=lambda tensor: tensor, shapes=SHAPES):
    """Parameters after steps whose gradients are functions of the step."""
    named = []
    for number, shape in enumerate(shapes):
        start = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        named.append((f"layers.{number}", nn.Parameter(place(start.to(dtype)))))
    groups = [{"params": named, "rank": 2}]
    optimizer = SketchedAdamW(groups, lr=0.01, update=kind, period=2 * num_steps // 5, seed=3)
    for step in range(num_steps):
        for number, (shape, (_, p)) in enumerate(zip(shapes, named, strict=True)):
            # Some matrix has no gradient in some steps.
            p.grad = place(gradient(shape, step, number).to(dtype)) if step % 7 or number != 1 else None
        optimizer.step()
    return [p for _, p in named], optimizer


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize(
    ("n", "layout", "num_steps", "dtypes"),
    [
        (2, "rows", 10, [torch.float64]),
        (4, "rows and columns", 10, [torch.float64]),
        *(
            pytest.param(n, layout, 50, [torch.float32, torch.float64], marks=pytest.mark.slow)
            for n, layout in [(2, "columns"), *((4, name) for name in LAYOUTS)]
        ),
    ],
)
def test_steps_are_those_of_one_process(n, layout, num_steps, dtypes):
    def rank():
        sizes, placements_of = LAYOUTS[layout]
        mesh = make_mesh(**{axis: size or n for axis, size in sizes.items()})
        errors = {}
        for dtype in dtypes:
            bound = {torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
            for kind in UPDATES:
                expected, single = trained(kind, dtype, num_steps)
                results, optimizer = trained(
                    kind,
                    dtype,
                    num_steps,
                    lambda tensor: distribute_tensor(tensor.clone(), mesh, placements_of(tensor)),
                )
                for p, q, shape in zip(results, expected, SHAPES, strict=True):
                    errors[dtype, kind, shape] = ((whole(p) - q).norm() / q.norm()).item() / bound
                    for key in ("sketch_avg", "sketch_avg_sq") if len(shape) == 2 else ("exp_avg", "exp_avg_sq"):
                        moment, complete = optimizer.state[p][key], single.state[q][key]
                        assert isinstance(moment, DTensor)
                        assert moment.shape == complete.shape
                        torch.testing.assert_close(whole(moment), complete, rtol=100 * bound, atol=100 * bound)
        return errors

    for errors in on_ranks(rank, n):
        assert max(errors.values()) < 1, errors


def test_moments_are_sharded_as_the_longer_side_is():
    def rank():
        mesh = make_mesh(dp=2)
        sizes = []
        for shape, placements in [((24, 10), [Shard(0)]), ((10, 24), [Shard(1)]), ((10, 24), [Shard(0)])]:
            p = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))
            p.grad = distribute_tensor(torch.ones(shape), mesh, placements)
            optimizer = SketchedAdamW([("weight", p)], rank=2, seed=0)
            optimizer.step()
            sizes.append(optimizer.state[p]["sketch_avg"].to_local().numel())
        return sizes

    assert on_ranks(rank) == [[24, 24, 48]] * 2


@pytest.mark.parametrize("what", ["seed", "period", "gradient"])
def test_ranks_that_differ_are_refused_on_all_of_them(what):
    def rank():
        import torch.distributed as dist

        mesh = make_mesh(dp=2)
        p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]))
        is_first = dist.get_rank() == 0
        if what != "gradient" or is_first:
            p.grad = torch.ones_like(p)
        settings = {} if what == "gradient" else {what: 1 + is_first}
        optimizer = SketchedAdamW([("weight", p)], **{"rank": 2, "seed": 0} | settings)
        with pytest.raises(DistributedError) as caught:
            optimizer.step()
        assert torch.equal(whole(p), torch.ones(8, 6))
        return str(caught.value)

    first, second = on_ranks(rank)
    assert first == second
    assert what in first


def test_seeds_of_a_group_that_is_added_later_are_compared():
    def rank():
        import torch.distributed as dist

        mesh = make_mesh(dp=2)
        first, second = (nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])) for _ in range(2))
        optimizer = SketchedAdamW([("first", first)], rank=2, seed=0)
        first.grad = torch.ones_like(first)
        optimizer.step()
        first.grad, second.grad = None, torch.ones_like(second)
        optimizer.add_param_group({"params": [("second", second)], "seed": dist.get_rank()})
        with pytest.raises(
            DistributedError, match=r"second is sketched with the seed 0.* and sketched with the seed 1"
        ):
            optimizer.step()

    on_ranks(rank)


def test_seeds_of_a_state_that_is_loaded_later_are_compared():
    def rank():
        import torch.distributed as dist

        p = nn.Parameter(distribute_tensor(torch.ones(8, 6), make_mesh(dp=2), [Shard(0)]))
        p.grad = torch.ones_like(p)
        optimizer = SketchedAdamW([("weight", p)], rank=2, seed=0)
        optimizer.step()
        state, first_values = optimizer.state_dict(), whole(p).clone()
        state["param_groups"][0]["seed"] = dist.get_rank()
        optimizer.load_state_dict(state)
        with pytest.raises(DistributedError, match=r"with the seed 0.* on rank 0 and .*with the seed 1.* on rank 1"):
            optimizer.step()
        assert torch.equal(whole(p), first_values)

    on_ranks(rank)
