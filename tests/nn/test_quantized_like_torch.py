"""Quantized layers under everything users do to dense ones: compile, export, torch.func, transformers, autocast."""

import shutil

import pytest
import torch
from quantized_kinds import LINEAR, both_kinds
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.nn import QuantizedLinear

HAS_COMPILER = shutil.which("g++") is not None and " " not in torch.__file__
FORMS = [{"bits": 8, "group_size": None}, {"bits": 3, "group_size": 30, "low_rank": 2}, {"bits": None, "low_rank": 4}]


def layer(form, **kwargs):
    return LINEAR.quantized(form, **kwargs)


INDUCTOR = [  # its first compilation takes half a minute, and it needs a C++ compiler and a path that it need not quote
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason="no g++, or torch lies in a path with spaces"),
]


@both_kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_compile_without_graph_breaks(kind, form, backend):
    torch.compiler.reset()
    model = kind.quantized(form)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    x = kind.x(5, requires_grad=True)
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    theirs = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(
        torch.allclose(a, b, rtol=2e-2 if a.dtype is torch.bfloat16 else 1e-4, atol=1e-4)
        for a, b in zip(ours, theirs, strict=True)
    )
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@both_kinds
@pytest.mark.parametrize("form", FORMS)
def test_export_with_a_dynamic_batch(kind, form):
    model = kind.quantized(form).eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (kind.x(4),), dynamic_shapes=({0: batch},))
    for rows in (1, 2, 200):
        x = kind.x(rows)
        with torch.no_grad():
            assert torch.allclose(program.module()(x), model(x), atol=1e-5)


@both_kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad", [False, True])
def test_torch_func(kind, form, grad):
    model, x = kind.quantized(form), kind.x(21).unflatten(0, (7, 3))
    with torch.set_grad_enabled(grad):
        assert torch.allclose(torch.vmap(model)(x), torch.stack([*map(model, x)]), atol=1e-5)
        ones = torch.ones_like(x[0])
        _, tangent = torch.func.jvp(model, (x[0],), (ones,))
        assert torch.allclose(tangent, model(ones) - model(torch.zeros_like(ones)), atol=1e-4)
    floats = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda floats, x: torch.func.functional_call(model, floats, (x,)).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(floats, x)
    model(x[2]).square().sum().backward()
    assert torch.allclose(grads["bias"][2], model.bias.grad, rtol=1e-4, atol=1e-4)


@both_kinds
@pytest.mark.parametrize("form", FORMS)
def test_ensembles(kind, form):
    models, x = [kind.quantized(form), kind.quantized(form)], kind.x(3)
    models[1].reset_parameters()
    with torch.no_grad():
        models[1].bias += 1
        state = torch.func.stack_module_state(models)
        call = lambda parameters, buffers: torch.func.functional_call(models[0], (parameters, buffers), (x,))  # noqa: E731
        outputs = torch.vmap(call)(*state)
        for output, model in zip(outputs, models, strict=True):
            assert torch.allclose(output, model(x), atol=1e-5)


@both_kinds
def test_input_by_name(kind):
    model, x = kind.quantized(FORMS[0]), kind.x(3)
    assert torch.equal(model(input=x), model(x))


@both_kinds
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(kind, reentrant):
    model, x = kind.quantized(FORMS[1]), kind.x(40, requires_grad=True)
    ours = torch.autograd.grad(model(x).square().sum(), x)[0]
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.allclose(x.grad, ours, rtol=1e-4, atol=1e-5)  # without gradients, products are in a different order


@both_kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast(kind, form, bias):
    model, x = kind.quantized(form, bias=bias), kind.x(20)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for output in (model(x), model(x.bfloat16()), torch.no_grad()(model)(x)):
            assert output.dtype is torch.bfloat16
            assert (output - exact).norm() < 0.02 * exact.norm()
    output.float().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()
    assert all(parameter.grad.dtype is parameter.dtype for parameter in model.parameters())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_input(form, layout, grad):
    model = layer(form)
    parts = [torch.randn(3, 64), torch.randn(5, 64)]
    with torch.set_grad_enabled(grad):
        out = model(torch.nested.nested_tensor(parts, layout=layout)).unbind()
    assert all(torch.allclose(a, model(b), atol=1e-5) for a, b in zip(out, parts, strict=True))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_encoder_layer_runs_its_forward(training, padded, monkeypatch):
    """Its fast path would read `.weight`, a dense product, and never call the layers."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    block.linear1 = QuantizedLinear.from_linear(block.linear1)
    block.linear2 = QuantizedLinear.from_linear(block.linear2, 3, low_rank=2)
    encoder = nn.TransformerEncoder(block, 1).train(training)
    calls = []
    forward = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: calls.append(x) or forward(self, x))
    x, mask = torch.randn(2, 7, 64), None
    if padded:
        mask = torch.zeros(2, 7, dtype=torch.bool)
        mask[1, 4:] = True
    out = encoder(x, src_key_padding_mask=mask)
    assert len(calls) == 2
    twin = encoder.layers[0]
    twin.linear1, twin.linear2 = twin.linear1.to_linear(), twin.linear2.to_linear()
    expected = encoder(x, src_key_padding_mask=mask)
    kept = slice(None) if mask is None else ~mask
    assert torch.allclose(out[kept], expected[kept], atol=1e-5)
