"""Top-k: the largest entries of the gradients, with error feedback."""

__all__ = ["TopK"]

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther.distributed.data.comm_hooks.error_feedback import ResidualFeedback


class TopK(ResidualFeedback):
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
        super().__init__(group, feedback)
        self.fraction = fraction

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        self._begin(bucket)
        buffer = bucket.buffer()
        self._add_residuals(bucket)
        k = math.ceil(self.fraction * len(buffer))
        largest = buffer.abs().topk(k, sorted=False).indices  # NaN is the largest, so that every rank receives it
        values = buffer[largest]
        if self.feedback:
            buffer[largest] = 0.0
            self._store_residuals(bucket)
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
