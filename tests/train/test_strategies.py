"""The trainer on several processes against one: every strategy, uneven data, resuming in another layout, faults."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from breaking import Breaks, BrokenError
from covering import half_of
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import panther as pr
from panther.distributed import checkpoint
from panther.errors import ConfigError, DistributedError, TrainingError
from panther.nn import SKLinear
from panther.train import Callback, TrainConfig, Trainer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
N = 53  # no multiple of anything here


def build(seed=0):
    torch.manual_seed(seed)
    return unseeded()


def unseeded():
    # Three ranks do not divide 20. Every new shape costs 20 ms for each sharded operation.
    return nn.Sequential(
        SKLinear(24, 20, 2), nn.ReLU(), SKLinear(20, 24, 2), nn.ReLU(), SKLinear(24, 20, 2), nn.ReLU(), nn.Linear(20, 4)
    ).double()


def samples(n=N):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 24, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (n,), generator=generator))


SETTINGS = {
    "strategy": "ddp",  # With "auto", the advisor takes most of the time of a run as short as these.
    "epochs": 2,
    "learning_rate": 0.02,
    "schedule": "linear",
    "gradient_clipping": 0.3,
    "gradient_accumulation_steps": 2,
    "log_every_n_steps": 2,
}
METRICS = {"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()}


def train(global_batch, directory=None, n=N, seed=None, callbacks=(), optimizer=torch.optim.AdamW, **more):
    model = build(dist.get_rank() + 10 if seed is None and dist.is_initialized() else seed or 0)
    if seed is None and (not dist.is_initialized() or dist.get_rank() == 0):
        model = build(0)
    config = TrainConfig(**{**SETTINGS, **more}, checkpoint_dir=None if directory is None else str(directory))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, callbacks, metrics=METRICS)
    trainer.fit(DataLoader(samples(n), global_batch, shuffle=True), DataLoader(samples(19), 5))
    return trainer


def rows(trainer):
    names = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "validation_loss", "validation_accuracy")
    return [[row.get(name) or 0.0 for name in names] for row in trainer.history]


def weights(trainer, directory):
    trainer.export(str(directory))
    return rows(trainer)


STRATEGIES = {
    "ddp": (3, 3, {}),
    "zero1": (2, 2, {"strategy": "zero1"}),
    "fsdp": (3, 3, {"strategy": "fsdp"}),
    "replicate": (2, 2, {"strategy": "replicate"}),
    "tp": (2, 1, {"strategy": "tp"}),
    "pp": (2, 1, {"strategy": "pp"}),
    "hybrid": (4, 2, {"strategy": "hybrid", "tensor_parallel_size": 2}),
    "fsdp with tp": (4, 2, {"strategy": "fsdp", "tensor_parallel_size": 2}),
    "hybrid sharding": (4, 4, {"strategy": "fsdp", "data_parallel_replicate_size": 2}),
    "zero2": (2, 2, {"strategy": "fsdp", "reshard_after_forward": False}),
    "offload": (2, 2, {"strategy": "fsdp", "cpu_offload": True}),
    "offload with tp": (4, 2, {"strategy": "fsdp", "tensor_parallel_size": 2, "cpu_offload": True}),
    "offload with stages": (4, 2, {"strategy": "hybrid", "pipeline_parallel_size": 2, "cpu_offload": True}),
    "zero2 with tp": (4, 2, {"strategy": "hybrid", "tensor_parallel_size": 2, "reshard_after_forward": False}),
    "hybrid sharding with tp": (
        8,
        4,
        {"strategy": "fsdp", "tensor_parallel_size": 2, "data_parallel_replicate_size": 2},
    ),
    "hybrid with stages": (4, 2, {"strategy": "hybrid", "pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"}),
}


# Each of their parts is in another strategy, and tests/distributed/test_hybrid.py has the combinations.
SLOW = ("hybrid", "fsdp with tp", "offload with tp", "offload with stages", "zero2 with tp", "hybrid sharding with tp")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STRATEGIES]
)
def test_many_processes_end_where_one_does(tmp_path, name):
    world, shares, settings = STRATEGIES[name]
    n = 48 if "pp" in name or "stages" in name else N  # stages take whole batches only
    # Of sharded parameters, the steps of AdamW cost ten times those of SGD. Resumed runs have its states, below.
    optimizer = torch.optim.AdamW if name in ("ddp", "zero1") else torch.optim.SGD

    def run():
        return weights(train(12 // shares, n=n, optimizer=optimizer, **settings), tmp_path / "many")

    results = on_ranks(run, world)
    expected = weights(train(12, n=n, optimizer=optimizer), tmp_path / "one")
    assert all(result == results[0] for result in results)
    for found, wanted in zip(results[0], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
    one, many = (pr.load_compressed(tmp_path / which, build(3)).state_dict() for which in ("one", "many"))
    for key, value in one.items():
        assert torch.allclose(value.double(), many[key].double(), rtol=1e-8, atol=1e-10), key


HOOKS = {  # whose state is a part of the run; several buckets
    "sketch": (2, 2, {"comm_hook": "sketch", "sketch_fraction": 0.3, "bucket_cap_mb": 0.001}),
    "sketch, hybrid sharding": (
        4, 4, {"strategy": "fsdp", "data_parallel_replicate_size": 2, "comm_hook": "sketch", "sketch_fraction": 0.3},
    ),
    "powersgd": (2, 2, {"comm_hook": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 1, "bucket_cap_mb": 0.001}),
    "powersgd, zero1": (
        2, 2, {"strategy": "zero1", "comm_hook": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "zero1",
        "pp",
        "sketch",
        "powersgd",
        pytest.param("powersgd, zero1", marks=pytest.mark.slow),
        pytest.param("sketch, hybrid sharding", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("hybrid sharding", marks=pytest.mark.slow),
        pytest.param("offload", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_and_resumed_ends_bit_for_bit(tmp_path, name):
    world, shares, settings = (STRATEGIES | HOOKS)[name]
    n = 48 if name == "pp" else N

    def whole():
        return weights(train(12 // shares, n=n, **settings), tmp_path / "whole")

    def broken():
        with pytest.raises(BrokenError):
            train(12 // shares, tmp_path / "run", n=n, callbacks=[Breaks(4)], checkpoint_every_n_steps=3, **settings)

    def resumed():
        return weights(train(12 // shares, tmp_path / "run", n=n, seed=9, **settings), tmp_path / "resumed")

    expected, _, found = (on_ranks(work, world) for work in (whole, broken, resumed))
    assert found == expected
    one, other = (pr.load_compressed(tmp_path / which, build(3)).state_dict() for which in ("whole", "resumed"))
    assert all(map(torch.equal, one.values(), other.values()))


def test_a_run_continues_with_a_different_number_of_processes(tmp_path):
    expected = weights(train(12), tmp_path / "one")

    def broken():
        with pytest.raises(BrokenError):
            train(6, tmp_path / "run", callbacks=[Breaks(4)], checkpoint_every_n_steps=3)

    on_ranks(broken)
    [found, *_] = on_ranks(lambda: weights(train(4, tmp_path / "run", seed=9, strategy="fsdp"), tmp_path / "many"), 3)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)
    one, other = (pr.load_compressed(tmp_path / which, build(3)).state_dict() for which in ("one", "many"))
    assert all(torch.allclose(one[key].double(), other[key].double(), rtol=1e-8) for key in one)


class Signals(Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_step(self, trainer, loss):
        if trainer.step == 3 and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path):
    def run():
        with pytest.raises(SystemExit) as caught:
            train(6, tmp_path, callbacks=[Signals(1)])
        return caught.value.code

    assert on_ranks(run, fresh=True) == [143, 143]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000004"]


def test_a_loss_that_is_not_finite_names_its_rank():
    def run():
        x, y = samples(24).tensors
        x[7] = float("inf")
        model = build()
        trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=TrainConfig(strategy="ddp", batch_size=4))
        first_values = [p.clone() for p in model.parameters()]
        with pytest.raises(TrainingError) as caught:
            trainer.fit(DataLoader(TensorDataset(x, y), 4))
        return str(caught.value), all(map(torch.equal, first_values, model.parameters()))

    (first, same), (second, _) = on_ranks(run)
    assert first == second
    assert same
    assert first.startswith(
        "step 1 is not finite: the loss is nan on rank 1, on the samples 1, 3, 5, 7; the parameters"
    )


def test_what_does_not_go_together_is_refused():
    def run():
        messages = []
        for settings in (
            {"strategy": "tp", "mixed_precision": "fp16"},
            {"strategy": "fsdp", "comm_hook": "fp16"},
            {"strategy": "ddp", "data_parallel_size": 1},
            {"strategy": "hybrid", "tensor_parallel_size": 3},
        ):
            with pytest.raises(ConfigError) as caught:
                train(4, **settings)
            messages.append(str(caught.value))
        with pytest.raises(ConfigError, match="a pipeline needs loss_fn"):
            Trainer(build(), config=TrainConfig(strategy="pp")).fit(DataLoader(samples(), 4))
        return messages

    messages, _ = on_ranks(run)
    assert messages[0].startswith("mixed_precision='fp16', which scales the loss ('bf16' does not), is for strategy=")
    assert messages[1].startswith("comm_hook='fp16' is for strategy='ddp' or 'zero1', not 'fsdp'")
    assert messages[2].startswith("data_parallel_size=1 must be the number of processes (2)")
    assert messages[3].startswith("tensor_parallel_size=3 must divide the number of processes (2)")


def test_a_rank_that_dies_ends_the_run(tmp_path):
    class Dies(Callback):
        def on_step(self, trainer, loss):
            if trainer.step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DistributedError, match="rank 1"):
        on_ranks(
            lambda: train(6, tmp_path, callbacks=[Dies()], checkpoint_every_n_steps=2, checkpoint_asynchronously=False),
            fresh=True,
        )
    assert checkpoint.latest(tmp_path).name == "step-00000002"


@pytest.mark.parametrize(
    "settings", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "hybrid", "tensor_parallel_size": 1}]
)
def test_buffers_are_the_first_rank_s_everywhere(tmp_path, settings):
    def run(directory, callbacks=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        config = TrainConfig(
            max_steps=6, checkpoint_dir=str(directory), checkpoint_every_n_steps=2, validate_every_n_steps=1, **settings
        )
        trainer = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), config, callbacks)
        trainer.fit(DataLoader(samples(32), 4, shuffle=True), DataLoader(samples(19), 5))
        return trainer.history["validation_loss"], getattr(trainer.model, "module", trainer.model)[
            1
        ].running_mean.tolist()

    def broken():
        with pytest.raises(BrokenError):
            run(tmp_path / "run", [Breaks(4)])

    (whole, means), (_, other) = on_ranks(lambda: run(tmp_path / "whole"))
    assert means == other
    on_ranks(broken)
    (resumed, found), _ = on_ranks(lambda: run(tmp_path / "run"))
    assert (resumed, found) == (whole, means)


def test_later_checkpoints_of_another_branch_are_not_left_in_the_way(tmp_path):
    train(12, tmp_path / "run", checkpoint_every_n_steps=2, keep_checkpoints=None)
    first = checkpoint.checkpoints(tmp_path / "run")[0]
    with pytest.raises(ConfigError, match=r"the run resumes from step 2, but .* has step-00000006, which the next run"):
        train(12, tmp_path / "run", resume=str(first))
    assert train(12, tmp_path / "other", resume=str(first)).step == 6


def empty():
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize(
    ("given", "settings"),
    half_of(
        ("a function", "weights"),
        (
            {"strategy": "fsdp"},
            {"strategy": "ddp"},
            {"strategy": "auto"},
            {"strategy": "replicate"},
            {"strategy": "tp"},
            {"strategy": "pp", "num_microbatches": 2},
            {"strategy": "hybrid", "tensor_parallel_size": 2},
        ),
    ),
    ids=lambda value: value["strategy"] if isinstance(value, dict) else value,
)
def test_a_model_without_values_is_trained_as_one_with_them(given, settings, tmp_path):
    weights = None
    if given == "weights":
        pr.save_compressed(build(), tmp_path / "weights")
        weights = str(tmp_path / "weights")

    def run(**more):
        more |= {"activation_checkpointing": "full"} if given == "weights" else {}
        config = TrainConfig(max_steps=3, learning_rate=0.02, seed=4, initial_weights=weights, **more)
        model = unseeded if weights is None else empty()  # the setting `seed` decides what is drawn
        trainer = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), config)
        trainer.fit(DataLoader(samples(24), 8 if one_batch or not dist.is_initialized() else 4))
        return rows(trainer)

    one_batch = settings["strategy"] in ("tp", "pp", "hybrid")  # of all ranks
    expected = run()
    for found in on_ranks(lambda: run(**settings), 2):
        for row, wanted in zip(found, expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-5 if one_batch else 1e-9)


def test_initial_weights_are_for_a_model_without_values():
    config = TrainConfig(max_steps=1, initial_weights="somewhere")
    trainer = Trainer(build(), None, nn.CrossEntropyLoss(), config)
    with pytest.raises(ConfigError, match="initial_weights='somewhere' is for a model on the meta device, and this"):
        trainer.fit(DataLoader(samples(8), 4))
