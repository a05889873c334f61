"""
One script under ddp, fsdp, tp and pp
=====================================

:class:`panther.train.Trainer` runs the same model and data under any parallelism: the setting ``strategy`` of
:class:`~panther.train.TrainConfig` is the only difference. This example trains digits under four strategies on two
processes and in one process, and shows what each rank holds, sends and sees.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import panther as pr
from panther.distributed import CommunicationCounter, launch
from panther.train import TrainConfig, Trainer

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The script
# ----------
#
# 1,792 digits, so that all batches are full. ``learning_rate``, seed and the order of samples are those of one process.

digits = load_digits()
images = torch.tensor(digits.data[:1792], dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target[:1792]))
width = 128 if QUICK else 512


def build():
    torch.manual_seed(0)
    hidden = [
        pr.nn.SKLinear(width, width, 8),
        nn.ReLU(),
        pr.nn.SKLinear(width, width, 8),
        nn.ReLU(),
    ]
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10)
    )


def train(strategy, batch_size):
    settings = {"num_microbatches": 4} if strategy == "pp" else {}
    config = TrainConfig(
        strategy=strategy,
        epochs=1 if QUICK else 4,
        learning_rate=3e-3,
        log_every_n_steps=7,
        seed=0,
        **settings,
    )
    trainer = Trainer(
        build(), torch.optim.Adam, nn.CrossEntropyLoss(), config
    )
    with CommunicationCounter() as traffic:
        history = trainer.fit(
            DataLoader(data, batch_size, shuffle=True)
        )
    # A list under pp.
    stages = (
        trainer.model
        if isinstance(trainer.model, list)
        else [trainer.model]
    )
    state_bytes = 0
    for parameter in (
        parameter
        for stage in stages
        for parameter in stage.parameters()
    ):
        local = (
            parameter.to_local()
            if hasattr(parameter, "to_local")
            else parameter
        )
        state_bytes += local.numel() * local.element_size()
    return {
        "loss": history["loss"],
        "held": state_bytes,
        "sent": traffic.bytes // trainer.step,
    }


# %%
# Two processes with batches of 64 samples see the samples of one process with batches of 128; strategies that do not
# divide the samples (``tp``, ``pp``) get batches of 128.

(one,) = launch(train, "ddp", 128, nproc=1, start_method="fork")
runs = {"one process": [one]}
for strategy, batch_size in (
    ("ddp", 64),
    ("fsdp", 64),
    ("tp", 128),
    ("pp", 128),
):
    runs[strategy] = launch(
        train, strategy, batch_size, nproc=2, start_method="fork"
    )
for name, ranks in runs.items():
    for rank, seen in enumerate(ranks):
        print(
            f"{name:11} rank {rank}: holds {seen['held']:9,} bytes of "
            f"parameters, passes {seen['sent']:9,} bytes a "
            f"step to collectives, last loss {seen['loss'][1][-1]:.5f}"
        )

# %%
# All strategies have the losses of one process, up to rounding.

figure, (left, right) = plt.subplots(1, 2)
for (name, ranks), style in zip(
    runs.items(), ("-", "--", ":", "-.", (0, (1, 4))), strict=True
):
    left.plot(
        *ranks[0]["loss"], linestyle=style, linewidth=2, label=name
    )
left.set(xlabel="step", ylabel="training loss", yscale="log")
left.legend()
names = list(runs)
right.barh(
    names,
    [max(seen["held"] for seen in runs[name]) / 1e3 for name in names],
)
right.invert_yaxis()
right.set(xlabel="kB of parameters on the largest rank")
plt.show()

# %%
# ``strategy="auto"``, the default, is ``ddp`` unless memory forbids it, or measured speeds favour another layout.
# :doc:`/howto/train` has all strategies and their settings.
