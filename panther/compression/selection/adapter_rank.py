"""Give all corrections one rank, for readers that take them as an adapter, which is padded to its largest rank."""

__all__ = ["with_one_rank"]

from collections.abc import Callable
from dataclasses import replace

from panther.compression.calibration.targets import Target
from panther.compression.forms import Choice, Fits, Option, Options, form_named, total_loss
from panther.compression.selection.convex_hull import BYTES, Cost

_SHARE_WITHOUT_LIMIT = 0.25  # of the dense weights' bytes: 8 bits of 32


def with_one_rank(
    fits: Fits, choose: Callable[[Options, float, Cost], Choice], limit: float | None, cost: Cost = BYTES
) -> Fits:
    """Return the fits with corrections of one rank only: the rank with which the choice has the smallest loss.

    An option's bytes are then those of the files, because no factor is padded, except for factors of weights that are
    too small for the rank, whose padding is counted. Without corrections, or without a reader, the fits are returned.

    Args:
        fits: The fits, with their options.
        choose: Chooses an option of each weight within a limit, as ``choose_global`` does.
        limit: The limit, in units of ``cost``; None compares ranks at a quarter of the dense weights' bytes.
        cost: What the limit is of.
    """
    ranks = sorted({option.rank for options in fits.options.values() for option in options if option.rank})
    if fits.settings.reader is None or not ranks:
        return fits
    if limit is None:
        limit, cost = _SHARE_WITHOUT_LIMIT * sum(target.dense_bytes for target in fits.options), BYTES
    candidates = [_of_rank(fits, rank) for rank in ranks]

    def loss(options: Options) -> tuple[float, float]:
        choice = choose(options, limit, cost)
        return total_loss(choice), sum((option.error or 0.0) ** 2 for option in choice.values())

    return replace(fits, options=min(candidates, key=loss))


def _of_rank(fits: Fits, rank: int) -> Options:
    """Return the options without corrections, and of each form with corrections the option of the largest fit rank."""
    options: dict[Target, list[Option]] = {}
    for target, target_options in fits.options.items():
        largest: dict[str, int] = {}
        for option in target_options:
            if option.rank is not None and option.rank <= rank:
                largest[option.form] = max(option.rank, largest.get(option.form, 0))
        options[target] = [
            option
            if option.rank is None
            else replace(option, bytes=form_named(option.form).stored_bytes(target, rank, fits.settings))
            for option in target_options
            if option.rank is None or option.rank == largest.get(option.form)
        ]
        options[target].sort(key=lambda option: option.bytes)
    return options
