"""Sum or gather a few numbers over all ranks."""

__all__ = ["gather_over_ranks", "sum_over_ranks"]

from collections.abc import Sequence

import torch
import torch.distributed as dist

from panther.distributed import get_distributed_info, get_world_size


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    if get_world_size() == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=get_distributed_info().device)
    dist.all_reduce(row)
    return row.tolist()


def gather_over_ranks(values: Sequence[int]) -> list[list[int]]:
    """Return the values of every rank, by rank. All ranks must pass equally many values."""
    row = torch.tensor(values, dtype=torch.int64, device=get_distributed_info().device)
    rows = [torch.empty_like(row) for _ in range(get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).tolist()
