"""PowerSGD: each gradient as a product of two factors.

Error feedback: what a compressed gradient lacks is added to the gradient of the next step. It is dropped if a gradient
was not finite, because such a step is skipped by the loop or its GradScaler, which then lowers the scale of the loss.
"""

__all__ = ["PowerSGD"]

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

    The first ``start_step`` steps are sent uncompressed. Between the replicas of hybrid sharding, the matrices are
    shards.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        self.group = group
        self._state = powerSGD_hook.PowerSGDState(group, rank, start_step)
        self._last: torch.futures.Future[Tensor] | None = None
        self._bucket_parameters: dict[int, tuple[int, ...]] = {}
        """The identities of the parameters of each bucket; none for a state that was loaded."""
        self._finite: list[Tensor] = []
        """Whether each bucket of the present step was finite, which is equal on all ranks of the group."""

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        if self._last is not None and "nccl" not in dist.get_backend(self.group):
            # The hook sends its factors in callbacks, which gloo runs on its own threads. Callbacks of two buckets
            # could run in a different order on each rank, and messages whose sizes differ would abort the process.
            self._last.wait()
        state, index = self._state, bucket.index()
        if index == 0:
            self._settle()
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
            for name in _BY_BUCKET:
                getattr(state, name).pop(index, None)
        self._last = powerSGD_hook.powerSGD_hook(state, bucket).then(lambda future: self._note(future.value()))
        return self._last

    def _note(self, mean: Tensor) -> Tensor:
        # This takes a thirteenth of the time of isfinite().all() on a CPU.
        self._finite.append((mean * 0).sum() == 0)
        return mean

    def _settle(self) -> None:
        """Drop the errors and factors unless the last step was finite; torch draws new factors with the next step.

        This is done at the beginning of the next step, because the buckets of a step overlap.
        """
        if self._finite and not torch.stack(self._finite).all():  # this waits for a GPU, as torch's hook does too
            for name in _BY_BUCKET:
                getattr(self._state, name).clear()
        self._finite = []

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the errors, factors and random state."""
        self._settle()
        kind, words, *position = self._state.rng.get_state(legacy=True)
        entries = {name: getattr(self._state, name) for name in (*_BY_BUCKET, *_NUMBERS)}
        entries["rng"] = (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *position)
        return entries | {"rank": self._state.matrix_approximation_rank}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state. Factors of a different rank are left out."""
        state, device = self._state, next(module.parameters()).device
        fresh = powerSGD_hook.PowerSGDState(self.group, state.matrix_approximation_rank, state.start_powerSGD_iter)
        self._state, self._last, self._bucket_parameters, self._finite = fresh, None, {}, []
        if saved is None:
            return
        same_rank = saved["rank"] == state.matrix_approximation_rank
        for name in _BY_BUCKET if same_rank else _BY_BUCKET[:1]:
            if name == "error_dict" and saved.get("scale", 1.0) != 1.0:  # an earlier version followed a loss scale
                continue
            setattr(fresh, name, {int(index): tensor.to(device, copy=True) for index, tensor in saved[name].items()})
        for name in _NUMBERS:
            setattr(fresh, name, saved[name])
        kind, words, *position = saved["rng"]
        fresh.rng.set_state((kind, words.numpy().astype(np.uint32), *position))
