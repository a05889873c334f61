"""
Tune by your own metric
=======================

:func:`panther.compress` preserves the output of a model. In use another measure often counts. :func:`panther.tune`
takes a function that measures a model, here the value of a sorting machine for digits, and searches for the smallest
model that is good enough by it.
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
# A trained network
# -----------------
#
# 1,797 digits of 8 x 8 pixels: 800 to train with, 500 for the search, and 497 that the search does not see.

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
training, searching, others = torch.randperm(len(labels)).split(
    (800, 500, 497)
)
model = nn.Sequential(
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
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4 if QUICK else 12):
    for batch in training[torch.randperm(len(training))].split(32):
        loss = nn.functional.cross_entropy(
            model(images[batch]), labels[batch]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %%
# The metric
# ----------
#
# The machine sorts an image by itself if the network is at least 90 % sure, and leaves it to a human otherwise. A right
# decision is worth 1, a wrong one costs 5, and an image for a human is worth 0. This has no useful gradient, and it can
# be any code. It gets a model and returns a number, the same one for the same model.


def value_of(model, samples):
    with torch.no_grad():
        sure, decision = (
            model(images[samples]).softmax(dim=1).max(dim=1)
        )
    right = decision == labels[samples]
    return (
        torch.where(sure < 0.9, 0.0, torch.where(right, 1.0, -5.0))
        .mean()
        .item()
    )


def evaluate(model):
    return value_of(model, searching)


print(
    f"value of an image: {evaluate(model):.3f}, and "
    f"{value_of(model, others):.3f} on other images"
)

# %%
# Search
# ------
#
# The search asks for the smallest model with at least 98 % of the value. A trial takes a fraction of a second, because
# the fits are made once. ``result.front`` has the trials that are best in size and value together.

calibration = list(images[training].split(50))
forms = (
    "dense",
    "low_rank",
    "int8_low_rank",
    "int8",
    "int6",
    "int4",
    "int3",
    "int2",
)
trials = 8 if QUICK else 40
result = pr.tune(
    model,
    evaluate,
    calibration,
    constraint=">= 98 %",
    forms=forms,
    trials=trials,
    seed=0,
)
best = result.best
print(
    f"{len(result.trials)} trials; unchanged {result.unchanged.size:,} "
    f"bytes, value {result.unchanged.metric:.3f}"
)
for trial in result.front:
    found = ", ".join(
        layer["form"] for layer in trial.plan.layers.values()
    )
    print(
        f"trial {trial.number:2}: {trial.size:7,} bytes, value "
        f"{trial.metric:6.3f}, {found}"
    )

# %%
# The best model
# --------------
#
# ``result.model`` is a new model; the one that was given is unchanged. Its report has the form of every layer.

print(result.report)
print(
    f"on other images: value {value_of(result.model, others):.3f}, "
    f"unchanged {value_of(model, others):.3f}"
)

# %%
# For comparison: calls of :func:`panther.compress` with the same forms, which know nothing of the metric.

single = []
for bits in (
    (2.25, 4.25) if QUICK else (1.25, 1.5, 1.75, 2, 2.5, 3, 4.25)
):
    small = copy.deepcopy(model)
    report = pr.compress(
        small,
        bits=bits,
        calibration=calibration,
        forms=forms,
        seed=0,
        measure_speed=False,
    )
    single.append((report.bytes_after / 1e3, evaluate(small)))
    print(
        f"compress to {bits} bits: {report.bytes_after:7,} bytes, "
        f"value {single[-1][1]:.3f}"
    )

figure, (left, right) = plt.subplots(1, 2, width_ratios=(3, 2))
left.plot(
    [t.size / 1e3 for t in result.trials],
    [t.metric for t in result.trials],
    ".",
    label="trials",
)
left.plot(
    [t.size / 1e3 for t in result.front],
    [t.metric for t in result.front],
    drawstyle="steps-post",
    label="front",
)
left.plot(
    *zip(*single, strict=True), "x", color="C2", label="pr.compress"
)
left.plot(
    best.size / 1e3, best.metric, "k*", markersize=12, label="best"
)
left.axhline(
    0.98 * result.unchanged.metric,
    color="gray",
    linestyle=":",
    label="98 % of unchanged",
)
left.set(
    xscale="log",
    xlabel="kilobytes",
    ylabel="value of an image",
    title="Trials",
)
left.set_xticks([10, 20, 50, 100], ["10", "20", "50", "100"])
left.minorticks_off()
left.legend(fontsize=8)
layers = result.report.layers
bars = right.barh(
    [layer.names[0] for layer in layers],
    [layer.bits for layer in layers],
)
right.bar_label(
    bars, [layer.form for layer in layers], padding=3, fontsize=8
)
right.set(
    xlabel="bits for a weight",
    ylabel="layer",
    title="The best model",
    xlim=(0, 1.5 * max(la.bits for la in layers)),
)
right.invert_yaxis()
plt.show()

# %%
# Where it counts, at the constraint, the search finds a model that is smaller than that of the smallest such call of
# ``compress``, because it may weight the layers differently. Elsewhere both are alike. The constraint holds for the
# images of the search; on others the value is lower, because with 500 images a search fits itself to the metric. Use as
# many as time allows.
#
# :doc:`/howto/tune` has other objectives, such as latency, and search spaces of your own. :doc:`/benchmarks/tune`
# compares the search with random search.
