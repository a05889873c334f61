"""strategy="auto": ddp without measured speeds; what is chosen is printed and built, and trains as one process does."""

import contextlib
import io
import os
import warnings
from functools import cache
from itertools import product

import pytest
import torch
from measuring import Activations, checkpointed
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import panther as pr
from panther._torch import has_hooks
from panther.distributed import ClusterSpec, CommunicationCounter, ModelStats, get_world_size, plan_parallelism
from panther.distributed.advisor.cost import Estimate, Layout, MemoryEstimate, estimate
from panther.distributed.advisor.measured import plain_transformer
from panther.distributed.advisor.reasons import Option, preferred
from panther.distributed.comm.mesh import physical_memory
from panther.errors import ConfigError
from panther.nn import SKLinear
from panther.train import TrainConfig, Trainer
from panther.train.loading.feed import Feed
from panther.train.strategy.automatic import choose_strategy

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
WIDTH, BATCH, SAMPLES = 64, 8, 96


def dense():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).double()


def pairs():
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers += [SKLinear(WIDTH, 256, 8), nn.GELU(), SKLinear(256, WIDTH, 8)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()


class Residual(nn.Module):
    """No nn.Sequential, so without stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)) for _ in "12"
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def residual():
    return Residual().double()


MODELS = {"dense": dense, "pairs": pairs, "residual": residual}
FAST, SLOW = (0.0, 1e15), (1e-3, 1e6)
# Which collectives of a cluster are fast, within a node or between nodes; all others are slow.
CLUSTERS = {
    "data sheet": None,
    "all": "intra all_reduce, intra all_gather, intra reduce_scatter, intra broadcast",
    "sums": "intra all_reduce",
    "gathers": "intra all_gather, intra reduce_scatter",
    "messages": "intra broadcast",
    "nodes": "intra all_gather, intra reduce_scatter, inter all_reduce",
    "nodes, sums": "intra all_reduce",
    "nodes, messages": "intra all_gather, intra reduce_scatter, inter broadcast",
}


def saved_cluster(folder, name):
    """A file of speeds, and the settings that take it."""
    if CLUSTERS[name] is None:
        return {}
    fast = CLUSTERS[name].split(", ")
    operations = [f"{link} {op}" for link in ("intra", "inter") for op in
                  ("all_reduce", "all_gather", "reduce_scatter", "broadcast")]  # fmt: skip
    collectives = tuple((operation, *(FAST if operation in fast else SLOW)) for operation in operations)
    file = folder / f"{name}.json"
    ClusterSpec.preset("cpu", 2, collectives=collectives, measured_gpus=2, operation_seconds=0.0).save(file)
    return {"cluster_file": str(file)}


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y)


def train(kind, batch=BATCH, samples=SAMPLES, **settings):
    rate = 0.05 / get_world_size()  # that of a step with the samples of all processes, in every layout
    config = TrainConfig(epochs=2, learning_rate=rate, learning_rate_scaling="linear", log_every_n_steps=1, **settings)
    trainer = Trainer(MODELS[kind](), torch.optim.SGD, nn.MSELoss(), config)
    history = trainer.fit(DataLoader(data(samples), batch, shuffle=True), DataLoader(data(19), 5))
    return trainer, history["loss"][1] + history["validation_loss"][1]


def built_layout(engine):
    """The layout of a trained engine, from its modules, meshes and schedule."""
    model = engine.modules()[0]
    if isinstance(model, DistributedDataParallel):
        return Layout(dp=get_world_size(), strategy="ddp")
    mesh = next(parameter.device_mesh for parameter in model.parameters())
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    axes = {"tp": sizes.get("tp", 1), "pp": engine.stages}
    if sizes.get("shard") == 1:
        axes |= {"dp": sizes["replicate"], "strategy": "replicate"}
    else:
        axes |= {"dp": sizes["dp"], "replicate": sizes.get("replicate", 1), "strategy": "fsdp"}
    if engine.stages > 1:
        assert all(stage.submod is own for stage, own in zip(engine.parallel.stages, engine.model, strict=True))
        axes |= {"schedule": engine.schedule.stages and engine.parallel.layout.schedule}
        axes |= {"num_microbatches": engine.schedule.num_microbatches}
    elif axes["dp"] == 1:
        axes["strategy"] = None
    return Layout(**axes)


@cache
def stats_of(kind):
    x, _ = data(BATCH).tensors
    return ModelStats.of(
        MODELS[kind](), x, loss_fn=lambda output: nn.functional.mse_loss(output, torch.zeros_like(output))
    )


def planned(kind, world, local, settings):
    """The layout that a plan for the same model, cluster and batch prefers, without the Trainer."""
    sizes = {"gpus": world, "memory_bytes": physical_memory() / local, "gpus_per_node": local}
    file = settings.get("cluster_file")
    cluster = ClusterSpec.preset("cpu", **sizes) if file is None else ClusterSpec.load(file, **sizes)
    return plan_parallelism(stats_of(kind), cluster, batch=BATCH * world).preferred.option.layout


CASES = {
    2: [
        ("dense", "data sheet", 2), ("dense", "messages", 2), ("pairs", "data sheet", 2), ("pairs", "sums", 2),
        ("residual", "all", 2), ("residual", "gathers", 2),
    ],
    4: [
        *((kind, name, 4) for kind in MODELS for name in ("data sheet", "sums", "gathers", "messages")),
        *((kind, name, 2) for kind in MODELS for name in ("nodes", "nodes, sums", "nodes, messages")),
    ],
}  # fmt: skip
# All kinds of layouts that the cases must lead to.
KINDS = {2: {"ddp", "fsdp", "tp", "pp"}, 4: {"ddp", "fsdp", "replicate", "tp", "pp", "replicas"}}


def kinds_of(layout):
    found = {axis for axis in ("tp", "pp") if getattr(layout, axis) > 1}
    found |= {"replicas"} if layout.replicate > 1 else set()
    return found | ({layout.strategy} if layout.dp > 1 else set())


def share_statistics(key):
    """Let ModelStats.of measure once for each value of ``key()`` and each precision; in processes of one test."""
    stats, measure = {}, ModelStats.of

    def measured(model, sample_input, **options):
        identity = key(), *(options.get(name) for name in ("mixed_precision", "activation_checkpointing"))
        if identity not in stats:
            stats[identity] = measure(model, sample_input, **options)
        return stats[identity]

    ModelStats.of = measured


@pytest.mark.parametrize("world", [2, 4])
def test_the_cases_lead_to_every_kind_of_layout(world, tmp_path):
    settings = {name: saved_cluster(tmp_path, name) for name in CLUSTERS}
    layouts = [planned(kind, world, local, settings[name]) for kind, name, local in CASES[world]]
    assert set().union(*map(kinds_of, layouts)) == KINDS[world]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_planned_is_printed_and_built_and_trains_as_one_process(world, kind, tmp_path):
    settings = {name: saved_cluster(tmp_path, name) for name in CLUSTERS}
    cases = [(name, local) for case_kind, name, local in CASES[world] if case_kind == kind]

    def run():
        share_statistics(lambda: kind)
        found = []
        for name, local in cases:
            os.environ["LOCAL_WORLD_SIZE"] = str(local)
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                trainer, losses = train(kind, **settings[name])
            trainer.export(str(tmp_path / f"{kind} {name}"))
            found.append((str(built_layout(trainer._engine)), printed.getvalue(), losses))
        return found

    trainer, expected = train(kind, BATCH * world)
    weights = trainer.model.state_dict()
    best_layouts = [planned(kind, world, local, settings[name]) for name, local in cases]
    for rank, results in enumerate(on_ranks(run, world, fresh=True)):
        for (name, _), best, (layout, printed, losses) in zip(cases, best_layouts, results, strict=True):
            assert layout == str(best), (kind, name)
            assert (rank == 0) == (f" ({best}): " in printed), (kind, name)
            assert losses == pytest.approx(expected, rel=1e-9), (kind, name, layout)
            loaded = pr.load_compressed(tmp_path / f"{kind} {name}", MODELS[kind]()).state_dict()
            for key, weight in weights.items():
                torch.testing.assert_close(loaded[key], weight, rtol=1e-8, atol=1e-10, msg=f"{kind} {name} {key}")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(data()))


def with_norm():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *list(dense())[:5]).double()


def with_hook():
    model = dense()
    model.register_forward_hook(lambda *args: None)
    return model


class Mean(nn.Module):
    reduction = "none"

    def forward(self, output, target):
        return (output - target).square().mean()


def scaled_by_zero_dim():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return x * self.factor

    return nn.Sequential(*dense(), Scale())


# Where messages are fast pp=2 is best for `dense` on two processes, and where sums are fast tp=2 is for `pairs`.
LEFT_OUT = [
    ("pp", dense, {"comm_hook": "bf16"}, {}, "comm_hook='bf16' is for strategy='ddp' or 'zero1', not 'fsdp'", "ddp"),
    ("pp", dense, {"mixed_precision": "fp16"}, {}, "mixed_precision='fp16', which scales the loss", "ddp"),
    ("pp", dense, {"compile": True}, {}, "compile=True and pipeline_parallel_size=2 do not go together", None),
    ("pp", dense, {"cpu_offload": True, "tensor_parallel_size": 1}, {}, None, "fsdp"),
    ("pp", dense, {"find_unused_parameters": True}, {}, "find_unused_parameters=True is for strategy='ddp'", "ddp"),
    ("pp", dense, {"data_parallel_size": 2}, {}, "the settings ask for data_parallel_size=2", None),
    ("pp", dense, {"pipeline_parallel_size": 1}, {}, "the settings ask for pipeline_parallel_size=1", None),
    ("pp", dense, {"pipeline_parallel_size": 2, "num_microbatches": 8}, {}, "ask for num_microbatches=8", "fsdp"),
    ("pp", dense, {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"}, {}, None, "fsdp"),
    ("pp", dense, {}, {"data": DataLoader(data(97), BATCH)}, "pipelines leave out the last samples of an epoch", None),
    ("pp", dense, {}, {"data": DataLoader(data(97), BATCH, drop_last=True)}, None, "fsdp"),
    ("pp", dense, {}, {"data": DataLoader(Stream(), BATCH)}, "which a stream or batch_sampler does not give", "ddp"),
    ("pp", dense, {}, {"loss_fn": Mean()}, "and loss_fn has reduction='none'", None),
    ("pp", with_norm, {}, {}, "BatchNorm would take its statistics from microbatches", None),
    ("pp", with_hook, {}, {}, "stages do not run the hooks of the whole model", None),
    ("pp", scaled_by_zero_dim, {}, {}, "parameters that are sharded must have a dimension", "ddp"),
    (
        "tp",
        pairs,
        {"compile": True},
        {},
        "compile=True is for strategy='ddp', 'zero1', 'replicate' or 'fsdp', not",
        None,
    ),
    ("tp", pairs, {"data_parallel_size": 2}, {}, "the settings ask for data_parallel_size=2", None),
    ("tp", pairs, {}, {"data": DataLoader(Stream(), BATCH)}, "which a stream or batch_sampler does not give", None),
]


@pytest.mark.parametrize("part", [slice(9), slice(9, None)], ids=["first", "second"])
def test_a_better_layout_that_cannot_be_built_is_named_with_the_reason(part, tmp_path):
    world, cases = 2, LEFT_OUT[part]
    clusters = {"pp": saved_cluster(tmp_path, "messages"), "tp": saved_cluster(tmp_path, "sums")}

    def run():
        found = []
        share_statistics(lambda: make)  # the model of the case that runs
        for best, make, settings, given, _, _ in cases:
            config = TrainConfig(**settings, **clusters[best])
            loader = given.get("data", DataLoader(data(), BATCH))
            feed = lambda loader=loader: Feed(loader, batch_size=None, seed=0, rank=0, size=1)  # noqa: E731
            with contextlib.redirect_stderr(io.StringIO()) as printed, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                choice = choose_strategy(make(), config, given.get("loss_fn", nn.MSELoss()), feed)
            found.append((choice, printed.getvalue(), [str(one.message) for one in warned]))
        return found

    first, second = on_ranks(run, world, fresh=True)
    for (best, _, settings, _, why, strategy), (choice, printed, warned), (same, silent, _) in zip(
        cases, first, second, strict=True
    ):
        assert choice == same
        assert not silent
        assert not warned, settings
        chosen = choice.config
        assert strategy in (None, chosen.strategy), (settings, chosen.strategy)
        assert printed.startswith(f"strategy='auto' uses {chosen.strategy!r} ("), (settings, printed)
        for name, value in settings.items():
            assert getattr(chosen, name) == value, settings
        assert choice.batch_factor == (chosen.tensor_parallel_size or 1) * (chosen.pipeline_parallel_size or 1)
        if why is None:
            assert "would be the best" not in printed, (settings, printed)
        else:
            sentence = printed.splitlines()[1]
            assert sentence.startswith(f"{best}={world}"), (settings, sentence)
            assert " would be the best, but " in sentence
            assert why in sentence, (settings, sentence)
            assert sentence.endswith(".")


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else self.layer(-x)  # decides by values


def readme_model():
    """The network of README's train.py, for which the cluster's data sheet once chose a layout 3.7 times as slow."""
    layers = (nn.Linear(64, 512), nn.ReLU(), SKLinear(512, 512, 8), nn.ReLU(), nn.Linear(512, WIDTH))
    return nn.Sequential(*layers).double()


def test_without_measured_speeds_it_is_ddp_unless_memory_forbids_it(monkeypatch, tmp_path):
    measured = saved_cluster(tmp_path, "sums")

    def trained(model, **settings):
        trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), TrainConfig(max_steps=1, **settings))
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stderr(io.StringIO()) as printed,
        ):
            warnings.simplefilter("always", UserWarning)
            trainer.fit(DataLoader(data(), BATCH))
        ours = [str(one.message) for one in warned if "strategy='auto'" in str(one.message)]
        return type(trainer.model).__name__, ours, printed.getvalue()

    def run():
        found = [trained(Counts(), **measured), trained(Counts(), comm_hook="fp16"), trained(readme_model())]
        found += [trained(pairs()), trained(residual(), reshard_after_forward=False)]
        with pytest.raises(ConfigError, match="data_parallel_size=1 must be the number of processes"):
            trained(Counts(), data_parallel_size=1)
        alike = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        # The model has 0.5 MB; with gradients, two states and buckets 2.6 MB under ddp. Then next to no memory.
        for memory in (6e6, 2.2e6, 80e3):
            monkeypatch.setattr(os, "sysconf", lambda name, n=memory: 1 if name == "SC_PAGE_SIZE" else int(2 * n / 0.9))
            found.append(trained(residual(), **alike))
        return found

    for rank, found in enumerate(on_ranks(run, 2, fresh=True)):
        unread, settled, readme, sharded_faster, asked, large, small, tiny = found
        for name, _, _ in (unread, settled, readme, sharded_faster, large):
            assert name == "DistributedDataParallel"
        assert asked[0] == small[0] == "FSDPResidual"
        assert [len(warned) for _, warned, _ in found] == [1, 0, 0, 0, 0, 0, 0, 1]
        assert unread[1][0].startswith("strategy='auto' uses 'ddp': the advisor cannot read the model: ")
        assert tiny[1][0].startswith("strategy='auto': No layout fits. ")
        assert ", the closest, needs " in tiny[1][0]
        for _, _, printed in (readme, sharded_faster, asked, large, small):
            assert ("speeds are uncalibrated" in printed) == (rank == 0)
        if rank == 0:
            assert readme[2].startswith("strategy='auto' uses 'ddp' (dp=2 ddp): parameters, gradients and states take ")
            assert "(dp=2 fsdp): dp=2 ddp does not fit (it needs 2.7" in small[2]
            assert "cannot be built, because reshard_after_forward=False is for strategy=" in asked[2]


def test_on_one_process_the_model_is_what_the_user_passed():
    model = readme_model()
    trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), TrainConfig(max_steps=1))
    trainer.fit(DataLoader(data(), BATCH))
    assert trainer.model is model
    assert type(model) is nn.Sequential
    assert not has_hooks(model)


def options_with(seconds, unfit=()):
    """Options of a plan with these times of a step, the fastest first."""

    def option(layout):
        e = Estimate(layout, (MemoryEstimate(parameters=1.0),), (), {"compute": seconds[layout]}, 0.0, 1.0, 1.0)
        return Option(e, layout not in unfit, "")

    return sorted(map(option, seconds), key=lambda one: (not one.fits, one.estimate.step_seconds))


DDP, FSDP = Layout(dp=4, strategy="ddp"), Layout(dp=4, strategy="fsdp")
TP, PP = Layout(tp=4), Layout(pp=4, strategy="fsdp", schedule="1f1b", num_microbatches=4)


@pytest.mark.parametrize(
    ("seconds", "unfit", "measured", "expected", "reason"),
    [
        ({DDP: 3.7, FSDP: 5.0, TP: 1.0, PP: 0.9}, (), False, DDP, "uncalibrated"),
        ({DDP: 3.7, FSDP: 5.0, TP: 1.0, PP: 0.9}, (DDP,), False, FSDP, "dp=4 ddp does not fit"),
        ({DDP: 3.7, FSDP: 5.0, TP: 1.0, PP: 0.9}, (DDP, FSDP), False, PP, "dp=4 ddp does not fit"),
        ({FSDP: 5.0, TP: 1.0}, (), False, FSDP, "uncalibrated"),
        ({DDP: 1.19, TP: 1.0}, (), True, DDP, "no other layout is 1.2 times as fast"),
        ({DDP: 1.21, TP: 1.0}, (), True, TP, "it is 1.21 times as fast as dp=4 ddp"),
        ({DDP: 1.0, FSDP: 1.3, TP: 1.0}, (DDP,), True, TP, "it is 1.3 times as fast as dp=4 fsdp"),
        ({DDP: 1.0, TP: 2.0}, (DDP, TP), True, DDP, "no layout fits"),
    ],
)
def test_which_layout_a_plan_prefers(seconds, unfit, measured, expected, reason):
    cluster = ClusterSpec.preset("cpu", 4, measured_gpus=4 if measured else 0)
    option, why = preferred(options_with(seconds, unfit), cluster)
    assert option.layout == expected
    assert reason in why


RECOMPUTED = [("bf16", "selective", "ddp"), ("bf16", "selective", "fsdp")]  # The row of tp takes 8 s.


@pytest.mark.parametrize(
    ("precision", "recomputed", "strategy"),
    [
        pytest.param(*case, marks=() if case in RECOMPUTED else pytest.mark.slow)
        for case in product(("bf16", None), ("none", "selective", "full"), ("ddp", "fsdp", "tp"))
    ],
)
def test_a_plan_predicts_the_activations_of_the_trainer_s_engines(recomputed, precision, strategy):
    """The Trainer computes in half precision by autocast, also what FSDP2 gathers in it."""

    def scalar(logits):
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.int64)
        )

    def model():
        torch.manual_seed(0)
        return plain_transformer(32, 2, 4, 128, 96, 4)

    tokens = torch.zeros(32, 8, dtype=torch.int64)
    layout = {
        "ddp": Layout(dp=2, strategy="ddp"),
        "fsdp": Layout(dp=2, strategy="fsdp"),
        "tp": Layout(tp=2, strategy="replicate" if precision else None),
    }[strategy]
    options = {"mixed_precision": precision, "activation_checkpointing": recomputed}

    def run():
        config = TrainConfig(max_steps=2, strategy=strategy, **options)
        trainer = Trainer(model(), torch.optim.AdamW, lambda logits, target: scalar(logits), config)
        loader = DataLoader(TensorDataset(tokens, tokens), 16 // layout.dp)
        trainer._start(loader)
        activations = Activations(trainer._engine.modules(), (tokens,))
        with activations, checkpointed(activations), CommunicationCounter():
            trainer.fit(loader)
        return activations.peak

    stats = ModelStats.of(model(), tokens[:2], loss_fn=scalar, **options)
    predicted = estimate(stats, ClusterSpec.preset("cpu", 2), layout, 16).memory.activations
    for peak in on_ranks(run, 2):
        assert peak == pytest.approx(predicted, rel=0.01)
