"""Runs that are killed at random moments and resumed: the trials behind tests/faults and `make torture`."""

import hashlib
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import checkpoint, launch
from panther.errors import DistributedError
from panther.nn import SKLinear
from panther.train import Callback, TrainConfig, Trainer

STEPS = 24
MOMENTS = ("any", "in a file", "before the manifest", "before the rename", "after the rename", "in start-up")
VICTIMS = ("worker", "process group")


@dataclass(frozen=True)
class Trial:
    """One run and how it is killed."""

    seed: int
    moment: str
    victim: str
    rank: int
    fraction: float
    """Of the time of a whole run, for ``"any"``; of the checkpoints, for the others."""


def trials(n: int, seed: int = 0) -> list[Trial]:
    """Trials over all kinds, half of them at any moment."""
    draw = random.Random(seed)
    found = []
    for number in range(n):
        moment = "any" if number % 2 else MOMENTS[1 + (number // 2) % (len(MOMENTS) - 1)]
        found.append(Trial(number, moment, VICTIMS[number % 4 // 2], draw.randrange(2), draw.random()))
    return found


class _Report(Callback):
    """Notes the first step, and every checkpoint that is finished, where a kill cannot take it back."""

    def __init__(self, directory: Path, begun: float) -> None:
        self.directory, self.begun, self.first = directory, begun, True

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if dist.get_rank() == 0:
            done = checkpoint.checkpoints(self.directory / "run")
            line = {"finished": done[-1].name if done else None}
            if self.first:
                line["first_step_s"] = time.time() - self.begun
            self.first = False
            with open(self.directory / "seen", "a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


def train(directory: str, begun: float, kill: Trial | None, whole_s: float) -> str | None:
    """What a worker runs; the digest of the trained model on rank 0."""
    if kill is not None:
        _arm(kill, whole_s)
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(SKLinear(32, 64, 2), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(90, 32, generator=generator), torch.randint(4, (90,), generator=generator)
    config = TrainConfig(
        max_steps=STEPS,
        learning_rate=0.01,
        schedule="cosine",
        checkpoint_dir=f"{directory}/run",
        checkpoint_every_n_steps=2,
        keep_checkpoints=2,
        timeout_s=30,
    )
    data = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    trainer = Trainer(model, torch.optim.AdamW, nn.CrossEntropyLoss(), config, [_Report(Path(directory), begun)])
    trainer.fit(data)
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.module.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _arm(kill: Trial, whole_s: float) -> None:
    """Set the trap in the process that is to die, or that ends its whole group."""
    if dist.get_rank() != kill.rank:
        return

    def die(*args: object, **kwargs: object) -> None:
        if kill.victim == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(int(os.environ["SURVIVAL_GROUP"]), signal.SIGKILL)

    if kill.moment == "in start-up":
        die()
    if kill.moment == "any":
        timer = threading.Timer(kill.fraction * whole_s, die)
        timer.daemon = True
        timer.start()
        return
    from panther.distributed import _checkpoint_files as files

    count, at = [0], 1 + int(kill.fraction * STEPS // 2)

    def trapped(function, before):
        def run(*args, **kwargs):
            count[0] += 1
            if count[0] == at and before:
                if kill.moment == "in a file":
                    Path(args[1]).write_bytes(b"half a file")
                die()
            result = function(*args, **kwargs)
            if count[0] == at:
                die()
            return result

        return run

    if kill.moment == "in a file":
        files.save_file = trapped(files.save_file, True)
    elif kill.moment == "before the manifest":  # only rank 0 writes it, and renames
        files.Writer.finish = trapped(files.Writer.finish, True)
    else:
        files.publish = trapped(files.publish, kill.moment == "before the rename")


def run_in_group(directory: Path, kill: Trial | None, whole_s: float = 0.0) -> tuple[str | None, float]:
    """One launch of two workers in a process group of their own; the digest, None if it did not end, and seconds."""
    begun = time.time()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.environ["SURVIVAL_GROUP"] = str(os.getpid())
            digest, _ = launch(train, str(directory), begun, kill, whole_s, nproc=2, start_method="fork")
            (directory / "digest").write_text(digest or "")
            code = 0
        except DistributedError as error:
            (directory / "error").write_text(str(error))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)  # whatever outlived the kill of one of its processes
    except ProcessLookupError:
        pass
    digest = directory / "digest"
    found = digest.read_text() if os.waitstatus_to_exitcode(status) == 0 else None
    digest.unlink(missing_ok=True)
    return found, time.time() - begun


@dataclass(frozen=True)
class Outcome:
    """What a trial showed."""

    trial: Trial
    killed: bool
    """False where the run ended before the moment came."""
    identical: bool
    unreadable: int
    lost: bool
    """Whether a checkpoint that was finished before the kill was gone after it."""
    first_step_s: float
    """From the second start to its first step."""


def survive(directory: Path, trial: Trial, expected: str, whole_s: float) -> Outcome:
    """Kill a run, look at what it left, resume it, and compare."""
    directory.mkdir()
    digest, _ = run_in_group(directory, trial, whole_s)
    killed = digest is None
    seen = directory / "seen"
    lines = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    finished = max((line["finished"] for line in lines if line["finished"]), default="")
    left = checkpoint.checkpoints(directory / "run")
    unreadable = 0
    for path in left:
        model = nn.Sequential(SKLinear(32, 64, 2), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
        try:
            checkpoint.load(path, model, torch.optim.AdamW(model.parameters()))
        except Exception:
            unreadable += 1
    lost = bool(finished) and (not left or left[-1].name < finished)
    seen.unlink(missing_ok=True)
    if killed:
        digest, _ = run_in_group(directory, None)
    lines = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    first = next((line["first_step_s"] for line in lines if "first_step_s" in line), float("nan"))
    return Outcome(trial, killed, digest == expected, unreadable, lost, first)
