"""
Colours of a photograph by ridge regression with a kernel
=========================================================

Kernel ridge regression solves a system with as many unknowns as there are samples. This example knows the colours of
every twentieth pixel of a photograph, and predicts the rest from their brightness and place. It solves the
system by :func:`panther.linalg.pcg`, with preconditioners from a few products or a few columns of the kernel.
"""

import os
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Features and targets
# --------------------
#
# The features of a pixel are the brightness of its 5 x 5 neighbours, and its row and column. The targets are red and blue,
# each less the brightness: two right-hand sides for one kernel.

stride = 6 if QUICK else 4
photograph = torch.tensor(load_sample_image("flower.jpg"))
photograph = photograph[::stride, ::stride].double() / 255
height, width, _ = photograph.shape
grey = photograph.mean(dim=2)
padded = torch.nn.functional.pad(
    grey[None], (2, 2, 2, 2), mode="reflect"
)[0]
neighbours = padded.unfold(0, 5, 1).unfold(1, 5, 1).flatten(2)
rows, columns = torch.meshgrid(
    torch.linspace(0, 3, height).double(),
    torch.linspace(0, 4, width).double(),
    indexing="ij",
)
places = torch.stack((rows, columns), dim=2)
features = torch.cat((neighbours, places), dim=2).flatten(0, 1)
targets = (photograph[..., [0, 2]] - grey[..., None]).flatten(0, 1)

generator = torch.Generator().manual_seed(0)
order = torch.randperm(len(features), generator=generator)
known_pixels = order[: len(order) // 20]
unknown_pixels = order[len(order) // 20 :]
print(f"{len(known_pixels)} of {len(order)} pixels have a colour")


def kernel(X, Y):
    return torch.exp(-torch.cdist(X, Y).square() / (2 * 0.6**2))


# %%
# Steps with and without a preconditioner
# ---------------------------------------
#
# ``shift`` is the strength of the ridge. The smaller it is, the worse is the condition of the system, and the more a
# preconditioner gains. ``rp_cholesky`` draws 200 columns of the kernel and reads nothing else of it.

K = kernel(features[known_pixels], features[known_pixels])
y = targets[known_pixels]
rank = 100 if QUICK else 200
shifts = (1e-1, 1e-2) if QUICK else (1e-1, 1e-2, 1e-3)


def no_preconditioner(shift):
    return None


def from_products(shift):
    return pr.linalg.nystrom_preconditioner(K, rank, shift, seed=0)


def from_columns(shift):
    few_columns = pr.linalg.rp_cholesky(
        lambda index: K[:, index],
        rank,
        diagonal=K.diagonal(),
        seed=0,
    )
    return pr.linalg.nystrom_preconditioner(few_columns, rank, shift)


methods = {
    "no preconditioner": no_preconditioner,
    "nystrom_preconditioner": from_products,
    "rp_cholesky": from_columns,
}
steps, errors = {name: [] for name in methods}, []
for shift in shifts:
    for name, method in methods.items():
        begun = time.process_time()
        result = pr.linalg.pcg(
            K, y, method(shift), shift=shift, tol=1e-5
        )
        steps[name].append(result.iterations)
        seconds = time.process_time() - begun
        print(
            f"shift {shift:5.0e}, {name:22} {result.iterations:5} steps "
            f"{seconds:6.2f} s"
        )
    predicted = torch.cat(
        [
            kernel(part, features[known_pixels]) @ result.x
            for part in features.split(5000)
        ]
    )
    difference = (predicted - targets)[unknown_pixels]
    errors.append(difference.square().mean().sqrt().item())
    if errors[-1] == min(errors):
        best = predicted

figure, (left, right) = plt.subplots(1, 2)
for name in methods:
    left.plot(shifts, steps[name], "o-", label=name)
left.set(
    xscale="log", yscale="log", xlabel="shift", ylabel="steps of pcg"
)
left.legend(fontsize=8)
right.plot(shifts, errors, "o-", color="black")
right.set(
    xscale="log",
    xlabel="shift",
    ylabel="error of unknown colours",
    ylim=(0, 1.2 * max(errors)),
)
plt.show()

# %%
# The picture
# -----------
#
# The prediction with the smallest error of the unknown pixels. On the left a pixel without a colour is grey.

known_colours = torch.zeros_like(targets)
known_colours[known_pixels] = targets[known_pixels]


def coloured(differences):
    red, blue = (
        grey + differences[:, part].reshape(grey.shape)
        for part in (0, 1)
    )
    green = 3 * grey - red - blue
    picture = torch.stack((red, green, blue), dim=2)
    return picture.clamp(0, 1).numpy()


pictures = {
    "5 % of the colours": known_colours,
    "predicted": best,
    "photograph": targets,
}
figure, panels = plt.subplots(1, 3, figsize=(7, 1.9))
for panel, (name, differences) in zip(
    panels, pictures.items(), strict=True
):
    panel.imshow(coloured(differences))
    panel.set_title(name, fontsize=9)
    panel.axis("off")
plt.show()
baseline = targets[unknown_pixels].square().mean().sqrt()
print(f"error {min(errors):.3f}; of grey in each pixel {baseline:.3f}")

# %%
# A kernel that is too large to be formed is approximated by ``rp_cholesky`` alone, as :doc:`/howto/positive-definite`
# shows. A system of a thousand unknowns, as here, is also solved by ``torch.linalg.cholesky`` in about the same time:
# :doc:`/benchmarks/linalg-drivers`.
