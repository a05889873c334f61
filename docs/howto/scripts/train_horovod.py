"""A sketched network on Horovod, with gradients sent in 16 bits.

The environment variable OUT names the folder of the run.
"""

import os

import horovod.torch as hvd
import torch
from torch import nn

import panther as pr
from panther.integrations.horovod import (
    DistributedOptimizer,
    metric_average,
)

hvd.init()
torch.manual_seed(hvd.rank())  # the models start out different
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

model = nn.Sequential(
    pr.nn.SKLinear(256, 256, 8), nn.ReLU(), nn.Linear(256, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Here they become equal.
optimizer = DistributedOptimizer(optimizer, model, compression="fp16")

for step in range(32):
    x = torch.randn(
        hvd.size(),
        16,
        256,
        generator=torch.Generator().manual_seed(step),
    )[hvd.rank()]
    loss = nn.functional.cross_entropy(
        model(x), x[:, :64].sum(1).sign().add(1).long()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        mean = metric_average(loss, "loss")
        if hvd.rank() == 0:
            print(
                f"step {step + 1}: loss {mean:.3f} on {hvd.size()} "
                "processes"
            )

if hvd.rank() == 0:
    pr.save_compressed(model, os.path.join(os.environ["OUT"], "model"))
hvd.shutdown()
