"""
Tensor parallelism of SKLinear
==============================

In tensor parallelism every rank has a shard of each layer. :func:`~panther.distributed.tensor_parallel` shards a whole
model, and :class:`~panther.distributed.ColwiseSKParallel` and :class:`~panther.distributed.RowwiseSKParallel` shard
single layers. A sketched pair sends 2R numbers for each row, a dense pair its full width. The pair of this example
learns to reproduce patches of a photograph, on two processes as in one.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import nn

import panther as pr
from panther.distributed import (
    CommunicationCounter,
    launch,
    make_mesh,
    tensor_parallel,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
side = 16 if QUICK else 32
width = side**2

# %%
# What each rank holds
# --------------------
#
# The first layer of a pair is sharded by its outputs, the second by its inputs, so nothing is gathered between them.
# Parameters are DTensors: each rank has a shard, and knows the full shape. The random sketches are drawn block by block
# from the seed, so no rank ever has the whole sketch of a sharded axis.


def pair(rank_of_sketch):
    torch.manual_seed(0)
    if rank_of_sketch is None:
        return nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
    return nn.Sequential(
        pr.nn.SKLinear(width, 4 * width, rank_of_sketch),
        nn.GELU(),
        pr.nn.SKLinear(4 * width, width, rank_of_sketch),
    )


def shards():
    report = tensor_parallel(pair(8), make_mesh(tp=2)["tp"])
    seen = {
        name: (tuple(p.shape), tuple(p.to_local().shape))
        for name, p in report.model.named_parameters()
    }
    return str(report), seen


ranks = launch(shards, nproc=2, start_method="fork")
print(ranks[0][0])
for name in ranks[0][1]:
    shape, own = ranks[0][1][name]
    print(
        f"{name:7} {shape!s:13} rank 0 has {own!s:12} rank 1 has "
        f"{ranks[1][1][name][1]}"
    )

# %%
# Equal to one process
# --------------------
#
# The sharded pair has the losses and the outputs of the unsharded one. Its inputs and targets are square patches of a
# photograph of scikit-learn, in grey.

photograph = torch.tensor(load_sample_image("china.jpg"))
grey = photograph.float().mean(dim=2) / 255
windows = grey.unfold(0, side, side).unfold(1, side, side)
patches = windows.flatten(2).flatten(0, 1)  # (patches, side**2)
patches = patches - patches.mean(dim=1, keepdim=True)


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(10 if QUICK else 40):
        loss = nn.functional.mse_loss(model(patches), patches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model(patches)


def train_sharded():
    mesh = make_mesh(tp=2)["tp"]
    return train(tensor_parallel(pair(8), mesh).model)


losses, output = train(pair(8))
print(f"one process: losses {losses[0]:.5f} to {losses[-1]:.5f}")
for rank, (rank_losses, rank_output) in enumerate(
    launch(train_sharded, nproc=2, start_method="fork")
):
    difference = (rank_output - output).abs().max().item()
    print(
        f"rank {rank}: losses {rank_losses[0]:.5f} to "
        f"{rank_losses[-1]:.5f}, largest difference of the outputs "
        f"{difference:.1e}"
    )

# %%
# Bytes for each row
# ------------------
#
# :class:`~panther.distributed.CommunicationCounter` counts what a rank passes to collective operations, here in a
# forward and a backward of 32 patches.


def traffic(rank_of_sketch, ranks):
    model = tensor_parallel(
        pair(rank_of_sketch), make_mesh(tp=ranks)["tp"]
    ).model
    inputs = patches[:32].clone().requires_grad_()
    with CommunicationCounter() as counter:
        model(inputs).sum().backward()
    return counter.bytes / len(inputs)


sketches = (None, 8, 32) if QUICK else (None, 8, 16, 32, 64)
sent = [
    launch(traffic, rank, 2, nproc=2, start_method="fork")[0]
    for rank in sketches
]
labels = [
    "dense" if rank is None else f"R = {rank}" for rank in sketches
]
for label, value in zip(labels, sent, strict=True):
    print(
        f"{label:7} {value:8,.0f} bytes a row, {sent[0] / value:5.1f} "
        "times fewer"
    )

figure, axes = plt.subplots(figsize=(5, 3.6))
axes.bar(labels, sent, color=["gray"] + ["C0"] * (len(sent) - 1))
axes.set(
    yscale="log",
    ylabel="bytes that a rank sends for a row",
    title=f"{width} to {4 * width} to {width} features",
)
plt.show()

# %%
# :doc:`/howto/tensor-parallel` has attention by heads, plans of your own, sequence parallelism and checkpointing.
