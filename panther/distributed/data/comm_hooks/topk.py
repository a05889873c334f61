"""Top-k: the largest entries of the gradients, with error feedback."""

__all__ = ["TopK"]

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther._torch import untracked_shard
from panther.distributed.data.comm_hooks.error_feedback import ErrorFeedback


class TopK(ErrorFeedback):
    """Send the largest entries of each bucket, and add the remaining entries to the next gradient (error feedback).

    Without the feedback, entries that are never among the largest would never be trained. A rank sends k values and k
    indices of 4 bytes to every other rank. The result is the mean over the ranks, with zeros for entries that a rank
    did not send (S. Stich, J.-B. Cordonnier and M. Jaggi, 2018, arXiv:1809.07599).

    The entries that were not sent are stored by parameter, because DDP forms different buckets after the first step.

    Args:
        group: The ranks that share gradients.
        fraction: Share of a bucket's entries that is sent, rounded up.
        feedback: Whether entries that were not sent are kept.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float, feedback: bool = True) -> None:
        super().__init__(group)
        self.fraction, self.feedback = fraction, feedback
        self._residuals: dict[Tensor, Tensor] = {}

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        self._begin(bucket)
        buffer = bucket.buffer()
        ratio = self._ratio().to(buffer.dtype)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._residuals:
                gradient.addcmul_(self._residuals[parameter].to(gradient.device), ratio)
        k = math.ceil(self.fraction * len(buffer))
        largest = buffer.abs().topk(k, sorted=False).indices  # NaN is the largest, so that every rank receives it
        values = buffer[largest]
        if self.feedback:
            buffer[largest] = 0.0
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
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

    @property
    def residuals(self) -> dict[Tensor, Tensor]:
        """The part of the gradients that was not sent yet, by parameter, after a step."""
        self._settle()
        return self._residuals

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the part of the gradients that was not sent yet, by the names of parameters."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        residuals = {names[parameter]: residual for parameter, residual in self.residuals.items()}
        return {"residuals": residuals, "scale": self._saved_scale()}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state."""
        parameters = dict(module.named_parameters())
        residuals = {} if saved is None else saved["residuals"]
        # Residuals of a different layout have other shapes, and are left out.
        self._residuals = {
            parameters[name]: residual.to(parameters[name].device)
            for name, residual in residuals.items()
            if residual.shape == untracked_shard(parameters[name]).shape
        }
        device = next(module.parameters()).device
        self._forget(None if saved is None else torch.tensor(saved["scale"], device=device))

    def _restore_unless(self, finite: Tensor, key: Any, previous_entry: Any) -> None:
        # On a GPU, `finite` is not read, because this would wait for the GPU in the middle of a backward pass.
        if not (finite.is_cpu and finite):
            previous_residual = 0.0 if previous_entry is None else previous_entry
            self._residuals[key] = torch.where(finite, self._residuals[key], previous_residual)
