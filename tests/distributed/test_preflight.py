"""What panther doctor --nodes finds: on several processes of this machine, each fault put into one of them."""

import json
import os
import threading
import time
from dataclasses import asdict, replace
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import waits

from panther.cli import main
from panther.distributed import preflight
from panther.distributed.comm.store import Meeting, address_of
from panther.distributed.preflight import Findings, NodeInfo, judge

pytestmark = pytest.mark.distributed


def examine(tmp_path, n, inject=lambda rank: None, folder=None, timeout_s=300.0, gone=(), **settings):
    """The reports of n processes, or their errors; the ones in ``gone`` leave without."""
    pids = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                inject(rank)
                store = dist.FileStore(str(tmp_path / "store"), n)
                meeting = Meeting(store, timeout_s, time.monotonic() + timeout_s, "here", folder=tmp_path)
                own = folder(rank) if callable(folder) else folder
                result = asdict(preflight.check_nodes(meeting, rank, n, own, **settings))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            finally:
                (tmp_path / f"result-{rank}").write_text(json.dumps(result))
                os._exit(0)
        pids.append(pid)
    waits.join(pids)
    return [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(n) if rank not in gone]


def report_of(results):
    """The report of all ranks, which is one."""
    assert all(result == results[0] for result in results), results
    return SimpleNamespace(**results[0])


def leave():
    os._exit(0)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_nothing_is_wrong(n, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    report = report_of(examine(tmp_path, n, folder=folder))
    assert (report.faults, report.notes) == ([], [])
    assert report.text.splitlines()[0] == f"{n} rank{'s' * (n > 1)}, meeting here"
    assert len([line for line in report.text.splitlines() if "127.0.0.1" in line]) == n
    assert (f"{n * (n - 1)} connections between pairs" in report.text) == (n > 1)
    assert report.text.endswith("no faults")
    assert not list(folder.iterdir())


def in_rank(victim, module, name, value):
    """Replace an attribute of a module in one of the processes."""

    def inject(rank):
        if rank == victim:
            setattr(module, name, value)

    return inject


def test_another_version(tmp_path):
    report = report_of(examine(tmp_path, 3, in_rank(1, preflight, "__version__", "0.0.1")))
    (fault,) = report.faults
    assert fault.startswith("Panther is ")
    assert fault.endswith(" on ranks 0, 2 and 0.0.1 on rank 1: install the same version everywhere")


def test_a_full_disk(tmp_path):
    def usage(path):
        return SimpleNamespace(free=5e8)

    report = report_of(examine(tmp_path, 2, in_rank(1, preflight, "shutil", SimpleNamespace(disk_usage=usage))))
    (fault,) = report.faults
    assert fault.startswith("rank 1 (")
    assert " has 500 MB free in " in fault
    assert report_of(examine(fresh(tmp_path), 2, free_bytes=1e30)).faults[1].startswith("rank 1 (")


def fresh(tmp_path):
    folder = tmp_path / "again"
    folder.mkdir()
    return folder


def test_a_folder_that_is_not_shared(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (fault,) = report_of(examine(tmp_path, 3, folder=lambda rank: tmp_path / "ab"[rank == 2])).faults
    assert fault.startswith(f"rank 2 and rank 0 do not see each other's files in {tmp_path / 'a'}: name a folder")
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_folder_that_is_missing(victim, tmp_path):
    (tmp_path / "a").mkdir()
    (fault,) = report_of(examine(tmp_path, 2, folder=lambda rank: tmp_path / "ab"[rank == victim])).faults
    assert fault.startswith(f"rank {victim} (")
    assert f" cannot write to {tmp_path / 'b'} (No such file or directory): make the folder" in fault


def redirect(victim, wrong_rank=None, wrong_port=None, only=None):
    """Let a rank connect to another port than that of its partner, or ask for another rank there."""
    real = preflight.connect

    def connect(address, port, rank, token, timeout_s):
        if only in (None, rank):
            port, rank = wrong_port or port, rank if wrong_rank is None else wrong_rank
        return real(address, port, rank, token, timeout_s)

    return in_rank(victim, preflight, "connect", connect)


def test_a_pair_that_cannot_connect_is_named(tmp_path):
    report = report_of(examine(tmp_path, 4, redirect(1, wrong_port=1, only=3)))
    (fault,) = report.faults
    assert fault.startswith("rank 1 (")
    assert ") cannot connect to rank 3 (" in fault
    assert "the connection was refused, for example by a firewall; let all ports through" in fault
    assert "11 connections between pairs" in report.text


def test_a_rank_to_which_nobody_can_connect(tmp_path):
    def inject(rank):
        redirect(rank, wrong_port=1, only=2)(rank)

    (fault,) = report_of(examine(tmp_path, 4, inject)).faults
    assert fault.startswith("no rank can connect to rank 2 (")


def test_somebody_else_at_the_address(tmp_path):
    (fault,) = report_of(examine(tmp_path, 2, redirect(0, wrong_rank=7))).faults
    assert "cannot connect to rank 1 (" in fault
    assert "a different program answered there, or the connection broke" in fault


def test_data_that_does_not_arrive(tmp_path, monkeypatch):
    def serve(connection, hello):
        preflight._read(connection, len(hello))
        threading.Event().wait()

    inject = in_rank(1, preflight, "_serve", serve)
    monkeypatch.setattr(preflight, "_CONNECT_S", limit_s := waits.scaled(1))
    (fault,) = report_of(examine(tmp_path, 2, inject)).faults
    assert fault.startswith("rank 0 (")
    expected = (
        f"connected, but data did not arrive within {limit_s:g} s, for example because large packets are dropped (MTU)"
    )
    assert expected in fault


def test_a_rank_that_ends_meanwhile_is_named(tmp_path):
    inject, timeout_s = in_rank(2, preflight, "connect", lambda *_: leave()), waits.scaled(2)
    report = report_of(examine(tmp_path, 3, inject, timeout_s=timeout_s, gone=[2]))
    (fault,) = report.faults
    assert fault == (
        f"rank 2 did not answer within {timeout_s:g} s, testing its connections: it has exited or hangs; see its log"
    )


def test_rank_0_that_ends_is_named(tmp_path):
    inject, timeout_s = in_rank(0, preflight, "judge", lambda *_: leave()), waits.scaled(1)
    results = examine(tmp_path, 3, inject, timeout_s=timeout_s, gone=[0])
    assert results == [
        f"DistributedError: rank 0 did not answer rank {rank} of 3 within {2 * timeout_s:g} s: it has exited or "
        "hangs; see its log"
        for rank in (1, 2)
    ]


def test_a_rank_that_never_comes_is_named(tmp_path):
    timeout_s = waits.scaled(1)
    results = examine(tmp_path, 3, lambda rank: leave() if rank == 1 else None, timeout_s=timeout_s, gone=[1])
    assert results[0] == results[1]
    expected = f"DistributedError: rank 1 of 3 did not check in within {timeout_s:g} s here; ranks 0, 2 did"
    assert results[0].startswith(expected)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_does_not_exist(variable, tmp_path):
    def inject(rank):
        if rank == 1:
            os.environ[variable] = "=no9" if variable.startswith("NCCL") else "no9"

    (fault,) = report_of(examine(tmp_path, 2, inject)).faults
    assert fault.startswith("rank 1 (")
    assert f"{variable}={'=' * variable.startswith('NCCL')}no9 names no interface of this node, which has" in fault


@pytest.mark.parametrize("value", ["l", "=lo", "^docker0", "lo,eth7"])
def test_the_forms_that_nccl_knows(value, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert preflight._wrong_interface("NCCL_SOCKET_IFNAME") is None


def test_the_address_of_an_interface():
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no-such-interface-at-all") is None


# Several nodes, made up


@pytest.fixture
def nodes():
    """Three nodes without a fault."""
    found = Findings(3, False, "at 10.0.0.1:29500, tried from 10.0.0.1")
    for rank in range(3):
        found.nodes[rank] = NodeInfo(
            f"node{rank}", f"10.0.0.{rank + 1}", "eth0", {"torch": "2.13"}, "/data",
            10**11, 10**9, 8, (), 4000 + rank,
        )  # fmt: skip
    found.connections = {pair: "" for pair in permutations(range(3), 2)}
    return found


def test_three_nodes(nodes):
    report = judge(nodes, 1e9)
    assert report.faults == report.notes == ()
    assert report.text.splitlines() == [
        "3 ranks, meeting at 10.0.0.1:29500",
        "rank  host   address   interface  torch  GPUs  free disk",
        "0     node0  10.0.0.1  eth0       2.13   8     100 GB",
        "1     node1  10.0.0.2  eth0       2.13   8     100 GB",
        "2     node2  10.0.0.3  eth0       2.13   8     100 GB",
        "6 connections between pairs",
        "no faults",
    ]


def test_one_address_on_two_nodes(nodes):
    nodes.nodes[2] = replace(nodes.nodes[2], address="10.0.0.2", interface="docker0")
    (fault,) = judge(nodes, 1e9).faults
    assert fault.startswith("ranks 1, 2 are on the hosts node1, node2 and have one address, 10.0.0.2 on eth0: set GLOO")


def test_a_small_shared_memory(nodes):
    nodes.nodes[1] = replace(nodes.nodes[1], shared_memory_bytes=64 * 2**20)
    report = judge(nodes, 1e9)
    assert report.faults == ()
    (note,) = report.notes
    assert note.startswith("/dev/shm of rank 1 has 67.1 MB free")


def test_many_pairs_that_fail(nodes):
    for rank in range(3, 12):
        nodes.nodes[rank] = replace(nodes.nodes[0], host=f"node{rank}", address=f"10.0.0.{rank + 1}")
    nodes.world_size = 12
    nodes.connections = {pair: "" for pair in permutations(range(12), 2)}
    for a in range(8):
        nodes.connections[a, a + 1] = "no answer"
    *first, last = judge(nodes, 1e9).faults
    assert len(first) == 5
    assert last.startswith("3 more pairs cannot connect: 5 to 6, 6 to 7, 7 to 8; let all ports through")


# The command


def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--nodes", "--nproc-per-node", "2", "--folder", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("2 ranks, meeting at 127.0.0.1:")
    assert "no faults\nCommunication Profiling Results:\n2 ranks, gloo\n" in out


def test_the_command_with_a_fault(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--nodes", "--nproc-per-node=1", f"--folder={tmp_path / 'missing'}"]) == 1
    out, err = capfd.readouterr()
    assert out.endswith("1 fault\n")
    assert err.count("\n") == 1  # where the logs are


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2: only with --nodes are these passed to panther launch"),
        (["--folder", "shared"], "--folder is an option of the check between nodes: add --nodes"),
        (["--free-gb", "0"], "--free-gb is an option of the check between nodes: add --nodes"),
        (["--timeout", "5"], "--timeout is an option of the check between nodes: add --nodes"),
        (["--nodes", "--timeout", "0"], "argument --timeout: 0 must be above 0 and finite"),
        (["--nodes", "--timeout", "inf"], "argument --timeout: inf must be finite"),
        (["--nodes", "--free-gb", "-1"], "argument --free-gb: -1 must be at least 0 and finite"),
        (["--nodes", "--free-gb", "some"], "argument --free-gb: 'some' is not a number"),
    ],
)
def test_options_that_cannot_be_used(arguments, message, capsys):
    try:
        status = main(["doctor", *arguments])
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
