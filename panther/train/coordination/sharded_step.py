"""The check that all ranks run the same blocks of a sharded model in a step, and train the same parameters."""

__all__ = ["ShardedStep"]

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from panther._torch import watch_fsdp_unit
from panther.distributed.comm.agreement import gather_objects
from panther.distributed.comm.ranks import ranks_of
from panther.errors import ConfigError
from panther.train.optimization.trainable import list_names


class ShardedStep:
    """Compare what the ranks did in a step of FSDP2, and give missing gradients to its collectives.

    FSDP2 gathers the blocks that run, and reduces the gradients that exist, without comparing the ranks. If a rank
    lacks a gradient, gloo aborts the process because of the size, NCCL waits, and gradients of two parameters of equal
    size are added to each other in silence; so are the weights of two blocks of equal size. Therefore a missing
    gradient is replaced by zero, and the ranks compare the blocks that they ran and the gradients that were missing
    before the optimizer uses a gradient.

    The comparison is a message of 16 bytes for each step, after the backward pass. Without a sharded unit nothing is
    done.
    """

    def __init__(self, parts: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._parts, self._device, self._group = parts, device, group
        self._run: list[str] = []
        self._missing: dict[int, nn.Parameter] = {}
        self._has_units = self._in_step = False
        for part in parts:
            for name, unit in part.named_modules():
                if isinstance(unit, FSDPModule):
                    self._has_units = True
                    watch_fsdp_unit(unit, partial(self._note_call, name), self._missing)

    def begin(self) -> None:
        """Begin a step."""
        self._run.clear()
        self._missing.clear()
        self._in_step = True

    def finish(self) -> None:
        """Compare the ranks, after the backward pass; parameters without a gradient on all ranks have none afterwards.

        Raises:
            ConfigError: On every rank, if the ranks ran different blocks, or lack the gradients of different
                parameters. The gradients of the step are not to be used then.
        """
        self._in_step = False
        if not self._has_units:
            return
        missing = self._missing_names() if self._missing else []
        digest = float(zlib.crc32("\n".join((*self._run, "", *missing)).encode()))
        extremes = torch.tensor([digest, -digest], dtype=torch.float64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        largest, negative_smallest = extremes.tolist()
        if largest != -negative_smallest:
            ranks = ranks_of(self._group)
            records = gather_objects((list(self._run), missing), self._group)
            raise ConfigError(_describe(dict(zip(ranks, records, strict=True))))
        for parameter in self._missing.values():
            parameter.grad = None  # so that the optimizer leaves the parameter out, as on one process

    def _note_call(self, name: str) -> None:
        if self._in_step:  # The forwards of an evaluation, however many, are not compared.
            self._run.append(name)

    def _missing_names(self) -> list[str]:
        parameters_by_name = (pair for part in self._parts for pair in part.named_parameters())
        return [name for name, parameter in parameters_by_name if id(parameter) in self._missing]


def _describe(records: dict[int, tuple[list[str], list[str]]]) -> str:
    """Word the first difference between the first rank and another rank."""
    first_rank, (first_run, first_missing) = next(iter(records.items()))
    for rank, (run, missing) in records.items():
        for number, (first, other) in enumerate(zip_longest(first_run, run)):
            if first != other:
                return (
                    f"as call {number + 1} of a sharded block in this step, rank {first_rank} ran {_block(first)} and "
                    f"rank {rank} {_block(other)}, and fsdp gathers the weights of a block from all ranks: decide on "
                    "every rank alike which blocks run, or use strategy='ddp' with find_unused_parameters=True"
                )
        if missing != first_missing:
            lacking, having = (rank, first_rank) if set(missing) - set(first_missing) else (first_rank, rank)
            names = set(records[lacking][1]) - set(records[having][1])
            listed = list_names([name for name in records[lacking][1] if name in names])
            return (
                f"the loss of rank {lacking} does not depend on the parameters {listed} in this step, and the loss of "
                f"rank {having} does: under fsdp every rank must train the same parameters; add 0 * parameter.sum() to "
                "the loss, or use strategy='ddp' with find_unused_parameters=True"
            )
    raise AssertionError("the records of the ranks are equal")


def _block(name: str | None) -> str:
    if name is None:
        return "none"
    return repr(name) if name else "the model itself"
