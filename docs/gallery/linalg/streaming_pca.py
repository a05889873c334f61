"""
PCA of photographs that do not fit in memory
============================================

The patches of two photographs are a matrix of 99 MB. :class:`panther.linalg.StreamingSVD` reads them in
batches, once, and keeps 64 rows. This example limits the memory of the process, so that the matrix cannot be made, and
compares the components of the stream with the exact ones.
"""

import contextlib
import os
import sys
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_images

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The rows, and the memory that is allowed
# ----------------------------------------
#
# A row is a patch of 16 x 16 pixels in three colours: 768 numbers. On Linux the limit of this process is set to 64 MB
# more than it has.

size, step = 16, (8 if QUICK else 4)
allowed_mb = 16 if QUICK else 64
images = [
    torch.tensor(image).permute(2, 0, 1).float() / 255
    for image in load_sample_images().images
]


def batches():
    """Yield the patches of one row of windows after the other."""
    for image in images:
        for top in range(0, image.shape[1] - size + 1, step):
            strip = image[:, top : top + size]
            windows = strip.unfold(2, size, step)  # (3, 16, count, 16)
            yield windows.permute(2, 0, 1, 3).flatten(1)


num_rows = sum(len(rows) for rows in batches())
print(f"{num_rows} x 768, {num_rows * 768 * 4 / 1e6:.0f} MB")


@contextlib.contextmanager
def limited_memory():
    """Let the process allocate no more than the allowed megabytes."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    data = 1024 * int(lines["VmData"].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    soft = data + allowed_mb * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


with limited_memory():
    try:
        torch.empty(num_rows, 768).zero_()
    except RuntimeError as error:
        print("All rows at once:", str(error).partition("tried")[2])

# %%
# One pass
# --------
#
# 32 components; the stream keeps twice as many rows. Its memory does not depend on the number of patches.

k = 32
begun = time.process_time()
with limited_memory():
    stream = pr.linalg.StreamingSVD(768, k)
    for rows in batches():
        stream.update(rows)
    V, variance, ratio, mean = stream.pca()
summary_bytes = sum(
    part.nbytes for part in stream.state_dict().values()
)
print(
    f"{stream.num_rows} rows in {time.process_time() - begun:.1f} s, "
    f"{summary_bytes / 1e6:.2f} MB are kept"
)
print(f"{k} components have {100 * ratio.sum():.2f} % of the variance")

# %%
# How far from the best
# ---------------------
#
# ``error`` bounds the error without knowing the data. For 768 columns the covariance is small enough to be added up as a
# reference; with a hundred thousand columns it would have 80 GB, and the stream 51 MB.

covariance = torch.zeros(768, 768, dtype=torch.float64)
for rows in batches():
    centred = rows.double() - mean.double()
    covariance += centred.T @ centred
eigenvalues = torch.linalg.eigvalsh(covariance)
least = eigenvalues[:-k].sum().sqrt()
basis = V.double()
error = (
    covariance.trace() - (basis.T @ covariance @ basis).trace()
).sqrt()
print(f"error {error / least:.5f} of the least possible")
bound = stream.error(centred=True).upper
print(f"bound {bound / least:.5f} of the least possible")

figure, axes = plt.subplots(2, 8, figsize=(7, 2.2))
for number, panel in enumerate(axes.flat):
    picture = V[:, number].reshape(3, size, size).permute(1, 2, 0)
    low, high = picture.min(), picture.max()
    panel.imshow(((picture - low) / (high - low)).numpy())
    panel.set_title(f"{100 * ratio[number]:.1f} %", fontsize=8)
    panel.axis("off")
figure.suptitle("Components and their part of the variance", fontsize=9)
plt.show()

# %%
# A photograph from its components
# --------------------------------
#
# Tiles of 16 x 16 pixels, each by the first 4 or all 32 of its coordinates, in place of 768 numbers.

image = images[0][:, : 26 * size, : 40 * size]
tiles = image.unfold(1, size, size).unfold(2, size, size)
tiles = tiles.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def assembled(tiles):
    grid = tiles.reshape(26, 40, 3, size, size).permute(0, 3, 1, 4, 2)
    return grid.reshape(26 * size, 40 * size, 3).clamp(0, 1).numpy()


pictures = {"photograph": tiles}
for count in (4, k):
    coordinates = stream.transform(tiles, count)
    pictures[f"{count} numbers a tile"] = (
        coordinates @ V[:, :count].T + mean
    )
figure, panels = plt.subplots(1, 3, figsize=(7, 1.9))
for panel, (name, picture) in zip(
    panels, pictures.items(), strict=True
):
    panel.imshow(assembled(picture))
    panel.set_title(name, fontsize=9)
    panel.axis("off")
plt.show()

# %%
# :doc:`/howto/large-matrices` merges streams and reads rows on several ranks; :doc:`/benchmarks/linalg-drivers` compares
# time and error with scikit-learn's ``IncrementalPCA``.
