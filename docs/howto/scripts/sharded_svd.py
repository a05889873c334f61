"""SVD, least squares and PCA of a file, of which every rank reads a share.

Run it with ``panther launch --nproc-per-node 2 sharded_svd.py``.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

import panther as pr

pr.distributed.init()
rank = pr.distributed.get_rank()
size = pr.distributed.get_world_size()
path = Path(tempfile.gettempdir()) / "panther-rows.npy"
if rank == 0:  # 40,000 rows of 200 numbers, 64 MB
    rng = np.random.default_rng(0)
    file = np.lib.format.open_memmap(
        path, "w+", np.float64, (40_000, 200)
    )
    for start in range(0, 40_000, 1000):
        noise = rng.standard_normal((1000, 200))
        file[start : start + 1000] = 3 + noise / np.arange(1, 201)
    file.flush()
torch.distributed.barrier()

rows = np.load(path, mmap_mode="r")
share = len(rows) // size
local = rows[rank * share : (rank + 1) * share]

A = pr.linalg.RowSharded(local)
with pr.distributed.CommunicationCounter() as traffic:
    U, S, V = pr.linalg.randomized_svd(A, 5, seed=0)
report = f"SVD: {tuple(U.shape)} of {tuple(A.shape)} here"
print(f"rank {rank}: {report}, {traffic.bytes} bytes", flush=True)

x, residual, _ = pr.linalg.sketch_lstsq(A, local[:, 0], seed=0)
print(f"rank {rank}: residual {residual:.1e}", flush=True)

stream = pr.linalg.StreamingSVD(200, k=5, dtype=torch.float64)
for start in range(0, share, 1000):
    stream.update(local[start : start + 1000])
total = stream.all_reduce()
ratio = total.pca().ratio.sum()
print(f"rank {rank}: {total.num_rows} rows, {ratio:.3f}", flush=True)
torch.distributed.barrier()
if rank == 0:
    path.unlink()
pr.distributed.shutdown()
