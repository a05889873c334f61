"""
Pipeline stages and microbatches
================================

In pipeline parallelism every rank has some of the layers, and a batch travels through the stages in microbatches. This
example splits a model into stages, prints what each rank holds, trains it on digits, checks that training ends where
one process ends, and shows the bubble, the time in which a rank waits, against the number of microbatches.
"""

import os
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.distributed import (
    CommunicationCounter,
    launch,
    make_schedule,
    split_stages,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
width, lr = (256, 1e-3) if QUICK else (1024, 5e-4)

# %%
# Stages
# ------
#
# Stages have about equal numbers of parameters. The network learns 1,792 digits of scikit-learn in batches of 64.

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images[:1792].float() / 16, labels[:1792]
batches = torch.arange(len(images)).split(64)


def build():
    torch.manual_seed(0)
    layers = [pr.nn.SKLinear(64, width, 16), nn.ReLU()]
    for _ in range(4):
        layers += [pr.nn.SKLinear(width, width, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def train():
    stages = split_stages(build(), 2)
    schedule = make_schedule("1f1b", stages, 4, nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(schedule.parameters(), lr)
    losses = []
    with CommunicationCounter() as traffic:
        for batch in batches:
            optimizer.zero_grad()
            _, loss = schedule.step(images[batch], labels[batch])
            optimizer.step()
            losses.append(None if loss is None else loss.item())
    names = sorted(
        {
            name.rpartition(".")[0]
            for name, _ in stages[0].submod.named_parameters()
        }
    )
    return names, losses, traffic.bytes // len(batches)


for rank, (names, losses, sent) in enumerate(
    launch(train, nproc=2, start_method="fork")
):
    print(
        f"rank {rank} has layers {', '.join(names)}, sends "
        f"{sent:,} bytes a step, losses",
        *(loss and f"{loss:.3f}" for loss in losses[6::7]),
    )

# %%
# Only the rank of the last stage knows the loss. The same steps in one process:

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr)
losses = []
for batch in batches:
    loss = nn.functional.cross_entropy(
        model(images[batch]), labels[batch]
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("one process:", *(f"{loss:.3f}" for loss in losses[6::7]))

# %%
# Microbatches
# ------------
#
# A hook on each stage notes when it computes a microbatch. Rank 1 starts when rank 0 has finished the first one, and
# the ranks then work at the same time. (On two busy cores the order is exact, and the times are not.)
#
# With p stages and m microbatches, a rank is idle for (p - 1) / (m + p - 1) of an ideal step. More microbatches shrink
# this bubble, until the products become too small to be efficient.
#
# The batch here is large, so that products take longer than messages: all digits, in the full run five times over.

microbatches, copies = 4, 1 if QUICK else 5
inputs, classes = images.repeat(copies, 1), labels.repeat(copies)


def timeline(name):
    stages = split_stages(build(), 2)
    schedule = make_schedule(
        name, stages, microbatches, nn.CrossEntropyLoss()
    )
    for _ in range(2):  # first steps, which prepare buffers
        schedule.step(inputs, classes)
    spans, begun = [], []
    stages[0].submod.register_forward_pre_hook(
        lambda *_: begun.append(time.time())
    )
    stages[0].submod.register_forward_hook(
        lambda *_: spans.append((begun[-1], time.time()))
    )
    torch.distributed.barrier()
    schedule.step(inputs, classes)
    return spans


ranks = launch(timeline, "gpipe", nproc=2, start_method="fork")
origin = ranks[0][0][0]
figure, (left, right) = plt.subplots(1, 2)
for rank, spans in enumerate(ranks):
    print(
        f"rank {rank} begins its forwards after",
        [f"{1e3 * (begin - origin):.1f} ms" for begin, _ in spans],
    )
    for number, (begin, end) in enumerate(spans[:microbatches]):
        left.barh(
            rank,
            1e3 * (end - begin),
            left=1e3 * (begin - origin),
            color=f"C{number}",
        )
left.set(
    yticks=[0, 1],
    yticklabels=["rank 0", "rank 1"],
    xlabel="ms",
    title="forwards of microbatches (gpipe)",
)
left.invert_yaxis()

counts = (1, 2, 4, 8, 16, 32)
for p in (2, 4, 8):
    right.plot(
        counts,
        [100 * (p - 1) / (m + p - 1) for m in counts],
        marker="o",
        label=f"{p} stages",
    )
right.set(
    xscale="log",
    xlabel="microbatches",
    ylabel="idle part of an ideal step, %",
)
right.set_xticks(counts, [str(count) for count in counts])
right.minorticks_off()
right.legend()
plt.show()

# %%
# :doc:`/howto/pipeline-parallel` has models that are not an ``nn.Sequential``, and the other schedules.
