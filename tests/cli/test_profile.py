"""panther profile on scripts whose operations and collectives are known."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from panther.cli import main
from panther.cli.profile._recorder import covered


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PANTHER_BACKEND", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


COLLECTIVES = """
import sys
import torch, torch.distributed as dist
from panther.distributed import init, shutdown
init()
x = torch.ones(1000)
for _ in range(7):
    dist.all_reduce(x)
dist.broadcast(x, 0)
work = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
y = torch.eye(300) @ torch.eye(300)
for entry in work:
    entry.wait()
print("arguments", sys.argv[1:])
shutdown()
"""

STEPS = """
import torch
a = torch.nn.Linear(4, 4)
optimizer, other = (torch.optim.SGD(a.parameters(), lr=0.1) for _ in range(2))
for step in range(6):
    for _ in range(step + 1):
        a(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    other.step()
"""


def rows(out):
    """The cells of each line of the tables, by name."""
    lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 2}


def communication_of_trace(path):
    """Calls by name, and ms with at least one under way, from the Chrome trace alone."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"].startswith("gloo:")]
    names = [event["name"] for event in events]
    microseconds, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        microseconds += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return {name: names.count(name) for name in names}, microseconds / 1e3


def share(out):
    """Percent, ms, ms of the whole and exposed ms, as printed."""
    found = re.search(r"Communication: ([\d.]+)% of the time, ([\d.,]+) of ([\d.,]+) ms.*in ([\d.,]+) ms of it", out)
    return [float(number.replace(",", "")) for number in found.groups()]


def check_collectives(out, trace):
    table = rows(out)
    assert table["gloo:all_reduce"][0] == "9"
    assert table["gloo:broadcast"][0] == "1"
    percent, ms, whole, exposed = share(out)
    counts, expected = communication_of_trace(trace)
    assert (counts["gloo:all_reduce"], counts["gloo:broadcast"]) == (9, 1)
    assert ms == pytest.approx(expected, abs=0.02)
    assert percent == pytest.approx(100 * ms / whole, abs=0.1)
    assert 0 <= exposed <= ms <= whole


@pytest.mark.distributed
def test_one_process(capsys):
    Path("work.py").write_text(COLLECTIVES)
    interpreter_state = sys.argv, list(sys.path)
    assert main(["profile", "--top", "100", "work.py", "--lr", "a b"]) == 0
    assert (sys.argv, sys.path) == interpreter_state
    out = capsys.readouterr().out
    assert "arguments ['--lr', 'a b']\n" in out
    assert rows(out)["aten::mm"][0] == "1"
    check_collectives(out, Path("panther-profile/trace.json"))


def test_several_processes_run_this_command(monkeypatch):
    Path("work.py").write_text("")
    seen = []
    monkeypatch.setattr("panther.cli.launch.start", lambda arguments, name: seen.append((arguments, name)) or 3)
    options = ["--nproc-per-node=2", "--backend=gloo", "--steps=4", "--skip=0", "--top=5", "--out=here"]
    assert main(["profile", *options, "work.py", "--steps=1"]) == 3
    passed = ["--out=here", "--top=5", "--steps=4", "--skip=0", "work.py", "--steps=1"]
    assert seen == [
        (["--nproc-per-node=2", "--backend=gloo", "--module", "panther", "profile", *passed], "work.py"),
    ]


def test_ranks_other_than_0_only_run_the_script(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    Path("work.py").write_text("import sys\nprint('ran')\nsys.exit(4)")
    assert main(["profile", "work.py"]) == 4
    assert capsys.readouterr().out == "ran\n"
    assert not Path("panther-profile").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes(capfd):
    """Rank 0 is recorded, and what it prints is shown."""
    Path("work.py").write_text(COLLECTIVES)
    assert main(["profile", "--nproc-per-node=2", "--backend=gloo", "--out=here", "work.py", "x"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("arguments ['x']\n\nProfile of the whole script")
    assert out.count("Profile of") == 1
    assert "rank 0" in out
    assert err.startswith("panther: 2 processes of work.py; logs in panther-logs/work-")
    check_collectives(out, Path("here/trace.json"))


def test_some_steps_only(capsys):
    Path("work.py").write_text(STEPS)
    assert main(["profile", "--steps", "2", "--skip", "3", "work.py"]) == 0
    out = capsys.readouterr().out
    assert "Profile of 2 optimizer steps, " in out
    assert rows(out)["aten::addmm"][0] == str(4 + 5)
    assert "No communication was seen." in out
    for skip in ("6", "7"):
        assert main(["profile", "--steps", "2", "--skip", skip, "work.py"]) == 2
        assert f"work.py made 6 optimizer steps, and --skip {skip} leaves none to record" in capsys.readouterr().err
    assert main(["profile", "--steps", "30", "--top", "3", "work.py"]) == 0
    out, err = capsys.readouterr()
    assert "Profile of 5 optimizer steps, " in out  # the first is skipped
    assert err == "panther: note: work.py made 6 optimizer steps, fewer than --skip 1 and --steps 30 need\n"


def test_module_and_exit_code(capsys, monkeypatch):
    Path("named.py").write_text("import sys, torch\ntorch.ones(2) + 1\nprint(__name__, sys.argv[1:])\nsys.exit(5)")
    assert main(["profile", "-m", "named", "--x"]) == 5
    out = capsys.readouterr().out
    assert "__main__ ['--x']\n" in out
    assert rows(out)["aten::add"][0] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (["--skip", "2", "work.py"], "--skip 2 needs --steps"),
        (["--out", "work.py", "work.py"], "--out work.py cannot be written to"),
    ],
)
def test_bad_requests_are_said_in_a_sentence(arguments, message, capsys):
    Path("work.py").write_text("")
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["work.py"]


def test_a_script_that_raises_is_not_hidden():
    Path("work.py").write_text("raise ValueError('mine')")
    with pytest.raises(ValueError, match="mine"):
        main(["profile", "work.py"])
    torch.profiler.profile().__enter__().__exit__(None, None, None)  # the profiler was stopped


def test_what_was_recorded_before_an_error_is_kept(capsys):
    Path("work.py").write_text(f"{STEPS}    if step == 5:\n        raise ValueError('late')\n")
    Path("panther-profile").mkdir()
    Path("panther-profile/trace.json").write_text("old")
    for options, calls, steps in ((["--steps", "2"], 2 + 3, 2), (["--steps", "9", "--skip", "2"], 3 + 4 + 5 + 6, 4)):
        with pytest.raises(ValueError, match="late"):
            main(["profile", *options, "work.py"])
        out = capsys.readouterr().out
        assert f"Profile of {steps} optimizer steps, " in out
        assert rows(out)["aten::addmm"][0] == str(calls)
        events = json.loads(Path("panther-profile/trace.json").read_text())["traceEvents"]
        assert [event["name"] for event in events].count("aten::addmm") == calls


def test_a_script_that_ends_early_says_all_there_is_to_say(capsys):
    for ending, code in (("sys.exit('mine')", 1), ("sys.exit(4)", 4)):
        Path("work.py").write_text(f"import sys\n{ending}")
        assert main(["profile", "--steps", "2", "work.py"]) == code
        out, err = capsys.readouterr()
        assert (out, err) == ("", "mine\n" if code == 1 else "")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("name", ["nomodule", "no.module", "json"])
def test_a_module_that_cannot_be_run(name, rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    assert main(["profile", "-m", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"panther: error: the module {name} cannot be run: ")
    assert err.count("\n") == 1
    assert not Path("panther-profile/trace.json").exists()


def test_an_import_that_fails_in_a_module_is_its_own(monkeypatch):
    Path("importing.py").write_text("import nowhere_at_all")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        main(["profile", "-m", "importing"])


def test_ranges():
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [tuple(sorted(pair)) for pair in torch.randint(0, 200, (20, 2), generator=generator).tolist()] for _ in range(2)
    )
    cells = [{cell for start, end in ranges for cell in range(start, end)} for ranges in (first, second)]
    assert covered(first) == len(cells[0])
    assert covered(first + second) == len(cells[0] | cells[1])
    assert covered([]) == 0
