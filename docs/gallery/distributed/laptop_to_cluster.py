"""
From a laptop to Slurm, Kubernetes and Ray
==========================================

One training script runs as a single process, on several processes of one machine, and on the nodes of a cluster:
``panther launch`` or torchrun starts it, and ``panther init`` writes the files for a scheduler. This example runs a
script on two local processes, writes the files for three systems, and shows what is different in each.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from panther.distributed import launch_distributed_training

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The script
# ----------
#
# :class:`~panther.train.Trainer` joins the processes that a launcher started, and 64 samples of each step are divided
# among them. The folder of checkpoints comes from the command line, because it differs between systems. Ray starts its
# workers itself, so there the script names their number and passes the function that builds the model.

SCRIPT = """\
import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import panther as pr
from panther.train import TrainConfig, Trainer


def build():
    torch.manual_seed(0)
    hidden = pr.nn.SKLinear(256, 256, 8)
    first, last = nn.Linear(64, 256), nn.Linear(256, 10)
    return nn.Sequential(first, nn.ReLU(), hidden, nn.ReLU(), last)


digits = load_digits()
# 1792 samples, so that all batches are full.
images = torch.tensor(digits.data[:1792], dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target[:1792]))
steps, folder = int(sys.argv[1]), sys.argv[2]
world_size = int(os.environ.get("WORLD_SIZE", 1))
settings = {
    "max_steps": steps,
    "learning_rate": 3e-3,
    "log_every_n_steps": 1,
    "checkpoint_dir": folder,
    "progress": False,  # a line for each step otherwise
}
optimizer, loss_fn = torch.optim.Adam, nn.CrossEntropyLoss()
if "RAY_ADDRESS" in os.environ:  # a job of Ray
    from panther.integrations.ray import RayTrainer
    from ray.train import ScalingConfig

    workers = ScalingConfig(num_workers=8, use_gpu=True)
    config = TrainConfig(batch_size=8, **settings)
    trainer = RayTrainer(
        build, optimizer, loss_fn, config, scaling_config=workers
    )
    trainer.fit(data)
else:
    batch_size = 64 // world_size
    config = TrainConfig(
        strategy="ddp", batch_size=batch_size, **settings
    )
    trainer = Trainer(build(), optimizer, loss_fn, config)
    trainer.fit(data)
    info = pr.distributed.get_distributed_info()
    print(
        f"rank {info.rank} of {info.world_size} (local rank "
        f"{info.local_rank}), {info.device}, {info.backend}, "
        f"{config.batch_size} samples a step, loss "
        f"{trainer.history['loss'][1][-1]:.6f}"
    )
"""
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
script = folder / "train.py"
script.write_text(SCRIPT)
steps = 40 if QUICK else 160

# %%
# On a laptop
# -----------
#
# As one process, by ``python train.py``; and as two, by ``panther launch --nproc-per-node 2 train.py``, which
# :func:`~panther.distributed.launch_distributed_training` is from Python. ``torchrun --nproc-per-node 2 train.py`` does
# the same without logs for each rank.

ran = subprocess.run(
    [sys.executable, script, str(steps), folder / "one"],
    capture_output=True,
    text=True,
    check=True,
)
print(ran.stdout, end="")
logs = launch_distributed_training(
    script,
    steps,
    folder / "two",
    nproc_per_node=2,
    log_dir=folder / "logs",
)
for path in sorted(logs.glob("attempt-0/rank-*.out")):
    print(f"{path.name}: {path.read_text()}", end="")

# %%
# Both saw the same 64 samples in each step, so their losses agree up to rounding.


def losses(name):
    records = [
        json.loads(line)
        for line in (folder / name / "log.jsonl")
        .read_text()
        .splitlines()
    ]
    return [record["loss"] for record in records if "loss" in record]


one, two = losses("one"), losses("two")
figure, (left, right) = plt.subplots(1, 2)
left.plot(one, color="lightgray", linewidth=6, label="python")
left.plot(two, label="panther launch, 2 processes")
left.set(xlabel="step", ylabel="training loss", title="Losses")
left.legend()
right.semilogy(
    [max(abs(a - b), 1e-9) for a, b in zip(one, two, strict=True)]
)
right.set(
    xlabel="step",
    ylabel="difference of the losses",
    title="Two processes against one",
    ylim=(1e-9, 1),
)
plt.show()

# %%
# Files for a cluster
# -------------------
#
# The same job on two nodes with four GPUs each. ``panther init`` takes the same options for each system; the file says
# how it is submitted.


def init(kind, *options):
    job = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--cpus-per-node",
        "32",
        "--max-restarts",
        "2",
        *options,
    ]
    command = [
        sys.executable,
        "-m",
        "panther",
        "init",
        kind,
        *job,
        "train.py",
        "1000",
        "/runs/first",
    ]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    )
    print(ran.stdout)


def excerpt(name, begin, lines):
    """Print lines of a file, from the one that contains ``begin``."""
    script = (folder / name).read_text().splitlines()
    start = next(
        number for number, line in enumerate(script) if begin in line
    )
    print(*script[start : start + lines], "...", sep="\n")


# %%
# **Slurm**: a launcher on each node, which finds the others at the first node of the job. Before the time limit the
# processes get SIGTERM, save, and the job is queued again.

init("slurm", "--time", "24:00:00")
excerpt("slurm.sbatch", "#SBATCH --job-name", 10)
excerpt("slurm.sbatch", "arguments=(", 9)
excerpt("slurm.sbatch", "srun --kill", 2)

# %%
# **Kubernetes**: a pod for each node, whose number comes from the Job. The image contains Panther and the script. Files
# of a pod are deleted with it, so checkpoints go to a volume.

init(
    "kubernetes",
    "--image",
    "registry/train:1",
    "--volume",
    "runs:/runs",
)
excerpt("job.yaml", "completions", 3)
excerpt("job.yaml", "image:", 12)

# %%
# **Ray**, by KubeRay: Ray starts eight workers, and the script runs once, on the head. This is the branch of the script
# with ``RayTrainer``.

init("ray", "--image", "registry/train:1", "--volume", "runs:/runs")
excerpt("rayjob.yaml", "run.sh:", 1)
excerpt("rayjob.yaml", "entrypoint:", 3)
temporary.cleanup()

# %%
# What changes
# ------------
#
# ==================  ============================  ===============================  ==================================
# system              who starts the processes      how they meet                    where checkpoints must be
# ==================  ============================  ===============================  ==================================
# laptop              you                           loopback interface, or a file    any folder
# ``panther launch``  a launcher                    loopback interface, or node 0    a folder that all nodes share
# Slurm               a launcher on each node       the first node of the job        a file system of the cluster
# Kubernetes          a launcher in each pod        a headless Service               a PersistentVolumeClaim
# Ray                 Ray                           Ray's process group              a PersistentVolumeClaim, or storage
# ==================  ============================  ===============================  ==================================
#
# The model, the data and the settings stay the same. On GPUs the processes communicate by NCCL and otherwise by gloo,
# without a change of the script. The files above were written here and not run; :doc:`/howto/launch` says what has been
# run where. :doc:`/howto/ray` has Ray's settings, and :doc:`/howto/networks` what to do where nodes do not find each
# other.
