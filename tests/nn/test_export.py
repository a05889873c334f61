"""Compressed layers through torch.export, AOTInductor, ONNX and torch.jit.trace, with sizes that may change."""

import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import panther as pr
from panther.nn import (
    InterpolativeLinear,
    QuantizedConv2d,
    QuantizedLinear,
    RandMultiHeadAttention,
    SKConv1d,
    SKConv2d,
    SKConv3d,
    SKLinear,
)

CONVS = {1: (SKConv1d, nn.Conv1d), 2: (SKConv2d, nn.Conv2d), 3: (SKConv3d, nn.Conv3d)}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def sketched(init, **more):
    return SKLinear.from_linear(nn.Linear(70, 50), num_terms=1, low_rank=5, init=init, **more)


def quantized(*args, **more):
    return QuantizedLinear.from_linear(nn.Linear(70, 50), *args, **more)


def conv(dim, init="svd", **more):
    make, dense = CONVS[dim]
    dense = dense(32, 48, 3, padding=1, **more)
    return make.from_conv(dense, num_terms=1, low_rank=4, init=init)


def quantized_conv(bits, *, groups=1, padding_mode="zeros", **form):
    dense = nn.Conv2d(32, 48, 3, padding="same", groups=groups, padding_mode=padding_mode)
    return QuantizedConv2d.from_conv(dense, bits, **form)


class SelfAttention(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.attention = RandMultiHeadAttention(70, 5, 64, seed=0, **more)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


LINEARS = {
    "fitted": lambda: sketched("svd"),
    "fused": lambda: sketched("svd").fuse_(),
    "seeded": lambda: sketched("lstsq"),
    "packed": lambda: sketched("lstsq").pack_(),
    "int8": lambda: quantized(8, group_size=32),
    "int4": lambda: quantized(4, group_size=35),
    "int3": lambda: quantized(3, group_size=None),
    "int4+low_rank": lambda: quantized(4, group_size=32, low_rank=3),
    "int8_low_rank": lambda: quantized(None, low_rank=3),
    "interpolative": lambda: InterpolativeLinear.from_linear(nn.Linear(70, 50), 6),
}
CASES = LINEARS | {
    "conv1d": lambda: conv(1),
    "conv2d": lambda: conv(2),
    "conv2d seeded": lambda: conv(2, "lstsq"),
    "conv2d groups": lambda: conv(2, groups=2, padding_mode="reflect"),
    "conv3d": lambda: conv(3),
    "conv2d int8": lambda: quantized_conv(8, group_size=None, padding_mode="reflect"),
    "conv2d int3": lambda: quantized_conv(3, group_size=50, low_rank=2, groups=2),
    "conv2d int8_low_rank": lambda: quantized_conv(None, low_rank=5),
    "hermite": SelfAttention,
    "softmax": lambda: SelfAttention(kernel_fn="softmax"),
}


def case(name):
    """Return a layer, an input, the dimensions that may change, and inputs of other sizes."""
    torch.manual_seed(0)
    layer = CASES[name]().eval()
    dim, length = (int(name[4]), 2) if name.startswith("conv") else (0, 1)
    x = torch.randn(3, 32, *(9, 8, 7)[:dim]) if dim else torch.randn(3, 9, 70)
    dynamic = {0: torch.export.Dim("batch"), length: torch.export.Dim("length", min=3)}
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


@pytest.mark.parametrize("name", ["fitted", "packed", "int4+low_rank"])
def test_an_exported_program_is_saved_and_loaded(name):
    layer, x, dynamic, inputs = case(name)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), dynamic_shapes=(dynamic,)), file)
    file.seek(0)
    compare(torch.export.load(file).module(), layer, inputs)


def test_a_strict_export_and_half_precision():
    layer, x, _, inputs = case("packed")
    compare(torch.export.export(layer, (x,), strict=True).module(), layer, inputs[:1])
    half = sketched("lstsq").half()
    x = 300 * torch.rand(4, 70).half()
    program = torch.export.export(half, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), half(x), rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_passes_its_check_without_a_warning(name, grad):
    layer, x, _, inputs = case(name)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.filterwarnings("ignore", "`torch.jit.trace", DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit.trace_method", DeprecationWarning)
        if name == "interpolative":
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, x)
    compare(lambda x: traced(x).detach(), layer, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "int4+low_rank"])
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
        layer = SKLinear.from_linear(dense, num_terms=1, low_rank=8, init="lstsq").pack_()
    else:
        layer = QuantizedLinear.from_linear(dense, int(form[3:]), group_size=96)
    run = onnx_session(layer.eval(), x, {0: torch.export.Dim("batch")}, tmp_path / "layer.onnx")
    compare(run, layer, [x, x[:1]])
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    assert written < held + (2 * layer.U1.nbytes if form == "packed" else 0) + 80_000 < dense.weight.nbytes


@pytest.mark.extra
def test_linears_give_two_products(tmp_path):
    onnx = pytest.importorskip("onnx")
    layer, x, dynamic, inputs = case("fitted")
    model = nn.Sequential(layer)
    pr.to_linears_(model)
    compare(onnx_session(model, x, dynamic, tmp_path / "layer.onnx"), layer, inputs)
    nodes = onnx.load(tmp_path / "layer.onnx").graph.node
    assert [node.op_type for node in nodes] == ["MatMul", "MatMul", "Add"]
