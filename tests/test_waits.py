"""The limits of waits: a hang reaches them, and a busy machine does not."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pool
import pytest
import torch.distributed as dist
import waits

from panther.distributed.comm import process_group


@pytest.mark.parametrize(("load", "expected"), [(1.0, 20), (3.0, 60)])
def test_the_clock_of_a_limit_slows_down_with_the_load(load, expected, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(waits.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(waits, "slowdown", lambda: load)
    deadline = waits.Deadline(20)
    clock.now += 100  # a pause of the machine
    assert not deadline.passed()
    while not deadline.passed():
        clock.now += 0.5
    assert abs(clock.now - 100 - expected) <= 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, as Linux has it")
def test_a_process_below_a_child_is_seen():
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '1000'])"]
    child = subprocess.Popen(command, start_new_session=True)
    try:
        waits.until(lambda: len(waits.descendants(child.pid)) == 2, "the child started no process")
        assert waits.descendants(child.pid)[1] in waits.descendants()
    finally:
        waits.os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_for_ever():
    process_group._FAREWELL_S = 0  # The other rank does not wait in shutdown for this one.
    if dist.get_rank() == 1:
        threading.Event().wait()


def wait_for_the_others():
    process_group._FAREWELL_S = 600  # The other rank waits in shutdown for this one, also on a busy machine.
    if dist.get_rank() == 0:
        dist.barrier()


def compute_for_ever():
    process_group._FAREWELL_S = 0
    while dist.get_rank() == 1:
        pass


@pytest.mark.distributed
@pytest.mark.parametrize("work", [wait_for_ever, compute_for_ever])
def test_a_rank_that_hangs_is_named_with_its_stack(work):
    pool.run(dist.get_rank, 2)  # What processes do for the first time takes time of its own.
    with pytest.raises(pool.RankError) as caught:
        pool.run(work, 2, limit_s=1)
    message = str(caught.value)
    assert message.startswith("ranks [1] of 2 had not returned after 1 s\n\nrank 1:\n")
    assert f"in {work.__name__}\n" in message
    assert "_pytest" not in message
    assert pool.run(dist.get_rank, 2) == [0, 1]  # by other processes


@pytest.mark.distributed
def test_a_collective_operation_that_hangs_is_in_the_stack():
    pool.run(dist.get_rank, 2)
    with pytest.raises(pool.RankError, match=r"rank 0:\n(.|\n)* in barrier\n(.|\n)*rank 1:\n(.|\n)* in shutdown\n"):
        pool.run(wait_for_the_others, 2, limit_s=3)


def test_a_command_that_does_not_end_shows_what_it_wrote():
    with pytest.raises(waits.WaitError, match=r"still running after 1 s: (.|\n)*\nbegun\n"):
        waits.run(["sh", "-c", "echo begun; sleep 1000; echo never"], limit_s=1)


def test_a_test_that_hangs_ends_with_the_stacks_of_its_processes(monkeypatch):
    shown = []
    terminal = SimpleNamespace(write=shown.append, sep=lambda *_, **__: None)
    item = SimpleNamespace(nodeid="the test", config=SimpleNamespace(get_terminal_writer=lambda: terminal))
    settings = SimpleNamespace(timeout=0.5, disable_debugger_detection=True)
    monkeypatch.setattr(waits, "slowdown", lambda minutes=1: 1.0)
    if (pid := waits.os.fork()) == 0:
        while True:
            signal.pause()
    try:
        waits.start_test_limit(item, settings)
        with pytest.raises(pytest.fail.Exception, match="Timeout"):
            threading.Event().wait()
    finally:
        item.cancel_timeout()
        with pytest.raises(waits.WaitError, match=r"process 0 is still running\n(.|\n)*test_waits.py"):
            waits.join([pid], limit_s=0.5)
    assert any(stacks.startswith(f"\nprocess {pid}, forked by the test\n") for stacks in shown)
    assert any("in test_a_test_that_hangs" in stacks for stacks in shown)
