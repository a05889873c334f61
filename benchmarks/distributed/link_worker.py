"""One rank of the trial of a slow link (trial_link.py), started on each node by ``panther launch``.

It trains every run for some seconds with the Trainer, one after the other, each from the checkpoint of the round
before, and writes what its steps took, and sent through the interface of the first node, to ``FOLDER/NAME-ROUND.json``.
"""

__all__ = ["HOOK_RUNS", "RUNS", "Run", "main"]

import json
import signal
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import panther as pr
from benchmarks.distributed.link_model import build
from benchmarks.train import trial_text
from panther.distributed import get_rank, get_world_size
from panther.errors import PerformanceWarning

_WARM_UP = 2  # first steps of a round, in which processes import, DDP forms buckets and FSDP allocates


@dataclass(frozen=True)
class Run:
    """What is trained, and the settings that distribute it."""

    model: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name in results."""
        hook = self.settings.get("comm_hook", "")
        hook = {"powersgd": "PowerSGD"}.get(hook, hook and f"{hook} hook")
        fraction = self.settings.get("sketch_fraction")
        strategy = "hybrid" if "data_parallel_replicate_size" in self.settings else self.strategy
        hook = f"{hook} {fraction or ''}".strip()
        return ", ".join(part for part in (self.model, strategy, hook) if part)


RUNS = (
    Run("dense", "ddp"),
    Run("sketched", "ddp"),
    Run("dense", "ddp", {"comm_hook": "powersgd"}),
    Run("sketched", "ddp", {"comm_hook": "bf16"}),
    Run("dense", "fsdp"),
    Run("sketched", "fsdp"),
    Run("dense", "tp"),
    Run("sketched", "tp"),
)

_REPLICAS = {"data_parallel_replicate_size": 2}  # a replica of the model on each node
# Two processes on each node: the gradients of the dense model between the nodes, by every hook.
HOOK_RUNS = (
    Run("dense", "ddp"),
    Run("dense", "ddp", {"comm_hook": "powersgd"}),
    Run("dense", "fsdp", _REPLICAS),
    Run("dense", "fsdp", _REPLICAS | {"comm_hook": "bf16"}),
    Run("dense", "fsdp", _REPLICAS | {"comm_hook": "powersgd"}),
    Run("dense", "fsdp", _REPLICAS | {"comm_hook": "sketch", "sketch_fraction": 0.25}),
    Run("dense", "fsdp", _REPLICAS | {"comm_hook": "sketch", "sketch_fraction": 0.1}),
)


class Clock(pr.train.Callback):
    """Notes time, CPU time, loss and the bytes that the node sent after every step, and ends the round.

    The first rank ends it by a signal to itself: the Trainer tells all ranks of a signal within the step, and they
    save and leave together.
    """

    def __init__(self, seconds: float, fewest: int, interface: str) -> None:
        self.seconds, self.fewest = seconds, fewest
        self.sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self.steps: list[dict[str, float]] = []

    def on_step(self, trainer: Any, loss: float) -> None:
        """Note a step."""
        if get_rank() != 0:
            return
        sent = int(self.sent.read_text(encoding="ascii"))
        now = {"s": time.perf_counter(), "cpu_s": time.process_time(), "sent": sent}
        self.steps.append({"step": trainer.step, "loss": loss, **now})
        done = len(self.steps)
        if done > max(_WARM_UP, self.fewest) and now["s"] - self.steps[_WARM_UP - 1]["s"] >= self.seconds:
            signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Train as the file named on the command line says."""
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(given["folder"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PerformanceWarning)  # of small layers
    pr.distributed.init()
    texts, held_out = trial_text.data()
    for name in given["runs"]:
        run = next(run for run in (*RUNS, *HOOK_RUNS) if run.name == name)
        place = folder / name.replace(", ", "-").replace(" ", "-")
        # All layouts see the same samples in a step: ranks that share layers count once.
        replicas = 1 if run.strategy == "tp" else get_world_size()
        config = pr.train.TrainConfig(
            max_steps=10**9,
            batch_size=given["batch"] // replicas,
            learning_rate=1e-3,
            warmup_steps=25,
            gradient_clipping=1.0,
            log_every_n_steps=10**9,
            checkpoint_dir=str(place),
            keep_checkpoints=1,
            progress=False,
            trackers=(),
            **run.settings | {"strategy": run.strategy},
        )
        torch.manual_seed(0)
        model = build(run.model)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        clock = Clock(given["seconds"], given["fewest"], given["interface"])
        trainer = pr.train.Trainer(model, loss_fn=trial_text.loss, config=config, callbacks=[clock])
        with suppress(SystemExit):  # of the signal
            trainer.fit(texts)
        loss = trainer.evaluate(held_out)["loss"]
        if get_rank() == 0:
            found = {"numbers": numbers, "held_out": loss, "steps": clock.steps[_WARM_UP - 1 :]}
            place.with_name(f"{place.name}-{given['round']}.json").write_text(json.dumps(found), encoding="utf-8")
    pr.distributed.shutdown()


if __name__ == "__main__":
    main()
