"""Sketched convolutions under what users do to an nn.Conv2d: compile, export, torch.func, checkpointing."""

import shutil

import pytest
import torch
from covering import all_pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.nn import SKConv1d, SKConv2d, SKConv3d

HAS_COMPILER = shutil.which("g++") is not None and " " not in torch.__file__
# One layer that mixes in NCHW, one that fills its groups up to vectors, one that forms the dense kernel.
KINDS = [{"low_rank": 8}, {"low_rank": 6, "groups": 2}, {"low_rank": 4, "groups": 4}]


def layer(kind, **kwargs):
    torch.manual_seed(0)
    return SKConv2d(32, 48, **{"kernel_size": 3, "padding": 1, **kind, **kwargs})


def inputs(last=False):
    x = torch.randn(3, 32, 6, 7)
    return (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()


INDUCTOR = [  # its first compilation takes half a minute, and it needs a C++ compiler and a path that it need not quote
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason="no g++, or torch lies in a path with spaces"),
]


@pytest.mark.parametrize(
    ("kind", "last", "dynamic", "backend"),
    [
        *((*row, "aot_eager") for row in all_pairs(KINDS, [False, True], [False, True])),
        *(pytest.param(KINDS[i], last, False, "inductor", marks=INDUCTOR) for i in (0, 2) for last in (False, True)),
    ],
)
def test_compile_without_graph_breaks(kind, last, dynamic, backend):
    torch.compiler.reset()
    model = layer(kind, padding="same", kernel_size=4) if dynamic else layer(kind)
    x = inputs(last)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    out = compiled(x)
    assert out.stride() == model(x).stride()
    ours = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    theirs = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_export_with_dynamic_sizes_and_a_backward(kind):
    model = layer(kind).eval()
    dims = {0: torch.export.Dim("batch", min=1, max=64), 2: torch.export.Dim("height", min=4, max=512)}
    program = torch.export.export(model, (torch.randn(4, 32, 8, 8),), dynamic_shapes=(dims,))
    for rows, height in ((1, 8), (5, 30)):
        x = torch.randn(rows, 32, height, 8, requires_grad=True)
        out = program.module()(x)
        assert torch.allclose(out, model(x), atol=1e-5)
        (ours,) = torch.autograd.grad(out.square().sum(), x)
        assert torch.allclose(ours, torch.autograd.grad(model(x).square().sum(), x)[0], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_trace(kind):
    model = nn.Sequential(layer(kind), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    for last in (False, True):
        x = inputs(last)
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_jvp_and_per_sample_gradients(kind):
    model = layer(kind)
    x = torch.randn(2, 3, 32, 6, 7)
    assert torch.allclose(torch.vmap(model)(x), torch.stack([model(part) for part in x]), atol=1e-5)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}
    call = lambda params, x: torch.func.functional_call(model, params, (x,))  # noqa: E731
    out = torch.vmap(call, (0, None))(stacked, x[0])
    assert torch.allclose(out[0], model(x[0]), atol=1e-5)
    assert torch.allclose(out[1], call({name: p[1] for name, p in stacked.items()}, x[0]), atol=1e-5)
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda params, x: call(params, x).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(params, x)
    model(x[1]).square().sum().backward()
    assert torch.allclose(grads["S"][1], model.S.grad, rtol=1e-4, atol=1e-3)
    out, tangent = torch.func.jvp(model, (x[0],), (x[1],))
    assert torch.allclose(tangent, model(x[0] + x[1]) - model(x[0]), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(kind):
    model, x = layer(kind), inputs()
    ours = torch.autograd.grad(model(x).square().sum(), x)[0]
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(x.grad, ours)


def test_input_by_name_and_hooks():
    model, x = layer(KINDS[0]), inputs()
    assert torch.equal(model(input=x), model(x))


@pytest.mark.parametrize("dense", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_network_trains(dense):
    torch.manual_seed(0)
    sketched = {nn.Conv1d: SKConv1d, nn.Conv2d: SKConv2d, nn.Conv3d: SKConv3d}[dense]
    model = nn.Sequential(sketched(16, 32, 3, padding="same", low_rank=4), nn.ReLU(), dense(32, 4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, target = torch.randn(4, 16, *[5] * model[0].dim), torch.randn(4, 4, *[5] * model[0].dim)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
