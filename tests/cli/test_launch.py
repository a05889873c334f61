"""panther launch as a user meets it: what is shown and kept, who is blamed, exit codes, signals, restarts, nodes."""

import dataclasses
import json
import os
import pickle
import signal
import socket
import textwrap
from pathlib import Path

import pytest
import waits
from launchers import Launcher, until

from panther.cli import main
from panther.distributed import DistributedLauncher, LaunchConfig, launch_distributed_training
from panther.distributed.comm.store import listens
from panther.distributed.launcher._arguments import _parse
from panther.distributed.launcher._failures import describe, explain
from panther.errors import ConfigError, DistributedError

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "PANTHER_BACKEND", "GLOO_"))]:
        monkeypatch.delenv(name)
    yield
    Launcher.end_all()


@pytest.fixture
def script(tmp_path):
    """Write a script that knows its rank, how to wait for ever, and how to fail as one that has called init()."""

    def write(code):
        head = """
            import os, signal, sys, threading
            from pathlib import Path
            rank = int(os.environ["RANK"])
            forever = threading.Event().wait
            def fail(error):
                from panther.distributed.comm.ending import record_uncaught_exceptions
                record_uncaught_exceptions()
                raise error
        """
        (tmp_path / "work.py").write_text(textwrap.dedent(head) + textwrap.dedent(code))
        return "work.py"

    return write


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def logs(pattern="panther-logs/*"):
    (folder,) = Path().glob(pattern)
    return folder


# What is shown and kept


def test_every_rank_has_files_and_rank_0_is_shown(script, capfd):
    file = script("""
        print("out of", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ.get("PANTHER_BACKEND"))
        sys.stderr.write("half a line, ")
        print("err of", rank, file=sys.stderr)
    """)
    arguments = ["two words", "$HOME ${local_rank} $$", "--lr=1", "-x", "", "--nodes", "*"]
    assert main(["launch", "--nproc-per-node", "2", "--backend=gloo", file, *arguments]) == 0
    out, err = capfd.readouterr()
    assert out == f"out of 0 of 2 {arguments} gloo\n"
    folder = logs()
    assert err == f"panther: 2 processes of work.py; logs in {folder}\nhalf a line, err of 0\n"
    assert (folder / "attempt-0" / "rank-1.out").read_text() == f"out of 1 of 2 {arguments} gloo\n"
    assert (folder / "attempt-0" / "rank-1.err").read_text() == "half a line, err of 1\n"


def test_options_after_the_script_are_noted(script, capfd):
    file = script("print('hello', sys.argv[1:])")
    assert main(["launch", "--log-dir=kept", file, "--nproc-per-node", "3"]) == 0
    out, err = capfd.readouterr()
    assert out == "hello ['--nproc-per-node', '3']\n"
    assert "panther: --nproc-per-node after work.py is passed to the script: put options of panther launch" in err
    assert logs("kept/*").is_dir()


def test_shown_ranks_can_be_chosen_by_torchruns_own_options(script, capfd):
    file = script("print('hello')")
    options = ["--nproc-per-node=3", "--tee=3", "--local-ranks-filter=1,2", "--log-dir=torchs"]
    assert main(["launch", *options, file]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[default1]:hello", "[default2]:hello"]
    assert len(list(logs("torchs/*/attempt_0").glob("*/stdout.log"))) == 3


def test_module(tmp_path, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert main(["launch", "-m", "package", "--x"]) == 0
    assert capfd.readouterr().out == "package ['--x']\n"
    assert main(["launch", "-m", "nowhere"]) == 1
    assert capfd.readouterr().err.endswith("No module named nowhere\n")


def test_help_is_torchruns(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["launch", "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: panther launch [options] script.py")
    for option in ("--nproc-per-node", "--nproc_per_node", "--rdzv-endpoint", "--backend", "--standalone"):
        assert option in out


@pytest.mark.parametrize("options", [[], ["--standalone", "--rdzv-backend=c10d"]], ids=["", "standalone"])
def test_one_node_meets_on_loopback(options, script, capfd):
    file = script("""
        port = "%04X" % int(os.environ["MASTER_PORT"])
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        print(os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"],
              [row[1] for row in rows if row[1].endswith(":" + port) and row[3] == "0A"] == ["0100007F:" + port])
    """)
    assert main(["launch", *options, "--nproc-per-node=2", file]) == 0
    assert capfd.readouterr().out == "127.0.0.1 lo True\n"


# Failures


def test_the_failing_rank_is_blamed_last_and_whole(script, capfd):
    file = script("""
        if rank == 2:
            try:
                int("x")
            except ValueError as error:
                fail_with = KeyError("the cause")
                fail_with.__cause__ = error
            fail(fail_with)
        forever()
    """)
    assert main(["launch", "--nproc-per-node=3", file, "--token", "secret"]) == 1
    err = capfd.readouterr().err
    error = logs() / "attempt-0" / "rank-2.err"
    assert "panther: error: rank 2 of 3 raised KeyError: 'the cause'; the other ranks were ended\n" in err
    assert f"What every rank wrote is in {error.parents[1]}\n\nTraceback of rank 2 ({error}):\nTraceback (" in err
    assert "ValueError: invalid literal" in err
    assert err.endswith("KeyError: 'the cause'\n")
    assert "secret" not in err  # arguments are not repeated


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sys.exit(7)", "rank 1 of 2 left with exit code 7 and no traceback; the other ranks were ended"),
        ("raise RuntimeError('before init')", "RuntimeError: before init\n"),
        ("raise RuntimeError('before init')", "rank 1 of 2 left with exit code 1; the other ranks were ended"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was ended by SIGKILL (exit code -9)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "rank 1 of 2 was ended by SIGTERM (exit code -15)"),
    ],
)
def test_ends_without_an_error_file(how, message, script, capfd):
    file = script(f"if rank == 1: {how}\nforever()")
    assert main(["launch", "--nproc-per-node=2", file]) == 1
    assert message in capfd.readouterr().err


def test_a_rank_that_ends_early_is_the_cause_of_a_lost_connection(script, capfd):
    file = script("""
        pid = Path("pid")
        if rank == 1:
            pid.with_suffix(".new").write_text(str(os.getpid()))
            pid.with_suffix(".new").rename(pid)
            sys.exit(0)
        while not pid.exists() or Path(f"/proc/{pid.read_text()}").exists():  # until the launcher has noticed
            threading.Event().wait(0.02)
        sys.exit("Connection closed by peer")
    """)
    assert main(["launch", "--nproc-per-node=2", file]) == 1
    error = capfd.readouterr().err
    assert "panther: error: rank 1 of 2 ended with exit code 0 while other ranks still ran, as by sys.exit(0)" in error
    assert "rank 0 of 2 left with exit code 1 and no traceback" in error


def test_the_first_to_fail_is_the_cause_and_those_that_lost_it_are_not(tmp_path):
    def error_file(name, message, time):
        path = tmp_path / name
        extra = {"py_callstack": f"Traceback (most recent call last): {name}", "timestamp": "0"}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.utime(path, (time, time))
        return str(path)

    lost = describe(0, 1, error_file("lost", "RuntimeError: Connection closed by peer [127.0.0.1]:5", 1))
    later = describe(1, 1, error_file("later", "ValueError: no", 3))
    first = describe(2, 1, error_file("first", "KeyError: 'label'", 2))
    killed = describe(3, -signal.SIGKILL, "nowhere")
    assert describe(4, -signal.SIGTERM, "nowhere", stopped=True) is None
    message = explain([lost, later, first], 4, 3)
    assert message.startswith(
        "rank 2 of 4 raised KeyError: 'label', in the last of 3 attempts; the other ranks were ended"
    )
    assert message.index("rank 1 of 4 raised ValueError: no") < message.index("rank 0 of 4 lost its connection")
    assert message.endswith("Traceback of rank 2:\nTraceback (most recent call last): first")
    assert explain([lost, first, killed], 4, 1).startswith("rank 3 of 4 was ended by SIGKILL")


# Restarts


def test_the_log_of_a_rank_that_hangs_has_its_stack(script):
    file = script(
        "import os, time\nimport panther as pr\npr.distributed.init()\n"
        "def hang():\n    time.sleep(1000)\n"
        "hang() if os.environ['RANK'] == '1' else os._exit(3)\n"
    )
    assert main(["launch", "--nproc-per-node=2", "--log-dir=kept", file]) == 1
    stack = (logs("kept/*") / "attempt-0" / "rank-1.err").read_text()
    assert "in hang" in stack


def test_restart_after_a_failure(script, capfd, caplog):
    file = script("""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if rank == 1:
                fail(ValueError("first attempt"))
            forever()
        print("done", rank)
    """)
    folder = launch_distributed_training(file, config=LaunchConfig(nproc_per_node=2, max_restarts=3))
    assert capfd.readouterr() == ("done 0\n", "")
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("panther.")]
    assert message == "all processes start again after rank 1 raised ValueError: first attempt (restart 1 of 3)"
    assert "first attempt" in (folder / "attempt-0" / "rank-1.err").read_text()
    assert (folder / "attempt-1" / "rank-1.out").read_text() == "done 1\n"


def test_restarts_run_out(script):
    file = script("fail(ValueError(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    with pytest.raises(DistributedError, match="rank 0 of 1 raised ValueError: 2, in the last of 3 attempts"):
        launch_distributed_training(file, max_restarts=2)


# Signals


def test_sigterm_is_passed_on_with_time_to_save(script):
    file = script("""
        def save(*_):
            Path(f"saved-{rank}").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        Path(f"ready-{rank}").touch()
        while True:
            signal.pause()
    """)
    launcher = Launcher("term", "--nproc-per-node=2", file)
    until("ready-*", 2)
    os.kill(launcher.pid, signal.SIGTERM)
    code, output = launcher.wait()
    assert code == 143
    assert "panther: SIGTERM was passed on, and the processes have ended" in output
    assert Path("saved-0").exists()
    assert Path("saved-1").exists()


def test_the_time_to_save_is_the_shutdown_timeout_and_not_the_grace_period(script):
    file = script("""
        import time
        def save(*_):
            begun = time.process_time()
            while time.process_time() < begun + 2:  # longer than the grace period
                pass
            Path("saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        Path("ready").touch()
        while True:
            signal.pause()
    """)
    launcher = Launcher("term", "--nproc-per-node=1", "--grace-period=1", "--shutdown-timeout=300", file)
    until("ready")
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait()[0] == 143
    assert Path("saved").exists()


def test_interrupt_ends_even_those_that_ignore_it(script):
    file = script("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(f"ready-{os.getpid()}").touch()
        forever()
    """)
    launcher = Launcher("int", "--nproc-per-node=2", "--shutdown-timeout=1", file)
    until("ready-*", 2)
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait()[0] == 130
    for path in Path().glob("ready-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("ready-")), 0)


def test_python_call_raises_keyboard_interrupt_and_leaves_no_trace(script):
    file = script("os.kill(os.getppid(), signal.SIGINT)\nforever()")
    handler, previous_environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(file)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert dict(os.environ) == previous_environment


# Requests that cannot be met


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (
            ["--nproc-per-node=many", "work.py"],
            "panther launch does not accept these options: Unsupported nproc_per_node value: many",
        ),
        (
            ["--nnodes=2:1", "--master-port=1", "work.py"],
            "does not accept these options: min_nodes must be > 0 and <= max_nodes",
        ),
        (["--nproc-per-node=0", "work.py"], "nproc_per_node=0 must be at least 1"),
        (["--nnodes=1:2:3", "work.py"], 'does not accept these options: nnodes=1:2:3 is not in "MIN:MAX" format'),
        (["--nproc=2", "work.py"], "ambiguous option: --nproc=2 could match --nproc-per-node"),
        (["--frob=2", "work.py"], "unrecognized arguments: --frob=2; panther launch --help lists the options"),
        ([], "the following arguments are required: training_script"),
        (["--nproc-per-node", "2"], "the following arguments are required: training_script"),
        (["--nnodes=two", "work.py"], "does not accept these options: invalid literal"),
        (["--grace-period=0", "work.py"], "--grace-period=0 must be a positive number of seconds"),
        (["--nnodes=2", "--node-rank=2", "work.py"], "--node-rank 2 must be from 0 to 1 with --nnodes 2"),
        (["--nnodes=0", "work.py"], "does not accept these options: min_nodes must be > 0 and <= max_nodes"),
        (["--log-dir=work.py/logs", "work.py"], "--log-dir work.py/logs cannot be written to (Not a directory)"),
        (["--max-restarts=-1", "work.py"], "max_restarts must be >= 0"),
        (
            ["--backend=mpi", "work.py"],
            "does not accept these options: backend='mpi' is not in this build of torch: use",
        ),
        (["--backend=smoke", "work.py"], "backend='smoke' is unknown: use one of 'gloo'"),
        (["--nnodes=2", "work.py"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT, or --master-addr HOST --node-rank N"),
        (["--nnodes=2", "--rdzv-endpoint=a b:1", "work.py"], "the address of node 0 must be HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=here:99999", "work.py"], "the address of node 0 must be HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=a..b:1", "work.py"], "the address of node 0 must be HOST:PORT"),
        (["--tee=9", "work.py"], "does not accept these options: 9 does not match"),
    ],
)
def test_bad_requests_are_said_in_a_sentence(arguments, message, script, capfd):
    script("")
    assert main(["launch", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("panther: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("panther-logs").exists()


def test_a_port_in_use_is_named(script, capfd):
    file = script("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["launch", "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}", file]) == 1
    error = capfd.readouterr().err
    assert "the launcher failed: " in error
    assert "EADDRINUSE" in error
    assert f"which meet at 127.0.0.1:{port}" in error


def test_a_first_node_that_does_not_come(script, free_port, capfd):
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-conf=timeout=2", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    assert main(["launch", *options, script("")]) == 1
    error = capfd.readouterr().err
    assert "the launcher failed: The client socket has timed out after 2000ms while trying to connect to" in error
    assert f"which meet at 127.0.0.1:{free_port}" in error


# Nodes (on several machines: tests/distributed/test_two_nodes.py)


def nodes(file, *options, extra=([], [])):
    """Start a launcher for each node, both on this machine; exit codes and outputs."""
    launchers = [Launcher(f"node{node}", *options, *extra[node], file) for node in range(2)]
    return [launcher.wait() for launcher in launchers]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes(backend, script, free_port):
    file = script("print(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])")
    ranks = [[f"--node-rank={node}"] if backend == "static" else [] for node in range(2)]
    options = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    (code0, output0), (code1, output1) = nodes(file, *options, extra=ranks)
    assert (code0, code1) == (0, 0), output0 + output1
    assert "panther: 2 processes of work.py on this node, of --nnodes 2; logs in" in output0
    if backend == "static":
        assert "0 4 0 0\n" in output0
    assert sorted(path.read_text() for path in Path().glob("panther-logs/*/attempt-0/*.out")) == [
        "0 4 0 0\n", "1 4 0 1\n", "2 4 1 0\n", "3 4 1 1\n",
    ]  # fmt: skip


def test_nodes_restart_together(script, free_port):
    file = script("""
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            until = os.path.exists
            while not until("ready"):
                pass
            fail(ValueError("once"))
        if rank == 0 and not os.path.exists("ready"):
            Path("ready").touch()
            forever()
        print("done")
    """)
    answers = nodes(file, "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--max-restarts=1")
    assert [code for code, _ in answers] == [0, 0], answers
    outputs = "".join(output for _, output in answers)
    assert "all processes start again after rank 1 raised ValueError: once (restart 1 of 1)" in outputs
    assert "all processes start again (restart 0 of 1)" in outputs


def test_a_killed_first_node_ends_the_others(script, free_port):
    file = script("""
        parent = os.getppid()
        Path(f"ready-{rank}").touch()
        while os.getppid() == parent:  # nobody ends the processes of a launcher that was killed
            threading.Event().wait(0.05)
    """)
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    first = Launcher("node0", *options, file)
    waits.until(lambda: listens("127.0.0.1", free_port), "the first node does not listen")
    second = Launcher("node1", *options, file)
    until("ready-*", 2)
    os.kill(first.pid, signal.SIGKILL)
    code, output = second.wait()
    assert first.wait()[0] == -signal.SIGKILL
    assert code == 1
    assert f"; see the output of the launchers of the other nodes, which meet at 127.0.0.1:{free_port}\n" in output


# Parts


def test_config_and_its_arguments():
    config = LaunchConfig(
        nproc_per_node="auto", nnodes="1:4", node_rank=0, rdzv_endpoint="a:1", rdzv_timeout_s=5, max_restarts=2,
        backend="nccl", log_dir="logs", shutdown_timeout_s=60, module=True, rdzv_id="job", monitor_interval_s=0.5,
        rdzv_backend="c10d",
    )  # fmt: skip
    args = _parse([*config.arguments(), "script"])
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == ("auto", "1:4", 0, "a:1")
    assert (args.rdzv_conf, args.max_restarts, args.backend) == ("timeout=5,join_timeout=5", 2, "nccl")
    assert (args.shutdown_timeout, args.module, args.rdzv_id, args.log_dir) == (60, True, "job", "logs")
    assert (args.monitor_interval, args.rdzv_backend) == (0.5, "c10d")
    with pytest.raises(TypeError, match=r"config must be a LaunchConfig, not dict: use LaunchConfig\(\*\*settings\)"):
        launch_distributed_training("x.py", config={"nnodes": 2})
    with pytest.raises(TypeError, match="config must be a LaunchConfig, not dict"):
        DistributedLauncher({})
    with pytest.raises(TypeError, match=r"pass config or its fields \(nnodes\), not both"):
        launch_distributed_training("x.py", config=config, nnodes=2)
    with pytest.raises(ConfigError, match="'nproc' is not a setting of LaunchConfig: did you mean 'nproc_per_node'"):
        launch_distributed_training("x.py", nproc=2)
    with pytest.raises(ConfigError, match=r"the script x.py does not exist"):
        launch_distributed_training("x.py")


def test_the_names_of_guides():
    """LaunchConfig(monitor_interval=, start_timeout=) and DistributedLauncher."""
    config = LaunchConfig(nproc_per_node=2, monitor_interval=1.0, start_timeout=600, max_restarts=3)
    assert config == LaunchConfig(nproc_per_node=2, monitor_interval_s=1.0, rdzv_timeout_s=600, max_restarts=3)
    assert LaunchConfig(start_timeout=60).arguments() == ["--rdzv-conf=timeout=60,join_timeout=60"]
    assert dataclasses.replace(config, monitor_interval_s=3).monitor_interval_s == 3.0
    with pytest.raises(ConfigError, match="start_timeout and rdzv_timeout_s are the same setting: give one"):
        LaunchConfig(start_timeout=60, rdzv_timeout_s=50)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.monitor_interval = 2.0
    assert pickle.loads(pickle.dumps(config)) == config
    assert DistributedLauncher(config).config is config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"monitor_interval": -1}, "monitor_interval_s=-1.0 must be positive and finite"),
        ({"monitor_interval": "x"}, "monitor_interval='x' must be a number, not str"),
        ({"monitor_interval_s": 0}, "monitor_interval_s=0.0 must be positive and finite"),
        ({"start_timeout": 0}, "rdzv_timeout_s=0.0 must be at least 1 and finite"),
        ({"rdzv_timeout_s": float("inf")}, "rdzv_timeout_s=inf must be at least 1 and finite"),
        ({"nproc_per_node": 0}, "nproc_per_node=0 must be at least 1 and finite"),
        ({"nproc_per_node": 1.5}, "nproc_per_node=1.5 must be a whole number or a string, not float"),
        ({"nnodes": -1}, "nnodes=-1 must be at least 1 and finite"),
        ({"node_rank": -1}, "node_rank=-1 must be at least 0 and finite"),
        ({"max_restarts": -1}, "max_restarts=-1 must be at least 0 and finite"),
        ({"max_restarts": True}, "max_restarts=True must be a whole number, not bool"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s=-1.0 must be at least 0 and finite"),
        ({"module": "yes"}, "module='yes' must be true or false, not str"),
        ({"log_dir": 3}, "log_dir=3 must be a string, not int"),
        ({"nproc_per_nod": 2}, "'nproc_per_nod' is not a setting of LaunchConfig: did you mean 'nproc_per_node'?"),
        ({"num_gpus": 2}, "'num_gpus' is not a setting of LaunchConfig: set nproc_per_node, and nnodes for several"),
        ({"nprocs": 2}, "'nprocs' is not a setting of LaunchConfig: did you mean 'nproc_per_node'?"),
        ({"master_addr": "a"}, "'master_addr' is not a setting of LaunchConfig: set rdzv_endpoint to 'HOST:PORT'"),
        ({"zzz": 1}, "'zzz' is not a setting of LaunchConfig: use some of nproc_per_node, nnodes, node_rank"),
    ],
)
def test_a_wrong_setting_is_named(given, message):
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**given)
    assert message in str(caught.value)
