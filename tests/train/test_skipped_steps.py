"""Steps whose gradients are not finite, with every form in which gradients travel: skipped alike, without a trace."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import data_parallel
from panther.distributed.data.comm_hooks import hook_state, load_hook_state
from panther.errors import ConfigError
from panther.train import Callback, TrainConfig, Trainer

pytestmark = pytest.mark.distributed

HOOKS = {
    "plain": {},
    "fp16": {"comm_hook": "fp16"},
    "bf16": {"comm_hook": "bf16"},
    "sketch": {"comm_hook": "sketch", "sketch_fraction": 0.5},
    "all of sketch": {"comm_hook": "sketch", "sketch_fraction": 1.0},
    "powersgd": {"comm_hook": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2},
    "full rank": {"comm_hook": "powersgd", "powersgd_rank": 64, "powersgd_start_step": 2},
}
EXACT = ("all of sketch", "full rank")  # which send everything


def samples(poisoned=False):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 20, generator=generator)
    y = (x[:, 0] > 0).long()
    if poisoned:
        x[17] = float("nan")
    return TensorDataset(x, y)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2))


class Noted(Callback):
    def __init__(self):
        self.losses, self.skipped = [], []

    def on_step(self, trainer, loss):
        self.losses.append(loss)

    def on_skip(self, trainer):
        self.skipped.append(trainer.step)


def trained(data, epochs, **settings):
    """A run in small buckets: the last step it skipped, its losses, and this rank's parameters at the end."""
    noted = Noted()
    config = TrainConfig(
        epochs=epochs,
        strategy="ddp",
        bucket_cap_mb=0.003,
        learning_rate=0.5,
        log_every_n_steps=1,
        progress=False,
        **settings,
    )
    batch = 24 // dist.get_world_size()  # two windows an epoch
    trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config, [noted])
    trainer.fit(DataLoader(data, batch, shuffle=True))
    assert trainer.skipped == len(noted.skipped)
    recorded = trainer.history.last  # a step whose loss is not a number has no record
    assert recorded["skipped"] == sum(step <= recorded["step"] for step in noted.skipped)
    assert len(noted.losses) + len(noted.skipped) == trainer.step
    return {
        "skipped": noted.skipped,
        "losses": noted.losses,
        "scale": trainer._engine.scaler.get_scale(),
        "parameters": [parameter.detach().clone() for parameter in trainer.model.parameters()],
    }


def each_hook(run, hooks=tuple(HOOKS)):
    return {name: run(HOOKS[name]) for name in hooks}


def check_alike(results, rel):
    """Every rank ends with the same finite parameters, and every hook has skipped what none has."""
    first, *others = results
    for name, found in first.items():
        assert all(parameter.isfinite().all() for parameter in found["parameters"]), name
        for other in others:
            assert other[name]["skipped"] == found["skipped"], name
            assert all(map(torch.equal, other[name]["parameters"], found["parameters"])), name
    for name in first.keys() & EXACT:
        assert first[name]["losses"] == pytest.approx(first["plain"]["losses"], rel=rel), name
    return first


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_sample_that_is_not_a_number_costs_the_steps_it_is_in(world):
    epochs = 12

    def run(hook):
        return trained(samples(poisoned=True), epochs, on_nonfinite="skip", **hook)

    first = check_alike(on_ranks(lambda: each_hook(run), world), rel=1e-5)
    for name, found in first.items():
        assert [(step - 1) // 2 for step in found["skipped"]] == list(range(epochs)), name  # one of two an epoch
        assert sum(found["losses"][-3:]) < 0.7 * sum(found["losses"][:3]), name


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_scale_that_is_too_large_is_lowered_as_without_a_hook(world):
    """The scaler halves it in every step it skips: their number follows from where it ends."""
    begin = 2.0**20

    def run(hook):
        return trained(samples(), 12, mixed_precision="fp16", scaler_init_scale=begin, **hook)

    hooks = ("plain", "fp16", "bf16", "sketch", "all of sketch")
    first = check_alike(on_ranks(lambda: each_hook(run, hooks), world), rel=1e-3)  # products are rounded to fp16
    for name, found in first.items():
        assert len(found["skipped"]) == int(math.log2(begin / found["scale"])), name
        assert sum(found["losses"][-3:]) < 0.7 * sum(found["losses"][:3]), name
        # Gradients in half precision overflow where a product in it does, or one step before or after.
        assert abs(len(found["skipped"]) - len(first["plain"]["skipped"])) <= (name == "fp16"), name
    assert 2.0 < first["plain"]["scale"] < begin


def test_a_hook_that_keeps_gradients_does_not_follow_a_loss_scale():
    with pytest.raises(ConfigError, match="does not follow the loss scale of mixed_precision='fp16': use mixed_prec"):
        TrainConfig(epochs=1, strategy="ddp", comm_hook="powersgd", mixed_precision="fp16")


class Steps:
    """Backward passes of a wrapped model, whose gradient is that of chosen numbers."""

    def __init__(self, settings):
        self.model = data_parallel(build(), bucket_cap_mb=0.003, **settings)

    def take(self, number, bad=False):
        """The averaged gradient of a step, with a NaN or infinity in the last layer's of the last rank."""
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.model.zero_grad()
        output = self.model(torch.randn(16, 20, generator=generator))
        weights = torch.randn(16, 2, generator=generator)
        if bad and dist.get_rank() == dist.get_world_size() - 1:
            weights[0, 0] = bad
        (output * weights).sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("first", [2, 5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_powersgd_begins_anew_after_a_step_that_is_not_finite(bad, first):
    """Also where only one rank's gradient, and only one bucket's, is affected; and in a checkpoint after it.

    The step may be the first that is compressed: DDP forms its buckets in the first, and PowerSGD begins after two.
    """

    def run():
        steps = Steps(HOOKS["powersgd"])
        for number in range(first):
            steps.take(number)
        gradients = steps.take(99, bad)
        assert not all(gradient.isfinite().all() for gradient in gradients)
        saved = copy.deepcopy(hook_state(steps.model))
        assert saved["PowerSGD"]["error_dict"] == saved["PowerSGD"]["q_memory_dict"] == {}
        found = [gradient for number in range(5, 8) for gradient in steps.take(number)]
        assert all(gradient.isfinite().all() for gradient in found)
        load_hook_state(steps.model, saved)
        return found, [gradient for number in range(5, 8) for gradient in steps.take(number)]

    (found, again), *others = on_ranks(run, 3)
    assert all(map(torch.equal, found, again))
    assert all(all(map(torch.equal, found, other)) for pair in others for other in pair)


def test_errors_at_the_loss_scale_of_an_earlier_version_are_left_out():
    def run():
        steps = Steps(HOOKS["powersgd"])
        for number in range(4):
            steps.take(number)
        saved = hook_state(steps.model)
        assert saved["PowerSGD"]["error_dict"]
        saved["PowerSGD"]["scale"] = 1024.0
        load_hook_state(steps.model, saved)
        loaded = hook_state(steps.model)["PowerSGD"]
        return loaded["error_dict"], loaded["q_memory_dict"].keys() == saved["PowerSGD"]["q_memory_dict"].keys()

    assert on_ranks(run, 2) == [({}, True)] * 2


def test_steps_that_a_scaler_skips_are_counted_on_one_process():
    noted = Noted()
    config = TrainConfig(max_steps=30, mixed_precision="fp16", scaler_init_scale=2.0**30, learning_rate=0.05)
    trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config, [noted])
    history = trainer.fit(DataLoader(samples(), 24, shuffle=True))
    expected = int(math.log2(2.0**30 / trainer._engine.scaler.get_scale()))
    assert 0 < expected == trainer.skipped == history.last["skipped"] == len(noted.skipped)
    assert trainer.step == 30 == expected + len(noted.losses)
    assert history["loss"][0] == [10, 20, 30]
