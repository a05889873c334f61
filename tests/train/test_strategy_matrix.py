"""Every strategy, precision and compression hook, on one to four processes: it builds what it says, or says why not."""

import itertools

import pytest
import torch
from covering import half_of
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from panther.distributed import ClusterSpec, CommunicationCounter
from panther.distributed.parallelize.rules import possible_strategies
from panther.errors import ConfigError, ShapeError
from panther.nn import SKLinear
from panther.train import TrainConfig, Trainer
from panther.train.strategy.building import layout_of

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]

STRATEGIES = {
    "auto": {},
    "ddp": {},
    "zero1": {},
    "replicate": {},
    "fsdp": {},
    "tp": {},
    "pp": {},
    "hybrid": {"tensor_parallel_size": 2},
    "fsdp, tp": {"tensor_parallel_size": 2},
    "fsdp, pp": {"pipeline_parallel_size": 2},
    "fsdp, replicas": {"data_parallel_replicate_size": 2},
}
PRECISIONS = (None, "bf16", "fp16")
HOOKS = {
    None: [],
    "fp16": ["fp16_compress_hook"],
    "bf16": ["_bf16_hook"],
    "powersgd": ["PowerSGD.send"],
    "sketch": ["Sketch.send"],
}


def trained(settings):
    torch.manual_seed(0)
    layers = [SKLinear(24, 36, 2), nn.ReLU(), SKLinear(36, 20, 2), nn.ReLU(), nn.Linear(20, 8), nn.Linear(8, 4)]
    model = nn.Sequential(*layers)
    config = TrainConfig(max_steps=1, batch_size=12, **settings)  # of two, three and four microbatches
    trainer = Trainer(model, torch.optim.AdamW, nn.CrossEntropyLoss(), config)
    trainer.fit(TensorDataset(torch.randn(64, 24), torch.randint(4, (64,))))
    return trainer


def built(settings):
    """Say what a model was built into, from its own objects; or why it was not."""
    try:
        engine = trained(settings)._engine
    except ConfigError as error:
        return str(error)
    found = {"scaled": bool(engine.scaler.is_enabled()) if hasattr(engine, "scaler") else False}
    found["autocast"] = engine.autocast_dtype
    model = engine.modules()[0]
    if isinstance(model, DistributedDataParallel):
        return found | {"kind": "ddp", "hooks": [hook.__qualname__ for hook, _ in model._comm_hooks]}
    if isinstance(model, FSDPModule):
        axes = {name for parameter in model.parameters() for name in parameter.device_mesh.mesh_dim_names}
        found |= {"gathered in": model._get_fsdp_state()._mp_policy.param_dtype, "axes": sorted(axes)}
        return found | {"kind": "fsdp", "stages": len(engine.modules()) if "pipeline" in settings else None}
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return found | {"kind": "plain"}


REFUSED = [
    ({"find_unused_parameters": True, "strategy": "fsdp"}, "find_unused_parameters=True is for strategy='ddp' or"),
    ({"comm_hook": "projected", "strategy": "ddp"}, "'projected' was removed, because 'sketch' reaches a lower loss"),
    ({"bucket_cap_mb": 5, "strategy": "tp"}, "bucket_cap_mb=5.0 is for strategy='ddp' or 'zero1', not 'tp'"),
    ({"tensor_parallel_size": 2, "strategy": "ddp"}, "tensor_parallel_size=2 is for strategy='fsdp', 'replicate', "),
    ({"pipeline_parallel_size": 2, "strategy": "zero1"}, "pipeline_parallel_size=2 is for .* not 'zero1'"),
    ({"data_parallel_replicate_size": 2, "strategy": "ddp"}, "data_parallel_replicate_size=2 is for strategy='fsdp'"),
    ({"cpu_offload": True, "strategy": "replicate"}, "cpu_offload=True is for strategy='fsdp' or 'hybrid', not"),
    ({"reshard_after_forward": False, "strategy": "ddp"}, "reshard_after_forward=False is for strategy='fsdp'"),
    ({"cpu_offload": True, "strategy": "tp"}, "cpu_offload=True is for strategy='fsdp' or 'hybrid', not 'tp'"),
    (
        {"reshard_after_forward": False, "strategy": "hybrid", "pipeline_parallel_size": 2},
        "reshard_after_forward=False and pipeline_parallel_size=2 do not go together, because stages stay gathered",
    ),
    ({"compile": True, "strategy": "fsdp", "pipeline_parallel_size": 2}, "compile=True and pipeline_parallel_size=2"),
    ({"compile": True, "strategy": "tp"}, "compile=True is for strategy='ddp', 'zero1', 'replicate' or 'fsdp', not"),
    ({"num_microbatches": 4, "strategy": "ddp"}, "num_microbatches=4 is for pipelines: set strategy='pp' or"),
    ({"pipeline_schedule": "gpipe"}, "pipeline_schedule='gpipe' is for pipelines"),
    (
        {"comm_hook": "sketch", "strategy": "fsdp", "data_parallel_replicate_size": 2, "tensor_parallel_size": 2},
        "comm_hook=sketch and tensor_parallel_size=2 do not go together, because it reduces the gradients of complete",
    ),
    (
        {"comm_hook": "sketch", "strategy": "fsdp"},
        "not 'fsdp', and for the replicas of 'fsdp'",
    ),
    ({"comm_hook": "bf16", "tensor_parallel_size": 2}, "comm_hook='bf16' is for strategy='ddp' or 'zero1', and tens"),
    (
        {"strategy": "pp", "pipeline_schedule": "zero_bubble", "activation_checkpointing": "selective"},
        "activation_checkpointing='selective' and pipeline_schedule='zero_bubble' do not go together: torch saves",
    ),
    ({"mixed_precision": "fp16", "cpu_offload": True}, "and mixed_precision='fp16'.*: leave one of them out"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_a_setting_that_does_not_apply_is_an_error_when_it_is_made(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({}, ("ddp", "zero1", "replicate", "fsdp", "tp", "pp", "hybrid")),
        ({"comm_hook": "sketch", "sketch_fraction": 0.1}, ("ddp", "zero1")),
        ({"comm_hook": "sketch", "data_parallel_replicate_size": 2}, ("fsdp",)),
        ({"cpu_offload": True}, ("fsdp", "hybrid")),
        ({"tensor_parallel_size": 2}, ("replicate", "fsdp", "tp", "pp", "hybrid")),
        ({"data_parallel_replicate_size": 2, "tensor_parallel_size": 2}, ("fsdp", "hybrid")),
    ],
)
def test_what_the_other_settings_allow(settings, possible):
    assert possible_strategies(TrainConfig(**settings)) == possible


def test_sizes_that_do_not_suit_the_processes_are_refused_on_every_rank():
    def run():
        messages = []
        for settings in (
            {"strategy": "fsdp", "data_parallel_replicate_size": 3},
            {"strategy": "fsdp", "tensor_parallel_size": 3},
            {"strategy": "ddp", "data_parallel_size": 1},
        ):
            with pytest.raises(ConfigError) as caught:
                trained(settings)
            messages.append(str(caught.value))
        with pytest.raises(ShapeError, match="every one of 2 stages must have something to train, and 1 of"):
            Trainer(
                nn.Sequential(nn.Linear(24, 4), nn.ReLU()), None, nn.CrossEntropyLoss(), TrainConfig(strategy="pp")
            ).fit([(torch.ones(4, 24), torch.zeros(4, dtype=torch.long))])
        return messages

    first, second = on_ranks(run, 2)
    assert first == second
    assert first[0] == (
        "data_parallel_replicate_size=3 must divide the number of data-parallel ranks (2): start a multiple of 3, or "
        "change or leave out the size"
    )
    assert first[1].startswith("tensor_parallel_size=3 must divide the number of processes (2): start a multiple of 3")
    assert first[2].startswith("data_parallel_size=1 must be the number of processes (2): start 1, or change or leave")


@pytest.mark.parametrize(
    ("settings", "world", "found"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({"strategy": "tp"}, 1, (1, 1, 1, 1)),
        ({"strategy": "hybrid", "tensor_parallel_size": 1, "data_parallel_size": 1}, 1, (1, 1, 1, 1)),
        ({"strategy": "ddp"}, 6, (6, 1, 1, 1)),
        ({"strategy": "tp"}, 4, (1, 1, 4, 1)),
        ({"strategy": "tp", "data_parallel_size": 2}, 4, (2, 1, 2, 1)),
        ({"strategy": "pp", "tensor_parallel_size": 2}, 8, (1, 4, 2, 1)),
        ({"strategy": "tp", "tensor_parallel_size": 2}, 4, (2, 1, 2, 1)),
        ({"strategy": "fsdp", "tensor_parallel_size": 2, "data_parallel_replicate_size": 2}, 8, (4, 1, 2, 2)),
        ({"strategy": "hybrid", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8, (2, 2, 2, 1)),
        ({"tensor_parallel_size": 2}, 4, (2, 1, 2, 1)),
        ({"tensor_parallel_size": 4}, 1, "tensor_parallel_size=4 must divide the number of processes (1): start a mul"),
        ({"data_parallel_size": 4}, 1, "data_parallel_size=4 must divide the number of processes (1): start a mul"),
        (
            {"strategy": "ddp", "data_parallel_size": 4},
            1,
            "data_parallel_size=4 must be the number of processes (1): s",
        ),
        (
            {"strategy": "tp", "data_parallel_size": 2},
            1,
            "data_parallel_size=2 must divide the number of processes (1)",
        ),
        ({"strategy": "tp", "tensor_parallel_size": 2, "data_parallel_size": 2}, 2, "= 4 must be the number of proces"),
        ({"strategy": "pp", "pipeline_parallel_size": 2}, 1, "pipeline_parallel_size=2 must divide the number of proc"),
        (
            {"strategy": "fsdp", "data_parallel_replicate_size": 3},
            1,
            "data_parallel_replicate_size=3 must divide the nu",
        ),
        (
            {"strategy": "hybrid", "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            4,
            "pipeline_parallel_size=3 * tensor_parallel_size=2 = 6 must divide the number of processes (4): start a "
            "multiple of 6, or change or leave out sizes",
        ),
    ],
    ids=str,
)
def test_one_rule_for_sizes_on_one_process_and_on_many(settings, world, found):
    if isinstance(found, tuple):
        layout = layout_of(TrainConfig(**settings), world)
        assert (layout.dp * layout.replicate, layout.pp, layout.tp, layout.replicate) == found
        return
    with pytest.raises(ConfigError) as caught:
        layout_of(TrainConfig(**settings), world)
    assert found in str(caught.value)
    if world == 1:
        with pytest.raises(ConfigError) as again:
            trained(settings)
        assert str(again.value) == str(caught.value)


def test_auto_plans_with_measured_speeds(capfd, tmp_path):
    """The file says that gathering is free and reducing all but impossible, and then that memory is tiny."""
    speeds = {"operation_seconds": 0.0, "measured_gpus": 2, "memory_bytes": 1.0}
    fast, slow = (0.0, 1e15), (10.0, 1.0)
    for name, reduced, gathered in (("fsdp", slow, fast), ("ddp", fast, slow)):
        links = [("all_reduce", reduced), ("all_gather", gathered), ("reduce_scatter", gathered)]
        collectives = tuple((f"intra {operation}", *speed) for operation, speed in links)
        ClusterSpec.preset("cpu", 4, collectives=collectives, **speeds).save(tmp_path / f"{name}.json")
    settings = [{"cluster_file": str(tmp_path / f"{name}.json")} for name in ("fsdp", "ddp", "absent")]

    def run():
        return [built(each) for each in settings]

    sharded, replicated, refused = on_ranks(run, 2, fresh=True)[0]
    assert (sharded["kind"], replicated["kind"]) == ("fsdp", "ddp")
    assert "absent.json" in refused
    assert "cannot be read (No such file or directory): write it with `panther advise --measure" in refused
    lines = capfd.readouterr().err
    assert "strategy='auto' uses 'fsdp' (dp=2 fsdp): by measured speeds it is" in lines
    assert "strategy='auto' uses 'ddp' (dp=2 ddp): " in lines
    with pytest.raises(ConfigError, match=r"cluster_file=speeds\.json needs strategy='auto', not 'ddp'"):
        TrainConfig(strategy="ddp", cluster_file="speeds.json")


@pytest.mark.parametrize("settings", [{"strategy": "fsdp"}, {"strategy": "hybrid", "tensor_parallel_size": 1}])
def test_what_is_in_no_block_is_gathered_once_a_step(settings):
    """A block is gathered twice, forward and backward; with ZeRO-2 once."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 4)
            self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    def gathers(**more):
        config = TrainConfig(max_steps=1, batch_size=8, **settings, **more)
        trainer = Trainer(Net(), loss_fn=nn.CrossEntropyLoss(), config=config)
        with CommunicationCounter() as counter:
            trainer.fit(TensorDataset(torch.randn(64, 24), torch.randint(4, (64,))))
        return sum(count for name, count in counter.calls_by_operation.items() if "allgather_base" in name)

    assert on_ranks(lambda: (gathers(), gathers(reshard_after_forward=False)), 2)[0] == (1 + 2 * 3, 1 + 3)


@pytest.mark.parametrize("settings", [{"strategy": "fsdp"}, {"strategy": "hybrid", "tensor_parallel_size": 1}])
def test_half_precision_gathers_half_the_bytes(settings):
    """Parameters travel in the precision that they are used in, as with data_parallel(mixed_precision="bf16")."""

    def gathered(precision):
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4))
        config = TrainConfig(max_steps=1, batch_size=8, mixed_precision=precision, **settings)
        trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=config)
        with CommunicationCounter() as counter:
            trainer.fit(TensorDataset(torch.randn(64, 64), torch.randint(4, (64,))))
        return sum(count for name, count in counter.bytes_by_operation.items() if "allgather_base" in name)

    whole, half = on_ranks(lambda: [gathered(precision) for precision in (None, "bf16")], 2)[0]
    assert 0 < half == whole / 2


def wanted(name, strategy, precision, hook, world):
    """What must come of a combination; None where it must be refused."""
    dtype = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    replicated = strategy in ("ddp", "zero1") or (strategy == "auto")
    between_replicas = "data_parallel_replicate_size" in STRATEGIES[name] and hook
    if precision == "fp16" and hook == "powersgd":
        return None
    if (precision == "fp16" or (hook and not between_replicas)) and not replicated:
        return None
    one = {"scaled": precision == "fp16", "autocast": dtype}
    sizes = STRATEGIES[name]
    if any(world % size for size in sizes.values()):
        return None
    if world == 1:
        return one | {"kind": "plain"}
    if replicated:  # the advisor's choice for this model too, also in half precision, which DDP computes in by autocast
        return one | {"kind": "ddp", "hooks": HOOKS[hook]}
    fsdp = one | {"kind": "fsdp", "gathered in": dtype, "stages": None}
    dp = world // sizes.get("tensor_parallel_size", 1) // sizes.get("pipeline_parallel_size", 1)
    axes = {"tp"} if strategy == "tp" or (sizes.get("tensor_parallel_size") and dp >= 1) else set()
    axes |= {"replicate", "shard"} if strategy == "replicate" else {"dp"}
    axes |= {"replicate"} if "data_parallel_replicate_size" in sizes and not hook else set()
    return fsdp | {"axes": sorted(axes)}


PARTS = {"auto": ["auto"], "replicated": ["ddp", "zero1"], "sharded": list(STRATEGIES)[3:]}


@pytest.mark.parametrize(
    ("world", "part"),
    [
        (1, None),
        *((2, part) for part in PARTS),
        *(pytest.param(world, None, marks=pytest.mark.slow) for world in (2, 3, 4)),
    ],
)
def test_it_builds_what_it_says_or_says_why_not(world, part):
    """A part has a half or a quarter of the cases of its strategies; without a part, all cases of all are tested."""
    precisions = (None, "fp16") if world == 3 else PRECISIONS  # to save time
    cases = list(itertools.product(STRATEGIES, precisions, HOOKS))
    if part is not None:
        cases = [case.values for case in half_of(PARTS[part], precisions, [*HOOKS]) if not case.marks]
        if part == "auto":  # each case measures the model anew
            cases = cases[::2]

    def run():
        found = {}
        for name, precision, hook in cases:
            settings = {"strategy": name.partition(",")[0], "mixed_precision": precision, "comm_hook": hook}
            found[name, precision, hook] = built(settings | STRATEGIES[name])
        return found

    found = on_ranks(run, world)[0]
    for case in cases:
        expected = wanted(case[0], case[0].partition(",")[0], *case[1:], world)
        if expected is None:
            assert isinstance(found[case], str), (case, found[case])
            does_not_divide = any(world % size for size in STRATEGIES[case[0]].values())
            reasons = [" is for strategy='ddp' or 'zero1', not "] + [" must divide the number of "] * does_not_divide
            if case[1:] == ("fp16", "powersgd"):
                reasons.append("does not follow the loss scale of mixed_precision='fp16'")
            if "data_parallel_replicate_size" in STRATEGIES[case[0]] and case[2]:
                reasons.append("and mixed_precision='fp16'")
            assert any(reason in found[case] for reason in reasons), (case, found[case])
        else:
            assert found[case] == expected, case
