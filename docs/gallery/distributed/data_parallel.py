"""
Data parallelism with equal sketches
====================================

In data parallelism every rank has the model and trains it on samples of its own; gradients are averaged. Sketched
layers send fewer bytes, because only their small factors have gradients. The random sketches must be the same on all
ranks, and :func:`~panther.distributed.data_parallel` makes them so by sending a seed.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.distributed import (
    CommunicationCounter,
    data_parallel,
    launch,
    sync_sketches,
    verify_sketches,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Different seeds are an error, and one call repairs them
# -------------------------------------------------------
#
# :func:`~panther.distributed.launch` runs a function in several processes and returns their results by rank. Here each
# rank builds the layer from a seed of its own. ``verify_sketches`` raises the same error on every rank, and
# ``sync_sketches`` sends the seeds of rank 0: a few bytes for a layer of any size.


def synchronise():
    rank = torch.distributed.get_rank()
    model = nn.Sequential(pr.nn.SKLinear(256, 256, 4, seed=rank))
    try:
        verify_sketches(model)
    except pr.errors.SketchMismatchError as error:
        message = str(error).split(":")[0]
    with CommunicationCounter() as traffic:
        sync_sketches(model)
    verify_sketches(model)
    return {
        "error": message,
        "seed": model[0].sketch_seed.tolist(),
        "bytes sent": traffic.bytes,
    }


for rank, seen in enumerate(
    launch(synchronise, nproc=2, start_method="fork")
):
    print(f"rank {rank} saw {seen}")

# %%
# Train on two processes
# ----------------------
#
# 1,797 digits of scikit-learn. Both ranks start from the model of rank 0, and each takes every second batch. The same
# function trains a dense and a sketched hidden layer, and counts the bytes that the rank sends.

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(
    len(labels), generator=torch.Generator().manual_seed(0)
)
training, held_out = order[:1437], order[1437:]
epochs = 3 if QUICK else 15


def train(hidden):
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    # Ranks have different values: data_parallel sends those of rank 0.
    torch.manual_seed(rank)
    width = 1024
    layer = (
        pr.nn.SKLinear(width, width, 16)
        if hidden == "sketched"
        else nn.Linear(width, width)
    )
    model = data_parallel(
        nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            layer,
            nn.ReLU(),
            nn.Linear(width, 10),
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # The same order on all ranks.
    shuffle = torch.Generator().manual_seed(0)
    seen = {"accuracy": [], "first label": None, "losses": []}
    with CommunicationCounter() as traffic:
        steps = 0
        for _ in range(epochs):
            batches = training[
                torch.randperm(len(training), generator=shuffle)
            ].split(32)
            pairs = len(batches) // world_size
            for batch in batches[
                rank : pairs * world_size : world_size
            ]:
                if seen["first label"] is None:
                    seen["first label"] = labels[batch[0]].item()
                loss = nn.functional.cross_entropy(
                    model(images[batch]), labels[batch]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen["losses"].append(loss.item())
                steps += 1
            with torch.no_grad():
                right = (
                    model.module(images[held_out]).argmax(1)
                    == labels[held_out]
                )
            seen["accuracy"].append(right.float().mean().item())
    return seen | {
        "bytes per step": traffic.bytes // steps,
        "weights": sum(p.sum().item() for p in model.parameters()),
    }


runs = {
    hidden: launch(train, hidden, nproc=2, start_method="fork")
    for hidden in ("dense", "sketched")
}
for hidden, ranks in runs.items():
    for rank, seen in enumerate(ranks):
        print(
            f"{hidden:8} rank {rank}: first label "
            f"{seen['first label']}, first loss "
            f"{seen['losses'][0]:.4f}, "
            f"{seen['bytes per step']:,} bytes a step, accuracy "
            f"{seen['accuracy'][-1]:.3f}, "
            f"sum of the weights {seen['weights']:.4f}"
        )

# %%
# The two ranks saw different samples, so their losses differ. Their weights end equal, because every step averaged the
# gradients. The sketched network sends as many times fewer bytes as its parameters are fewer.

figure, (left, right) = plt.subplots(1, 2)
for hidden, ranks in runs.items():
    left.plot(
        range(1, epochs + 1),
        ranks[0]["accuracy"],
        marker="o",
        label=hidden,
    )
left.set(xlabel="epoch", ylabel="accuracy on held-out digits")
left.legend()
names = list(runs)
right.bar(
    names,
    [runs[name][0]["bytes per step"] / 1e6 for name in names],
    color=["C0", "C1"],
)
right.set(ylabel="MB that a rank sends in a step")
plt.show()

# %%
# :doc:`/howto/data-parallel` describes the strategies ``"fsdp"`` and ``"replicate"`` and compressed gradients.
