"""
Hybrid meshes, metrics and communication
========================================

A device mesh arranges ranks on axes for data, pipeline and tensor parallelism. This example prints the coordinates of
four ranks, trains on digits on a mesh of 2 x 2 with :class:`~panther.distributed.HybridParallelTrainer`, collects
metrics of all ranks, and profiles the collective operations.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.distributed import (
    DeviceUtilization,
    DistributedMetricsCollector,
    HybridParallelTrainer,
    launch,
    make_mesh,
    profile_communication_overhead,
)

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
width = 128 if QUICK else 512

# %%
# Coordinates
# -----------
#
# Ranks that differ along ``tp`` only hold shards of the same layers; ranks that differ along ``dp`` only hold the same
# shards and train on different samples.


def coordinates():
    mesh = make_mesh(dp=2, tp=2)
    return {
        axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names
    }


for rank, seen in enumerate(
    launch(coordinates, nproc=4, start_method="fork")
):
    print(f"rank {rank}: {seen}")

# %%
# Train
# -----
#
# 1,797 digits of scikit-learn; 357 are held out. Each rank passes the samples of its coordinate along dp, which has
# every second digit, and gets the mean loss over all ranks. The collector reduces metrics over ranks: means weighted by
# samples, or with ``reduce="each"`` the value of every rank.

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
held_out = slice(1440, None)


def train():
    torch.manual_seed(0)
    layers = [
        {"in_features": 64, "out_features": width, "sketch_size": 8},
        {"in_features": width, "out_features": width, "sketch_size": 8},
        {"in_features": width, "out_features": 10, "sketch_size": 4},
    ]
    config = {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "gradient_clipping": 1.0,
    }
    trainer = HybridParallelTrainer({"layers": layers}, config)
    optimizer = torch.optim.Adam(trainer.model.parameters(), lr=3e-3)
    # Equal samples along tp, different ones along dp.
    samples = torch.arange(trainer.dp_rank, 1440, 2)
    rank = pr.distributed.get_rank()
    collector = DistributedMetricsCollector(rank, 4)
    with DeviceUtilization() as utilization:
        losses = [
            trainer.train_step(
                (images[batch], labels[batch]),
                optimizer,
                nn.CrossEntropyLoss(),
            )
            for _ in range(1 if QUICK else 8)
            for batch in samples.split(80)
        ]
    with torch.no_grad():
        predicted = trainer.model(images[held_out]).argmax(1)
    right = (predicted == labels[held_out]).float()
    collector.update_metric("loss", losses[-1], weight=80)
    collector.update_metric(
        "held-out accuracy", right.mean().item(), weight=len(right)
    )
    collector.update_metric(
        "first label", labels[samples[0]].item(), reduce="each"
    )
    collector.update_metric(
        "utilization", utilization.value, reduce="each"
    )
    local = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel()
        for p in trainer.model.parameters()
    )
    return (
        trainer.dp_rank,
        local,
        losses,
        collector.compute_global_metrics(),
        str(trainer.report),
    )


ranks = launch(train, nproc=4, start_method="fork")
print(ranks[0][4])
for rank, (dp_rank, local, losses, _, _) in enumerate(ranks):
    print(
        f"rank {rank}: dp {dp_rank}, {local:,} parameters here, losses "
        f"{losses[0]:.4f} to {losses[-1]:.4f}"
    )
for name, value in ranks[0][3].items():
    print(f"{name}: {value:.3f}")

# %%
# Four processes share the cores of this machine, so their utilization is low. On a machine with a core or a GPU for
# each rank, a rank with a low value waits for the others.

# %%
# Profile the communication
# -------------------------
#
# :func:`~panther.distributed.profile_communication_overhead` times collective operations over message sizes. Small
# messages cost the latency, large ones the bandwidth: here of processes on one machine, over the loopback interface.

message_sizes = [2**k for k in range(10, 21, 5 if QUICK else 2)]
profile = launch(
    lambda: profile_communication_overhead(
        message_sizes, repetitions=3 if QUICK else 10, show=False
    ),
    nproc=2,
    start_method="fork",
)[0]
print(profile)

figure, (left, right) = plt.subplots(1, 2)
left.plot(ranks[0][2])
left.set(xlabel="step", ylabel="mean loss over all ranks")
for operation in dict.fromkeys(
    timing.operation for timing in profile.timings
):
    timings = [
        timing
        for timing in profile.timings
        if timing.operation == operation
    ]
    right.plot(
        [t.message_bytes for t in timings],
        [t.time_ms for t in timings],
        marker="o",
        label=operation,
    )
right.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
right.legend(fontsize=8)
plt.show()

# %%
# :doc:`/howto/hybrid-parallel` has all settings. torch's profiler shows which part of a script's time is
# communication (:ref:`profiling-a-script`).
