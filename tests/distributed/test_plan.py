"""What a plan predicts against what ranks hold and send, in real processes and in a thousand pretended ones."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import half_of
from measuring import storages, train
from ranks import on_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost import Layout, estimate
from panther.distributed.advisor.measured import plain_transformer
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.advisor.plan import ParallelismPlan, plan_parallelism
from panther.distributed.advisor.reasons import Option
from panther.errors import ConfigError, DistributedError, ShapeError
from panther.nn import LowRankLinear, SKLinear

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
BATCH = 16
EXACT = ("parameters", "gradients", "optimizer", "sketches")


def perceptron(width=64, inner=256, rank=4):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width)]
    for _ in range(3):
        layers += [SKLinear(width, inner, rank), nn.ReLU(), SKLinear(inner, width, rank), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


def transformer():
    torch.manual_seed(0)
    return plain_transformer(32, 2, 4, 128, 96, 4)


class Branches(nn.Module):
    """No Sequential, with parameters outside of blocks, a low-rank layer and BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 48), nn.BatchNorm1d(48)
        self.blocks = nn.ModuleList([SKLinear(48, 48, 2), LowRankLinear(48, 48, 4)])
        self.last = nn.Linear(48, 64)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


class Pair(nn.Module):
    """A block that tensor parallelism shards, with a norm and a residual sum."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Sequential(SKLinear(64, 256, 4), nn.GELU(), SKLinear(256, 64, 4))

    def forward(self, x):
        return x + self.inner(self.norm(x))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *(Pair() for _ in range(2)), nn.Linear(64, 64))


def tokens_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def zeros_loss(logits):
    return tokens_loss(logits, torch.zeros(logits.shape[:2], dtype=torch.int64))


MODELS = {
    "perceptron": (perceptron, nn.MSELoss(), lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "transformer": (transformer, tokens_loss, zeros_loss),
    "blocks": (blocks, nn.MSELoss(), lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "branches": (Branches, nn.MSELoss(), lambda y: F.mse_loss(y, torch.zeros_like(y))),
}


def batch_of(kind, samples):
    if kind == "transformer":
        return (torch.zeros(samples, 8, dtype=torch.int64),) * 2
    return torch.randn(samples, 64), torch.zeros(samples, 64)


@cache
def stats_of(kind, **options):
    make, _, loss = MODELS[kind]
    x, _ = batch_of(kind, 2)
    return ModelStats.of(make(), x, loss_fn=loss, **options)


@cache
def plan_of(kind, world, **options):
    cluster = ClusterSpec.preset("cpu", world, gpus_per_node=min(world, 2))
    schedules = ("gpipe", "1f1b", "interleaved")
    return plan_parallelism(stats_of(kind, **options), cluster, batch=BATCH, schedules=schedules)


def estimate_of(kind, layout, **options):
    """Return the estimate of one layout, for which fewer variants of the model are measured than for a plan."""
    cluster = ClusterSpec.preset("cpu", layout.world, gpus_per_node=min(layout.world, 2))
    return estimate(stats_of(kind, **options), cluster, layout, BATCH)


def plan_of_one(predicted, **options):
    cluster = ClusterSpec.preset("cpu", predicted.layout.world)
    return ParallelismPlan((Option(predicted, True, ""),), cluster, BATCH, "time", (), **options)


def pipeline(schedule, num_microbatches, **axes):
    return Layout(pp=2, strategy="fsdp", schedule=schedule, num_microbatches=num_microbatches, **axes)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


DDP, FSDP, REPLICATE = (Layout(dp=2, strategy=strategy) for strategy in ("ddp", "fsdp", "replicate"))


def compare(kind, layout, **options):
    predicted = estimate_of(kind, layout, **options)
    make, loss_fn, _ = MODELS[kind]

    def rank():
        applied = plan_of_one(predicted, **options).apply(make())
        x, target = batch_of(kind, BATCH // (layout.dp * layout.replicate))
        by_autocast = torch.bfloat16 if layout.strategy == "ddp" and options.get("mixed_precision") else None
        return train(applied, x, target, loss_fn, autocast_dtype=by_autocast)

    results = on_ranks(rank, layout.world)
    sent = []
    for number, measured in enumerate(results):
        parts = predicted.stages[number // layout.tp % layout.pp].parts()
        for name in EXACT:
            assert measured[name] == pytest.approx(parts[name], rel=0.02), name
        if layout.schedule == "interleaved":  # an upper bound
            assert measured["activations"] <= parts["activations"] <= 2 * measured["activations"]
        else:
            assert measured["activations"] == pytest.approx(parts["activations"], rel=0.1)
        assert measured["loss"] == measured["loss"]
        sent.append(sum(measured["sent"].values()) - (16 if layout.pp > 1 else 0))  # the trainer's mean loss
    payload = sum(traffic.payload for traffic in predicted.traffic)
    assert max(sent) == pytest.approx(payload, rel=0.1, abs=64)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("perceptron", Layout()),
        ("perceptron", Layout(tp=2)),
        ("perceptron", pipeline("interleaved", 4)),
        slow("perceptron", Layout(replicate=2, dp=2, strategy="fsdp")),
        slow("perceptron", Layout(dp=2, tp=2, strategy="fsdp")),
        slow("perceptron", Layout(dp=2, tp=2, strategy="replicate")),
        ("perceptron", pipeline("1f1b", 2, dp=2)),
        ("transformer", FSDP),
        slow("transformer", pipeline("gpipe", 4)),
        slow("transformer", pipeline("1f1b", 4, tp=2)),
        ("branches", DDP),
        ("branches", FSDP),
    ],
    ids=str,
)
def test_real_processes_hold_and_send_what_is_predicted(kind, layout):
    compare(kind, layout)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "recomputed"),
    [
        *half_of(
            [
                ("perceptron", Layout()),
                ("transformer", Layout()),
                ("branches", DDP),
                ("blocks", Layout(tp=2)),
                ("transformer", FSDP),
            ],
            ("full", "selective"),
        ),
        *(
            slow(case, recomputed)
            for recomputed in ("full", "selective")
            for case in [
                ("blocks", pipeline("1f1b", 4)),
                ("transformer", pipeline("gpipe", 4)),
                ("transformer", pipeline("interleaved", 2)),
                ("blocks", Layout(dp=2, tp=2, strategy="fsdp")),
                ("transformer", pipeline("1f1b", 4, tp=2)),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_recomputed_activations_are_predicted(case, recomputed):
    compare(*case, activation_checkpointing=recomputed)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        slow("perceptron", DDP),
        slow("transformer", DDP),
        ("branches", DDP),
        ("transformer", FSDP),
        ("perceptron", pipeline("1f1b", 4)),
        ("transformer", REPLICATE),
        slow("perceptron", pipeline("interleaved", 2)),
        slow("transformer", pipeline("gpipe", 4)),
        slow("perceptron", pipeline("1f1b", 2, dp=2)),
    ],
    ids=str,
)
def test_half_precision_under_every_strategy_is_predicted(kind, layout):
    compare(kind, layout, mixed_precision="bf16")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        pipeline("1f1b", 4, dp=2, tp=2),
        Layout(dp=8, strategy="fsdp"),
        Layout(replicate=4, dp=2, strategy="fsdp"),
        Layout(dp=8, strategy="ddp"),
    ],
    ids=str,
)
def test_eight_real_processes(layout):
    compare("perceptron", layout)


def test_a_sketched_pair_sends_2r_numbers_a_row_and_a_dense_one_its_width():
    def sent(*pair):
        model = nn.Sequential(nn.LayerNorm(64), pair[0], nn.ReLU(), pair[1])
        layers = ModelStats.of(model, torch.ones(2, 64)).shard(2).layers
        return sum(layer.tp_bytes.at(10) for layer in layers)

    assert sent(SKLinear(64, 128, 3), SKLinear(128, 64, 3)) == 2 * (10 * 2 * 3 * 4)  # forward and backward
    assert sent(nn.Linear(64, 128), nn.Linear(128, 64)) == 2 * (10 * 64 * 4)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputing_takes_less_memory_and_more_time(kind):
    one, other = (estimate_of("blocks", DDP, activation_checkpointing=name) for name in ("none", kind))
    assert other.memory.activations < 0.6 * one.memory.activations
    assert other.memory.parameters == one.memory.parameters
    assert 1 < other.seconds["compute"] / one.seconds["compute"] < 1.5
    # What ranks send: with "full", the sum of each pair's inner numbers once more.
    sums, sent = (
        estimate_of("blocks", Layout(tp=2), activation_checkpointing=name).traffic[0].payload for name in ("none", kind)
    )
    assert sent == sums * (1.5 if kind == "full" else 1)


def test_recomputed_blocks_and_schedules_that_split_the_backward_pass():
    x, _ = batch_of("blocks", 2)
    stats = ModelStats.of(blocks(), x, mixed_precision="bf16", activation_checkpointing="selective")
    cluster = ClusterSpec.preset("cpu", 2, gpus_per_node=1)
    plan = plan_parallelism(stats, cluster, batch=16, schedules=("1f1b", "interleaved", "zero_bubble"))
    assert (plan.mixed_precision, plan.activation_checkpointing) == ("bf16", "selective")
    assert {option.layout.schedule for option in plan.options} == {None, "1f1b", "interleaved"}
    assert "zero_bubble were not considered: their memory is not predicted" in plan.notes
    with pytest.raises(ConfigError, match="activation_checkpointing='full' needs blocks"):
        ModelStats.of(nn.Linear(4, 4), torch.ones(2, 4), activation_checkpointing="full")
    with pytest.raises(
        ValueError, match="activation_checkpointing='all' is unknown: use 'none', 'selective' or 'full'"
    ):
        ModelStats.of(blocks(), x, activation_checkpointing="all")


def test_refused_layouts_are_left_out_and_a_better_one_is_named():
    stats, cluster = stats_of("blocks"), ClusterSpec.preset("cpu", 4)
    everything = plan_parallelism(stats, cluster, batch=16)
    best = everything.best.layout

    def refuse(layout):
        return "it is not wanted" if layout == best else None

    plan = plan_parallelism(stats, cluster, batch=16, refuse=refuse)
    assert [option.layout for option in plan.options] == [option.layout for option in everything.options[1:]]
    assert plan.left_out == f"{best} would be the best, but it is not wanted."
    assert plan.left_out in str(plan)
    assert plan.to_dict()["left_out"] == plan.left_out
    worse = plan_parallelism(stats, cluster, batch=16, refuse=lambda layout: None if layout == best else "no")
    assert [option.layout for option in worse.options] == [best]
    assert worse.left_out is everything.left_out is None
    with pytest.raises(ShapeError, match=rf"no layout can be used; the best would be {best}, but no"):
        plan_parallelism(stats, cluster, batch=16, refuse=lambda layout: "no")


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class Sum(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def test_what_a_pipeline_cannot_split():
    """A parameter that two stages would train, and layers between which something else than a tensor goes."""

    def stages(model, x):
        plan = plan_parallelism(model, ClusterSpec.preset("cpu", 2), batch=8, sample_input=x)
        return {option.layout.schedule for option in plan.options if option.layout.pp > 1}, " ".join(plan.notes)

    tied = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    assert stages(tied, tokens)[0]
    tied[3].weight = tied[0].weight
    found, advice = stages(tied, tokens)
    assert not found
    assert (
        "pp=2 was not considered with some schedules: '0.weight' would be trained by more than one of 2 stages"
        in advice
    )
    pairs = nn.Sequential(nn.Linear(16, 16), Twice(), Sum(), nn.Linear(16, 16))
    found, advice = stages(pairs, torch.ones(2, 16))
    assert not found
    assert "pipelines were not considered: the model is not an nn.Sequential of modules that return a tensor" in advice


def test_ranking_explanations_and_memory():
    plan = plan_of("perceptron", 4)
    fitting = [option.estimate.step_seconds for option in plan.options if option.fits]
    assert fitting == sorted(fitting)
    layouts = {str(option.layout) for option in plan.options}
    assert len(layouts) == len(plan.options)
    assert layouts >= {
        "dp=4 ddp",
        "dp=4 fsdp",
        "replicate=2, dp=2 fsdp",
        "dp=2 fsdp, tp=2",
        "dp=2 replicate, tp=2",
        "dp=2 fsdp, pp=2 1f1b m=2",
        "pp=2 interleaved m=4, tp=2",
        "pp=4 gpipe m=4",
    }
    assert f"{plan.best.layout} is best: it has the shortest step of the {len(fitting)} options that fit" in str(plan)
    for option in plan.options[1:]:
        assert option.reason.startswith(str(option.layout))
    make = MODELS["perceptron"][0]
    smallest_bytes = min(option.estimate.memory.total for option in plan.options)
    room = 1.2 * smallest_bytes
    tight = ClusterSpec.preset("cpu", 4, gpus_per_node=2, memory_bytes=room, usable=1.0)
    x, _ = batch_of("perceptron", 2)
    small = plan_parallelism(make(), tight, batch=BATCH, sample_input=x, schedules=("gpipe", "1f1b"))
    fits = [option.fits for option in small.options]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    assert all(option.fits == (option.estimate.memory.total <= room) for option in small.options)
    assert "does not fit: " in small.options[-1].reason


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "share"), [("gpipe", 4, 1 / 5), ("1f1b", 2, 1 / 3), ("interleaved", 4, 1 / 9)]
)
def test_the_idle_share_of_a_pipeline(schedule, num_microbatches, share):
    """(p - 1) / (v m + p - 1), for p ranks with v stages each and m microbatches."""
    predicted = estimate_of("perceptron", pipeline(schedule, num_microbatches))
    assert predicted.bubble == pytest.approx(share)
    busy = sum(predicted.seconds[part] for part in ("compute", "tp", "pp"))
    assert predicted.seconds["bubble"] == pytest.approx(share * (busy + predicted.seconds["bubble"]))


def test_a_layout_must_fit_at_the_start():
    def square():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))

    full, module = 16 * 64 * 64 * 4, 64 * 64 * 4
    with torch.device("meta"):
        empty = square()
    cluster = ClusterSpec.preset("cpu", 8, gpus_per_node=2, memory_bytes=0.8 * full, usable=1.0)
    plans = [
        plan_parallelism(model, cluster, batch=8, sample_input=torch.ones(1, 64), schedules=("1f1b",))
        for model in (square(), empty)
    ]
    given, on_meta = ([option for option in plan.options if str(option.layout) == "dp=8 fsdp"] for plan in plans)
    assert given[0].estimate.memory == on_meta[0].estimate.memory
    assert (given[0].estimate.start, on_meta[0].estimate.start) == (full, full / 8 + module)
    assert not any(option.fits for option in plans[0].options)
    assert plans[1].best.fits
    assert given[0].reason == (
        "dp=8 fsdp does not fit: it needs 262 kB of the 210 kB that a rank may use at the start, because every rank "
        "holds all of a model with values: build it on the meta device or in a function, to start with 49.2 kB."
    )
    assert plans[0].to_dict()["options"][0]["start_bytes"]["as_given"] == full
    for option in plans[1].options:
        axes = option.layout
        shards = axes.tp * axes.pp * (axes.dp if axes.strategy == "fsdp" else 1)
        assert option.estimate.start == full / shards + module
    tiny = ClusterSpec.preset("cpu", 8, gpus_per_node=2, memory_bytes=1.5 * module, usable=1.0)
    frozen = empty.requires_grad_(False)
    frozen[0].requires_grad_()
    best = plan_parallelism(frozen, tiny, batch=8, sample_input=torch.ones(1, 64), schedules=()).best
    assert "No layout fits. " in best.reason


def test_the_model_is_left_alone_and_a_live_group_too():
    model = Branches()
    first_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ModelStats.of(model, torch.ones(4, 64)).shard(2)
    assert all(torch.equal(first_state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not dist.is_initialized()


def test_what_is_refused():
    model, cluster = perceptron(), ClusterSpec.preset("cpu", 2)
    for error, message, call in (
        (TypeError, "a module needs sample_input", lambda: plan_parallelism(model, cluster, batch=4)),
        (TypeError, "model must be an nn.Module or ModelStats, not int", lambda: plan_parallelism(3, cluster, batch=4)),
        (TypeError, "cluster must be a ClusterSpec, not a NoneType", lambda: plan_parallelism(model, None, batch=4)),
        (
            TypeError,
            "cluster must be a ClusterSpec, not a Tensor",
            lambda: plan_parallelism(model, torch.ones(2), batch=4),
        ),
        (ValueError, "objective='cost' is unknown", lambda: plan_it(model, cluster, objective="cost")),
        (ValueError, "schedule 'fast' is unknown", lambda: plan_it(model, cluster, schedules=("fast",))),
        (ShapeError, "batch=3 cannot be divided over 2 ranks", lambda: plan_it(nn.Linear(64, 2), cluster, batch=3)),
        (ShapeError, "batch=0 must be at least 1", lambda: plan_it(model, cluster, batch=0)),
        (ValueError, "optimizer_states=-1 must be a number", lambda: plan_it(model, cluster, optimizer_states=-1)),
        (ValueError, "preset 'tpu' is unknown", lambda: ClusterSpec.preset("tpu", 1)),
        (ShapeError, "gpus=0 must be at least 1", lambda: ClusterSpec.preset("cpu", 0)),
        (ValueError, "memory_bytes=0 must be positive", lambda: ClusterSpec(gpus=1, memory_bytes=0)),
        (DistributedError, "there is no process group", lambda: plan_of("perceptron", 2).apply(model)),
    ):
        with pytest.raises(error, match=message):
            call()
    with pretended(3), pytest.raises(DistributedError, match=r"for 2 ranks .* the world size is 3: plan for gpus=3"):
        plan_of("perceptron", 2).apply(model)


def plan_it(model, cluster, **changes):
    return plan_parallelism(model, cluster, sample_input=torch.ones(2, 64), **{"batch": 4, **changes})


@contextmanager
def pretended(world, rank=0):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def wide_stats():
    return ModelStats.of(
        perceptron(1024, 4096, 8), torch.ones(1, 1024), loss_fn=lambda y: F.mse_loss(y, torch.zeros_like(y))
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=64, strategy="fsdp"),
        Layout(dp=1024, strategy="fsdp"),
        Layout(replicate=128, dp=8, strategy="fsdp"),
        Layout(dp=128, tp=8, strategy="fsdp"),
        pytest.param(Layout(dp=256, tp=4, strategy="replicate"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_of_a_thousand_fake_ones(layout):
    cluster = ClusterSpec.preset("cpu", layout.world)
    batch = 2 * layout.dp * layout.replicate
    predicted = estimate(wide_stats(), cluster, layout, batch)
    with pretended(layout.world):
        applied = plan_of_one(predicted).apply(perceptron(1024, 4096, 8))
        measured = train(applied, torch.randn(2, 1024), torch.zeros(2, 1024), nn.MSELoss())
    parts = predicted.memory.parts()
    for name in EXACT:
        assert measured[name] == pytest.approx(parts[name], rel=0.02), name
    assert measured["activations"] == pytest.approx(parts["activations"], rel=0.1)
    payload = sum(traffic.payload for traffic in predicted.traffic)
    assert sum(measured["sent"].values()) == pytest.approx(payload, rel=0.1)


@pytest.mark.parametrize(
    ("dp", "tp", "strategy"), [pytest.param(1024, 1, "fsdp", marks=pytest.mark.slow), (128, 8, "fsdp")]
)
def test_a_billion_parameters_that_have_no_values(dp, tp, strategy):
    sizes = {"hidden": 8192, "layers": 1, "heads": 32, "vocab": 32000}
    layout = Layout(dp=dp, tp=tp, strategy=strategy)
    cluster = ClusterSpec.preset("h100-80gb", 1024)
    predicted = estimate(ModelStats.transformer(**sizes, sequence=16), cluster, layout, 1024)
    with FakeTensorMode():
        model = plain_transformer(8192, 1, 32, 32768, 32000, None)
    with pretended(1024):
        plan_of_one(predicted).apply(model)
        assert storages(model.parameters()) == pytest.approx(predicted.memory.parameters, rel=0.01)
