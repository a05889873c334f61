"""Count the bytes that a rank passes to collective operations, and compare them to the formulas.

The simplest alternative to SKLinear is a pair of nn.Linear that trains as many numbers. Under tensor parallelism the
styles of torch shard one factor of each pair, and every rank computes the products with the other factor.
"""

__all__ = ["Sizes", "data_parallel_bytes", "tensor_parallel_bytes"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from panther.distributed import (
    ColwiseSKParallel,
    CommunicationCounter,
    RowwiseSKParallel,
    data_parallel,
    launch,
    make_mesh,
    sync_sketches,
)
from panther.nn import SKLinear

_FLOAT = 4
_SKETCHED, _PAIR = "SKLinear", "pair of nn.Linear"
KINDS = (_SKETCHED, "nn.Linear", _PAIR)
_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the layers and the batch."""

    width: int = 4096
    sketch_size: int = 64
    batch: int = 256

    def layer(self, kind: str) -> nn.Module:
        """Return a layer of the width on both sides, of one of ``KINDS``."""
        if kind == _SKETCHED:
            return SKLinear(self.width, self.width, self.sketch_size, sketch="signs")
        if kind == _PAIR:
            inner = nn.Linear(self.width, self.sketch_size, bias=False)
            return nn.Sequential(inner, nn.Linear(self.sketch_size, self.width))
        return nn.Linear(self.width, self.width)

    def parameter_bytes(self, kind: str) -> int:
        """Return the bytes of a layer's trained numbers in float32."""
        weights = self.width**2 if kind == "nn.Linear" else 2 * self.width * self.sketch_size
        return _FLOAT * (weights + self.width)

    @property
    def sketch_bytes(self) -> int:
        """Return the bytes of a layer's buffers: two sketches, and the record of the seed, four int64."""
        return _FLOAT * 2 * self.width * self.sketch_size + 32


def tensor_parallel_bytes(sizes: Sizes) -> list[dict[str, Any]]:
    """Count the bytes that a pair of layers sends when two processes share it.

    Returns:
        Rows of ``case``, ``layer``, ``stage``, ``operations``, ``bytes`` and ``formula``, the last two equal if all is
        well.
    """
    return launch(_on_kinds, _tensor_parallel, sizes, nproc=_RANKS, start_method="fork")[0]


def data_parallel_bytes(sizes: Sizes) -> list[dict[str, Any]]:
    """Count the bytes that two processes send in data parallelism, and when they share sketches.

    Returns:
        Rows as of :func:`tensor_parallel_bytes`.
    """
    return (
        launch(_on_kinds, _data_parallel, sizes, nproc=_RANKS, start_method="fork")[0]
        + launch(_sketches, sizes, nproc=_RANKS, start_method="fork")[0]
    )


def _on_kinds(count: Callable[[Sizes, str], list[dict[str, Any]]], sizes: Sizes) -> list[dict[str, Any]]:
    return [row for kind in KINDS for row in count(sizes, kind)]


def _sketches(sizes: Sizes) -> list[dict[str, Any]]:
    plain = DistributedDataParallel(nn.Sequential(sizes.layer("SKLinear")))
    first = _counted(lambda: plain(torch.zeros(sizes.batch, sizes.width)))
    rows = [_row("DistributedDataParallel as it comes", "SKLinear", "each forward", first, sizes.sketch_bytes)]
    for layers in (1, 8):
        model = nn.Sequential(*(sizes.layer("SKLinear") for _ in range(layers)))
        once = _counted(lambda model=model: sync_sketches(model))  # type: ignore[misc]
        rows.append(_row("sync_sketches", f"{layers} SKLinear", "once", once, 16 + 8 * layers))
    return rows


def _tensor_parallel(sizes: Sizes, kind: str) -> list[dict[str, Any]]:
    """Count a pair, sharded column-wise and row-wise: one sum forward, behind the second layer, and one backward."""
    pair = nn.Sequential(sizes.layer(kind), sizes.layer(kind))
    plans: dict[str, dict[str, ParallelStyle]] = {
        _SKETCHED: {"0": ColwiseSKParallel(), "1": RowwiseSKParallel()},
        "nn.Linear": {"0": ColwiseParallel(), "1": RowwiseParallel()},
        _PAIR: {"0.1": ColwiseParallel(), "1.0": RowwiseParallel()},
    }
    parallelize_module(pair, make_mesh(tp=_RANKS)["tp"], plans[kind])
    x = torch.zeros(sizes.batch, sizes.width, requires_grad=True)
    pair(x).sum().backward()  # what is checked in the first one is not sent again
    results: list[Tensor] = []
    forward = _counted(lambda: results.append(pair(x)))
    backward = _counted(lambda: results[0].sum().backward())
    numbers = {_SKETCHED: 2 * sizes.sketch_size, "nn.Linear": sizes.width, _PAIR: sizes.sketch_size}
    formula = _FLOAT * sizes.batch * numbers[kind]
    case = "tensor parallel, a pair of layers"
    return [_row(case, kind, "forward", forward, formula), _row(case, kind, "backward", backward, formula)]


def _data_parallel(sizes: Sizes, kind: str) -> list[dict[str, Any]]:
    """FSDP2 gathers the shards, forward and again backward, and scatters the sums of the gradients."""
    whole = sizes.parameter_bytes(kind)
    formulas = {"ddp": whole, "replicate": whole, "fsdp": 2 * (whole // _RANKS) + whole}
    x = torch.zeros(sizes.batch, sizes.width)
    rows = []
    for strategy, formula in formulas.items():
        model = data_parallel(nn.Sequential(sizes.layer(kind)), strategy=strategy)

        def step(model: nn.Module = model) -> None:
            model(x).sum().backward()

        step()
        step()  # DDP arranges its buckets anew in the second one
        rows.append(_row(f"data parallel, {strategy}", kind, "a step", _counted(step), formula))
    return rows


def _counted(function: Callable[[], object]) -> CommunicationCounter:
    with CommunicationCounter() as traffic:
        function()
    return traffic


def _row(case: str, layer: str, stage: str, traffic: CommunicationCounter, formula: int) -> dict[str, Any]:
    return {
        "case": case,
        "layer": layer,
        "stage": stage,
        "operations": " ".join(f"{name}:{count}" for name, count in traffic.calls_by_operation.items()),
        "bytes": traffic.bytes,
        "formula": formula,
    }
