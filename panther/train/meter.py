"""The mean loss, the speed and the cost of a run, for the records of its history."""

__all__ = ["Meter"]

import time

from panther.distributed import DeviceUtilization, get_rank, get_world_size
from panther.train.coordination import sum_over_ranks


class Meter:
    """Measure a run: losses, samples and time since the last record, and the time and price since its start.

    Attributes:
        sums: The sum of the weighted losses since the last record, and the sum of their weights.
        elapsed_s: Seconds in ``fit``, including earlier calls and the run that this run resumes.
        device_seconds: The same seconds, each multiplied by the number of processes at that time.
        counted_until: Time of ``time.perf_counter`` up to which the seconds are counted.
        utilization: Measures the share of the time in which the device of this rank computes; None measures nothing.
    """

    def __init__(self) -> None:
        self.sums = [0.0, 0.0]
        self.elapsed_s = self.device_seconds = 0.0
        self.utilization: DeviceUtilization | None = None
        self.start()

    def start(self) -> None:
        """Begin to measure the time and the speed."""
        self._clock = self.counted_until = time.perf_counter()
        self._samples = 0.0

    def add_step(self, loss: float, weight: float, samples: float) -> None:
        """Count the mean loss of a step, the weight of the loss, and the samples of all ranks."""
        self.sums = [self.sums[0] + loss * weight, self.sums[1] + weight]
        self._samples += samples

    def begin_record(self) -> None:
        """Forget the losses and samples of the last record."""
        self.sums, self._clock, self._samples = [0.0, 0.0], time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        """Leave a time out of the speed: ``samples_per_s`` is the speed of training without validation."""
        self._clock += seconds

    @property
    def mean_loss(self) -> float:
        """The mean of the losses since the last record."""
        losses, weight = self.sums
        return losses / weight

    def samples_per_s(self) -> float:
        """Return the number of samples per second since the last record."""
        return self._samples / max(time.perf_counter() - self._clock, 1e-9)

    def utilizations(self) -> dict[str, float]:
        """Return the share of the time since the last record in which each rank's device computed, and the mean."""
        if self.utilization is None:
            return {}
        world = get_world_size()
        shares = [0.0] * world
        shares[get_rank()] = self.utilization.restart()
        shares = sum_over_ranks(shares)
        by_rank = {f"utilization_rank_{rank}": share for rank, share in enumerate(shares)} if world > 1 else {}
        return {"utilization": sum(shares) / world, **by_rank}

    def count_time(self) -> None:
        """Add the time since the last call to the time of the run."""
        now = time.perf_counter()
        seconds, self.counted_until = now - self.counted_until, now
        self.elapsed_s += seconds
        self.device_seconds += seconds * get_world_size()

    def cost(self, price_per_device_hour: float | None) -> dict[str, float]:
        """Return the time of the run up to now, its device-hours and, with a price for an hour, their price."""
        self.count_time()
        hours = self.device_seconds / 3600
        price = {} if price_per_device_hour is None else {"price": hours * price_per_device_hour}
        return {"elapsed_s": self.elapsed_s, "device_hours": hours, **price}
