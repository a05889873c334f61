"""Whole files: the size of a compressed model, embeddings included, and what it keeps.

The models and what is measured are described in frontier_tasks.py. *File MB* is the size of ``model.safetensors``.
Rows other than float32 and bfloat16 are ``pr.compress`` with an average number of bits for each eligible weight,
embeddings and heads included. *Unseen*, of an encoder, is the correlation for the half of the held-out glosses with the
largest share of tokens that no calibration batch contains. *CPU s* and *peak MB* are those of
trial_frontier.py. One CPU thread; the file of results is written after every row.
"""

__all__ = ["BITS", "run"]

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS, Subject
from benchmarks.compress.trial_frontier import rise_mb
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.pretrained import correlation
from panther.errors import NumericalWarning, PerformanceWarning

BITS = (4.5, 3.7, 8.3, 6.7, 5.6)


def run(task: str, quick: bool, bits: Sequence[float] = BITS) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model."""
    subject = SUBJECTS[task](quick)
    hard = _with_unseen_tokens(subject) if subject.held_out else None
    original = None if hard is None else subject.embed(subject.model)[hard]

    def row(method: str, model: nn.Module, **figures: Any) -> dict[str, Any]:
        quality = subject.evaluate(model)
        if hard is not None and original is not None:
            quality["unseen"] = correlation(subject.embed(model)[hard], original)
        return {
            "model": task,
            "method": method,
            "file_mb": figure(_file_bytes(model) / 1e6),
            **{name: round(value, 5) for name, value in quality.items()},
            **{name: figures.get(name, "") for name in ("rel_error", "cpu_s", "peak_mb", "tables")},
            "row_commit": commit(),
        }

    yield row("float32", subject.model)
    yield row("bfloat16", copy.deepcopy(subject.model).bfloat16())
    for number in bits:
        model, start = copy.deepcopy(subject.model), time.process_time()
        options: dict[str, Any] = {
            "bits": number,
            "calibration": subject.calibration,
            "seed": 0,
            "measure_speed": False,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # trial_frontier_speed.py measures times
            if quick:
                warnings.simplefilter("ignore", NumericalWarning)  # few positions
            report, peak_mb = rise_mb(partial(pr.compress, model, **options))
        seconds = time.process_time() - start
        for note in report.notes:
            print(f"note: {note}")
        forms = {layer.names[0].rpartition(".")[2]: layer.form for layer in report.layers if "Embedding" in layer.kind}
        yield row(
            f"panther, {number:g} bits",
            model.eval(),
            rel_error=figure(report.measured_error),
            cpu_s=figure(seconds),
            peak_mb=peak_mb,
            tables=" ".join(f"{name}:{form}" for name, form in forms.items()),
        )


def _with_unseen_tokens(subject: Subject) -> Tensor:  # (texts,), bool
    """Return which half of the held-out texts has the largest share of tokens that no calibration batch contains."""
    config: Any = subject.model.config
    is_seen = torch.zeros(config.vocab_size, dtype=torch.bool)
    for batch in subject.calibration:
        is_seen[batch["input_ids"].flatten()] = True
    print(f"rows read in calibration: {int(is_seen.sum()):,} of {len(is_seen):,}")
    shares = []
    for batch in subject.held_out:
        mask = batch["attention_mask"] > 0
        shares.append((~is_seen[batch["input_ids"]] & mask).sum(1) / mask.sum(1))
    unseen_share = torch.cat(shares)
    return unseen_share >= unseen_share.median()


def _file_bytes(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return (pr.save_compressed(model, folder) / "model.safetensors").stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(SUBJECTS), nargs="+", default=list(SUBJECTS))
    parser.add_argument("--bits", type=float, nargs="+", default=BITS, help="bits a weight, in the order of the rows")
    parser.add_argument("--quick", action="store_true", help="small random models, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.task:
        rows: list[dict[str, Any]] = []
        for measured in run(name, arguments.quick, arguments.bits[:1] if arguments.quick else arguments.bits):
            rows.append(measured)
            print_table(rows[-1:])
            if not arguments.quick:
                write_csv(f"files-{name}", sorted(rows, key=lambda row: -row["file_mb"]), device="cpu")
