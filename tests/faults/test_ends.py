"""Whatever happens in the middle of a run, it ends, names the cause, leaves no process, and can be started again."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import waits
from faults import FAULTS, STEPS, Samples, fail, processes_of, recover, start, steps
from launchers import Launcher, until
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from panther.distributed import all_reduce, checkpoint, init
from panther.distributed.comm.ending import begin_to_end, is_free
from panther.errors import DistributedError
from panther.train import TrainConfig, Trainer

pytestmark = pytest.mark.distributed

QUICK = ("a rank is stopped", "the launcher is killed while a rank hangs with the interpreter's lock")


def quick_and_slow(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def all_have_ended(directory):
    return lambda: not processes_of(directory)


# With two ranks


CAUSES = {
    "a rank is killed": ["rank 1 of 2 was ended by SIGKILL"],
    "a rank raises": ["rank 1 of 2 raised OSError: this file is corrupt"],
    "a rank leaves": ["rank 1 of 2 left with exit code 0 before its function returned"],
    "a rank is stopped": ["rank 1 did not take part", "raise timeout_s of init ("],
    "a rank hangs": ["rank 1 did not take part"],
    "a rank hangs with the interpreter's lock": ["rank 1 did not take part"],
    "a loader's worker is killed": ["a worker process of the DataLoader was ended by SIGKILL"],
    "a loader's worker is killed slowly": ["a worker process of the DataLoader was ended by SIGKILL"],
    "a loader's worker raises": ["OSError: this file is corrupt"],
    "a loader's worker hangs": ["did not take part"],
}


@pytest.mark.parametrize("name", quick_and_slow(CAUSES))
def test_the_error_names_the_cause_and_no_process_is_left(tmp_path, name):
    assert waits.join([start(tmp_path, name, timeout_s=waits.scaled(3))]) == [1]
    error = (tmp_path / "error").read_text()
    for part in CAUSES[name]:
        assert part in error
    assert "waited for another rank" not in error.splitlines()[0] or "did not take part" in error.splitlines()[0]
    waits.until(all_have_ended(tmp_path), "a process is left")


@pytest.mark.parametrize("name", quick_and_slow(name for name, fault in FAULTS.items() if fault.ends_launcher))
def test_a_killed_launcher_leaves_no_process(tmp_path, name):
    assert waits.join([start(tmp_path, name, timeout_s=600, grace_period_s=2.0)]) == [-signal.SIGKILL]
    waits.until(all_have_ended(tmp_path), "a process is left")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_run_goes_on(tmp_path, name):
    assert recover(tmp_path, name, timeout_s=waits.scaled(5), grace_period_s=2.0) > 0
    assert steps(tmp_path)[-1][0] == STEPS
    waits.until(all_have_ended(tmp_path), "a process is left")


@pytest.mark.slow
def test_a_launcher_that_is_killed_in_start_up_leaves_no_process(tmp_path):
    """Rank 1 has not called init yet, and rank 0 waits for it in the store."""

    def enter():
        os.environ["TMPDIR"] = str(tmp_path)

    script = tmp_path / "start.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\nimport panther as pr\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "(folder / f'pid-{os.getpid()}').touch()\n"
        "while os.environ['RANK'] == '1' and not (folder / 'killed').exists():\n    time.sleep(0.1)\n"
        "pr.distributed.init()\n"
    )
    launcher = Launcher(tmp_path / "launcher", "--nproc-per-node=2", f"--log-dir={tmp_path}", str(script), enter=enter)
    waits.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two ranks did not start")
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    (tmp_path / "killed").touch()
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    waits.until(lambda: not any(map(is_running, pids)), "a rank is left")
    assert not list(tmp_path.glob("torchelastic_*"))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_stopped_rank_that_hosts_the_store_keeps_nobody_waiting(tmp_path):
    """The other rank cannot ask it where it is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                init("gloo", waits.scaled(3), init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
                (tmp_path / f"ready-{rank}").touch()
                if rank == 0:
                    waits.until((tmp_path / "ready-1").exists, "rank 1 is not ready")
                    os.kill(os.getpid(), signal.SIGSTOP)
                all_reduce(torch.ones(1))
            except DistributedError as error:
                (tmp_path / "error").write_text(str(error))
            finally:
                os._exit(0)
    try:
        assert waits.join(pids[1:]) == [0]
    finally:
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
    assert (
        "the process that hosts the store, rank 0 or the launcher, has ended or does not answer"
        in (tmp_path / "error").read_text()
    )


# One process


@pytest.mark.parametrize(
    "name", ["a loader's worker raises", "a loader's worker is killed", "a loader's worker is killed slowly"]
)
def test_a_fault_of_a_loaders_worker_ends_a_run_of_one_process(tmp_path, name):
    assert waits.join([start(tmp_path, name, nproc=0)]) == [1]
    assert CAUSES[name][0] in (tmp_path / "error").read_text()


class Stream(IterableDataset):
    """Samples without numbers, of which a late one cannot be read."""

    def __iter__(self):
        for _ in range(40):
            yield torch.randn(8), torch.tensor(1)
        fail()


def loaders_of(kind, directory):
    """Return loaders for training and validation, one of which fails in a worker."""
    bad = Samples(directory, fail)
    if kind == "stream":
        return DataLoader(Stream(), 4, num_workers=1), None
    if kind == "validation":
        return DataLoader(Samples(directory, None), 4, num_workers=1), DataLoader(bad, 4, num_workers=1)
    settings = {"persistent": {"persistent_workers": True}, "spawned": {"multiprocessing_context": "spawn"}}
    return DataLoader(bad, 4, num_workers=2, **settings[kind]), None


@pytest.mark.parametrize(
    "kind", ["persistent", "stream", "validation", pytest.param("spawned", marks=pytest.mark.slow)]
)
def test_every_kind_of_loader_ends_with_the_error_of_its_worker(tmp_path, kind):
    def work():
        trainer = Trainer(nn.Linear(8, 3), None, nn.CrossEntropyLoss(), TrainConfig(epochs=1))
        trainer.fit(*loaders_of(kind, tmp_path))

    assert waits.join([start(tmp_path, "", nproc=0, work=work)]) == [1]
    assert "OSError: this file is corrupt" in (tmp_path / "error").read_text()


def run_until_fault(directory, name):
    """Return the id of a process that trains alone, once its fault has happened."""
    pid = start(directory, name, nproc=0, grace_period_s=1.0)
    waits.until(lambda: (directory / "fault").exists(), "the fault did not happen")
    return pid


def send_twice(pid, number):
    """Send a signal, and another one when it cannot count as the same request any more."""
    os.kill(pid, number)
    begun = time.monotonic()
    waits.until(lambda: time.monotonic() > begun + 2.5, "the clock stands")
    os.kill(pid, number)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("a loader's worker hangs", signal.SIGTERM),
        pytest.param("a rank hangs", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_ends_a_process_that_hangs(tmp_path, name, number):
    pid = run_until_fault(tmp_path, name)
    send_twice(pid, number)
    assert waits.join([pid]) == [1]
    waits.until(lambda: not waits.descendants(pid)[1:], "a worker of the loader is left")


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_workers_of_a_loader_end_with_a_process_that_is_killed(tmp_path, number):
    pid = run_until_fault(tmp_path, "a loader's worker hangs")
    workers = waits.descendants(pid)[1:]
    assert workers
    os.kill(pid, number)
    waits.join([pid])
    waits.until(lambda: not any(map(is_running, workers)), "a worker of the loader is left")


# Signals


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_of_scripts_saves(tmp_path, number, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(
        "import os, sys, torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "from panther.train import Callback, TrainConfig, Trainer\n"
        "class Tells(Callback):\n"
        "    def on_step(self, trainer, loss):\n"
        "        open(f\"step-{os.environ['RANK']}\", 'w').close()\n"
        "config = TrainConfig(epochs=10**6, batch_size=4, strategy='ddp', checkpoint_dir='run')\n"
        "data = TensorDataset(torch.randn(64, 8), torch.zeros(64).long())\n"
        "Trainer(nn.Linear(8, 2), None, nn.CrossEntropyLoss(), config, [Tells()]).fit(data)\n"
    )
    launcher = Launcher("launcher", "--nproc-per-node=2", "work.py")
    until("step-*", 2)
    os.kill(launcher.pid, number)
    launcher.wait()
    assert len(checkpoint.checkpoints("run")) == 1


def test_a_signal_that_somebody_handles_is_not_free():
    assert is_free(signal.SIGUSR1)
    previous_handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert not is_free(signal.SIGUSR1)  # as nohup ignores SIGHUP
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
    assert not is_free(signal.SIGUSR2)  # tests/support/waits.py catches it by faulthandler, in C


# Parts


def test_a_process_that_begins_to_end_shows_where_it_is(capfd):
    pid = os.fork()
    if pid == 0:
        os.environ["PANTHER_GRACE_PERIOD_S"] = "0.1"
        begin_to_end("its launcher has died")
        while True:
            signal.pause()
    assert waits.join([pid]) == [1]
    error = capfd.readouterr().err
    assert f"process {pid} has 0.1 s to save and end, because its launcher has died" in error
    assert "in test_a_process_that_begins_to_end_shows_where_it_is" in error
