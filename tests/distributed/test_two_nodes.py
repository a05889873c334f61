"""Two nodes on one machine: network namespaces joined by a virtual cable, each with its host name and /etc/hosts."""

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import Launcher, until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAMES, ADDRESSES, PORTS = ("panther-a", "panther-b"), ("10.99.0.1", "10.99.0.2"), itertools.count(29500)
UNKNOWN = ["127.0.0.1 localhost"] * 2  # nobody's name can be resolved
DEBIAN = [  # a machine's own name leads to itself only
    f"127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}"
    for own, other, address in zip(NAMES, NAMES[::-1], ADDRESSES[::-1], strict=True)
]
PANTHER = """
    import os, torch, torch.distributed as dist, panther as pr
    pr.distributed.init(timeout_s=30)
    x = torch.ones(1)
    dist.all_reduce(x)
    print("rank", dist.get_rank(), "sum", x.item(), os.environ["GROUP_RANK"], os.environ["GLOO_SOCKET_IFNAME"])
    pr.distributed.shutdown()
"""
TORCH = PANTHER.replace("pr.distributed.init(timeout_s=30)", "dist.init_process_group('gloo')").replace(
    "pr.distributed.shutdown()", "dist.destroy_process_group()"
)
ELASTIC = """
    import os, pathlib, time, panther as pr
    pr.distributed.init(timeout_s=30)
    world = pr.distributed.get_world_size()
    pathlib.Path(f"world-{world}-{os.environ['RANK']}").touch()
    while world == 1:  # until the launcher starts it again
        time.sleep(0.05)
    pr.distributed.shutdown()
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def cable():
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("network namespaces need root on Linux")
    try:
        ip("netns", "add", NAMES[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not available here: {error}")
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "ptr-a", "netns", NAMES[0], "type", "veth", "peer", "name", "ptr-b", "netns", NAMES[1])
        for name, address, interface in zip(NAMES, ADDRESSES, ("ptr-a", "ptr-b"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            for device in ("lo", interface):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)


@pytest.fixture
def start(cable, tmp_path, monkeypatch):
    """Start the launcher of a node; all are ended with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def enter(node, hosts):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{NAMES[node]}") as namespace:
            assert libc.setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
        assert libc.unshare(0x04000000 | 0x00020000) == 0  # CLONE_NEWUTS, CLONE_NEWNS
        Path(f"hosts-{node}").write_text(hosts + "\n")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", f"hosts-{node}", "/etc/hosts"], check=True)
        subprocess.run(["hostname", NAMES[node]], check=True)

    def start(node, hosts, *arguments):
        return Launcher(f"node{node}", *arguments, enter=lambda: enter(node, hosts[node]))

    yield start
    Launcher.end_all()


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
        start(node, hosts, "--nnodes=2", *(text.format(port=port, node=node) for text in arguments), "work.py")
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


def test_a_node_that_does_not_come_is_named_with_the_way_that_was_tried(start):
    Path("work.py").write_text("")
    arguments = ["--nnodes=2", "--node-rank=1", "--master-addr=10.99.0.1", "--rdzv-conf=timeout=1", "work.py"]
    code, output = start(1, UNKNOWN, *arguments).wait()
    assert code == 1
    assert "node 0 could not be reached at 10.99.0.1:29500 within 1 s" in output
    assert "tried from 10.99.0.2 on interface ptr-b" in output
