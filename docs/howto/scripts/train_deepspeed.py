"""A sketched network on DeepSpeed's ZeRO 2: saved, resumed, exported.

The environment variable OUT names the folder of the run.
"""

import os

import torch
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
        "params": {"lr": 1e-3, "torch_adam": True},
    },
}


def network():
    return nn.Sequential(
        pr.nn.SKLinear(256, 256, 8), nn.ReLU(), nn.Linear(256, 4)
    )


def train(engine, steps):
    rank, world = (
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
    )
    for step in range(engine.global_steps, steps):
        x = torch.randn(
            world,
            16,
            256,
            generator=torch.Generator().manual_seed(step),
        )[rank].to(engine.device)
        loss = nn.functional.cross_entropy(
            engine(x), x[:, :64].sum(1).sign().add(1).long()
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
