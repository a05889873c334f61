"""What the Trainer says of the parameters when a step is not finite, with all kinds of optimizers and strategies."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.errors import TrainingError
from panther.optim import MuonAdamW, SketchedAdamW
from panther.train import Callback, TrainConfig, Trainer

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "channel": lambda model: SketchedAdamW([{"params": list(model.named_parameters()), "rank": 2}]),
    "tensor": lambda model: SketchedAdamW([{"params": list(model.named_parameters()), "rank": 1}], update="tensor"),
    "projected": lambda model: SketchedAdamW(
        [{"params": list(model.named_parameters()), "rank": 2}], update="projected"
    ),
    "Muon": lambda model: MuonAdamW(
        [{"params": [model[0].weight, model[2].weight], "orthogonalize": True}, {"params": [model[0].bias]}]
    ),
}


class Steep(nn.Module):
    """Its gradient is not finite in one call, although its loss is, and the loss of some sample is not finite."""

    def __init__(self, at):
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x):
        self.calls += 1
        return x + (x * 0).sum().abs().sqrt() if self.calls == self.at else x


class Copies(Callback):
    def __init__(self):
        self.values = []

    def on_step(self, trainer, loss):
        self.values = [whole(p) for p in trainer.model.parameters()]


def whole(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def fit(name, steep_at, poisoned, **settings):
    """Return the message of an error, and whether the parameters are those after the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Steep(steep_at), nn.Linear(8, 3, bias=False))
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    if poisoned is not None:
        x[poisoned] = float("nan")
    data = DataLoader(TensorDataset(x, torch.arange(12) % 3), 12 // 3)
    config = TrainConfig(log_every_n_steps=100, batch_size=4, epochs=2, progress=False, **settings)
    copies = Copies()
    trainer = Trainer(model, OPTIMIZERS[name](model), nn.CrossEntropyLoss(), config, [copies])
    with pytest.raises(TrainingError) as caught:
        trainer.fit(data)
    return str(caught.value), all(map(torch.equal, copies.values, map(whole, trainer.model.parameters())))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_parameters_are_as_before_the_step(name):
    message, same = fit(name, 0, 5)
    assert "step 2 is not finite: the loss is nan on rank 0" in message
    assert "the parameters are as before the step" in message
    assert same


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_an_earlier_step_has_spoiled_are_named(name):
    """The samples of the step after it are innocent."""
    message, _ = fit(name, 2, None)
    assert message.startswith("step 3 is not finite, because an earlier step has made parameters so: ")
    assert "2.weight" in message or "0.weight" in message
    assert "samples" not in message


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_give_the_same_reason(strategy):
    def rank():
        return [
            fit(name, steep_at, poisoned, strategy=strategy)
            for name in OPTIMIZERS
            for steep_at, poisoned in ((0, 5), (2, None))
        ]

    first, second = on_ranks(rank, 2)
    assert first == second
    for before, after in zip(first[::2], first[1::2], strict=True):
        assert "the parameters are as before the step" in before[0]
        assert before[1]
        assert "an earlier step has made parameters so" in after[0]
