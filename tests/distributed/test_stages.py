"""Stages of models that are no nn.Sequential: cut at a ModuleList or at named modules, balanced by size."""

import copy

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from fake import fake_group
from pool import RankError
from ranks import on_ranks, take_pipeline_steps, take_steps
from torch import nn
from torch.distributed.pipelining import PipelineStage

from panther.distributed import HybridParallelTrainer, make_mesh, make_schedule, split_stages
from panther.distributed.pipeline._export import trace_stages
from panther.errors import DistributedError, ShapeError
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


class Block(nn.Module):
    def __init__(self, width, fitted):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = with_stored_sketches(SKLinear(width, 48, 2)) if fitted else SKLinear(width, 48, 2)
        self.down = SKLinear(48, width, 2)
        self.drop = nn.Dropout(0.0)

    def forward(self, x, mask, *, scale=1.0, extra=None):
        assert extra is None
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x))))) * mask * scale


class Decoder(nn.Module):
    """What a cut must cope with: a mask for all blocks, a parameter of its own, a skip, tokens used at both ends."""

    def __init__(self, depth=4, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.position = nn.Parameter(torch.randn(16, width))
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("version", torch.ones(1))  # nothing uses it
        self.layers = nn.ModuleList(Block(width, fitted=i == 1) for i in range(depth))
        self.norm = nn.LayerNorm(width)
        self.shortcut = nn.Embedding(50, width)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens):
        n = tokens.shape[1]
        if n > 16:
            raise ValueError("too long")
        h = first = self.embed(tokens) + self.position[:n] * self.scale
        mask = (tokens != 0).unsqueeze(-1).to(h.dtype)
        for i, layer in enumerate(self.layers):
            h = layer(h, mask, scale=0.5, extra=None)
            if i == 2:
                h += 1e-3  # in place, on what a stage may have received
        h = h + self.shortcut(tokens) + first
        return self.head(self.norm(h)).mean(1)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.decoder = Decoder(**options)

    def forward(self, tokens):
        return self.decoder(tokens)


def build(seed, **options):
    torch.manual_seed(seed)
    return Model(**options).double()


def data(n=8):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return torch.randint(50, (n, 6), generator=generator), y


def single(n=8, steps=10):
    model, (x, y) = build(100), data(n)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, _ = take_steps(optimizer, lambda: nn.functional.mse_loss(model(x), y), steps)
    return losses, model


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "looped_bfs": 2, "zero_bubble": 2}
POINTS = ["decoder.layers.1", "decoder.layers.2.norm", "decoder.norm"]


def assert_integers_are_refused(name, world, cut):
    per_rank = SCHEDULES[name]
    x, y = data()

    def rank():
        stages = split_stages(build(100), world * per_rank, sample_input=x[:2], **cut)
        make_schedule(name, stages, 4, nn.MSELoss()).step(x, y)

    with pytest.raises(RankError, match="sends only floating-point tensors between stages that are trained"):
        on_ranks(rank, world)


@pytest.mark.parametrize(
    ("name", "world", "cut"),
    [
        ("zero_bubble", 2, {"layers": "decoder.layers"}),
        pytest.param("zero_bubble", 2, {"points": POINTS}, marks=pytest.mark.slow),
        pytest.param("gpipe", 4, {"points": POINTS}, marks=pytest.mark.slow),
        *(
            pytest.param(name, 2, {"layers": "decoder.layers"}, marks=pytest.mark.slow)
            for name in SCHEDULES
            if name != "zero_bubble"
        ),
        pytest.param("1f1b", 4, {"layers": "decoder.layers"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ten_steps_are_those_of_one_process(name, world, cut):
    per_rank = SCHEDULES[name]
    x, y = data()
    if hasattr(PipelineStage, "_shape_inference"):  # torch 2.11, which cannot send the integers that this model makes
        assert_integers_are_refused(name, world, cut)
        return

    def rank():
        model = build(100 + dist.get_rank())
        stages = split_stages(model, world * per_rank, sample_input=x[:2], **cut)
        schedule = make_schedule(name, stages, 4, nn.MSELoss())
        losses, _ = take_pipeline_steps(torch.optim.SGD(schedule.parameters(), 0.1), schedule, x, y)
        return losses, [{key: value.detach() for key, value in stage.submod.state_dict().items()} for stage in stages]

    losses, model = single()
    results = on_ranks(rank, world)
    assert [found for found, _ in results if found[0] is not None] == [pytest.approx(losses, rel=1e-9)]
    states = [state for _, states in results for state in states]
    union = {key: value for state in states for key, value in state.items()}
    assert len(union) == sum(map(len, states))  # every name once
    assert set(union) == set(model.state_dict())  # seeds of sketches too, and what nothing uses
    loaded = build(7)
    loaded.load_state_dict(union)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-8, atol=1e-10)


def test_modules_keep_their_hooks_and_modes():
    """They are called as they are, once a microbatch, and tracing runs none of their hooks on values."""
    model, (x, _) = build(0), data()
    seen = []
    model.decoder.layers[2].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    model.decoder.layers[3].register_forward_hook(lambda module, args, output: seen.append(output))
    graph = trace_stages(model, ["decoder.layers.1", "decoder.layers.3"], (x,))
    seen.clear()
    values = (x,)
    for i in range(3):
        values = graph.module(model, i, i + 1)(*values)
        values = values if isinstance(values, tuple) else (values,)
    assert len(seen) == 1
    assert torch.equal(values[0], model(x))
    stage = graph.module(model, 1, 3)
    assert stage.decoder.layers.get_submodule("3") is model.decoder.layers[3]
    stage.eval()
    assert not model.decoder.layers[3].drop.training
    assert not any("_orig" in key or "forward" in vars(module) for key, module in model.named_modules())


def test_two_inputs_and_the_size_of_the_sample():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, a, b):
            return self.layers[1](torch.relu(self.layers[0](a)) + b)

    a, b, y = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def rank():
        torch.manual_seed(0)
        stages = split_stages(Pair(), 2, layers="layers", sample_input=(a[:3], b[:3]))
        schedule = make_schedule("1f1b", stages, 2, nn.MSELoss())
        output, _ = schedule.step((a, b), y)
        with pytest.raises(ShapeError) as caught:
            schedule.step((a[:4], b[:4]), y[:4])
        return output, str(caught.value)

    torch.manual_seed(0)
    expected = Pair()(a, b)
    results = on_ranks(rank)
    torch.testing.assert_close(results[1][0], expected)
    assert results[0][1] == results[1][1]
    assert results[0][1].startswith("the stages were traced with a sample of (3, 4) and (3, 4), and microbatches are")


def test_the_first_step_leaves_statistics_alone():
    """Torch runs every stage on unset memory first."""

    def rank():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4, 2))
        stages = split_stages(model, 2, ["2"])
        schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        schedule.step(x, torch.zeros(8, 2))
        plain = nn.Sequential(*copy.deepcopy(model))
        plain[2].reset_running_stats()
        for part in x.chunk(2):
            plain(part)
        same = torch.equal(plain[2].running_mean, model[2].running_mean)
        return int(model[2].num_batches_tracked), same

    assert on_ranks(rank)[1] == (2, True)


def test_stages_that_end_in_a_view():
    """Backwards that are parted in two cut off their graphs in place, which views do not bear."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2), nn.Flatten(), nn.Linear(4, 4), nn.ReLU())

    def rank():
        stages = split_stages(build(), 4, ["2", "3", "4"])
        make_schedule("zero_bubble", stages, 4, nn.MSELoss()).step(x, torch.ones(8, 4))
        return {key: p.grad for stage in stages for key, p in stage.submod.named_parameters()}

    model = build()
    nn.functional.mse_loss(model(x), torch.ones(8, 4)).backward()
    first, second = on_ranks(rank)
    for key, gradient in {**first, **second}.items():
        torch.testing.assert_close(gradient, model.get_parameter(key).grad)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": "replicate", "schedule": "zero_bubble"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_axes_at_once(config):
    x, y = data(16)

    def rank():
        model = build(100)
        own_samples = 16 // (2 // config.get("tensor_parallel_size", 1))
        sample = x[: own_samples // (4 if config.get("schedule") == "zero_bubble" else 2)]
        trainer = HybridParallelTrainer(
            model,
            {"pipeline_parallel_size": 2, "pipeline_layers": "decoder.layers", "sample_input": sample, **config},
        )
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
        place, places = trainer.mesh["dp"].get_local_rank(), trainer.mesh["dp"].size()
        own = slice(16 // places * place, 16 // places * (place + 1))
        return [trainer.train_step((x[own], y[own]), optimizer, nn.MSELoss()) for _ in range(5)]

    losses, _ = single(16, 5)
    for found in on_ranks(rank, 4):
        assert found == pytest.approx(losses, rel=1e-6)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.layers[1](self.layers[0](x))


class Tied(nn.Module):
    def __init__(self, alias):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 50, bias=False) if alias else None
        if alias:
            self.head.weight = self.embed.weight

    def forward(self, x):
        for layer in (h := self.embed(x)) is not None and self.layers:
            h = layer(h)
        return h @ self.embed.weight.T if self.head is None else self.head(h)


@pytest.mark.parametrize("part", [slice(7), slice(7, None)], ids=["first", "second"])
def test_what_is_refused(part):
    x, _ = data()

    def rank():
        shared = nn.Linear(4, 4)
        messages = []
        calls = [
            lambda: split_stages(build(0), 2),
            lambda: split_stages(build(0), 2, layers="decoder.layers"),
            lambda: split_stages(build(0), 2, layers="decoder.norm", sample_input=x),
            lambda: split_stages(build(0), 2, ["decoder.layers.9"], sample_input=x),
            lambda: split_stages(build(0), 4, ["decoder.norm", "decoder.head", "decoder.embed"], sample_input=x),
            lambda: split_stages(build(0), 2, ["decoder"], layers="decoder.layers", sample_input=x),
            lambda: split_stages(build(0), 2, [1], sample_input=x),
            lambda: split_stages(build(0), 6, layers="decoder.layers", sample_input=x),
            lambda: split_stages(
                build(0), 2, layers="decoder.layers", sample_input=torch.ones(2, 20, dtype=torch.int64)
            ),
            lambda: split_stages(Deciding(), 2, layers="layers", sample_input=torch.ones(2, 4)),
            lambda: split_stages(Tied(alias=True), 2, layers="layers", sample_input=x),
            lambda: split_stages(Tied(alias=False), 2, layers="layers", sample_input=x),
            lambda: split_stages(nn.Sequential(shared, nn.ReLU(), shared), 2, ["2"]),
            lambda: split_stages(nn.LSTM(4, 4), 2, ["x"], sample_input=x, mesh=make_mesh(pp=2)["pp"]),
        ]
        for call in calls[part]:
            with pytest.raises((ValueError, TypeError, DistributedError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    first, second = on_ranks(rank)
    assert first == second
    starts = [
        "split_stages splits an nn.Sequential by itself, but not a Model: pass layers=, the name of its "
        "ModuleList ('decoder.layers' here), or points=",
        "a Model is split by tracing it: pass sample_input=, the inputs of one microbatch",
        "layers='decoder.norm' must be the name of a ModuleList or nn.Sequential of the model: it has 'decoder.layers'",
        "points=['decoder.layers.9'] must be 1 different names of modules that begin stages: the model has no",
        "the forward calls 'decoder.embed' before 'decoder.norm': name stages in the order",
        "split_stages takes points or layers, not both",
        "points=[1] must be a list of names of modules at which stages begin, such as ['2']",
        "4 layers cannot make 6 stages",
        "Model cannot be run on fake tensors (ValueError: too long): pass the inputs of one microbatch",
        "Deciding cannot be run on fake tensors (DataDependentOutputException",
        "parameter 'embed.weight', which is also 'head.weight', is used by the stages 0 and 1, and torch's pipelines",
        "parameter 'embed.weight' is used by the stages 0 and 1, and torch's pipelines do not sum gradients",
        "parameter '0.weight', which is also '2.weight', is used by the stages 0 and 1",
        "points=['x'] must be 1 different names of modules that begin stages: the model has no 'x'",
    ]
    for message, start in zip(first, starts[part], strict=True):
        assert message.startswith(start)


def test_stages_and_refusals_without_other_ranks():
    """On torch's fake process group nothing is sent, and the arguments of the one rank are checked all the same."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    with fake_group(4, rank=2):
        (stage,) = split_stages(model, 4)
        with pytest.raises(ShapeError, match=r"n=3 stages must be a multiple of the ranks \(4\): use n=4"):
            split_stages(model, 3)
    assert list(stage.submod._modules) == ["4", "5"]
