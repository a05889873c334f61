"""
Train from scratch: dense, sketched or low rank?
================================================

When a network will be trained from random weights within a number of bytes, its layers can be sketched, of low rank, or
dense and narrower. This example trains all three at equal bytes, with two optimizers and three seeds, beside the whole
dense network, and says which wins.
"""

import itertools
import math
import os
import sysconfig
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The task
# --------
#
# Python's own sources as text. The network reads 16 characters and predicts the next one; the loss is in nats a
# character. Every tenth file is held out; half of it is to choose learning rates by, half to report.

context, embedding, width, characters = 16, 16, 256, 128
paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[
    : 40 if QUICK else 160
]
texts = [
    torch.tensor(
        [min(byte, 127) for byte in path.read_bytes()],
        dtype=torch.uint8,
    )
    for path in paths
]
training = torch.cat(
    [
        characters
        for number, characters in enumerate(texts)
        if number % 10
    ]
)
held_out = torch.cat(texts[::10])


def passages(characters, number, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(
        len(characters) - context, (number,), generator=generator
    )
    windows = characters[
        starts[:, None] + torch.arange(context + 1)
    ].long()
    return windows[:, :-1], windows[:, -1]


choosing = passages(held_out, 4096, 1)
reporting = passages(held_out, 4096, 2)
print(
    f"{len(training):,} characters to train with, {len(held_out):,} "
    "held out"
)

# %%
# Networks of equal bytes
# -----------------------
#
# R is chosen such that a hidden layer stores a quarter of the numbers of a dense one: ``R (in + out)``, for a sketched
# layer as for a product of two factors. The narrower dense network has about as many numbers in all.

R, narrow = width // 8, 129


def low_rank(inputs, outputs):
    first = nn.Linear(inputs, R, bias=False)
    second = nn.Linear(R, outputs)
    with torch.no_grad():
        # Then the product has the variance of nn.Linear's weight.
        second.weight.mul_(math.sqrt(3))
    return nn.Sequential(first, second)


def network(form):
    hidden = {
        # The figures in the text are of dense signs.
        "sketched": lambda inputs, outputs: pr.nn.SKLinear(
            inputs, outputs, R, sketch="signs"
        ),
        "low rank": low_rank,
        "dense, narrower": nn.Linear,
        "dense": nn.Linear,
    }[form]
    w = narrow if form == "dense, narrower" else width
    sizes = [context * embedding, w, w, w]
    layers = [nn.Embedding(characters, embedding), nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [hidden(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(w, characters))


forms = ("sketched", "low rank", "dense, narrower", "dense")
for form in forms:
    print(
        f"{form:16} "
        f"{4 * sum(p.numel() for p in network(form).parameters()):9,} "
        "bytes"
    )

# %%
# Training
# --------
#
# AdamW, and :class:`~panther.optim.MuonAdamW`, which orthogonalises the updates of the hidden layers' matrices. The
# learning rate of each form is the best of three by the first seed, at equal steps for all.

steps, seeds = (40, (0,)) if QUICK else (400, (0, 1, 2))
torch.set_num_threads(1)


def loss_on(model, samples):
    with torch.no_grad():
        return nn.functional.cross_entropy(
            model(samples[0]), samples[1]
        ).item()


def train(form, optimizer_name, lr, seed):
    torch.manual_seed(seed)
    model = network(form)
    if optimizer_name == "AdamW":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, weight_decay=0.1, fused=True
        )
    else:
        hidden, head = (pr.nn.SKLinear, nn.Linear), str(len(model) - 1)
        groups = pr.optim.param_groups(
            model,
            lr=lr,
            include=lambda name, layer: (
                isinstance(layer, hidden) and name != head
            ),
        )
        optimizer = pr.optim.MuonAdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1, (step + 1) / 20)
            * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        ),
    )
    curve, begun = [], time.process_time()
    for step in range(steps):
        x, y = passages(training, 128, seed * steps + step + 100)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % (steps // 10) == 0:
            curve.append(loss_on(model, reporting))
    return {
        "curve": curve,
        "seconds": time.process_time() - begun,
        "choice": loss_on(model, choosing),
    }


rates = {
    "AdamW": (8e-3, 1.6e-2, 3.2e-2),
    "MuonAdamW": (2e-3, 4e-3, 8e-3),
}
if QUICK:
    rates = {"AdamW": (8e-3,), "MuonAdamW": (4e-3,)}
found = {}
print(
    "optimizer form               rate   loss over the seeds      CPU "
    "time"
)
for optimizer_name, candidates in rates.items():
    for form in forms if optimizer_name == "AdamW" else forms[:3]:
        first = {
            lr: train(form, optimizer_name, lr, seeds[0])
            for lr in candidates
        }
        lr = min(first, key=lambda lr: first[lr]["choice"])
        runs = [
            first[lr],
            *(
                train(form, optimizer_name, lr, seed)
                for seed in seeds[1:]
            ),
        ]
        found[optimizer_name, form] = runs
        last = [run["curve"][-1] for run in runs]
        seconds = min(run["seconds"] for run in runs)
        mean = sum(last) / len(last)
        spread = f"({min(last):.3f} to {max(last):.3f})"
        print(
            f"{optimizer_name:9} {form:15} {lr:7.1e}   {mean:.3f} "
            f"{spread}   {seconds:5.1f} s"
        )

# %%
# The mean loss over the seeds, and at the end each seed.

figure, (left, right) = plt.subplots(1, 2, width_ratios=(3, 2))
marks = [(i + 1) * (steps // 10) for i in range(10)]
for (optimizer_name, form), runs in found.items():
    color, muon = f"C{forms.index(form)}", optimizer_name == "MuonAdamW"
    mean = torch.tensor([run["curve"] for run in runs]).mean(dim=0)
    left.plot(
        marks,
        mean,
        color=color,
        linestyle="-" if muon else ":",
        label=f"{form}, {optimizer_name}",
    )
    last = [run["curve"][-1] for run in runs]
    right.plot(
        [form.replace(", ", "\n")] * len(runs),
        last,
        "o",
        color=color,
        fillstyle="full" if muon else "none",
    )
left.set(
    xlabel="step",
    ylabel="held-out loss, nats",
    title="Loss over training",
)
left.legend(fontsize=7)
right.set(title="Last loss\n(filled: MuonAdamW)")
right.tick_params(axis="x", labelsize=8)
right.margins(x=0.2)
plt.show()

# %%
# **The narrower dense network wins** at equal bytes with both optimizers, though under AdamW sketched layers are close,
# and takes the least time under AdamW. With MuonAdamW every form is at least as good as with AdamW. The narrower
# network is then better than the whole dense one under AdamW, which has 2.7 times its bytes. Sketched layers are ahead
# of low rank under AdamW, and behind it under MuonAdamW.
#
# So when you can choose the width, choose a smaller one. Sketched layers are for a given architecture: a drop-in of the
# same width with few bytes to save, and to send in data parallelism (:doc:`/examples/distributed/data_parallel`).
# :doc:`/benchmarks/train-scratch` has the same comparison for three tasks, at equal time too, and networks that are
# sketched in part.
