"""Sketched models on DeepSpeed: equal to one process, saved and loaded at other world sizes; faults in a sentence."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import waits
from compressed_layers import with_stored_sketches
from torch import nn

import panther as pr
from panther.distributed import launch
from panther.errors import CheckpointError, ConfigError, DistributedError, SketchMismatchError
from panther.train import TrainConfig

pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.distributed,
    # DeepSpeed 0.19 calls torch 2.13's collectives by their former names.
    pytest.mark.filterwarnings("ignore:`torch.distributed.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS, ROWS = 3, 8


class Network(nn.Module):
    """A seeded layer, a fitted one with frozen sketches, a packed one, and a buffer that training changes."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(0)
        self.seeded = pr.nn.SKLinear(32, 64, 2, seed=seed)
        self.fitted = with_stored_sketches(pr.nn.SKLinear(64, 64, 2))
        for name in self.fitted.sketch_names:
            getattr(self.fitted, name).requires_grad_(False)
        self.packed = pr.nn.SKLinear(64, 64, 2, sketch="signs", packed=True, seed=seed + 1)
        self.head = nn.Linear(64, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.packed(self.fitted(self.seeded(x).relu()).relu()).relu())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 32, generator=generator), torch.randint(4, (ROWS,), generator=generator)


def loss_of(model, step, rank=0, world=1):
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])


def settings(stage, world=2, offload=False, **more):
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    # Parameters below the threshold stay whole in stage 3, so that all of these small ones would.
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": ROWS // world, "zero_optimization": zero, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "steps_per_print": 1000, "zero_force_ds_cpu_optimizer": False, **more,
    }  # fmt: skip


def steps_of(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = loss_of(engine, step, torch.distributed.get_rank(), torch.distributed.get_world_size())
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
    return losses


def plainly(make=Network):
    """Losses and weights of one process without DeepSpeed."""
    model, losses = make(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, weight_decay=0.1)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


CASES = {"0": (0, False), "1": (1, False), "2": (2, False), "3": (3, False), "2-offload": (2, True),
         "3-offload": (3, True)}  # fmt: skip


def train_and_save(directory):
    """On two ranks, every stage: some steps, a checkpoint, more steps, an export."""
    from panther.integrations.deepspeed import export, initialize, save_checkpoint

    found = {}
    for name, (stage, offload) in CASES.items():
        model = Network(seed=3 + 7 * torch.distributed.get_rank())  # rank 0's sketches must win
        engine, *_ = initialize(model, settings(stage, offload=offload))
        losses = steps_of(engine, 0, STEPS)
        tag = save_checkpoint(engine, directory / name, client_state={"epoch": 5})
        losses += steps_of(engine, STEPS, 2 * STEPS)
        export(engine, directory / name / "model")
        losses += steps_of(engine, 2 * STEPS, 2 * STEPS + 1)  # exporting has changed nothing
        found[name] = losses, tag, model.seeded.seed, model.calls.item()
    return found


def load_and_train(directory):
    """On another number of ranks: the same steps after the checkpoint."""
    from panther.integrations.deepspeed import initialize, load_checkpoint

    found = {}
    for name, (stage, offload) in CASES.items():
        model = Network(seed=11)
        world = torch.distributed.get_world_size()
        engine, *_ = initialize(model, settings(stage, world, offload))
        state = load_checkpoint(engine, directory / name)
        seed, calls = model.seeded.seed, model.calls.item()
        found[name] = steps_of(engine, STEPS, 2 * STEPS), state["epoch"], seed, calls, engine.global_steps
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    return directory, launch(train_and_save, directory, nproc=2, start_method="fork")[0]


def test_losses_and_weights_equal_those_of_one_process(trained):
    directory, found = trained
    expected, state = plainly()
    for name, (losses, tag, seed, calls) in found.items():
        torch.testing.assert_close(losses[: 2 * STEPS], expected, rtol=1e-4, atol=1e-5, msg=name)
        assert losses == pytest.approx(found["0"][0], rel=1e-4), name
        assert (tag, seed, calls) == ("step-00000003", 3, 2 * STEPS + 1), name
        model = pr.load_compressed(directory / name / "model", Network(seed=5))
        assert (model.seeded.seed, model.packed.seed, model.fitted.is_fitted) == (3, 4, True)
        for key, value in model.state_dict().items():
            if key == "calls":
                assert value == 2 * STEPS
            else:
                torch.testing.assert_close(value, state[key], rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")


def test_loading_on_another_number_of_processes(trained):
    directory, found = trained
    again = launch(load_and_train, directory, nproc=1, start_method="fork")[0]
    for name, (losses, epoch, seed, calls, step) in again.items():
        torch.testing.assert_close(losses, found[name][0][STEPS : 2 * STEPS], rtol=1e-4, atol=1e-5, msg=name)
        assert (epoch, seed, calls, step) == (5, 3, STEPS, 2 * STEPS), name


def train_in_bf16(directory):
    from panther.integrations.deepspeed import export, initialize

    config = TrainConfig(
        strategy="fsdp", mixed_precision="bf16", batch_size=ROWS // 2, gradient_clipping=1.0, learning_rate=0.01
    )
    model = Network()
    engine, *_ = initialize(model, config)
    losses = steps_of(Cast(engine), 0, STEPS)
    export(engine, directory / "model")
    signs = model.seeded.U1
    return losses, str(signs.dtype), signs.abs().unique().tolist(), engine.zero_optimization_stage()


class Cast:
    """An engine that takes float32."""

    def __init__(self, engine):
        self.engine, self.backward, self.step = engine, engine.backward, engine.step

    def __call__(self, x):
        return self.engine(x.bfloat16()).float()


def test_a_train_config_in_bf16_exports_the_float32_weights(tmp_path):
    losses, dtype, signs, stage = launch(train_in_bf16, tmp_path, nproc=2, start_method="fork")[0]
    assert (dtype, signs, stage) == ("torch.bfloat16", [0.0, 1.0], 3)
    expected, _ = plainly()
    torch.testing.assert_close(losses, expected[:STEPS], rtol=0.05, atol=0.02)
    model = pr.load_compressed(tmp_path / "model", Network())
    factor = model.seeded.S1
    assert factor.dtype is torch.float32
    assert not torch.equal(factor, factor.bfloat16().float())  # not what the model computed with


def small(seed=3):
    torch.manual_seed(0)
    return nn.Sequential(pr.nn.SKLinear(32, 64, 2, seed=seed), nn.Linear(64, 4))


def train_what_was_built_sharded(directory):
    import deepspeed

    from panther.integrations.deepspeed import export, initialize, load_checkpoint, save_checkpoint

    config = settings(3)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = small(seed=3 + torch.distributed.get_rank())
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    engine, *_ = initialize(model, config)
    losses = steps_of(engine, 0, STEPS)
    save_checkpoint(engine, directory)
    load_checkpoint(engine, directory)
    export(engine, directory / "model")
    return shapes, losses, model[0].seed


def test_a_model_that_is_built_sharded(tmp_path):
    for shapes, losses, seed in launch(train_what_was_built_sharded, tmp_path, nproc=2, start_method="fork"):
        assert (shapes, seed) == ({(0,)}, 3)
        torch.testing.assert_close(losses, plainly(small)[0][:STEPS], rtol=1e-4, atol=1e-5)
    pr.load_compressed(tmp_path / "model", small())


REFUSED = [
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, ConfigError,
     "DeepSpeed .* refuses this: .*batch.*: correct the configuration"),
    ({"zero_optimization": {"stage": 1}}, ConfigError, "DeepSpeed .* refuses this: .*train_micro_batch_size_per_gpu"),
    ("missing.json", ConfigError, "the configuration missing.json does not exist"),
    (7, ConfigError, "config must be a TrainConfig, a dictionary .* or the path of its JSON file, not a int"),
    (TrainConfig(batch_size=4, strategy="tp"), ConfigError, "strategy='tp' has no counterpart in DeepSpeed: use 'ddp'"),
    (TrainConfig(batch_size=4, strategy="zero1", compile=True), ConfigError, "compile=True has no counterpart .* call"),
    ({"train_batch_size": 8, "zero_optimization": {"stage": 7}}, ConfigError, "stage=7 must be 0, 1, 2 or 3"),
    ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, ConfigError,
     "DeepSpeed .* refuses this: .*: correct the configuration"),
    ({"train_batch_size": 8, "zero_optimization": {"stage": 1, "nonsense": 3}}, ConfigError,
     "DeepSpeed .* refuses this: .*nonsense Extra inputs are not permitted .*: correct the configuration"),
]  # fmt: skip


def refused():
    from panther.integrations.deepspeed import initialize

    rank, found = torch.distributed.get_rank(), []
    good = settings(1)
    for call in (
        *(lambda config=config: initialize(nn.Linear(4, 4), config) for config, _, _ in REFUSED),
        lambda: initialize(pr.nn.SKLinear(32, 32, 1 + rank), good),
        lambda: initialize(nn.Linear(4, 4), settings(rank)),
        lambda: initialize(nn.Linear, good),
        lambda: initialize(nn.Linear(4, 4), good, args=None),
    ):
        try:
            call()
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append((None, "nothing was raised"))
    return found


def test_bad_input_is_refused_on_every_rank():
    differs = r"config\['zero_optimization'\]=.*\"stage\": 0.* on rank 0 and .*\"stage\": 1.* on rank 1: build the same"
    expected = [
        *((kind, message) for _, kind, message in REFUSED),
        (SketchMismatchError, "sketches differ between ranks: layer '' is .*num_terms|low_rank"),
        (DistributedError, differs),
        (ConfigError, "model must be an nn.Module, not a type: build it first"),
        (ConfigError, "args is not an option"),
    ]
    for found in launch(refused, nproc=2, start_method="fork"):
        for (kind, message), (wanted, pattern) in zip(found, expected, strict=True):
            assert kind is wanted, message
            assert re.search(pattern, message), message
            assert "\n" not in message


def load_what_does_not_fit(directory):
    from panther.integrations.deepspeed import initialize, load_checkpoint, save_checkpoint

    engine, *_ = initialize(Network(), settings(1))
    steps_of(engine, 0, 1)
    engine.save_checkpoint(str(directory / "plain"), "mine")
    save_checkpoint(engine, directory / "own")
    other, *_ = initialize(Network(), settings(3))
    found = []
    for loader, folder, tag in (
        (engine, "none", None), (engine, "own", "step-9"), (engine, "plain", "mine"), (other, "own", None)
    ):  # fmt: skip
        try:
            load_checkpoint(loader, directory / folder, tag)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_checkpoints_that_do_not_fit(tmp_path):
    none, absent, plain, stage = launch(load_what_does_not_fit, tmp_path, nproc=2, start_method="fork")[0]
    assert none.endswith("none has no checkpoint: give the folder that was saved to")
    assert "step-9_universal does not exist" in absent
    assert "has step-00000001;" in absent
    assert "mine_universal does not exist" in plain
    assert "is of ZeRO stage 1, and this engine has stage 3, whose optimizer state has a different layout" in stage


def lose_a_worker():
    from panther.integrations.deepspeed import initialize

    engine, *_ = initialize(Network(), settings(2))
    for step in range(100):
        if step == 2 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        steps_of(engine, step, step + 1)


def test_a_lost_worker_ends_the_run():
    with pytest.raises(DistributedError, match=r"rank 1 of 2 .*SIGKILL"):
        launch(lose_a_worker, nproc=2, start_method="fork")


def test_the_script_of_the_page(tmp_path):
    script = Path(__file__).parents[2] / "docs/howto/scripts/train_deepspeed.py"
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(Path(pr.__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = waits.run(command, 800, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved at step 32; resumed there with the same sketches" in done.stdout
    pr.load_compressed(tmp_path / "model", nn.Sequential(pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)))
