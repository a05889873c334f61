"""Models that somebody else wrote: what their forwards do to batches, generators, buffers, attributes and outputs.

Each test has a model with one habit. Expected is that the reported error is the error that the user measures, that the
batches and the model are as they were in everything but the replaced layers, and that the habit changes no figure.
"""

import copy
import random
import signal
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compressing import low_rank
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.compression.calibration.batches import copy_batch, entries_of
from panther.compression.calibration.masks import positions_of
from panther.errors import CompressionError, NumericalWarning

WIDTH = 32


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def inputs(count=6, rows=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


class Model(nn.Module):
    """A network of two layers; subclasses have habits."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        return self.network(x)


def relative_error(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


@torch.no_grad()
def true_error(model, exact, batch, call=lambda model, batch: model(batch)):
    """Return the error as a user measures it: each model in eval mode, with its own batch and the same generators."""
    outputs = []
    for each in (model, exact):
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)
        outputs.append(call(each.eval(), copy.deepcopy(batch)))
    return relative_error(*outputs)


def compressed(model, batches, budget=0.3, **options):
    """Compress a model; return the report, the original, and the held-out batch, which is the last one."""
    exact = copy.deepcopy(model)
    return pr.compress(model, budget, batches, **{**low_rank, **options}), exact, batches[-1]


class Scaled(Model):
    def forward(self, x):
        return self.network(x.sub_(3.0).div_(2.0))


class Masked(Model):
    def forward(self, x, ids):
        ids.masked_fill_(ids < 3, 0)
        x[:, 0] = 0
        return self.network(x + ids)


class Popping(Model):
    def forward(self, batch):
        x = batch.pop("x")
        batch["seen"] = True
        batch["sizes"].append(len(x))
        assert len(batch["sizes"]) == 1
        return self.network(x)


@dataclass
class Sample:
    x: torch.Tensor
    history: list


class Pair(NamedTuple):
    x: torch.Tensor
    y: np.ndarray


class Consuming(Model):
    def forward(self, sample):
        sample.history.append(1)
        sample.x += len(sample.history)
        return self.network(sample.x)


class Cache:
    """Keys of the past, which a forward appends to, as transformers' caches are."""

    __slots__ = ("keys",)

    def __init__(self, keys):
        self.keys = keys


class Caching(Model):
    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, x])
        return self.network(x + cache.keys.mean(0))


@pytest.mark.parametrize(
    ("model", "batches", "call"),
    [
        (Scaled, lambda: [2 * x + 3 for x in inputs()], None),
        (Scaled, lambda: [(2 * x + 3,) for x in inputs()], None),
        (Masked, lambda: [{"x": x, "ids": torch.arange(WIDTH).expand(64, -1).clone()} for x in inputs()], None),
        (Popping, lambda: [{"x": x, "sizes": []} for x in inputs()], lambda model, batch: model(batch)),
        (Popping, lambda: [OrderedDict(x=x, sizes=[]) for x in inputs()], lambda model, batch: model(batch)),
        (Consuming, lambda: [Sample(x, []) for x in inputs()], None),
        (Consuming, lambda: [(Sample(x, []),) for x in inputs()], None),
        (Caching, lambda: [(x, Cache(x[:5].clone())) for x in inputs()], None),
    ],
)
def test_a_forward_may_write_its_batch(model, batches, call):
    model, batches = model(), batches()
    before = copy.deepcopy(batches)
    report, exact, last = compressed(model, batches, forward_fn=call)

    def run(model, batch):
        if call is not None:
            return call(model, batch)
        return model(**batch) if isinstance(batch, dict) else model(*(batch if isinstance(batch, tuple) else (batch,)))

    assert report.measured_error == pytest.approx(true_error(model, exact, last, run), rel=1e-4)
    assert 0 < report.measured_error < 0.8
    flat, others = (torch.utils._pytree.tree_leaves(each) for each in (batches, before))
    for ours, theirs in zip(flat, others, strict=True):
        pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else []
        if isinstance(ours, Sample):
            assert ours.history == []
            pairs = [(ours.x, theirs.x)]
        if isinstance(ours, Cache):
            pairs = [(ours.keys, theirs.keys)]
        assert all(torch.equal(a, b) for a, b in pairs)
    if isinstance(batches[0], dict):
        assert [*batches[0]] == [*before[0]]


def test_a_copy_of_a_batch_shares_nothing_that_a_forward_can_write():
    shared, base = torch.randn(3), torch.randn(1, 4)
    generator = torch.Generator().manual_seed(3)
    batch = {
        "first": shared, "second": [shared, (base.expand(5, 4),)], "pair": Pair(base.mT, np.ones(3)),
        "generator": generator, "layer": nn.Linear(2, 2), "graph": torch.randn(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(), "none": None, "empty": {},
    }  # fmt: skip
    copied = copy_batch(batch)
    assert copied["first"] is copied["second"][0]
    assert copied["first"] is not shared
    assert copied["layer"] is batch["layer"]
    assert copied["graph"].requires_grad
    assert copied["graph"].is_leaf
    copied["second"][1][0].add_(1)
    copied["first"].add_(1)
    copied["pair"].y.fill(0)
    torch.rand(2, generator=copied["generator"])
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(copied["pair"].x, base.mT)
    assert batch["pair"].y.sum() == 3
    assert torch.equal(batch["second"][1][0], base.expand(5, 4))
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert entries_of(copied) == entries_of(batch)


def test_batches_that_a_loader_writes_into_one_buffer():
    class Loader:
        def __iter__(self):
            buffer = torch.empty(64, WIDTH)
            for x in inputs():
                yield buffer.copy_(x)

    ours, theirs = Model(), Model()
    first = pr.compress(ours, 0.3, Loader(), **low_rank)
    second = pr.compress(theirs, 0.3, inputs(), **low_rank)
    assert first.measured_error == second.measured_error


class Sampling(Model):
    """A variational encoder: mean and variance, then noise of a kind of generator."""

    def __init__(self, noise):
        super().__init__()
        self.spread = nn.Linear(WIDTH, WIDTH)
        self.noise = noise
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x):
        hidden = self.network(x)
        return hidden + self.noise(self, hidden) * self.spread(hidden).exp()


@pytest.mark.parametrize(
    "noise",
    [
        lambda model, x: torch.randn_like(x),
        lambda model, x: torch.from_numpy(np.random.randn(*x.shape)).float(),
        lambda model, x: torch.tensor([random.gauss(0, 1) for _ in range(x.shape[1])]),
        lambda model, x: torch.randn(x.shape, generator=model.own),
    ],
    ids=["torch", "numpy", "python", "generator of its own"],
)
def test_random_numbers_are_those_of_the_original(noise):
    model = Sampling(noise)
    before = torch.get_rng_state(), random.getstate(), model.own.get_state()
    report, exact, last = compressed(model, inputs(), 0.6)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(model.own.get_state(), before[2])
    model.own.manual_seed(4)
    exact.own.manual_seed(4)
    # With other random numbers than those of the report.
    assert report.measured_error == pytest.approx(true_error(model, exact, last), rel=0.3)
    assert report.measured_error < 0.5
    assert not any("differ" in note for note in report.notes)


def test_a_model_that_differs_from_itself_is_named():
    class Drifting(Model):
        def forward(self, x):
            return self.network(x) * (1 + 0.1 * next(steps))

    steps = iter(range(10**6))
    report, _, _ = compressed(Drifting(), inputs())
    assert any(note.startswith("two outputs of the original model for one batch differ by") for note in report.notes)


def test_a_forward_that_writes_its_parameters_is_named():
    class Renormalized(Model):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(1.0)
            return self.network(x) * self.scale

    report, _, _ = compressed(Renormalized(), inputs())
    assert any("write its parameters in place (scale)" in note for note in report.notes)
    assert not any("write its parameters" in note for note in compressed(Model(), inputs())[0].notes)


def test_random_numbers_outside_of_a_calibration_are_the_callers():
    from panther.compression.calibration.runner import Runner

    runner = Runner(Model(), inputs(), None, None, None, False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    runner.output(runner.batches[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32, "added"])
def test_masks_of_every_kind(kind):
    kept = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = torch.where(kept, 0.0, -1e4) if kind == "added" else kept.to(kind)
    assert torch.equal(positions_of(mask), kept)


class Stateful(Model):
    """Buffers and attributes of many kinds that each forward changes, and that change the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(0))
        self.register_buffer("wide", torch.ones(1, WIDTH).expand(4, WIDTH))
        self.register_buffer("base", torch.zeros(3, WIDTH))
        self.register_buffer("view", self.base[1])
        self.register_buffer("written", torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.history, self.count, self.memory, self.table_of = [], 0, torch.zeros(WIDTH), {"a": 1}

    def forward(self, x):
        self.steps += 1
        if self.table.numel() < len(x):
            self.table.resize_(len(x)).fill_(1.0)
        self.wide = self.wide * 2
        self.base += 1
        self.written.data.add_(1)
        self.mean = x.mean(0)
        self.history.append(x)
        self.count += 1
        self.memory.add_(1)
        self.table_of["b"] = x
        self.late = x
        # Anything but a first forward is seen in the output.
        expected = (1, 1, 2.0, 1, 1, 1, WIDTH)
        state = self.steps, len(self.history), self.wide[0, 0], self.view[0], self.count, self.memory[0]
        assert all(float(a) == b for a, b in zip(state, expected, strict=False)), state
        return self.network(x) + self.wide[0] + self.view


def test_each_forward_finds_the_state_of_the_first():
    model = Stateful()
    names = ("steps", "table", "wide", "base", "view", "written", "mean", "memory")
    objects = {name: getattr(model, name) for name in names}
    values = {name: value.clone() for name, value in objects.items()}
    history, table_of = model.history, model.table_of
    pr.compress(model, 0.3, inputs(), **low_rank)
    for name in names:
        assert getattr(model, name) is objects[name], name
        assert torch.equal(objects[name], values[name]), name
    assert objects["wide"].stride() == (0, 1)
    assert objects["view"].data_ptr() == objects["base"][1].data_ptr()
    assert model.history is history
    assert history == []
    assert model.table_of is table_of
    assert table_of == {"a": 1}
    assert model.count == 0
    assert not hasattr(model, "late")
    assert "written" in dict(model.named_buffers())


@pytest.mark.parametrize("trainable", [True, False])
def test_a_model_that_was_made_in_inference_mode(trainable):
    with torch.inference_mode():
        model = nn.Sequential(*network(), nn.BatchNorm1d(WIDTH))
        for parameter in model.parameters():
            parameter.requires_grad_(trainable)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    report = pr.compress(model, 0.3, inputs(), **low_rank)
    normal = nn.Sequential(*network(), nn.BatchNorm1d(WIDTH))
    assert report.measured_error == pr.compress(normal, 0.3, inputs(), **low_rank).measured_error
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is trainable, name
    assert model[3].weight is parameters["3.weight"]
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers() if name.startswith("3."))


def test_the_observers_of_quantization_aware_training():
    pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Observed(Model):
        def __init__(self):
            super().__init__()
            self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

        def forward(self, x):
            return self.network(self.fake(x))

    model = Observed()
    before = {name: buffer.clone() for name, buffer in model.fake.named_buffers()}
    pr.compress(model, 0.4, inputs(), **low_rank)
    assert len(before) > 4
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.fake.named_buffers())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", [1, 4, 9, 40, 90])
def test_an_interruption_at_any_line(number, call, monkeypatch):
    """A signal that arrives while the calibration puts the model back arrives once it is put back."""

    class Ended(BaseException):
        pass

    def end(number, frame):
        raise Ended

    from panther.compression.calibration import model_state

    model, before = Stateful(), signal.signal(number, end)
    objects = {module: dict(vars(module)) for module in model.modules()}
    refill, left = model_state._refill, call

    def interrupted(*arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(number)
        return refill(*arguments, **options)

    monkeypatch.setattr(model_state, "_refill", interrupted)
    try:
        with pytest.raises(Ended):
            pr.compress(model, 0.3, inputs(), **low_rank)
    finally:
        signal.signal(number, before)
    for module, attributes in objects.items():
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert model.steps == 0
    assert model.history == []


@dataclass
class Output:
    loss: torch.Tensor
    prediction: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda loss, y: {"loss": loss, "prediction": y}, "output['prediction']"),
        (lambda loss, y: (loss, y), "output[1]"),
        (lambda loss, y: Output(loss, y), "output.prediction"),
        (lambda loss, y: OrderedDict(a=y.argmax(-1), b=loss, c=y), "output['c']"),
        (lambda loss, y: [y], "output[0]"),
    ],
)
def test_a_loss_is_never_the_output(wrap, name):
    class Trained(Model):
        def forward(self, x):
            y = self.network(x)
            return wrap(y.square().mean(), y)

    model, plain = Trained(), Model()
    report, _, _ = compressed(model, inputs())
    assert report.measured_error == compressed(plain, inputs())[0].measured_error
    assert report.output == name
    assert f"relative error of the output ({name})" in str(report)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda y: y.mean(), "returned a single number, and a floating tensor with at least one dimension is needed"),
        (lambda y: {"loss": y.mean()}, "returned a dict without such a tensor"),
        (lambda y: torch.nested.nested_tensor([y[:3], y[3:]]), "the output of the model is a nested tensor"),
        (lambda y: y.to_sparse(), "the output of the model is a sparse tensor"),
        (lambda y: None, "returned a NoneType without such a tensor"),
    ],
)
def test_outputs_that_cannot_be_compared(wrap, message):
    class Wrapped(Model):
        def forward(self, x):
            return wrap(self.network(x))

    with pytest.raises(CompressionError, match=message):
        pr.compress(Wrapped(), 0.3, inputs(), **low_rank)


class Translator(nn.Module):
    """An encoder whose masked mean is added to the decoder; the sequence can come first."""

    def __init__(self, sequence_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.sequence_first = sequence_first
        self.embedding, self.encoder = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 64)
        self.decoder, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 100)

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
        if self.sequence_first:
            input_ids, decoder_input_ids = input_ids.mT, decoder_input_ids.mT
        mask = (attention_mask.mT if self.sequence_first else attention_mask)[..., None]
        axis = 0 if self.sequence_first else 1
        context = self.encoder(self.embedding(input_ids))
        context = (context * mask).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True)
        return self.head(nn.functional.gelu(self.decoder(self.embedding(decoder_input_ids)) + context))


def sentences(length=16, target=16, count=8, rows=12):
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(count):
        mask = torch.zeros(rows, length, dtype=torch.long)
        mask[:, :2] = 1
        common = torch.randint(0, 4, (rows, 2), generator=generator)
        ids = torch.cat([common, torch.randint(4, 100, (rows, target - 2), generator=generator)], 1)
        source = torch.randint(100, (rows, length), generator=generator)
        batches.append({"input_ids": source, "attention_mask": mask, "decoder_input_ids": ids})
    return batches


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize(("length", "target", "rows"), [(16, 16, 12), (12, 12, 12), (16, 9, 12), (2, 16, 12)])
def test_masks_are_of_the_side_that_their_names_say(sequence_first, length, target, rows):
    batches = sentences(length, target, rows=rows)
    model = Translator(sequence_first)
    report, exact, last = compressed(model, batches, 0.35)
    true = true_error(model, exact, last, lambda model, batch: model(**batch))
    assert report.measured_error == pytest.approx(true, rel=1e-4)  # all positions of the decoder count
    # With a mask of the decoder, its positions and no others count.
    kept = torch.zeros(rows, target, dtype=torch.long)
    kept[:, : target // 2] = 1
    model = Translator(sequence_first)
    report, exact, last = compressed(model, [{**batch, "decoder_attention_mask": kept} for batch in batches], 0.35)
    rows_of = kept.bool().mT if sequence_first else kept.bool()
    true = true_error(model, exact, last, lambda model, batch: model(**batch)[rows_of])
    assert report.measured_error == pytest.approx(true, rel=1e-4)


def test_positions_of_an_image_are_not_masked_by_the_mask_of_a_text():
    class Captioner(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.image, self.text = nn.Linear(WIDTH, 64), nn.Embedding(50, 64)
            self.head = nn.Linear(64, 50)

        def forward(self, input_ids, attention_mask, pixel_values):
            words = (self.text(input_ids) * attention_mask[..., None]).sum(1, keepdim=True)
            patches = pixel_values.flatten(1, 2)  # as many as there are words
            return self.head(nn.functional.gelu(self.image(patches) + words))

    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < 2).long().expand(16, -1)
    batches = []
    for _ in range(6):
        pixels = torch.randn(16, 3, 2, WIDTH, generator=generator)
        pixels[:, 1:] *= 3  # the patches at the places of masked words are unlike the others
        ids = torch.randint(50, (16, 6), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask, "pixel_values": pixels})
    model = Captioner()
    report, exact, last = compressed(model, batches, 0.4)
    true = true_error(model, exact, last, lambda model, batch: model(**batch))
    masked = true_error(model, exact, last, lambda model, batch: model(**batch)[mask.bool()])
    assert report.measured_error == pytest.approx(true, rel=1e-4)
    assert report.measured_error != pytest.approx(masked, rel=1e-2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # in forwards without
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_that_stays_on_in_eval(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, on):
            super().__init__()
            torch.manual_seed(0)
            self.on, self.embedding = on, nn.Embedding(50, WIDTH)
            self.blocks = nn.ModuleList(network() for _ in range(2))

        def forward(self, ids):
            x = self.embedding(ids)
            for block in (*self.blocks, self.blocks[0]):  # the first one twice
                x = x + (checkpoint(block, x, use_reentrant=reentrant) if self.on else block(x))
            return x

    ids = [torch.randint(50, (16, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    results = []
    for on in (False, True):
        model = Checkpointed(on)
        report = pr.compress(model, 0.3, ids, **low_rank)
        results.append(([layer.rank for layer in report.layers], report.measured_error, report.predicted_error))
    assert results[0][0] == results[1][0]
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-5)


class Mixture(nn.Module):
    """Experts behind a router: most batches of a few tokens call a few of them."""

    def __init__(self, experts=5):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x):
        x = self.before(x)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, (expert, gate) in enumerate(zip(self.experts, self.gates, strict=True)):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * gate(x[rows]).sigmoid() * weights[rows, None])
        return y


@pytest.mark.parametrize("options", [{}, {"method": "activation"}, {"sequential": True}])
def test_experts_that_the_first_batch_does_not_call(options):
    batches = inputs(15, rows=9, seed=5)
    batches[0] = batches[0][:3]
    model = Mixture()
    assert len({int(i) for i in model.router(model.before(batches[0])).argmax(-1)}) < 5
    with pytest.warns(NumericalWarning):  # few positions for each expert
        report = pr.compress(model, 0.6, batches, **low_rank, **options)
    assert not any("is not called" in entry.reason for entry in report.skipped)
    assert sum("experts" in layer.names[0] for layer in report.layers) == 5


def test_layers_that_share_an_input_in_some_batches_only():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            other = x if x[0, 0] > 0 else x.flip(0)
            return self.first(x) + self.second(other) * self.third(x).tanh()

    batches = inputs(8)
    for index, x in enumerate(batches):
        x[0, 0] = 1.0 if index < 3 else -1.0
    for method in ("two_sided", "activation"):
        report, exact, last = compressed(model := Branching(), batches, 0.5, method=method)
        assert len(report.layers) == 3
        assert report.measured_error == pytest.approx(true_error(model, exact, last), rel=1e-4)


def test_parameters_of_their_own_on_one_memory():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight.data = self.a.weight.data

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    model = Tied()
    report, exact, last = compressed(model, inputs(), 0.5)
    assert [layer.names for layer in report.layers] == [("a", "b")]
    assert model.a.S1 is model.b.S1
    assert report.measured_error == pytest.approx(true_error(model, exact, last), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.register_parameter("weight", None), "has no weight yet"),
        (lambda layer: (delattr(layer, "weight"), layer.register_buffer("weight", torch.randn(WIDTH, 64))),
         "has a weight that is a buffer: register it as an nn.Parameter first"),
        (lambda layer: (delattr(layer, "weight"), setattr(layer, "weight", torch.randn(WIDTH, 64))),
         "has a weight that is a plain tensor: register it as an nn.Parameter first"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), "has a weight that is computed"),
        (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(WIDTH, 64).to_sparse_csr())),
         "has a sparse weight (torch.sparse_csr): make it dense first, with weight.to_dense()"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_weights_that_are_no_plain_parameters(change, reason):
    from panther.compression.calibration.targets import select_targets

    model = Model()
    change(model.network[2])
    reasons = {entry.name: entry.reason for entry in select_targets(model).skipped}
    assert reasons["network.2"].startswith(reason)


def test_a_layer_that_returns_a_tuple():
    class WithBias(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.bias

    class Parallel(Model):
        def __init__(self):
            super().__init__()
            self.last = WithBias(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(self.network(x))[0]

    with pytest.raises(
        CompressionError, match=r"'last' \(WithBias\) returns a tuple, and a new layer takes and returns"
    ):
        pr.compress(Parallel(), 0.5, inputs(), include=(nn.Linear,), **low_rank)
    report = pr.compress(Parallel(), 0.5, inputs(), **low_rank)
    assert len(report.layers) == 2


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("an odd size"), "ValueError: an odd size"),
        (AssertionError(), "Asse"),
    ],
)
def test_a_message_begins_with_the_error_of_the_model(error, shown):
    class Failing(Model):
        def forward(self, x):
            raise error

    with pytest.raises(CompressionError) as caught:
        pr.compress(Failing(), 0.5, inputs(), **low_rank)
    assert str(caught.value).startswith(shown)
    assert "pass batches" not in str(caught.value)  # the batch fits the arguments of forward


def test_advice_where_the_batch_does_not_fit():
    with pytest.raises(
        CompressionError, match=r"too many positional arguments.*forward_fn=lambda .*model\(batch\[0\]\)"
    ):
        pr.compress(Model(), 0.5, [(x, x) for x in inputs()], **low_rank)
    with pytest.raises(CompressionError, match=r"missing a required argument: 'x'.*pass batches that hold only these"):
        pr.compress(Model(), 0.5, [{"y": x} for x in inputs()], **low_rank)


def test_the_default_device_is_that_of_the_forward():
    class Making(Model):
        def forward(self, x):
            made = torch.zeros(1)
            assert made.is_meta == (torch.get_default_device().type == "meta")
            devices.append(made.device.type)
            return self.network(x)

    devices, batches = [], inputs()
    ours, theirs = Making(), Making()
    report = pr.compress(ours, 0.3, batches, **low_rank)
    assert {*devices} == {"cpu"}
    devices.clear()
    with torch.device("meta"):
        again = pr.compress(theirs, 0.3, batches, **low_rank)
    assert {*devices} == {"meta"}
    assert again.measured_error == report.measured_error


def test_attention_runs_as_the_user_runs_it():
    """Where there is padding, torch fills the output of an encoder with zeros, in eval mode without gradients."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 16)

        def forward(self, x, padding):
            return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))

    model = Classifier().eval()
    padding = torch.arange(12) >= torch.tensor([[12], [9], [5], [3]])
    padding = padding.repeat(8, 1)
    batches = [
        (torch.randn(32, 12, WIDTH, generator=torch.Generator().manual_seed(seed)), padding) for seed in range(4)
    ]
    report, exact, last = compressed(model, batches, 0.6)
    true = true_error(model, exact, last, lambda model, batch: model(*batch))
    assert report.measured_error == pytest.approx(true, rel=1e-4)
    assert report.measured_error < 0.4
    assert model.encoder.use_nested_tensor
    assert any("use_nested_tensor=False of encoder" in note for note in report.notes)
