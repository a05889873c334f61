"""What panther doctor --nodes finds: on several processes of this machine, each fault put into one of them."""

import json
import os
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import waits

from panther.cli import main
from panther.distributed import preflight
from panther.distributed.comm.store import Meeting, address_of
from panther.distributed.preflight import NodeInfo, judge

pytestmark = pytest.mark.distributed


def examine(tmp_path, n, inject=lambda rank: None, timeout_s=300.0, gone=()):
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
                result = asdict(preflight.check_nodes(meeting, rank, n))
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


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_wrong(n, tmp_path):
    report = report_of(examine(tmp_path, n))
    assert report.faults == []
    assert report.text.splitlines()[0] == f"{n} rank{'s' * (n > 1)}, meeting here"
    assert len([line for line in report.text.splitlines() if "127.0.0.1" in line]) == n
    assert report.text.endswith("no faults")


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


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_ends_meanwhile_is_named(victim, tmp_path):
    inject, timeout_s = in_rank(victim, preflight, "_describe_node", lambda _: leave()), waits.scaled(2)
    results = examine(tmp_path, 3, inject, timeout_s=timeout_s, gone=[victim])
    error = f"DistributedError: rank {victim} did not describe the node within {timeout_s:g} s and has exited or hangs"
    assert results == [f"{error}: see its log"] * 2


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
    return {rank: NodeInfo(f"node{rank}", f"10.0.0.{rank + 1}", "eth0", {"torch": "2.13"}, 8, ()) for rank in range(3)}


def test_three_nodes(nodes):
    report = judge(nodes, False, "at 10.0.0.1:29500, tried from 10.0.0.1")
    assert report.faults == ()
    assert report.text.splitlines() == [
        "3 ranks, meeting at 10.0.0.1:29500",
        "rank  host   address   interface  torch  GPUs",
        "0     node0  10.0.0.1  eth0       2.13   8",
        "1     node1  10.0.0.2  eth0       2.13   8",
        "2     node2  10.0.0.3  eth0       2.13   8",
        "no faults",
    ]


def test_one_address_on_two_nodes(nodes):
    nodes[2] = replace(nodes[2], address="10.0.0.2", interface="docker0")
    (fault,) = judge(nodes, False, "at 10.0.0.1:29500").faults
    assert fault.startswith("ranks 1, 2 are on the hosts node1, node2 and have one address, 10.0.0.2 on eth0: set GLOO")


# The command


def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--nodes", "--nproc-per-node", "2"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("2 ranks, meeting at 127.0.0.1:")
    assert "no faults\nCommunication Profiling Results:\n2 ranks, gloo\n" in out


def test_the_command_with_a_fault(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=no9")
    assert main(["doctor", "--nodes", "--nproc-per-node=1"]) == 1
    out, err = capfd.readouterr()
    assert out.endswith("1 fault\n")
    assert err.count("\n") == 1  # where the logs are


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2: only with --nodes are these passed to panther launch"),
        (["--timeout", "5"], "--timeout is an option of the check between nodes: add --nodes"),
        (["--nodes", "--timeout", "0"], "argument --timeout: 0 must be above 0 and finite"),
        (["--nodes", "--timeout", "inf"], "argument --timeout: inf must be finite"),
    ],
)
def test_options_that_cannot_be_used(arguments, message, capsys):
    try:
        status = main(["doctor", *arguments])
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
