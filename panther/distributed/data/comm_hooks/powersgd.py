"""PowerSGD: each gradient as a product of two factors.

Error feedback: what a compressed gradient lacks is added to the gradient of the next step. It is updated only if the
gradients of all ranks are finite, because other steps are skipped by the loop or its GradScaler. GradScaler multiplies
the loss; if its scale has changed, the stored part is multiplied by the ratio of the scales, a power of two.
"""

__all__ = ["PowerSGD"]

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class PowerSGD:
    """torch's PowerSGD hook (T. Vogels, S. P. Karimireddy and M. Jaggi, 2019, arXiv:1905.13727), with its state.

    Between the replicas of hybrid sharding, the matrices are the shards of this rank: some rows of a matrix each.

    Args:
        group: The ranks that share gradients.
        rank: Rank of the matrices that are sent.
        start_step: Number of steps whose gradients are sent uncompressed.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        self.group = group
        self._state = powerSGD_hook.PowerSGDState(group, rank, start_step)
        self._last: torch.futures.Future[Tensor] | None = None
        self._bucket_parameters: dict[int, tuple[int, ...]] = {}
        """The identities of the parameters of each bucket; none for a state that was loaded."""
        self.shards: dist.ProcessGroup | None = None
        """The ranks that have other shards of the same gradients; None if every rank has complete gradients."""
        self.loss_scale: Callable[[], Tensor] | None = None
        """A function that returns the scale of the present step's loss; None is a loss that is not scaled."""
        self._forget(None)

    def _forget(self, scale: Tensor | None) -> None:
        # The error and factor Q of each bucket before the last step; None for entries that did not exist.
        self._before: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._finite: list[Tensor] = []  # whether each bucket of the last step was finite
        self._buckets, self._ended = 0, False
        self._scale, self._scale_before = scale, scale

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        if self._last is not None and "nccl" not in dist.get_backend(self.group):
            # The hook sends its factors in callbacks, which gloo runs on its own threads. Callbacks of two buckets
            # could run in a different order on each rank, and messages whose sizes differ would abort the process.
            self._last.wait()
        self._begin(bucket)
        state, index = self._state, bucket.index()
        if state.iter < state.start_powerSGD_iter:  # uncompressed gradients leave no error
            self._last = powerSGD_hook.powerSGD_hook(state, bucket)
            return self._last
        error = state.error_dict.get(index)
        parameters = tuple(map(id, bucket.parameters()))
        is_new = self._bucket_parameters.get(index, parameters) != parameters
        self._bucket_parameters[index] = parameters
        # The length differs after loading a checkpoint with a different bucket_cap_mb, and the parameters of a position
        # between replicas differ after a step in which a unit got no gradients.
        if error is not None and (is_new or len(error) != len(bucket.buffer())):
            error = None
            for name in _BY_BUCKET:
                getattr(state, name).pop(index, None)
        factor = state.q_memory_dict.get(index)
        self._before[index] = error, factor
        assert self._scale is not None
        assert self._scale_before is not None
        if error is not None and self._scale != self._scale_before:
            state.error_dict[index] = error * (self._scale / self._scale_before)
        if factor is not None:  # the hook writes into it
            state.q_memory_dict[index] = factor.clone()
        self._last = powerSGD_hook.powerSGD_hook(state, bucket).then(lambda future: self._note(future.value()))
        return self._last

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
            self._state.iter += 1  # torch counts last buckets; here, units without gradients may have been the last
        # A rank whose shards are all empty has no entries, and votes nevertheless.
        if self._before or self._finite:
            assert self._scale is not None
            # A backward pass that raised has not sent all of its buckets. Between replicas, the number of units with
            # gradients may change from step to step, so that a smaller number does not mean an error.
            complete = (self._ended or self.shards is not None) and len(self._finite) == self._buckets
            finite = torch.stack(self._finite).all() if complete else torch.zeros_like(self._scale, dtype=torch.bool)
            if self.shards is not None:
                votes = finite.to(torch.int32)
                dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.shards)
                finite = votes.bool()
            if not finite:  # this waits for a GPU, as torch's hook does too
                self._restore()
                self._scale = self._scale_before
        self._before, self._finite, self._buckets, self._ended = {}, [], 0, False

    def _restore(self) -> None:
        for index, previous_entries in self._before.items():
            for name, entry in zip(("error_dict", "q_memory_dict"), previous_entries, strict=True):
                if entry is None:
                    getattr(self._state, name).pop(index, None)
                else:
                    getattr(self._state, name)[index] = entry
            # A factor Q that did not exist before this step is removed, so that torch draws it again, and P, which was
            # computed from it, is removed too.
            if previous_entries[1] is None:
                self._state.p_memory_dict.pop(index, None)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the errors, factors and random state."""
        self._settle()
        kind, words, *position = self._state.rng.get_state(legacy=True)
        entries = {name: getattr(self._state, name) for name in (*_BY_BUCKET, *_NUMBERS)}
        entries["rng"] = (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *position)
        scale = 1.0 if self._scale is None else self._scale.item()
        return entries | {"rank": self._state.matrix_approximation_rank, "scale": scale}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state. Factors of a different rank are left out."""
        state, device = self._state, next(module.parameters()).device
        fresh = powerSGD_hook.PowerSGDState(self.group, state.matrix_approximation_rank, state.start_powerSGD_iter)
        self._state, self._last, self._bucket_parameters = fresh, None, {}
        self._forget(None if saved is None else torch.tensor(saved["scale"], device=device))
        if saved is None:
            return
        same_rank = saved["rank"] == state.matrix_approximation_rank
        for name in _BY_BUCKET if same_rank else _BY_BUCKET[:1]:
            setattr(fresh, name, {int(index): tensor.to(device) for index, tensor in saved[name].items()})
        for name in _NUMBERS:
            setattr(fresh, name, saved[name])
        kind, words, *position = saved["rng"]
        fresh.rng.set_state((kind, words.numpy().astype(np.uint32), *position))
