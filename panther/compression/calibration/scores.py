"""Entries of a model's output that are scores, and entries that a mask has filled with a large negative number."""

__all__ = ["ScoreFill"]

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_FILL, _CERTAIN_FILL = 1e4, 1e6
_FILL_GAP = 100.0


@dataclass(frozen=True)
class ScoreFill:
    """The entries of a model's output that hold a large negative number in the place of a score.

    Models fill the scores of choices that are not allowed with -inf, the smallest number of the dtype, -1e9 or -1e4.
    The square of such a number would hide every error in the entries that are scores.
    """

    threshold: float | None
    """Entries up to this number are filled; None where every entry is a score."""
    floor: float
    """The smallest score."""

    @classmethod
    def of(cls, output: Tensor) -> "ScoreFill":
        """Return the fill of an output.

        Entries are filled if their size is 100 times that of all scores or more, and either 1e6 or more, or 1e4 or more
        and for at least half of them, which are at least two, the same number.
        """
        threshold, scores = None, output.detach()
        while scores.numel() and (lowest := scores.amin().item()) <= -_SMALLEST_FILL:
            limit = max(lowest, torch.finfo(scores.dtype).min) / 2
            filled, larger_scores = scores[scores <= limit], scores[scores > limit]
            if not larger_scores.numel() or not _FILL_GAP * larger_scores.abs().amax().item() <= -lowest:
                break
            repeated = int((filled == lowest).sum())
            if lowest > -_CERTAIN_FILL and (repeated < 2 or 2 * repeated < len(filled)):
                break
            threshold, scores = limit, larger_scores
        return cls(threshold, -torch.inf if threshold is None else scores.amin().item())

    def scores(self, output: Tensor) -> Tensor:
        """Return the entries that are scores: one-dimensional where some are filled, otherwise the output itself."""
        return output if self.threshold is None else output[output > self.threshold]

    def replaced(self, output: Tensor) -> Tensor:
        """Return the output with the smallest score in filled entries, so that two outputs can be subtracted."""
        return output if self.threshold is None else output.masked_fill(output <= self.threshold, self.floor)
