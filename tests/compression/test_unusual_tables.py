"""Embeddings, bags and heads with unusual options, sizes, inputs and ways to share memory, in pr.compress."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther.compression.calibration.targets import Target
from panther.compression.moments import Call
from panther.compression.weights.table import TableSums
from panther.nn import QuantizedEmbeddingBag
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


def test_bags_leave_their_padding_out():
    """The row of the padding counts neither in bags of a calibration nor in the bags of the new layer."""
    moments = []
    for padding in ([], [2, 2, 2]):
        bag = nn.EmbeddingBag(6, 4, mode="sum", padding_idx=2)
        target = Target(("bag",), (bag,), 1, 4, 6)
        sums = TableSums(target, True, torch.device("cpu"))
        call = Call((0, 0), bag, torch.tensor([0, 1, 5, *padding]))
        assert sums.add(target, call, torch.ones(1, 2, 4), lambda slope: slope[..., 0])
        moments.append(sums.moments(lambda tensors: None).uses[0])
    assert torch.equal(moments[0].rows, moments[1].rows)
    torch.manual_seed(0)
    original = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, padding_idx=0), nn.Linear(WIDTH, 24))
    with torch.no_grad():
        original[0].weight[0] = 1e3
    model, _, _ = compressed(copy.deepcopy(original), bits=6)
    assert model[0].padding_idx == 0
    assert relative_error(model, original, tokens(seed=5)) < 0.15


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_change_in_a_lookup_stay_dense(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(ROWS, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 24))
    _, _, report = compressed(model, bits=5)
    assert type(model[0]) is kind
    assert report.skipped[0].reason == "has max_norm, with which each lookup changes rows of the weight"


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_options_of_the_weight_gradient(option, tmp_path):
    """They change nothing, because the calibration needs no gradient of a weight."""
    codes = []
    for options in ({}, {option: True}):
        model = Language(tied=False)
        embedding = nn.Embedding(ROWS, WIDTH, padding_idx=0, **options)
        embedding.weight = model.words.weight
        model.words = embedding
        original = copy.deepcopy(model)
        compressed(model, bits=4.5)
        codes.append(model.words.codes)
        pr.save_compressed(model, tmp_path / str(len(codes)))
        assert_shared(pr.load_compressed(tmp_path / str(len(codes)), original).words)
    assert torch.equal(*codes)


@pytest.mark.parametrize("tied", [False, True])
def test_more_rows_than_tokens(tied):
    """A calibration of 80 tokens for a head of 400 rows, whose moment of gradients is far from full rank."""
    model, original, report = compressed(Language(tied, rows=400), tokens(batches=2), bits=5)
    assert {layer.names for layer in report.layers} >= ({("words", "head")} if tied else {("words",), ("head",)})
    assert relative_error(model, original, tokens(seed=5)) < 0.15
    assert relative_error(model, original, tokens(SEEN, 400, seed=5)) < 0.15


@pytest.mark.parametrize("tied", [False, True])
def test_positions_that_are_never_read(tied):
    """Calibration reads only the first rows of a table of positions, and the later rows keep their values too."""
    model, original = Language(tied), None
    model.places = nn.Embedding(64, WIDTH)
    model, original, report = compressed(model, bits=5)
    assert ("places",) in {layer.names for layer in report.layers}
    errors = (model.places.weight - original.places.weight).norm(dim=1) / original.places.weight.norm(dim=1)
    assert errors[10:].max() < 2 * errors[:10].max()


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
    elif kind == "part":  # a head of the first rows
        model.head = nn.Linear(WIDTH, 20)
        model.head.weight.data = model.words.weight.data[:20]
    return model


@pytest.mark.parametrize("kind", ["memory", "three", "part"])
def test_memory_that_is_shared_otherwise(kind, tmp_path):
    original, model = sharing(kind), sharing(kind)
    report = pr.compress(model, bits=6.0, calibration=tokens(high=64), **QUIET)
    assert relative_error(model, original, tokens(high=64, seed=5)) < 0.1
    if kind == "part":  # two weights, and each has its own codes
        assert {("words",), ("head",)} <= {layer.names for layer in report.layers}
    else:
        assert_shared(*(getattr(model, name) for name in ("words", "head", "again") if hasattr(model, name)))
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, sharing(kind))
    batch = tokens(high=64)[0]
    assert torch.equal(restored(batch), model(batch))


class HalfHead(Language):
    """A head with a copy of the embedding in another dtype."""

    def __init__(self):
        super().__init__(tied=False)
        self.head.weight.data.copy_(self.words.weight.data)
        self.head.bfloat16()

    def forward(self, tokens):
        return self.head(self.words(tokens).bfloat16()).float()


def test_dtypes_that_differ(tmp_path):
    """Layers of different dtypes share no memory: each has its own codes, and its dtype."""
    model, original, report = compressed(HalfHead(), bits=6)
    assert {("words",), ("head",)} <= {layer.names for layer in report.layers}
    assert (model.words.dtype, model.head.dtype) == (torch.float32, torch.bfloat16)
    batch = tokens()[0]
    assert relative_error(model, original, [batch]) < 0.1
    restored = pr.load_compressed(pr.save_compressed(model, tmp_path), HalfHead())
    assert torch.equal(restored(batch), model(batch))


def test_weights_that_cannot_be_computed_with_are_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    with torch.no_grad():
        model[1].weight[3, 4] = float("nan")
        model[2].weight[7, 7] = float("-inf")
        model[3].weight = nn.Parameter(model[3].weight.to(torch.float8_e4m3fn), requires_grad=False)
        model[4].weight = nn.Parameter(torch.empty(0, 8))
    report = pr.compress(model, bits=16, method="svd", forms="int8", measure_speed=False, allow_slower=True)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["1"] == reasons["2"] == "has a weight with NaN or infinite entries"
    assert reasons["3"] == "has a weight of type Tensor, torch.float8_e4m3fn: compress a plain floating one"
    assert [layer.names for layer in report.layers] == [("0",)]
