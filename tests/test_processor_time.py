"""Processor time of tests: what counts, and the limit on a slow machine."""

import os

import processor_time
import pytest


def use(seconds):
    begun = processor_time.processor_s()
    while processor_time.processor_s() - begun < seconds:
        pass


def test_the_time_of_children_counts_while_they_run_and_after_they_ended():
    begun = processor_time.processor_s()
    used, tell_used = os.pipe()
    end, tell_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        use(0.2)
        os.write(tell_used, b"x")
        os.read(end, 1)
        os._exit(0)
    os.read(used, 1)
    assert processor_time.processor_s() - begun > 0.15
    os.write(tell_end, b"x")
    os.waitpid(pid, 0)
    assert processor_time.processor_s() - begun > 0.15
    for number in (used, tell_used, end, tell_end):
        os.close(number)


@pytest.mark.parametrize(
    ("at_start", "recent", "now", "expected"),
    [(0.5, 0.5, 0.5, 1.0), (3.0, 1.0, 1.0, 3.0), (1.0, 3.0, 1.0, 3.0), (1.0, 1.0, 3.0, 3.0)],
)
def test_a_slower_machine_has_a_longer_limit(at_start, recent, now, expected, monkeypatch):
    reference = processor_time.REFERENCE_S
    monkeypatch.setattr(processor_time, "_start_s", at_start * reference)
    monkeypatch.setattr(processor_time, "_workloads_s", [recent * reference])
    monkeypatch.setattr(processor_time, "_workload_s", lambda: now * reference)
    assert processor_time.limit_s() == pytest.approx(expected * processor_time.LIMIT_S * processor_time.SPREAD)
