"""The utilization of a rank's device: the share of the time in which it computes."""

__all__ = ["DeviceUtilization"]

import math
import statistics
import threading
import time
from typing import Any, Self

import torch

from panther.distributed.comm.mesh import get_distributed_info
from panther.errors import DistributedError, MissingExtraError, check_device, install_command


class DeviceUtilization:
    """Measure the share of the time in which the device of this rank computes, inside a ``with`` block.

    For a GPU, it is the share of the time in which a kernel runs. The driver reports it, and a thread samples it while
    the block runs. For the CPU, it is the processor time of this process divided by the elapsed time and the number of
    torch's threads. A rank that waits for other ranks, for data or for the network has a smaller share.

    Args:
        device: The device; None is that of this rank.
        interval_s: Time between two samples of a GPU, in seconds.

    Attributes:
        value: The share, from 0 to 1, once the block has ended.

    Raises:
        MissingExtraError: If the device is a GPU, and torch lacks nvidia-ml-py, by which it asks the driver.
        DistributedError: If the driver does not report it, as for a part of a GPU.

    Example:
        >>> with DeviceUtilization() as utilization:
        ...     _ = torch.ones(500, 500) @ torch.ones(500, 500)
        >>> 0 <= utilization.value <= 1
        True
    """

    def __init__(self, device: torch.device | str | None = None, *, interval_s: float = 0.5) -> None:
        if not isinstance(interval_s, int | float) or not interval_s > 0:
            raise ValueError(f"interval_s={interval_s!r} must be a positive number of seconds")
        check_device(device)
        self.device = None if device is None else torch.device(device)
        self.interval_s, self.value = interval_s, math.nan
        self._end = threading.Event()
        self._samples: list[float] = []

    def __enter__(self) -> Self:
        self._device = self.device or get_distributed_info().device
        if self._device.type == "cuda":
            self._sample()  # so that an error reaches the caller; the value is not used, as it is from before the block
            self._end.clear()
            self._sampler = threading.Thread(target=self._follow, daemon=True)
        self._begin()
        if self._device.type == "cuda":
            self._sampler.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._device.type == "cuda":
            self._end.set()
            self._sampler.join()
        self.value = self.restart()

    def restart(self) -> float:
        """Return the share since the block began, or since the last call, and begin a new measurement."""
        if self._device.type == "cuda":
            value = statistics.mean([*self._samples, self._sample()])
        else:
            elapsed, computed = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
            value = min(computed / max(elapsed * torch.get_num_threads(), 1e-9), 1.0)
        self._begin()
        return value

    def _begin(self) -> None:
        self._clocks, self._samples = (time.perf_counter(), time.process_time()), []

    def _follow(self) -> None:
        while not self._end.wait(self.interval_s):
            self._samples.append(self._sample())

    def _sample(self) -> float:
        try:
            return torch.cuda.utilization(self._device) / 100
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "nvidia-ml-py, which reads the utilization of a GPU, is not installed: run " + install_command("gpu")
            ) from error
        except Exception as error:  # the driver fails, with classes of nvidia-ml-py
            raise DistributedError(f"the driver does not report the utilization of {self._device}: {error}") from error
