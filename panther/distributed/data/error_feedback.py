"""Hooks that compress DDP's gradients with error feedback: PowerSGD and top-k."""

__all__ = ["PowerSGD", "TopK"]

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class _Feedback(ABC):
    """Error feedback: the part of the gradient that compression dropped is added to the next step's gradient.

    It is updated only if the gradients of all ranks are finite, because other steps are skipped by the loop or its
    GradScaler. GradScaler multiplies the loss; if its scale has changed, the stored part is multiplied by the ratio of
    the scales, a power of two.
    """

    # gloo runs the callbacks of a hook on a thread of the group, and frees them after the step has continued. If they
    # held the last reference to the group, this thread would end the group's threads, including itself, which aborts
    # the process.
    _last_group: ClassVar[dist.ProcessGroup | None] = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        _Feedback._last_group = self.group = group
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
        self._buckets, self._ended = self._buckets + 1, bucket.is_last()

    def _note(self, mean: Tensor) -> Tensor:
        """Record whether the mean of a bucket over all ranks, which is equal on all ranks, is finite."""
        # This takes a thirteenth of the time of isfinite().all() on a CPU.
        self._finite.append((mean * 0).sum() == 0)
        return mean

    def _settle(self) -> None:
        """Restore the state before the last step unless its gradients were finite.

        This is done at the beginning of the next step, because the buckets of a step overlap.
        """
        if self._before:
            assert self._scale is not None
            assert self._scale_before is not None
            # A backward pass that raised has not sent all of its buckets.
            complete = self._ended and len(self._finite) == self._buckets
            finite = torch.stack(self._finite).all() if complete else torch.zeros_like(self._scale, dtype=torch.bool)
            for key, before in self._before.items():
                self._restore_unless(finite, key, before)
            self._scale = torch.where(finite, self._scale, self._scale_before)
        self._before, self._finite, self._buckets = {}, [], 0

    @abstractmethod
    def _restore_unless(self, finite: Tensor, key: Any, before: Any) -> None:
        """Restore the entry ``key`` to the value ``before`` unless ``finite``."""

    def _ratio(self) -> Tensor:
        """Return the ratio of the present loss scale to the one with which the state was stored."""
        assert self._scale is not None
        assert self._scale_before is not None
        return self._scale / self._scale_before

    def _saved_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.item()


class PowerSGD(_Feedback):
    """torch's PowerSGD hook (T. Vogels, S. P. Karimireddy and M. Jaggi, 2019, arXiv:1905.13727), with its state.

    Args:
        group: The ranks that share gradients.
        rank: Rank of the matrices that are sent.
        start_step: Number of steps whose gradients are sent uncompressed.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        super().__init__(group)
        self._state = powerSGD_hook.PowerSGDState(group, rank, start_step)
        self._last: torch.futures.Future[Tensor] | None = None

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        if self._last is not None and "nccl" not in dist.get_backend(self.group):
            # The hook sends its factors in callbacks, which gloo runs on its own threads. Callbacks of two buckets
            # could run in a different order on each rank, and messages whose sizes differ would abort the process.
            self._last.wait()
        self._begin(bucket)
        state, index = self._state, bucket.index()
        if state.iter < state.start_powerSGD_iter:  # sent uncompressed, so that there is no error
            self._last = powerSGD_hook.powerSGD_hook(state, bucket)
            return self._last
        error = state.error_dict.get(index)
        # The length differs after loading a checkpoint with a different bucket_cap_mb.
        if error is not None and len(error) != len(bucket.buffer()):
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

    def _restore_unless(self, finite: Tensor, key: Any, before: Any) -> None:
        if finite:  # this waits for a GPU, as torch's hook does too
            return
        # A factor Q that did not exist before this step is removed, so that torch draws it again, and P, which was
        # computed from it, is removed too.
        for entries, value in zip((self._state.error_dict, self._state.q_memory_dict), before, strict=True):
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        if before[1] is None:
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
        self._state, self._last = fresh, None
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


class TopK(_Feedback):
    """Send the largest entries of each bucket, and add the remaining entries to the next gradient (error feedback).

    Without the feedback, entries that are never among the largest would never be trained. A rank sends k values and k
    indices of 4 bytes to every other rank. The result is the mean over the ranks, with zeros for entries that a rank
    did not send (S. Stich, J.-B. Cordonnier and M. Jaggi, 2018, arXiv:1809.07599).

    Args:
        group: The ranks that share gradients.
        fraction: Share of a bucket's entries that is sent, rounded up.
        feedback: Whether entries that were not sent are kept.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float, feedback: bool = True) -> None:
        super().__init__(group)
        self.fraction, self.feedback = fraction, feedback
        # By parameter, because DDP forms different buckets after the first step.
        self._residuals: dict[Tensor, Tensor] = {}

    @property
    def residuals(self) -> dict[Tensor, Tensor]:
        """The entries that were not sent yet, by parameter, after a step."""
        self._settle()
        return self._residuals

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the entries that were not sent yet, by the names of parameters."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        residuals = {names[parameter]: residual for parameter, residual in self.residuals.items()}
        return {"residuals": residuals, "scale": self._saved_scale()}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state."""
        parameters = dict(module.named_parameters())
        residuals = {} if saved is None else saved["residuals"]
        self._residuals = {
            parameters[name]: residual.to(parameters[name].device) for name, residual in residuals.items()
        }
        device = next(module.parameters()).device
        self._forget(None if saved is None else torch.tensor(saved["scale"], device=device))

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        self._begin(bucket)
        buffer = bucket.buffer()
        parameters, gradients = bucket.parameters(), bucket.gradients()  # the gradients are views of the buffer
        ratio = self._ratio().to(buffer.dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._residuals:
                gradient.addcmul_(self._residuals[parameter], ratio)
        k = math.ceil(self.fraction * len(buffer))
        largest = buffer.abs().topk(k, sorted=False).indices  # NaN is the largest, so that every rank receives it
        values = buffer[largest]
        if self.feedback:
            buffer[largest] = 0.0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._before[parameter] = self._residuals.get(parameter)
                self._residuals[parameter] = gradient.clone()
        # Indices and values in one message, as bytes.
        local_message = torch.cat((largest.to(torch.int32).view(torch.uint8), values.view(torch.uint8)))
        messages = [torch.empty_like(local_message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(messages, local_message, group=self.group, async_op=True)

        def mean(_: Any) -> Tensor:
            buffer.zero_()
            for message in messages:
                rank_indices, rank_values = (
                    message[: 4 * k].view(torch.int32),
                    message[4 * k :].clone().view(buffer.dtype),
                )
                buffer.index_add_(0, rank_indices, rank_values)
            return self._note(buffer.div_(len(messages)))

        return work.get_future().then(mean)

    def _restore_unless(self, finite: Tensor, key: Any, before: Any) -> None:
        # On a GPU, `finite` is not read, because this would wait for the GPU in the middle of a backward pass.
        if not (finite.is_cpu and finite):
            self._residuals[key] = torch.where(finite, self._residuals[key], 0.0 if before is None else before)
