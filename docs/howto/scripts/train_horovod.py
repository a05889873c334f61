"""A sketched network for digits on Horovod, with 16-bit gradients.

The environment variable OUT names the folder of the run.
"""

import os

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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
    pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
# Here they become equal.
optimizer = DistributedOptimizer(optimizer, model, compression="fp16")

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(
    torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
)
sampler = DistributedSampler(digits, hvd.size(), hvd.rank())
loader = DataLoader(digits, batch_size=16, sampler=sampler)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = metric_average(loss, "loss")
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}: loss {mean:.3f} on {hvd.size()} "
            "processes"
        )

if hvd.rank() == 0:
    pr.save_compressed(model, os.path.join(os.environ["OUT"], "model"))
hvd.shutdown()
