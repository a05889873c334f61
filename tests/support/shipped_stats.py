"""Measure the statistics of the transformers that `panther advise` names, and write the file that the package ships.

    python tests/support/shipped_stats.py

It takes a minute or two, and is to be run when tests/distributed/test_kept_stats.py says that the file is out of date.
"""

__all__ = ["entries", "measured"]

import gzip
import json
from itertools import product

import torch

from panther.cli import advise
from panther.distributed.advisor.statistics import model_stats as stats_cache

SKETCHES = (None, 16, 64)
PRECISIONS = (None, "bf16")
TP = (1, 2, 4, 8)  # the sizes of the tp axis within a node of eight devices


def entries():
    """The arguments of every entry: those of measure_transformer."""
    yield from _entries()
    # Of DDP, which does not go with tensor parallelism.
    yield from ({**sizes, "autocast": True} for sizes in _entries() if sizes["mixed_precision"] and sizes["tp"] == 1)


def _entries():
    for (_, hidden, heads), sketch, precision, tp in product(advise.SIZES.values(), SKETCHES, PRECISIONS, TP):
        yield {
            "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": advise.VOCABULARY,
            "sequence": advise.SEQUENCE, "sketch": sketch, "mixed_precision": precision, "tp": tp,
        }  # fmt: skip


def measured(sizes):
    """One entry as the file has it."""
    return json.loads(json.dumps(stats_cache.measured_values(sizes)))


def main():
    found = {stats_cache.shipped_name(sizes): measured(sizes) for sizes in entries()}
    document = json.dumps({"torch": torch.__version__.partition("+")[0], "measured": found}, sort_keys=True)
    stats_cache.SHIPPED.write_bytes(gzip.compress(document.encode(), mtime=0))  # the same bytes for the same entries
    print(f"{len(found)} entries, {stats_cache.SHIPPED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
