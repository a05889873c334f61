"""A sketched network on two of Ray's workers, restarted when one fails.

The environment variable OUT names the folder of the run.
"""

import os

import ray
import torch
from torch import nn
from torch.utils.data import TensorDataset

import panther as pr
from panther.distributed import checkpoint
from panther.integrations.ray import RayTrainer


def network():
    return nn.Sequential(
        pr.nn.SKLinear(256, 256, 8), nn.ReLU(), nn.Linear(256, 4)
    )


def samples():
    x = torch.randn(
        512, 256, generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset(x, x[:, :64].sum(1).sign().add(1).long())


if __name__ == "__main__":
    config = pr.train.TrainConfig(
        epochs=2,
        batch_size=32,
        learning_rate=1e-3,
        checkpoint_dir=os.environ["OUT"],
        checkpoint_every_n_steps=4,
    )
    trainer = RayTrainer(
        network,
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        config,
        # With use_gpu=True: a GPU each.
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit(samples, samples)
    print(
        "validation loss",
        result.metrics["validation_loss"],
        "at step",
        result.metrics["step"],
    )
    print("losses", result.return_value["loss"])

    model = network()
    checkpoint.load(result.checkpoint.path, model)
    pr.save_compressed(model, os.path.join(os.environ["OUT"], "model"))
