"""The queue and the shares of the checks: nothing is left out unseen, and the limit wins."""

import sys

import checks
import count_lines
from checks import NUM_SHARES, Unit, divide, pack
from command_queue import Command, CommandQueue

PATHS = [f"tests/{folder}/test_{name}.py" for folder in ("cli", "linalg", "nn", "train") for name in "abcdef"]
PATHS += ["tests/cli/test_init_schemas.py", "tests/docs/test_site.py", "docs/howto", "panther/nn"]
SECONDS = {("all", path): 10.0 * index for index, path in enumerate(PATHS)} | {("engines", "docs/howto"): 60.0}


def selected(commands):
    """Return the pairs of set and path that the commands of pytest run."""
    pairs = []
    for command in commands:
        if command.is_pytest:
            name = command.name.partition(":")[0].rpartition(", ")[2]
            pairs += [(name, argument) for argument in command.arguments if argument in measured]
    return pairs


measured = set(checks.paths_of_tests()) | set(PATHS)


def test_shares_have_equal_seconds_and_contain_every_unit_once():
    units = checks.longer_units(checks.longer_sets(PATHS, 50), SECONDS)
    shares = divide(units, NUM_SHARES)
    assert [unit for share in shares for unit in share] == units
    seconds = [sum(unit.seconds for unit in share) for share in shares]
    assert max(seconds) - min(seconds) <= 2 * max(unit.seconds for unit in units)


def test_six_commits_in_a_row_run_what_verify_runs_beside_make_test():
    runs = [checks.ci_commands(PATHS, SECONDS, number, []) for number in range(7, 7 + NUM_SHARES)]
    whole = checks.verify_commands(PATHS, SECONDS, checks.PARTS)
    longer = [pair for commands in runs for pair in selected(commands) if pair[0] != "test"]
    assert sorted(longer) == sorted(pair for pair in selected(whole) if pair[0] != "test")
    for commands in runs:
        names = [command.name for command in commands]
        assert len(set(names)) == len(names)
        assert {"lint", "docs"} < set(names)
        assert sorted(path for name, path in selected(commands) if name == "test") == sorted(PATHS)
        engines = any(command.needs == {"install engines"} for command in commands)
        assert engines == ("install engines" in names)


def test_verify_compiles_the_kernels_with_two_versions_of_triton():
    commands = {command.name: command for command in checks.verify_commands(PATHS, SECONDS, ["kernels"])}
    oldest, newest = (commands[f"kernels: sm_90, {version} triton"] for version in ("oldest", "newest"))
    assert oldest.variables["PYTHONPATH"] == ".triton-oldest"
    assert "PYTHONPATH" not in newest.variables
    assert oldest.needs == {"install oldest triton"}
    assert commands["install oldest triton"].needs == newest.needs == {"install all"}


def test_six_commits_in_a_row_execute_the_whole_gallery():
    changed = "docs/gallery/compress/vision.py"
    runs = [checks.gallery_scripts(number, [changed, "README.md"]) for number in range(7, 7 + NUM_SHARES)]
    assert all("compress/vision.py" in scripts for scripts in runs)
    every = [str(path.relative_to(checks.GALLERY)) for path in checks.GALLERY.glob("*/*.py")]
    assert sorted({script for scripts in runs for script in scripts}) == sorted(every)
    assert sum(map(len, runs)) == len(every) + NUM_SHARES - 1


def test_every_test_file_is_in_a_unit():
    paths = checks.paths_of_tests()
    for file in ("tests/test_checks.py", "tests/nn/test_linear.py", "panther/nn/linear.py", "docs/howto/keras.rst"):
        assert checks.unit_path(file, paths)


def test_recently_changed_folders_come_first():
    changed = ["kernels/ops/x.py", "panther/nn/linear.py", "README.md", "tests/train/test_a.py"]
    commands = checks.ci_commands(PATHS, SECONDS, 0, changed)
    recent = sorted((c for c in commands if c.name.startswith("recent ")), key=lambda command: command.priority)
    folders = dict.fromkeys(command.name.partition(",")[0] for command in recent)
    assert list(folders) == ["recent kernels", "recent nn", "recent train"]
    assert len({command.name for command in commands}) == len(commands)
    assert all(command.optional for command in recent)


def test_what_has_no_test_in_a_set_does_not_start_pytest():
    units = [Unit("all", "panther/nn", 0.5), Unit("all", "tests/nn/test_new.py", 0.5), Unit("isa", "panther/nn", 2.0)]
    assert checks.recent_units(units, ["panther/nn/linear.py"]) == units[1:]


def test_units_are_packed_into_commands_of_about_equal_seconds():
    units = [Unit("test", f"tests/{folder}/test_{name}.py", 30.0) for folder in ("a", "b", "nn") for name in "abcd"]
    groups = pack([*units, Unit("test", "panther/nn", 1.0)], command_seconds=120)
    assert {name: sum(unit.seconds for unit in group) for name, group in groups.items()} == {
        "tests 1/3, a to a": 120, "tests 2/3, b to b": 120, "tests 3/3, nn to nn": 120, "pages 1/1, nn to nn": 1,
    }  # fmt: skip


def python(name, code, **fields):
    return Command(name, (sys.executable, "-c", code), **fields)


def test_the_limit_leaves_out_and_stops_what_is_optional(tmp_path):
    lines = []
    queue = CommandQueue(
        [
            python("always", "print('whole output'); raise SystemExit(3)", seconds=900, priority=0),
            python("waits", "", seconds=1, after=frozenset({"always"})),
            python("needs it", "", seconds=1, needs=frozenset({"always"})),
            python("hangs", "while True: pass", seconds=0, priority=2, optional=True),
            python("too long", "", seconds=500, priority=3, optional=True),
        ],
        tmp_path,
        limit_s=2,
        show=lines.append,
    )
    queue.run()
    assert [(outcome.command.name, outcome.passed) for outcome in queue.outcomes] == [
        ("always", False),
        ("waits", True),
        ("needs it", False),
    ]
    assert sorted(command.name for command in queue.left_out) == ["hangs", "too long"]
    assert any("whole output" in line for line in lines)


def test_results_of_pytest_are_counted(tmp_path):
    (tmp_path / "test_all.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "def test_c(): pytest.skip()\n"
        "def test_d(no_fixture): pass\n"
    )
    command = (sys.executable, "-m", "pytest", "-p", "conftest", str(tmp_path))
    variables = {"PYTHONPATH": str(checks.ROOT / "tests/support")}
    tests = Command("test: it", command, 1, variables=variables, is_pytest=True)
    queue = CommandQueue([tests], tmp_path, show=lambda line: None)
    queue.run()
    assert queue.outcomes[0].counts == {"passed": 1, "failed": 1, "skipped": 1, "errors": 1}


def test_pytest_that_ends_before_its_summary_has_an_error(tmp_path):
    queue = CommandQueue(
        [python("test: it", "raise SystemExit(2)", seconds=1, is_pytest=True)], tmp_path, show=lambda line: None
    )
    queue.run()
    assert [outcome.counts for outcome in queue.outcomes] == [{"errors": 1}]


def test_seconds_that_were_recorded_do_not_divide_what_continues(tmp_path, monkeypatch):
    """Of a run with --record that was interrupted, the commands that passed must be found again."""
    committed = checks.read_seconds()
    divided = []
    monkeypatch.setattr(checks, "read_seconds", lambda: {unit: 7 * seconds for unit, seconds in committed.items()})
    monkeypatch.setattr(checks, "verify_commands", lambda paths, seconds, parts: divided.append(seconds) or [])
    monkeypatch.setattr(checks, "STATE_FOLDER", tmp_path)
    assert checks.main(["verify"]) == 0
    assert divided[0] == checks.parse_seconds(checks._git("show", "HEAD:tests/support/seconds.csv"))
    assert divided[0]


def test_the_table_of_lines_has_the_lines_of_a_revision_beside_those_of_today():
    *packages, total = (line.split() for line in count_lines.table("HEAD")[1:])
    assert {"kernels", "panther/nn"} <= {package for package, *_ in packages}
    assert total[:2] == ["in", "all"]
    assert int(total[2].replace(",", "")) == sum(int(row[1].replace(",", "")) for row in packages)
    assert total[-1].replace(",", "").isdigit() or total[-1] == "-"


def test_the_table_of_lines_does_without_history():
    assert all(line.endswith("-") for line in count_lines.table("no-such-revision")[1:-1])
