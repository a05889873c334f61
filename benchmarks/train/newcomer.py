"""Measure the first run of a newcomer: README's train.py on two processes, against torchrun with a loop over DDP.

Most of such a run is the start of Python and torch in three processes. So the processor time of all of them is the
measure: it hardly depends on what else runs on the machine, as the time on the clock does.
"""

__all__ = ["LOOP_SCRIPT", "README_SCRIPT", "run"]

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, figure, main, print_table, write_csv

LOOP_SCRIPT = """\
import torch
import torch.distributed as dist
import panther as pr
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network(hidden):
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), hidden, nn.ReLU(), nn.Linear(512, 10))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(network(pr.nn.SKLinear(512, 512, 8)), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(128, 64), torch.randint(10, (128,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, target in loader:
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
"""
_PANTHER = (sys.executable, "-m", "panther")
_ROUNDS = 5


def _readme_script() -> str:
    """Return train.py of README: the sketched network of its first example and the lines that train it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    block = next(block for block in blocks if "Trainer(" in block)
    imports = "".join(re.findall(r"^(?:import|from) (?!sklearn).*\n", block, re.MULTILINE))
    network = block[block.index("def network") : block.index("\n#", block.index("def network"))]
    sketched = block.partition("sketched, dense = ")[2].partition(", network(")[0]
    config, _, training = block[block.index("config = ") :].partition("for model in (sketched, dense):\n")
    trained = textwrap.dedent(re.findall(r"(?:    .*\n)+", training)[0])
    # The loop of the comparison has 128 random samples, and so has this script: reading digits would count too.
    data = "x, target = torch.randn(128, 64), torch.randint(10, (128,))"
    return f"{imports}\n{network}\n{data}\nmodel = {sketched}\n{config}{trained}"


README_SCRIPT = _readme_script()


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Run both in turns, print the table, and write the CSV; the number of rounds does not depend on the budget."""
    if device != "cpu":
        print("processes over gloo are measured on CPUs only")
        return
    rows = _rows(1 if quick else _ROUNDS)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('train-newcomer', rows, device='cpu')}")


def _rows(rounds: int) -> list[dict[str, Any]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    commands = {
        "torchrun, a loop over DDP": torchrun,
        "panther launch, README's train.py": [*_PANTHER, "launch", "--nproc-per-node", "2", "train.py"],
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for name, script in (("loop.py", LOOP_SCRIPT), ("train.py", README_SCRIPT)):
            Path(folder, name).write_text(script, encoding="utf-8")
        for _ in range(rounds):
            for name, command in commands.items():
                seconds[name].append(_measure(command, folder))
    medians = {name: [statistics.median(one) for one in zip(*pairs, strict=True)] for name, pairs in seconds.items()}
    reference = next(iter(medians.values()))
    return [
        {
            "started by": name,
            "rounds": rounds,
            "cpu_s": figure(cpu),
            "wall_s": figure(wall),
            "cpu_ratio": figure(cpu / reference[0]),
            "wall_ratio": figure(wall / reference[1]),
        }
        for name, (cpu, wall) in medians.items()
    ]


def _measure(command: list[str], folder: str) -> tuple[float, float]:
    """Return the processor time of a command and its processes, and its time on the clock, in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    wall, end = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime, wall


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=20.0, memory=["default"])
