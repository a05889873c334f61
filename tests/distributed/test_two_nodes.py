"""Two nodes on one machine: network namespaces joined by a virtual cable, each with its host name and /etc/hosts."""

import ctypes
import itertools
import os
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from launchers import Launcher, until
from two_nodes import UnavailableError, two_nodes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAMES, ADDRESSES, PORTS = ("panther-a", "panther-b"), ("10.99.0.1", "10.99.0.2"), itertools.count(29500)
UNKNOWN = ["127.0.0.1 localhost"] * 2  # nobody's name can be resolved
DEBIAN = [  # a machine's own name leads to itself only
    f"127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}"
    for own, other, address in zip(NAMES, NAMES[::-1], ADDRESSES[::-1], strict=True)
]
PANTHER = """
    import os, torch, torch.distributed as dist, panther as pr
    pr.distributed.init()
    x = torch.ones(1)
    dist.all_reduce(x)
    print("rank", dist.get_rank(), "sum", x.item(), os.environ["GROUP_RANK"], os.environ["GLOO_SOCKET_IFNAME"])
    pr.distributed.shutdown()
"""
TORCH = PANTHER.replace("pr.distributed.init()", "dist.init_process_group('gloo')").replace(
    "pr.distributed.shutdown()", "dist.destroy_process_group()"
)
ELASTIC = """
    import os, pathlib, time, panther as pr
    pr.distributed.init()
    world = pr.distributed.get_world_size()
    pathlib.Path(f"world-{world}-{os.environ['RANK']}").touch()
    while world == 1:  # until the launcher starts it again
        time.sleep(0.05)
    pr.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def cable():
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except UnavailableError as error:
            pytest.skip(str(error))
        yield nodes


@pytest.fixture
def start(cable, tmp_path, monkeypatch):
    """Start the launcher of a node; all are ended with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def enter(node, hosts):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{cable.names[node]}") as namespace:
            assert libc.setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
        assert libc.unshare(0x04000000 | 0x00020000) == 0  # CLONE_NEWUTS, CLONE_NEWNS
        Path(f"hosts-{node}").write_text(hosts + "\n")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", f"hosts-{node}", "/etc/hosts"], check=True)
        subprocess.run(["hostname", NAMES[node]], check=True)

    def start(node, hosts, *arguments, command="launch", then=lambda: None):
        return Launcher(f"node{node}", *arguments, enter=lambda: (enter(node, hosts[node]), then()), command=command)

    yield start
    Launcher.end_all()


@pytest.fixture
def doctor(start):
    """Run panther doctor --nodes on both, with what is to be done on the second node first; codes and outputs."""

    def doctor(hosts=UNKNOWN, then=lambda: None, timeout_s=300):
        place = ["--nnodes=2", f"--rdzv-endpoint=10.99.0.1:{next(PORTS)}", f"--timeout={timeout_s}"]
        launchers = [
            start(
                node, hosts, "--nodes", f"--node-rank={node}", *place, command="doctor", then=(lambda: None, then)[node]
            )
            for node in (1, 0)
        ]
        (second, its_output), (first, output) = [launcher.wait() for launcher in launchers]
        assert first == second, (output, its_output)
        # Both nodes show one report, the first one also what follows it, between warnings of torch.
        report, its_report = (
            [line for line in printed.partition("2 ranks, ")[2].splitlines() if not line.startswith("[W")]
            for printed in (output, its_output)
        )
        assert its_report == report[: len(its_report)], (output, its_output)
        return first, its_report

    return doctor


WAYS = {
    "static by address": (UNKNOWN, PANTHER, ["--master-addr=10.99.0.1", "--master-port={port}", "--node-rank={node}"]),
    "static endpoint": (
        UNKNOWN, TORCH, ["--rdzv-backend=static", "--rdzv-endpoint=10.99.0.1:{port}", "--node-rank={node}"],
    ),
    "c10d by address": (UNKNOWN, TORCH, ["--rdzv-backend=c10d", "--rdzv-endpoint=10.99.0.1:{port}"]),
    "static by a Debian name": (DEBIAN, PANTHER, ["--rdzv-endpoint=panther-a:{port}", "--node-rank={node}"]),
    "c10d by a Debian name": (DEBIAN, PANTHER, ["--rdzv-endpoint=panther-a:{port}"]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_two_nodes_meet(way, start):
    hosts, script, arguments = WAYS[way]
    Path("work.py").write_text("\n".join(line.strip() for line in script.splitlines()))
    port = next(PORTS)
    launchers = [
        start(node, hosts, "--nnodes=2", *(argument.format(port=port, node=node) for argument in arguments), "work.py")
        for node in (1, 0)
    ]
    answers = [launcher.wait() for launcher in launchers]
    assert [code for code, _ in answers] == [0, 0], answers
    lines = sorted(path.read_text() for path in Path().glob("panther-logs/*/attempt-0/*.out"))
    assert [line.split()[:5] for line in lines] == [["rank", f"{rank}", "sum", "2.0", f"{rank}"] for rank in range(2)]
    assert {line.split()[5] for line in lines} == {"ptr-a", "ptr-b"}
    if "--node-rank={node}" in arguments:
        assert lines[0].split()[5] == "ptr-a"  # rank 0 is on node 0


def test_a_second_node_may_come_later(start):
    Path("work.py").write_text("\n".join(line[4:] for line in ELASTIC.splitlines()))
    arguments = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=10.99.0.1:{next(PORTS)}"]
    arguments += ["--rdzv-conf=last_call_timeout=1", "work.py"]
    first = start(0, UNKNOWN, *arguments)
    until("world-1-0")
    second = start(1, UNKNOWN, *arguments)
    answers = [first.wait(), second.wait()]
    assert [code for code, _ in answers] == [0, 0], answers
    assert sorted(path.name for path in Path().glob("world-2-*")) == ["world-2-0", "world-2-1"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--node-rank=0", "--rdzv-conf=timeout=2"], "1/2 clients joined."),
        (["--rdzv-conf=join_timeout=2"], "fewer than 2 nodes came within 2 s"),
    ],
    ids=["static", "c10d"],
)
def test_node_0_names_what_it_waited_for(options, expected, start):
    Path("work.py").write_text("")
    port = next(PORTS)
    code, output = start(0, UNKNOWN, "--nnodes=2", f"--rdzv-endpoint=10.99.0.1:{port}", *options, "work.py").wait()
    assert code == 1
    assert f"{expected}; see the output of the launchers of the other nodes, which meet at 10.99.0.1:{port}" in output
    assert "Traceback" not in output.splitlines()[-1]


def test_the_doctor_finds_nothing(doctor):
    code, report = doctor(hosts=DEBIAN)
    assert code == 0, report
    assert [line.split()[:4] for line in report[2:4]] == [
        [str(rank), NAMES[rank], ADDRESSES[rank], f"ptr-{'ab'[rank]}"] for rank in range(2)
    ]
    assert report[4:] == ["no faults"]


def test_the_doctor_finds_a_wrong_interface(doctor):
    code, report = doctor(then=lambda: os.environ.update(GLOO_SOCKET_IFNAME="eth9"))
    assert code == 1
    expected = "rank 1 (panther-b): GLOO_SOCKET_IFNAME=eth9 names no interface of this node, which has lo, ptr-b"
    assert f"fault: {expected}: correct it" in report


@pytest.mark.parametrize(("hosts", "address"), [(UNKNOWN, ADDRESSES[0]), (DEBIAN, NAMES[0])], ids=["unknown", "Debian"])
def test_ranks_of_another_launcher_meet(hosts, address, start):
    """What stock torchrun, srun or Kubernetes give a process: addresses and ranks, no interface."""
    port = next(PORTS)

    def environment(rank):
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}

    ranks = [
        start(
            rank,
            hosts,
            "--nodes",
            "--timeout=300",
            command="doctor",
            then=partial(os.environ.update, environment(rank)),
        )
        for rank in range(2)
    ]
    (first, output), (second, its_output) = [rank.wait() for rank in ranks]
    assert (first, second) == (0, 0), (output, its_output)
    assert "no faults" in output
    assert "2 ranks, gloo" in output  # collectives went through
