"""Stacked experts in pr.compress: each fitted to its own tokens, all of them where tokens are few or none."""

import copy

import pytest
import torch
from compressing import assert_untouched, error, quick, state_of
from expert_models import Experts, mixtures, sequences
from torch import nn

import panther as pr
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import default_forms, form_named
from panther.compression.forms.codes import RoundingTask, fit_quantized
from panther.compression.forms.metric import metric_of
from panther.compression.moments import Moments
from panther.errors import CompressionError, NumericalWarning
from panther.nn import QuantizedExperts, QuantizedLinear
from panther.nn.sketch_record import plain_state

NAMES = [f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
OPTIONS = {**quick, "calibration": sequences(), "group_size": 24}


def stacks_of(report):
    return {layer.names[0]: layer for layer in report.layers if "experts" in layer.names[0]}


@pytest.mark.parametrize("options", [{}, {"transposed": True, "bias": True}])
def test_a_mixture_shrinks_as_its_bits_say_and_errs_as_reported(options):
    model = mixtures(**options)
    dense, x = copy.deepcopy(model), torch.cat(sequences(4, seed=2))
    exact = dense(x).detach()
    report = pr.compress(model, bits=5.0, **OPTIONS)
    stacks = stacks_of(report)
    assert list(stacks) == NAMES
    assert stacks[NAMES[0]].kind == "Experts"
    assert stacks[NAMES[0]].shape == tuple(dense.layers[0].experts.gate_up_proj.shape)
    for name, layer in stacks.items():
        module = model.get_submodule(name)
        assert layer.form == f"int{module.bits}"
        assert layer.bytes_after == sum(tensor.nbytes for tensor in plain_state(module).values())
        assert 0.3 * layer.measured_error < layer.predicted_error < 2 * layer.measured_error
    assert report.eligible_bytes_after <= 5.0 / 32 * report.eligible_bytes_before
    assert sum(tensor.nbytes for tensor in plain_state(model).values()) == report.bytes_after
    assert error(model, exact, x) < 1.6 * report.measured_error < 0.3  # of other tokens
    assert 0.5 * report.measured_error < report.predicted_error < 2 * report.measured_error


def test_the_error_of_each_stack_is_the_error_of_its_own_products():
    model = mixtures(layers=1)
    dense = copy.deepcopy(model)
    # All batches are alike, so that each of them can be held out.
    batches = [OPTIONS["calibration"][0]] * 5
    report = pr.compress(model, bits=6.0, forms=["int3", "int4"], **OPTIONS | {"calibration": batches})
    x, experts, squares = batches[0].flatten(0, -2), dense.layers[0].experts, torch.zeros(2)
    index = dense.layers[0].router(x).softmax(-1).topk(2).indices
    for expert in range(4):
        rows = x[(index == expert).any(1)]
        exact = rows @ experts.gate_up_proj[expert].mT
        lost = model.layers[0].experts.gate_up_proj(rows, expert) - exact
        squares += torch.stack([lost.square().sum(), exact.square().sum()])
    measured = stacks_of(report)["layers.0.experts.gate_up_proj"].measured_error
    assert (squares[0] / squares[1]).sqrt().item() == pytest.approx(measured, rel=1e-4)


def test_codes_equal_those_of_linear_layers_with_the_same_moments():
    torch.manual_seed(0)
    experts = Experts(3, 24, 20)
    linears = nn.ModuleList(nn.Linear(24, 40, bias=False) for _ in range(3))
    for expert, linear in enumerate(linears):
        linear.weight = nn.Parameter(experts.gate_up_proj[expert].detach().clone())
    roots = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    A, G = roots[0, :, :24, :24], roots[1]
    A, G = A @ A.mT + 0.1 * torch.eye(24), G @ G.mT + 0.1 * torch.eye(40)
    (stack, _), separate = (
        select_targets(module, smallest=lambda target: 1, has_codes=True).targets
        for module in (nn.Sequential(experts), linears)
    )

    def codes_of(target, A, G):
        metric = metric_of(target, Moments(A, A[:, 0], G, 100.0))
        (fits,) = fit_quantized([RoundingTask(metric, [3, 5], 0, 0, torch.float32)], 12)
        return {bits: fit.weight for bits, fit in fits.items()}

    joint = codes_of(stack, A, G)
    for expert, target in enumerate(separate):
        rows = slice(40 * expert, 40 * (expert + 1))
        for bits, weight in codes_of(target, A[expert, None], G[expert, None]).items():
            assert torch.equal(joint[bits].codes[rows], weight.codes)
            assert torch.equal(joint[bits].scales[rows], weight.scales)
            assert torch.equal(joint[bits].zeros[rows], weight.zeros)


def test_experts_without_a_token_are_fitted_to_the_tokens_of_all():
    model = mixtures(unused=(1, 3))
    dense = copy.deepcopy(model)
    with pytest.warns(NumericalWarning, match="2 of 4 experts; they are fitted to the mean of the tokens of all"):
        report = pr.compress(model, bits=5.0, **OPTIONS)
    assert any("experts that no token" in note for note in report.notes)
    # Without the mean, an expert would be rounded to nearest: on tokens of the others it would be as bad as that.
    x = torch.cat([batch.flatten(0, -2) for batch in sequences(4, seed=2)])
    for layer in stacks_of(report).values():
        if "gate_up" in layer.names[0]:
            quantized, exact = model.get_submodule(layer.names[0]), dense.get_parameter(layer.names[0])
            nearest = QuantizedExperts.from_weight(exact, quantized.bits, group_size=quantized.group_size)
            y = x @ exact[1].mT
            errors = [((weight(x, 1) - y).norm() / y.norm()).item() for weight in (quantized, nearest)]
            assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("group_size", [None, 7, 1000])
def test_one_expert_and_odd_groups(group_size):
    model = mixtures(count=1, width=24, inner=13, layers=1)
    x = torch.cat(sequences(2, seed=2))
    exact = model(x).detach()
    report = pr.compress(model, bits=7.0, **OPTIONS | {"group_size": group_size})
    assert len(stacks_of(report)) == 2
    assert error(model, exact, x) < 0.2


@pytest.mark.parametrize("method", ["activation", "svd"])
def test_methods_without_gradients_and_without_data(method):
    model = mixtures()
    x = torch.cat(sequences(2, seed=2))
    exact = model(x).detach()
    options = OPTIONS if method == "activation" else {**OPTIONS, "calibration": None}
    report = pr.compress(model, bits=6.0, method=method, **options)
    assert list(stacks_of(report)) == NAMES
    assert error(model, exact, x) < 0.2


def test_healing_and_speed_take_experts():
    model = mixtures()
    x = torch.cat(sequences(2, seed=2))
    exact = model(x).detach()
    heal = pr.HealConfig(max_steps=4)
    options = OPTIONS | {"measure_speed": True, "allow_slower": True}
    report = pr.compress(model, bits=5.0, heal=heal, **options)
    assert all(layer.time_s > 0 for layer in stacks_of(report).values())
    assert error(model, exact, x) < 0.2
    assert not any(hasattr(module, "scale_logs") and module.scale_logs is not None for module in model.modules())


def test_padding_does_not_count():
    """Tokens that are masked change nothing, whatever the router makes of them."""
    codes = []
    for filler in (0.0, 50.0):
        batches = []
        for x in sequences():
            mask = torch.ones(x.shape[:2], dtype=torch.bool)
            mask[:4, 6:] = False
            batches.append({"x": x.masked_fill(~mask[..., None], filler), "attention_mask": mask})
        model = mixtures()
        pr.compress(model, bits=8.0, forms=["int4"], **OPTIONS | {"calibration": batches})
        codes.append([model.get_submodule(name).codes for name in NAMES])
    assert all(map(torch.equal, *codes))


def test_a_failure_leaves_every_parameter_in_its_place():
    model = mixtures(bias=True)
    original = state_of(model)
    with pytest.raises(CompressionError, match="smallest feasible bits"):
        pr.compress(model, bits=1.0, **OPTIONS)
    with pytest.raises(CompressionError, match="broken: the model raised this"):
        pr.compress(model, bits=5.0, forward_fn=Breaking(), **OPTIONS)
    assert_untouched(model, original)
    assert "forward" not in vars(model.layers[0].experts)


class Breaking:
    """A forward that fails once the weights of experts are replaced."""

    def __call__(self, model, batch):
        if any(isinstance(module, QuantizedExperts) for module in model.modules()):
            raise RuntimeError("broken")
        return model(batch)


class Scaled(Experts):
    """Experts that compute something else than their attributes say."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 3 * super().forward(hidden_states, top_k_index, top_k_weights)


class Stack(nn.Module):
    """A stack of matrices that no attribute describes."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 24, 24))
        self.head = nn.Linear(24, 24)

    def forward(self, x):
        return self.head(torch.einsum("...i,eij->...j", x, self.weights))


def test_reasons_for_experts_that_stay_dense():
    model = mixtures(experts=Scaled)
    report = pr.compress(model, bits=6.0, **OPTIONS)
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert [*reasons] == NAMES
    assert "computes something else than experts of transformers do: kept as it is" in reasons[NAMES[0]]
    assert isinstance(model.layers[0].experts.gate_up_proj, nn.Parameter)

    report = pr.compress(Stack(), bits=6.0, **OPTIONS)
    assert "holds a stack of matrices and is not a module of experts" in report.skipped[0].reason

    report = pr.compress(mixtures(), budget=0.7, forms="low_rank", **OPTIONS)
    assert "which only codes can store, as forms 'int8' and 'int4' of pr.compress do" in report.skipped[0].reason


def test_experts_are_selected_by_the_name_of_a_weight_or_of_the_module_and_by_class():
    for exclude, names in (
        ("*.down_proj", NAMES[::2]), ("layers.0.experts", NAMES[2:]), (Experts, []),
        (lambda module, name: isinstance(module, Experts) and name == NAMES[3], NAMES[:3]),
    ):  # fmt: skip
        report = pr.compress(mixtures(), bits=6.0, exclude=exclude, method="svd", **OPTIONS | {"calibration": None})
        assert list(stacks_of(report)) == names
    report = pr.compress(mixtures(), bits=6.0, include="*.experts", method="svd", **OPTIONS | {"calibration": None})
    assert [layer.names[0] for layer in report.layers] == NAMES


def test_saved_experts_load_into_the_dense_architecture(tmp_path):
    model = mixtures(transposed=True, bias=True)
    pr.compress(model, bits=5.0, exclude="layers.1.*.down_proj", **OPTIONS)
    x = sequences(1, seed=2)[0]
    y = model(x)
    folder = pr.save_compressed(model, tmp_path)
    loaded = pr.load_compressed(folder, mixtures(seed=7, transposed=True, bias=True))
    assert torch.equal(loaded(x), y)
    assert isinstance(loaded.layers[1].experts.down_proj, nn.Parameter)
    again = pr.load_compressed(folder, loaded)
    assert torch.equal(again(x), y)
    expanded = pr.load_compressed(folder, mixtures(seed=7, transposed=True, bias=True), expand=True)
    torch.testing.assert_close(expanded(x), y, rtol=1e-4, atol=1e-5)
    assert {name for name, _ in expanded.named_parameters()} == {
        name for name, _ in mixtures(transposed=True, bias=True).named_parameters()
    }
    assert "QuantizedExperts" in str(pr.inspect.tree(model))
    report = pr.to_linears_(model)
    assert {layer.became for layer in report.replaced if "down_proj" in layer.name} == {"Parameter(4, 20, 24)"}
    with pytest.raises(pr.errors.FormatError, match=r"gate_up_proj.*out_features.: 40"):
        pr.load_compressed(folder, mixtures(inner=19, transposed=True, bias=True))


class Listed(nn.Module):
    """Experts that are nn.Linear layers; a token goes to the expert that its first entry names."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        expert = int(x[0, 0, 0] > 0) + int(x[0, 0, 0] > 1)
        return self.experts[expert](x)


def test_linear_experts_that_the_first_batch_does_not_reach():
    torch.manual_seed(0)
    batches = sequences()
    for number, batch in enumerate(batches):
        batch[0, 0, 0] = (-1.0, 0.5)[number % 2]
    model = Listed().eval()
    report = pr.compress(model, bits=6.0, **OPTIONS | {"calibration": batches})
    assert [type(expert) for expert in model.experts] == [QuantizedLinear, QuantizedLinear, nn.Linear]
    assert report.skipped[0].reason == "is not called on any calibration batch"


def test_only_code_forms_store_experts():
    stored = {name for name in default_forms() if form_named(name).fits_every_kind}
    assert stored == {"dense", "int8", "int6", "int5", "int4", "int3", "int2"}


def test_a_search_tries_experts_and_builds_them():
    pytest.importorskip("optuna")
    model = mixtures(layers=1)
    x = sequences(1, seed=2)[0]
    exact = model(x).detach()
    result = pr.tune(
        model, lambda trial: -error(trial, exact, x), sequences(), objective="metric", group_size=24, trials=2, seed=0
    )
    assert isinstance(result.build(0).layers[0].experts.gate_up_proj, QuantizedExperts)
    assert isinstance(model.layers[0].experts.gate_up_proj, nn.Parameter)
