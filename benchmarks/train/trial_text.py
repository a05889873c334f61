"""panther train on a sketched transformer of characters: killed and resumed, beside it dense twins and layouts.

The text is that of trials/text_model.py. All runs are of ``panther train`` on two processes of one thread each, by the
settings of trial_text.toml. One is ended twice by SIGKILL to all its processes and started again by the same command;
its log must be, bit for bit, that of one that nobody disturbed, which ends half-way; with --quick it does not, and the
weights must be equal too.
"""

__all__ = ["data", "dense", "gather_once", "loss", "narrower", "run", "sketched"]

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import panther as pr
from benchmarks.harness import ROOT, figure, print_table, write_csv
from benchmarks.trials.text_model import SYMBOLS, Block, Shape, blocks, gather
from panther.distributed import CommunicationCounter, checkpoint, launch

SETTINGS = Path(__file__).with_suffix(".toml")
SHAPE, QUICK = (
    Shape(width=128, hidden=512, layers=3, heads=4),
    Shape(width=64, hidden=128, layers=2, heads=2, context=32),
)
KEPT = 0.25  # of the numbers of a block's matrices
_TEXT = "PANTHER_TRIAL_TEXT"  # names the file that gather_once wrote
_FROM_LOG = ("loss", "gradient_norm", "validation_loss")


class Embedding(nn.Module):
    """Characters and places to vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(SYMBOLS, shape.width), nn.Embedding(shape.context, shape.width)
        for table in (self.symbol, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, context)`` to ``(batch, context, width)``."""
        # By a call and not a slice of its weight: tensor parallelism shards the table, and changes the call.
        return self.symbol(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the characters that follow."""

    def __init__(self, pieces: Tensor) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target, ``(context,)`` each."""
        piece = self.pieces[index].long()
        return piece[:-1], piece[1:]


def dense(shape: Shape | None = None) -> nn.Sequential:
    """Build the dense twin; its last layer is not tied to the embedding, which a pipeline may have on another rank."""
    shape = shape or Shape(**_read()["shape"])
    head = nn.Linear(shape.width, SYMBOLS, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    return nn.Sequential(
        Embedding(shape), *(Block(shape) for _ in range(shape.layers)), nn.LayerNorm(shape.width), head
    )


def sketched() -> nn.Sequential:
    """Build the same with SKLinear for the six matrices of a block, of a quarter of the numbers."""
    model = dense()
    for name, layer in list(model.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if isinstance(layer, nn.Linear) and attribute in ("q", "k", "v", "o", "up", "down"):
            size = int(KEPT * layer.in_features * layer.out_features / (layer.in_features + layer.out_features))
            small = pr.nn.SKLinear(
                layer.in_features, layer.out_features, size, bias=layer.bias is not None, sketch="signs"
            )
            if attribute in ("o", "down"):  # what is added to the stream begins small, as in the dense twin
                with torch.no_grad():
                    for factor in (small.S1, small.S2):
                        factor.div_(math.sqrt(2 * (len(model) - 3)))
            setattr(model.get_submodule(parent), attribute, small)
    return model


def narrower() -> nn.Sequential:
    """Build a dense model with about as many parameters as the sketched one has, of fewer features in all layers."""
    shape = Shape(**_read()["shape"])
    numbers = sum(parameter.numel() for parameter in sketched().parameters())
    widths = range(shape.heads, shape.width, shape.heads)
    shapes = [replace(shape, width=width, hidden=width * shape.hidden // shape.width) for width in widths]
    with torch.device("meta"):
        sizes = [sum(parameter.numel() for parameter in dense(narrow).parameters()) for narrow in shapes]
    return dense(shapes[min(range(len(sizes)), key=lambda index: abs(sizes[index] - numbers))])


def data() -> tuple[Pieces, Pieces]:
    """Return samples to train on, which together are the text once, and some that are held out."""
    kept = _read()
    training, context = kept["text"], kept["shape"]["context"]
    starts = torch.arange(0, len(training) - context, context)
    held_out = blocks(kept["held_out"], context + 1, kept["validation"], seed=1)
    return Pieces(training[starts[:, None] + torch.arange(context + 1)]), Pieces(held_out)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats a character."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


_KINDS = {"sketched": sketched, "dense": dense, "narrower": narrower}


@dataclass(frozen=True)
class Run:
    """One run: what is trained, under which settings besides the file's, and when it is disturbed."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    kills: tuple[float, ...] = ()
    """Fractions of the steps after which all its processes are killed."""
    end: float = 1.0
    """The fraction after which it is told to stop by SIGTERM."""


RUNS = (
    Run("sketched, killed twice", "sketched", kills=(0.3, 0.7)),
    Run("dense", "dense"),
    Run("dense, narrower", "narrower"),
    Run("sketched, undisturbed", "sketched", end=0.5),
    Run("sketched, fsdp", "sketched", {"strategy": "fsdp"}, end=0.2),
    Run("sketched, pp = 2", "sketched", {"strategy": "pp", "pipeline_parallel_size": 2, "batch_size": 32}, end=0.2),
)


def run(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each run, and a row for every record of their logs.

    Raises:
        RuntimeError: If the killed run and the undisturbed one differ by a bit.
    """
    steps = 60 if quick else tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["max_steps"]
    given = {"max_steps": steps} | ({"log_every_n_steps": 5, "validate_every_n_steps": 20} if quick else {})
    rows, curves, logs, states = [], [], {}, {}
    with tempfile.TemporaryDirectory(prefix="panther-trial-") as folder:
        gather_once(Path(folder) / "text.pt", QUICK if quick else SHAPE, quick=quick)
        for one in RUNS:
            if quick and one.model == "sketched" and not one.settings:
                one = replace(one, end=1.0)
            place = Path(folder) / one.model / one.name.replace(" ", "-")
            row = {"run": one.name, **_sizes(one.model)}
            log, measured = _train(one, given, place)
            final = _last(log)
            rows.append(row | measured | _bytes_a_step(one, given) | final)
            curves += [{"run": one.name, "step": line["step"], **_chosen(line)} for line in log]
            logs[one.name] = [(line["step"], _chosen(line)) for line in log]
            if one.end == 1.0:
                states[one.name] = _state(one.model, place)
            print_table(rows[-1:])
    killed, undisturbed = RUNS[0].name, "sketched, undisturbed"
    first, second = logs[killed], logs[undisturbed]
    if first[: len(second)] != second:
        raise RuntimeError(f"the log of '{killed}' differs from that of '{undisturbed}'")
    if undisturbed in states and not all(map(torch.equal, states[killed], states[undisturbed])):
        raise RuntimeError(f"the weights of '{killed}' differ from those of '{undisturbed}'")
    return rows, curves


def _train(one: Run, given: dict[str, Any], place: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train, kill and resume; return the log, and the wall and CPU seconds of all processes."""
    settings = given | one.settings | {"checkpoint_dir": str(place)}
    functions = {
        setting: f"benchmarks.train.trial_text:{name}"
        for setting, name in (("data", "data"), ("loss_fn", "loss"), ("model", one.model))
    }
    command = [
        *(sys.executable, "-m", "panther", "train", "--config", str(SETTINGS), "--nproc-per-node", "2"),
        *(f"{key}={value}" for key, value in (functions | settings).items()),
    ]
    wall, cpu = time.monotonic(), _cpu_of_children()
    for fraction in (*one.kills, None):
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        ended = one.end * given["max_steps"] if fraction is None else fraction * given["max_steps"]
        while process.poll() is None and (ended == given["max_steps"] or _steps(place) < ended):
            time.sleep(0.1)
        if process.poll() is None and fraction is not None:
            for pid in _family(process.pid):
                os.kill(pid, signal.SIGKILL)
        elif process.poll() is None:
            process.terminate()
        code = process.wait()
        print(f"{one.name}: ended with {code} after {_steps(place)} steps or more", flush=True)
        if code != (-signal.SIGKILL if fraction is not None else 0 if one.end == 1.0 else 128 + signal.SIGTERM):
            raise RuntimeError(f"{one.name} ended with {code}")
    log = [json.loads(line) for line in (place / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {
        "kills": len(one.kills),
        "steps": log[-1]["step"],
        "wall_s": figure(time.monotonic() - wall),
        "cpu_s": None if one.kills else figure(_cpu_of_children() - cpu),  # who waits for the killed?
    }
    return log, measured


def _family(pid: int) -> list[int]:
    """Return a process and those below it; the workers of a launcher are in sessions of their own."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _steps(place: Path) -> int:
    """Return the last step that the log has."""
    path = place / "log.jsonl"
    whole = (
        [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
        if path.exists()
        else []
    )
    return json.loads(whole[-1])["step"] if whole else 0


def _last(log: list[dict[str, Any]]) -> dict[str, Any]:
    found = {name: value for line in log for name, value in line.items()}
    return {name: round(found[name], 4) if name in found else None for name in ("loss", "validation_loss")}


def _chosen(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line.get(name) for name in _FROM_LOG}


def _state(kind: str, place: Path) -> list[Tensor]:
    """Return the weights and the optimizer's state of a run's last checkpoint."""
    model = _KINDS[kind]()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(place, model, optimizer)
    return [*model.state_dict().values(), *(value for state in optimizer.state.values() for value in state.values())]


def _sizes(kind: str) -> dict[str, Any]:
    model = _KINDS[kind]()
    blocks_ = [p for layer in model if isinstance(layer, Block) for p in layer.parameters() if p.ndim > 1]
    return {"numbers": sum(p.numel() for p in model.parameters()), "in_blocks": sum(p.numel() for p in blocks_)}


def _bytes_a_step(one: Run, given: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that each rank sends in a step without a record: those of three steps less those of two."""
    counts = [launch(_count, one, steps, nproc=2, start_method="fork") for steps in (2, 3)]
    sent = [more - less for less, more in zip(*counts, strict=True)]
    return {"bytes_rank_0": sent[0], "bytes_rank_1": sent[1]}


def _count(one: Run, steps: int) -> int:
    settings: dict[str, Any] = {
        "strategy": "ddp",
        "max_steps": steps,
        "log_every_n_steps": 1000,
        "batch_size": 16,
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(0)
    model = _KINDS[one.model]()
    trainer = pr.train.Trainer(model, loss_fn=loss, config=pr.train.TrainConfig(**settings | one.settings))
    with CommunicationCounter() as traffic:
        trainer.fit(data()[0])
    return traffic.bytes


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def gather_once(path: Path, shape: Shape, *, quick: bool) -> None:
    """Write the text and the model's shape to a file, which this process and its children read."""
    training, held_out = gather(limit=200 if quick else None)
    print(f"{len(training):,} characters to train on, {len(held_out):,} held out", flush=True)
    kept = {
        "text": training.byte(),
        "held_out": held_out.byte(),
        "shape": asdict(shape),
        "validation": 64 if quick else 256,
    }
    torch.save(kept, path)
    os.environ[_TEXT] = str(path)


def _read() -> Any:
    return torch.load(os.environ[_TEXT], weights_only=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    summary, records = run(options.quick)
    print_table(summary)
    if not options.quick:
        for subject, table in (("train-text-runs", summary), ("train-text-curves", records)):
            print(f"written to {write_csv(subject, table, device='cpu')}")
