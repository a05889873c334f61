"""
Least squares on ill-conditioned data
=====================================

:func:`panther.linalg.sketch_lstsq` solves problems with many more rows than unknowns. It sketches the matrix, takes the
R of the sketch's QR as a preconditioner, and iterates on the matrix itself. This example fits polynomials, whose
columns are almost dependent, and compares the residual and the time with direct solvers and with the normal equations.
"""

import os
import time

import matplotlib.pyplot as plt
import scipy.linalg
import torch

import panther as pr

QUICK = "PANTHER_DOCS_QUICK" in os.environ  # smaller sizes, with which the documentation is checked

# %%
# Monomials: a condition number of 1e12
# -------------------------------------
#
# A polynomial of degree 32 in monomials, fitted to noisy values of a smooth function. The normal equations square the
# condition number, which is more than float64 has digits for.

rows, degree = (20_000 if QUICK else 200_000), 32
t = torch.linspace(-1, 1, rows, dtype=torch.float64)
A = t[:, None] ** torch.arange(degree + 1)
b = torch.sin(5 * t) / (1 + t**2) + 0.01 * torch.randn(rows, dtype=torch.float64)
print(f"condition number {torch.linalg.cond(A):.1e}")


def normal_equations(A, b):
    return torch.linalg.solve(A.T @ A, A.T @ b)


solvers = {
    "normal equations": normal_equations,
    "scipy gelsd": lambda A, b: torch.from_numpy(scipy.linalg.lstsq(A.numpy(), b.numpy())[0]),
    "torch gelsd": lambda A, b: torch.linalg.lstsq(A, b[:, None], driver="gelsd").solution[:, 0],
    "pr.linalg.sketch_lstsq": lambda A, b: pr.linalg.sketch_lstsq(A, b, seed=0).x,
}
residuals = {name: torch.linalg.norm(A @ solve(A, b) - b) for name, solve in solvers.items()}
least = min(residuals.values())
for name, residual in residuals.items():
    print(f"{name:24} residual {residual:.9f}, {residual / least - 1:.0e} above the smallest")

# %%
# The normal equations, and direct solvers that treat small singular values as zero, do not reach the smallest residual.

# %%
# Conditions from 1 to 1e12
# -------------------------
#
# A random matrix with columns of decreasing length, a known solution x and a consistent right-hand side: the relative
# error of A x.

m, n = (8_000, 400) if QUICK else (60_000, 500)
conditions = (1e0, 1e4, 1e8, 1e12)
times, errors = {name: [] for name in solvers}, {name: [] for name in solvers}
G = torch.randn(m, n, dtype=torch.float64)
Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
for condition in conditions:
    B = G * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64) @ Q
    right = B @ torch.ones(n, dtype=torch.float64)
    for name, solve in solvers.items():
        begun = time.process_time()
        try:
            x = solve(B, right)
            error = (torch.linalg.norm(B @ x - right) / torch.linalg.norm(right)).item()
        except torch.linalg.LinAlgError:  # singular in float64
            error = float("nan")
        times[name].append(time.process_time() - begun)
        errors[name].append(error)

figure, (left, right) = plt.subplots(1, 2)
for name in solvers:
    left.plot(conditions, errors[name], marker="o", label=name)
    right.plot(conditions, times[name], marker="o")
    print(f"{name:24}", " ".join(f"{e:.0e} in {s:.2f} s" for e, s in zip(errors[name], times[name], strict=True)))
left.set(xscale="log", yscale="log", xlabel="condition number", ylabel="relative error of A x")
left.legend(fontsize=8)
right.set(xscale="log", xlabel="condition number", ylabel="CPU time, s", ylim=(0, None))
plt.show()

# %%
# The time of ``sketch_lstsq`` does not depend on the condition. It pays for many rows and some hundreds of unknowns;
# for smaller systems it uses a direct solver itself, and ``iterations`` is then 0 (:doc:`/howto/linalg`).

x, residual_norm, iterations = pr.linalg.sketch_lstsq(B, right := B.sum(dim=1), seed=0)
print("iterations:", int(iterations))
