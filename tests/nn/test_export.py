"""Compressed layers through torch.export, AOTInductor, ONNX and torch.jit.trace, with sizes that may change."""

import io
import warnings

import numpy as np
import pytest
import torch
from compressed_layers import LAYERS, kinds_with
from torch import nn

import panther as pr
from panther.nn import QuantizedConv2d, QuantizedLinear, SKLinear
from panther.nn.sketch_record import plain_state

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LINEARS = [kind.name for kind in kinds_with("dense", "nested")]
CASES = [kind.name for kind in kinds_with("export")]


def case(name):
    """Return a layer, an input, the dimensions that may change, and inputs of other sizes."""
    kind = LAYERS[name]
    layer = kind.layer().eval()
    x = kind.x(3, 9) if len(kind.sample) == 1 else kind.x(3)
    length = 1 if kind.dense in (nn.Linear, None) else 2
    dynamic = {0: torch.export.Dim("batch"), length: torch.export.Dim("length", min=4)}
    return layer, x, dynamic, [x, torch.cat((x, x[:2])), x[:1], x.narrow(length, 0, 5)]


def compare(run, layer, inputs):
    for x in inputs:
        with torch.no_grad():
            expected = layer(x)
        torch.testing.assert_close(torch.as_tensor(run(x)), expected, **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_export_serves_other_sizes_and_holds_no_operator_of_panther(name):
    layer, x, dynamic, inputs = case(name)
    program = torch.export.export(layer, (x,), dynamic_shapes=(dynamic,))
    assert not [node for node in program.graph.nodes if "panther" in str(node.target)]
    compare(program.module(), layer, inputs)
    leaf = inputs[-1].clone().requires_grad_()
    ours, theirs = (torch.autograd.grad(module(leaf).sum(), leaf)[0] for module in (program.module(), layer))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["low rank", "packed", "int3+low_rank"])
def test_an_exported_program_is_saved_and_loaded(name):
    layer, x, dynamic, inputs = case(name)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), dynamic_shapes=(dynamic,)), file)
    file.seek(0)
    compare(torch.export.load(file).module(), layer, inputs)


def test_a_strict_export_and_half_precision():
    layer, x, _, inputs = case("packed")
    compare(torch.export.export(layer, (x,), strict=True).module(), layer, inputs[:1])
    half = SKLinear.from_linear(nn.Linear(70, 50), num_terms=1, low_rank=5).half()
    x = 300 * torch.rand(4, 70).half()
    program = torch.export.export(half, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), half(x), rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_passes_its_check_without_a_warning(name, grad):
    layer, x, _, inputs = case(name)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.filterwarnings("ignore", "`torch.jit.trace")  # torch deprecates it, and users still call it
        if name.startswith("interpolative"):
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, x)
    compare(lambda x: traced(x).detach(), layer, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "int3+low_rank"])
def test_aot_inductor_packages(name, tmp_path):
    layer, x, dynamic, inputs = case(name)
    program = torch.export.export(layer, (x,), dynamic_shapes=(dynamic,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
    # torch's packages read inputs as if they were contiguous, those of nn.Linear too.
    compare(loaded, layer, [x.contiguous() for x in inputs])


def onnx_session(model, x, dynamic, path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=True, dynamic_shapes=(dynamic,), verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: np.ascontiguousarray(x.numpy())})[0]


@pytest.mark.extra
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_the_same(name, tmp_path):
    layer, x, dynamic, inputs = case(name)
    compare(onnx_session(layer, x, dynamic, tmp_path / "layer.onnx"), layer, inputs)


@pytest.mark.extra
@pytest.mark.parametrize("form", ["packed", "int4", "int8", "convolution in int4"])
def test_an_onnx_file_holds_bits_and_codes_as_they_are(form, tmp_path):
    torch.manual_seed(0)
    dense, x = nn.Linear(512, 512), torch.randn(2, 512)
    if form.startswith("conv"):
        dense, x = nn.Conv2d(128, 256, 3, padding=1), torch.randn(2, 128, 6, 5)
        layer = QuantizedConv2d.from_conv(dense, 4, group_size=96)
    elif form == "packed":
        layer = SKLinear.from_linear(dense, num_terms=1, low_rank=8, sketch="signs").pack_()
    else:
        layer = QuantizedLinear.from_linear(dense, int(form[3:]), group_size=96)
    run = onnx_session(layer.eval(), x, {0: torch.export.Dim("batch")}, tmp_path / "layer.onnx")
    compare(run, layer, [x, x[:1]])
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    stored_bytes = sum(tensor.nbytes for tensor in plain_state(layer).values())
    assert written < stored_bytes + (2 * layer.U1.nbytes if form == "packed" else 0) + 80_000 < dense.weight.nbytes


@pytest.mark.extra
def test_linears_give_two_products(tmp_path):
    onnx = pytest.importorskip("onnx")
    layer, x, dynamic, inputs = case("low rank")
    model = nn.Sequential(layer)
    pr.to_linears_(model)
    compare(onnx_session(model, x, dynamic, tmp_path / "layer.onnx"), layer, inputs)
    nodes = onnx.load(tmp_path / "layer.onnx").graph.node
    assert [node.op_type for node in nodes] == ["MatMul", "MatMul", "Add"]
