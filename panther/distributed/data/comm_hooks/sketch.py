"""Sketches: sums of a few gradient entries with random signs."""

__all__ = ["Sketch"]

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.sketch import signs

_SEED = 0  # a constant, so that ranks cannot disagree


class Sketch:
    """Send sums of c entries of the gradient with random signs, c = 1 / ``fraction``, and decode without a bias.

    A bucket is a matrix X with c rows. With random signs s, a rank sends the row s^T X, and decodes it to s s^T X,
    whose mean over the signs is X. All ranks use the same signs, which are functions of the step. The error has c - 1
    times the squared norm of the gradient. The decoder s s^T X / c with error feedback (S. P. Karimireddy and others,
    2019, arXiv:1901.09847) learned less with AdamW and with SGD (docs/benchmarks/slow-link).

    Cost: for a bucket of n entries, one all-reduce of ``ceil(fraction * n)`` numbers and three passes over the bucket.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float) -> None:
        self.group = group
        self.fraction = fraction
        self.step = 0
        """The number of steps that have begun, which selects the signs."""

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        if bucket.index() == 0:
            self.step += 1
        buffer = bucket.buffer()
        num_columns = math.ceil(self.fraction * len(buffer))
        num_rows = -(-len(buffer) // num_columns)
        # The last row may have fewer columns.
        rows, last_row = buffer.split((num_rows - 1) * num_columns) if num_rows > 1 else (buffer[:0], buffer)
        rows, rest = rows.view(num_rows - 1, num_columns), len(last_row)
        step_rows = range(self.step, self.step + 1)
        s = signs(_SEED, bucket.index(), step_rows, range(num_rows), dtype=buffer.dtype, device=buffer.device).flatten()
        message = s[:-1] @ rows
        message[:rest].addcmul_(last_row, s[-1])
        work = dist.all_reduce(message.div_(dist.get_world_size(self.group)), group=self.group, async_op=True)

        def decode(_: Any) -> Tensor:
            torch.outer(s[:-1], message, out=rows)
            torch.mul(message[:rest], s[-1], out=last_row)
            return buffer

        return work.get_future().then(decode)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the number of steps that have begun."""
        return {"step": self.step}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state."""
        self.step = 0 if saved is None else saved["step"]
