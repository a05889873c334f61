"""Compression of DDP's gradients that adds what was not sent to the next ones: PowerSGD and top-k, as its hooks."""

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
    """What was not sent of the gradients of a step, and is added to those of the next one.

    A step replaces it only if its gradients are finite on every rank: a loop, or its GradScaler, skips the others, as
    if they had not been. GradScaler multiplies the loss; where its scale has changed, what was kept is multiplied by
    the ratio, a power of two.
    """

    # gloo calls what a hook does with a message on a thread of the group, and drops it after the step has gone on. If
    # that were the last reference to the group, the thread would end the group's threads, itself among them, which
    # aborts the process.
    _last_group: ClassVar[dist.ProcessGroup | None] = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        _Feedback._last_group = self.group = group
        self.loss_scale: Callable[[], Tensor] | None = None
        """Returns the factor of the loss of the present step; None stands for a loss that is not scaled."""
        self._forget(None)

    def _forget(self, scale: Tensor | None) -> None:
        self._before: dict[Any, Any] = {}  # what was kept before the last step, None where nothing was
        self._finite: list[Tensor] = []  # by the buckets of the last step
        self._buckets, self._ended = 0, False
        self._scale, self._scale_before = scale, scale

    def _begin(self, bucket: dist.GradBucket) -> None:
        """Do what comes before a bucket is sent."""
        if bucket.index() == 0:
            self._settle()
            scale = bucket.buffer().new_ones((), dtype=torch.float32) if self.loss_scale is None else self.loss_scale()
            self._scale, self._scale_before = scale, scale if self._scale is None else self._scale
        self._buckets, self._ended = self._buckets + 1, bucket.is_last()

    def _note(self, mean: Tensor) -> Tensor:
        """Note whether the mean of a bucket over all ranks, the same on each, is finite."""
        self._finite.append((mean * 0).sum() == 0)  # in a thirteenth of the time of isfinite().all() on a CPU
        return mean

    def _settle(self) -> None:
        """Restore what was kept before the last step unless that was finite; not earlier, as its buckets overlap."""
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
        """Restore what an entry of ``_before`` says, or not."""

    def _ratio(self) -> Tensor:
        """Return the factor of what was kept, which is in the units of the loss scale of its step."""
        assert self._scale is not None
        assert self._scale_before is not None
        return self._scale / self._scale_before

    def _saved_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.item()


class PowerSGD(_Feedback):
    """torch's PowerSGD hook (T. Vogels, S. P. Karimireddy and M. Jaggi, 2019, arXiv:1905.13727), with its state.

    Args:
        group: The ranks that share gradients.
        rank: Of the matrices that are sent.
        start_step: Number of steps whose gradients are sent whole.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        super().__init__(group)
        self._state = powerSGD_hook.PowerSGDState(group, rank, start_step)
        self._last: torch.futures.Future[Tensor] | None = None

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        if self._last is not None and "nccl" not in dist.get_backend(self.group):
            # The hook sends its factors in callbacks, which gloo calls on threads of its own. Those of two buckets
            # would come in a different order on each rank, and abort the process: message sizes do not match.
            self._last.wait()
        self._begin(bucket)
        state, index = self._state, bucket.index()
        if state.iter < state.start_powerSGD_iter:  # sent whole; nothing is kept
            self._last = powerSGD_hook.powerSGD_hook(state, bucket)
            return self._last
        error = state.error_dict.get(index)
        if error is not None and len(error) != len(bucket.buffer()):  # of a checkpoint with another bucket_cap_mb
            error = None
            for name in _BY_BUCKET:
                getattr(state, name).pop(index, None)
        factor = state.q_memory_dict.get(index)
        self._before[index] = error, factor
        if error is not None and self._scale != self._scale_before:
            state.error_dict[index] = error * self._ratio()
        if factor is not None:  # the hook writes into it
            state.q_memory_dict[index] = factor.clone()
        self._last = powerSGD_hook.powerSGD_hook(state, bucket).then(lambda sent: self._note(sent.value()))
        return self._last

    def _restore_unless(self, finite: Tensor, key: Any, before: Any) -> None:
        if finite:  # waits for a GPU, as torch's hook does itself
            return
        # The first factors, with which errors begin too, are functions of Q, which is then drawn anew.
        for kept, value in zip((self._state.error_dict, self._state.q_memory_dict), before, strict=True):
            if value is None:
                kept.pop(key, None)
            else:
                kept[key] = value
        if before[1] is None:
            self._state.p_memory_dict.pop(key, None)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the errors, factors and random state."""
        self._settle()
        kind, words, *position = self._state.rng.get_state(legacy=True)
        kept = {name: getattr(self._state, name) for name in (*_BY_BUCKET, *_NUMBERS)}
        kept["rng"] = (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *position)
        return kept | {"rank": self._state.matrix_approximation_rank, "scale": self._saved_scale()}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Set what :meth:`state_dict` returned; None begins anew. Factors of a different rank are left out."""
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
    """Send the largest entries of each bucket, and add the others to the next gradient (error feedback).

    Without the feedback, entries that are never among the largest would never be trained. A rank sends k values and k
    indices of 4 bytes to each other rank, for the mean of what all ranks chose (S. Stich, J.-B. Cordonnier and
    M. Jaggi, 2018, arXiv:1809.07599).

    Args:
        group: The ranks that share gradients.
        fraction: Share of a bucket's entries that is sent, rounded up.
        feedback: Whether entries that were not sent are kept.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float, feedback: bool = True) -> None:
        super().__init__(group)
        self.fraction, self.feedback = fraction, feedback
        # By parameter, because DDP forms other buckets after the first step.
        self._residuals: dict[Tensor, Tensor] = {}

    @property
    def residuals(self) -> dict[Tensor, Tensor]:
        """What was not sent yet, by parameter, after a step."""
        self._settle()
        return self._residuals

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return what was not sent yet, by the names of parameters."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        residuals = {names[parameter]: residual for parameter, residual in self.residuals.items()}
        return {"residuals": residuals, "scale": self._saved_scale()}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Set what :meth:`state_dict` returned; None begins anew."""
        parameters = dict(module.named_parameters())
        residuals = {} if saved is None else saved["residuals"]
        self._residuals = {parameters[name]: one.to(parameters[name].device) for name, one in residuals.items()}
        device = next(module.parameters()).device
        self._forget(None if saved is None else torch.tensor(saved["scale"], device=device))

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        self._begin(bucket)
        whole = bucket.buffer()
        parameters, gradients = bucket.parameters(), bucket.gradients()  # the gradients are views of the buffer
        ratio = self._ratio().to(whole.dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._residuals:
                gradient.addcmul_(self._residuals[parameter], ratio)
        k = math.ceil(self.fraction * len(whole))
        chosen = whole.abs().topk(k, sorted=False).indices  # NaN is the largest, so that every rank receives it
        values = whole[chosen]
        if self.feedback:
            whole[chosen] = 0.0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._before[parameter] = self._residuals.get(parameter)
                self._residuals[parameter] = gradient.clone()
        # Indices and values in one message, as bytes.
        mine = torch.cat((chosen.to(torch.int32).view(torch.uint8), values.view(torch.uint8)))
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(every, mine, group=self.group, async_op=True)

        def mean(_: Any) -> Tensor:
            whole.zero_()
            for message in every:
                indices, sent = message[: 4 * k].view(torch.int32), message[4 * k :].clone().view(whole.dtype)
                whole.index_add_(0, indices, sent)
            return self._note(whole.div_(len(every)))

        return work.get_future().then(mean)

    def _restore_unless(self, finite: Tensor, key: Any, before: Any) -> None:
        # A GPU is not asked, because that would wait for its work in the middle of a backward pass.
        if not (finite.is_cpu and finite):
            self._residuals[key] = torch.where(finite, self._residuals[key], 0.0 if before is None else before)
