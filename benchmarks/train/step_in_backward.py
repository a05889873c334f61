"""Peak memory of training with ordinary steps, and with steps in the backward pass, for AdamW and sketched moments.

Each row is a fresh process that trains the model of ``benchmarks.trials.text_model`` for three steps, each on one text
of 32 random characters. *Peak MB* is the resident memory by which training exceeds the memory before the model was
built, so it has parameters, gradients, states and activations. *Step s* is the CPU time of forward, backward and step.
"""

__all__ = ["run"]

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

import panther as pr
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.text_model import Shape, TextModel

CASES = (("AdamW", False), ("tensor, rank 1", False), ("tensor, rank 1", True), ("channel, rank 8", True))
_STEPS = 3
_TOKENS = 32  # few, so that gradients take more memory than activations


def _peak_bytes() -> int:
    # The peak of this process alone: what getrusage tells outlives exec.
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def _measured(name: str, in_backward: bool, width: int, layers: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = TextModel(Shape(width=48, hidden=48, layers=1))
    small(torch.zeros(1, small.shape.context, dtype=torch.long)).sum().backward()
    first_bytes = _peak_bytes()
    model = TextModel(Shape(width=width, hidden=4 * width, layers=layers, heads=8))
    if name == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    else:
        update, rank = name.split(", rank ")
        groups = pr.optim.sketched_param_groups(model, rank=int(rank))
        optimizer = pr.optim.SketchedAdamW(groups, rank=int(rank), update=update, seed=0)
        optimizer.step_in_backward_(in_backward)
    samples = torch.randint(90, (_STEPS, 1, _TOKENS + 1))
    seconds = []
    for batch in samples:
        start = time.process_time()
        functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return {
        "optimizer": name,
        "steps": "in the backward pass" if in_backward else "ordinary",
        "width": width,
        "layers": layers,
        "parameter_mb": figure(sum(p.nbytes for p in model.parameters()) / 1e6),
        "state_mb": figure(sum(value.nbytes for value in states) / 1e6),
        "peak_mb": figure((_peak_bytes() - first_bytes) / 1e6),
        "step_s": figure(min(seconds[1:])),
    }


def run(width: int, layers: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each case."""
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.train.step_in_backward", "--case", *map(str, case)]
        sizes = ["--sizes", str(width), str(layers)]
        # Without this, the allocator of glibc keeps freed blocks of up to 32 MB.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        output = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True, env=environment).stdout
        yield json.loads(output.splitlines()[-1]) | {"row_commit": commit()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(_measured(arguments.case[0], arguments.case[1] == "True", *arguments.sizes)))
    else:
        rows = list(run(64, 2) if arguments.quick else run(512, 12))
        print_table(rows)
        if not arguments.quick:
            write_csv("step-in-backward", rows, device="cpu")
