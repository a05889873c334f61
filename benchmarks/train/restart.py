"""A training script one of whose workers kills itself once; it prints the time of the kill and of the first step after.

Run by trainer.py under ``panther launch --max-restarts 1``.
"""

__all__ = ["train"]

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from panther.nn import SKLinear
from panther.train import Callback, TrainConfig, Trainer

_EVERY, _KILL = 5, 17


class _Fault(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.restarted = folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def on_step(self, trainer: Trainer, loss: float) -> None:
        rank = os.environ["RANK"]
        if self.restarted and rank == "0" and not (self.folder / "first-step").exists():
            (self.folder / "first-step").write_text(f"{time.time()} {trainer.step}")
        if not self.restarted and rank == "1" and trainer.step == _KILL:
            (self.folder / "kill").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str) -> None:
    """Train for twenty steps, with a checkpoint every fifth."""
    torch.manual_seed(0)
    model = nn.Sequential(SKLinear(256, 512, 8), nn.ReLU(), SKLinear(512, 512, 8), nn.ReLU(), nn.Linear(512, 10))
    data = TensorDataset(torch.randn(2048, 256), torch.randint(10, (2048,)))
    config = TrainConfig(
        max_steps=20,
        batch_size=32,
        strategy="ddp",
        checkpoint_dir=f"{folder}/run",
        checkpoint_every_n_steps=_EVERY,
        progress=False,
    )
    Trainer(model, None, nn.CrossEntropyLoss(), config, [_Fault(Path(folder))]).fit(data)


if __name__ == "__main__":
    train(sys.argv[1])
