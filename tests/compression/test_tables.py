"""Embeddings, bags and tied heads in pr.compress: under one budget with all other weights."""

import copy

import pytest
import torch
from panther.kernels.reference.codes import spread
from torch import nn

import panther as pr
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings, Option
from panther.compression.forms.codes import add_ridge_, feedback, round_entries
from panther.compression.forms.metric import RIDGE
from panther.compression.selection.timing import Times, Timing
from panther.compression.weights.table import TABLES, TableMoments, Use, smoothed
from panther.nn import QuantizedEmbedding, QuantizedLinear
from panther.nn.sketch_record import plain_state
from tests.support.language_models import (
    QUIET,
    ROWS,
    SEEN,
    WIDTH,
    Language,
    assert_shared,
    compressed,
    relative_error,
    tokens,
)


@pytest.mark.parametrize("tied", [False, True])
def test_one_budget_for_all_weights(tied):
    model, original, report = compressed(Language(tied), bits=4.5)
    assert type(model.words) is QuantizedEmbedding
    assert type(model.head) is QuantizedLinear
    assert not report.skipped
    numbers = sum(layer.bytes_before for layer in report.layers) / 4
    assert 4.0 < 8 * report.eligible_bytes_after / numbers <= 4.5
    # The loss of the lookups, of the head and of their sum is predicted as well as that of linear layers.
    assert 0.7 < report.measured_error / report.predicted_error < 1.4
    assert report.measured_error < 0.12
    for layer in report.layers:
        assert layer.measured_error == pytest.approx(layer.predicted_error, rel=0.2, abs=1e-6)
    assert report.bytes_after == sum(tensor.nbytes for tensor in unique(model))
    assert report.bytes_in_bfloat16 * 2 == report.bytes_before
    assert "kB in bfloat16" in str(report).splitlines()[0]
    assert not model.words.weight[0].any()
    if tied:
        assert_shared(model.words, model.head)
        assert report.layers[0].names == ("words", "head")
        assert torch.equal(model.head.bias, original.head.bias)


def unique(model):
    return {tensor.data_ptr(): tensor for tensor in plain_state(model).values()}.values()


def test_rows_that_were_never_read_are_not_ruined():
    model, original, report = compressed(Language(), bits=4.5)
    unseen = relative_error(model, original, tokens(SEEN, ROWS, 3))
    assert unseen < 1.3 * report.measured_error
    errors = (model.words.weight - original.words.weight).norm(dim=1) / original.words.weight.norm(dim=1).clamp_min(
        1e-9
    )
    assert errors[SEEN:].max() < 1.5 * errors[1:SEEN].max()
    counts = torch.tensor([8.0, 0.0, 0.0, 0.0])
    assert smoothed(counts).sum() == counts.sum()
    assert (smoothed(counts) > 0).all()


def test_the_metric_is_better_than_rounding_to_nearest():
    errors = {}
    for method in ("two_sided", "activation", "svd"):
        model, original, _ = compressed(Language(), bits=5, forms=["int4"], method=method)
        errors[method] = relative_error(model, original, tokens(seed=5))
    assert errors["two_sided"] < errors["activation"]
    assert errors["activation"] < 1.05 * errors["svd"]


@pytest.mark.parametrize("group_size", [None, 7])
def test_rows_are_rounded_as_those_of_linear_weights(group_size, monkeypatch):
    """Blocks of rows of a table have the codes that the rounding of linear layers gives for the same moment."""
    monkeypatch.setattr("panther.compression.weights.table.BLOCK_ENTRIES", 40 * WIDTH)
    target = select_targets(Language(tied=False), smallest=lambda target: 0, has_codes=True).targets[0]
    inputs = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = inputs.mT @ inputs / 200
    use = Use(200.0, torch.ones(ROWS, dtype=torch.float64), moment, None, None)
    fit = TABLES.fit(target, TableMoments((use,), 200.0), (5, 3), FormSettings(("int5",), group_size=group_size), RIDGE)
    (order,), coefficients = feedback(add_ridge_(ROWS * moment[None]), WIDTH, moment[None])
    for bits, quantized in fit.codes.items():
        weight = quantized.weight
        scales, zeros = (
            spread(part.float(), weight.group_size, WIDTH)[None, :, order] for part in (weight.scales, weight.zeros)
        )
        W = target.weight.detach()[None, :, order]
        expected = round_entries(W, scales, zeros, torch.tensor([2.0**bits - 1]), torch.tensor([0]), coefficients, None)
        assert torch.equal(weight.codes[:, order], expected[0])


def test_data_free():
    model = Language()
    report = pr.compress(model, bits=6.5, method="svd", **QUIET)
    assert type(model.words) is QuantizedEmbedding
    assert {layer.form for layer in report.layers} <= {"int6", "int5", "int8"}


def test_embeddings_are_chosen_by_name_and_type():
    model, _, report = compressed(Language(tied=False), bits=5, exclude="words")
    assert type(model.words) is nn.Embedding
    assert {entry.name: entry.reason for entry in report.skipped} == {"words": "is excluded"}
    model, _, report = compressed(Language(tied=False), bits=5, include=nn.Embedding)
    assert {layer.kind for layer in report.layers} == {"Embedding"}
    model, _, report = compressed(Language(), bits=5, exclude=nn.Embedding)
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["head"] == "shares its weight with 'words' (Embedding)"
    assert model.head.weight is model.words.weight
    # Without a form for tables they are what they were before there was one.
    model, _, report = compressed(Language(), budget=0.6, forms="low_rank")
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["words"] == "takes codes alone, and forms has no width: kept as it is"
    assert reasons["head"] == "shares its weight with 'words' (Embedding)"


def test_uniform_forms_leave_low_rank_to_matrices():
    _, _, report = compressed(Language(tied=False), budget=0.3, allocate="uniform", forms=["low_rank", "int8", "dense"])
    forms = {layer.names[0]: layer.form for layer in report.layers}
    assert forms["words"] == "int8"


@pytest.mark.parametrize("options", [{"max_error": 0.05}, {"max_bytes": 30_000}])
def test_other_ways_to_a_size(options):
    model, original, report = compressed(Language(), **options)
    assert_shared(model.words, model.head)
    assert relative_error(model, original, tokens(seed=5)) < 0.12
    assert report.bytes_after <= options.get("max_bytes", report.bytes_before)


def test_slow_lookups():
    """Slower forms of embeddings do not make other layers take fast forms, unless slower forms are forbidden."""
    survey = select_targets(Language(tied=False), smallest=lambda target: 0, has_codes=True)
    option = Option("int4", 100, time_s=2.0)
    times = {target: Times(1.0, {}) for target in survey.targets}
    slow = {target.name for target in survey.targets if Timing(times).is_slower(target, option)}
    assert slow == {"up", "down", "head"}
    assert all(Timing(times, allow_slower=False).is_slower(target, option) for target in survey.targets)
    tied = select_targets(Language(), smallest=lambda target: 0, has_codes=True).targets[0]
    assert tied.names == ("words", "head")
    assert Timing({tied: Times(1.0, {})}).is_slower(tied, option)


def test_padding_does_not_count():
    """Two calibrations that differ in masked tokens only give one model."""

    class Masked(Language):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids)

    models = []
    for fill in (3, 7):
        batches = []
        for ids in tokens():
            mask = torch.ones_like(ids)
            mask[:3, 6:] = 0
            batches.append({"input_ids": ids.masked_fill(mask == 0, fill), "attention_mask": mask})
        torch.manual_seed(0)
        model = Masked()
        pr.compress(model, bits=4.5, calibration=batches, **QUIET)
        models.append(model)
    assert torch.equal(models[0].words.codes, models[1].words.codes)


def test_healing_trains_the_shared_scales_once(tmp_path):
    original = Language()
    model = copy.deepcopy(original)
    heal = pr.HealConfig(max_steps=12, validate_every_n_steps=4)
    report = pr.compress(model, bits=3.2, calibration=tokens(), heal=heal, **QUIET)
    assert report.healed.best_step > 0
    assert report.healed_error < report.measured_error
    assert_shared(model.words, model.head)
    assert not model.words.trains_scales
    assert not model.words.weight[0].any()
    pr.save_compressed(model, tmp_path)
    batch = tokens()[0]
    assert torch.equal(pr.load_compressed(tmp_path, copy.deepcopy(original))(batch), model(batch))
