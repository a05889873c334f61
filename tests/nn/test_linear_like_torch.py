"""SKLinear under everything users do to an nn.Linear: compile, export, torch.func, transformers, nested tensors."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.nn import SKLinear

HAS_COMPILER = shutil.which("g++") is not None and " " not in torch.__file__
ROWS = [3, 20]  # below and above the rows at which the order of the product changes, 4 R = 16


def layer(**kwargs):
    torch.manual_seed(0)
    return SKLinear(64, 48, 4, **kwargs)


INDUCTOR = [  # its first compilation takes half a minute, and it needs a C++ compiler and a path that it need not quote
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason="no g++, or torch lies in a path with spaces"),
]


@pytest.mark.parametrize(
    ("rows", "dynamic", "backend"),
    [
        (3, False, "aot_eager"),
        (20, True, "aot_eager"),
        pytest.param(3, True, "inductor", marks=INDUCTOR),
        pytest.param(20, False, "inductor", marks=INDUCTOR),
    ],
)
def test_compile_without_graph_breaks(rows, dynamic, backend):
    torch.compiler.reset()
    model = layer()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    x = torch.randn(rows, 64, requires_grad=True)
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    theirs = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_export_with_a_dynamic_batch():
    model = layer().eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (torch.randn(4, 64),), dynamic_shapes=({0: batch},))
    for rows in (1, 2, 200):
        x = torch.randn(rows, 64)
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)


def test_symbolic_trace():
    model = nn.Sequential(layer(), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    for rows in ROWS:
        x = torch.randn(rows, 64)
        assert torch.equal(traced(x), model(x))


def test_input_by_name():
    model, x = layer(), torch.randn(3, 64)
    assert torch.equal(model(input=x), model(x))


@pytest.mark.parametrize("rows", ROWS)
def test_vmap_over_inputs_and_over_models(rows):
    model, x = layer(), torch.randn(7, rows, 64)
    assert torch.allclose(torch.vmap(model)(x), model(x), atol=1e-5)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}
    call = lambda params, x: torch.func.functional_call(model, params, (x,))  # noqa: E731
    out = torch.vmap(call, (0, None))(stacked, x[0])
    doubled = {name: p[1] for name, p in stacked.items()}
    assert torch.allclose(out[0], model(x[0]), atol=1e-5)
    assert torch.allclose(out[1], call(doubled, x[0]), atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_per_sample_gradients(rows):
    model, x = layer(), torch.randn(5, rows, 64)
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda params, x: torch.func.functional_call(model, params, (x,)).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(params, x)
    model(x[2]).square().sum().backward()
    assert torch.allclose(grads["S1"][2], model.S1.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(grads["bias"][2], model.bias.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
def test_jvp_hessian_and_nested_jacobians(rows):
    model = layer(dtype=torch.float64)
    x, v = torch.randn(2, rows, 64, dtype=torch.float64)
    out, tangent = torch.func.jvp(model, (x,), (v,))
    assert torch.allclose(out, model(x))
    assert torch.allclose(tangent, v @ model.weight.T)
    hessian = torch.func.hessian(lambda x: model(x).square().sum())(x[:1])
    assert torch.allclose(hessian[0, :, 0], 2 * model.weight.T @ model.weight)
    S2 = model.S2.detach()
    loss = lambda S2: torch.func.functional_call(model, {"S2": S2}, (x,)).pow(3).sum()  # noqa: E731
    twice = torch.func.jacrev(torch.func.jacfwd(loss))(S2)
    reference = torch.autograd.functional.hessian(loss, S2)
    assert torch.allclose(twice, reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model, x = layer(), torch.randn(40, 64, requires_grad=True)
    ours = torch.autograd.grad(model(x).square().sum(), x)[0]
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, ours)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_input(layout):
    model = layer()
    parts = [torch.randn(3, 64), torch.randn(5, 64)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    out = model(nested).unbind()
    assert all(torch.allclose(a, model(b), atol=1e-5) for a, b in zip(out, parts, strict=True))
    torch.cat(out).square().sum().backward()
    ours = model.S1.grad.clone()
    model.zero_grad()
    model(torch.cat(parts)).square().sum().backward()
    assert torch.allclose(ours, model.S1.grad, rtol=1e-4, atol=1e-4)


def encoder_layer():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    block.linear1, block.linear2 = SKLinear(64, 256, 4), SKLinear(256, 64, 4)
    return block


def dense_twin(model):
    """The same model with each sketched layer turned into an nn.Linear."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SKLinear):
                setattr(parent, name, child.to_linear())
    return model


@pytest.fixture
def sketched_calls(monkeypatch):
    """Inputs that reach a sketched forward."""
    calls = []
    forward = SKLinear.forward

    def record(self, x):
        calls.append(x)
        return forward(self, x)

    monkeypatch.setattr(SKLinear, "forward", record)
    return calls


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_encoder_layer_runs_the_sketched_forward(training, grad, sketched_calls):
    """Its fast path would read `.weight`, a dense product, and never call the layers."""
    block = encoder_layer().train(training)
    x = torch.randn(2, 7, 64)
    with torch.set_grad_enabled(grad):
        out = block(x)
    assert len(sketched_calls) == 2
    assert torch.allclose(out, dense_twin(block)(x), atol=1e-5)


def test_encoder_trains():
    block = encoder_layer()
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    x, target = torch.randn(2, 7, 64), torch.randn(2, 7, 64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_encoder_with_padding_passes_nested_tensors(sketched_calls):
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    x = torch.randn(2, 7, 64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=padding)
    assert [call.is_nested for call in sketched_calls] == [True] * 4
    with torch.no_grad():
        expected = dense_twin(encoder)(x, src_key_padding_mask=padding)
    assert torch.allclose(out, expected, atol=1e-5)
