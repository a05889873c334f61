"""Quantized products and folds of sparse sketches in C++: against float64, and what happens without a compiler."""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
from panther.kernels import QuantizedCodes, QuantizedOperands, pack_codes, quantized_matmul
from panther.kernels.cpu import native
from panther.kernels.cpu.native import folded
from panther.kernels.ops.quantized_operands import expanded_codes
from panther.kernels.reference.folded import fold, tile
from tolerances import KERNEL_RMS, rms_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from panther.errors import SketchMismatchError
from panther.nn import QuantizedLinear, SKLinear

needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler and AVX2")

# in, out, group size: size one, odd sizes, one group, a group that is cut off, halves of whole groups and others.
SIZES = [(1, 1, 1), (7, 5, 7), (33, 17, 8), (130, 3, 64), (128, 48, 64), (96, 20, 32), (512, 9, 512), (256, 33, 16)]
SIZES += [(384, 70, 64)]


def codes_of(columns, outputs, group_size, bits):
    generator = torch.Generator().manual_seed(columns + 10 * bits)
    groups = -(-columns // group_size)
    numbers = torch.randint(2**bits, (outputs, columns), generator=generator).to(torch.uint8)
    scales = torch.rand(outputs, groups, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(2**bits, (outputs, groups), generator=generator).to(torch.uint8)
    return QuantizedCodes(pack_codes(numbers, bits), bits, scales, zeros, group_size)


@needs_compiler
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_weights_against_float64(bits, dtype):
    for columns, outputs, group_size in SIZES:
        codes = codes_of(columns, outputs, group_size, bits)
        assert native.takes(codes, dtype)
        exact = expanded_codes(codes, columns, torch.float64)
        expanded = native.expand(codes, slice(0, outputs), torch.empty(outputs, columns, dtype=dtype))
        assert torch.equal(expanded, exact.float().to(dtype))
        part = native.expand(codes, slice(outputs // 2, outputs), torch.empty(outputs - outputs // 2, columns))
        assert torch.equal(part, exact[outputs // 2 :].float())
        bias = torch.randn(outputs, dtype=dtype)
        for rows in (1, 2, 3, 4, 11, 40):
            x = torch.randn(columns, rows).to(dtype).mT  # not contiguous
            y = quantized_matmul(x, QuantizedOperands(columns, codes), bias)
            assert y.dtype is dtype
            assert y.shape == (rows, outputs)
            wanted = x.double() @ exact.mT + bias.double()
            assert rms_error(y, wanted) < 4 * KERNEL_RMS[dtype]


@needs_compiler
def test_rows_do_not_depend_on_each_other():
    product = native.prepared(QuantizedOperands(256, codes_of(256, 33, 64, 4)), None, torch.float32)
    for rows in (2, 3, 4, 9, 14):
        x = torch.randn(rows, 256)
        assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))


@needs_compiler
@pytest.mark.parametrize("bits", [None, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_corrections_and_factors_alone_against_float64(bits, dtype):
    for columns, outputs, group_size in SIZES:
        for rank in (1, 5, 33):
            layer = QuantizedLinear(columns, outputs, bits, group_size=group_size, low_rank=rank, dtype=dtype)
            left = torch.randint(-127, 128, (outputs, rank)).to(torch.int8)
            layer.set_factors_(left, layer.right.clone(), layer.factor_scales.clone())
            exact, weight = copy.deepcopy(layer).double(), layer._operands()
            product = native.prepared(weight, layer.bias.detach(), dtype)
            for rows in (1, 2, 3, 4, 7, 9, 14, 17, 40):
                x = torch.randn(columns, rows).to(dtype).mT  # not contiguous
                y = product(x)
                if rows <= 4 or y is not None:  # the others by few rows in float32, and by tiles
                    assert rms_error(y, exact(x.double())) < 4 * KERNEL_RMS[dtype]
            assert product(x[:0]) is None
            assert product(x.double()) is None


@needs_compiler
def test_numbers_that_are_not_finite_stay_so():
    product = native.prepared(QuantizedOperands(64, codes_of(64, 8, 32, 4)), None, torch.bfloat16)
    for number in (float("nan"), float("inf")):
        x = torch.full((1, 64), number, dtype=torch.bfloat16)
        assert not product(x).isfinite().any()


@needs_compiler
def test_rows_that_are_not_finite_leave_other_rows_alone():
    weight = QuantizedOperands(128, codes_of(128, 40, 64, 4))
    x = torch.randn(37, 128, dtype=torch.bfloat16)
    y = quantized_matmul(x, weight)
    x[5], x[36] = float("nan"), float("inf")
    changed = quantized_matmul(x, weight)
    assert not changed[[5, 36]].isfinite().any()
    others = [row for row in range(37) if row not in (5, 36)]
    assert torch.equal(changed[others], y[others])


@needs_compiler
def test_threads_give_the_same_products():
    """Tiles are configured in every thread."""
    before, products = torch.get_num_threads(), []
    x = torch.randn(40, 256, dtype=torch.bfloat16)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            products.append(native.prepared(QuantizedOperands(256, codes_of(256, 70, 64, 4)), None, x.dtype)(x[:4]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


@needs_compiler
def test_a_layer_prepares_its_product_once_and_follows_every_change(monkeypatch):
    layer, x = QuantizedLinear(64, 48, 4, group_size=32, low_rank=2), torch.randn(2, 3, 64)
    bound = 4 * KERNEL_RMS[torch.float32]

    def exact():
        return x.double() @ layer.weight.double().mT + layer.bias.double()

    def replace_scales():
        layer.scales = layer.scales * 3

    def replace_bias():
        layer.bias = torch.nn.Parameter(torch.randn(48))

    def write_record():
        layer.set_codes_(torch.randint(16, (48, 64)).to(torch.uint8), torch.rand(48, 2), torch.zeros(48, 2).byte())

    def load():
        layer.load_state_dict(QuantizedLinear(64, 48, 4, group_size=32, low_rank=2).state_dict(), assign=True)

    def train_scales():
        layer.train_scales_()
        layer.scale_logs.fill_(0.5)

    changes = [
        lambda: None,
        train_scales,
        lambda: layer.train_scales_(False),
        replace_scales,
        replace_bias,
        write_record,
        load,
        lambda: layer.hold_scales_(torch.float32),
        lambda: layer.hold_scales_(torch.bfloat16),
        lambda: layer.scales.mul_(2),
        layer.share_memory,
    ]
    for change in changes:
        with torch.no_grad():
            change()
            assert rms_error(layer(x), exact()) < bound
            assert rms_error(layer(x), exact()) < bound
    with torch.no_grad():
        assert layer._product is not None
        assert "_product" not in copy.deepcopy(layer).__dict__
        monkeypatch.setattr("panther.nn.quantized.linear.quantized_matmul", None)
        assert layer(x).shape == (2, 3, 48)


class Doubled(torch.nn.Module):
    def forward(self, bias):
        return 2 * bias


@needs_compiler
def test_a_product_is_not_kept_with_a_bias_that_is_computed():
    layer, x = QuantizedLinear(64, 48, 4, group_size=32), torch.randn(2, 64)
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
    with torch.no_grad():
        output = layer(x)
        layer.parametrizations.bias.original.add_(1)
        torch.testing.assert_close(layer(x), output + 2)


@needs_compiler
def test_a_prepared_layer_still_differentiates_casts_and_refuses():
    layer, x = QuantizedLinear(64, 48, 4, group_size=32), torch.randn(2, 64)
    with torch.inference_mode():
        y = layer(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, layer.weight.sum(0).expand(2, -1).detach())
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
        assert torch.equal(layer(x), y)
        torch.testing.assert_close(torch.vmap(layer)(x[:, None])[:, 0], layer(x))
        with pytest.raises(ValueError, match="the layer takes 64"):
            layer(x[:, :32])
        with pytest.raises(TypeError, match="cast the input"):
            layer(x.double())
        layer.codes.zero_()  # Codes that other code averages do not have the checksum of the record.
        with pytest.raises(SketchMismatchError, match="checksum"):
            layer(x)


@needs_compiler
def test_other_operands_are_left_to_torch():
    codes = codes_of(64, 8, 32, 4)
    assert not native.takes(codes, torch.float64)
    assert not native.takes(codes, torch.float16)
    assert not native.takes(codes._replace(scales=codes.scales.float()), torch.float32)
    assert not native.takes(codes._replace(packed=codes.packed.mT.contiguous().mT), torch.float32)
    assert not native.takes(codes_of(64, 8, 32, 4)._replace(packed=codes.packed[:0]), torch.float32)


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """A process that has compiled nothing."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("PANTHER_KERNELS", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_compiler_torch_multiplies_and_one_sentence_is_logged(compiler, uncompiled, monkeypatch, caplog):
    monkeypatch.setenv("CXX", compiler)
    layer, x = QuantizedLinear(64, 48, 4, group_size=32), torch.randn(3, 64)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        y = layer(x)
        layer(x)
    assert rms_error(y, x.double() @ layer.weight.double().mT + layer.bias.double()) < 4 * KERNEL_RMS[torch.float32]
    (record,) = caplog.records
    assert "without the compiled CPU kernel" in record.message
    assert "Install a C++ compiler, or set PANTHER_KERNELS=torch" in record.message


def test_a_folder_that_is_a_file_is_not_used(uncompiled, monkeypatch, caplog):
    (uncompiled / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(uncompiled / "file"))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert len(caplog.records) == 1


def test_the_setting_turns_it_off_without_a_word(uncompiled, monkeypatch, caplog):
    monkeypatch.setenv("PANTHER_KERNELS", "torch")
    with caplog.at_level(logging.DEBUG):
        assert native.library() is None
    assert not caplog.records
    assert not list(uncompiled.iterdir())


@needs_compiler
def test_a_damaged_file_is_compiled_again(uncompiled):
    compiled = native._compiled()
    compiled.write_bytes(b"damaged")
    assert native.library() is not None
    assert compiled.stat().st_size > 1000


def test_another_processor_or_flag_has_another_file(uncompiled, monkeypatch):
    compiler = uncompiled / "compiler"
    compiler.write_text('#!/bin/sh\nfor output; do :; done\necho "$@" > "$output"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    paths = [native._compiled()]
    monkeypatch.setattr(native, "_processor", lambda: "another")
    paths.append(native._compiled())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    paths.append(native._compiled())
    assert sorted((uncompiled / "panther").iterdir()) == sorted(set(paths))
    assert [" -mno-avx512f " in path.read_text() for path in paths] == [True, True, False]


@needs_compiler
def test_processes_compile_at_the_same_time(tmp_path):
    code = "from panther.kernels.cpu import native; assert native.library() is not None"
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert [path.suffix for path in (tmp_path / "panther").iterdir()] == [".so"]


@needs_compiler
def test_a_layer_that_was_made_in_inference_mode_is_multiplied_too():
    with torch.inference_mode():
        layer, x = QuantizedLinear(64, 48, 4, group_size=32), torch.randn(2, 64)
        assert native.takes(layer._operands().codes, x.dtype)
        assert rms_error(layer(x), x.double() @ layer.weight.double().mT + layer.bias.double()) < 1e-6


@pytest.mark.parametrize("low_rank", [0, 3])
def test_a_compiled_graph_holds_one_operator_and_no_expanded_weight(low_rank):
    layer = QuantizedLinear(64, 48, 4, group_size=32, low_rank=low_rank).requires_grad_(False)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(3, 64)
    with torch.no_grad():
        y = torch.compile(layer, backend=record, fullgraph=True)(x)
        assert torch.equal(y, layer(x))
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.panther.quantized_product.default) == 1
    assert not any("bitwise" in str(target) or "rshift" in str(target) for target in targets)
    leaf = x.clone().requires_grad_()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(leaf).square().sum().backward()
    other = x.clone().requires_grad_()
    layer(other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_the_sources_are_installed_beside_their_module():
    assert [source.name for source in native._SOURCES] == ["folded.cpp", "quantized.cpp"]


# in, out, R: R that divides both, neither, of whole vectors and not, above both sides; one input, output and rank.
SPARSE_SIZES = [
    (48, 32, 16),
    (192, 768, 38),
    (50, 33, 7),
    (12, 20, 24),
    (3, 4, 11),
    (1, 1, 1),
    (260, 130, 129),
    (9, 5, 1),
]


def sparse_operands(sizes, dtype, rows):
    columns, outputs, rank = sizes
    generator = torch.Generator().manual_seed(rows)
    x, h = (torch.randn(rows, n, generator=generator).to(dtype) for n in (columns, rank))
    signs = [torch.randint(2, (n,), generator=generator).mul(2).sub(1).to(dtype) for n in (columns, outputs)]
    return x, signs[0], h, signs[1], torch.randn(outputs, generator=generator).to(dtype)


@needs_compiler
@pytest.mark.parametrize("sizes", SPARSE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_folds_and_tilings_against_float64(sizes, dtype, threads):
    for rows in (0, 1, 3, 300):
        x, in_signs, h, out_signs, bias = sparse_operands(sizes, dtype, rows)
        transposed, wide = x.mT.contiguous().mT, torch.cat([x, x], 1)[:, : sizes[0]]
        exact_fold = 0.3 * fold(x.double(), in_signs.double(), sizes[2])
        for operand in (x, transposed, wide):
            for offset in (bias, None):
                args = operand, in_signs, h, out_signs, offset
                assert folded.takes(*args)
                before = torch.get_num_threads()
                torch.set_num_threads(threads)
                try:
                    out, folds = folded.fold_and_tile(*args, 0.3)
                finally:
                    torch.set_num_threads(before)
                doubles = [None if arg is None else arg.double() for arg in (h, out_signs, offset)]
                exact = tile(*doubles, 0.3)
                assert (out.dtype, folds.dtype) == (dtype, dtype)
                assert rms_error(out, exact) <= 4 * KERNEL_RMS[dtype]
                assert rms_error(folds, exact_fold) <= 4 * KERNEL_RMS[dtype]


@needs_compiler
def test_folds_of_numbers_that_are_not_finite_stay_so():
    for number in (float("nan"), float("inf"), float("-inf")):
        x, in_signs, h, out_signs, _ = sparse_operands((48, 32, 16), torch.bfloat16, 2)
        x[0, 17] = h[0, 1] = number
        out, folds = folded.fold_and_tile(x, in_signs, h, out_signs, None, 1.0)
        assert (~folds.isfinite()).nonzero().tolist() == [[0, 1]]
        assert (~out.isfinite()).nonzero().tolist() == [[0, 1], [0, 17]]


@needs_compiler
def test_sketched_layers_fold_in_cpp_where_nothing_observes_them(monkeypatch):
    calls = []

    def count(*args):
        calls.append(args[0].shape)
        return fold_and_tile(*args)

    fold_and_tile = folded.fold_and_tile
    monkeypatch.setattr(folded, "fold_and_tile", count)
    layer, x = SKLinear(96, 64, 8), torch.randn(5, 96, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert calls == [(5, 96), (5, 64)]
    torch.testing.assert_close(dx, grad @ layer.weight)
    (again,) = torch.autograd.grad(y, x, grad, create_graph=True)  # may be differentiated again
    torch.testing.assert_close(again, dx)
    torch.testing.assert_close(torch.vmap(layer)(x[:, None])[:, 0], y)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == y.shape
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype is torch.float16
    assert len(calls) == 2
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    assert len(calls) == 3


@needs_compiler
def test_modes_see_an_operator_that_folds():
    layer, x, other = SKLinear(96, 64, 8).requires_grad_(False), torch.randn(5, 96), torch.randn(5, 96)
    graph = make_fx(layer)(x)
    assert torch.ops.panther.fold_and_tile.default in {node.target for node in graph.graph.nodes}
    assert torch.equal(graph(other), layer(other))
    with FlopCounterMode(display=False):
        observed = layer(x)
    assert torch.equal(observed, layer(x))
    operands = sparse_operands((48, 32, 16), torch.float32, 3)
    torch.library.opcheck(torch.ops.panther.fold_and_tile.default, (*operands, 0.5))
    for place, wrong in ((1, operands[1][:-1]), (2, operands[2][:, :0]), (2, operands[2][:2]), (4, operands[4][1:])):
        args = [*operands[:place], wrong, *operands[place + 1 :]]
        with pytest.raises(ValueError, match="fold_and_tile takes x"):
            folded.fold_and_tile(*args, 0.5)
