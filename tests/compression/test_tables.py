"""Embeddings, bags and tied heads in pr.compress: under one budget with all other weights."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther._torch import buffers_of
from panther.compression.calibration.targets import select_targets
from panther.compression.forms import Option
from panther.compression.moments.tables import smoothed
from panther.compression.selection.timing import Times, Timing
from panther.nn import QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedLinear

ROWS, SEEN, WIDTH = 150, 60, 32
QUIET = {"seed": 0, "measure_speed": False}


class Language(nn.Module):
    """Tokens and positions in, scores of tokens out; the head can share the embedding's weight."""

    def __init__(self, tied=True, rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(rows, WIDTH, padding_idx=0), nn.Embedding(10, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, rows)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(nn.functional.layer_norm(x, x.shape[-1:]))


def tokens(low=1, high=SEEN, batches=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(low, high, (8, 10), generator=generator) for _ in range(batches)]
    return [batch.index_fill(1, torch.tensor([9]), 0) for batch in drawn]  # the last position is padding


@torch.no_grad()
def relative_error(model, original, batches):
    pairs = [(model(batch), original(batch)) for batch in batches]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def compressed(model, batches=None, **options):
    original = copy.deepcopy(model)
    report = pr.compress(model, calibration=tokens() if batches is None else batches, **QUIET | options)
    return model, original, report


def assert_shared(*modules):
    first = buffers_of(modules[0])
    assert all(buffers_of(module).get(name) is tensor for module in modules for name, tensor in first.items())


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
    return {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}.values()


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
    assert reasons["words"] == "not a Linear, Conv2d or Conv1D layer: kept as it is"
    assert reasons["head"] == "shares its weight with 'words' (Embedding)"


def test_uniform_forms_leave_low_rank_to_matrices():
    _, _, report = compressed(Language(tied=False), budget=0.3, allocate="uniform", forms=["low_rank", "int8", "dense"])
    forms = {layer.names[0]: layer.form for layer in report.layers}
    assert forms["words"] == "int8"


@pytest.mark.parametrize("options", [{"sequential": True}, {"max_error": 0.05}, {"max_bytes": 30_000}])
def test_other_ways_to_a_size(options):
    sizes = {} if "sequential" not in options else {"bits": 5.0}
    model, original, report = compressed(Language(), **sizes, **options)
    assert_shared(model.words, model.head)
    assert relative_error(model, original, tokens(seed=5)) < 0.12
    assert report.bytes_after <= options.get("max_bytes", report.bytes_before)


def test_slow_lookups():
    """Embeddings are no reason to leave the fast forms, unless slower forms are forbidden."""
    survey = select_targets(Language(tied=False), smallest=lambda target: 0, tables=True)
    option = Option("int4", 100, time_s=2.0)
    times = {target: Times(1.0, {}) for target in survey.targets}
    slow = {target.name for target in survey.targets if Timing(times).is_slower(target, option)}
    assert slow == {"up", "down", "head"}
    assert all(Timing(times, allow_slower=False).is_slower(target, option) for target in survey.targets)
    tied = select_targets(Language(), smallest=lambda target: 0, tables=True).targets[0]
    assert tied.names == ("words", "head")
    assert Timing({tied: Times(1.0, {})}).is_slower(tied, option)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("flat", [False, True])
def test_bags(mode, flat):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, include_last_offset=flat)
            self.out = nn.Linear(WIDTH, 24)

        def forward(self, indices, offsets=None, weights=None):
            if offsets is None:
                return self.out(self.bag(indices))
            return self.out(self.bag(input=indices, offsets=offsets, per_sample_weights=weights))

    batches = tokens(batches=12)
    if flat:
        offsets = torch.tensor([0, 4, 4, 30, 80])
        weights = torch.rand(80) if mode == "sum" else None
        batches = [(batch.flatten(), offsets, weights) for batch in batches]
    original = Bags()
    model = copy.deepcopy(original)
    report = pr.compress(model, calibration=batches, bits=6, measure_speed=flat, seed=0, allow_slower=True)
    assert type(model.bag) is QuantizedEmbeddingBag
    batch = batches[0] if flat else (batches[0],)
    error = (model(*batch) - original(*batch)).norm() / original(*batch).norm()
    assert error < 0.15
    assert 0.4 < report.measured_error / report.predicted_error < 3.5  # a maximum is not linear
    assert next(layer for layer in report.layers if layer.names == ("bag",)).measured_error < 0.15


def test_a_table_of_one_row_and_one_of_one_column():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.thin, self.wide = nn.Embedding(1, 100), nn.Embedding(60, 1), nn.Linear(100, 40)

        def forward(self, tokens):
            return self.wide(self.one(torch.zeros_like(tokens)) * self.thin(tokens))

    original = Odd()
    model, _, report = compressed(copy.deepcopy(original), bits=6.5, group_size=7)
    forms = {layer.names[0]: layer.form for layer in report.layers}
    assert len(forms) > 1
    assert forms.get("thin", "dense") in ("dense", "int8")  # one column takes a scale and a zero point for each entry
    assert relative_error(model, original, tokens(seed=5)) < 0.2


def test_tables_that_change_in_a_lookup_stay_dense():
    model = Language(tied=False)
    model.words.max_norm = 1.0
    _, _, report = compressed(model, bits=5)
    assert report.skipped[0].reason == "has max_norm, with which each lookup changes rows of the weight"


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


class Thrice(Language):
    """An embedding that is read twice, and a head, of one weight."""

    def forward(self, tokens):
        return super().forward(tokens) + self.again(tokens).sum(-1, keepdim=True)


def sharing(kind):
    """Return a model in which a head and embeddings share memory in an unusual way."""
    model = Language(tied=False, rows=64)
    if kind == "memory":  # two Parameters of one memory
        model.head.weight.data = model.words.weight.data
    elif kind == "three":
        model.head.weight = model.words.weight
        model.again = nn.Embedding(64, WIDTH)
        model.again.weight = model.words.weight
        model.__class__ = Thrice
    elif kind == "half":  # a head with a copy in another dtype
        model.head.to(torch.bfloat16).register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    elif kind == "part":  # a head of the first rows
        model.head = nn.Linear(WIDTH, 20)
        model.head.weight.data = model.words.weight.data[:20]
    return model


@pytest.mark.parametrize("kind", ["memory", "three", "part"])
def test_memory_that_is_shared_otherwise(kind, tmp_path):
    original, model = sharing(kind), sharing(kind)
    report = pr.compress(model, bits=6.0, calibration=tokens(high=64), **QUIET)
    assert relative_error(model, original, tokens(high=64, seed=5)) < 0.1
    if kind == "part":  # two weights, of which each has its codes
        assert {("words",), ("head",)} <= {layer.names for layer in report.layers}
    else:
        assert_shared(*(getattr(model, name) for name in ("words", "head", "again") if hasattr(model, name)))
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, sharing(kind))
    batch = tokens(high=64)[0]
    assert torch.equal(restored(batch), model(batch))


def test_dtypes_that_differ():
    """Layers of different dtypes share no memory, and each is compressed."""
    _, _, report = compressed(sharing("half"), bits=6.0, batches=tokens(high=64))
    kinds = {layer.names[0]: layer.form for layer in report.layers}
    assert kinds["words"].startswith("int")
    assert {entry.name: entry.reason for entry in report.skipped}["head"].startswith("has hooks")


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


def test_predicted_memory_includes_tables():
    _, _, report = compressed(Language(), bits=4.5)
    assert report.memory["moments"] > 8 * (2 * WIDTH**2 + 3 * ROWS)
