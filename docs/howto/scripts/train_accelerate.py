"""Train a sketched model with Accelerate, and continue a checkpoint.

Run it with python, or with torchrun.
"""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from torch import nn

import panther as pr

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images[:64].float() / 16, labels[:64]


def prepared(accelerator: Accelerator) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(
        pr.nn.SKLinear(64, 64, 4, seed=1), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, fused=True
    )
    data = torch.utils.data.TensorDataset(images, labels)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, 8)
    )
    if accelerator.num_processes > 1:
        # All processes have the same sketches, or this is an error.
        pr.distributed.verify_sketches(model)
    return model, optimizer, loader


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: object,
) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(
                nn.functional.cross_entropy(model(x), y)
            )
            optimizer.step()
            optimizer.zero_grad()


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
(folder,) = broadcast_object_list(
    [os.environ.get("OUT") or tempfile.mkdtemp()]
)
model, optimizer, loader = prepared(accelerator)
train(accelerator, model, optimizer, loader)
accelerator.save_state(f"{folder}/state")
train(accelerator, model, optimizer, loader)
trained = [
    parameter.detach().clone() for parameter in model.parameters()
]

accelerator.load_state(f"{folder}/state")
train(accelerator, model, optimizer, loader)
for parameter, trained_value in zip(
    model.parameters(), trained, strict=True
):
    assert torch.equal(parameter, trained_value)

if accelerator.is_main_process:
    layers = accelerator.unwrap_model(model)
    pr.save_compressed(layers, f"{folder}/model")
    plain = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    restored = pr.load_compressed(f"{folder}/model", plain)
    assert torch.equal(restored(images), layers(images))
    print(f"saved and resumed on {accelerator.num_processes} processes")
accelerator.end_training()
