"""Forms under one budget: what each layer becomes, what it takes and loses, and that bad input changes nothing."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from compressing import assert_untouched, batches_of, error, low_rank, quick, state_of
from ranks import on_ranks
from torch import nn

import panther as pr
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings, Option, default_forms, known_forms, total_bytes
from panther.compression.forms.codes import RoundingTask, convert_quantized, fit_quantized
from panther.compression.forms.metric import factor, metric_of
from panther.compression.moments import Moments
from panther.compression.selection.allocation import choose_global, choose_uniform
from panther.errors import CompressionError, PerformanceWarning
from panther.nn import InterpolativeLinear, LowRankConv2d, LowRankLinear, QuantizedConv2d, QuantizedLinear
from panther.nn.sketch_record import plain_state

every = dict.fromkeys(known_forms())
kinds = {"dense": nn.Linear, "low_rank": LowRankLinear, "interpolative": InterpolativeLinear}
linear_kinds = (*kinds.values(), QuantizedLinear)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 96), nn.ReLU(inplace=True), nn.Linear(96, 48, bias=False),
        nn.LayerNorm(48), nn.Linear(48, 24),
    )  # fmt: skip


def moments_of(outer, inner, rows=600, seed=0, bias=0.3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, inner) + bias
    g = torch.randn(rows, outer, generator=generator, dtype=torch.float64) * torch.linspace(2, 0.1, outer)
    return Moments((x.mT @ x / rows)[None], x.mean(0)[None], (g.mT @ g / rows)[None], rows)


def loss(E, metric):
    """tr(G E A E^T), in float64."""
    return (metric.R[0] @ E @ metric.L[0]).square().sum().item()


@pytest.mark.parametrize(("bits", "rank"), [(None, 8), (None, 30), (3, 0), (4, 6), (8, 2), (2, 12)])
def test_the_loss_of_a_form_is_that_of_its_layer(bits, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 34))
    (target,) = select_targets(model).targets
    metric = metric_of(target, moments_of(34, 40))
    options = {"most": rank, "seed": 0, "dtype": torch.float64}
    option, settings = Option("", 0, rank, bits), FormSettings((), group_size=16)
    if bits is None:
        found, weight = factor(metric.source, metric, **options), None
    else:
        fit = fit_quantized([RoundingTask(metric, [bits], **options)], 16)[0][bits]
        found, weight = fit.residual, fit.weight
    layer = next(iter(convert_quantized(target, option, found, weight, settings).values()))
    E = layer.double().weight.detach() - metric.source[0]
    assert (found.tails[rank] + found.rounding[rank]).item() == pytest.approx(loss(E, metric), rel=0.05)
    local = (E @ metric.L[0]).square().sum().item()
    assert found.local_tails[rank].item() == pytest.approx(local, rel=0.05)
    mean = metric.means[0]  # the bias takes up the change of the mean
    torch.testing.assert_close(layer(mean), model[0].double()(mean).detach(), rtol=1e-5, atol=1e-5)


def test_options_take_what_layers_store():
    model = network()
    forms = FormSettings(known_forms(), group_size=20)
    for target in select_targets(model, smallest=forms.smallest_bytes).targets:
        options = forms.options(target)
        assert {option.form for option in options} == set(known_forms())
        assert [option.bytes for option in options] == sorted(option.bytes for option in options)
        for option in options:
            if option.form in ("dense", "low_rank"):
                continue
            size = {"low_rank": option.rank or 0, "bias": False}
            if option.form == "interpolative":
                layer = InterpolativeLinear(target.inner, target.outer, **size)
            else:
                layer = QuantizedLinear(target.inner, target.outer, option.bits, group_size=20, **size)
            assert option.bytes == sum(tensor.nbytes for tensor in plain_state(layer).values())


def test_the_choice_is_nearly_the_best_of_all():
    """By trying all combinations of options whose losses do not fall with their bytes."""
    generator = torch.Generator().manual_seed(0)
    targets = select_targets(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))).targets
    for _ in range(20):
        options, step = {}, 0.0
        for target in targets:
            losses = torch.rand(8, generator=generator).tolist()
            sizes = sorted(torch.randint(10, 500, (8,), generator=generator).tolist())
            several = [Option("some", size, loss=loss) for size, loss in zip(sizes, losses, strict=True)]
            options[target] = [*several, Option("dense", 1024)]
            step = max(step, max(losses))
        limit = 1200
        choice = choose_global(options, limit)
        totals = [
            sum(option.loss for option in combination)
            for combination in itertools.product(*options.values())
            if sum(option.bytes for option in combination) <= limit
        ]
        assert total_bytes(choice) <= limit
        assert min(totals) <= sum(option.loss for option in choice.values()) <= min(totals) + step


def test_uniform_is_one_form_everywhere():
    forms = FormSettings(("low_rank", "int4", "int3"))
    targets = select_targets(network(), smallest=forms.smallest_bytes).targets
    options = {
        target: [Option(o.form, o.bytes, o.rank, o.bits, 1.0 / o.bytes) for o in forms.options(target)]
        for target in targets
    }
    dense = sum(target.dense_bytes for target in targets)
    assert {option.form for option in choose_uniform(options, int(0.16 * dense)).values()} == {"int4"}
    assert {option.form for option in choose_uniform(options, int(0.8 * dense)).values()} == {"low_rank"}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(4.25, {}, marks=pytest.mark.slow), (3.0, {}), (4.25, {"method": "activation"}),
        pytest.param(4.25, {"method": "svd"}, marks=pytest.mark.slow),
        (5.0, {"forms": "int4"}), (4.0, {"forms": "int8_low_rank"}), (20.0, {"forms": "interpolative"}),
        (4.25, {"group_size": None}),
    ],
)  # fmt: skip
def test_bits_are_kept(size, options):
    model, batches = network(), batches_of()
    dense = copy.deepcopy(model)
    report = pr.compress(model, bits=size, calibration=batches, **{"forms": tuple(every), **quick, **options})
    numbers = sum(layer.bytes_before / 4 for layer in report.layers)
    assert 8 * report.eligible_bytes_after <= size * numbers
    assert 8 * report.eligible_bytes_after >= 0.9 * size * numbers or "forms" in options
    held_out = torch.cat(batches[4::5])
    assert report.measured_error == pytest.approx(error(model, dense(held_out).detach(), held_out), rel=1e-3)
    if report.predicted_error is not None:
        assert 0.5 * report.measured_error < report.predicted_error < 2 * report.measured_error
    stored = sum(t.nbytes for t in plain_state(model).values())
    assert report.bytes_after == stored
    for layer, module in zip(report.layers, (m for m in model if isinstance(m, linear_kinds)), strict=True):
        assert type(module) is kinds.get(layer.form, QuantizedLinear)
        tensors = {name: t for name, t in plain_state(module).items() if name != "bias"}
        assert layer.bytes_after == sum(t.nbytes for t in tensors.values())
        assert layer.bits == pytest.approx(8 * layer.bytes_after / (layer.bytes_before / 4))


def test_more_forms_lose_less():
    errors = [
        pr.compress(network(), bits=bits, calibration=batches_of(), forms=forms, **quick).measured_error
        for forms, bits in ((tuple(every), 4.6), ("int4", 4.6), ("int8_low_rank", 4.6), ("low_rank", 8))
    ]
    assert errors == sorted(errors)


@pytest.mark.slow
def test_max_error_takes_any_form():
    report = pr.compress(network(), calibration=batches_of(), max_error=0.05, forms=tuple(every), **quick)
    assert report.measured_error <= 0.05
    plain = pr.compress(network(), calibration=batches_of(), max_error=0.05, **low_rank)
    assert report.bytes_after < 0.5 * plain.bytes_after


@pytest.mark.distributed
@pytest.mark.parametrize("forms", [("int8", "int4", "low_rank"), ("int3", "int4+low_rank", "int8_low_rank")])
def test_ranks_end_with_one_model(forms):
    every = batches_of(640, size=32)

    def rank():
        model, own = network(), every[10 * dist.get_rank() :][:10]
        report = pr.compress(model, bits=5, calibration=own, forms=forms, group=dist.group.WORLD, **quick)
        return model.state_dict(), [(layer.form, layer.rank) for layer in report.layers], report.measured_error

    first, second = on_ranks(rank)
    assert first[1:] == second[1:]
    assert all(torch.equal(first[0][key], second[0][key]) for key in first[0])
    together = pr.compress(network(), bits=5, calibration=every, forms=forms, **quick)
    assert first[2] < 1.5 * together.measured_error


def test_the_default_forms():
    model = network()
    report = pr.compress(model, bits=5, calibration=batches_of(), **quick)
    assert {layer.form for layer in report.layers} <= set(default_forms())
    named = pr.compress(network(), bits=5, calibration=batches_of(), forms=default_forms(), **quick)
    assert named.measured_error == report.measured_error
    random = pr.compress(network(), budget=0.5, method="random", **quick)
    assert {layer.form for layer in random.layers} <= {"dense", "low_rank"}


def test_saved_and_loaded(tmp_path):
    model = network()
    pr.compress(model, bits=4.25, calibration=batches_of(), forms=tuple(every), **quick)
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), network())
    assert torch.equal(again.eval()(batches_of()[0]), model.eval()(batches_of()[0]))


def test_compressed_already():
    model = network()
    pr.compress(model, bits=4.6, calibration=batches_of(), forms="int4", **quick)
    with pytest.raises(CompressionError, match="the model is compressed already, in 4 layers"):
        pr.compress(model, bits=4.6, calibration=batches_of(), forms="int4", **quick)


@pytest.mark.parametrize(("forms", "bits"), [(("int2", "int3"), 2.6), (None, 3.4)])
def test_healing_lowers_the_error(forms, bits, tmp_path):
    model, batches = network(), batches_of()
    heal = pr.HealConfig(max_steps=30)
    report = pr.compress(model, bits=bits, calibration=batches, forms=forms, heal=heal, **quick)
    assert report.healed_error < report.measured_error
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), network())
    assert torch.equal(again.eval()(batches[0]), model.eval()(batches[0]))


def test_shared_weights_stay_shared(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(torch.relu(self.a(x))))

    torch.manual_seed(0)
    model = Model()
    exact = copy.deepcopy(model)
    report = pr.compress(model, bits=5.5, calibration=batches_of(), forms="int4+low_rank", **quick)
    assert model.a.codes is model.b.codes
    assert model.a.left is model.b.left
    assert model.a.scales is model.b.scales
    assert model.a.bias is not model.b.bias
    assert report.bytes_after == sum({t.data_ptr(): t.nbytes for t in plain_state(model).values()}.values())
    x = batches_of()[4]
    assert error(model, exact(x).detach(), x) < 0.1
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), Model())
    assert torch.equal(again(x), model(x))


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, groups=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding="same", groups=64, bias=False), nn.Conv2d(64, 64, 1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def image_batches():
    return list(torch.randn(120, 3, 12, 12, generator=torch.Generator().manual_seed(0)).split(8))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (6.5, {"forms": "int4"}), (8.5, {"forms": ("int6", "low_rank")}),
        (12.0, {"forms": "int8", "method": "activation", "group_size": None}),
        pytest.param(9.0, {"forms": ("int8", "int3")}, marks=pytest.mark.slow),
        (12.0, {"forms": ("int8_low_rank", "int6")}), (9.0, {"forms": ("int4+low_rank", "int4")}),
        pytest.param(8.0, {"forms": ("int6", "int5"), "method": "svd"}, marks=pytest.mark.slow),
        (8.0, {"forms": known_forms()}), pytest.param(6.5, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_convolutions(size, options, tmp_path):
    model, batches = images(), image_batches()
    dense = copy.deepcopy(model)
    report = pr.compress(model, bits=size, calibration=batches, **(quick | options))
    numbers = sum(layer.bytes_before / 4 for layer in report.layers)
    assert 8 * report.eligible_bytes_after <= size * numbers
    held_out = torch.cat(batches[4::5])
    assert report.measured_error == pytest.approx(error(model, dense(held_out).detach(), held_out), rel=1e-3)
    assert report.measured_error < 0.3
    assert report.bytes_after == sum(t.nbytes for t in plain_state(model).values())
    for layer, module in zip(report.layers, (model[i] for i in (0, 2, 4, 5, 8)), strict=True):
        linear = layer.kind == "Linear"
        known = {"dense": getattr(nn, layer.kind), "low_rank": LowRankLinear if linear else LowRankConv2d}
        assert type(module) is known.get(layer.form, QuantizedLinear if linear else QuantizedConv2d)
        if layer.form not in known:
            assert layer.bytes_after == sum(t.nbytes for name, t in plain_state(module).items() if name != "bias")
    assert {type(model[i]) for i in (2, 4)} <= {nn.Conv2d, LowRankConv2d, QuantizedConv2d}
    assert any(isinstance(module, QuantizedConv2d) for module in model)
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), images())
    assert torch.equal(again(held_out), model(held_out))
    assert not pr.to_linears_(model).skipped
    assert error(model, again(held_out).detach(), held_out) < 1e-5


def test_feedback_lowers_the_error_of_convolutions():
    errors = []
    for method in ("svd", "activation", "two_sided"):
        model = images()
        options = {"method": method, "forms": "int3", "allocate": "uniform", **quick}
        errors.append(pr.compress(model, bits=7.0, calibration=image_batches(), **options).measured_error)
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < errors[0]


def test_forms_that_convolutions_cannot_take():
    for forms, match in (
        (
            "interpolative",
            r"'0' is a Conv2d, which none of forms=\('interpolative',\) can be: add .*exclude=nn\.Conv2d",
        ),
        (("int8_low_rank", "int4+low_rank"), r"'2' is a Conv2d in 2 groups, which none of"),
    ):
        model = images()
        original = state_of(model)
        with pytest.raises(CompressionError, match=match):
            pr.compress(model, 0.5, image_batches(), forms=forms, **quick)
        assert_untouched(model, original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    model = network().to(dtype)
    options = {"method": "svd"} if dtype is torch.float16 else {"calibration": batches_of(dtype=dtype)}
    pr.compress(model, bits=4.6, forms=("int4", "int5"), **options, **quick)
    assert {module.dtype for module in model if isinstance(module, QuantizedLinear)} == {dtype}
    assert model(batches_of(dtype=dtype)[0]).dtype is dtype


def test_odd_and_dead_layers():
    """Size one, constant and zero weights, dead inputs, ragged groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 37), nn.ReLU(), nn.Linear(37, 1), nn.Linear(1, 33), nn.Linear(33, 29))
    nn.init.constant_(model[4].weight, 0.1)
    nn.init.constant_(model[3].weight, 0.5)
    batches = batches_of()
    for batch in batches:
        batch[:, 40:] = 0
    exact = copy.deepcopy(model)
    forms = ("dense", *(name for name in every if name not in ("dense", "low_rank")))
    report = pr.compress(model, budget=0.25, calibration=batches, forms=forms, group_size=5, **quick)
    assert error(model, exact(batches[4]).detach(), batches[4]) < 0.2
    assert report.eligible_ratio <= 0.25
    zero = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 32))
    nn.init.zeros_(zero[0].weight)
    pr.compress(zero, budget=0.3, method="svd", forms=("int4", "int4+low_rank"), **quick)
    assert torch.equal(zero[0].weight, torch.zeros(32, 48))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"forms": "int7", "bits": 5},
            ValueError,
            r"form 'int7' is unknown \(did you mean 'int\d'\?\): use",
        ),
        ({"forms": ("int4", 3), "bits": 5}, ValueError, "form 3 is unknown"),
        ({"forms": (), "bits": 5}, ValueError, r"forms=\(\) has no form but 'dense'"),
        ({"forms": "dense", "bits": 5}, ValueError, "has no form but 'dense', which changes nothing"),
        ({"forms": "int4", "bits": 4}, CompressionError, "bits=4 leaves .* the smallest feasible bits is 4."),
        ({"forms": "int4", "bits": 40}, CompressionError, "bits=40 is above the 32 of the dense weights"),
        ({"forms": "int4", "bits": 0}, ValueError, "bits=0 must be positive and finite"),
        ({"forms": "int4", "bits": "4"}, TypeError, "bits must be a number, not str"),
        (
            {"bits": 4, "budget": 0.5},
            ValueError,
            "exactly one of .* speedup and max_latency_ms must",
        ),
        ({"forms": "int4", "bits": 5, "method": "random"}, ValueError, "method='random' makes seeded sketches only"),
        ({"budget": 0.5, "rank_multiple": 3}, ValueError, "rank_multiple=3 must be even"),
        ({"budget": 0.5, "group_size": 0}, ValueError, "group_size=0"),
    ],
)
def test_bad_input_changes_nothing(options, kind, message):
    model = network()
    original = state_of(model)
    with pytest.raises(kind, match=message):
        pr.compress(model, calibration=batches_of(), **options, **quick)
    assert_untouched(model, original)


def test_the_report_has_the_form_of_every_layer(tmp_path):
    with pytest.warns(PerformanceWarning, match="layers are slower than their dense originals"):
        report = pr.compress(network(), bits=4.6, calibration=batches_of(), forms=("int4", "int4+low_rank"), seed=0)
    layer = report.to_dict()["layers"][0]
    assert {"form", "bits", "rank", "bytes_after", "measured_error", "time_s"} <= layer.keys()
    assert all(layer.time_s > 0 for layer in report.layers if layer.form != "dense")
    assert all(layer.form in str(report) for layer in report.layers)
    assert report.plot(tmp_path / "report.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("size", [(32, 0), (0, 32)])
def test_a_layer_without_entries_is_kept(size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.empty = nn.Linear(32, 32), nn.Linear(*size)

        def forward(self, x):
            return self.whole(x) + self.empty(x[:, : size[0]]).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
        model = Model()
    report = pr.compress(model, 0.5, list(torch.randn(40, 32).split(8)), measure_speed=False, seed=0)
    assert [(entry.name, entry.reason) for entry in report.skipped] == [("empty", "has a weight without entries")]
