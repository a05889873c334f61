"""Steps whose gradients are not finite, with every form in which gradients travel: skipped alike, without a trace."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import data_parallel
from panther.distributed.data.comm_hooks import follow_loss_scale, hook_state, load_hook_state
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


def each_hook(run):
    return {name: run(settings) for name, settings in HOOKS.items()}


def check_alike(results, rel):
    """Every rank ends with the same finite parameters, and every hook has skipped what none has."""
    first, *others = results
    for name, found in first.items():
        assert all(parameter.isfinite().all() for parameter in found["parameters"]), name
        for other in others:
            assert other[name]["skipped"] == found["skipped"], name
            assert all(map(torch.equal, other[name]["parameters"], found["parameters"])), name
    for name in EXACT:
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

    first = check_alike(on_ranks(lambda: each_hook(run), world), rel=1e-3)  # products are rounded to fp16
    for name, found in first.items():
        assert len(found["skipped"]) == int(math.log2(begin / found["scale"])), name
        assert sum(found["losses"][-3:]) < 0.7 * sum(found["losses"][:3]), name
        # Gradients in half precision overflow where a product in it does, or one step before or after.
        assert abs(len(found["skipped"]) - len(first["plain"]["skipped"])) <= (name == "fp16"), name
    assert 2.0 < first["plain"]["scale"] < begin


class Steps:
    """Backward passes of a wrapped model, whose gradient is that of chosen numbers, times a scale."""

    def __init__(self, settings):
        self.model = data_parallel(build(), bucket_cap_mb=0.003, **settings)
        self.scale = 1.0
        follow_loss_scale(self.model, lambda: torch.tensor(self.scale))

    def take(self, number, scale=1.0, bad=False):
        """The averaged gradient of a step over the scale, or with a NaN in the last layer's of the last rank."""
        self.scale = scale
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.model.zero_grad()
        output = self.model(torch.randn(16, 20, generator=generator))
        weights = torch.randn(16, 2, generator=generator)
        if bad and dist.get_rank() == dist.get_world_size() - 1:
            weights[0, 0] = bad
        (output * weights).sum().mul(scale).backward()
        return [parameter.grad / scale for parameter in self.model.parameters()]

    def begin_another(self):
        """Count a step, as a step does that is not finite: it selects the signs of sketches."""
        if "Sketch" in (saved := hook_state(self.model)):
            saved["Sketch"]["step"] += 1
            load_hook_state(self.model, saved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sketch", "powersgd"])
def test_what_a_hook_keeps_is_as_if_a_step_that_is_not_finite_had_not_been(name, bad):
    """Also where only one rank's gradient, and only one bucket's, is affected; and in a checkpoint after it."""

    def run():
        whole, other = Steps(HOOKS[name]), Steps(HOOKS[name])
        for number in range(5):
            expected = whole.take(number)
            found = other.take(number)
            assert all(map(torch.equal, found, expected))
        gradients = other.take(99, bad=bad)
        assert not all(gradient.isfinite().all() for gradient in gradients)
        whole.begin_another()
        saved = hook_state(other.model)
        for number in range(5, 8):
            expected = whole.take(number)
            assert all(map(torch.equal, other.take(number), expected))
        assert all(gradient.isfinite().all() for gradient in expected)
        load_hook_state(other.model, saved)
        again = other.take(5)
        load_hook_state(whole.model, saved)
        assert all(map(torch.equal, whole.take(5), again))
        return [gradient.tolist() for gradient in gradients], again

    first, *others = on_ranks(run, 3)
    assert all(str(other[0]) == str(first[0]) for other in others)  # NaN is not equal to itself
    assert all(all(map(torch.equal, other[1], first[1])) for other in others)


@pytest.mark.parametrize("name", ["sketch", "powersgd"])
def test_the_first_step_of_a_hook_may_be_one_that_is_not_finite(name):
    def run():
        whole, other = Steps(HOOKS[name]), Steps(HOOKS[name])
        for number in range(2):  # DDP forms its buckets in the first, and PowerSGD begins after the second
            whole.take(number), other.take(number)
        other.take(9, bad=float("nan"))
        whole.begin_another()
        found = [gradient for number in range(2, 30) for gradient in other.take(number)]
        wanted = [gradient for number in range(2, 30) for gradient in whole.take(number)]
        return found, wanted

    for found, wanted in on_ranks(run, 2):
        if name != "powersgd":
            assert all(map(torch.equal, found, wanted))
        else:  # its first factors are drawn again, and are others
            assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("name", ["sketch", "powersgd"])
def test_what_a_hook_keeps_follows_the_loss_scale(name):
    """A power of two, as GradScaler's are after its first: it changes no bit."""
    scales = (1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 512.0, 2.0**20, 1024.0)

    def run():
        plain, scaled, saved = Steps(HOOKS[name]), Steps(HOOKS[name]), None
        for number, scale in enumerate(scales):
            expected, found = plain.take(number), scaled.take(number, scale)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())
            if scale == 512.0:  # a run that resumes with another scale, and without a GradScaler
                saved = hook_state(scaled.model)
        load_hook_state(scaled.model, saved)
        load_hook_state(plain.model, saved)
        return scaled.take(6, 2.0**20), plain.take(6)

    for one, other in (pair for pairs in on_ranks(run, 2) for pair in zip(*pairs, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())


def test_steps_that_a_scaler_skips_are_counted_on_one_process():
    noted = Noted()
    config = TrainConfig(max_steps=30, mixed_precision="fp16", scaler_init_scale=2.0**30, learning_rate=0.05)
    trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config, [noted])
    history = trainer.fit(DataLoader(samples(), 24, shuffle=True))
    expected = int(math.log2(2.0**30 / trainer._engine.scaler.get_scale()))
    assert 0 < expected == trainer.skipped == history.last["skipped"] == len(noted.skipped)
    assert trainer.step == 30 == expected + len(noted.losses)
    assert history["loss"][0] == [10, 20, 30]
