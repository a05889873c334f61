"""
A custom sketching operator
===========================

A :class:`~panther.sketch.SketchingOperator` is a random matrix S that is a function of a seed. This example writes a
new kind, uniform row sampling, tests it against its contract, and compares the distortion of four kinds of sketches.
"""

import math
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import panther as pr
from panther.sketch import SketchingOperator

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Three methods
# -------------
#
# ``_block`` returns the entries at some rows and columns without drawing the others; ``_apply`` and
# ``_apply_transposed`` are the products. The base class checks arguments, converts dtypes, and adds ``S @ A``,
# ``A @ S.T``, transposes, batches and gradients. All randomness follows from ``self.seed`` and ``self.stream``, so
# every process that knows the seed has the same matrix. Each row of this sketch selects one row of A.


class RowSampling(SketchingOperator):
    """Choose d of m rows, with replacement.

    The rows are scaled, so that E ||S x||^2 = ||x||^2.
    """

    def _rows(self):
        generator = torch.Generator().manual_seed(
            self.seed + (self.stream << 32)
        )
        return torch.randint(
            self.shape[1], (self.shape[0],), generator=generator
        )

    def _factor(self):
        return (
            math.sqrt(self.shape[1] / self.shape[0])
            if self.scale
            else 1.0
        )

    def _block(self, rows, cols):
        chosen = self._rows()[rows.start : rows.stop, None]
        return (chosen == torch.arange(cols.start, cols.stop)).to(
            self.dtype
        ) * self._factor()

    def _apply(self, A):
        return A[..., self._rows(), :] * self._factor()

    def _apply_transposed(self, A):
        shape = (*A.shape[:-2], self.shape[1], A.shape[-1])
        return (
            A.new_zeros(shape).index_add_(-2, self._rows(), A)
            * self._factor()
        )


# %%
# The contract
# ------------
#
# A product is a product with the dense matrix; a block is a part of it; the same seed gives the same operator; squared
# norms are preserved in expectation; gradients flow through. The matrix has the middle pixels of 300 digits as columns.

X = torch.tensor(load_digits().data)
S = RowSampling(40, 300, seed=7, dtype=torch.float64)
A = (X[:300, 26:31] / 16).requires_grad_()
print("product:   ", torch.allclose(S @ A, S.dense() @ A))
print(
    "transposed:",
    torch.allclose(S.T @ (S @ A), S.dense().T @ S.dense() @ A),
)
print(
    "block:     ",
    torch.equal(
        S.block(range(10, 20), range(100, 200)),
        S.dense()[10:20, 100:200],
    ),
)
print(
    "same seed: ",
    torch.equal(
        RowSampling(40, 300, seed=7, dtype=torch.float64).dense(),
        S.dense(),
    ),
)
x = X[:300, 26]
norms = torch.stack(
    [
        (RowSampling(40, 300, seed=s, dtype=torch.float64) @ x)
        .square()
        .sum()
        for s in range(2000)
    ]
)
print(
    "mean of ||S x||^2 / ||x||^2 over 2,000 seeds: "
    f"{norms.mean() / x.square().sum():.3f}"
)
print("gradients: ", torch.autograd.gradcheck(lambda A: S @ A, A))

# %%
# Distortion
# ----------
#
# A sketch preserves the geometry of the columns of A if all singular values of S U are close to 1, where U is an
# orthonormal basis. Row sampling does this for matrices whose rows matter equally, and fails where few rows carry a
# direction. The second matrix is the first one with one row multiplied by 1,000.

X = X[:, X.std(dim=0) > 0.5]
spiked = X.clone()
spiked[5] *= 1000
kinds = {
    "RowSampling": RowSampling,
    "SignSketch": pr.sketch.SignSketch,
    "SparseSketch": pr.sketch.SparseSketch,
    "SRHT": pr.sketch.SRHT,
}
sizes = (200, 800) if QUICK else (100, 200, 400, 800, 1600)
seeds = 3 if QUICK else 20
figure, panels = plt.subplots(1, 2, sharey=True)
for axes, matrix, title in (
    (panels[0], X, "digits"),
    (panels[1], spiked, "digits, one row times 1,000"),
):
    U, _ = torch.linalg.qr(matrix)
    for name, kind in kinds.items():
        worst = []
        for d in sizes:
            found = []
            for seed in range(seeds):
                values = torch.linalg.svdvals(
                    kind(d, len(matrix), seed=seed, dtype=torch.float64)
                    @ U
                )
                found.append(
                    max(
                        values.max().item() - 1, 1 - values.min().item()
                    )
                )
            worst.append(sorted(found)[seeds // 2])
        axes.plot(sizes, worst, marker="o", label=name)
        print(
            f"{title:28} {name:13}", " ".join(f"{w:.2f}" for w in worst)
        )
    axes.set(xscale="log", xlabel="sketch size d", title=title)
panels[0].set_ylabel("largest distortion, median over seeds")
panels[0].legend()
plt.show()

# %%
# In the other three kinds every row of A takes part in the product, so a single important row is not lost.
# :doc:`/concepts/sketches` has their costs, and CONTRIBUTING.md says how to add a kind to Panther.
