"""QuantizedLinear: packing, grids, the forms, and what it computes."""

import pytest
import torch
from covering import all_pairs
from panther.kernels import code_bytes
from panther.kernels.reference.codes import spread
from tolerances import assert_close
from torch import nn

from panther.errors import DTypeError, ShapeError
from panther.nn import QuantizedLinear
from panther.nn.quantized import pack_codes, stored_bytes, unpack_codes
from panther.nn.quantized.matrix import quantization_grid, quantize, round_factors
from panther.nn.sketch_record import plain_state

WIDTHS = [2, 3, 4, 5, 6, 7, 8]
FORMS = [*({"bits": bits} for bits in (2, 3, 4, 8)), {"bits": 4, "low_rank": 3}, {"bits": None, "low_rank": 5}]


def dense(columns=100, rows=60, **kwargs):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, **kwargs)


def formula(layer, x, **floats):
    """The layer's formula in float64, from its stored tensors, or from floats that are given."""
    names = ("scales", "factor_scales", "scale_logs", "factor_scale_logs", "bias")
    tensors = {name: getattr(layer, name) for name in names}
    floats = {name: tensor.detach().double() for name, tensor in tensors.items() if tensor is not None} | floats
    for name, logs in (("scales", "scale_logs"), ("factor_scales", "factor_scale_logs")):
        if logs in floats:
            floats[name] = floats[name] * floats[logs].exp()
    weight = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
    if layer.bits is not None:
        codes = unpack_codes(layer.codes, layer.bits, layer.in_features).double()
        for j in range(layer.in_features):
            g = j // layer.group_size
            weight[:, j] = floats["scales"][:, g] * (codes[:, j] - layer.zeros[:, g].double())
    if layer.low_rank:
        weight += (layer.left.double() * floats["factor_scales"]) @ layer.right.double()
    return x.double() @ weight.mT + floats.get("bias", 0.0)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [0, 1, 2, 7, 8, 9, 64, 131])
def test_codes_are_packed_and_unpacked_exactly(bits, columns):
    codes = torch.randint(2**bits, (5, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack_codes(codes, bits)
    assert packed.dtype is torch.uint8
    assert packed.shape == (5, code_bytes(columns, bits))
    assert code_bytes(columns, bits) < columns * bits / 8 + bits.bit_count() + 1e-9
    assert torch.equal(unpack_codes(packed, bits, columns), codes)
    shifted = torch.cat((packed.new_empty(5, 1), packed), 1)[:, 1:]  # no whole words
    assert torch.equal(unpack_codes(shifted, bits, columns), codes)


@pytest.mark.parametrize(
    ("form", "group_size", "columns", "rows", "bias", "dtype"),
    all_pairs(
        FORMS, [None, 1, 7, 128], [1, 31, 64, 100], [1, 60, 64], [False, True],
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ),
)  # fmt: skip
def test_forward_is_the_formula(form, group_size, columns, rows, bias, dtype):
    linear = dense(columns, rows, bias=bias, dtype=dtype)
    form = form | {"low_rank": min(form.get("low_rank", 0), columns, rows)}
    layer = QuantizedLinear.from_linear(linear, **form, group_size=group_size)
    for batch in (1, 40):
        x = torch.randn(batch, columns, dtype=dtype)
        exact = formula(layer, x)
        for output in (layer(x), torch.no_grad()(layer)(x)):
            assert output.dtype is dtype
            assert_close(output, exact, dtype)
        assert_close(layer.to_linear()(x), exact, dtype)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group_size", [None, 16, 33])
def test_rounding_is_as_accurate_as_its_width_allows(bits, group_size):
    linear = dense()
    layer = QuantizedLinear.from_linear(linear, bits, group_size=group_size)
    size = min(group_size or 100, 100)
    padded = nn.functional.pad(linear.weight, (0, -100 % size)).unflatten(1, (-1, size))
    step = (padded.amax(-1).clamp_min(0) - padded.amin(-1).clamp_max(0)) / (2**bits - 1)
    # Errors that are uniform over a step have a mean square of a twelfth of its square.
    assert (layer.weight - linear.weight).square().mean() <= spread(step, size, 100).square().mean() / 3


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_searched_clipping_is_at_least_as_good_as_the_whole_range(bits):
    weight = dense(256, 64).weight
    importance = torch.rand(256, generator=torch.Generator().manual_seed(0)).square()

    def error(**options):
        scales, zeros = quantization_grid(weight, bits, 64, importance=importance, **options)
        codes = quantize(weight, scales, zeros, 64, bits)
        rounded = spread(scales.float(), 64, 256) * (codes.float() - spread(zeros, 64, 256))
        return ((rounded - weight).square() * importance).unflatten(1, (4, 64)).sum(-1)

    assert (error() <= error(candidates=1) * (1 + 1e-5)).all()


def test_constant_and_zero_weights():
    for value in (0.0, 3.0, -2.5, 1e-30, 1e30, -3e38):
        linear = dense()
        nn.init.constant_(linear.weight, value)
        for bits in WIDTHS:
            weight = QuantizedLinear.from_linear(linear, bits, group_size=32).weight
            assert torch.allclose(weight, linear.weight, rtol=2**-8, atol=1e-37)
    linear.weight.data.normal_()[:, 32:64] = 0
    layer = QuantizedLinear.from_linear(linear, 4, group_size=32, low_rank=2)
    assert layer(torch.randn(3, 100)).isfinite().all()


def test_a_correction_brings_the_weight_nearer():
    linear = dense()
    errors = [
        (QuantizedLinear.from_linear(linear, 3, low_rank=rank).weight - linear.weight).norm().item()
        for rank in (0, 4, 16, 60)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def test_low_rank_alone_is_the_truncated_svd_to_the_rounding_of_int8():
    linear = dense()
    U, sigma, Vt = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    layer = QuantizedLinear.from_linear(linear, None, low_rank=12)
    truncated = (U[:, :12] * sigma[:12]) @ Vt[:12]
    assert (layer.weight - truncated).norm() < 0.02 * truncated.norm()


def test_factors_reach_127_and_bfloat16_scales_cost_nothing():
    torch.manual_seed(0)
    left, right = torch.randn(50, 8), torch.randn(8, 60)
    right[3] = 0
    L, R, c = round_factors(left, right)
    assert c.dtype is torch.bfloat16
    assert L[:, :3].abs().amax(0).min() >= 126
    assert R[:3].abs().amax(1).min() == 127
    assert ((L * c.double()) @ R.double() - left @ right).norm() < 0.015 * (left @ right).norm()


@pytest.mark.parametrize("form", FORMS)
def test_bytes_at_rest(form):
    for columns, rows, group_size in ((100, 60, None), (1, 1, 5), (65, 3, 8)):
        low_rank = min(form.get("low_rank", 0), columns, rows)
        if form["bits"] is None and not low_rank:
            continue
        layer = QuantizedLinear(columns, rows, form["bits"], group_size=group_size, low_rank=low_rank, bias=False)
        stored = sum(tensor.nbytes for tensor in plain_state(layer).values())
        assert stored == stored_bytes(columns, rows, form["bits"], group_size=group_size, low_rank=low_rank)


@pytest.mark.parametrize("form", FORMS)
def test_a_new_layer_has_the_variance_of_a_dense_one(form):
    torch.manual_seed(0)
    layer = QuantizedLinear(400, 300, **form)
    assert layer.weight.std().item() == pytest.approx((1 / (3 * 400)) ** 0.5, rel=0.25)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_formula(form):
    layer = QuantizedLinear.from_linear(dense(dtype=torch.float64), **form).train_scales_()
    x = torch.randn(7, 100, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    floats = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    theirs = torch.autograd.grad(formula(layer, x, **floats).square().sum(), [x, *floats.values()])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5 if a.dtype is torch.float32 else 1e-9, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_keeps_no_weight_for_its_gradient_unless_scales_are_trained(form, bias):
    layer = QuantizedLinear.from_linear(dense(dtype=torch.float64), **form).train_scales_()
    x = torch.randn(7, 100, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(7, 60, dtype=torch.float64)
    expected = layer(x)
    gradients = torch.autograd.grad(expected, (x, layer.bias), direction)
    layer.train_scales_(False).bias.requires_grad_(bias)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    assert not kept
    assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)
    untrained = torch.autograd.grad(output, (x, layer.bias)[: 1 + bias], direction)
    for ours, theirs in zip(untrained, gradients, strict=False):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(layer, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).square(), x, fast_mode=True)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_of_all_parameters_leaves_the_weight(form, optimizer):
    """int8 scales are about 1e-3 and the scales of factors 1e-7: one step of an optimizer destroyed the layer."""
    layer = QuantizedLinear.from_linear(dense(), **form)
    first_weight = layer.weight
    step = getattr(torch.optim, optimizer)(layer.parameters(), lr=1e-2)
    for _ in range(3):
        step.zero_grad()
        layer(torch.randn(20, 100)).square().sum().backward()
        step.step()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert torch.equal(layer.weight, first_weight)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_changes_scales_relative_to_their_size(form):
    layer = QuantizedLinear.from_linear(dense(), **form).train_scales_()
    first_weight = layer.weight.detach()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)  # several times a step of bfloat16
    layer(torch.randn(20, 100)).square().sum().backward()
    optimizer.step()
    change = (layer.weight - first_weight).norm() / first_weight.norm()
    assert 0.01 < change < 0.06
    with torch.no_grad():
        inferred = layer.weight
    assert torch.equal(inferred, layer.weight)  # rounded in the same way with gradients
    assert torch.equal(layer.train_scales_(False).weight, inferred)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 3), {}, ShapeError, "in_features=0 must be at least 1"),
        ((3, 3, 1), {}, ShapeError, "bits=1 must be at least 2"),
        ((3, 3, 9), {}, ShapeError, "bits=9 must be 2 to 8"),
        ((3, 3, 4.0), {}, TypeError, "bits must be an integer"),
        ((3, 3, None), {}, ValueError, "bits=None leaves low rank alone"),
        ((3, 3), {"group_size": 0}, ShapeError, "group_size=0 must be at least 1"),
        ((3, 3), {"low_rank": -1}, ShapeError, "low_rank=-1 must be at least 0"),
        ((3, 3), {"bias": "no"}, TypeError, "bias must be True or False"),
        ((3, 3), {"dtype": torch.int8}, DTypeError, "must be a floating dtype"),
        ((3, 3), {"device": 1.5}, TypeError, "device must be a torch.device"),
    ],
)
def test_bad_arguments(arguments, options, error, match):
    with pytest.raises(error, match=match):
        QuantizedLinear(*arguments, **options)


def test_weights_beyond_bfloat16_are_refused():
    huge = dense(dtype=torch.float64)
    huge.weight.data *= 1e300
    with pytest.raises(ValueError, match="too large for bfloat16"):
        QuantizedLinear.from_linear(huge)


def test_bad_codes_and_factors_change_nothing():
    layer = QuantizedLinear.from_linear(dense(), 4, group_size=50, low_rank=2)
    first_state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    codes, scales = torch.zeros(60, 100, dtype=torch.uint8), torch.ones(60, 2)
    zeros = torch.zeros(60, 2, dtype=torch.uint8)
    left, right, c = torch.zeros(60, 2).char(), torch.zeros(2, 100).char(), torch.ones(2)
    for arguments, error, match in (
        ((codes[:, 1:], scales, zeros), ShapeError, r"codes must have shape \(60, 100\)"),
        ((codes, scales[:, :1], zeros), ShapeError, r"scales must have shape \(60, 2\)"),
        ((codes.int(), scales, zeros), DTypeError, "codes must be torch.uint8"),
        ((codes + 16, scales, zeros), ValueError, "codes of 4 bits are at most 15, and one is 16"),
        ((codes, scales * torch.nan, zeros), ValueError, "scales must be finite"),
        (([1], scales, zeros), TypeError, "codes must be a tensor, not list"),
    ):
        with pytest.raises(error, match=match):
            layer.set_codes_(*arguments)
    for arguments, error, match in (
        ((left[1:], right, c), ShapeError, r"left must have shape \(60, 2\)"),
        ((left, right.float(), c), DTypeError, "right must be torch.int8"),
        ((left, right, c / 0), ValueError, "factor_scales must be finite"),
    ):
        with pytest.raises(error, match=match):
            layer.set_factors_(*arguments)
    assert all(torch.equal(tensor, first_state[name]) for name, tensor in layer.state_dict().items())
    with pytest.raises(ShapeError, match="has no correction"):
        QuantizedLinear(4, 4).set_factors_(left, right, c)
    with pytest.raises(ShapeError, match="and no codes"):
        QuantizedLinear(4, 4, None, low_rank=1).set_codes_(codes, scales, zeros)


@pytest.mark.parametrize("rows", [1, 5, 15])
def test_bytes_at_any_address(rows):
    """Tensors mapped from a file, and views, as the kernel of torch does not take them by itself."""

    def moved(tensor, offset):
        raw = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
        start = -raw.data_ptr() % 64 + offset
        return raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    layer = QuantizedLinear.from_linear(dense(64, 96, dtype=torch.bfloat16), 8)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    strided = torch.randn(rows, 3, 67, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)[:, 1, 2:66]
    with torch.no_grad():
        for offset in (1, 8, 44):
            layer.codes = moved(layer.codes, offset)
            for inputs in (moved(x, 2), moved(x, 16), x.mT.contiguous().mT, strided, strided[:1].expand(rows, -1)):
                assert_close(layer(inputs), formula(layer, inputs), torch.bfloat16)


def test_sparse_inputs():
    layer = QuantizedLinear(100, 60, bias=False)
    x = torch.eye(3, 100)
    with torch.no_grad():
        assert torch.allclose(layer(x.to_sparse()), layer(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_of_a_gpu_in_the_interpreter(dtype, monkeypatch):
    pytest.importorskip("triton")
    from panther.kernels import selection

    torch.manual_seed(0)
    layers = [
        QuantizedLinear(70, 40, 3, group_size=32, low_rank=5, dtype=dtype),
        QuantizedLinear(70, 40, 8, bias=False),
    ]
    inputs = [torch.randn(2, 3, 70, dtype=dtype), torch.randn(70)]
    nn.init.uniform_(layers[0].factor_scales, 1e-6, 1e-5)
    left = torch.randint(-127, 128, (40, 5), dtype=torch.int8)
    layers[0].set_factors_(left, layers[0].right, layers[0].factor_scales)
    with torch.no_grad():
        expected = [formula(layer, x) for layer, x in zip(layers, inputs, strict=True)]
        monkeypatch.setenv("PANTHER_KERNELS", "triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        selection.backend.cache_clear()
        try:
            outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
            assert layers[0](inputs[0][:0]).shape == (0, 3, 40)
        finally:
            monkeypatch.undo()
            selection.backend.cache_clear()
    for output, exact in zip(outputs, expected, strict=True):
        assert_close(output, exact, output.dtype)
