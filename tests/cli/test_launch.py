"""panther launch as a user meets it: what is shown and kept, who is blamed, exit codes, signals, restarts, nodes."""

import os
import re
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launchers import Launcher

from panther.cli import main
from panther.distributed import LaunchConfig, launch_distributed_training
from panther.distributed.launcher._arguments import parse_arguments
from panther.distributed.launcher._logs import Tail, last_traceback
from panther.errors import DistributedError

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "PANTHER_BACKEND", "GLOO_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path):
    """Write a script that knows its rank and how to wait for ever."""

    def write(text):
        head = "import os, signal, sys, threading\nrank = int(os.environ['RANK'])\nforever = threading.Event().wait\n"
        (tmp_path / "work.py").write_text(head + textwrap.dedent(text))
        return "work.py"

    return write


def until(path, count=1):
    """Wait for files to be there."""
    deadline = time.monotonic() + 60
    while len(list(Path().glob(path))) < count:
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def logs(pattern="panther-logs/*"):
    (folder,) = Path().glob(pattern)
    return folder


# What is shown and kept


def test_every_rank_has_files_and_rank_0_is_shown(script, capfd):
    file = script("""
        print("out of", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:])
        print("err of", rank, file=sys.stderr)
    """)
    arguments = ["two words", "$HOME ${local_rank} $$", "--lr=1", "-x", "", "--nodes", "*"]
    assert main(["launch", "--nproc-per-node", "2", file, *arguments]) == 0
    out, err = capfd.readouterr()
    assert out == f"out of 0 of 2 {arguments}\n"
    folder = logs()
    assert err == f"panther launch: 2 processes of work.py; logs in {folder}\nerr of 0\n"
    assert (folder / "attempt-0" / "rank-1.out").read_text() == f"out of 1 of 2 {arguments}\n"
    assert (folder / "attempt-0" / "rank-1.err").read_text() == "err of 1\n"


def test_options_may_follow_the_script(script, capfd):
    file = script("print(rank, sys.argv[1:], os.environ.get('PANTHER_BACKEND'), os.environ['LOCAL_WORLD_SIZE'])")
    tail = ["--lr", "1", "--nproc_per_node=2", "--backend", "gloo", "--log-dir", "mine", "--", "--backend", "x"]
    assert main(["launch", file, *tail]) == 0
    assert capfd.readouterr().out == "0 ['--lr', '1', '--log-dir', 'mine', '--backend', 'x'] gloo 2\n"


def test_options_before_the_script_are_torchruns(script, capfd):
    file = script("print(rank, sys.argv[1:])")
    assert main(["launch", "--nproc-per-node=1", "--local-ranks-filter=0", file, "--max-restarts", "3"]) == 0
    out, err = capfd.readouterr()
    assert out == "0 ['--max-restarts', '3']\n"
    assert "note: --max-restarts after work.py goes to the script: put all options before it" in err
    assert main(["launch", "--nproc-per-node=2", "--tee=3", "--log-dir=kept", file]) == 0
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[default0]:0 []", "[default1]:1 []"]
    assert logs("kept/*/attempt_0").is_dir()


def test_shown_ranks_can_be_chosen(script, capfd):
    file = script("print('hello')")
    assert main(["launch", "--nproc-per-node=3", "--local-ranks-filter=1,2", "--log-dir=kept", file]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 1] hello", "[rank 2] hello"]
    assert logs("kept/*").is_dir()


def test_module(tmp_path, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert main(["launch", "-m", "package", "--x"]) == 0
    assert capfd.readouterr().out == "package ['--x']\n"
    assert main(["launch", "-m", "nowhere"]) == 1
    assert capfd.readouterr().err.endswith("No module named nowhere\n")


def test_arguments_are_not_repeated(script, capfd):
    file = script("raise SystemExit(3)")
    assert main(["launch", file, "--token", "secret"]) == 3
    assert "secret" not in "".join(capfd.readouterr())


def test_help_is_torchruns(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["launch", "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: panther launch [options] script.py")
    for option in ("--nproc-per-node", "--nproc_per_node", "--rdzv-endpoint", "--backend", "--standalone"):
        assert option in out


def test_one_node_meets_on_loopback(script, capfd):
    file = script("""
        port = "%04X" % int(os.environ["MASTER_PORT"])
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        print(os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"],
              [row[1] for row in rows if row[1].endswith(":" + port) and row[3] == "0A"] == ["0100007F:" + port])
    """)
    assert main(["launch", "--nproc-per-node=2", file]) == 0
    assert capfd.readouterr().out == "127.0.0.1 lo True\n"


# Failures


def test_the_first_failing_rank_is_blamed_last_and_whole(script, capfd):
    file = script("""
        import glob, time
        while not glob.glob("panther-logs/*/attempt-0/rank-2.err"):
            time.sleep(0.001)
        print("before", file=sys.stderr)
        if rank == 2:
            try:
                int("x")
            except ValueError as error:
                raise KeyError("the cause") from error
        theirs = glob.glob("panther-logs/*/attempt-0/rank-2.err")[0]
        while "KeyError: 'the cause'" not in open(theirs).read() or time.time() < os.stat(theirs).st_mtime + 0.02:
            time.sleep(0.001)  # a file's time has a resolution of some milliseconds
        raise RuntimeError("a consequence")
    """)
    assert main(["launch", "--nproc-per-node=3", file]) == 1
    err = capfd.readouterr().err
    assert "panther: error: rank 2 of 3 raised KeyError: 'the cause'; the other ranks were ended\n" in err
    last = err.rpartition("\n\n")[0].rpartition("Traceback of rank ")[2]
    assert re.fullmatch(
        r"2:\nTraceback \(most recent call last\):\n.*\nValueError: invalid literal.*\n\nThe above exception was the "
        r"direct cause of the following exception:",
        last,
        re.DOTALL,
    )
    assert err.endswith("KeyError: 'the cause'\n")


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("sys.exit(7)", 7, "rank 1 of 2 left with exit code 7 and no traceback; the other ranks were ended"),
        ("sys.exit('the reason')", 1, "Last lines of rank 1:\nthe reason\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 2 was ended by SIGKILL (exit code -9)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "rank 1 of 2 was ended by SIGTERM (exit code -15)"),
        ("raise RuntimeError('Connection closed by peer')", 1, "rank 1 of 2 lost another rank: RuntimeError"),
    ],
)
def test_exit_codes(how, code, message, script, capfd):
    file = script(f"if rank == 1: {how}\nforever()")
    assert main(["launch", "--nproc-per-node=2", file]) == code
    assert message in capfd.readouterr().err


def test_a_rank_that_lost_another_is_not_to_blame(script, capfd):
    file = script("""
        if rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:5")
        while os.path.exists(f"/proc/{os.getppid()}/task") and not os.path.exists("go"):
            if "RuntimeError" in open(__import__("glob").glob("panther-logs/*/attempt-0/rank-0.err")[0]).read():
                raise ValueError("later by the clock")
    """)
    assert main(["launch", "--nproc-per-node=2", "--monitor-interval=1", file]) == 1
    assert "panther: error: rank 1 of 2 raised ValueError: later by the clock" in capfd.readouterr().err


def test_restart_after_a_failure(script, capfd):
    file = script("""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if rank == 1:
                raise ValueError("first attempt")
            forever()
        print("done", rank)
    """)
    result = launch_distributed_training(file, config=LaunchConfig(nproc_per_node=2, max_restarts=3))
    assert (result.restarts, result.world_size) == (1, 2)
    assert capfd.readouterr() == (
        "done 0\n", "panther launch: rank 1 of 2 raised ValueError: first attempt; restart 1 of 3\n",
    )  # fmt: skip
    assert "first attempt" in (result.log_dir / "attempt-0" / "rank-1.err").read_text()
    assert (result.log_dir / "attempt-1" / "rank-1.out").read_text() == "done 1\n"


def test_restarts_run_out(script):
    file = script("raise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    with pytest.raises(DistributedError, match="rank 0 of 1 raised ValueError: 2, in the last of 3 attempts") as caught:
        launch_distributed_training(file, max_restarts=2)
    assert caught.value.exit_code == 1


GROUP = """
    import torch, torch.distributed as dist
    from panther.distributed import init, shutdown
    init()
    x = torch.ones(1)
    dist.all_reduce(x)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    print(dist.get_backend(), x.item())
    shutdown()
"""


def test_killed_worker_of_a_process_group_is_restarted(script, capfd):
    options = ["--nproc-per-node", "2", "--backend", "gloo", "--max-restarts", "1"]
    assert main(["launch", script(GROUP), *options]) == 0
    out, err = capfd.readouterr()
    assert out == "gloo 4.0\n"
    assert "panther launch: rank 1 of 2 was ended by SIGKILL (exit code -9); restart 1 of 1\n" in err


# Signals


def test_sigterm_is_passed_on_with_time_to_save(script):
    file = script("""
        def save(*_):
            open(f"saved-{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"ready-{rank}", "w").close()
        while True:
            signal.pause()
    """)
    launcher = Launcher("term", "--nproc-per-node=2", file)
    until("ready-*", 2)
    os.kill(launcher.pid, signal.SIGTERM)
    code, output = launcher.wait()
    assert code == 143
    assert "SIGTERM was passed on; the processes have ended, rank 0 with 0, rank 1 with 0" in output
    assert Path("saved-0").exists()
    assert Path("saved-1").exists()


def test_interrupt_ends_even_those_that_ignore_it(script):
    file = script("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(f"ready-{os.getpid()}", "w").close()
        forever()
    """)
    launcher = Launcher("int", "--nproc-per-node=2", "--shutdown-timeout=1", file)
    until("ready-*", 2)
    os.kill(launcher.pid, signal.SIGINT)
    code, output = launcher.wait()
    assert code == 130
    assert "rank 0 with -9, rank 1 with -9" in output
    for path in Path().glob("ready-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("ready-")), 0)


def test_python_call_raises_keyboard_interrupt_and_puts_handlers_back(script):
    file = script("os.kill(os.getppid(), signal.SIGINT)\nforever()")
    handler = signal.getsignal(signal.SIGTERM)
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(file)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert dict(os.environ) == before


# Requests that cannot be met


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (["."], ". is a folder: name a script"),
        (["--no-python", "no-such-program"], "no-such-program is no program that can be run"),
        (["work.py", "--nproc-per-node", "many"], "--nproc-per-node many must be a number, or 'auto', 'cpu' or 'gpu'"),
        (["work.py", "--nproc-per-node", "0"], "--nproc-per-node 0 must be at least 1"),
        (["work.py", "--nnodes", "2:1"], "--nnodes 2:1 must be a number of nodes, or MIN:MAX"),
        (["work.py", "--nnodes", "two"], "--nnodes two must be a number of nodes"),
        (["work.py", "--max-restarts", "-1"], "--max-restarts -1 must be at least 0"),
        (["work.py", "--backend", "smoke"], "--backend='smoke' is unknown: use one of 'gloo'"),
        (["work.py", "--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT, the same on every node"),
        (["work.py", "--nnodes", "2", "--rdzv-endpoint", "a b:1"], "--rdzv-endpoint a b:1 must be HOST:PORT"),
        (["work.py", "--nnodes", "2", "--rdzv-endpoint", "here"], "must be HOST:PORT with a port from 1 to 65535"),
        (["work.py", "--nnodes", "2", "--rdzv-endpoint", "here:99999"], "must be HOST:PORT with a port from 1"),
        (["work.py", "--nnodes", "2", "--rdzv-endpoint", "a..b:1"], "--rdzv-endpoint a..b:1 must be HOST:PORT"),
        (["work.py", "--nnodes", "2", "--rdzv-endpoint", "localhost:1", "--node-rank", "2"], "[0, --nnodes) = [0, 2)"),
        (["--log-dir", "work.py/logs", "work.py"], "the folder work.py/logs for logs cannot be written to"),
        (["--tee", "9", "work.py"], "torchrun's options make no sense together: 9 does not match"),
        (["--run-path", "work.py"], "--run-path is not supported here"),
    ],
)
def test_bad_requests_are_said_in_a_sentence(arguments, message, script, capfd):
    script("")
    assert main(["launch", *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("panther: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("panther-logs").exists()


def test_nccl_needs_a_gpu_for_each_process(script, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert main(["launch", script(""), "--backend", "nccl", "--nproc-per-node", "2"]) == 1
    assert "--backend nccl needs a GPU for each process, and 1 are visible for --nproc-per-node 2" in (
        capfd.readouterr().err
    )


def test_script_is_required(capsys):
    for arguments in ([], ["--nproc-per-node", "2"]):
        with pytest.raises(SystemExit) as exit:
            main(["launch", *arguments])
        assert exit.value.code == 2
        assert "the following arguments are required: training_script" in capsys.readouterr().err


def test_port_in_use(script, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["launch", script(""), "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint={endpoint}"]) == 1
    err = capfd.readouterr().err
    assert f"node 0 cannot listen at {endpoint} (Address already in use): give another port" in err
    assert not Path("panther-logs").exists()


def test_missing_first_node(script, free_port, capfd):
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-conf=join_timeout=1", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    assert main(["launch", *options, script("")]) == 1
    assert (
        f"nobody listened at 127.0.0.1:{free_port} within 1 s: start the launcher of node 0" in capfd.readouterr().err
    )


@pytest.fixture
def resolver(monkeypatch):
    """A name server that knows node0 after some questions, and a clock that goes on when somebody sleeps."""
    known, clock = {"after": 3}, [0.0]
    resolve = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host != "node0":
            return resolve(host, port, *args, **kwargs)
        known["after"] -= 1
        if known["after"] >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", port, *args, **kwargs)

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    monkeypatch.setattr("panther.distributed.launcher._rendezvous.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "panther.distributed.launcher._rendezvous.time.sleep", lambda s: clock.__setitem__(0, clock[0] + s)
    )
    return known


def test_the_name_of_the_first_node_may_come_later(script, resolver, free_port, capfd):
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-conf=join_timeout=10", f"--rdzv-endpoint=node0:{free_port}"]
    assert main(["launch", *options, script("")]) == 1
    err = capfd.readouterr().err
    assert err.count("the host node0 cannot be resolved yet (Name or service not known); trying for 10 s\n") == 1
    assert f"nobody listened at node0:{free_port} within 10 s: start the launcher of node 0" in err


def test_a_name_that_nobody_knows_is_said_after_the_timeout(script, resolver, capfd):
    resolver["after"] = 100
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-conf=join_timeout=10", "--rdzv-endpoint=node0:29500"]
    assert main(["launch", *options, script("")]) == 1
    assert (
        "panther: error: the host node0 of --rdzv-endpoint could not be resolved within 10 s (Name or service not "
        "known): use the name or address of node 0, and start it\n"
    ) in capfd.readouterr().err
    assert resolver["after"] == 100 - 11  # once a second
    assert not Path("panther-logs").exists()


# Nodes


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nodes(port, file, *options, ranks=("0", "1")):
    """Start a launcher for each node; exit codes and outputs."""
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=join_timeout=30"]
    launchers = [
        Launcher(f"node{place}", *common, f"--node-rank={rank}", *extra, file)
        for place, (rank, extra) in enumerate(zip(ranks, options or ([], []), strict=True))
    ]
    return [launcher.wait() for launcher in launchers]


def test_two_nodes(script, free_port):
    file = script("print(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])")
    (code0, output0), (code1, output1) = nodes(free_port, file, ["--nproc-per-node=2"], ["--nproc-per-node=2"])
    assert (code0, code1) == (0, 0), output0 + output1
    assert "0 4 0 0\n" in output0
    assert "--nnodes 2 times --nproc-per-node 2 = 4 in all" in output1
    assert sorted(path.read_text() for path in Path().glob("panther-logs/*/attempt-0/*.out")) == [
        "0 4 0 0\n", "1 4 0 1\n", "2 4 1 0\n", "3 4 1 1\n",
    ]  # fmt: skip


def test_every_node_says_which_rank_failed(script, free_port):
    file = script("if rank == 1: raise ValueError('of node one')\nforever()")
    for code, output in nodes(free_port, file):
        assert code == 1
        assert "rank 1 of 2 raised ValueError: of node one" in output
        assert output.endswith("ValueError: of node one\n")


def test_nodes_restart_together(script, free_port):
    file = script("""
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            until = os.path.exists
            while not until("ready"):
                pass
            raise ValueError("once")
        if rank == 0 and not os.path.exists("ready"):
            open("ready", "w").close()
            forever()
        print("done")
    """)
    (code0, output0), (code1, output1) = nodes(free_port, file, *2 * (["--max-restarts=1"],))
    assert (code0, code1) == (0, 0), output0 + output1
    assert "another node comes or starts its processes again: so does this one" in output0
    assert "rank 1 of 2 raised ValueError: once; restart 1 of 1" in output1


def test_a_killed_first_node_ends_the_others(script, free_port):
    file = script("""
        parent = os.getppid()
        open(f"ready-{rank}", "w").close()
        while os.getppid() == parent:  # nobody ends the processes of a launcher that was killed
            threading.Event().wait(0.05)
    """)
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-conf=join_timeout=30"]
    first, second = (Launcher(f"node{rank}", *common, f"--node-rank={rank}", file) for rank in range(2))
    until("ready-*", 2)
    os.kill(first.pid, signal.SIGKILL)
    code, output = second.wait()
    assert first.wait()[0] == -signal.SIGKILL
    assert code == 1
    assert output.endswith(f"the connection to 127.0.0.1:{free_port} is lost: the launcher of node 0 has ended, see "
                           "what it says\n")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (([], ["--nproc-per-node=2"]), ("0", "1"), "the world has 3 processes on 2 nodes, and --nnodes 2 times"),
        (2 * (["--rdzv-conf=join_timeout=2"],), ("0", "0"), "cannot listen at"),
        (
            (["--rdzv-conf=join_timeout=2"], ["--rdzv-id=other", "--rdzv-conf=join_timeout=2"]),
            "01",
            "not all nodes came",
        ),
    ],
    ids=["sizes", "ranks", "ids"],
)
def test_nodes_that_do_not_agree(options, ranks, message, script, free_port):
    answers = nodes(free_port, script(""), *options, ranks=ranks)
    assert any(message in output for _, output in answers)
    assert 1 in [code for code, _ in answers]


# Parts


def test_config_and_its_arguments():
    config = LaunchConfig(
        nproc_per_node="auto", nnodes="1:4", node_rank=0, rdzv_endpoint="a:1", rdzv_timeout=5, max_restarts=2,
        backend="nccl", log_dir="logs", shutdown_timeout=60, module=True, rdzv_id="job",
    )  # fmt: skip
    args = parse_arguments([*config.arguments(), "script"])
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == ("auto", "1:4", 0, "a:1")
    assert (args.rdzv_conf, args.max_restarts, args.backend, args.log_dir) == ("join_timeout=5", 2, "nccl", "logs")
    assert (args.shutdown_timeout, args.module, args.rdzv_id) == (60, True, "job")
    with pytest.raises(TypeError, match=r"pass config or its fields \(nnodes\), not both"):
        launch_distributed_training("x.py", config=config, nnodes=2)
    with pytest.raises(TypeError, match="nproc"):
        launch_distributed_training("x.py", nproc=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("only words\n", ""),
        ("Traceback (most recent call last):\n  a\nE: 1\nlater\nTraceback (most recent call last):\n  b\nF: 2", "  b"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   b\n[rank1]: F: 2\n", "  b"),
        (
            "Traceback (most recent call last):\n  b\nF: 2\nException ignored in: x\n"
            "Traceback (most recent call last):\n  c\nG: 3",
            "  b",
        ),
    ],
)
def test_last_traceback(text, expected):
    lines = last_traceback(text).splitlines()
    assert (lines[1] if lines else "") == expected


def test_tail_shows_whole_lines(tmp_path, capsys):
    file = tmp_path / "out"
    file.write_bytes(b"one\ntw")
    tail = Tail([("> ", file, sys.stdout)])
    with file.open("ab") as end:
        end.write(b"o\nthree")
    tail.stop()
    assert capsys.readouterr().out == "> one\n> two\n> three"
