"""
Compress and quantize: bytes against quality
============================================

:func:`panther.compress` has several forms for a layer: low rank, codes of a few bits, and both. This example trains a
network that removes noise from photographs, compresses it with each form to several sizes, and compares the quality of
its pictures at equal bytes, also with rounding to the nearest code.
"""

import copy
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_images
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# A network that removes noise
# ----------------------------
#
# It reads patches of 8 x 8 pixels with noise and returns them without. It is trained on one photograph of scikit-learn
# and judged by another, in decibels: 20 dB is the noisy picture, and 3 dB more are half of the mean square error.

size, width, noise = 8, (128 if QUICK else 256), 0.1
photographs = [
    torch.tensor(image).permute(2, 0, 1).float() / 255
    for image in load_sample_images().images
]
# (patches, 3 * 8 * 8)
training = nn.functional.unfold(photographs[0][None], size, stride=2)[
    0
].T
held_out = nn.functional.unfold(
    photographs[1][None], size, stride=size
)[0].T
held_out_noise = noise * torch.randn(held_out.shape)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3 * size**2, width)
        self.last = nn.Linear(width, 3 * size**2)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return x + self.last(
            self.blocks(self.first(x - x.mean(dim=1, keepdim=True)))
        )


def quality(model):
    with torch.no_grad():
        error = (
            (model(held_out + held_out_noise) - held_out)
            .square()
            .mean()
        )
    return -10 * torch.log10(error).item()


model = Denoiser()
nn.init.zeros_(model.last.weight)  # to begin with the noisy picture
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
steps = 200 if QUICK else 1200
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
for _ in range(steps):
    x = training[torch.randint(len(training), (128,))]
    loss = (model(x + noise * torch.randn_like(x)) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(
    f"noisy {quality(nn.Identity()):.2f} dB, without noise "
    f"{quality(model):.2f} dB in float32"
)

# %%
# One form for all layers
# -----------------------
#
# ``forms`` names what layers may become. With a single width and ``method="svd"``, which does not look at the data,
# every weight is rounded to its nearest code. With the data each rounding compensates for the errors of those before
# it. ``"low_rank"`` has factors in float32, ``"int8_low_rank"`` in 8 bits. ``"int3+low_rank"`` is codes with a
# correction in 8 bits. ``bits`` is the average for a weight, scales and factors included.

x = training[torch.randperm(len(training))[: 512 if QUICK else 1024]]
calibration = list((x + noise * torch.randn_like(x)).split(128))
found = {}


def compress(name, method="two_sided", **settings):
    small = copy.deepcopy(model)
    batches = calibration if method == "two_sided" else None
    report = pr.compress(
        small,
        calibration=batches,
        method=method,
        seed=0,
        measure_speed=False,
        **settings,
    )
    bits = 32 * report.eligible_ratio
    found.setdefault(name, []).append((bits, quality(small)))
    print(
        f"{name:22} {bits:5.2f} bits "
        f"{report.eligible_bytes_after / 1e3:6.0f} kB "
        f"{found[name][-1][1]:6.2f} dB"
    )
    return small, report


widths = ("int4", "int3") if QUICK else ("int8", "int4", "int3", "int2")
for width_name in widths:
    rounded, _ = compress(
        "rounded to nearest", "svd", forms=width_name, budget=1
    )
    if width_name == "int3":
        nearest = rounded
for width_name in widths:
    compress("rounded with the data", forms=width_name, budget=1)
for bits in (8,) if QUICK else (16, 8, 4):
    compress("low rank", forms="low_rank", bits=bits)
for bits in (4.25,) if QUICK else (8.25, 4.25, 3.25, 2.25):
    compress("low rank in 8 bits", forms="int8_low_rank", bits=bits)
for bits in (3.25,) if QUICK else (4, 3.25, 2.75):
    compress(
        "codes and low rank",
        forms=("int4+low_rank", "int3+low_rank", "int2+low_rank"),
        bits=bits,
    )

# %%
# The best form for each layer
# ----------------------------
#
# By default every layer gets the form and the size that gain most for their bytes: some layers need more bits.

for bits in (3.25,) if QUICK else (4.25, 3.25, 2.75, 2.25):
    chosen, report = compress("chosen by pr.compress", bits=bits)
    if bits == 3.25:
        mixed = chosen
        print(
            "   ",
            ", ".join(
                f"{layer.names[0]}: {layer.form}"
                for layer in report.layers
            ),
        )

figure, axes = plt.subplots(figsize=(5, 3.6))
for name, points in found.items():
    axes.plot(
        *zip(*sorted(points), strict=True), marker="o", label=name
    )
axes.axhline(
    quality(model), color="gray", linestyle=":", label="float32"
)
axes.set(
    xscale="log",
    xlabel="bits for a weight",
    ylabel="quality, dB",
    title="Quality against bytes",
)
axes.set_xticks([2, 3, 4, 6, 8, 16], ["2", "3", "4", "6", "8", "16"])
axes.minorticks_off()
axes.legend(fontsize=8)
plt.show()

# %%
# Where which form wins:
#
# - At 8 bits all forms with codes are as good as float32, and rounding to the nearest is enough.
# - From 4 bits on rounding with the data is better than to the nearest, and the more so the fewer the bits.
# - A choice for each layer is better than one width for all. In 3.25 bits the middle layers have 2 and 3, the first and
#   the last 6.
# - A low-rank correction gains over one width at 3 bits, and not over that choice.
# - Low rank in float32 loses most at all sizes: this network uses nearly all directions. Factors in 8 bits take a
#   quarter of its bytes. Low rank pays for time (:doc:`/examples/compress/decoder`), and where the spectra fall quickly
#   (:doc:`/examples/compress/ranks_and_budget`).
#
# The pictures
# ------------
#
# A part of the held-out photograph, with patches that overlap, at about the same number of bytes.

rows, columns = 96, 144
part = photographs[1][:, 150 : 150 + rows, 250 : 250 + columns]
noisy = part + noise * torch.randn(part.shape)


def restored(model):
    patches = nn.functional.unfold(noisy[None], size, stride=2)
    with torch.no_grad():
        clean = model(patches[0].T).T[None]
    counts = nn.functional.fold(
        torch.ones_like(patches), (rows, columns), size, stride=2
    )
    return (
        nn.functional.fold(clean, (rows, columns), size, stride=2)
        / counts
    )[0]


figure, grid = plt.subplots(2, 2, figsize=(7, 5))
pictures = {
    "noisy": noisy,
    "float32, 32 bits": restored(model),
    "rounded to nearest, 3.19 bits": restored(nearest),
    "chosen by pr.compress, 3.25 bits": restored(mixed),
}
for axes, (name, picture) in zip(
    grid.flat, pictures.items(), strict=True
):
    axes.imshow(picture.clamp(0, 1).permute(1, 2, 0).numpy())
    decibels = -10 * torch.log10((picture - part).square().mean())
    axes.set_title(f"{name}: {decibels:.1f} dB", fontsize=9)
    axes.axis("off")
plt.show()

# %%
# :doc:`/howto/compress` has all forms and budgets, :doc:`/concepts/quantized` describes the layers, and
# :doc:`/benchmarks/compress` has the same comparison for pretrained models.
