"""
Least squares on ill-conditioned data
=====================================

:func:`panther.linalg.sketch_lstsq` solves problems with many more rows than unknowns. It sketches the matrix, takes the
R of the sketch's QR as a preconditioner, and iterates on the matrix itself. This example fits a polynomial, whose
columns are almost dependent, to a photograph, and compares the residual and the time with direct solvers and with the
normal equations.
"""

import math
import os
import time

import matplotlib.pyplot as plt
import scipy.linalg
import torch
from sklearn.datasets import load_sample_image

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Monomials: a condition number of 4e9
# ------------------------------------
#
# All 378 monomials of a pixel's row and column up to degree 26, fitted to the brightness of a photograph of scikit-learn.
# The normal equations square the condition number, which is more than float64 has digits for.

stride, degree = (3 if QUICK else 2), 26
photograph = torch.tensor(load_sample_image("flower.jpg"))
grey = photograph[::stride, ::stride].double().mean(dim=2) / 255
u, v = torch.meshgrid(
    *(torch.linspace(-1, 1, n).double() for n in grey.shape),
    indexing="ij",
)
A = torch.stack(
    [
        (u**i * v**j).flatten()
        for i in range(degree + 1)
        for j in range(degree + 1 - i)
    ],
    dim=1,
)
b = grey.flatten()
condition = torch.linalg.cond(torch.linalg.qr(A, mode="r").R)
print(f"{A.shape[0]} x {A.shape[1]}, condition number {condition:.1e}")


def normal_equations(A, b):
    return torch.linalg.solve(A.T @ A, A.T @ b)


def sketched(A, b):
    result = pr.linalg.sketch_lstsq(A, b, seed=0)
    iterations.append(result.iterations)
    return result.x


iterations = []
solvers = {
    "normal equations": normal_equations,
    "scipy gelsd": lambda A, b: torch.from_numpy(
        scipy.linalg.lstsq(A.numpy(), b.numpy())[0]
    ),
    "torch gels": lambda A, b: torch.linalg.lstsq(
        A, b[:, None], driver="gels"
    ).solution[:, 0],
    "pr.linalg.sketch_lstsq": sketched,
}
fits = {name: A @ solve(A, b) for name, solve in solvers.items()}
residuals = {
    name: torch.linalg.norm(fit - b) for name, fit in fits.items()
}
smallest = min(residuals.values())
for name, residual in residuals.items():
    print(
        f"{name:24} residual {residual:.9f}, "
        f"{residual / smallest - 1:.0e} above the smallest"
    )
print("iterations of sketch_lstsq:", iterations[0])

# %%
# The direct solvers and ``sketch_lstsq`` reach the same residual, up to rounding. The normal equations do not.

pictures = {
    "photograph": b,
    "sketch_lstsq": fits["pr.linalg.sketch_lstsq"],
    "normal equations": fits["normal equations"],
}
figure, panels = plt.subplots(1, 3, figsize=(7, 1.8))
for axes, (name, picture) in zip(panels, pictures.items(), strict=True):
    axes.imshow(
        picture.reshape(grey.shape), cmap="gray", vmin=0, vmax=1
    )
    axes.set_title(name, fontsize=9)
    axes.axis("off")
plt.show()

# %%
# Conditions from 1 to 1e12
# -------------------------
#
# These matrices are random, because the best fit is then known: they have singular values from 1 down to the inverse of
# the condition number. The right-hand side is a vector of their range, in which all singular directions have an equal
# share, plus noise that is orthogonal to the range. The error is the distance of the fitted values from the best fit,
# relative to the noise.

m, n = (30_000, 400) if QUICK else (40_000, 500)
conditions = (1e0, 1e8) if QUICK else (1e0, 1e4, 1e8, 1e12)
times = {name: [] for name in solvers}
errors = {name: [] for name in solvers}
U, _ = torch.linalg.qr(torch.randn(m, n, dtype=torch.float64))
V, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
best, noise = U.sum(dim=1), 0.1 * torch.randn(m, dtype=torch.float64)
for _ in range(2):  # the second time removes what rounding left
    noise -= U @ (U.T @ noise)
iterations.clear()
for condition in conditions:
    B = (
        U
        * torch.logspace(
            0, -math.log10(condition), n, dtype=torch.float64
        )
        @ V.T
    )
    for name, solve in solvers.items():
        begun = time.process_time()
        try:
            x = solve(B, best + noise)
            error = (
                torch.linalg.norm(B @ x - best)
                / torch.linalg.norm(noise)
            ).item()
        except torch.linalg.LinAlgError:  # singular in float64
            error = float("nan")
        times[name].append(time.process_time() - begun)
        errors[name].append(error)

figure, (left, right) = plt.subplots(1, 2)
for name in solvers:
    left.plot(conditions, errors[name], marker="o", label=name)
    right.plot(conditions, times[name], marker="o")
    print(
        f"{name:24}",
        " ".join(
            f"{e:.0e} in {s:.2f} s"
            for e, s in zip(errors[name], times[name], strict=True)
        ),
    )
left.set(
    xscale="log",
    yscale="log",
    xlabel="condition number",
    ylabel="error of the fitted values",
)
left.legend(fontsize=8)
right.set(
    xscale="log",
    xlabel="condition number",
    ylabel="CPU time, s",
    ylim=(0, None),
)
plt.show()
for condition, count in zip(conditions, iterations, strict=True):
    print(
        f"condition {condition:.0e}: {count} iterations of sketch_lstsq"
    )

# %%
# With direct solvers and with ``sketch_lstsq`` the error grows with the condition number, because even rounding the
# matrix to float64 changes the fit by as much. With the normal equations it grows with the square, and from 1e8 on the
# fit is useless. ``sketch_lstsq`` ends when it has the accuracy of a direct solver, so it takes fewer iterations the
# worse the condition is.
#
# It pays for many rows and some hundreds of unknowns. For smaller systems it uses a direct solver, and ``iterations``
# is then 0. It is 0 also for a right-hand side without noise, which the sketch alone solves.
# :doc:`/howto/least-squares` says which solver to use, and :doc:`/benchmarks/linalg` has times for more shapes.
