"""
Compress a vision model
=======================

This example trains a small convolutional network on digits and makes it smaller in three ways: by
:func:`panther.compress` within budgets of bits, by low-rank convolutions made from the trained ones
(:meth:`LowRankConv2d.from_conv <panther.nn.LowRankConv2d.from_conv>`) with three more epochs, and by sketched
convolutions trained from scratch.
"""

import copy
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The data and a dense network
# ----------------------------
#
# 1,797 digits of 8 x 8 pixels; 500 are held out.

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
training, held_out = order[:-500], order[-500:]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train(model, epochs, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in training[torch.randperm(len(training))].split(32):
            loss = nn.functional.cross_entropy(
                model(images[batch]), labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accuracy(model):
    with torch.no_grad():
        return (
            (model(images[held_out]).argmax(1) == labels[held_out])
            .float()
            .mean()
            .item()
        )


epochs = 2 if QUICK else 8
dense = train(network(), epochs, 1e-3)
parameters = sum(p.numel() for p in dense.parameters())
print(
    f"dense: {parameters:,} parameters, accuracy {accuracy(dense):.3f}"
)

# %%
# Compress without training
# -------------------------
#
# ``bits`` is a budget: the average number of bits for each weight of the eligible layers, scales and factors included.
# 32 bits are the original. Calibration takes training images without labels.

calibration = list(images[training[:768]].split(64))
bits = (4.25,) if QUICK else (2.25, 4.25, 8.25)
compressed = []
for budget in bits:
    model = copy.deepcopy(dense)
    report = pr.compress(
        model,
        bits=budget,
        calibration=calibration,
        seed=0,
        measure_speed=False,
    )
    compressed.append((report.bytes_after / 1e3, accuracy(model)))
    print(
        f"{budget} bits: {report.bytes_after:7,} bytes, accuracy "
        f"{compressed[-1][1]:.3f}"
    )
print(report)

# %%
# Low-rank convolutions from trained ones
# ---------------------------------------
#
# Nearly all parameters are in the second and third convolution. ``from_conv`` makes the nearest layer of a given rank.
# The approximation is coarse, so it is trained for three more epochs.


def low_rank(rank):
    model = copy.deepcopy(dense)
    for i in (2, 5):
        model[i] = pr.nn.LowRankConv2d.from_conv(dense[i], 2 * rank)
    return model


ranks = (4, 8) if QUICK else (2, 4, 8, 16)
at_once, trained, scratch = [], [], []
for rank in ranks:
    model = low_rank(rank)
    size = 4e-3 * sum(p.numel() for p in model.parameters())
    at_once.append((size, accuracy(model)))
    trained.append(
        (size, accuracy(train(model, 1 if QUICK else 3, 5e-4)))
    )

# %%
# Sketched convolutions from scratch
# ----------------------------------
#
# A new SKConv2d trains ``S`` and keeps the random signs of ``U``, which are stored as a seed.

for rank in ranks:
    model = network()
    model[2] = pr.nn.SKConv2d(
        32, 64, 3, padding=1, low_rank=rank, seed=0
    )
    model[5] = pr.nn.SKConv2d(
        64, 128, 3, padding=1, low_rank=rank, seed=1
    )
    scratch.append(
        (
            4e-3 * sum(p.numel() for p in model.parameters()),
            accuracy(train(model, epochs + 3, 1e-3)),
        )
    )

figure, axes = plt.subplots(figsize=(6, 4))
for name, points in (
    ("pr.compress, no training", compressed),
    ("LowRankConv2d.from_conv, no training", at_once),
    ("LowRankConv2d.from_conv, 3 epochs", trained),
    ("SKConv2d from scratch", scratch),
):
    axes.plot(*zip(*points, strict=True), marker="o", label=name)
axes.scatter(
    4e-3 * parameters,
    accuracy(dense),
    color="black",
    label="dense, float32",
    zorder=3,
)
axes.set(
    xscale="log",
    xlabel="kilobytes of the model, each tick about twice the last",
    ylabel="held-out digits read correctly",
    ylim=(0.7, 1),
)
axes.set_xticks(
    [30, 50, 100, 200, 400], ["30", "50", "100", "200", "400"]
)
axes.minorticks_off()
axes.yaxis.set_major_formatter("{x:.0%}")
axes.legend(loc="lower right")
plt.show()

# %%
# An accuracy of 98 % on 500 images has a standard error of 0.6 points, so close curves do not differ. What is clear: a
# few bits for each weight keep the accuracy without training; a small rank needs the epochs afterwards.
#
# When it does not pay
# --------------------
#
# The first convolution has one input channel. Its kernel is a matrix of 32 x 9, and a low-rank layer would be larger,
# which the layer reports. Depthwise convolutions are a similar case. :doc:`/concepts/skconv` has measured times.

import warnings  # noqa: E402

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first = pr.nn.LowRankConv2d.from_conv(dense[0], 8)
print(
    caught[0].category.__name__,
    first.down.numel() + first.up.numel(),
    "numbers in place of",
    dense[0].weight.numel(),
)
