"""The agreement of all ranks to stop a run at the same step; ranks that continued would wait for the others."""

__all__ = ["StopVotes"]

from collections.abc import Sequence

from panther.distributed import get_world_size
from panther.train.callbacks import Callback, may_stop
from panther.train.coordination.reductions import gather_over_ranks, sum_over_ranks
from panther.train.coordination.step_exchange import StepExchange


class StopVotes:
    """Find out at the start of a run whether some rank has callbacks, and whether they may stop the run.

    Args:
        callbacks: The callbacks of this rank.
        stop: Whether this rank is to stop already.

    Attributes:
        has_callbacks: Whether some rank has callbacks.
        ends: Whether some rank is to stop already.
    """

    def __init__(self, callbacks: Sequence[Callback], stop: bool) -> None:
        kinds = {type(callback) for callback in callbacks}
        answers = [[int(bool(kinds)), int(any(map(may_stop, kinds))), int(stop)]]
        if get_world_size() > 1:
            answers = gather_over_ranks(answers[0])
        self.has_callbacks, self._may_stop, self.ends = (any(column) for column in zip(*answers, strict=True))

    def after_step(self, stop: bool, exchange: StepExchange) -> bool:
        """Return whether all ranks stop after this step."""
        if get_world_size() == 1:
            return stop
        # A separate message takes 12 to 15 % of a step of 5 ms, so it is sent only if a callback may have set `stop`
        # just now.
        return _any_rank(stop) if self._may_stop else exchange.stops

    def after_epoch(self, stop: bool, ends: bool) -> bool:
        """Return whether all ranks stop after this epoch: some rank is to stop, or they have agreed to end."""
        return _any_rank(stop) if self._may_stop else ends


def _any_rank(flag: bool) -> bool:
    """Return whether a flag is set on some rank."""
    return sum_over_ranks([flag])[0] > 0
