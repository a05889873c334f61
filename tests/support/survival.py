"""Runs that are killed at random moments and resumed: the trials behind tests/faults and `make torture`."""

import contextlib
import hashlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import checkpoint, launch
from panther.errors import DistributedError
from panther.nn import SKLinear
from panther.optim import MuonAdamW, SketchedAdamW
from panther.train import Callback, TrainConfig, Trainer

STEPS, EVERY = 24, 2  # of a run; between two of its checkpoints
ANY = "at any time"
MOMENTS = (
    "in a step", "in a file", "before the manifest", "before the rename", "in the rename", "after the rename",
    "before an old one goes", "in start-up", "while resuming",
)  # fmt: skip
VICTIMS = ("worker", "process group")
LAYOUTS = ("ddp", "fsdp", "zero1", "tp", "pp", "hybrid")  # of two ranks; the last one of two by two
OPTIMIZERS = {optimizer.__name__: optimizer for optimizer in (torch.optim.AdamW, SketchedAdamW, MuonAdamW)}
_OF_RANK_0 = MOMENTS[2:7]  # the other rank has no part in these


@dataclass(frozen=True)
class Trial:
    """One run and how it is killed."""

    seed: int
    moment: str
    victim: str
    rank: int
    fraction: float
    """Of the time of a whole run, for ``ANY``; of the times that the moment comes, for the others."""


@dataclass(frozen=True)
class Run:
    """What is trained."""

    layout: str = "ddp"
    optimizer: str = "AdamW"

    @property
    def num_ranks(self) -> int:
        return 4 if self.layout == "hybrid" else 2

    @property
    def is_named(self) -> bool:
        """Whether the parameters are divided, so that only names tell which matrices an optimizer selects."""
        return self.layout in ("pp", "zero1")

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](model.named_parameters() if self.is_named else model.parameters())

    def model(self) -> nn.Sequential:
        """A model for DDP; for other runs one without buffers, which differ between ranks, and with a wide matrix."""
        if self == Run():
            return nn.Sequential(SKLinear(32, 64, 2), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
        hidden = [nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(SKLinear(32, 64, 2), nn.LayerNorm(64), nn.Dropout(0.2), *hidden, nn.Linear(64, 4))


def trials(n: int, seed: int = 0) -> list[Trial]:
    """Trials over all kinds, every fifth of them at a time that nothing in the run tells."""
    draw = random.Random(seed)
    found = []
    for number in range(n):
        moment = ANY if number % 5 == 4 else MOMENTS[(number - number // 5) % len(MOMENTS)]
        rank, fraction = draw.randrange(2), draw.random()
        found.append(Trial(number, moment, draw.choice(VICTIMS), 0 if moment in _OF_RANK_0 else rank, fraction))
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


def train(directory: str, begun: float, run: Run, kill: Trial | None, whole_s: float) -> str:
    """What a worker runs; the digest of what the rank holds of the trained model."""
    if kill is not None:
        _arm(kill, OPTIMIZERS[run.optimizer], whole_s)
    torch.manual_seed(100 + dist.get_rank())
    generator, samples = torch.Generator().manual_seed(1), 96 if run.layout in ("pp", "hybrid") else 90
    x, y = torch.randn(samples, 32, generator=generator), torch.randint(4, (samples,), generator=generator)
    config = TrainConfig(
        max_steps=STEPS,
        strategy=run.layout,
        tensor_parallel_size=2 if run.layout == "hybrid" else None,
        learning_rate=0.01,
        schedule="cosine",
        checkpoint_dir=f"{directory}/run",
        checkpoint_every_n_steps=EVERY,
        keep_checkpoints=2,
        timeout_s=600,  # No rank waits so long: launch ends all ranks when one is killed.
    )
    data = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    model = run.model()
    optimizer = run.make_optimizer(model) if run.is_named else OPTIMIZERS[run.optimizer]
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, [_Report(Path(directory), begun)])
    trainer.fit(data)
    digest = hashlib.sha256()
    for part in trainer.model if isinstance(trainer.model, list) else [trainer.model]:
        for name, value in sorted(part.state_dict().items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(name.encode() + local.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _arm(kill: Trial, optimizer: type[torch.optim.Optimizer], whole_s: float) -> None:
    """Set the trap in the process that is to die, or that ends its whole group."""
    if dist.get_rank() != kill.rank:
        return

    def die(*args: object, **kwargs: object) -> None:
        if kill.victim == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(int(os.environ["SURVIVAL_GROUP"]), signal.SIGKILL)

    if kill.moment == "in start-up":
        die()
    if kill.moment == ANY:
        timer = threading.Timer(kill.fraction * whole_s, die)
        timer.daemon = True
        timer.start()
        return
    from panther.distributed.checkpoint import folders, storage

    def trap(owner, name, times, before=True, first=1, every=1):
        """Die at one of the calls, ``first``, ``first + every`` and so on, before it or after it."""
        function, count, at = getattr(owner, name), [0], first + every * int(kill.fraction * times)

        def run(*args, **kwargs):
            count[0] += 1
            if count[0] == at and before:
                if kill.moment == "in a file":
                    Path(args[0]).write_bytes(b"half a file")
                die()
            result = function(*args, **kwargs)
            if count[0] == at:
                die()
            return result

        setattr(owner, name, run)

    saves = STEPS // EVERY
    if kill.moment == "in a step":
        trap(optimizer, "step", STEPS, before=kill.rank == 0)
    elif kill.moment == "in a file":
        trap(storage, "write_file", saves)
    elif kill.moment == "before the manifest":
        trap(storage._Writer, "finish", saves)
    elif kill.moment == "in the rename":  # the folder has its name, of which the disk may know nothing yet
        trap(folders, "sync_folder", saves, first=2, every=2)
    elif kill.moment == "before an old one goes":  # one does with each save from the third on
        trap(folders, "remove", saves - 2)
    elif kill.moment == "while resuming":
        trap(checkpoint, "load", 1, before=kill.fraction < 0.5)
    else:
        trap(folders, "publish", saves, before=kill.moment == "before the rename")


def run_in_group(
    directory: Path,
    kill: Trial | None,
    whole_s: float = 0.0,
    run: Run = Run(),
) -> tuple[str | None, float]:
    """One launch of workers in a process group of their own; the digest, None if it did not end, and seconds."""
    begun = time.time()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.environ["SURVIVAL_GROUP"] = str(os.getpid())
            tempfile.tempdir = str(directory)  # what launch cannot remove, being killed, goes with the trial
            arguments = (str(directory), begun, run, kill, whole_s)
            digests = launch(train, *arguments, nproc=run.num_ranks, start_method="fork")
            (directory / "digest").write_text(" ".join(digests))
            code = 0
        except DistributedError as error:
            (directory / "error").write_text(str(error))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whatever outlived the kill of one of its processes
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


def survive(
    directory: Path,
    trial: Trial,
    expected: str,
    whole_s: float,
    run: Run = Run(),
) -> Outcome:
    """Kill a run, look at what it left, resume it, and compare."""
    directory.mkdir()
    if trial.moment == "while resuming":  # there must be something to go on from
        first = replace(trial, moment="after the rename", victim="process group", rank=0)
        run_in_group(directory, first, whole_s, run)
    digest, _ = run_in_group(directory, trial, whole_s, run)
    killed = digest is None
    finished = max((line["finished"] for line in _seen(directory) if line["finished"]), default="")
    left = checkpoint.checkpoints(directory / "run")
    unreadable = 0
    for path in left:
        model = run.model()
        try:
            checkpoint.load(path, model, run.make_optimizer(model))
        except Exception:
            unreadable += 1
    lost = bool(finished) and (not left or left[-1].name < finished)
    (directory / "seen").unlink(missing_ok=True)
    if killed:
        digest, _ = run_in_group(directory, None, run=run)
    first = next((line["first_step_s"] for line in _seen(directory) if "first_step_s" in line), float("nan"))
    return Outcome(trial, killed, digest == expected, unreadable, lost, first)


def _seen(directory: Path) -> list[dict[str, object]]:
    path = directory / "seen"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be a half
