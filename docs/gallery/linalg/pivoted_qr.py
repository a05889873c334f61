"""
Pivoted QR: choose columns that span the rest
=============================================

:func:`panther.linalg.cqrrpt` is QR with column pivoting for tall matrices, computed with matrix products. The pivots
are a selection of columns. This example selects the pixels that determine all other pixels of handwritten digits, and
compares the error and the time with scipy's pivoted QR.
"""

import os
import time

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
import torch
from sklearn.datasets import load_digits

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Which pixels determine the others?
# ----------------------------------
#
# Each column is a pixel of 1,797 digits. The first k pivots are k pixels; all other pixels are then linear functions of
# them. For comparison: the k pixels of largest variance, and the k best linear combinations of pixels, which no
# selection can beat.

digits = load_digits()
X = torch.tensor(digits.data)
X = X - X.mean(dim=0)
Q, R, P = pr.linalg.cqrrpt(X, seed=0)
print(
    "rank:",
    Q.shape[1],
    "of",
    X.shape[1],
    "pixels: the others are constant",
)


def unexplained(columns):
    C = X[:, columns]
    return (
        torch.linalg.norm(X - C @ torch.linalg.lstsq(C, X).solution)
        / torch.linalg.norm(X)
    ).item()


counts = range(2, 42, 8 if QUICK else 3)
by_variance = X.var(dim=0).argsort(descending=True)
singular = torch.linalg.svdvals(X).square()
figure, (left, right) = plt.subplots(1, 2, width_ratios=(2, 1))
left.plot(
    counts,
    [unexplained(P[:k]) for k in counts],
    marker="o",
    label="pivots of cqrrpt",
)
left.plot(
    counts,
    [unexplained(by_variance[:k]) for k in counts],
    marker="o",
    label="pixels of largest variance",
)
left.plot(
    counts,
    [(singular[k:].sum() / singular.sum()).sqrt() for k in counts],
    ":",
    label="best combinations (SVD)",
)
left.set(
    xlabel="pixels",
    ylabel="part of the images that is not explained",
    ylim=(0, 1),
)
left.legend(fontsize=8)
order = torch.full((64,), float("nan"))
order[P[:20]] = torch.arange(1.0, 21)
right.imshow(digits.images.mean(axis=0), cmap="gray_r", vmax=32)
for position in P[:20].tolist():
    right.text(
        position % 8,
        position // 8,
        int(order[position]),
        ha="center",
        va="center",
        color="C3",
        fontsize=8,
    )
right.set(title="the first 20 pivots", xticks=[], yticks=[])
plt.show()

# %%
# Error and time
# --------------
#
# These matrices are random, because their singular values are then known: from 1 to 1e-10, and so an accurate
# factorisation has full rank. Both factorisations satisfy ``M[:, P] = Q @ R`` up to rounding, with orthonormal Q.

shapes = (
    ((4096, 64), (8192, 128))
    if QUICK
    else ((8192, 64), (16384, 128), (16384, 256), (32768, 512))
)
times = {"scipy.linalg.qr(pivoting=True)": [], "pr.linalg.cqrrpt": []}
for m, n in shapes:
    M = torch.randn(m, n, dtype=torch.float64) * torch.logspace(
        0, -10, n, dtype=torch.float64
    )
    begun = time.process_time()
    Q, R, P = scipy.linalg.qr(M.numpy(), mode="economic", pivoting=True)
    times["scipy.linalg.qr(pivoting=True)"].append(
        time.process_time() - begun
    )
    theirs = np.linalg.norm(M.numpy()[:, P] - Q @ R) / np.linalg.norm(M)
    begun = time.process_time()
    Q, R, P = pr.linalg.cqrrpt(M, seed=0)
    times["pr.linalg.cqrrpt"].append(time.process_time() - begun)
    ours = (
        torch.linalg.norm(M[:, P] - Q @ R) / torch.linalg.norm(M)
    ).item()
    loss = torch.linalg.norm(Q.T @ Q - torch.eye(Q.shape[1])).item()
    print(
        f"{m:6} x {n:3}: error {theirs:.0e} and {ours:.0e}, loss of "
        f"orthogonality {loss:.0e}, rank {Q.shape[1]}"
    )

figure, axes = plt.subplots()
for name, values in times.items():
    axes.plot(
        [f"{m} x {n}" for m, n in shapes],
        values,
        marker="o",
        label=name,
    )
axes.set(yscale="log", ylabel="CPU time, s")
axes.legend()
plt.show()

# %%
# A selection of columns is also the interpolative form of :func:`panther.compress`, which keeps some columns of a
# weight.
# :doc:`/benchmarks/linalg` has times for more shapes and conditions.
