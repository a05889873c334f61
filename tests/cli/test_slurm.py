"""The script of ``panther init slurm`` under a real Slurm: two tasks that train over gloo, also when queued again."""

import hashlib
import socket
import sys
from pathlib import Path

import pytest
import torch
import waits
from slurm_cluster import SlurmCluster, missing
from torch import nn

import panther as pr
from panther.cli import main
from panther.distributed import checkpoint

pytestmark = [
    pytest.mark.engine_slow,
    pytest.mark.distributed,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
STEPS, WAIT_AT = 12, 6

SCRIPT = f"""
import signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import panther as pr
from panther.train import Callback, TrainConfig, Trainer


class WaitOnce(Callback):
    # In the first attempt, at one step, until SIGTERM has come.
    def __init__(self):
        self.mark, self.come = Path(f"waiting-{{torch.distributed.get_rank()}}"), False

    def on_start(self, trainer):
        note_it = signal.getsignal(signal.SIGTERM)

        def note(number, frame):
            self.come = True
            note_it(number, frame)

        signal.signal(signal.SIGTERM, note)

    def on_step(self, trainer, loss):
        if trainer.step == {WAIT_AT} and not self.mark.exists():
            self.mark.touch()
            while not self.come:
                time.sleep(0.05)


pr.distributed.init(timeout_s=600)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 32, generator=generator), torch.randint(4, (96,), generator=generator))
model = nn.Sequential(pr.nn.SKLinear(32, 64, 2, seed=3), nn.ReLU(), nn.Linear(64, 4))
config = TrainConfig(
    max_steps={STEPS}, batch_size=4, learning_rate=0.01, strategy="ddp", timeout_s=600,
    checkpoint_dir="run", checkpoint_every_n_steps=4,
)
callbacks = [WaitOnce()] if sys.argv[1] == "wait" else []
Trainer(model, None, nn.CrossEntropyLoss(), config, callbacks).fit(data)
print("size", torch.distributed.get_world_size(), torch.distributed.get_backend())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes the files of a job into a folder of its own; returns the script to submit and the folder for PATH."""

    def write(name, argument):
        folder, binaries = tmp_path / name, tmp_path / "bin"
        folder.mkdir()
        binaries.mkdir(exist_ok=True)
        command = binaries / "panther"
        command.write_text(
            f"#!/bin/bash\nexport PYTHONPATH={Path(pr.__file__).parents[1]} OMP_NUM_THREADS=1\n"
            f'exec {sys.executable} -m panther "$@"\n'
        )
        command.chmod(0o755)
        monkeypatch.chdir(folder)
        Path("train.py").write_text(SCRIPT)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        options = ["--nodes=2", "--cpus-per-node=1", "--backend=gloo", f"--port={port}", f"--name={name}"]
        assert main(["init", "slurm", *options, "train.py", argument]) == 0
        return folder / "slurm.sbatch", binaries

    return write


def digest(folder):
    """Of the model at the end of a run."""
    model = nn.Sequential(pr.nn.SKLinear(32, 64, 2), nn.ReLU(), nn.Linear(64, 4))
    assert checkpoint.load(checkpoint.checkpoints(folder / "run")[-1], model).step == STEPS
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_two_tasks_train_and_a_requeue_changes_no_bit(cluster, job):
    script, path = job("plain", "run")
    state = cluster.wait(cluster.submit(script, path=path))
    output = next(script.parent.glob("plain-*.out")).read_text()
    assert (state["JobState"], state["NumNodes"], state["NodeList"]) == ("COMPLETED", "2", "node[1-2]"), output
    assert "size 2 gloo" in output
    expected = digest(script.parent)

    script, path = job("requeued", "wait")
    number = cluster.submit(script, path=path)
    waits.until(
        lambda: len(list(script.parent.glob("waiting-*"))) == 2,
        lambda: next(script.parent.glob("requeued-*.out")).read_text(),
        limit_s=300,
    )
    assert cluster.state(number)["JobState"] == "RUNNING"
    assert cluster.call("scontrol", "requeue", number) == ""
    state = cluster.wait(number)
    output = next(script.parent.glob("requeued-*.out")).read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), output
    assert f"stopped by SIGTERM after step {WAIT_AT + 1}: a checkpoint is in run" in output
    assert output.count("first node: node1") == 2
    assert digest(script.parent) == expected


def test_a_lost_task_fails_the_job(cluster, job):
    script, path = job("lost", "run")
    crash = "import os; os.environ['SLURM_NODEID'] == '1' and os.kill(os.getpid(), 9)\n"
    (script.parent / "train.py").write_text(crash + SCRIPT.replace("timeout_s=600", "timeout_s=10"))
    state = cluster.wait(cluster.submit(script, path=path))
    output = next(script.parent.glob("lost-*.out")).read_text()
    assert state["JobState"] == "FAILED", output
    assert "rank 1 of 2 was ended by SIGKILL" in output
