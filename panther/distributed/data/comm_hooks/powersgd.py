"""PowerSGD: each gradient as a product of two factors, with error feedback."""

__all__ = ["PowerSGD"]

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from panther.distributed.data.comm_hooks.error_feedback import ErrorFeedback

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class PowerSGD(ErrorFeedback):
    """torch's PowerSGD hook (T. Vogels, S. P. Karimireddy and M. Jaggi, 2019, arXiv:1905.13727), with its state.

    Between the replicas of hybrid sharding, the matrices are the shards of this rank: some rows of a matrix each.

    Args:
        group: The ranks that share gradients.
        rank: Rank of the matrices that are sent.
        start_step: Number of steps whose gradients are sent uncompressed.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        super().__init__(group)
        self._state = powerSGD_hook.PowerSGDState(group, rank, start_step)
        self._last: torch.futures.Future[Tensor] | None = None
        self._bucket_parameters: dict[int, tuple[int, ...]] = {}
        """The identities of the parameters of each bucket; none for a state that was loaded."""

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
        if error is not None and self._scale != self._scale_before:
            state.error_dict[index] = error * self._ratio()
        if factor is not None:  # the hook writes into it
            state.q_memory_dict[index] = factor.clone()
        self._last = powerSGD_hook.powerSGD_hook(state, bucket).then(lambda future: self._note(future.value()))
        return self._last

    def _end_shorter_step(self) -> None:
        self._state.iter += 1  # torch counts last buckets

    def _restore_unless(self, finite: Tensor, key: Any, previous_entry: Any) -> None:
        if finite:  # this waits for a GPU, as torch's hook does too
            return
        # A factor Q that did not exist before this step is removed, so that torch draws it again, and P, which was
        # computed from it, is removed too.
        for entries, value in zip((self._state.error_dict, self._state.q_memory_dict), previous_entry, strict=True):
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        if previous_entry[1] is None:
            self._state.p_memory_dict.pop(key, None)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the errors, factors and random state."""
        self._settle()
        kind, words, *position = self._state.rng.get_state(legacy=True)
        entries = {name: getattr(self._state, name) for name in (*_BY_BUCKET, *_NUMBERS)}
        entries["rng"] = (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *position)
        return entries | {"rank": self._state.matrix_approximation_rank, "scale": self._saved_scale()}

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
