"""Sketches: sums of a few gradient entries with random signs, with error feedback."""

__all__ = ["Sketch"]

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.distributed.data.comm_hooks.error_feedback import ResidualFeedback
from panther.sketch import signs

_SEED = 0  # a constant, so that ranks cannot disagree


class Sketch(ResidualFeedback):
    """Send sums of c entries of the gradient with random signs, c = 1 / fraction, and add the remaining part later.

    A bucket is a matrix X with c rows. With random signs s, a rank sends the row s^T X / c, and decodes it to
    s s^T X / c, the orthogonal projection of the columns onto s. All ranks use the same signs, which are functions of
    the step. So one all-reduce of the rows gives the sketch of the mean gradient, and the result does not depend on how
    the samples are divided among the ranks, except for rounding.

    With new signs in every step, the expected squared norm of the remaining part is 1 - 1/c times that of the gradient,
    for every gradient. This is a contraction, with which error feedback converges (S. P. Karimireddy, Q. Rebjock,
    S. Stich and M. Jaggi, 2019, arXiv:1901.09847); a gradient arrives with a delay of c steps on average. The unbiased
    decoder s s^T X is not a contraction: its error has c - 1 times the squared norm of the gradient, and the stored
    part would grow without a limit. PowerSGD at rank r leaves at most 1 - r / min(m, n) of the squared norm of an
    (m, n) matrix with the best factors, and much less if the singular values of the gradient decay.

    AdamW divides by the root of the mean square of what arrives in bursts, and its steps are therefore small: a
    transformer with c = 10 had a loss of 3.1 after 200 steps, and 2.5 without compression (docs/benchmarks/slow-link).

    Args:
        group: The ranks that share gradients.
        fraction: Numbers that are sent for each entry, rounded up.
        feedback: Whether the part that was not sent is kept.

    Cost: for a bucket of n entries, one all-reduce of ``ceil(fraction * n)`` numbers, five passes over the bucket, and
    memory for a copy of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float, feedback: bool = True) -> None:
        super().__init__(group, feedback)
        self.fraction = fraction
        self.step = 0
        """The number of steps that have begun, which selects the signs."""

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        self._begin(bucket)
        if bucket.index() == 0:
            self.step += 1
        self._add_residuals(bucket)
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
        message[:rest] /= num_rows
        message[rest:] /= num_rows - 1
        if self.feedback:
            rows.addr_(s[:-1], message, alpha=-1)
            last_row.addcmul_(message[:rest], s[-1], value=-1)
            self._store_residuals(bucket)
        work = dist.all_reduce(message.div_(dist.get_world_size(self.group)), group=self.group, async_op=True)

        def decode(_: Any) -> Tensor:
            torch.outer(s[:-1], message, out=rows)
            torch.mul(message[:rest], s[-1], out=last_row)
            return self._note(buffer)

        return work.get_future().then(decode)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the part of the gradients that was not sent yet, by the names of parameters, and the step."""
        return {**super().state_dict(module), "step": self.step}

    def load_state_dict(self, module: nn.Module, saved: dict[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`; None resets the state."""
        super().load_state_dict(module, saved)
        self.step = 0 if saved is None else saved["step"]
