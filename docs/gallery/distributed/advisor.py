"""
Choose a parallelism
====================

:func:`~panther.distributed.choose_parallelism_strategy` applies rules of thumb to three numbers.
:func:`panther.distributed.plan_parallelism`, the advisor, compares every layout of a model on a cluster by memory, bytes and time.
This example asks both, and then builds the advisor's choice on two processes.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.distributed import (
    ClusterSpec,
    ModelStats,
    choose_parallelism_strategy,
    launch,
    plan_parallelism,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# Rules of thumb
# --------------
#
# The number of parameters, the number of GPUs, and the memory of one.

for name, parameters, gpus in (
    ("125M", 125e6, 2),
    ("7B", 7e9, 8),
    ("70B", 70e9, 16),
):
    print(
        f"{name:5} on {gpus:2} GPUs of 80 GB: "
        f"{choose_parallelism_strategy(parameters, gpus, 80e9)}"
    )

# %%
# The advisor
# -----------
#
# A transformer of 1.3 billion parameters on eight GPUs, dense and with sketched layers of R = 64. Times are predictions
# that were not calibrated on the cluster; memory needs no calibration.

cluster = ClusterSpec.preset("h100-80gb", gpus=8)
sizes = {
    "hidden": 512,
    "layers": 4,
    "heads": 8,
    "vocab": 32_000,
    "sequence": 256,
}
if not QUICK:
    sizes = {
        "hidden": 2048,
        "layers": 24,
        "heads": 32,
        "vocab": 50_000,
        "sequence": 2048,
    }
plans = {
    "dense": plan_parallelism(
        ModelStats.transformer(**sizes), cluster, batch=64
    ),
    "sketched": plan_parallelism(
        ModelStats.transformer(**sizes, sketch=64), cluster, batch=64
    ),
}
for name, plan in plans.items():
    print(f"{name}: {plan.best.reason}\n")
print(plans["sketched"])

# %%
# Memory against time of the first options. The advisor ranks the fastest that fits first.

figure, axes = plt.subplots(figsize=(5, 3.6))
for name, plan in plans.items():
    options = [option for option in plan.options if option.fits][:12]
    points = [
        (o.estimate.memory.total / 1e9, o.estimate.step_seconds)
        for o in options
    ]
    axes.scatter(*zip(*points, strict=True), label=name)
    axes.annotate(
        str(options[0].layout),
        points[0],
        fontsize=8,
        xytext=(-5, 5),
        textcoords="offset points",
        ha="right",
    )
axes.set(
    ylim=0, xlabel="memory of a rank, GB", ylabel="predicted step, s"
)
axes.legend()
plt.show()

# %%
# Build the choice
# ----------------
#
# ``plan.apply`` builds the first option, on a process group of that size, and returns the object to train, here on 1,792
# digits of scikit-learn in batches of 64.

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images[:1792].float() / 16, labels[:1792]


def train():
    torch.manual_seed(0)
    model = nn.Sequential(
        pr.nn.SKLinear(64, 256, 8),
        nn.ReLU(),
        pr.nn.SKLinear(256, 10, 4),
    )
    cluster = ClusterSpec.preset("cpu", gpus=2)
    plan = plan_parallelism(
        model,
        cluster,
        batch=64,
        sample_input=images[:1],
        schedules=(),
    )
    built = plan.apply(model)
    optimizer = torch.optim.Adam(built.parameters(), 1e-2)
    # Ranks along dp train on different samples.
    dp = plan.best.layout.dp
    first = torch.distributed.get_rank() * dp // 2
    losses = []
    for batch in torch.arange(first, len(images), dp).split(64 // dp):
        loss = nn.functional.cross_entropy(
            built(images[batch]), labels[batch]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return str(plan.best.layout), type(built).__name__, losses


for rank, (layout, kind, losses) in enumerate(
    launch(train, nproc=2, start_method="fork")
):
    print(
        f"rank {rank}: {layout}, a {kind}, losses {losses[0]:.2f} "
        f"to {losses[-1]:.2f}"
    )

# %%
# ``panther advise`` prints the same table in a terminal (:doc:`/howto/advisor`).
