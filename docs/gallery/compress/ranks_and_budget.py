"""
Choose R and the budget from the spectra
========================================

How small can a trained model become? The singular values of its weights say it, if they are taken in the metric of the
data: with the inputs that occur and the effect of each output. This example computes these spectra for a perceptron,
reads ranks off them, compares the predicted with the measured error of :func:`panther.compress` over budgets, and
chooses the sketch size R of :class:`~panther.nn.SKLinear`.
"""

import copy
import os
from functools import partial

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# A trained perceptron
# --------------------
#
# 1,797 digits of 8 x 8 pixels; 500 are held out.

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
training, held_out = order[:-500], order[-500:]
width = 256 if QUICK else 512


def perceptron(hidden):
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        hidden(),
        nn.ReLU(),
        hidden(),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def train(model):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
    )
    for _ in range(3 if QUICK else 12):
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


model = train(perceptron(lambda: nn.Linear(width, width)))
print(f"accuracy {accuracy(model):.3f}")

# %%
# Spectra
# -------
#
# With A the covariance of a layer's inputs and G the second moment of the gradients of random directions of the model's
# output, an error D of the weight changes the output by about ``trace(G D A D^T)`` in the mean square. For A = L L^T and
# G = R^T R this is the squared norm of R D L. So the singular values of R W L say what each rank keeps of the output, where
# those of W say what it keeps of the weight (:doc:`/concepts/metric`).

inputs, outputs, h = {}, {}, images[training]
for name, module in model.named_children():
    if isinstance(module, nn.Linear):
        inputs[name], outputs[name] = h.detach(), module(h)
        outputs[name].retain_grad()
    h = outputs[name] if name in outputs else module(h)
h.backward(torch.randn_like(h))
# Of the output's variation.
size = (h - h.mean(dim=0)).square().sum(dim=1).mean().item()


def root(M):
    """Return a triangular L with L L^T = M, and a small ridge."""
    return torch.linalg.cholesky(
        M
        + 1e-4 * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype)
    )


spectra, plain = {}, {}
for name, y in outputs.items():
    W = model.get_submodule(name).weight.detach().double()
    X = inputs[name].double()
    g = y.grad.double()
    L, R = root(X.T.cov(correction=0)), root(g.T @ g / len(g)).T
    spectra[name] = torch.linalg.svdvals(R @ W @ L)
    plain[name] = torch.linalg.svdvals(W)


def lost(name, rank):
    """Return the share of the mean square that a rank loses."""
    return spectra[name][rank:].square().sum().item() / size


print("ranks for an error of the output of 10 %, 3 % and 1 %:")
for name in outputs:
    ranks = [
        next(r for r in range(width) if lost(name, r) < bound**2)
        for bound in (0.1, 0.03, 0.01)
    ]
    shape = tuple(model.get_submodule(name).weight.shape)
    print(f"layer {name} {shape!s:10}: {ranks}")

figure, (left, right) = plt.subplots(1, 2, sharey=True)
for name in outputs:
    left.semilogy(plain[name] / plain[name][0], label=f"layer {name}")
    right.semilogy(
        spectra[name] / spectra[name][0], label=f"layer {name}"
    )
left.set(
    xlabel="number",
    ylabel="singular value, relative",
    title="Of the weights",
    ylim=(1e-4, 1.5),
)
right.set(xlabel="number", title="In the metric of the data")
right.legend()
plt.show()

# %%
# The weights alone look as if they had nearly full rank. In the metric their singular values fall quickly.
#
# Error against budget
# --------------------
#
# ``pr.compress`` computes the same spectra and gives the bytes to the layers that gain most. ``predicted_error`` of its
# report is the root of the mean square that all layers lose together; ``measured_error`` is that of the output on
# batches which it did not use for the fits. The third column of errors is computed from the spectra above, at the ranks
# of the report.

calibration = list(images[training].split(32))
budgets = (
    (0.05, 0.2) if QUICK else (0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)
)
reports, accuracies = [], []
print(
    "budget  predicted  measured  the spectra   accuracy  ranks of the "
    "layers"
)
for budget in budgets:
    small = copy.deepcopy(model)
    report = pr.compress(
        small,
        budget,
        calibration,
        forms=("dense", "low_rank"),
        rank_multiple=2,
        seed=0,
        measure_speed=False,
    )
    reports.append(report)
    accuracies.append(accuracy(small))
    ranks = {
        layer.names[0]: layer.rank
        for layer in report.layers
        if layer.rank
    }
    ours = sum(lost(name, rank) for name, rank in ranks.items()) ** 0.5
    values = (report.predicted_error, report.measured_error)
    errors = "{:9.3f} {:9.3f} {:12.3f}".format(*values, ours)
    shown = ", ".join(str(ranks.get(name, "dense")) for name in outputs)
    print(f"{budget:6.1%}  {errors}   {accuracies[-1]:8.3f}  {shown}")

# %%
# The prediction is of first order and close while the error is less than a third of the output. ``max_error`` searches
# for the smallest budget with a given measured error:

small = copy.deepcopy(model)
report = pr.compress(
    small,
    max_error=0.05,
    calibration=calibration,
    forms=("dense", "low_rank"),
    rank_multiple=2,
    seed=0,
    measure_speed=False,
)
print(
    f"max_error=0.05: a budget of {report.eligible_ratio:.1%}, "
    f"accuracy {accuracy(small):.3f}"
)

# %%
# R of a layer that is trained from scratch
# -----------------------------------------
#
# A new :class:`~panther.nn.SKLinear` with the sketch size R has rank 2 R at most, half of each side random, and trains
# R (in + out) numbers; from R = width / 2 on it takes as much work as a dense layer (:doc:`/concepts/sklinear`). The
# spectra say about how large R has to be: the rank at which 1 % of the output is lost. Here the hidden layers are
# sketched from the start.

sizes = (2, 8) if QUICK else (1, 2, 4, 8, 16, 32)
found = []
for R in sizes:
    hidden = partial(pr.nn.SKLinear, width, width, R)
    several = [
        accuracy(train(perceptron(hidden)))
        for _ in range(1 if QUICK else 3)
    ]
    found.append(sum(several) / len(several))
    print(
        f"R = {R:2}: {2 * R / width:.1%} of the numbers of a hidden "
        f"layer, mean accuracy {found[-1]:.3f}"
    )

figure, (left, right) = plt.subplots(1, 2)
left.loglog(
    [100 * b for b in budgets],
    [r.predicted_error for r in reports],
    marker="o",
    label="predicted",
)
left.loglog(
    [100 * b for b in budgets],
    [r.measured_error for r in reports],
    marker="o",
    label="measured",
)
left.set(
    xlabel="budget, % of the bytes",
    ylabel="relative error of the output",
    title="Compressed",
)
left.set_xticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
left.minorticks_off()
left.legend()
right.plot(sizes, found, marker="o", label="sketched")
right.axhline(
    accuracy(model), color="gray", linestyle=":", label="dense"
)
right.set(
    xscale="log",
    xlabel="sketch size R",
    ylabel="accuracy, held out",
    title="Trained from scratch",
)
right.set_xticks(sizes, [str(R) for R in sizes])
right.minorticks_off()
right.legend()
plt.show()

# %%
# Differences of a point are not significant, with 500 images and few seeds.
#
# :doc:`/howto/compress` has the other budgets and forms. :doc:`/examples/layers/from_scratch` compares sketched layers
# with others of equal bytes, and :doc:`/benchmarks/train-scratch` does it on more tasks.
