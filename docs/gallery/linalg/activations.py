"""
The activations of a layer during training, on two ranks
========================================================

How many directions does a layer use, and when do the classes separate? The covariance of its activations tells, and so
does a PCA of the batches as they pass. Each rank has a :class:`panther.linalg.StreamingSVD` of its own batches;
``all_reduce`` makes of them the PCA of all activations, and sends no activation.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.distributed import (
    CommunicationCounter,
    data_parallel,
    launch,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# A training loop with a hook
# ---------------------------
#
# The hook of the second hidden layer adds its activations to a stream, in each epoch a new one. The network is trained on
# 1,797 digits of scikit-learn, by data parallelism: each rank takes every second batch.

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
width, k = 128, 20
epochs = 2 if QUICK else 8


def train():
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    hidden = nn.Linear(width, width)
    layers = nn.Linear(64, width), nn.ReLU(), hidden, nn.ReLU()
    network = nn.Sequential(*layers, nn.Linear(width, 10))
    model = data_parallel(network)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9
    )
    shuffle = torch.Generator().manual_seed(0)
    history, projections = [], {}
    for epoch in range(epochs):
        stream = pr.linalg.StreamingSVD(width, k)
        handle = hidden.register_forward_hook(
            lambda module, inputs, output, stream=stream: stream.update(
                output.detach()
            )
        )
        order = torch.randperm(len(labels), generator=shuffle)
        batches = order.split(32)[:56]  # an even number
        for batch in batches[rank::2]:
            loss = nn.functional.cross_entropy(
                model(images[batch]), labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        handle.remove()
        with CommunicationCounter() as traffic:
            total = stream.all_reduce()
        ratio = total.pca().ratio
        history.append(
            {
                "rows here": stream.num_rows,
                "rows": total.num_rows,
                "bytes": traffic.bytes,
                "ratio": ratio.tolist(),
                "loss": loss.item(),
            }
        )
        if epoch in (0, epochs - 1):
            with torch.no_grad():
                activations = network[:3](images)
            projections[epoch] = total.transform(activations, 2)
    return history, projections


results = launch(train, nproc=2, start_method="fork")
(history, projections), (other_history, _) = results
print(
    f"{history[0]['rows here']} and {other_history[0]['rows here']} rows "
    f"on the ranks, {history[0]['rows']} in the sum"
)
print(
    f"{history[0]['bytes']} bytes for all_reduce, and the activations "
    f"have {history[0]['rows'] * width * 4}"
)
print(
    "equal on both ranks:",
    all(
        entry["ratio"] == other_entry["ratio"]
        for entry, other_entry in zip(
            history, other_history, strict=True
        )
    ),
)

# %%
# Fewer directions, epoch by epoch
# --------------------------------
#
# The number of components that have 90 % of the variance, and the part of the first nine: ten classes need nine
# directions to be apart.


def components_of(ratio, part):
    return int((torch.tensor(ratio).cumsum(0) < part).sum()) + 1


numbers = range(1, epochs + 1)
counts = [components_of(entry["ratio"], 0.9) for entry in history]
parts = [100 * sum(entry["ratio"][:9]) for entry in history]
for number, entry, count, part in zip(
    numbers, history, counts, parts, strict=True
):
    print(
        f"epoch {number:2}: loss {entry['loss']:.3f}, {count} components "
        f"for 90 %, nine have {part:.1f} %"
    )
figure, (left, right) = plt.subplots(1, 2)
left.plot(numbers, counts, "o-")
left.set(
    xlabel="epoch", ylabel="components for 90 %", ylim=(0, k + 0.5)
)
right.plot(numbers, parts, "o-")
right.set(xlabel="epoch", ylabel="variance of nine components, %")
plt.show()

# %%
# What the first two directions show
# ----------------------------------
#
# The activations of all digits in the plane of the first two components, after the first and after the last epoch.

figure, panels = plt.subplots(1, 2, figsize=(7, 3.4))
for panel, (epoch, points) in zip(
    panels, projections.items(), strict=True
):
    for label in range(10):
        label_points = points[labels == label]
        panel.scatter(*label_points.T, s=4, label=str(label))
    panel.set(title=f"after epoch {epoch + 1}", xticks=[], yticks=[])
figure.legend(
    *panels[0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=10,
    fontsize=8,
    markerscale=2,
)
plt.show()

# %%
# :doc:`/howto/large-matrices` has the bound of the error of a stream, and the bytes of ``all_reduce``.
