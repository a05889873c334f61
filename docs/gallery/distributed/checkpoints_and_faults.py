"""
Checkpoints and faults
======================

A :class:`panther.train.Trainer` with ``checkpoint_dir`` continues where a run ended, for whatever reason. This example
ends one of two processes by a signal in the middle of a run, starts the run again, compares its losses with those of a
run that nothing disturbed, bit for bit, and then loads a checkpoint in other layouts.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import panther as pr
from panther.distributed import checkpoint, get_rank, launch
from panther.errors import DistributedError
from panther.train import Callback, TrainConfig, Trainer

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The run
# -------
#
# Digits of scikit-learn, with a checkpoint every fifth step. A process that is killed cannot return anything, so each
# rank writes a line into a file of its own after every step: what it saw. ``fault`` is the signal that rank 1 sends to
# itself after step 13.

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16,
    torch.tensor(digits.target),
)
width, steps, fault_at = (128, 24, 13) if QUICK else (512, 40, 13)


class Notes(Callback):
    def __init__(self, folder, fault):
        self.file = folder / f"seen-by-rank-{get_rank()}"
        self.fault = fault
        self.labels = []

    def loss(self, output, target):
        self.labels = target[:5].tolist()
        return nn.functional.cross_entropy(output, target)

    def on_step(self, trainer, loss):
        with self.file.open("a") as file:
            file.write(
                json.dumps(
                    {
                        "step": trainer.step,
                        "labels": self.labels,
                        "time": time.time(),
                    }
                )
                + "\n"
            )
        if get_rank() == 1 and trainer.step == fault_at and self.fault:
            os.kill(os.getpid(), self.fault)


def train(
    folder, fault=None, strategy="ddp", batch_size=32, resume="auto"
):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    layers = [
        nn.Linear(64, width),
        nn.ReLU(),
        pr.nn.SKLinear(width, width, 8),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    config = TrainConfig(
        strategy=strategy,
        max_steps=steps,
        learning_rate=3e-3,
        log_every_n_steps=1,
        checkpoint_dir=str(folder),
        checkpoint_every_n_steps=5,
        checkpoint_asynchronously=False,
        keep_checkpoints=None,
        resume=resume,
    )
    notes = Notes(folder, fault)
    trainer = Trainer(
        nn.Sequential(*layers),
        torch.optim.Adam,
        notes.loss,
        config,
        [notes],
    )
    history = trainer.fit(DataLoader(data, batch_size, shuffle=True))
    local = sum(
        (p.to_local() if hasattr(p, "to_local") else p).numel()
        for p in trainer.model.parameters()
    )
    return history["loss"], local


def seen(folder, rank):
    return [
        json.loads(line)
        for line in (folder / f"seen-by-rank-{rank}")
        .read_text()
        .splitlines()
    ]


temporary = tempfile.TemporaryDirectory()
runs = Path(temporary.name)
(whole, _), _ = launch(
    train, runs / "undisturbed", nproc=2, start_method="fork"
)
print(
    "undisturbed: losses",
    *(f"{loss:.4f}" for loss in whole[1][:5]),
    "...",
    f"{whole[1][-1]:.4f}",
)

# %%
# SIGKILL and SIGTERM
# -------------------
#
# SIGKILL ends a process at once, as the kernel does when memory runs out; the launcher ends the others. SIGTERM is what
# schedulers send: all ranks finish the step, save together and leave with the status 143. The error names the rank that
# failed first. The same call then continues from the latest checkpoint.

resumed = {}
for name in ("SIGKILL", "SIGTERM"):
    folder = runs / name
    try:
        launch(
            train,
            folder,
            getattr(signal, name),
            nproc=2,
            start_method="fork",
        )
    except DistributedError as error:
        print(f"{name}: {str(error).splitlines()[0].partition(';')[0]}")
    steps_before = [len(seen(folder, rank)) for rank in (0, 1)]
    print(
        f"{name}: the latest checkpoint is "
        f"{checkpoint.latest(folder).name}"
    )
    ranks = launch(train, folder, nproc=2, start_method="fork")
    resumed[name] = [losses for losses, _ in ranks]
    for rank, losses in enumerate(resumed[name]):
        notes = seen(folder, rank)
        numbers = [note["step"] for note in notes]
        last = numbers[steps_before[rank] - 1]
        first = numbers[steps_before[rank]]
        again = [
            str(note["labels"])
            for note in notes
            if note["step"] == fault_at
        ]
        print(
            f"  rank {rank} made steps 1 to {last}, then {first} to "
            f"{numbers[-1]};",
            end=" ",
        )
        print(
            "all losses are those of the undisturbed run: "
            f"{losses == whole}"
        )
        print(
            f"  labels that it saw in step {fault_at}: "
            f"{' and again '.join(again)}"
        )

# %%
# The equality is exact: a checkpoint has the optimizer, the place in the order of samples and the generators of every
# rank. After SIGKILL the steps since the last checkpoint were made again with the same samples; after SIGTERM none was.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
left.plot(*whole, color="lightgray", linewidth=6, label="undisturbed")
left.plot(
    whole[0][:fault_at],
    resumed["SIGKILL"][0][1][:fault_at],
    "C0",
    label="until SIGKILL",
)
left.plot(
    whole[0][10:],
    resumed["SIGKILL"][0][1][10:],
    "C1--",
    label="started again",
)
left.plot(fault_at, whole[1][fault_at - 1], "kx", markersize=10)
left.set(
    xlabel="step of the run",
    ylabel="training loss",
    title="Killed and started again: equal losses",
)
left.legend()
origin = min(seen(runs / "SIGKILL", rank)[0]["time"] for rank in (0, 1))
for rank in (0, 1):
    notes = seen(runs / "SIGKILL", rank)
    right.plot(
        [n["time"] - origin for n in notes],
        [n["step"] for n in notes],
        ("C0o", "C1.")[rank],
        label=f"rank {rank}",
    )
right.plot(
    seen(runs / "SIGKILL", 1)[fault_at - 1]["time"] - origin,
    fault_at,
    "kx",
    markersize=10,
    label="SIGKILL",
)
right.axhline(10, color="gray", linestyle=":", label="last checkpoint")
right.set(
    xlabel="seconds since the first step",
    ylabel="step of the run",
    title="Which step each rank made when",
)
right.legend(loc="lower right")
plt.show()

# %%
# Other layouts
# -------------
#
# A checkpoint can be loaded in any layout. These runs begin at step 10 of the two ranks' checkpoint, with the model
# sharded by FSDP, sharded by tensor parallelism, and in one process. Sums are taken in a different order, so the losses
# agree up to rounding.

start = runs / "undisturbed" / "step-00000010"
for strategy, processes, batch_size in (
    ("fsdp", 2, 32),
    ("tp", 2, 64),
    ("ddp", 1, 64),
):
    name = f"{strategy} on {processes}"
    ranks = launch(
        train,
        runs / name,
        None,
        strategy,
        batch_size,
        str(start),
        nproc=processes,
        start_method="fork",
    )
    for rank, (losses, held) in enumerate(ranks):
        difference = max(
            abs(a - b) for a, b in zip(losses[1], whole[1], strict=True)
        )
        print(
            f"{name}, rank {rank}: {held:6,} parameters here, losses "
            f"differ by at most {difference:.0e}"
        )
temporary.cleanup()

# %%
# ``panther launch --max-restarts 3``, or ``launch(..., max_restarts=3)``, starts all processes again by itself.
# :doc:`/howto/resume` has all settings, :doc:`/howto/checkpoints` the functions without a Trainer, and
# :doc:`/benchmarks/survival` a hundred kills.
