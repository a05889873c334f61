"""Hooks with a state; error feedback: what a compressed gradient lacks is added to the gradient of the next step."""

__all__ = ["ErrorFeedback", "StatefulHook", "hold_group"]

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_groups_with_hooks: set[dist.ProcessGroup] = set()


def hold_group(group: dist.ProcessGroup) -> None:
    """Keep the group of a communication hook alive until the process ends. Call it for every registered hook.

    A hook's last futures hold its group, and are freed on gloo's own thread. If they held the last reference, this
    thread would destroy the group, wait for itself, and abort the process.
    """
    _groups_with_hooks.add(group)


class StatefulHook(ABC):
    """A hook with a state that belongs into checkpoints.

    Args:
        group: The ranks that share gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        hold_group(group)
        self.group = group

    @abstractmethod
    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of this rank, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state."""


class ErrorFeedback(StatefulHook):
    """Error feedback: the part of the gradient that compression dropped is added to the next step's gradient.

    It is updated only if the gradients of all ranks are finite, because other steps are skipped by the loop or its
    GradScaler. GradScaler multiplies the loss; if its scale has changed, the stored part is multiplied by the ratio of
    the scales, a power of two.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.shards: dist.ProcessGroup | None = None
        """The ranks that have other shards of the same gradients; None if every rank has complete gradients."""
        self.loss_scale: Callable[[], Tensor] | None = None
        """A function that returns the scale of the present step's loss; None is a loss that is not scaled."""
        self._forget(None)

    def _forget(self, scale: Tensor | None) -> None:
        self._before: dict[Any, Any] = {}  # the state before the last step; None for entries that did not exist
        self._finite: list[Tensor] = []  # whether each bucket of the last step was finite
        self._buckets, self._ended = 0, False
        self._scale, self._scale_before = scale, scale

    def _begin(self, bucket: dist.GradBucket) -> None:
        """Settle the previous step and read the loss scale, before a bucket is sent."""
        if bucket.index() == 0:
            self._settle()
            scale = bucket.buffer().new_ones((), dtype=torch.float32) if self.loss_scale is None else self.loss_scale()
            self._scale, self._scale_before = scale, scale if self._scale is None else self._scale
        self._buckets, self._ended = self._buckets + 1, self._ended or bucket.is_last()

    def _note(self, mean: Tensor) -> Tensor:
        """Record whether the mean of a bucket over all ranks, which is equal on all ranks, is finite."""
        # This takes a thirteenth of the time of isfinite().all() on a CPU.
        self._finite.append((mean * 0).sum() == 0)
        return mean

    def _settle(self) -> None:
        """Restore the state before the last step unless its gradients were finite.

        This is done at the beginning of the next step, because the buckets of a step overlap.
        """
        if self._buckets and not self._ended and self.shards is not None:
            self._end_shorter_step()
        # A rank whose shards are all empty has no entries, and votes nevertheless.
        if self._before or self._finite:
            assert self._scale is not None
            assert self._scale_before is not None
            # A backward pass that raised has not sent all of its buckets. Between replicas, the number of units with
            # gradients may change from step to step, so that a smaller number does not mean an error.
            complete = (self._ended or self.shards is not None) and len(self._finite) == self._buckets
            finite = torch.stack(self._finite).all() if complete else torch.zeros_like(self._scale, dtype=torch.bool)
            if self.shards is not None:
                votes = finite.to(torch.int32)
                dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.shards)
                finite = votes.bool()
            for key, previous_entry in self._before.items():
                self._restore_unless(finite, key, previous_entry)
            self._scale = torch.where(finite, self._scale, self._scale_before)
        self._before, self._finite, self._buckets, self._ended = {}, [], 0, False

    def _end_shorter_step(self) -> None:
        """Count a step between replicas in which no bucket was the last one, because units had no gradients."""

    @abstractmethod
    def _restore_unless(self, finite: Tensor, key: Any, previous_entry: Any) -> None:
        """Restore the entry ``key`` to its previous value unless ``finite``."""

    def _ratio(self) -> Tensor:
        """Return the ratio of the present loss scale to the one with which the state was stored."""
        assert self._scale is not None
        assert self._scale_before is not None
        return self._scale / self._scale_before

    def _saved_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.item()
