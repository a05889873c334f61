"""Several axes at once against one process."""

import gc
import re
import weakref
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, take_steps, weights_of
from torch import nn

from panther.distributed import CommunicationCounter, HybridParallelTrainer
from panther.errors import ConfigError, DistributedError, ShapeError
from panther.nn import SKLinear

# Every new shape costs 20 ms for each sharded operation, so that two shapes alternate.
WIDTHS = [40, 36, 40, 36, 40, 5]
CONFIG = {"layers": [{"in_features": n, "out_features": m, "sketch_size": 2} for n, m in pairwise(WIDTHS)]}
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


def build(seed):
    torch.manual_seed(seed)
    layers = []
    for n, m in pairwise(WIDTHS):
        layers += [SKLinear(n, m, 2), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 40, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (16,), generator=generator)


def single(steps, clip):
    model, (x, y) = build(100), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x), y), steps, clip)
    return losses, weights_of(model)


def check(world, config, clip=0.1, steps=10):
    x, y = data()

    def rank():
        trainer = HybridParallelTrainer(build(100 + dist.get_rank()), {**config, "gradient_clipping": clip})
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.5)
        place, places = trainer.dp_rank, dist.get_world_size(trainer.dp_group)
        own = slice(16 // places * place, 16 // places * (place + 1))
        criterion = nn.CrossEntropyLoss()
        losses = [trainer.train_step((x[own], y[own]), optimizer, criterion) for _ in range(steps)]
        return losses, weights_of(*([stage.submod for stage in trainer.stages] or [trainer.model]))

    losses, weights = single(steps, clip)
    results = on_ranks(rank, world)
    found = set()
    for their_losses, theirs in results:
        assert their_losses == pytest.approx(losses, rel=1e-6)
        found |= set(theirs)
        for name, weight in theirs.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7)
    assert found == set(weights)


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (1, {}),
        (2, {"data_parallel": "ddp"}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2}),
        pytest.param(4, {"tensor_parallel_size": 2, "data_parallel": "replicate"}, marks=pytest.mark.slow),
        (4, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
        (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        pytest.param(4, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"}, marks=pytest.mark.slow),
        (4, {"pipeline_parallel_size": 2, "schedule": "interleaved", "data_parallel": "replicate"}),
        pytest.param(
            4, {"tensor_parallel_size": 2, "cpu_offload": True, "reshard_after_forward": False}, marks=pytest.mark.slow
        ),
        (4, {"pipeline_parallel_size": 2, "cpu_offload": True}),
    ],
    ids=str,
)
def test_ten_clipped_steps_are_those_of_one_process(world, config):
    check(world, config)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "replicate"])
def test_two_by_two_by_two(strategy):
    check(8, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel": strategy})


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (4, {"data_parallel_replicate_size": 2}),
        pytest.param(8, {"data_parallel_replicate_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"data_parallel_replicate_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_replicas_that_are_sharded_in_themselves(world, config):
    check(world, config)


def test_a_pipeline_keeps_no_layer_of_other_ranks():
    def rank():
        model = build(0)
        layers = [(i, weakref.ref(layer)) for i, layer in enumerate(model)]
        trainer = HybridParallelTrainer(model, {"pipeline_parallel_size": 2})
        del model
        gc.collect()
        kept = [i for i, layer in layers if layer() is not None]
        return kept, sum(p.numel() for p in trainer.model.parameters())

    (first, few), (second, others) = on_ranks(rank)
    assert first + second == list(range(9))
    assert few + others == sum(p.numel() for p in build(0).parameters())


def test_the_guide_s_configuration():
    def rank():
        torch.manual_seed(0)
        trainer = HybridParallelTrainer(CONFIG, {"tensor_parallel_size": 2})
        assert trainer.model_config is CONFIG
        assert trainer.parallelism_config["tensor_parallel_size"] == 2
        optimizer = torch.optim.Adam(trainer.model.parameters(), 1e-2)
        x, y = data()
        losses = [trainer.train_step((x.float(), y), optimizer, nn.CrossEntropyLoss()) for _ in range(20)]
        return losses, [entry.action for entry in trainer.report.placements]

    for losses, actions in on_ranks(rank):
        assert losses[-1] < 0.8 * losses[0]
        assert actions == ["outputs sharded", "inputs sharded", "outputs sharded", "inputs sharded", "replicated"]


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, {"data_parallel": "ddp"}),
        (4, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_a_model_is_compared_and_broadcast_once(world, config):
    """Whatever strategies it is made for: one exchange of digests, one seed a layer, each other tensor once."""

    def rank():
        model = build(100 + dist.get_rank())
        plain_bytes = sum(p.nbytes for p in model.parameters())
        with CommunicationCounter() as traffic:
            HybridParallelTrainer(model, config)
        return (
            traffic.calls_by_operation,
            traffic.bytes_by_operation["broadcast_"] - plain_bytes,
            len(list(model.parameters())),
        )

    for calls, rest, parameters in on_ranks(rank, world):
        assert rest == 8 * (len(WIDTHS) - 1)
        assert calls["broadcast_"] == 1 + parameters
        assert calls.total() == parameters + 2, calls


FLAGS = [True, True, False, None, None]


@pytest.mark.parametrize(
    ("world", "flags"), [(2, FLAGS), (2, [None] * 5), (2, [False] * 5), (4, FLAGS)], ids=["2", "none", "False", "4"]
)
def test_layers_with_and_without_the_key(world, flags):
    """Three steps are those of one process on the same layers, with no activation between them."""
    layers = [
        config | ({} if flag is None else {"tensor_parallel": flag})
        for config, flag in zip(CONFIG["layers"], flags, strict=True)
    ]
    x, y = data()

    def rank():
        torch.manual_seed(100)
        trainer = HybridParallelTrainer({"layers": layers}, {"tensor_parallel_size": 2})
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.5)
        places = trainer.dp_rank, trainer.tp_rank, trainer.dp_group.size(), trainer.tp_group.size()
        own = slice(16 // places[2] * places[0], 16 // places[2] * (places[0] + 1))
        losses = [trainer.train_step((x[own].float(), y[own]), optimizer, nn.CrossEntropyLoss()) for _ in range(3)]
        return losses, places, [entry.action for entry in trainer.report.placements]

    torch.manual_seed(100)
    model = nn.Sequential(*(SKLinear(n, m, 2) for n, m in pairwise(WIDTHS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x.float()), y), 3, None)
    pairs = ["outputs sharded", "inputs sharded"] * 2 + ["replicated"]
    wanted = pairs if flags == [None] * 5 else ["outputs sharded" if flag else "replicated" for flag in flags]
    for r, (found, places, actions) in enumerate(on_ranks(rank, world)):
        assert found == pytest.approx(losses, rel=1e-4)
        assert places == (r // 2, r % 2, world // 2, 2)
        assert actions == wanted


def test_a_key_that_is_neither_true_nor_false():
    layers = [CONFIG["layers"][0] | {"tensor_parallel": "yes"}]

    def rank():
        with pytest.raises(TypeError, match=r"layers\[0\]\['tensor_parallel'\]='yes' must be True or False"):
            HybridParallelTrainer({"layers": layers}, {"tensor_parallel_size": 1})

    on_ranks(rank, 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tp_size", "did you mean 'tensor_parallel_size'?"),
        ("num_stages", "did you mean 'pipeline_parallel_size'?"),
        ("chunks", "did you mean 'num_microbatches'?"),
        ("max_norm", "did you mean 'gradient_clipping'?"),
        ("fp16", "did you mean 'mixed_precision'?"),
        ("strategy", "did you mean 'data_parallel'?"),
        ("lr", "pass it to the optimizer, which is made of trainer.model.parameters()"),
        ("weight_decay", "pass it to the optimizer"),
        ("criterion", "pass it to train_step"),
        ("scheduler", "make it of the optimizer"),
        ("num_gpus", "the launcher decides it, in panther launch --nproc-per-node and --nnodes"),
        ("rank", "leave it out, the launcher tells each process its rank"),
        ("zero_stage", "use data_parallel='fsdp'"),
        ("tp_group", "set the sizes of the axes"),
        ("layers", "it is a key of the first argument, model_config"),
        ("sketch_size", "it is a key of each layer"),
        ("wait", "use some of gradient_clipping, tensor_parallel_size, pipeline"),
        ("3", "use some of gradient_clipping, tensor_parallel_size, pipeline"),
    ],
)
def test_a_name_of_other_libraries_leads_to_the_right_one(name, hint):
    with pytest.raises(ConfigError) as caught:
        HybridParallelTrainer(CONFIG, {name: 2})
    assert str(caught.value).startswith(f"{name!r} is not a setting of parallelism_config: {hint}")


@pytest.mark.parametrize(
    ("value", "hint"), [("FSDP", "did you mean 'fsdp'?"), ("hsdp", "use data_parallel='fsdp' with data_parallel_repl")]
)
def test_a_kind_of_data_parallelism_of_other_libraries_leads_to_the_right_one(value, hint):
    with pytest.raises(ConfigError, match=re.escape(f"data_parallel={value!r} is unknown: {hint}")):
        HybridParallelTrainer(CONFIG, {"data_parallel": value})


def test_what_is_refused():
    def rank():
        messages = []
        for model, config in (
            (CONFIG, {"tensor_parallel": 2}),
            (CONFIG, {"tensor_parallel_size": 3}),
            (CONFIG, {"tensor_parallel_size": 2, "data_parallel": "ddp"}),
            (CONFIG, {"pipeline_parallel_size": 2, "data_parallel": "ddp"}),
            (CONFIG, {"data_parallel": "zero"}),
            (CONFIG, {"gradient_clipping": 0}),
            ({"sizes": []}, {}),
            (CONFIG, {"schedule": "nonsense"}),
            (CONFIG, {"gradient_clipping": "1"}),
            (nn.Bilinear(3, 3, 3), {"pipeline_parallel_size": 2}),
            (CONFIG, 2),
            (CONFIG, {"num_microbatches": 0}),
            ("layers", {}),
            (CONFIG, {"data_parallel_replicate_size": 3}),
            (CONFIG, {"data_parallel_replicate_size": 2, "data_parallel": "replicate"}),
            (CONFIG, {"mixed_precision": "bf16", "data_parallel": "ddp"}),
            (CONFIG, {"cpu_offload": True, "data_parallel": "replicate"}),
            (CONFIG, {"reshard_after_forward": False, "pipeline_parallel_size": 2}),
            (CONFIG, {"cpu_offload": "yes"}),
        ):
            with pytest.raises((ValueError, TypeError, DistributedError)) as caught:
                HybridParallelTrainer(model, config)
            messages.append(str(caught.value))
        return messages

    messages = on_ranks(rank)[0]
    assert messages[0] == (
        "'tensor_parallel' is not a setting of parallelism_config: did you mean 'tensor_parallel_size'?"
    )
    assert messages[1].startswith("tensor_parallel_size=3 must divide the number of processes (2): start a multiple of")
    assert messages[2].startswith(
        "tensor_parallel_size=2 is for data_parallel='fsdp' or 'replicate', not 'ddp', because Distr"
    )
    assert messages[3].startswith(
        "pipeline_parallel_size=2 is for data_parallel='fsdp' or 'replicate', not 'ddp', because Dis"
    )
    assert messages[4] == "data_parallel='zero' is unknown: use data_parallel='fsdp', which is ZeRO-3"
    assert messages[5] == "gradient_clipping=0.0 must be positive and finite"
    assert messages[6] == "model_config must be a module or have the key 'layers', and has sizes"
    assert messages[7].startswith("schedule='nonsense' is unknown: use one of 'gpipe', '1f1b'")
    assert messages[8] == "gradient_clipping='1' must be a number, not str"
    assert messages[9].startswith("a pipeline splits an nn.Sequential, not a Bilinear")
    assert messages[10] == "parallelism_config must be a mapping of names to values, not int"
    assert messages[11] == "num_microbatches=0 must be at least 1"
    assert messages[12] == "model_config must be a module or a mapping, not str"
    assert messages[13].startswith(
        "data_parallel_replicate_size=3 must divide the number of data-parallel ranks (2): start a multiple of 3"
    )
    assert messages[14].startswith("data_parallel_replicate_size=2 is for data_parallel='fsdp', not 'replicate'")
    assert messages[15].startswith("mixed_precision='bf16' is for data_parallel='fsdp' or 'replicate', not 'ddp'")
    assert messages[16].startswith(
        "cpu_offload=True is for data_parallel='fsdp', not 'replicate', because it keeps sha"
    )
    assert messages[17].startswith(
        "reshard_after_forward=False and pipeline_parallel_size=2 do not go together, because"
    )
    assert messages[18] == "cpu_offload='yes' must be true or false, not str"


def test_sizes_that_are_no_sizes_are_said():
    with pytest.raises(ConfigError, match="data_parallel_size='2' must be a whole number, not str"):
        HybridParallelTrainer(CONFIG, {"data_parallel_size": "2"})
    with pytest.raises(ConfigError, match="data_parallel_size=0 must be at least 1"):
        HybridParallelTrainer(CONFIG, {"data_parallel_size": 0})


def test_a_step_that_cannot_be_done_is_said():
    def rank():
        trainer = HybridParallelTrainer(CONFIG, {})
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
        x, y = data()
        messages = []
        for batch, criterion in ((x, nn.CrossEntropyLoss()), ((x, y), "ce"), ((x, y), nn.CrossEntropyLoss)):
            with pytest.raises(TypeError) as caught:
                trainer.train_step(batch, optimizer, criterion)
            messages.append(str(caught.value))
        return messages

    assert on_ranks(rank)[0] == [
        "batch must be a pair of samples and targets, not a Tensor",
        "the criterion must be a function of output and target, not str",
        "the criterion is the class CrossEntropyLoss: pass an object, CrossEntropyLoss()",
    ]


@pytest.mark.parametrize(
    ("world", "config", "places"),
    [
        (2, {}, [[8, 4, 3], [8, 5, 8]]),
        (2, {"data_parallel": "ddp"}, [[8, 7, 1], [8, 1, 7]]),
        pytest.param(
            *(4, {"tensor_parallel_size": 2, "data_parallel": "replicate"}, [[8, 7, 1], [8, 1, 7]]),
            marks=pytest.mark.slow,
        ),
        (4, {"pipeline_parallel_size": 2}, [[8, 4], [8, 4]]),
    ],
    ids=["fsdp", "ddp", "tp", "pp"],
)
def test_means_and_sums_over_batches_of_different_sizes(world, config, places):
    """The last batches of an epoch: fewer samples, and not as many at every place along dp."""
    x, y = data()
    criteria = [(nn.CrossEntropyLoss(), 0.5), (nn.CrossEntropyLoss(reduction="sum"), 0.05)]

    def batches(place):
        return [slice(8 * place, 8 * place + n) for n in places[place]]

    def rank():
        trainer = HybridParallelTrainer(build(100), config)
        own, losses = batches(trainer.mesh["dp"].get_local_rank()), []
        for criterion, rate in criteria:
            optimizer = torch.optim.SGD(trainer.model.parameters(), rate)
            for piece in own:
                losses += [trainer.train_step((x[piece], y[piece]), optimizer, criterion) for _ in range(2)]
        return losses

    model, losses = build(100), []
    for criterion, rate in criteria:
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for pieces in zip(*map(batches, range(2)), strict=True):
            whole = torch.cat([torch.arange(16)[piece] for piece in pieces])
            for _ in range(2):
                optimizer.zero_grad()
                loss = criterion(model(x[whole]), y[whole])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    for found in on_ranks(rank, world):
        assert found == pytest.approx(losses, rel=1e-7)


def test_batches_that_are_refused():
    """On every rank, before anything is changed."""
    x, y = data()

    def rank(config, *batches):
        trainer = HybridParallelTrainer(build(100), config)
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.5)
        place, found = trainer.mesh["dp"].get_local_rank(), []
        weights = [p.to_local().clone() for p in trainer.model.parameters()]
        for sizes, reductions in batches:
            n = sizes[place]
            with pytest.raises((ShapeError, ValueError, DistributedError)) as caught:
                trainer.train_step((x[:n], y[:n]), optimizer, nn.CrossEntropyLoss(reduction=reductions[place]))
            found.append(str(caught.value))
        assert all(torch.equal(old, p.to_local()) for old, p in zip(weights, trainer.model.parameters(), strict=True))
        return found

    mean = ("mean", "mean")
    batches = ((8, 0), mean), ((0, 0), mean), ((8, 8), ("mean", "sum")), ((8, 8), ("none", "none"))
    for messages in on_ranks(lambda: rank({}, *batches)):
        assert messages[0].startswith("rank 1: a batch must have samples and a target for each, and has 0 and 0: give")
        assert messages[1].startswith("a batch must have samples")
        assert "the criterion's reduction is mean on rank 0 and sum on rank 1" in messages[2]
        assert messages[3] == "the criterion has reduction='none', and must have 'mean' or 'sum'"
    stages = {"pipeline_parallel_size": 2}
    for messages in on_ranks(lambda: rank(stages, ((8, 6), mean), ((7, 7), mean)), 4):
        assert "(8, 40) on ranks 0, 1 and torch.float64 (6, 40) on ranks 2, 3" in messages[0]
        assert messages[0].endswith("pass every rank batches of one size and shape")
        assert messages[1].startswith("7 samples cannot be split into num_microbatches=2 of equal size")
