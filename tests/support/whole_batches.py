"""Training by a Trainer on several ranks, and by a plain loop on one process, with all samples in every step."""

import torch
import torch.distributed as dist
from ranks import weights_of
from torch import nn
from torch.utils.data import TensorDataset

from panther.train import Callback, TrainConfig, Trainer

SAMPLES = 24


def build():
    """Every layer has the same size, because each new shape of a sharded tensor takes time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()


def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(8, (SAMPLES,), generator=generator)


class At(Callback):
    """Calls ``change(trainer)`` after some steps."""

    def __init__(self, change, *steps):
        self.change, self.steps = change, steps

    def on_step(self, trainer, loss):
        if trainer.step in self.steps:
            self.change(trainer)


def module_named(trainer, name):
    """The module of this rank by its name in the model that was built, or None on other stages of a pipeline."""
    parts = trainer.model if isinstance(trainer.model, list) else [getattr(trainer.model, "module", trainer.model)]
    return next((part.get_submodule(name) for part in parts if name in dict(part.named_modules())), None)


def freeze(name, trained=False):
    """A change that freezes a module, or with ``trained`` unfreezes it."""

    def change(trainer):
        if (module := module_named(trainer, name)) is not None:
            module.requires_grad_(trained)

    return change


def train(model, optimizer, settings, callbacks=(), steps=4, loss_fn=None, micro=1, scheduler=None):
    """The trainer after some steps of all samples, in ``micro`` batches a step on each rank."""
    settings = dict(settings)
    ranks = settings.pop("divided_by", dist.get_world_size() if dist.is_initialized() else 1)
    config = TrainConfig(
        **{"max_steps": steps, "strategy": "ddp", "log_every_n_steps": 1, **settings},
        batch_size=SAMPLES // ranks // micro,
        gradient_accumulation_steps=micro,
    )
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    trainer = Trainer(model, optimizer, loss_fn, config, list(callbacks), scheduler=scheduler)
    trainer.fit(TensorDataset(*samples()))
    return trainer


def weights(trainer):
    """Copies of this rank's parameters, in one piece."""
    parts = trainer.model if isinstance(trainer.model, list) else [trainer.model]
    # Activation checkpointing adds a name.
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in weights_of(*parts).items()}


def plain(model, optimizer, changes=None, steps=4, scheduler=None):
    """The weights after the same steps of a plain loop. ``changes`` maps a step to what is called after it."""
    x, y = samples()
    loss_fn = nn.CrossEntropyLoss()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if changes and step in changes:
            changes[step]()
    return weights_of(model)


STRATEGIES = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "replicate": {"strategy": "replicate"},
    "tp": {"strategy": "tp", "divided_by": 1},
    "pp": {"strategy": "pp", "divided_by": 1},
    "hybrid": {"strategy": "hybrid", "tensor_parallel_size": 2, "divided_by": 1},
}


def merged(weights_of_ranks):
    """The weights of all stages; every rank that has a parameter must have the same values of it."""
    whole = {}
    for weights_of_rank in weights_of_ranks:
        for name, value in weights_of_rank.items():
            torch.testing.assert_close(value, whole.setdefault(name, value), rtol=0, atol=0)
    return whole


def assert_equal(weights_of_ranks, expected, atol=1e-10):
    """Ranks are equal in every bit, and equal to one process up to rounding."""
    whole = merged(weights_of_ranks)
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            whole[name], value, rtol=0, atol=atol, msg=lambda difference, name=name: f"{name}: {difference}"
        )
