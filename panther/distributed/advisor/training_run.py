"""The length of a training run, and its cost in device-hours and money, given the predicted time of a step."""

__all__ = ["TrainingCost", "TrainingRun", "describe"]

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from panther._text import counted

_LENGTHS = ("steps", "samples", "tokens")


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of a training run. It is as accurate as the predicted time of a step."""

    steps: int
    seconds: float
    """Time of the run, in seconds."""
    device_hours: float
    """Hours, summed over all devices."""
    price: float | None = None
    """Price of the device-hours, in the currency of ``price_per_device_hour``."""
    within_budget: bool | None = None
    """Whether the price is at most the budget; None without a budget."""

    def cells(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the text of the columns of :meth:`TrainingRun.columns`."""
        price = "" if self.price is None else f"{self.price:,.2f}"
        text = {"steps": f"{self.steps:,}", "device-hours": format_hours(self.device_hours), "price": price}
        return tuple(text[column] for column in columns)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The length of a training run, the price of a device, and a budget, for :func:`plan_parallelism`.

    Without a length, the run is the longest one that the budget pays for.

    Args:
        steps: Number of steps.
        samples: Number of samples, instead of ``steps``.
        tokens: Number of tokens, instead of ``steps``.
        price_per_device_hour: Price of a device for an hour, in any currency.
        budget: Largest price of the run, in the same currency.

    Raises:
        ValueError: If more than one length is given, or neither a length nor a budget; if there is a budget without a
            price, or a number is not positive.
        TypeError: If an argument is not a number.

    Example:
        >>> run = TrainingRun(tokens=1e9, price_per_device_hour=2.5, budget=100)
        >>> cost = run.cost(
        ...     step_seconds=0.5, devices=8, batch=64, tokens_per_sample=2048
        ... )
        >>> (
        ...     cost.steps,
        ...     round(cost.device_hours, 2),
        ...     round(cost.price, 2),
        ...     cost.within_budget,
        ... )
        (7630, 8.48, 21.19, True)
    """

    steps: float | None = None
    samples: float | None = None
    tokens: float | None = None
    price_per_device_hour: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        settings = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in settings.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {type(value).__name__}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be above 0 and finite")
        lengths = [name for name in _LENGTHS if name in settings]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are both given: give one length of the run")
        if self.budget is not None and self.price_per_device_hour is None:
            raise ValueError(f"budget={self.budget:g} needs price_per_device_hour, the price of a device for an hour")
        if not lengths and self.budget is None:
            raise ValueError(f"the run has no length: give one of {', '.join(_LENGTHS)}, or a budget")

    @property
    def has_length(self) -> bool:
        """Whether a length was given; if not, the budget determines it."""
        return not self.steps is self.samples is self.tokens is None

    def columns(self) -> tuple[str, ...]:
        """Return the names of the figures that differ between layouts, as columns of a table."""
        if not self.has_length:
            return ("steps",)
        return ("device-hours",) if self.price_per_device_hour is None else ("device-hours", "price")

    def cost(self, step_seconds: float, devices: int, batch: int, tokens_per_sample: int | None = None) -> TrainingCost:
        """Return the cost at a time of a step.

        Args:
            step_seconds: Time of a step, in seconds.
            devices: Number of devices.
            batch: Number of samples of a step, over all devices.
            tokens_per_sample: Number of tokens of a sample, for a run whose length is in tokens.

        Raises:
            ValueError: If the length is in tokens and ``tokens_per_sample`` is None.
        """
        per_step = step_seconds * devices / 3600
        steps = self._steps(per_step, batch, tokens_per_sample)
        hours = steps * per_step
        price = None if self.price_per_device_hour is None else hours * self.price_per_device_hour
        within = None if self.budget is None or price is None else price <= self.budget
        return TrainingCost(
            steps=steps, seconds=steps * step_seconds, device_hours=hours, price=price, within_budget=within
        )

    def _steps(self, hours_per_step: float, batch: int, tokens_per_sample: int | None) -> int:
        if self.steps is not None:
            return math.ceil(self.steps)
        if self.samples is not None:
            return math.ceil(self.samples / batch)
        if self.tokens is not None:
            if tokens_per_sample is None:
                raise ValueError(
                    f"tokens={self.tokens:g}: the model's tokens per sample are not known, because its input is not a "
                    "batch of rows of integers: give steps or samples"
                )
            return math.ceil(self.tokens / (batch * tokens_per_sample))
        # A run without a length has a budget and a price.
        return int((self.budget or 0) / (hours_per_step * (self.price_per_device_hour or 1)))


def describe(run: TrainingRun, cost: TrainingCost, devices: int, batch: int, tokens_per_sample: int | None) -> str:
    """Return the cost of a run in one sentence."""

    def tokens(steps: int) -> str:
        return f" and {steps * batch * tokens_per_sample:.3g} tokens" if tokens_per_sample else ""

    length = f"{counted(cost.steps, 'step')} of {counted(batch, 'sample')}{tokens(cost.steps)}"
    hours = format_hours(cost.device_hours)
    needs = f"{format_duration(cost.seconds)} on {counted(devices, 'device')}, {hours} device-hours"
    if cost.price is None:
        return f"{length} take {needs}."
    price = f"{needs}, which cost {cost.price:,.2f} at {run.price_per_device_hour:g} a device-hour"
    if run.budget is None:
        return f"{length} take {price}."
    if not run.has_length:
        return f"A budget of {run.budget:,.2f} pays for {length}: {price}."
    if cost.within_budget:
        return f"{length} take {price}: within the budget of {run.budget:,.2f}."
    paid = int(run.budget / cost.price * cost.steps)
    over = f"{cost.price - run.budget:,.2f} over the budget of {run.budget:,.2f}"
    return f"{length} take {price}: {over}, which pays for {counted(paid, 'step')}{tokens(paid)}."


def format_hours(hours: float) -> str:
    """Return a number of hours in three digits, or whole hours.

    Example:
        >>> format_hours(0.01234), format_hours(2345.6)
        ('0.0123', '2,346')
    """
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def format_duration(seconds: float) -> str:
    """Return a time in hours, or in days from two days on.

    Example:
        >>> format_duration(5400), format_duration(86400 * 9)
        ('1.5 hours', '9 days')
    """
    return f"{format_hours(seconds / 86400)} days" if seconds >= 172800 else f"{format_hours(seconds / 3600)} hours"
