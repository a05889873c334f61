"""A network for digits on two of Ray's workers, restarted if one fails.

The environment variable OUT names the folder of the run.
"""

import os

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import panther as pr
from panther.distributed import checkpoint
from panther.integrations.ray import RayTrainer


def network():
    return nn.Sequential(
        pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)
    )


def digits(rows):
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[rows] / 16, dtype=torch.float32)
    return TensorDataset(x, torch.tensor(labels[rows]))


def training_data():
    return digits(slice(1536))


def held_out_data():
    return digits(slice(1536, None))


if __name__ == "__main__":
    config = pr.train.TrainConfig(
        epochs=2,
        batch_size=32,
        learning_rate=1e-2,
        checkpoint_dir=os.environ["OUT"],
        checkpoint_every_n_steps=12,
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
    result = trainer.fit(training_data, held_out_data)
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
