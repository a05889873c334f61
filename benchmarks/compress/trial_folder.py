"""Folders compressed part by part: time, memory and disk, and what models of 7 and 70 billion numbers would take.

Random Llamas in float32 are compressed by ``pr.compress_folder``, and the smaller one by ``pr.compress`` too, in a new
process each, on one CPU thread. *Forward*, *moments*, *fits* and *choice* are CPU seconds of phases, by the messages of
the log; *choice* is the rest. *Peak MB* is the anonymous resident memory above that after the imports, read every
3 ms. *Disk GB* is the peak of the folder for what is kept meanwhile.

Rows that are *predicted* scale the phases of the smaller model to Llama's sizes and 128 x 1,024 tokens in bfloat16: the
forward with the products of a weight and a token, the moments with these and with the squares of the layers' sides, the
fits with the flops of rounding a weight, and the disk with the hidden states, the moments and the weights. Eight
processes are taken to divide all of it but the disk. Nothing is assumed to become faster with larger matrices or more
threads.
"""

__all__ = ["CASES", "measured", "predicted", "run"]

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import panther as pr
from benchmarks.harness import commit, figure, print_table, write_csv

_EVERY_S, _DISK_EVERY = 0.003, 20  # between readings of the memory, and readings of the memory to one of the disk
_PHASES = {"forward before moments 1/1": "forward", "moments 1/1": "moments", "fits": "fits"}
_DISK_BYTES_A_WEIGHT = 7.0  # codes of all widths, and scales


@dataclass(frozen=True)
class Case:
    """A Llama and its batches.

    Attributes:
        hidden: Width.
        inner: Width of the feed-forward blocks.
        layers: Number of blocks.
        vocabulary: Rows of the embedding and of the head.
        batches: Number of batches, each of ``samples`` of ``tokens``.
        bits: The size.
        forms: Forms; None for all.
    """

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    batches: int = 15
    samples: int = 4
    tokens: int = 128
    bits: float = 4.5
    forms: str | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of all weights, (outputs, inputs)."""
        block = [(self.hidden, self.hidden)] * 4 + [(self.inner, self.hidden)] * 2 + [(self.hidden, self.inner)]
        return block * self.layers + [(self.vocabulary, self.hidden)] * 2

    @property
    def numbers(self) -> int:
        """Return the number of weights."""
        return sum(rows * columns for rows, columns in self.shapes)

    def work(self) -> dict[str, float]:
        """Return the work of each phase, up to a factor."""
        # Four in five batches are for the moments. Moments of sides above 2^14 are diagonals.
        tokens = 0.8 * self.batches * self.samples * self.tokens
        products = tokens * self.numbers
        squares = tokens * sum(side**2 for shape in self.shapes for side in shape if side <= 2**14)
        rounding = sum(rows * columns * ((rows if rows <= 2**14 else 0) + columns) for rows, columns in self.shapes)
        return {"forward": products, "moments": 4 * products + 1.2 * squares, "fits": rounding, "choice": products}

    def disk_bytes(self, itemsize: int) -> float:
        """Return the bytes of the hidden states at all boundaries, of the moments and of the fits."""
        states = self.batches * self.samples * self.tokens * self.hidden * (self.layers + 1) * itemsize
        moments = sum(8 * (side**2 if side <= 2**14 else side) for shape in self.shapes for side in shape)
        return states + moments + _DISK_BYTES_A_WEIGHT * self.numbers


CASES = {
    "0.12 billion": Case(768, 1536, 10, 36_000),
    "1.05 billion": Case(2048, 5504, 18, 32_000, batches=5, samples=4, tokens=64, bits=8.3, forms="int8"),
}
LARGE = {
    "7 billion": Case(4096, 11_008, 32, 32_000, batches=128, samples=1, tokens=1024),
    "70 billion": Case(8192, 28_672, 80, 32_000, batches=128, samples=1, tokens=1024),
}
QUICK = {"quick": Case(32, 64, 2, 100, batches=5, samples=2, tokens=8)}


def run(cases: dict[str, Case]) -> Iterator[dict[str, Any]]:
    """Yield the rows of cases: compressed from a folder and, the first one, in memory, and then predictions."""
    phases: dict[str, float] | None = None
    for name, case in cases.items():
        for method in ("folder", "memory") if case.forms is None else ("folder",):
            figures = measured(case, method)
            if method == "folder" and phases is None:
                phases, first = {phase: figures[phase] for phase in case.work()}, case
            yield row(name, method, case, figures)
    assert phases is not None
    for name, case in LARGE.items():
        for processes in (1, 8):
            yield row(
                name,
                f"predicted, {processes} process{'es' if processes > 1 else ''}",
                case,
                predicted(first, phases, case, processes),
            )


def row(name: str, method: str, case: Case, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a case."""
    seconds = figures["cpu_s"]
    return {
        "model": name, "method": method, "bits": case.bits, "forms": case.forms or "all",
        "tokens": case.batches * case.samples * case.tokens,
        **{column: figure(value) if isinstance(value, float) else value for column, value in figures.items()},
        "s_a_billion": figure(seconds / case.numbers * 1e9), "row_commit": commit(),
    }  # fmt: skip


def predicted(first: Case, phases: dict[str, float], case: Case, processes: int) -> dict[str, Any]:
    """Return the time of a case on each of several processes, and its disk, from the phases of another case."""
    first_work, work = first.work(), case.work()
    scaled = {phase: phases[phase] * work[phase] / first_work[phase] / processes for phase in first_work}
    disk = case.disk_bytes(2)
    return {
        "cpu_s": sum(scaled.values()),
        **scaled,
        "peak_mb": "",
        "disk_gb": disk / 1e9,
        "file_gb": "",
    }


def measured(case: Case, method: str) -> dict[str, Any]:
    """Compress a random model in a new process, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.compress.trial_folder", "--child", method, folder]
        for step in ("make", method):
            command[-2] = step
            result = subprocess.run([*command, json.dumps(asdict(case))], check=True, stdout=subprocess.PIPE, text=True)
        figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return figures


def _child(step: str, folder: Path, case: Case) -> None:
    """Make the model in a folder, or compress it and print the figures as JSON."""
    import transformers

    import panther.compression.streaming.runner
    import panther.integrations.transformers  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source, target = folder / "source", folder / "target"
    if step == "make":
        config = transformers.LlamaConfig(
            vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=case.inner,
            num_hidden_layers=case.layers, num_attention_heads=case.hidden // 16,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(source)
        return
    size = (case.batches, case.samples, case.tokens)
    batches = [{"input_ids": ids} for ids in torch.randint(case.vocabulary, size)]
    options: dict[str, Any] = {
        "calibration": batches, "bits": case.bits, "forms": case.forms, "seed": 0, "progress": False,
    }  # fmt: skip
    with _Watch(target) as watch:
        if step == "folder":
            pr.compress_folder(source, target, **options)
        else:
            model = transformers.LlamaForCausalLM.from_pretrained(source)
            pr.compress(model, measure_speed=False, allow_slower=True, **options)
            pr.save_compressed(model, target)
    phases = {phase: watch.seconds[phase] for phase in ("forward", "moments", "fits", "choice")}
    print(
        json.dumps(
            {
                "cpu_s": sum(phases.values()),
                **phases,
                "peak_mb": watch.peak_mb,
                "disk_gb": watch.peak_disk_bytes / 1e9,
                "file_gb": sum(path.stat().st_size for path in target.glob("*.safetensors")) / 1e9,
            }
        )
    )


class _Watch(logging.Handler):
    """CPU seconds of the phases that the log names, and peaks of the memory and of a folder's scratch files."""

    def __init__(self, target: Path) -> None:
        super().__init__(logging.INFO)
        self._target, self._ended = target, threading.Event()
        self.seconds: dict[str, float] = defaultdict(float)
        self._phase = "choice"
        self.peak_mb, self.peak_disk_bytes = 0.0, 0

    def __enter__(self) -> "_Watch":
        logger = logging.getLogger("panther")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        self._before, self._since = _anonymous_mb(), time.process_time()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enter_phase("choice")
        self._ended.set()
        self._thread.join()

    def emit(self, record: logging.LogRecord) -> None:
        """Begin the phase that a message names."""
        name = record.getMessage().partition(":")[0]
        self._enter_phase(_PHASES.get(name, "fits" if name.startswith("fits ") else "choice"))

    def _enter_phase(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _read(self) -> None:
        number = 0
        while not self._ended.wait(_EVERY_S):
            self.peak_mb = max(self.peak_mb, _anonymous_mb() - self._before)
            if number % _DISK_EVERY == 0:
                self.peak_disk_bytes = max(self.peak_disk_bytes, _scratch_bytes(self._target))
            number += 1


def _anonymous_mb() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("RssAnon"))


def _scratch_bytes(target: Path) -> int:
    total = 0
    for path in target.glob(".panther-*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="a small model, nothing written")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments.child[0], Path(arguments.child[1]), Case(**json.loads(arguments.child[2])))
        sys.exit()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for measured_row in run(QUICK if arguments.quick else {name: CASES[name] for name in arguments.model}):
        rows.append(measured_row)
        print_table(rows[-1:])
        if not arguments.quick:
            write_csv("folder", rows, device="cpu")
