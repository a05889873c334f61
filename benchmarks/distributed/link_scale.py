"""The trial of a slow link for more devices: the advisor's times of its model, for 2 to 4,096 nodes of one device.

Speeds of the processor and of the link are those that advisor_link.py measured over two nodes, kept in
``results/cluster-link-RATE.json``. Everything beyond two devices is extrapolated, by the formulas of
panther/distributed/advisor/cost.py: nobody ran it. A device has as many samples as in the trial: the batch
grows with the devices.
"""

__all__ = ["run"]

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.distributed.link_model import build
from benchmarks.distributed.trial_link import BATCH, SHAPE
from benchmarks.harness import RESULTS, figure, print_table, write_csv
from benchmarks.train import trial_text
from panther.distributed import ClusterSpec, ModelStats
from panther.distributed.advisor.cost import Layout, estimate

DEVICES = (2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LINKS = {"100 Mbit/s": "100-mbit", "1 Gbit/s": "1-gbit"}
_TRIAL = 2  # devices


def run() -> list[dict[str, Any]]:
    """Return a row for each link, model, layout and number of devices."""
    tokens = torch.zeros(1, SHAPE.context, dtype=torch.int64)
    rows = []
    with tempfile.TemporaryDirectory(prefix="panther-scale-") as folder:
        trial_text.gather_once(Path(folder) / "text.pt", SHAPE, quick=True)
        models = {kind: ModelStats.of(build(kind), tokens, loss_fn=_loss) for kind in ("dense", "sketched")}
    for link, name in LINKS.items():
        for kind, stats in models.items():
            for strategy in ("ddp", "fsdp", "tp"):
                # Nobody would share layers among more nodes over such a link.
                for n in DEVICES if strategy != "tp" else (_TRIAL,):
                    cluster = ClusterSpec.load(RESULTS / f"cluster-link-{name}.json", n)
                    layout = Layout(tp=n) if strategy == "tp" else Layout(dp=n, strategy=strategy)
                    found = estimate(stats, cluster, layout, n * BATCH // _TRIAL)
                    rows.append(
                        {
                            "link": link,
                            "run": f"{kind}, {strategy}",
                            "devices": n,
                            "extrapolated": n > cluster.measured_gpus,
                            "step_ms": figure(1e3 * found.step_seconds),
                            "sent_bytes": round(found.sent()),
                            "compute_ms": figure(1e3 * found.seconds["compute"]),
                            "memory_mb": figure(found.memory.total / 1e6),
                        }
                    )
    return rows


def _loss(logits: Tensor) -> Tensor:
    return trial_text.loss(logits, torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device))


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = run()
    print_table(table)
    print(f"written to {write_csv('link-scale', table, device='cpu')}")
