"""The dtype of Newton-Schulz iterations and of momenta, and AdamW's step by torch's fused kernel."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from panther.distributed import make_mesh
from panther.optim import MuonAdamW, orthogonalize
from panther.optim.adamw_step import step_adamw


def conditioned(m, n, condition):
    generator = torch.Generator().manual_seed(0)
    P, _, Qt = torch.linalg.svd(torch.randn(m, n, generator=generator), full_matrices=False)
    return P * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), len(Qt)) @ Qt


@pytest.mark.parametrize("shape", [(96, 96), (100, 96), (96, 384)])
def test_singular_values_in_bfloat16(shape):
    """Muon of torch has the same rounding: 1 to 4 % of the norm, where singular values are not tiny."""
    M = conditioned(*shape, 100)
    exact, result = orthogonalize(M.double()), orthogonalize(M, dtype=torch.bfloat16)
    values = torch.linalg.svdvals(result.double())
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.linalg.norm(result - exact) < 0.16 * torch.linalg.norm(exact)
    assert torch.linalg.norm(orthogonalize(M) - exact) < 1e-4 * torch.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e20, 1e36])
def test_results_do_not_depend_on_the_scale(dtype, scale):
    """Squares of large entries are infinite in float32, and casts before the division were (DeepSpeed#8533)."""
    M = conditioned(96, 40, 10)
    torch.testing.assert_close(
        orthogonalize(M * scale, dtype=dtype),
        orthogonalize(M, dtype=dtype),
        rtol=0,
        atol=0.04 if dtype.itemsize == 2 else 1e-5,
    )


SHAPES = [(80, 64), (64, 200), (40, 96), (3, 64, 96), (1, 90)]


def trained(place=lambda tensor: tensor, dtype=torch.float32, **settings):
    parameters = []
    for number, shape in enumerate(SHAPES):
        start = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        parameters.append(nn.Parameter(place(start)))
    optimizer = MuonAdamW(parameters, lr=0.1, orthogonalize=True, **settings)
    for step in range(3):
        for number, p in enumerate(parameters):
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number))
            p.grad = place(gradient.to(dtype))
        optimizer.step()
    return parameters, optimizer


@pytest.mark.distributed
@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 4e-3), ("float32", 1e-6)])
def test_layouts_agree_to_the_rounding_of_the_dtype(precision, bound):
    def rank():
        mesh = make_mesh(dp=2)
        layouts = ([Shard(0)], [Shard(1)])
        return [
            [p.full_tensor().detach() for p in trained(place, precision=precision)[0]]
            for place in (
                lambda x, placements=placements: distribute_tensor(x, mesh, placements) for placements in layouts
            )
        ]

    expected = [p.detach() for p in trained(precision=precision)[0]]
    for results in on_ranks(rank, 2):
        for result in results:
            for p, q in zip(result, expected, strict=True):
                assert torch.linalg.norm(p - q) < bound * torch.linalg.norm(q)


@pytest.mark.distributed
def test_all_ranks_have_the_precision_of_the_first():
    """Nodes of a job may have different processors, and replicas that iterate in different dtypes drift apart."""

    def rank():
        import torch.distributed as dist

        precisions, monkeypatch = [], pytest.MonkeyPatch()
        for first in range(2):
            features = {"avx512_bf16": dist.get_rank() == first}
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
            precisions.append(trained()[1].param_groups[0]["precision"])
        return precisions

    results = on_ranks(rank, 2, fresh=True)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]


@pytest.mark.parametrize(("features", "precision"), [({"amx_bf16": True}, "bfloat16"), ({"avx512_f": True}, "float32")])
def test_the_precision_follows_the_hardware_and_is_saved(features, precision, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    parameters, optimizer = trained()
    assert optimizer.state_dict()["param_groups"][0]["precision"] == precision
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    again = MuonAdamW(parameters, orthogonalize=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in parameters:
        p.grad = torch.ones_like(p)
    again.step()
    assert again.param_groups[0]["precision"] == precision
    with pytest.raises(ValueError, match=r"must be 'bfloat16', 'float32' or None"):
        trained(precision="float16")


def test_float64_and_short_matrices_iterate_in_wide_dtypes():
    for dtype in (torch.float32, torch.float64):
        results = [trained(dtype=dtype, precision=name)[0] for name in ("bfloat16", "float32")]
        equal = [torch.equal(p, q) for p, q in zip(*results, strict=True)]
        assert equal == [dtype is torch.float64, dtype is torch.float64, True, dtype is torch.float64, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momenta_of_half_precision_are_float32(dtype):
    """Momenta in bfloat16 lose small gradients, and mixed dtypes stopped another optimizer (muon-clip#9)."""
    parameters, optimizer = trained(dtype=dtype)
    assert all(optimizer.state[p]["momentum_buffer"].dtype is torch.float32 for p in parameters)
    assert all(p.dtype is dtype for p in parameters)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].to(dtype)  # of an earlier version
    optimizer.load_state_dict(state)
    optimizer.step()
    assert all(optimizer.state[p]["momentum_buffer"].dtype is torch.float32 for p in parameters)


TENSORS = {
    "contiguous": (lambda x: x, lambda x: x),
    "a transposed parameter": (lambda x: x.mT.contiguous().mT, lambda x: x),
    "a transposed gradient": (lambda x: x, lambda x: x.mT.contiguous().mT),
    "both transposed": (lambda x: x.mT.contiguous().mT, lambda x: x.mT.contiguous().mT),
    "channels last": (lambda x: x.to(memory_format=torch.channels_last),) * 2,
    "one of both channels last": (lambda x: x.to(memory_format=torch.channels_last), lambda x: x),
    "every other column": (lambda x: torch.stack((x, x), -1)[..., 0], lambda x: x),
    "an expanded gradient": (lambda x: x, lambda x: x[:1, :1].expand(x.shape)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", TENSORS)
def test_the_steps_of_adamw_are_those_of_torch_whatever_the_strides(name, dtype):
    """torch's fused kernel on a CPU pairs entries by their places in memory: AdamW(fused=True) is wrong here."""
    place, place_gradient = TENSORS[name]
    start = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    p, q = nn.Parameter(place(start.clone())), nn.Parameter(start.clone())
    empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
    rate = torch.tensor(0.1)
    group = {"betas": (0.9, 0.98), "lr": rate, "weight_decay": 0.1, "eps": 1e-8}
    reference, states = torch.optim.AdamW([q], fused=False, **group | {"lr": 0.1}), {p: {}, empty: {}}
    for step in range(3):
        gradient = torch.randn(q.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        p.grad, empty.grad = place_gradient(gradient), torch.empty_like(empty)
        q.grad = p.grad.clone()
        with torch.no_grad():
            step_adamw(group, [p, empty], states)
        reference.step()
    torch.testing.assert_close(p.detach(), q.detach())


@pytest.mark.distributed
def test_the_steps_of_adamw_on_shards_are_those_of_torch():
    """Gradients that are terms of a sum are added up before the kernel sees them."""

    def steps(place, place_gradient):
        p = nn.Parameter(place(torch.arange(35.0).view(7, 5)))
        optimizer = MuonAdamW(
            [{"params": p, "orthogonalize": False}, {"params": nn.Parameter(torch.ones(2, 2)), "orthogonalize": True}]
        )
        for step in range(3):
            p.grad = place_gradient(torch.full((7, 5), step - 0.5))
            optimizer.step()
        return p.detach()

    def rank():
        mesh = make_mesh(dp=2)

        def gradients(x):
            from torch.distributed.tensor import DTensor

            return DTensor.from_local(x / 2, mesh, [Partial()])

        return steps(lambda x: distribute_tensor(x, mesh, [Shard(0)]), gradients).full_tensor()

    for result in on_ranks(rank, 2):
        torch.testing.assert_close(result, steps(lambda x: x, lambda x: x))
