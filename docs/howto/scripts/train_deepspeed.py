"""A network for digits on DeepSpeed's ZeRO 2: saved, resumed, exported.

The environment variable OUT names the folder of the run.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.integrations.deepspeed import (
    export,
    initialize,
    load_checkpoint,
    save_checkpoint,
)

CONFIG = {
    # The batch of one process, on a CPU too.
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "torch_adam": True},
    },
}


def network():
    return nn.Sequential(
        pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)
    )


def train(engine, steps):
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    rank, world = (
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
    )
    for step in range(engine.global_steps, steps):
        first = 16 * (world * step + rank)
        rows = (first + torch.arange(16)) % len(images)
        x, y = images[rows], labels[rows]
        loss = nn.functional.cross_entropy(
            engine(x.to(engine.device)), y.to(engine.device)
        )
        engine.backward(loss)
        engine.step()
    return loss.item()


if __name__ == "__main__":
    out = os.environ["OUT"]
    pr.distributed.init()
    # On every rank the sketches of rank 0.
    engine, *_ = initialize(network(), CONFIG)
    first, last = train(engine, 1), train(engine, 32)
    save_checkpoint(engine, os.path.join(out, "checkpoints"))

    # It may run on another number of processes.
    resumed, *_ = initialize(network(), CONFIG)
    load_checkpoint(resumed, os.path.join(out, "checkpoints"))
    same = resumed.module[0].seed == engine.module[0].seed
    train(resumed, 40)
    export(resumed, os.path.join(out, "model"))
    if torch.distributed.get_rank() == 0:
        print(f"loss {first:.3f}, then {last:.3f}")
        print(
            f"saved at step {engine.global_steps}; resumed there with "
            f"{'the same' if same else 'other'} sketches"
        )
    pr.distributed.shutdown()
