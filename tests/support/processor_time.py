"""Processor time that a test takes, with its processes, and how slow this machine is beside the one of the limit."""

import math
import os
import resource
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import torch

LIMIT_S = 5.0
# Seconds of `_workload_s` on the reference machine, two virtual cores of an Intel Xeon at 2.5 GHz: the fastest of 60.
# While a dozen other processes share the two cores, half of the times are above 0.057, and the longest is 0.075.
REFERENCE_S = 0.042
# Two runs of a test differ by more than the fixed workload tells: a test of several processes took 4.2 s on an idle
# machine, and 7.8 s beside another set of tests on two virtual cores that are the two threads of one core.
SPREAD = 2.0
_INTERVAL_S = 10.0
_CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_start_s, _sampled_at = 0.0, -math.inf
_workloads_s = deque(maxlen=6)  # those of the last minute, or the last six tests that seemed too long


def processor_s():
    """Return the seconds of this process and of all its children, those that have ended and those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_and_ended = time.process_time() + ended.ru_utime + ended.ru_stime
    if Path("/proc/self/task").exists():
        return own_and_ended + sum(_process_s(pid) for pid in _children())
    pool = sys.modules.get("pool")
    return own_and_ended + (pool.processor_s() if pool else 0.0)


def _children():
    """Return the ids of the child processes that were not waited for yet; of all threads of this process."""
    pids = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            pids += (thread / "children").read_text().split()
        except OSError:  # The thread has ended, or this kernel does not list children.
            continue
    return pids


def _process_s(pid):
    """Return the seconds of a process and of the children that it has waited for."""
    try:
        # After the name, in brackets, the fields 14 to 17 of proc(5): utime, stime, cutime, cstime.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # It has ended and was waited for.
        return 0.0
    return sum(map(int, fields[11:15])) * _CLOCK_TICK_S


def limit_s():
    """Return the limit of a test on this machine as it is now: never below LIMIT_S, more on a slower machine.

    The processor time of the same work differs between machines, and nearly doubles while other processes use the
    caches and the memory. So the limit is multiplied by the time of a fixed workload over its time on the reference
    machine: the longest of the times at the start, before the test and now.
    """
    _workloads_s.append(statistics.median(_workload_s() for _ in range(3)))
    return LIMIT_S * SPREAD * max(1.0, _start_s / REFERENCE_S, max(_workloads_s) / REFERENCE_S)


def sample_speed():
    """Time the workload if the last time is more than 10 s ago: a hundredth of the time of a run at most."""
    global _start_s, _sampled_at
    if time.monotonic() - _sampled_at > _INTERVAL_S:
        _sampled_at = time.monotonic()
        _workloads_s.append(_workload_s())
        _start_s = _start_s or _workloads_s[0]


def _workload_s():
    """Return the processor seconds of this thread for some products, some passes over memory and some Python."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The work of other threads would not be counted.
    begun = time.thread_time()
    matrix, vector = torch.ones(192, 192), torch.ones(500_000)
    with torch.no_grad():
        for _ in range(20):
            matrix = (matrix @ matrix).mul_(1 / 192)
            vector = vector * 1.5 - vector * 0.5
    counts = {}
    for number in range(60_000):
        counts[number % 97] = counts.get(number % 97, 0) + 1
    torch.set_num_threads(threads)
    return time.thread_time() - begun
