"""Whole files: the size of a compressed encoder, embeddings included, and what it keeps.

all-MiniLM-L6-v2 and its data are those of frontier_tasks.py. *File MB* is the size of ``model.safetensors``. Other rows
than float32 and bfloat16 are ``pr.compress`` with an average number of bits for each weight of linear layers and of
embeddings. *Correlation* is that of the cosine similarities of all pairs of held-out glosses with the original's, and
*unseen* the same for the half of the glosses with the largest share of tokens that no calibration batch contains.
"""

__all__ = ["run"]

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.pretrained import correlation

BITS = (8.3, 6.7, 5.6, 4.5, 3.7)


def run(quick: bool) -> list[dict[str, Any]]:
    """Return the rows."""
    subject = SUBJECTS["encoder"](quick)
    is_seen = torch.zeros(subject.model.config.vocab_size, dtype=torch.bool)
    for batch in subject.calibration:
        is_seen[batch["input_ids"].flatten()] = True
    unseen_share = torch.cat([_unseen_share(batch, is_seen) for batch in subject.held_out])
    hard = unseen_share >= unseen_share.median()
    original = subject.embed(subject.model)
    print(f"rows read in calibration: {int(is_seen.sum()):,} of {len(is_seen):,}")

    def row(method: str, model: nn.Module, **figures: Any) -> dict[str, Any]:
        states = subject.embed(model)
        return {
            "method": method,
            "file_mb": figure(_file_bytes(model) / 1e6),
            "correlation": round(correlation(states, original), 5),
            "unseen": round(correlation(states[hard], original[hard]), 5),
            **{name: figures.get(name, "") for name in ("cpu_s", "stated_mb", "forms")},
            "commit": commit(),
        }

    rows = [row("float32", subject.model), row("bfloat16", copy.deepcopy(subject.model).bfloat16())]
    for bits in BITS[3:4] if quick else BITS:
        model, start = copy.deepcopy(subject.model), time.process_time()
        report = pr.compress(model, bits=bits, calibration=subject.calibration, seed=0, measure_speed=False)
        forms = {layer.names[0].rpartition(".")[2]: layer.form for layer in report.layers if layer.kind == "Embedding"}
        figures = {
            "cpu_s": figure(time.process_time() - start),
            "stated_mb": figure(report.extra_bytes / 1e6),
            "forms": " ".join(f"{name}:{form}" for name, form in forms.items()),
        }
        rows.append(row(f"panther, {bits:g} bits", model.eval(), **figures))
        print_table(rows[-1:])
    return rows


def _unseen_share(batch: dict[str, Tensor], is_seen: Tensor) -> Tensor:  # (n,)
    """Return the share of each text's tokens that no calibration batch contains."""
    mask = batch["attention_mask"] > 0
    return (~is_seen[batch["input_ids"]] & mask).sum(1) / mask.sum(1)


def _file_bytes(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return (pr.save_compressed(model, folder) / "model.safetensors").stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random model, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = run(arguments.quick)
    print_table(measured)
    if not arguments.quick:
        print(f"written to {Path(write_csv('files-encoder', measured, device='cpu'))}")
