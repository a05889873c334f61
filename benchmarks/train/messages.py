"""What the Trainer's message costs where it cannot travel with the gradients, and what waiting later saves.

In one run, turns of some steps follow each other: without the message, which no real run can leave out, since ranks
would not know of each other's losses; with it; and with it, but waiting for that of the step before, which would let a
loss that is not finite change the parameters.
"""

__all__ = ["SENT_ALONE", "message_rows"]

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.train.steps import CASES, Samples, beside, clocks, model_and_data
from panther.distributed import launch
from panther.train import Callback, TrainConfig, Trainer, coordination
from panther.train.coordination import StepExchange

SENT_ALONE: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "bf16 hook": {"strategy": "ddp", "comm_hook": "bf16"},
    "powersgd hook": {"strategy": "ddp", "comm_hook": "powersgd"},
    "find_unused_parameters": {"strategy": "ddp", "find_unused_parameters": True},
}
_WITHOUT, _NOW, _LATER = "without", "at once", "a step later"
_WAYS = (_WITHOUT, _NOW, _LATER)


def message_rows(case: str, sent: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way: times a step on two processes, and their ratios to those without the message."""
    samples = launch(_run, case, sent, rounds, nproc=2, start_method="fork")
    row = {"case": case, "sent alone with": sent}
    return [
        {**row, "message": way, "turns": rounds, "steps a turn": CASES[case][3], **times}
        for way, times in beside(samples, _WITHOUT).items()
    ]


class _Turns(Callback):
    """Changes the way after every turn, and times each; the first turn of all warms up."""

    def __init__(self, turn: int) -> None:
        self.turn, self.way, self.begun = turn, _WITHOUT, (0.0, 0.0)
        self.samples: Samples = {way: ([], []) for way in _WAYS}

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step % self.turn:
            return
        number, now = trainer.step // self.turn, clocks()
        if number > 1:
            for samples, time, start in zip(self.samples[self.way], now, self.begun, strict=True):
                samples.append((time - start) / self.turn)
        self.way, self.begun = _WAYS[number % len(_WAYS)], clocks()


def _run(case: str, sent: str, rounds: int) -> Samples:
    _, _, batch, turn = CASES[case]
    turns, earlier = _Turns(turn), []

    class Exchange(StepExchange):
        def start(self, *arguments: Any, **options: Any) -> None:
            with self._alone():
                super().start(*arguments, **options)

        @contextmanager
        def _alone(self) -> Iterator[None]:
            """Send nothing, and expect nothing, in the turns without messages."""
            device, self._device = self._device, None if turns.way == _WITHOUT else self._device
            yield
            self._device = device

        def finish(self) -> tuple[float, float]:
            if turns.way == _LATER:
                earlier.append((self._work, self._sent))
                self._work, self._sent = earlier.pop(0) if len(earlier) > 1 else earlier[0]
            elif earlier:  # the last one of a turn
                earlier.pop()[0].wait()
            with self._alone():
                return super().finish()

    torch.manual_seed(0)
    model, data = model_and_data(case)
    config = TrainConfig(
        max_steps=(len(_WAYS) * rounds + 1) * turn,
        learning_rate=1e-3,
        log_every_n_steps=10**9,
        progress=False,
        **SENT_ALONE[sent],
    )
    trainer = Trainer(model, torch.optim.AdamW, functional.cross_entropy, config, [turns])
    with patch.object(coordination, "StepExchange", Exchange), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer.fit(DataLoader(data, batch, shuffle=True))
    return turns.samples
