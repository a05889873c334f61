"""Train, resume and compress with Lightning's Trainer.

Run it with python, or with torchrun --nproc-per-node 2.
"""

import os
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn

import panther as pr
from panther.integrations.lightning import CompressCallback


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            pr.nn.SKLinear(64, 64, 4, seed=1),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def training_step(
        self, batch: list[torch.Tensor], index: int
    ) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


processes = int(os.environ.get("WORLD_SIZE", 1))
folder = os.environ.get("OUT") or tempfile.mkdtemp()
options = {
    "accelerator": "cpu",
    "devices": processes,
    "strategy": "ddp" if processes > 1 else "auto",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
lightning.seed_everything(0)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
data = torch.utils.data.TensorDataset(images[:64], labels[:64])
batches = list(images[:160].split(16))

saved = lightning.pytorch.callbacks.ModelCheckpoint(
    folder, filename="checkpoint", save_last=False
)
lightning.Trainer(max_steps=4, callbacks=[saved], **options).fit(
    Net(), torch.utils.data.DataLoader(data, 8)
)

net = Net()
compress = CompressCallback(
    "model",
    bits=8,
    calibration=batches,
    forms=("int8", "low_rank"),
    measure_speed=False,
    heal=pr.HealConfig(max_steps=5, learning_rate=1e-4),
)
trainer = lightning.Trainer(
    max_steps=8,
    callbacks=[compress],
    enable_checkpointing=False,
    **options,
)
trainer.fit(
    net,
    torch.utils.data.DataLoader(data, 8),
    ckpt_path=f"{folder}/checkpoint.ckpt",
)
assert trainer.global_step == 8
if trainer.is_global_zero:
    print(compress.report)
    pr.save_compressed(net.model, f"{folder}/model")
    x = images[:3]
    assert torch.equal(
        pr.load_compressed(f"{folder}/model", Net().model).eval()(x),
        net.model.eval()(x),
    )
    print(f"saved, resumed and compressed on {processes} processes")
