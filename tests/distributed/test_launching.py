"""Starting processes and joining them: who meets whom, who is missing, and what is left of a run that fails."""

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import waits
from launchers import Launcher, until
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from panther.distributed.comm.ending import record_uncaught_exceptions
from panther.distributed.comm.handshake import Agreement, RankInfo, check_in, decide, own_gpu
from panther.distributed.comm.process_group import cleanup_distributed, init, setup_distributed, shutdown
from panther.distributed.comm.store import Meeting, find_route, interface_of
from panther.distributed.launcher._failures import describe, explain
from panther.distributed.launcher.function import launch
from panther.errors import DistributedError

pytestmark = pytest.mark.distributed

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first_environment = environment()
    yield
    assert not dist.is_initialized()
    assert environment() == first_environment


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def fork(fn, *args, nproc=2, **options):
    return launch(fn, *args, nproc=nproc, start_method="fork", **options)


def script(tmp_path, code, *options, environment=(), launcher=()):
    """Run a script of its own, as a user would, and return it with its output."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(code))
    environment = os.environ | {"TMPDIR": str(tmp_path), **dict(environment)}
    command = [sys.executable, "-W", "error::UserWarning", *launcher, str(file), *options]
    return waits.run(command, env=environment)


def started(*children):
    """Fork functions of this process, wait for them, and return what each wrote, in order."""
    pids, ends = [], []
    for child in children:
        end, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            os.close(end)
            try:
                answer = json.dumps(child())
            except Exception as error:
                answer = json.dumps(f"{type(error).__name__}: {error}")
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        pids.append(pid)
        ends.append(end)
    waits.join(pids)
    answers = [os.read(end, 1 << 16).decode() for end in ends]
    for end in ends:
        os.close(end)
    return [json.loads(answer) for answer in answers]


# One process


def test_init_alone_is_a_world_of_one():
    init()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert dist.get_backend() == "gloo"
    x = torch.ones(3)
    dist.all_reduce(x)
    assert torch.equal(x, torch.ones(3))
    shutdown()
    shutdown()  # outside of a group: nothing


def test_setup_alone_and_again():
    for _ in range(2):
        setup_distributed(0, 1, "gloo")
        cleanup_distributed()


def test_second_init_says_what_to_do():
    init()
    try:
        with pytest.raises(DistributedError, match=r"rank 0 of 1 of a process group already.*shutdown\(\)"):
            init()
        with pytest.raises(DistributedError, match="copies the process group this process is in"):
            launch(max, 1, 2, nproc=1, start_method="fork")
    finally:
        shutdown()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: setup_distributed(2, 2), ValueError, r"rank=2 must be in \[0, world_size\) = \[0, 2\)"),
        (lambda: setup_distributed(-1, 2), ValueError, "rank=-1"),
        (lambda: setup_distributed(0, 0), ValueError, "world_size=0 must be at least 1"),
        (lambda: setup_distributed("0", 2), TypeError, "rank must be an integer, not str"),
        (lambda: setup_distributed(0, 1, "smoke"), ValueError, "backend='smoke' is unknown: use one of 'gloo'"),
        (lambda: setup_distributed(0, 1, "cpu:smoke"), ValueError, "is unknown"),
        (lambda: init(3), TypeError, "backend must be a string or None"),
        (lambda: init("mpi"), DistributedError, "backend='mpi' is not in this build of torch"),
        (lambda: init(timeout_s=0), ValueError, "timeout_s=0 must be a positive number of seconds"),
        (lambda: init(timeout_s=-1), ValueError, "timeout_s=-1"),
        (
            lambda: init(init_method="file:///x"),
            ValueError,
            "init_method='file:///x' must be 'env://' or 'tcp://HOST:P",
        ),
        (lambda: init(init_method="tcp://host"), ValueError, "init_method='tcp://host' must be"),
        (lambda: init(rank=0), ValueError, "rank=0 and world_size=None belong together: give both, or neither"),
        (lambda: init(timeout_s="long"), TypeError, "timeout_s must be a number of seconds"),
        (lambda: launch(max, 1, nproc=0), ValueError, "nproc=0 must be at least 1"),
        (lambda: launch(max, 1, nproc=-2), ValueError, "nproc=-2"),
        (lambda: launch(max, 1, nproc=2.0), TypeError, "nproc must be an integer, not float"),
        (lambda: launch(max, 1, nproc=True), TypeError, "nproc must be an integer, not bool"),
        (lambda: launch(max, 1, nproc=1, max_restarts=-1), ValueError, "max_restarts=-1"),
        (lambda: launch(max, 1, nproc=1, start_method="thread"), ValueError, "'thread' is unknown: use one of 'fork'"),
        (lambda: launch(max(1, 2), nproc=1), TypeError, r"fn must be a function, not int: pass launch\(fn, \*args\)"),
        (lambda: launch(lambda: 0, nproc=1), TypeError, "function of a module|functions of a module"),
        (lambda: launch(max, threading.Lock(), nproc=1), TypeError, "lock.*start_method='fork'"),
    ],
)
def test_bad_requests(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"RANK": "0"}, ValueError, "RANK and WORLD_SIZE must both be set.*RANK=0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ValueError, "RANK=x"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, ValueError, "MASTER_ADDR=127.0.0.1, MASTER_PORT=1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, DistributedError, "MASTER_PORT=''"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, ValueError, "rank=3"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "1"},
            DistributedError,
            "MASTER_ADDR=no.such.host.invalid cannot be resolved or reached",
        ),
    ],
)
def test_bad_environment(environment, error, message, monkeypatch):
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(error, match=message):
            init()


# The choice of a backend


def test_backend_is_decided_for_all():
    cpu, first, second = (RankInfo("a", 2, None, gpu) for gpu in (None, "0", "1"))
    assert decide("t", [first, second]).backend == "nccl"
    assert decide("t", [first, cpu]).backend == "gloo"
    assert decide("t", [first, replace(second, backend="gloo")]).backend == "gloo"
    assert decide("t", [first, first]).backend == "gloo"  # they would share it
    assert decide("t", [first, replace(first, host="b")]).backend == "nccl"
    assert decide("t", [first, second]).one_host
    assert not decide("t", [cpu, replace(cpu, host="b")]).one_host


@pytest.mark.parametrize(
    ("visible", "count", "local_rank", "gpus"),
    [
        (None, 2, None, [(0, "0"), (1, "1"), (0, "0")]),  # the third would share one
        (None, 4, "3", [(3, "3")] * 3),
        ("6,7", 2, "1", [(1, "7")] * 3),
        ("GPU-a1", 1, "5", [(0, "GPU-a1")] * 3),  # shown its own
        ("0, 1", 2, "", [(0, "0"), (1, "1"), (0, "0")]),
        ("3", 2, "one", [(0, "3"), (1, "1"), (0, "3")]),  # changed after torch had read it
    ],
)
def test_the_gpu_of_a_rank(visible, count, local_rank, gpus, monkeypatch):
    assert own_gpu(0) is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with monkeypatch.context() as patch:
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", local_rank)):
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        assert [own_gpu(rank) for rank in range(3)] == gpus


def test_backend_disagreements():
    cpu, gpu = RankInfo("a", 2, None, None), RankInfo("a", 2, "nccl", "0")
    with pytest.raises(DistributedError, match="needs a GPU of its own for every rank, and rank 1 of 2 lacks one"):
        decide("t", [gpu, cpu])
    with pytest.raises(DistributedError, match="rank 1 asks for 'gloo', rank 0 asks for 'nccl'"):
        decide("t", [gpu, replace(cpu, backend="gloo")])
    with pytest.raises(DistributedError, match="rank 0 has 2 and rank 1 has 3"):
        decide("t", [cpu, replace(cpu, world_size=3)])


# Addresses, and what a launcher is told


def test_the_route_to_a_host():
    assert str(find_route("localhost")) == "from 127.0.0.1 on interface lo"
    assert find_route("127.0.1.1").is_loopback
    assert find_route("127.0.0.1").is_local
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") == "lo"
    with pytest.raises(OSError, match=r"Name or service|not known|resolution"):
        find_route("no.such.host.invalid")


def test_an_uncaught_exception_is_reported_once(tmp_path, monkeypatch):
    file, shown = tmp_path / "error.json", []
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        patch.setattr("panther.distributed.comm.ending._records_exceptions", False)
        patch.setattr(sys, "excepthook", lambda *args: shown.append(args))
        record_uncaught_exceptions()
        record_uncaught_exceptions()
        for error in (KeyError("first"), ValueError("second")):
            sys.excepthook(type(error), error, None)
    assert len(shown) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))  # as torchrun reads it
    assert failure.message["message"] == "KeyError: 'first'"
    assert failure.message["extraInfo"]["py_callstack"] == "KeyError: 'first'\n"


# Processes that somebody else starts


def test_ranks_meet_however_often_they_met_before(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def member(rank, *worlds):
        def work():
            sums = []
            for world_size in worlds:
                setup_distributed(rank, world_size)
                x = torch.ones(1)
                dist.all_reduce(x)
                sums.append(x.item())
                cleanup_distributed()
            return sums

        return work

    for _ in range(2):  # processes of one parent
        sums = started(member(2, 3, 3), member(0, 2, 3, 3), member(1, 2, 3, 3))
        assert sums == [[3.0, 3.0]] + [[2.0, 3.0, 3.0]] * 2


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not tell how many processes wait")
def test_a_worker_that_is_killed_after_its_result_ends_the_launch(monkeypatch):
    """It waits for the other workers then, and torch's event waits for it."""
    is_done = MultiprocessContext._is_done

    def kill_when_done(context):
        if is_done(context):
            waits.until(lambda: context._worker_finished_event._cond._sleeping_count.get_value() == 2, "no wait")
            os.kill(context.pids()[1], signal.SIGKILL)
            return True
        return False

    monkeypatch.setattr(MultiprocessContext, "_is_done", kill_when_done)
    with pytest.raises(DistributedError, match=r"rank 1 .*SIGKILL"):
        launch(os.getpid, nproc=2)


def test_a_rank_that_was_missing_may_come_later(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def first():
        os.environ.update(RANK="0", WORLD_SIZE="2")
        with pytest.raises(DistributedError, match="rank 1 of 2 did not check in"):
            init(timeout_s=0.5)
        Path("failed").touch()
        init()
        shutdown()

    def second():
        os.environ.update(RANK="1", WORLD_SIZE="2")
        until("failed")
        init()
        shutdown()

    assert started(first, second) == [None, None]


def test_an_answer_to_an_earlier_attempt_does_not_count():
    """The store of an elastic agent outlives a rank 0 that was killed after its decision."""
    store = dist.HashStore()
    store.set("token", "earlier")
    decision = {"nonces": {"1": "of a process that has ended"}, "agreement": asdict(Agreement("earlier", "gloo", True))}
    store.set("go/earlier", json.dumps(decision))
    meeting = Meeting(store, 1.0, time.monotonic() - 10)  # its time is up
    with pytest.raises(DistributedError, match=r"rank 0 of 2 did not check in within 1 s .*; rank 1 did"):
        check_in(meeting, 1, 2, None)


def test_missing_rank_is_named_on_every_other(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    timeout_s = waits.scaled(1)

    def member(rank, world_size=4):
        def work():
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
            init(timeout_s=timeout_s)

        return work

    answers = started(member(0), member(1), member(3))
    assert answers == [answers[0]] * 3
    place = "on this machine, among processes of one parent, as MASTER_ADDR and MASTER_PORT are not set"
    assert f"rank 2 of 4 did not check in within {timeout_s:g} s {place}; ranks 0, 1, 3 did" in answers[0]
    answers = started(member(1), member(3))
    assert answers == [answers[0]] * 2
    assert f"ranks 0, 2 of 4 did not check in within {timeout_s:g} s" in answers[0]
    first, second = started(member(0, 2), member(1, 3))
    assert first == second
    assert "every rank must be given the same world size: rank 0 has 2 and rank 1 has 3" in first


def test_missing_rank_over_tcp(free_port):
    short_s = waits.scaled(1)

    def member(rank, timeout_s=short_s):
        def work():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
            os.environ.update(RANK=str(rank), WORLD_SIZE="3")
            init(timeout_s=timeout_s)
            x = torch.ones(1)
            dist.all_reduce(x)
            interface = os.environ["GLOO_SOCKET_IFNAME"]
            shutdown()
            return [x.item(), interface]

        return work

    answers = started(member(0), member(2))
    tried = f"at 127.0.0.1:{free_port}, tried from 127.0.0.1 on interface lo"
    assert f"rank 1 of 3 did not check in within {short_s:g} s {tried}; ranks 0, 2 did" in answers[0]
    assert answers[0] == answers[1]
    assert f"rank 0 did not listen {tried} within {short_s:g} s" in started(member(1))[0]
    assert started(*(member(rank, timeout_s=300) for rank in range(3))) == [[3.0, "lo"]] * 3


def test_ranks_that_are_told_where_to_meet(free_port):
    """By arguments in place of the environment, which is as before afterwards."""

    def member(rank):
        def work():
            os.environ.update(MASTER_ADDR="no.such.host.invalid", RANK="7", WORLD_SIZE="9")
            init("gloo", init_method=f"tcp://127.0.0.1:{free_port}", rank=rank, world_size=2)
            x = torch.full((1,), rank + 1.0)
            dist.all_reduce(x)
            shutdown()
            return [x.item(), os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT")]

        return work

    assert started(member(0), member(1)) == [[3.0, "no.such.host.invalid", None]] * 2


def test_port_in_use(free_port, monkeypatch):
    store = dist.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)

    def work():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port), RANK="0", WORLD_SIZE="1")
        init(timeout_s=2)

    (answer,) = started(work)
    assert f"rank 0 of 1 cannot listen at 127.0.0.1:{free_port}" in answer
    assert "MASTER_PORT to a free port" in answer
    del store


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


MP_SPAWN = """
    import logging, os, signal, sys
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from panther.distributed import cleanup_distributed, setup_distributed

    def train(rank, world_size, crash):
        torch.set_num_threads(1)
        setup_distributed(rank, world_size)
        if crash and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world_size
        cleanup_distributed()

    if __name__ == "__main__":
        logging.disable()
        mp.spawn(train, args=(2, False), nprocs=2)
        mp.spawn(train, args=(2, False), nprocs=2)
        try:
            mp.spawn(train, args=(2, True), nprocs=2)
        except Exception as error:
            print(type(error).__name__)
        mp.spawn(train, args=(2, False), nprocs=2)
        print("done")
"""


@pytest.mark.slow
def test_mp_spawn_twice_and_after_a_crash(tmp_path):
    done = script(tmp_path, MP_SPAWN)
    assert done.stdout.split() == ["ProcessExitedException", "done"], done.stderr


RESTARTING = """
    import os, torch, torch.distributed as dist
    from panther.distributed import init, shutdown
    init()
    x = torch.ones(1)
    dist.all_reduce(x)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
    assert attempt == "1" or rank == 0
    dist.all_reduce(x)
    shutdown()
    os.write(1, f"{rank}:{x.item():g}\\n".encode())  # at one go
"""


@pytest.mark.slow
def test_torchrun_restarts(tmp_path):
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = script(tmp_path, RESTARTING, launcher=run)
    assert sorted(done.stdout.split()) == ["0:4", "1:4"], done.stderr


def test_a_launcher_that_is_killed_leaves_nobody_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hangs.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom panther.distributed import init\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ninit()\n"
        "Path('pid').write_text(str(os.getpid()))\nos.rename('pid', 'there')\nwhile True:\n    signal.pause()\n"
    )
    launcher = Launcher("launcher", "hangs.py")
    until("there")
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.wait()[0] == -signal.SIGKILL
    stat = Path(f"/proc/{Path('there').read_text()}/stat")
    waits.until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "the rank is left")


# launch


def test_spawned_processes_take_pickled_arguments_and_give_pickled_results():
    x = torch.ones(2)
    (result,) = launch(torch.add, x, 1, nproc=1)
    assert torch.equal(result, torch.full((2,), 2.0))


SPAWNED = """
    import os
    import torch, torch.distributed as dist
    from panther.distributed.launcher.function import launch

    def work(x):
        x += dist.get_rank()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            raise ValueError("first attempt")
        total = x.clone()
        dist.all_reduce(total)
        return {"own": x, "total": total}

    if __name__ == "__main__":
        before, x = dict(os.environ), torch.zeros(2)
        first, second = launch(work, x, nproc=2, max_restarts=1)
        assert torch.equal(x, torch.zeros(2))  # every worker has a copy
        assert torch.equal(second["own"], torch.ones(2))
        assert torch.equal(first["total"], second["total"])
        assert dict(os.environ) == before
        print("done")
"""


@pytest.mark.slow
def test_spawned_processes_of_a_script_are_restarted(tmp_path):
    done = script(tmp_path, SPAWNED)
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["script.py"]


def test_scripts_and_prompts_that_spawn_cannot_import(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pytest.raises(DistributedError, match='put the call under if __name__ == "__main__":'):
            launch(max, 1, 2, nproc=1)
    prompt = types.ModuleType("__main__")
    exec("def f(): pass", vars(prompt))
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    with pytest.raises(TypeError, match="cannot import 'f', defined in an interactive session"):
        launch(prompt.f, nproc=1)


def test_launch_returns_results_by_rank():
    results = fork(lambda: (dist.get_rank(), torch.full((2,), dist.get_rank()), torch.get_num_threads()), nproc=3)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert torch.equal(results[2][1], torch.tensor([2, 2]))
    assert results[0][2] == 1


def test_large_results_and_str_arguments():
    results = fork(lambda text: (text, torch.arange(1_000_000)), "$local_rank ${x}")
    assert results[1][0] == "$local_rank ${x}"
    assert torch.equal(results[1][1], torch.arange(1_000_000))


def fail(how):
    if dist.get_rank() == 1:
        how()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: [][1], r"rank 1 of 2 raised IndexError: list index out of range; the other ranks were ended"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 of 2 was ended by SIGKILL \(exit code -9\)"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), r"rank 1 of 2 was ended by SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), r"rank 1 of 2 was ended by SIGINT"),
        (lambda: os._exit(0), "rank 1 of 2 left with exit code 0 before its function returned"),
        (lambda: os._exit(3), "rank 1 of 2 left with exit code 3 and no traceback"),
        (lambda: sys.exit(0), r"rank 1 of 2 raised RuntimeError: the function called sys.exit\(0\)"),
    ],
    ids=["raises", "killed", "terminated", "interrupted", "leaves", "leaves with a code", "exits"],
)
def test_failures_name_the_rank_and_end_the_others(how, message, capfd):
    with pytest.raises(DistributedError, match=message) as caught:
        fork(fail, how)
    if "IndexError" in message:
        assert "return f" not in str(caught.value)
        assert "in <lambda>" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_an_aborted_rank_is_told_what_gloo_aborts_for(tmp_path):
    """FSDP's reduction sends fewer bytes from a rank on which a parameter has no gradient."""
    failure = describe(1, -signal.SIGABRT, str(tmp_path / "no error file"))
    assert explain([failure], 2, 1).startswith("rank 1 of 2 was ended by SIGABRT (exit code -6): a library aborted the")
    assert "a parameter or a block takes part in the step on some ranks only" in failure.text


def test_result_that_cannot_be_pickled():
    with pytest.raises(DistributedError, match="returned a function that cannot be pickled"):
        fork(lambda: lambda: 0)


def test_restarts_do_not_hang():
    def work(attempts):
        x = torch.ones(100)
        dist.all_reduce(x)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt < attempts and dist.get_rank() == attempt:
            raise ValueError(f"attempt {attempt}")
        dist.all_reduce(x)
        return attempt

    for repetition in range(6):
        attempts = 1 + repetition % 2
        assert fork(work, attempts, nproc=3, max_restarts=2) == [attempts] * 3
    with pytest.raises(DistributedError, match=r"raised ValueError: attempt 1, in the last of 2 attempts"):
        fork(work, 2, nproc=2, max_restarts=1)


def test_interrupt_ends_the_workers(tmp_path):
    handler = signal.getsignal(signal.SIGINT)

    def work():
        (tmp_path / str(os.getpid())).touch()
        threading.Event().wait()

    def interrupt():
        waits.until(lambda: len(list(tmp_path.iterdir())) == 2, "two workers did not start")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fork(work)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name), 0)


def test_function_may_initialise_by_itself_only_after_shutdown():
    def work():
        with pytest.raises(DistributedError, match="launch does it"):
            init()
        shutdown()
        setup_distributed(int(os.environ["RANK"]), 2)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert fork(work) == [2.0, 2.0]


def test_quiet_only_on_the_terminal():
    """A handler that the user attaches to torch's logger still gets its log."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(handler)
    try:
        with pytest.raises(DistributedError):
            fork(lambda: [][0], nproc=1)
    finally:
        logger.removeHandler(handler)
    assert logger.propagate
    assert any("failed (exitcode" in record.getMessage() for record in records)
