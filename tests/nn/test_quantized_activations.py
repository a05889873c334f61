"""QuantizedLinear with inputs rounded to 8 bits: the rounded formula, by integers and in floating point, everywhere."""

import copy

import pytest
import torch
from covering import all_pairs
from panther.kernels.cpu import integers
from panther.kernels.ops.quantized import has_compiled_kernel
from panther.kernels.ops.quantized_operands import expanded_codes
from panther.kernels.selection import multiplies_by_instruction
from tolerances import assert_close
from torch import nn

import panther as pr
from panther.nn import QuantizedLinear

FORMS = [*({"bits": bits} for bits in (2, 3, 4, 7, 8)), {"bits": 4, "low_rank": 3}, {"bits": None, "low_rank": 5}]


def layer(columns=100, rows=60, bias=True, dtype=torch.float32, **form):
    torch.manual_seed(0)
    form["low_rank"] = min(form.get("low_rank", 0), columns, rows)
    dense = nn.Linear(columns, rows, bias, dtype=dtype)
    return QuantizedLinear.from_linear(dense, **{"group_size": 32} | form, activations="int8")


def formula(module, x, is_weight_rounded=True):
    """The layer's formula in float64, rounded as the documentation says."""
    wide = copy.deepcopy(module).double()
    wide.activations = None
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    steps = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    rounded = (x / steps).round().double() * steps.double()
    y = wide(rounded)
    if is_weight_rounded and module.bits is not None and module.scales.shape[1] > 1:
        codes = copy.deepcopy(wide)._operands().codes
        Q = expanded_codes(codes, module.in_features, torch.float64)
        largest = torch.maximum(module.zeros, 2**module.bits - 1 - module.zeros)
        steps = ((module.scales.float().abs() * largest).amax(1, keepdim=True) / 126.97).double()
        y = y + rounded @ ((Q / steps).round() * steps - Q).mT
    return y.detach()


@pytest.fixture(params=["integers", "floating point"])
def way(request, monkeypatch):
    """Both ways to multiply rounded numbers, whatever this processor has."""
    monkeypatch.setattr(integers, "multiplies_exactly", lambda: request.param == "integers")
    if request.param == "integers":
        monkeypatch.setattr(torch, "_int_mm", exact_int_mm)  # torch's own saturates on some processors
    return request.param


def exact_int_mm(x, weight, *, out=None):
    y = (x.double() @ weight.double()).to(torch.int32)
    return y if out is None else out.copy_(y)


@pytest.mark.parametrize(
    ("form", "group_size", "columns", "rows", "bias", "dtype"),
    all_pairs(
        FORMS, [None, 1, 7, 128], [1, 31, 100, 300], [1, 60], [False, True],
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ),
)  # fmt: skip
def test_forward_is_the_rounded_formula(form, group_size, columns, rows, bias, dtype, way):
    module = layer(columns, rows, bias, dtype, **form, group_size=group_size)
    for shape in ((columns,), (2, 20, columns), (0, columns)):
        x = torch.randn(shape, dtype=dtype)
        if x.dim() == 3:
            x[0, 0] = 0
        exact = formula(module, x)
        for output in (module(x), torch.no_grad()(module)(x)):
            assert output.dtype is dtype
            assert output.shape == (*shape[:-1], rows)
            if x.dim() == 3:  # a single number can be left over from much larger ones
                assert_close(output, exact, dtype)
            row = torch.no_grad()(module)(x.unsqueeze(0))[0]
            assert torch.allclose(output, row, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [{"bits": 4}, {"bits": 8}, {"bits": 3, "low_rank": 3}])
def test_few_rows_meet_the_stored_codes_on_the_compiled_kernel(form, dtype):
    module = layer(dtype=dtype, **form)
    most = 128 if dtype is torch.bfloat16 and multiplies_by_instruction(dtype) else 16
    most = most if has_compiled_kernel(module._operands().codes, dtype) else 0
    for rows in (1, 16, 17, 128, 129):
        x = torch.randn(rows, 100, dtype=dtype)
        exact = formula(module, x, is_weight_rounded=rows > most)
        with torch.no_grad():
            assert_close(module(x), exact, dtype)


def test_torch_multiplies_integers_exactly_where_it_is_used():
    """Extreme numbers saturate in 16 bits where a processor adds pairs of products."""
    if not integers.multiplies_exactly():
        pytest.skip("this processor has no exact instruction, so integers are not multiplied")
    generator = torch.Generator().manual_seed(0)
    for rows, columns, outputs in ((1, 2, 1), (5, 7, 3), (32, 384, 96), (33, 1024, 17), (128, 64, 256)):
        x = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
        weight = torch.randint(-128, 128, (outputs, columns), dtype=torch.int8, generator=generator)
        x[0], weight[0] = 127, -128
        assert torch.equal(torch._int_mm(x, weight.mT), exact_int_mm(x, weight.mT))


def test_a_processor_that_saturates_is_found_out(monkeypatch):
    def saturating(x, weight):  # x is shifted to be positive, and pairs are added in 16 bits
        products = (x.double() + 128)[:, :, None] * weight.double()
        pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(1) - 128 * weight.double().sum(0)).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    integers.multiplies_exactly.cache_clear()
    try:
        assert not integers.multiplies_exactly()
    finally:
        integers.multiplies_exactly.cache_clear()


def test_rounding_costs_about_one_percent(way):
    for options in ({"group_size": None, "bits": 8}, {"bits": 4}):
        module = layer(512, 64, bias=False, **options)
        x = torch.randn(64, 512)
        plain = copy.deepcopy(module)
        plain.activations = None
        with torch.no_grad():
            error = (module(x) - plain(x)).norm() / plain(x).norm()
        assert 1e-3 < error < 0.04


def test_infinite_and_missing_numbers_stay_in_their_rows(way):
    module, x = layer(), torch.randn(4, 100)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    with torch.no_grad():
        finite = module(x).isfinite().all(1)
    assert finite.tolist() == [True, False, False, True]


def test_derivatives_pass_the_roundings():
    x = torch.randn(6, 100, requires_grad=True)
    for options, bound in (({"bits": 8, "group_size": None}, 1e-5), ({"bits": 4}, 0.03)):
        for frozen in (False, True):
            module = layer(**options).train_scales_().requires_grad_(not frozen)
            x.grad = None
            module(x).sum().backward()
            weight = module.weight.sum(0).detach()
            assert (x.grad - weight).norm() <= bound * x.grad.norm()
            assert frozen or module.scale_logs.grad.abs().sum() > 0


@pytest.mark.parametrize("form", [FORMS[2], FORMS[5]])
def test_compiled_and_exported(form, way):
    module, x = layer(**form).eval(), torch.randn(6, 100)
    exact = formula(module, x)
    with torch.no_grad():
        assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), exact, torch.float32)
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert_close(program.module()(x), exact, torch.float32)


def test_it_is_shown():
    assert "activations='int8'" in repr(layer())
    assert "activations" not in repr(QuantizedLinear(8, 8))


def test_roundings_without_a_layer_to_round_are_refused():
    batches = [torch.randn(16, 64) for _ in range(4)]
    for options in ({"forms": ("dense", "low_rank")}, {"method": "random"}):
        with pytest.raises(ValueError, match=r"activations='int8' is for quantized forms, and forms=.* has none"):
            pr.compress(nn.Sequential(nn.Linear(64, 64)), 0.5, batches, activations="int8", **options)


def test_unknown_roundings_are_refused():
    with pytest.raises(ValueError, match="activations='fp8' must be None"):
        QuantizedLinear(8, 8, activations="fp8")
    with pytest.raises(ValueError, match="activations='int4' must be None"):
        pr.compress(nn.Sequential(nn.Linear(64, 64)), bits=4, method="svd", activations="int4")


def test_compressed_models_round_their_inputs_and_are_measured_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    plain = copy.deepcopy(model)
    options = {"forms": "int8", "bits": 8.5, "seed": 0, "measure_speed": False}
    batches = list(torch.randn(512, 64).split(64))
    report = pr.compress(model, calibration=batches, activations="int8", **options)
    assert [module.activations for module in (model[0], model[2])] == ["int8", "int8"]
    unrounded = pr.compress(plain, calibration=batches, **options)
    assert plain[0].activations is None
    assert report.measured_error > 1.1 * unrounded.measured_error


def test_times_of_forms_are_those_of_rounded_inputs(monkeypatch):
    seen = []
    original = QuantizedLinear.forward
    monkeypatch.setattr(
        QuantizedLinear, "forward", lambda self, x: (seen.append(self.activations), original(self, x))[1]
    )
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    batches = list(torch.randn(512, 64).split(64))
    pr.compress(model, speedup=1, calibration=batches, forms=("int4", "int8"), activations="int8", seed=0)
    assert seen
    assert set(seen) == {"int8"}
