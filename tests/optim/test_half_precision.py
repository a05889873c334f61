"""Parameters in half precision: both optimizers have the moments of float32."""

import copy

import pytest
import torch
from torch import nn

from panther.optim import MuonAdamW, SketchedAdamW

HALVES = [torch.bfloat16, torch.float16]
SHAPES = {"table": (6, 5), "kernel": (3, 2, 2), "bias": (7,)}


def sketched(named):
    return SketchedAdamW(
        [{"params": named[:1]}, {"params": named[1:], "rank": None}], lr=1e-3, rank=2, seed=0, weight_decay=0.1
    )


def muon(named):
    return MuonAdamW([p for _, p in named], lr=1e-3, weight_decay=0.1)


def parameters(dtype):
    torch.manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape).to(dtype))) for name, shape in SHAPES.items()]


def take_steps(optimizer, named, dtype, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for _, p in named:
            # After the first step a second moment in bfloat16 would not decay.
            p.grad = (torch.randn(p.shape, generator=generator) * (10 if number == 0 else 0.01)).to(dtype).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("make", [sketched, muon])
@pytest.mark.parametrize("dtype", HALVES)
def test_moments_are_those_of_float32(make, dtype):
    """AReaL#1292, OneTrainer#996 and torchtitan#2732: second moments that stay at the first spike."""
    states = []
    for parameter_dtype in (dtype, torch.float32):
        named = parameters(parameter_dtype)
        optimizer = make(named)
        take_steps(optimizer, named, dtype, range(40))
        states.append([optimizer.state[p] for _, p in named])
    for half, full in zip(*states, strict=True):
        for key in full.keys() & {"exp_avg", "exp_avg_sq", "sketch_avg", "sketch_avg_sq"}:
            assert torch.equal(half[key], full[key])


@pytest.mark.parametrize("make", [sketched, muon])
def test_moments_of_an_older_state_become_float32(make):
    named = parameters(torch.bfloat16)
    optimizer = make(named)
    take_steps(optimizer, named, torch.bfloat16, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for tensors in state["state"].values():
        for key in tensors.keys() & {"exp_avg", "exp_avg_sq"}:
            tensors[key] = tensors[key].bfloat16()
    optimizer.load_state_dict(state)
    take_steps(optimizer, named, torch.bfloat16, range(2, 4))
    moments = [
        tensors[key] for tensors in optimizer.state.values() for key in tensors.keys() & {"exp_avg", "exp_avg_sq"}
    ]
    assert moments
    assert {moment.dtype for moment in moments} == {torch.float32}
