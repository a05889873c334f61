"""InterpolativeLinear under what users do to an nn.Linear: files, state_dict, dtypes, compile, export, autocast."""

import copy
import io
import json
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.errors import FormatError, SketchMismatchError
from panther.nn import InterpolativeLinear

HAS_COMPILER = shutil.which("g++") is not None and " " not in torch.__file__
INDUCTOR = [  # its first compilation takes half a minute, and it needs a C++ compiler and a path that it need not quote
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason="no g++, or torch lies in a path with spaces"),
]
SIZES = [(64, 48), (48, 64)]  # rows kept, columns kept
sizes = pytest.mark.parametrize("size", SIZES)


def fitted(size, **kwargs):
    torch.manual_seed(0)
    return InterpolativeLinear.from_linear(nn.Linear(*size, **kwargs), 9)


def inputs(size, rows=5):
    return torch.randn(rows, size[0], generator=torch.Generator().manual_seed(0))


def snapshot(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def assert_same(layer, before):
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@sizes
@pytest.mark.parametrize("bias", [False, True])
def test_inference_format(size, bias, tmp_path):
    model = nn.Sequential(fitted(size, bias=bias), nn.ReLU(), nn.Linear(size[1], 3))
    pr.save_compressed(model, tmp_path)
    plain = nn.Sequential(nn.Linear(*size, bias=bias), nn.ReLU(), nn.Linear(size[1], 3))
    restored = pr.load_compressed(tmp_path, plain)
    assert isinstance(restored[0], InterpolativeLinear)
    assert_same(restored, snapshot(model))
    x = inputs(size)
    assert torch.equal(restored(x), model(x))
    again = pr.load_compressed(tmp_path, nn.Sequential(InterpolativeLinear(*size, 4, bias=bias), *model[1:]))
    assert torch.equal(again(x), model(x))


def test_inference_format_of_shared_half_and_meta_layers(tmp_path):
    layer = fitted(SIZES[0]).bfloat16()
    pr.save_compressed(nn.ModuleDict({"a": layer, "b": layer}), tmp_path)
    with torch.device("meta"):
        plain = nn.ModuleDict({"a": nn.Linear(64, 48), "b": nn.Linear(64, 48)})
    restored = pr.load_compressed(tmp_path, plain)
    assert restored["a"] is restored["b"]
    assert restored["a"].dtype is torch.bfloat16
    assert_same(restored["a"], snapshot(layer))


def test_files_that_do_not_fit_are_refused(tmp_path):
    layer = fitted(SIZES[0])
    pr.save_compressed(layer, tmp_path)
    with pytest.raises(FormatError, match=r"saved for a Linear with .*and the model has a Linear there"):
        pr.load_compressed(tmp_path, nn.Linear(64, 47))
    path = tmp_path / "panther.json"
    manifest = json.loads(path.read_text())
    for low_rank in (8, 49, 0, "9", None):
        spec = manifest["modules"][""]
        changed = manifest | {"modules": {"": spec | {"args": spec["args"] | {"low_rank": low_rank}}}}
        changed = {key: value for key, value in changed.items() if key != "checksum"}
        path.write_text(json.dumps(changed | {"checksum": pr.nn.io.record_checksum(changed)}))
        with pytest.raises(FormatError):
            pr.load_compressed(tmp_path, nn.Linear(64, 48))
    layer.order[3] = layer.order[4]
    with pytest.raises(SketchMismatchError, match="order must hold each number from 0 to 47 once"):
        pr.save_compressed(layer, tmp_path)


@sizes
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trips(size, assign):
    source, target = fitted(size), InterpolativeLinear(*size, 9)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert_same(target, snapshot(source))
    assert torch.equal(target(inputs(size)), source(inputs(size)))
    assert all(parameter.requires_grad for parameter in target.parameters())


@sizes
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_that_do_not_fit_change_nothing(size, assign):
    layer = InterpolativeLinear(*size, 9)
    before = snapshot(layer)
    for spoil, match in (
        (lambda s: s.pop("order"), "loads all or nothing"),
        (lambda s: s.pop("bias"), r"Missing key\(s\)"),
        (lambda s: s.update(order=s["order"].float()), r"order is torch\.float32 and must be torch\.int32"),
        (lambda s: s["order"].fill_(3), "order must hold each number from 0 to 47 once"),
        (lambda s: s["order"].add_(1), "order must hold each number from 0 to 47 once"),
        (lambda s: s.update(coefficients=s["coefficients"][1:]), "size mismatch for coefficients"),
        (lambda s: s.update(skeleton=[1]), "skeleton must be a tensor"),
    ):
        state = snapshot(fitted(size))
        spoil(state)
        with pytest.raises(RuntimeError, match=match):
            layer.load_state_dict(state, assign=assign)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="size mismatch for skeleton"):
            layer.load_state_dict(InterpolativeLinear(*size, 8).state_dict(), strict=strict, assign=assign)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key\(s\).*skeleton.*Unexpected key\(s\).*weight"):
        layer.load_state_dict(nn.Linear(*size).state_dict(), assign=assign)
    assert_same(layer, before)


@sizes
def test_meta_and_fake_tensors(size):
    with torch.device("meta"):
        layer = InterpolativeLinear(*size, 9)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    assert layer(inputs(size).to("meta")).shape == (5, size[1])
    assert InterpolativeLinear(*size, 9, device="meta").order.is_meta
    emptied = copy.deepcopy(layer).to_empty(device="cpu")
    emptied.check_record()
    emptied.reset_parameters()
    assert emptied(inputs(size)).isfinite().all()
    source = fitted(size)
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(inputs(size)), source(inputs(size)))
    skipped = nn.utils.skip_init(InterpolativeLinear, *size, 9)
    skipped.load_state_dict(source.state_dict())
    assert torch.equal(skipped(inputs(size)), source(inputs(size)))
    with FakeTensorMode():
        fake = InterpolativeLinear(*size, 9)
        assert fake(torch.randn(3, size[0])).shape == (3, size[1])
        fake.load_state_dict(fake.state_dict())


@sizes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_keep_the_order(size, dtype):
    layer = fitted(size)
    for cast in (lambda m: m.to(dtype), lambda m: m.type(dtype)):
        moved = cast(copy.deepcopy(layer))
        assert moved.dtype is dtype
        assert moved(inputs(size).to(dtype)).dtype is dtype
        assert moved.order.dtype is torch.int32
        assert torch.equal(moved.order, layer.order)


@sizes
def test_copies_averages_and_repr(size):
    layer = fitted(size)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(inputs(size)), layer(inputs(size)))
        twin.skeleton.data.zero_()
        assert not torch.equal(twin(inputs(size)), layer(inputs(size)))
    for use_buffers in (False, True):
        mean = AveragedModel(layer, use_buffers=use_buffers)
        for _ in range(3):
            mean.update_parameters(layer)
        fresh = InterpolativeLinear(*size, 9)
        fresh.load_state_dict(mean.module.state_dict())
        assert torch.equal(fresh.order, layer.order)
    assert repr(layer) == (f"InterpolativeLinear(in_features={size[0]}, out_features={size[1]}, low_rank=9, bias=True)")


@sizes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_compile_without_graph_breaks(size, backend):
    torch.compiler.reset()
    model = fitted(size)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    x = inputs(size).requires_grad_()
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    theirs = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_with_a_dynamic_batch(size, dtype):
    model = fitted(size).eval().to(dtype)
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (inputs(size).to(dtype),), dynamic_shapes=({0: batch},))
    for rows in (1, 2, 200):
        x = inputs(size, rows).to(dtype)
        with torch.no_grad():
            assert torch.allclose(program.module()(x), model(x), rtol=1e-2, atol=1e-5)


@sizes
def test_torch_func(size):
    model, x = fitted(size), torch.randn(7, 3, size[0])
    assert torch.allclose(torch.vmap(model)(x), model(x), atol=1e-5)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, torch.ones_like(x) @ model.weight.T, atol=1e-4)
    floats = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda floats, x: torch.func.functional_call(model, floats, (x,)).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(floats, x)
    model(x[2]).square().sum().backward()
    assert all(torch.allclose(grads[n][2], p.grad, rtol=1e-4, atol=1e-4) for n, p in model.named_parameters())


@sizes
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(size, reentrant):
    model, x = fitted(size), inputs(size).requires_grad_()
    ours = torch.autograd.grad(model(x).square().sum(), x)[0]
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, ours)
    assert torch.equal(model(input=x), model(x))


@sizes
@pytest.mark.parametrize("bias", [False, True])
def test_autocast(size, bias):
    model, x = fitted(size, bias=bias), inputs(size, 20)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for output in (model(x), model(x.bfloat16()), torch.no_grad()(model)(x)):
            assert output.dtype is torch.bfloat16
            assert (output - exact).norm() < 0.04 * exact.norm()
        loss = model(x).float().sum()
    loss.backward()
    assert all(parameter.grad.dtype is parameter.dtype for parameter in model.parameters())


@sizes
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_input(size, layout, grad):
    model = fitted(size)
    parts = [torch.randn(3, size[0]), torch.randn(5, size[0])]
    with torch.set_grad_enabled(grad):
        out = model(torch.nested.nested_tensor(parts, layout=layout)).unbind()
    assert all(torch.allclose(a, model(b), atol=1e-5) for a, b in zip(out, parts, strict=True))


@torch.no_grad()
def test_encoder_layer_runs_its_forward(monkeypatch):
    """Its fast path would read `.weight`, a dense product, and never call the layers."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    block.linear1 = InterpolativeLinear.from_linear(block.linear1, 8)
    block.linear2 = InterpolativeLinear.from_linear(block.linear2, 8)
    encoder = nn.TransformerEncoder(block, 1).eval()
    calls = []
    forward = InterpolativeLinear.forward
    monkeypatch.setattr(InterpolativeLinear, "forward", lambda self, x: calls.append(x) or forward(self, x))
    x = torch.randn(2, 7, 64)
    out = encoder(x)
    assert len(calls) == 2
    twin = encoder.layers[0]
    twin.linear1, twin.linear2 = twin.linear1.to_linear(), twin.linear2.to_linear()
    assert torch.allclose(out, encoder(x), atol=1e-5)
