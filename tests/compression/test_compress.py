"""pr.compress and pr.sketch_layers_ from end to end: what is kept, what is left, and that nothing is half changed."""

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from compressing import assert_untouched, batches_of, error, low_rank, state_of
from fake import fake_group
from ranks import on_ranks
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.errors import CompressionError, ConfigError, NumericalWarning, PerformanceWarning
from panther.nn import LowRankLinear, SKLinear
from panther.nn.sketch_record import plain_state


def network(**kwargs):
    """A network whose inputs lie near a subspace, so that a metric pays."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 96, **kwargs), nn.GELU(), nn.Linear(96, 96, **kwargs), nn.ReLU(inplace=True),
        nn.Linear(96, 48, bias=False, **kwargs), nn.LayerNorm(48, **kwargs), nn.Linear(48, 24, **kwargs),
    )  # fmt: skip


def test_methods_keep_more_the_more_they_look_at():
    model, batches = network(), batches_of()
    x = torch.cat(batches[-2:])
    exact = model(x).detach()
    errors = {}
    for method in ("two_sided", "activation", "svd", "random"):
        other = copy.deepcopy(model)
        report = pr.compress(other, 0.4, batches, method=method, **low_rank)
        assert report.eligible_bytes_after <= 0.4 * report.eligible_bytes_before
        assert report.bytes_after < report.bytes_before
        errors[method] = error(other, exact, x)
    assert errors["two_sided"] < errors["activation"] < errors["svd"] < errors["random"]
    assert errors["two_sided"] < 0.6 * errors["svd"]


def test_report():
    model, batches = network(), batches_of()
    exact = copy.deepcopy(model)
    report = pr.compress(model, 0.5, batches, **low_rank)
    numbers = sum(layer.bytes_after for layer in report.layers) / 4
    sketched = [module for module in model.modules() if isinstance(module, LowRankLinear)]
    dense = [module for module in model.modules() if type(module) is nn.Linear]
    stored = sum(p.numel() for m in sketched for name, p in m.named_parameters() if name != "bias")
    assert numbers == stored + sum(layer.weight.numel() for layer in dense)
    assert report.bytes_before == sum(4 * p.numel() for p in exact.parameters())
    assert report.bytes_after == sum(t.numel() * t.element_size() for t in plain_state(model).values())
    held_out = torch.cat([batches[4], batches[9]])  # every fifth
    assert report.measured_error == pytest.approx(error(model, exact(held_out).detach(), held_out), rel=1e-4)
    assert 0.5 * report.measured_error < report.predicted_error < 2 * report.measured_error
    assert sum(layer.share for layer in report.layers) == pytest.approx(1)
    for layer in report.layers:
        assert layer.rank is None or layer.measured_error < 2 * layer.predicted_error + 0.05
    printed = str(report)
    assert printed.startswith("whole model  ")
    assert "(50.0%)" not in printed.splitlines()[1] or report.eligible_ratio == pytest.approx(0.5, abs=1e-3)
    assert all(layer.names[0] in printed for layer in report.layers)


def test_it_is_a_function_of_the_seed_and_leaves_the_generator_alone():
    batches = batches_of()
    states = []
    for _ in range(2):
        model = network()
        state = torch.get_rng_state()
        pr.compress(model, 0.5, batches, **low_rank)
        assert torch.equal(torch.get_rng_state(), state)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_global_ranks_are_used_unless_uniform_ones_are_better():
    model, batches = network(), batches_of()
    report = pr.compress(copy.deepcopy(model), 0.5, batches, **low_rank)
    uniform = pr.compress(copy.deepcopy(model), 0.5, batches, allocate="uniform", **low_rank)
    assert report.uniform_error == pytest.approx(uniform.measured_error)
    assert report.allocate == "global"
    assert report.measured_error < uniform.measured_error


def test_passes_do_not_change_the_result():
    results = []
    for memory in (1, 10**9):
        model = network()
        report = pr.compress(model, 0.5, batches_of(), statistics_memory_bytes=memory, **low_rank)
        results.append((report.passes, model.state_dict()))
    assert [passes for passes, _ in results] == [4, 1]
    for key, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][key], rtol=1e-5, atol=1e-6)


def test_max_bytes_and_max_error():
    model, batches = network(), batches_of()
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    small = copy.deepcopy(model)
    report = pr.compress(small, calibration=batches, max_bytes=int(0.6 * whole), **low_rank)
    assert 0.55 * whole < report.bytes_after <= 0.6 * whole
    close = pr.compress(copy.deepcopy(model), calibration=batches, max_error=0.05, **low_rank)
    loose = pr.compress(copy.deepcopy(model), calibration=batches, max_error=0.2, **low_rank)
    assert close.measured_error <= 0.05
    assert 0.1 < loose.measured_error <= 0.2
    assert loose.bytes_after < close.bytes_after


def test_a_loss_decides_what_matters():
    """Where the loss looks at the first outputs only, the others' error grows and theirs falls."""
    batches = batches_of()
    x = torch.cat(batches[-2:])
    model = network()
    exact = model(x).detach()
    first = {}
    for name, loss_fn in (("output", None), ("loss", lambda out, batch: out[:, :4].square().sum())):
        other = copy.deepcopy(model)
        pr.compress(other, 0.3, batches, loss_fn=loss_fn, **low_rank)
        with torch.no_grad():
            first[name] = (other(x) - exact)[:, :4].norm().item()
    assert first["loss"] < 0.8 * first["output"]


def test_shared_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64)
            self.b.weight = self.a.weight
            self.again = self.c
            self.head = nn.Linear(64, 32)
            self.out = nn.Linear(32, 40, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            return self.out(self.head(self.again(self.b(torch.relu(self.a(self.embed(tokens)))))))

    torch.manual_seed(0)
    model = Model()
    batches = list(torch.randint(0, 40, (60, 7)).split(10))
    report = pr.compress(model, 0.5, batches, allocate="uniform", **low_rank)
    assert model.a.down is model.b.down
    assert model.a.up is model.b.up
    assert model.a.bias is not model.b.bias
    assert model.again is model.c
    assert {layer.names for layer in report.layers} >= {("a", "b"), ("c", "again")}
    assert {entry.name: entry.reason for entry in report.skipped}["out"] == "shares its weight with 'embed' (Embedding)"
    assert model.out.weight is model.embed.weight


def test_a_frozen_model_and_half_precision():
    model = network(dtype=torch.bfloat16).requires_grad_(False)
    report = pr.compress(model, 0.5, batches_of(dtype=torch.bfloat16), **low_rank)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert report.measured_error < 0.3
    assert model.training


def test_batches_of_every_kind():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = network()

        def forward(self, x, scale=1.0):
            return {"aux": [], "out": self.layer(x) * scale}

    x = batches_of()
    sets = {
        "dicts": [{"x": b, "scale": 2.0} for b in x],
        "tuples": [(b, 2.0) for b in x],
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(x)), batch_size=64),
    }
    for batches in sets.values():
        assert pr.compress(Two(), 0.5, batches, **low_rank).measured_error < 0.3
    labelled = [(b, torch.zeros(len(b), dtype=torch.long)) for b in x]
    report = pr.compress(Two(), 0.5, labelled, forward_fn=lambda model, batch: model(batch[0]), **low_rank)
    assert report.measured_error < 0.3


def test_the_callers_modes_do_not_matter():
    expected = network()
    pr.compress(expected, 0.5, batches_of(), **low_rank)
    for mode in (torch.no_grad, torch.inference_mode):
        model = network()
        with mode():
            assert pr.compress(model, 0.5, batches_of(), **low_rank).method == "two_sided"
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
        model(batches_of()[0]).sum().backward()


def test_a_compiled_model():
    model = torch.compile(network(), fullgraph=True, backend="eager")
    x = batches_of()[0]
    model(x)
    report = pr.compress(model, 0.5, batches_of(), **low_rank)
    expected = network()
    assert report.measured_error == pr.compress(expected, 0.5, batches_of(), **low_rank).measured_error
    torch.testing.assert_close(model(x), expected(x))


def test_layers_called_by_keyword_and_under_checkpointing():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            x = self.net[0](input=x)
            return checkpoint(self.net[1:], x, use_reentrant=False)

    model, plain = Odd(), network()
    report = pr.compress(model, 0.5, batches_of(), **low_rank)
    assert report.measured_error == pr.compress(plain, 0.5, batches_of(), **low_rank).measured_error


def test_float64_stays_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48)).double()
    model[0].weight.data = torch.randn(48, 4).double() @ torch.randn(4, 48).double()
    assert pr.compress(model, 0.5, batches_of(dtype=torch.float64), **low_rank).measured_error < 1e-13


def test_a_model_that_gives_zeros():
    model = network()
    nn.init.zeros_(model[6].weight)
    nn.init.zeros_(model[6].bias)
    report = pr.compress(model, 0.5, batches_of(), **low_rank)
    assert report.measured_error == 0
    assert [entry.reason.partition(":")[0] for entry in report.skipped] == ["has no gradient"] * 3


def test_where_there_is_no_gradient_inputs_alone_decide():
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = network()

        @torch.no_grad()
        def forward(self, x):
            return self.layer(x)

    with pytest.warns(NumericalWarning, match="method='two_sided' is not possible: the output has no gradient"):
        report = pr.compress(Rounded(), 0.5, batches_of(), **low_rank)
    assert report.allocate == "uniform"
    assert "no gradient" in report.notes[0]
    other = pr.compress(Rounded(), 0.5, batches_of(), method="activation", **low_rank)
    assert report.measured_error == pytest.approx(other.measured_error)


def test_healing_through_compress():
    model, batches = network(), batches_of(1280)
    exact, x = copy.deepcopy(model), torch.cat(batches[4::5])
    report = pr.compress(model, 0.25, batches, heal=pr.HealConfig(max_steps=150, learning_rate=2e-3), **low_rank)
    assert report.healed_error < 0.9 * report.measured_error
    assert report.healed_error == pytest.approx(error(model, exact(x).detach(), x), rel=1e-4)
    assert report.healed.steps == 150


def test_no_data():
    model = network()
    report = pr.compress(model, 0.5, method="svd", **low_rank)
    assert report.eligible_ratio <= 0.5
    assert report.measured_error is None
    for index, rank in ((0, report.layers[0].rank), (2, report.layers[1].rank)):
        expected = LowRankLinear.from_linear(network()[index], rank).weight
        torch.testing.assert_close(model[index].weight, expected, rtol=1e-3, atol=1e-4)


def test_sketch_layers():
    model = network()
    report = pr.sketch_layers_(model, pr.SketchConfig(low_rank=4, init="random"), seed=0)
    sketched = [name for name, module in model.named_modules() if isinstance(module, SKLinear)]
    assert sketched == ["0", "2", "4", "6"]
    assert model[0].low_rank == 4
    assert len({model[int(name)].seed for name in sketched}) == 4
    assert report.eligible_bytes_after == 4 * 4 * (144 + 192 + 144 + 72)
    model = network()
    pr.sketch_layers_(model, pr.SketchConfig(low_rank=4), exclude=lambda module, name: name == "2")
    assert [type(model[index]) for index in (0, 2)] == [SKLinear, nn.Linear]
    assert model[0].low_rank == 4
    report = pr.sketch_layers_(model, pr.SketchConfig(low_rank=4, init="svd"))
    assert type(model[2]) is LowRankLinear
    assert model[2].rank == report.layers[0].rank == 8
    report = pr.sketch_layers_(network(), pr.SketchConfig(low_rank=10, init="svd"))
    assert [entry.reason.partition(":")[0] for entry in report.skipped] == ["would not shrink"]
    with pytest.raises(CompressionError, match="no layer to compress: '0' would not shrink"):
        pr.sketch_layers_(network(), pr.SketchConfig(low_rank=128))
    with pytest.raises(ConfigError, match=r"by name: write SketchConfig\(num_terms=1, low_rank=16\)"):
        pr.SketchConfig(1, 16)
    with pytest.raises(ConfigError, match="'rank' is not a setting of SketchConfig: did you mean 'low_rank'"):
        pr.SketchConfig(rank=16)


class Raises(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.layer = network()
        left = itertools.count(-after)  # an iterator of its own state, which nothing can put back

        def check():
            if next(left) >= 0:
                raise RuntimeError("no more")

        self.check = check

    def forward(self, x):
        self.check()
        return self.layer(x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = x.mean()
        return self.net(x)


class Blank(nn.Module):
    def forward(self, x):
        return x * math.nan


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(48, 48)
        self.again = [self.a]

    def forward(self, x):
        return self.again[0](self.a(x))


def test_a_model_on_a_mesh_is_refused():
    with fake_group(2):
        model = pr.distributed.data_parallel(network(), strategy="fsdp")
        with pytest.raises(CompressionError, match="is a DTensor, on a device mesh: compress the model before"):
            pr.compress(model, 0.5, method="svd")


@pytest.mark.parametrize(
    ("build", "calibration", "options", "error", "message"),
    [
        (network, lambda: iter(batches_of()), {}, CompressionError, "is a .*iterator, which can be read only once"),
        (network, lambda: [], {}, CompressionError, "has 0 batches and needs at least 2"),
        (network, lambda: batches_of()[:1], {}, CompressionError, "has 1 batch and needs at least 2"),
        (network, lambda: batches_of()[0], {}, CompressionError, "not a Tensor: for one tensor use"),
        (network, lambda: {"x": batches_of()[0]}, {}, CompressionError, "not a dict: each batch is the model's input"),
        (network, lambda: None, {}, ValueError, r"method='two_sided' needs calibration="),
        (network, batches_of, {"budget": 0.0}, ValueError, r"budget=0.0 must be a fraction in \(0, 1\]"),
        (network, batches_of, {"budget": 1.5}, ValueError, r"budget=1.5 must be a fraction in \(0, 1\]"),
        (network, batches_of, {"budget": [0.5]}, TypeError, "budget must be a number, not list: give one"),
        (network, batches_of, {"budget": None}, ValueError, "exactly one of .* speedup and max_latency_ms must"),
        (network, batches_of, {"max_bytes": 10}, ValueError, "exactly one of .* not budget and max_bytes"),
        (network, batches_of, {"budget": 0.01}, CompressionError, "smallest feasible budget is 0.0"),
        (network, batches_of, {"method": "qr"}, ValueError, "method='qr' is unknown: use one of 'two_sided'"),
        (network, batches_of, {"method": "svd", "allocate": "global"}, ValueError, "allocate='global' needs method"),
        (network, batches_of, {"include": 3}, TypeError, "include takes types, globs of names and functions, not int"),
        (network, batches_of, {"exclude": nn.Linear}, CompressionError, "no layer to compress: '0' is excluded"),
        (network, batches_of, {"include": ["9"]}, CompressionError, "no layer to compress: include='9' matches"),
        (lambda: nn.Sequential(nn.ReLU()), batches_of, {}, CompressionError, "it has no weights"),
        (lambda: nn.Linear(48, 48), batches_of, {}, CompressionError, "is the model itself"),
        (lambda: Raises(0), batches_of, {}, CompressionError,
         "^RuntimeError: no more: the model raised this for a calibration batch"),
        (lambda: Raises(13), batches_of, {}, CompressionError, "no more"),
        (lambda: Raises(30), batches_of, {"heal": pr.HealConfig(max_steps=20)}, CompressionError, "no more"),
        (network, lambda: [*batches_of()[:3], torch.full((4, 48), math.nan), *batches_of()], {}, CompressionError,
         "layer '0' reads NaN or infinite values in calibration batch 3"),
        (network, lambda: [*batches_of()[:9], torch.full((4, 48), math.nan)], {}, CompressionError,
         "output is NaN or infinite on the held-out batches"),
        (lambda: nn.Sequential(nn.Linear(48, 48), Blank()), batches_of, {}, CompressionError,
         "output is NaN or infinite in calibration batch 0"),
        (Listed, batches_of, {}, CompressionError, "layer 'a' is also called from a place where it is not registered"),
        (network, batches_of, {"budget": None, "max_bytes": 10}, CompressionError, "smallest feasible max_bytes is"),
        (network, batches_of, {"budget": None, "max_bytes": math.inf}, ValueError, "must be positive and finite"),
        (Counting, batches_of, {"budget": 0.001}, CompressionError, "smallest feasible budget is"),
        (network, batches_of, {"loss_fn": lambda output, batch: output}, CompressionError,
         r"loss_fn must return one number .* has shape \(64, 24\): end it with"),
        (network, batches_of, {"loss_fn": lambda output, batch: output.detach().sum()}, CompressionError,
         "loss_fn must return one number .* and no gradient"),
        (network, batches_of, {"loss_fn": lambda output, batch: 1.0}, CompressionError, "has type float and no grad"),
        (network, batches_of, {"mask_fn": lambda batch: [1]}, CompressionError, "of booleans, .* of type list"),
        (network, batches_of, {"statistics_memory_bytes": "1 GB"}, TypeError, "memory_bytes must be an integer"),
    ],
)  # fmt: skip
def test_bad_input_leaves_the_model_as_it_was(build, calibration, options, error, message):
    model = build()
    original = state_of(model)
    with pytest.raises(error, match=message):
        pr.compress(model, **{"budget": 0.5, "calibration": calibration(), **low_rank, **options})
    assert_untouched(model, original)


@pytest.mark.parametrize("calls", [1, 5, 12, 30])
def test_an_interruption_leaves_the_model_as_it_was(calls):
    left = calls  # not an attribute of the model, which each forward finds as it was

    class Interrupted(nn.Sequential):
        def forward(self, x):
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(network())
    original, fast = state_of(model), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyboardInterrupt):
        pr.compress(model, 0.5, batches_of(), heal=pr.HealConfig(max_steps=20, train="all"), **low_rank)
    assert_untouched(model, original)
    assert torch.backends.mha.get_fastpath_enabled() is fast


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was():
    model = network()
    original = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PerformanceWarning):
            pr.compress(model, 0.5, batches_of(), seed=0)
    assert_untouched(model, original)


def test_what_forwards_count_is_put_back():
    model = Counting()
    last = model.last
    pr.compress(model, 0.5, batches_of(), heal=pr.HealConfig(max_steps=2), **low_rank)
    assert model.calls == model.last == 0
    assert model.last is last


def test_a_class_is_not_a_model():
    with pytest.raises(TypeError, match=r"must be an nn.Module, not the class Linear: pass an instance of it"):
        pr.compress(nn.Linear, 0.5, batches_of())


def test_a_glob_that_matches_nothing_is_noted():
    report = pr.compress(network(), 0.5, method="svd", include=["0", "9"], exclude="head.*", **low_rank)
    assert [note.partition(" ")[0] for note in report.notes] == ["include='9'", "exclude='head.*'"]


def test_a_lazy_layer_is_not_given_its_weights_by_calibration():
    model = nn.Sequential(nn.Linear(48, 48), nn.LazyLinear(48))
    with pytest.raises(CompressionError, match=r"'1.weight' .* has no values yet, .*: run the model on a batch first"):
        pr.compress(model, 0.5, batches_of(), **low_rank)
    assert type(model[1]) is nn.LazyLinear
    assert model[1].has_uninitialized_params()


def test_the_smallest_max_bytes_that_is_named_is_feasible():
    with pytest.raises(CompressionError) as caught:
        pr.compress(network(), calibration=batches_of(), max_bytes=10, **low_rank)
    named = int(str(caught.value).partition("max_bytes is ")[2].partition(", or")[0].replace(",", ""))
    assert pr.compress(network(), calibration=batches_of(), max_bytes=named, **low_rank).bytes_after == named
    with pytest.raises(CompressionError):
        pr.compress(network(), calibration=batches_of(), max_bytes=named - 1, **low_rank)


def test_the_smallest_budget_that_is_named_is_feasible_whatever_the_rounding():
    model = nn.Sequential(nn.Linear(125, 100, bias=False))  # 0.036 * 50,000 is 1,799.99... in floating point
    assert pr.compress(model, 0.036, method="svd", **low_rank).layers[0].rank == 2


def test_what_is_left_and_why():
    class Own(nn.Linear):
        pass

    with torch.device("meta"):
        empty = nn.Linear(64, 64)
    weird = nn.Linear(64, 64)
    with torch.no_grad():
        weird.weight[0, 0] = math.nan
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    pruned = nn.Linear(64, 64)
    prune.l1_unstructured(pruned, "weight", 0.5)
    patched = nn.Linear(64, 64)
    patched.forward = lambda x: x
    layers = {
        "patched": patched, "sub": Own(64, 64), "empty": empty, "weird": weird, "hooked": hooked, "pruned": pruned,
        "norm": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "lazy": nn.LazyLinear(8),
        "thin": nn.Linear(64, 2), "gru": nn.GRU(64, 64), "one_d": nn.Conv1d(8, 8, 3), "ok": nn.Linear(64, 64),
        "sketched": SKLinear(256, 256, 4),
    }  # fmt: skip
    report = pr.compress(nn.ModuleDict(layers), 0.5, method="svd", **low_rank)
    assert [layer.names for layer in report.layers] == [("ok",)]
    reasons = {entry.name.partition(".")[0]: entry.reason for entry in report.skipped}
    for name, part in {
        "patched": "has a forward that was set on it",
        "sub": "is a subclass", "empty": "is on the meta device", "weird": "has a weight with NaN",
        "hooked": "has hooks", "pruned": "has a weight that is computed", "norm": "is parametrized",
        "lazy": "has no weight yet", "thin": "would not shrink", "gru": "holds a matrix, and is not a Linear",
        "one_d": "holds a matrix, and is not a Linear", "sketched": "is compressed already",
    }.items():  # fmt: skip
        assert reasons[name].startswith(part), (name, reasons[name])
    again = nn.ModuleDict({"sub": Own(64, 64), "ok": nn.Linear(64, 64)})
    report = pr.compress(again, 0.5, method="svd", include=[Own], **low_rank)
    assert [layer.names for layer in report.layers] == [("sub",)]
    assert report.skipped[0].reason == "is not included"
    attention = nn.ModuleDict({"mha": nn.MultiheadAttention(64, 4), "ok": nn.Linear(64, 64)})
    report = pr.compress(attention, 0.5, method="svd", include=nn.Linear, **low_rank)
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["mha.out_proj"] == "belongs to nn.MultiheadAttention, which reads its weight and never calls it"
    globs = pr.compress(network(), 0.5, method="svd", include=["[02]", "6"], exclude="6", **low_rank)
    assert [layer.names[0] for layer in globs.layers] == ["0", "2"]


@pytest.mark.parametrize("value", ["one sample", "zeros", "constants"])
def test_calibration_that_says_nothing_is_refused(value):
    batches = {"one sample": batches_of(2, size=1), "zeros": [torch.zeros(8, 48)] * 3}
    model = network()
    original = state_of(model)
    with pytest.raises(CompressionError, match=r"reads the same input at all \d+ positions of the calibration batches"):
        pr.compress(model, 0.5, batches.get(value, [torch.full((8, 48), 3.0)] * 3), **low_rank)
    assert_untouched(model, original)


def test_calibration_that_says_too_little_is_warned_of():
    with pytest.warns(NumericalWarning, match=r"more inputs than calibration positions: 2 of 4 \('2' has 96 and was"):
        report = pr.compress(network(), 0.5, batches_of(80, size=8), **low_rank)
    assert any(note.startswith("layers with more inputs than") for note in report.notes)
    model = nn.ModuleList([nn.Linear(48, 48), nn.Linear(48, 48)])
    options = {"forward_fn": lambda model, x: model[0](x) + model[1](torch.ones(3, 48)).sum(0), **low_rank}
    with pytest.warns(
        NumericalWarning, match=r"read the same input at all positions of the calibration batches .*: 1 of 2 \('1'\)"
    ):
        pr.compress(model, 0.5, batches_of(), **options)


def test_a_held_out_error_far_above_the_predicted_one_is_warned_of():
    alike, other = batches_of(640), torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    x = torch.cat(alike[:9])
    U, sigma, V = torch.linalg.svd(x, full_matrices=False)
    narrow = list(((U[:, :6] * sigma[:6]) @ V[:6]).split(64))
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    with pytest.warns(
        NumericalWarning, match=r"on the held-out batches, and .* was predicted from the remaining batches: give"
    ):
        pr.compress(model, 0.5, [*narrow, other], **low_rank)


def test_what_is_compressed_already_is_said():
    model = network()
    report = pr.compress(model, 0.5, batches_of(), include="[02]", **low_rank)
    assert not any("already" in note for note in report.notes)
    report = pr.compress(model, 0.5, batches_of(), allocate="uniform", **low_rank)
    assert any(note.startswith("layers that were compressed already: 2; they do not change") for note in report.notes)
    assert [layer.names[0] for layer in report.layers] == ["4", "6"]
    original = state_of(model)
    with pytest.raises(CompressionError, match=r"compressed already, in 4 layers, .*compress the original model again"):
        pr.compress(model, 0.5, batches_of(), **low_rank)
    assert_untouched(model, original)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_layers_are_left():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2] = torch.ao.nn.quantized.dynamic.Linear(64, 64)
    report = pr.compress(model, 0.5, method="svd", **low_rank)
    assert report.skipped[0].name == "2"
    assert report.skipped[0].reason.startswith("is quantized")


def test_a_layer_that_got_slower_is_warned_of():
    with pytest.warns(PerformanceWarning, match=r"layers are slower than their dense originals \("):
        report = pr.compress(network(), 0.5, batches_of(), seed=0)
    assert report.measured_speedup > 0
    slower = [layer for layer in report.layers if layer.speedup is not None and layer.speedup < 1]
    assert list(report.slower) == slower
    assert f"slower layers: {len(slower)} of {len(report.layers)}" in str(report)
    assert all(layer.speedup > 0 for layer in report.layers if layer.rank is not None)


def test_budget_one_keeps_everything():
    model, batches = network(), batches_of()
    original = state_of(model)
    report = pr.compress(model, 1.0, batches, **low_rank)
    assert all(layer.rank is None for layer in report.layers)
    assert report.measured_error == 0
    assert_untouched(model, original)


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformer_encoder(padded):
    """Its fast path would neither call the layers nor return all positions."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.zeros(4, 9, dtype=torch.bool)
    if padded:
        mask[:, 7:] = True
    batches = [{"src": x, "src_key_padding_mask": mask} for x in torch.randn(48, 9, 64).split(4)]
    with torch.no_grad():
        exact = torch.cat([model(**batches[5]), model(**batches[11])])  # which are held out
    report = pr.compress(model, 0.5, batches, mask_fn=lambda batch: ~batch["src_key_padding_mask"], **low_rank)
    assert {layer.names[0] for layer in report.layers} == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert {entry.name for entry in report.skipped if "self_attn" in entry.name} >= {"layers.0.self_attn.out_proj"}
    assert model.use_nested_tensor
    with torch.no_grad():
        out = torch.cat([model(**batches[5]), model(**batches[11])])
    assert out.shape == exact.shape == (8, 9, 64)
    assert not padded or not exact[:, 7:].any()  # torch fills the positions of padding with zeros
    assert report.measured_error == pytest.approx(((out - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert report.measured_error < 0.5


def test_training_everything_while_healing_measures_against_the_original():
    model, batches = network(), batches_of(1280)
    exact, x = copy.deepcopy(model), torch.cat(batches[4::5])
    config = pr.HealConfig(max_steps=100, learning_rate=2e-3, train="all")
    report = pr.compress(model, 0.25, batches, heal=config, **low_rank)
    assert not torch.equal(model[5].weight, exact[5].weight)
    assert report.healed_error == pytest.approx(error(model, exact(x).detach(), x), rel=1e-4)
    assert report.healed_error < report.measured_error


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["activation", "two_sided"])
def test_ranks_that_each_feed_a_part(method):
    """Both end with one model; where no random directions are drawn it is that of one process with all batches."""
    every = batches_of(640, size=32)  # of 20, each fifth is held out, of each rank's ten too
    order = [index for index in range(20) if index % 5 != 4]
    training, held_out = [every[index] for index in order], [every[index] for index in range(20) if index % 5 == 4]
    parts = [
        [*training[8 * r : 8 * r + 4], held_out[2 * r], *training[8 * r + 4 : 8 * r + 8], held_out[2 * r + 1]]
        for r in range(2)
    ]

    def rank():
        model = network()
        own = parts[dist.get_rank()]
        heal = pr.HealConfig(max_steps=4) if method == "two_sided" else None
        options = {"method": method, "heal": heal, "group": dist.group.WORLD, **low_rank, "seed": None}
        torch.manual_seed(dist.get_rank())  # seed=None: the first rank's is taken
        report = pr.compress(model, 0.5, own, **options)
        return model.state_dict(), report.measured_error, [layer.rank for layer in report.layers], report.healed_error

    first, second = on_ranks(rank)
    assert first[1:] == second[1:]
    assert (first[3] is None) == (method == "activation")
    assert all(torch.equal(first[0][key], second[0][key]) for key in first[0])
    single = network()
    report = pr.compress(single, 0.5, every, method=method, **low_rank)
    if method == "activation":
        assert first[2] == [layer.rank for layer in report.layers]
        assert first[1] == pytest.approx(report.measured_error, rel=1e-3)
        x = every[4]
        theirs = network()
        pr.compress(theirs, 0.5, every, method=method, **low_rank)
        theirs.load_state_dict(first[0])
        torch.testing.assert_close(theirs(x), single(x), rtol=1e-3, atol=1e-3)
    else:
        assert first[1] < 1.3 * report.measured_error
