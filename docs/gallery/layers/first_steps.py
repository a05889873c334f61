"""
A sketched network, from one process to four
============================================

After this tutorial you have trained a sketched network on one process, divided it among several in every way that
Panther knows, and asked which way a larger model would need. Each section prints what its ranks saw. The data are the
1,797 handwritten digits of scikit-learn.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import panther as pr
from panther.distributed import (
    CommunicationCounter,
    DistributedMetricsCollector,
    get_rank,
    get_world_size,
    launch,
    sync_sketches,
    verify_sketches,
)
from panther.train import TrainConfig, Trainer

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
width = 128 if QUICK else 512

# %%
# A sketched network
# ------------------
#
# :class:`~panther.nn.SKLinear` takes the place of a wide :class:`torch.nn.Linear`. It trains two factors of rank 8; its
# random signs follow from a seed, so they take no place in a file and need not be sent.


def network():
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        pr.nn.SKLinear(width, width, 8),
        nn.ReLU(),
        pr.nn.SKLinear(width, width, 8),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


sketched = sum(p.numel() for p in network()[2].parameters())
dense = sum(p.numel() for p in nn.Linear(width, width).parameters())
print(f"SKLinear trains {sketched:,} numbers, nn.Linear {dense:,}")

# %%
# On two processes
# ----------------
#
# Each process draws a network of its own. :func:`~panther.distributed.sync_sketches` sends the seeds of rank 0, 8 bytes
# for each layer and 16 to compare them, and from then on all processes have the same signs.


def synchronise():
    torch.manual_seed(get_rank())
    model = network()
    own_seed = model[2].seed
    with CommunicationCounter() as traffic:
        sync_sketches(model)
    verify_sketches(model)
    return own_seed != model[2].seed, traffic.bytes


for rank, (changed, sent) in enumerate(
    launch(synchronise, nproc=2, start_method="fork")
):
    print(f"rank {rank}: seed changed {changed}, {sent} bytes")

# %%
# The Trainer does this by itself. ``strategy`` divides the samples (``ddp``), the layers (``tp``: tensor parallelism),
# the depth (``pp``: a pipeline of stages), or several of them (``hybrid``). Nothing else changes, and the losses agree
# up to rounding.

digits = load_digits()
images = torch.tensor(digits.data[:1792], dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target[:1792]))


def train(strategy, replicas, settings):
    torch.manual_seed(0)
    config = TrainConfig(
        strategy=strategy,
        epochs=1 if QUICK else 4,
        batch_size=128 // replicas,
        learning_rate=3e-3,
        log_every_n_steps=7,
        seed=0,
        progress=False,
        **settings,
    )
    trainer = Trainer(
        network(), torch.optim.Adam, nn.CrossEntropyLoss(), config
    )
    history = trainer.fit(data)
    parts = trainer.model
    parts = parts if isinstance(parts, list) else [parts]
    numbers = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel()
        for part in parts
        for p in part.parameters()
    )
    return history["loss"], numbers


runs = {}
for name, processes, replicas, settings in (
    ("ddp", 1, 1, {}),
    ("ddp", 2, 2, {}),
    ("tp", 2, 1, {}),
    ("pp", 2, 1, {"num_microbatches": 4}),
    ("hybrid", 4, 2, {"tensor_parallel_size": 2}),
):
    title = f"{name} on {processes}"
    runs[title] = launch(
        train,
        name,
        replicas,
        settings,
        nproc=processes,
        start_method="fork",
    )
    (_, losses), numbers = runs[title][0]
    print(
        f"{title:11}: rank 0 has {numbers:7,} numbers, "
        f"last loss {losses[-1]:.4f}"
    )

figure, axis = plt.subplots(figsize=(5, 3.6))
styles = ("-", "--", ":", "-.", (0, (1, 4)))
for (name, ranks), style in zip(runs.items(), styles, strict=True):
    axis.plot(*ranks[0][0], linestyle=style, linewidth=2, label=name)
axis.set(xlabel="step", ylabel="training loss", yscale="log")
axis.legend()
plt.show()

# %%
# Metrics of all ranks
# --------------------
#
# Means are weighted by samples, so that a rank with fewer of them counts less.


def measure():
    collector = DistributedMetricsCollector(
        get_rank(), get_world_size()
    )
    samples = 100 if get_rank() == 0 else 300
    collector.update_metric("accuracy", 0.5 + 0.4 * get_rank(), samples)
    collector.update_metric("rank", get_rank(), reduce="each")
    return collector.compute_global_metrics()


print(launch(measure, nproc=2, start_method="fork")[0])

# %%
# Which parallelism for a larger model?
# -------------------------------------
#
# Rules of thumb need the number of parameters alone. :func:`panther.plan_parallelism` compares every layout by memory,
# bytes and time (:doc:`/howto/advisor`).

for size in (1_000_000_000, 7_000_000_000, 70_000_000_000):
    kinds = pr.choose_parallelism_strategy(size, 8, 80e9)
    print(f"{size:>14,} parameters on 8 GPUs: {', '.join(kinds)}")

# %%
# :doc:`/howto/train` has all settings of the Trainer, :doc:`/howto/distributed` the parts to use without it, and
# :doc:`/howto/launch` starts the same script on a cluster.
