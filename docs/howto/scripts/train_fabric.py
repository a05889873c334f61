"""Train a sketched model with Fabric, and continue a checkpoint.

Run it with python, or with torchrun.
"""

import os
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr

processes = int(os.environ.get("WORLD_SIZE", 1))
fabric = lightning.Fabric(
    accelerator="cpu",
    devices=processes,
    strategy="ddp" if processes > 1 else "auto",
)
fabric.launch()
folder = fabric.broadcast(os.environ.get("OUT") or tempfile.mkdtemp())

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images[:64].float() / 16, labels[:64]


def prepared() -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(
        pr.nn.SKLinear(64, 64, 4, seed=1), nn.ReLU(), nn.Linear(64, 10)
    )
    model, optimizer = fabric.setup(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    )
    if fabric.world_size > 1:
        pr.distributed.verify_sketches(model)
    data = torch.utils.data.TensorDataset(images, labels)
    return (
        model,
        optimizer,
        fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 8)),
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: object
) -> None:
    for x, y in loader:
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


first = prepared()
train(*first)
fabric.save(
    f"{folder}/state.ckpt", {"model": first[0], "optimizer": first[1]}
)
train(*first)

second = prepared()
fabric.load(
    f"{folder}/state.ckpt", {"model": second[0], "optimizer": second[1]}
)
train(*second)
for a, b in zip(
    first[0].parameters(), second[0].parameters(), strict=True
):
    assert torch.equal(a, b)
fabric.print(f"saved and resumed on {processes} processes")
