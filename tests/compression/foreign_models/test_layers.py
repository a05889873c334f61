"""Layers of models that somebody else wrote: called again, now and then, sharing inputs and memory."""

import pytest
import torch
from compressing import low_rank
from foreign_models import WIDTH, Model, compressed, inputs, network, true_error
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.errors import CompressionError, NumericalWarning


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


@pytest.mark.parametrize("options", [{}, {"method": "activation"}])
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
    assert model.a.down is model.b.down
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
    from panther.compression.calibration.survey import select_targets

    model = Model()
    change(model.network[2])
    reasons = {entry.name: entry.reason for entry in select_targets(model).skipped}
    assert reasons["network.2"].startswith(reason)


@pytest.mark.parametrize("method", ["two_sided", "svd"])
def test_compiled_blocks_and_layers(method):
    def model(wrap):
        torch.manual_seed(0)
        return nn.Sequential(wrap(nn.Linear(WIDTH, 64)), nn.GELU(), wrap(nn.Sequential(nn.Linear(64, WIDTH))))

    compiled, plain = model(lambda block: torch.compile(block, backend="eager")), model(lambda block: block)
    wrappers = [*compiled]
    reports = [pr.compress(each, 0.3, inputs(), **low_rank, method=method) for each in (compiled, plain)]
    assert [layer.names for layer in reports[0].layers] == [("0",), ("2.0",)]
    assert reports[0].measured_error == reports[1].measured_error
    assert [*compiled] == wrappers
    with torch.no_grad():
        x = inputs()[0]
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
    sketched = model(lambda block: torch.compile(block, backend="eager"))
    pr.sketch_layers_(sketched, pr.SketchConfig(low_rank=2, init="svd"), seed=1)
    sketched[0](x).sum().backward()
    assert sketched[0]._orig_mod.down.grad is not None


def test_a_model_without_a_parameter_left_is_named():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.layer(x.to(next(self.parameters()).dtype))

    with pytest.raises(CompressionError, match=r"^StopIteration: the model raised .* has no parameter left, because"):
        pr.compress(Casting(), 0.3, inputs(), forms=("int8",), seed=0, measure_speed=False)
