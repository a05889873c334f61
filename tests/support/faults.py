"""Runs in which something goes wrong in the middle, and what follows: the trials behind tests/faults/test_ends.py.

A run is two workers of a launcher, or one process alone. At one step, a rank, its launcher or a worker of its loader is
killed, stopped or made to hang, once. Whoever supervises the run starts it again if the launcher ended.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import waits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from panther.distributed import launch
from panther.distributed.comm.store import listens
from panther.errors import TrainingError
from panther.train import Callback, TrainConfig, Trainer

STEPS, FAULT_STEP, EVERY = 12, 4, 2
BATCH = 4
_FOREVER_S = 100_000


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_slowly():
    """Die as under load: the files of the process are closed some time before it has ended."""
    os.closerange(3, 1024)
    time.sleep(0.5)
    _kill()


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang():
    time.sleep(_FOREVER_S)


def _hang_with_the_lock():
    """Wait for a mutex of C in a function that keeps the lock of the interpreter, as a faulty extension may."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros are a mutex that is free
    while True:
        library.pthread_mutex_lock(mutex)  # no signal interrupts the second call


def fail():
    """Raise the error of a sample that cannot be read."""
    raise OSError("this file is corrupt")


def _leave():
    os._exit(0)


def _kill_launcher(then=lambda: None):
    os.kill(os.getppid(), signal.SIGKILL)
    then()


def _kill_node():
    os.killpg(int(os.environ["FAULTS_GROUP"]), signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where."""

    cause: object
    """The function that causes it."""
    place: str = "rank"
    """In a step of rank 1 ("rank"), or in a worker of a loader ("loader")."""
    ends_launcher: bool = False


FAULTS = {
    "a rank is killed": Fault(_kill),
    "a rank raises": Fault(fail),
    "a rank leaves": Fault(_leave),
    "a rank is stopped": Fault(_stop),
    "a rank hangs": Fault(_hang),
    "a rank hangs with the interpreter's lock": Fault(_hang_with_the_lock),
    "the launcher is killed": Fault(_kill_launcher, ends_launcher=True),
    "the launcher is killed while a rank hangs": Fault(lambda: _kill_launcher(_hang), ends_launcher=True),
    "the launcher is killed while a rank is stopped": Fault(lambda: _kill_launcher(_stop), ends_launcher=True),
    "the launcher is killed while a rank hangs with the interpreter's lock": Fault(
        lambda: _kill_launcher(_hang_with_the_lock), ends_launcher=True
    ),
    "all processes of the node are killed": Fault(_kill_node, ends_launcher=True),
    "a loader's worker is killed": Fault(_kill, "loader"),
    "a loader's worker is killed slowly": Fault(_kill_slowly, "loader"),
    "a loader's worker raises": Fault(fail, "loader"),
    "a loader's worker hangs": Fault(_hang, "loader"),
}


def _happens(directory):
    """Return whether it is time for the fault, which happens once, and note when."""
    with contextlib.suppress(FileExistsError), open(directory / "fault", "x") as file:
        file.write(repr(time.time()))
        return True
    return False


class Samples(Dataset):
    """Random samples; the loader's worker that fetches the first one of a late step causes the fault."""

    def __init__(self, directory, cause):
        self.directory, self.cause = directory, cause

    def __len__(self):
        return 2 * BATCH * STEPS

    def __getitem__(self, index):
        in_worker = torch.utils.data.get_worker_info() is not None
        if self.cause is not None and in_worker and index >= 2 * BATCH * FAULT_STEP and _happens(self.directory):
            self.cause()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 3)


class _Causes(Callback):
    """Causes the fault on rank 1, and notes every step of rank 0."""

    def __init__(self, directory, cause, pause_s):
        self.directory, self.cause, self.pause_s = directory, cause, pause_s

    def on_step(self, trainer, loss):
        rank = int(os.environ.get("RANK", "0"))
        time.sleep(self.pause_s)
        if rank == 0:
            with open(self.directory / "steps", "a") as file:
                file.write(json.dumps([trainer.step, time.time(), os.getpid()]) + "\n")
        is_victim = rank == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if self.cause is not None and is_victim and trainer.step >= FAULT_STEP and _happens(self.directory):
            self.cause()


def train(directory, name, timeout_s, grace_period_s, waits_for_lock_s=60.0, max_steps=STEPS, pause_s=0.0):
    """Train with a fault, or without one if it has happened; what each rank runs."""
    directory, fault = Path(directory), FAULTS.get(name, Fault(None))
    config = TrainConfig(
        max_steps=max_steps,
        strategy="ddp" if "RANK" in os.environ else "auto",
        checkpoint_dir=str(directory / "run"),
        checkpoint_every_n_steps=EVERY,
        timeout_s=timeout_s,
        grace_period_s=grace_period_s,
        progress=False,
    )
    deadline = time.monotonic() + waits_for_lock_s
    while True:  # an earlier run may still be ending, as after the death of a launcher
        torch.manual_seed(0)
        causes = _Causes(directory, fault.cause if fault.place == "rank" else None, pause_s)
        trainer = Trainer(nn.Linear(8, 3), None, nn.CrossEntropyLoss(), config, [causes])
        data = Samples(directory, fault.cause if fault.place == "loader" else None)
        try:
            trainer.fit(DataLoader(data, BATCH, shuffle=False, num_workers=int(fault.place == "loader")))
        except TrainingError as error:
            if "another run writes" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return trainer.step


def start(directory, name, *, nproc=2, max_restarts=0, timeout_s=10.0, grace_period_s=15.0, work=None):
    """Fork a process that trains, by ``launch`` or alone with ``nproc=0``, and return its id.

    It writes its error to the file ``error``, and leads a process group. Alone, it calls ``work()`` if that is given.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.environ["FAULTS_GROUP"] = str(os.getpid())
        tempfile.tempdir = str(directory)
        if nproc:
            settings = {"nproc": nproc, "max_restarts": max_restarts, "start_method": "fork"}
            # The ranks need longer to meet on a busy machine than they have for a step.
            launch(train, str(directory), name, timeout_s, grace_period_s, grace_period_s=grace_period_s, **settings)
        else:
            torch.set_num_threads(1)
            (work or partial(train, directory, name, timeout_s, grace_period_s))()
        code = 0
    except BaseException as error:
        (directory / "error").write_text(f"{type(error).__name__}: {error}")
        sys.last_value = error  # a traceback that is kept, as by an interpreter that shows it
        multiprocessing.util._exit_function()  # what multiprocessing does at the end of a program
    finally:
        os._exit(code)


def recover(directory, name, **settings):
    """Run with a fault until the last step, as a supervisor does that starts the launcher again when it ends.

    Return the seconds from the fault to the next step of the run.
    """
    for _ in range(3):
        (code,) = waits.join([start(directory, name, max_restarts=1, **settings)], 600)
        if code == 0:
            break
    assert code == 0, (directory / "error").read_text()
    return _seconds_to_next_step(directory, float((directory / "fault").read_text()))


def _seconds_to_next_step(directory, fault):
    """Return the seconds from a fault to the first step of a process that had taken none before; None without one."""
    earlier = {pid for _, at, pid in steps(directory) if at <= fault}
    # Rank 0 may finish a step or two while the fault happens, also the first one of its process.
    earlier.add(next(pid for _, _, pid in steps(directory)))
    return next((at - fault for _, at, pid in steps(directory) if at > fault and pid not in earlier), None)


NODE_FAULT = "all processes of one of two nodes are killed"


def recover_nodes(directory, timeout_s):
    """Kill the launcher and the rank of one of two nodes, and start its launcher again, as a scheduler does.

    Return the seconds from the kill to the next step of the run.
    """
    script = directory / "node.py"
    # The fault of this run comes from outside.
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport pathlib, faults\n"
        f"directory = pathlib.Path({str(directory)!r})\n"
        f"faults.train(directory, None, {timeout_s}, 15.0, max_steps=400, pause_s=0.2)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def node(number):
        command = [sys.executable, "-m", "panther", "launch", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += ["--max-restarts=3", "--rdzv-id=faults", f"--log-dir={directory}/logs-{number}", str(script)]
        with open(directory / f"node-{number}.txt", "a") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, cwd=directory, start_new_session=True)

    nodes = [node(0)]
    try:
        # The first node hosts the rendezvous, without which a run cannot continue.
        waits.until(lambda: listens("127.0.0.1", port), "the first node does not listen")
        nodes.append(node(1))
        waits.until(lambda: (directory / "steps").exists() and len(steps(directory)) >= FAULT_STEP, "no step", 600)
        fault = time.time()
        for pid in [*reversed(waits.descendants(nodes[1].pid))]:
            with contextlib.suppress(ProcessLookupError):  # ranks end with their launcher
                os.kill(pid, signal.SIGKILL)
        nodes[1].wait()
        nodes[1] = node(1)

        waits.until(lambda: _seconds_to_next_step(directory, fault), "no step after the fault", 600)
        return _seconds_to_next_step(directory, fault)
    finally:
        for process in nodes:
            for pid in waits.descendants(process.pid)[::-1] if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def steps(directory):
    """Return the steps of rank 0 and when it took them."""
    return [json.loads(line) for line in (directory / "steps").read_text().splitlines()]


def processes_of(directory):
    """Return the ids of the processes that have a file of the run open, or work in its name: none when it has ended."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/cmdline").read_bytes()
            descriptors = [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if any(str(directory) in target for target in (*descriptors, environment.decode(errors="replace"))):
            found.append(int(name))
    return found
