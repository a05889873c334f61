"""
Randomized SVD and the PCA of photographs
=========================================

:func:`panther.linalg.randomized_svd` computes the leading singular triplets of a large matrix. This example compares
its error and its time with ``torch.svd_lowrank``, ``scipy.sparse.linalg.svds`` and scikit-learn's ``randomized_svd``,
and then finds the principal components of the patches of two photographs.
"""

import os
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.sparse.linalg import svds
from sklearn.datasets import load_sample_images
from sklearn.utils.extmath import randomized_svd as sklearn_svd

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The data
# --------
#
# scikit-learn brings two photographs of 427 x 640 pixels. Each row of the matrix is a patch of 16 x 16 pixels in three
# colours, minus the mean patch: 768 columns.

size = 16
patches = []
for image in load_sample_images().images:
    tensor = torch.tensor(image).permute(2, 0, 1).float() / 255
    step = 16 if QUICK else 6
    # (3, rows, columns, 16, 16)
    windows = tensor.unfold(1, size, step).unfold(2, size, step)
    patches.append(
        windows.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    )
X = torch.cat(patches)
mean = X.mean(dim=0)
X = X - mean
print("matrix:", tuple(X.shape))

# %%
# Four ways to 32 components
# --------------------------
#
# The smallest possible error at rank k is known from the whole SVD, which takes much longer. An error of 1 in the
# figure is this optimum. Times are medians of five calls in turns.

k = 32
A, exact = X.numpy(), torch.linalg.svdvals(X.double())
optimum = exact[k:].square().sum().sqrt().item()


def product(U, S, V):
    return (
        torch.as_tensor(np.ascontiguousarray(U))
        * torch.as_tensor(np.ascontiguousarray(S))
        @ torch.as_tensor(np.ascontiguousarray(V))
    )


methods = {
    "torch.svd_lowrank, niter=2": lambda: (lambda U, S, V: (U, S, V.T))(
        *torch.svd_lowrank(X, k + 10, niter=2)
    ),
    "scikit-learn": lambda: sklearn_svd(A, k, random_state=0),
    "scipy svds (ARPACK)": lambda: svds(A, k, rng=0),
    "pr.linalg.randomized_svd": lambda: (lambda U, S, V: (U, S, V.T))(
        *pr.linalg.randomized_svd(X, k, seed=0)
    ),
}
times, errors = {name: [] for name in methods}, {}
for _ in range(2 if QUICK else 5):
    for name, method in methods.items():
        begun = time.perf_counter()
        U, S, V = method()
        times[name].append(time.perf_counter() - begun)
        # The largest k, in descending order.
        order = np.argsort(-np.asarray(S))[:k].copy()
        low_rank = product(
            np.asarray(U)[:, order],
            np.asarray(S)[order],
            np.asarray(V)[order],
        )
        errors[name] = (X - low_rank).double().norm().item() / optimum

for name in methods:
    print(
        f"{name:28} {1e3 * np.median(times[name]):6.1f} ms   error "
        f"{errors[name]:.4f} of the optimum"
    )

# %%
# The default of Panther stops when further blocks of its search space would reduce the error by less than about 0.2 %.
# ``n_iter=10`` continues to the optimum.

figure, axes = plt.subplots()
for name in methods:
    axes.scatter(
        1e3 * np.median(times[name]),
        100 * (errors[name] - 1),
        s=60,
        label=name,
    )
axes.set(
    xscale="log",
    xlabel="time, ms",
    ylabel="error above the optimum, %",
    title=f"{tuple(X.shape)}, rank {k}",
)
axes.legend()
plt.show()

# %%
# An error estimate without a second factorisation
# ------------------------------------------------
#
# ``return_error=True`` multiplies the difference by a few random vectors. On unseen data there is no optimum to compare
# with, so this is how you know whether k is large enough.

for rank in (8, 32, 128):
    U, S, V, error = pr.linalg.randomized_svd(
        X, rank, seed=0, return_error=True
    )
    true = (X - U * S @ V.T).double().norm()
    print(
        f"k = {rank:3}: estimated {error.frobenius:.2f}, true "
        f"{true:.2f}, at most {error.upper:.2f} (probability 0.999)"
    )

# %%
# The components
# --------------
#
# The first components of natural images are brightness and edges. The last row shows patches, and the same patches from
# 32 numbers each instead of 768.

U, S, V = pr.linalg.randomized_svd(X, k, seed=0)


def show(axes, patch, title=""):
    patch = patch.reshape(3, size, size).permute(1, 2, 0)
    axes.imshow(
        ((patch - patch.min()) / (patch.max() - patch.min())).numpy()
    )
    axes.set_title(title, fontsize=9)
    axes.axis("off")


figure, grid = plt.subplots(3, 8, figsize=(7, 3.2))
for i in range(8):
    show(grid[0, i], V[:, i], f"component {i + 1}")
chosen = torch.linspace(0, len(X) - 1, 8).long()
restored = (X[chosen] @ V) @ V.T
for column, (image, approximation) in enumerate(
    zip(X[chosen] + mean, restored + mean, strict=True)
):
    show(grid[1, column], image, "768 numbers")
    show(grid[2, column], approximation, "32 numbers")
plt.show()

# %%
# :doc:`/benchmarks/linalg` has the same comparison for other spectra and sizes, with the cases in which the randomized
# SVD is slower.
