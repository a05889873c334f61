"""The queue and the shares of the checks: nothing is left out unseen, and the limit wins."""

import sys

import checks
from checks import NUM_SHARES
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
