"""Measure Muon on sharded matrices, over gloo: bytes that a rank sends, and processor time and error of a step.

The baselines are torch.optim.Muon on DTensors, which iterates in bfloat16, and a Muon that gathers the momentum of
each matrix on every rank and calls ``orthogonalize``. Bytes are counted, and exact: an all-gather of b bytes on N ranks
sends (N-1) b, a reduce-scatter (N-1)/N b, an all-reduce 2 (N-1)/N b, and an all-to-all what its message holds. Errors
are differences from a step of one process in float64, relative to the norm of the step. Times are the processor time
of one rank.
"""

__all__ = ["run"]

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.harness import figure, main, print_table, write_csv
from panther.distributed import CommunicationCounter, launch, make_mesh
from panther.optim import MuonAdamW, orthogonalize

_RATE, _DECAY = 0.02, 0.1
_MATRICES = 8  # of a shape, on 2, 4 or 8 ranks
_SHAPES = ((256, 256), (512, 256), (1024, 256), (256, 1024), (512, 512))
_SHARE = {
    "allgather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
    "alltoall": lambda n: 1,
}
"""Bytes that a rank sends for a byte of the tensor that it passes to a collective operation."""


class GatheringMuon(torch.optim.Optimizer):
    """Muon that gathers the momentum of each matrix, as implementations without exchange do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = state["momentum_buffer"].mul_(0.95).add_(p.grad)
            update = orthogonalize(p.grad.add(buffer, alpha=0.95).full_tensor())
            update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
            p.mul_(1 - _RATE * _DECAY).add_(update, alpha=-0.2 * _RATE * math.sqrt(max(p.shape)))


def _torch_muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=_RATE, weight_decay=_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def _panther(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return MuonAdamW(parameters, lr=_RATE, weight_decay=_DECAY, orthogonalize=True)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "MuonAdamW": _panther,
    "gathering": lambda parameters: GatheringMuon(parameters, {"lr": _RATE}),
    "torch.optim.Muon": _torch_muon,
}


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Count, time, print the table, and write the CSV."""
    if device != "cpu":
        print("processes over gloo are measured on CPUs only")
        return
    shapes = ((16, 8), (8, 16)) if quick else _SHAPES
    rows = []
    for ranks in (2,) if quick else (2, 4, 8):
        rows += launch(_rows, shapes, ranks, 1 if quick else 3, nproc=ranks, start_method="fork")[0]
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('distributed-muon', rows, device='cpu')}")


def _rows(shapes: tuple[tuple[int, int], ...], ranks: int, steps: int) -> list[dict[str, Any]]:
    mesh = make_mesh(dp=ranks)
    rows = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(0)
        starts = [torch.randn(shape, generator=generator) for _ in range(_MATRICES)]
        gradients = [_ill_conditioned(shape, generator) for _ in range(_MATRICES)]
        exact = _end([start.double() for start in starts], [gradient.double() for gradient in gradients])
        for name, make in OPTIMIZERS.items():
            parameters = [nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)])) for start in starts]
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer = make(parameters)
            with CommunicationCounter() as traffic:
                optimizer.step()
            everywhere: list[Any] = [None] * ranks
            dist.all_gather_object(everywhere, _sent_bytes(traffic, ranks))
            ends = [_complete(p).double() for p in parameters]
            seconds = []
            for _ in range(steps):
                dist.barrier()
                begun = time.process_time()
                optimizer.step()
                seconds.append(time.process_time() - begun)
            gathered = 4 * (ranks - 1) / ranks * _MATRICES * math.prod(shape)
            rows.append(
                {
                    "ranks": ranks,
                    "shape": f"{shape[0]} x {shape[1]}",
                    "optimizer": name,
                    "bytes": round(sum(everywhere) / ranks),
                    "x gather": figure(sum(everywhere) / ranks / gathered),
                    "calls": traffic.calls,
                    "time_ms": figure(1e3 * min(seconds)),
                    "error": figure(_error(ends, exact, starts)),
                }
            )
    return rows


def _complete(p: Any) -> Tensor:
    complete: Tensor = p.detach().full_tensor()
    return complete


def _ill_conditioned(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return a matrix of condition 1e4."""
    U, S, Vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    return U * torch.logspace(0, -4, len(S)) @ Vh


def _end(starts: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    _panther(parameters).step()
    return [p.detach() for p in parameters]


def _error(ends: list[Tensor], exact: list[Tensor], starts: list[Tensor]) -> float:
    return max(
        float(torch.linalg.norm(end - best) / torch.linalg.norm(best - start.double()))
        for end, best, start in zip(ends, exact, starts, strict=True)
    )


def _sent_bytes(traffic: CommunicationCounter, ranks: int) -> float:
    total = 0.0
    for operation, count in traffic.bytes_by_operation.items():
        kind = next(kind for kind in _SHARE if operation.replace("_", "").startswith(kind.replace("_", "")))
        total += _SHARE[kind](ranks) * count
    return total


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=30.0, memory=["default"])
