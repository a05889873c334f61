"""Run the project's checks: ``checks.py test``, ``checks.py ci`` and ``checks.py verify [PART ...]``.

``test`` runs every behaviour once. ``ci`` adds lint, the documentation with a sixth of the gallery's scripts, and a
share of the longer sets of tests, and ends within a limit: the sets are divided into six shares of equal measured
seconds, and a run takes the share whose number is the number of commits modulo 6. What is left of the time goes to the
longer sets of the folders that changed in the last twenty commits, the most recently changed folder first. ``verify``
runs everything, in parts: ``test``, ``lint``, ``docs``, ``all``, ``isa``, ``kernels`` and ``engines``. It continues
after an interruption: a command that passed for the same commit does not run again.

The last line of the output is the sum of the tests. This file uses the standard library only, because the installation
of everything else is one of its commands.
"""

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import count_lines
from command_queue import Command, CommandQueue
from instruction_sets import FILES, FOLDERS, instruction_set_variables

ROOT = Path(__file__).parents[2]
# The processor seconds of each unit, which divide the longer sets into shares, start the longest commands first, and
# tell what would not end before the limit. ``checks.py verify --record`` writes the file anew.
SECONDS_FILE = Path(__file__).with_name("seconds.csv")
NUM_SHARES = 6
# Of a unit that is not in the file, because it is new or takes less than a second.
DEFAULT_SECONDS = 0.5
# Importing torch and collecting the tests, before the first test of a command runs.
START_SECONDS = 8.0

CI_LIMIT_S = 20 * 60
PARTS = ("test", "lint", "docs", "all", "isa", "kernels", "engines")
STATE_FOLDER = ROOT / ".checks"
GALLERY = ROOT / "docs/gallery"

# Paths of the tests with the mark `engine`. conftest.py refuses the mark elsewhere.
ENGINE_PATHS = ("tests/integrations", "tests/cli/test_init_schemas.py", "panther/integrations", "panther/tuning")

TEST_MARKS = "not (gpu or slow or tool or torture or engine or engine_slow or extra)"
ALL_MARKS = "(slow or tool or fuzz or extra) and not (torture or gpu or engine or engine_slow)"
ISA_MARKS = "not (fuzz or slow or tool or torture or extra or gpu)"

# Priorities of commands: what others wait for, what every run has, the share, and what changed recently.
FIRST, ALWAYS, SHARE, RECENT = range(4)

# pip compiles 20,000 files on one core, and most of them are never imported. So pip does not compile, and the libraries
# that every test imports are compiled on all cores, because the first test should not be charged with them. That a
# file for a newer Python cannot be compiled does not matter.
COMPILED = ("install test", "install all")
_LIBRARIES = "torch sympy numpy scipy networkx triton hypothesis _pytest"
_COMPILE = f"cd .venv/lib/python3*/site-packages; ../../../bin/python -m compileall -q -j 0 {_LIBRARIES}"

INSTALL_SECONDS = {
    "install test": 110,
    "install all": 190,
    "install engines": 190,
    "install browser": 60,
    "install oldest triton": 30,
}

# The chips for which all kernels are compiled, by the newest and by the oldest supported version of Triton.
KERNEL_CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
KERNEL_SECONDS = 480


@dataclass(frozen=True)
class Unit:
    """One test file, or one folder of pages or docstrings, in one set of tests, and the seconds that its tests take."""

    set_name: str
    path: str
    seconds: float

    @property
    def folder(self):
        """Return the name of the part of the library that the unit tests, such as ``nn``."""
        parts = Path(self.path).parts
        name = parts[1] if len(parts) > 1 and parts[0] in ("tests", "panther") else parts[0]
        return re.sub(r"^test_|\.(py|rst)$", "", name)


def read_seconds(path=SECONDS_FILE):
    """Return the measured seconds by set and path."""
    return parse_seconds(path.read_text()) if path.exists() else {}


def parse_seconds(text):
    """Return the seconds by set and path that the text of a file holds."""
    return {(row["set"], row["path"]): float(row["seconds"]) for row in csv.DictReader(text.splitlines())}


def write_seconds(seconds, path=SECONDS_FILE):
    """Write ``seconds``, by set and path, and leave out what takes less than a second."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["set", "path", "seconds"])
        for (set_name, unit_path), value in sorted(seconds.items()):
            if value >= 1:
                writer.writerow([set_name, unit_path, f"{value:.0f}"])


def paths_of_tests(root=ROOT):
    """Return every path that may hold tests: test files, sub-packages with docstrings, and folders of pages."""
    paths = [str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py")]
    for path in root.glob("panther/*"):
        if path.suffix == ".py" or (path / "__init__.py").exists():
            paths.append(str(path.relative_to(root)))
    for path in root.glob("docs/*"):
        if path.suffix == ".rst" or (path.is_dir() and any(path.glob("**/*.rst")) and path.name[0] not in "_."):
            paths.append(str(path.relative_to(root)))
    return sorted(set(paths) - {"docs/examples", "docs/gallery"})


def unit_path(test_file, paths):
    """Return which of ``paths`` contains the file of a test."""
    candidates = [Path(test_file), *Path(test_file).parents]
    return next((str(path) for path in candidates if str(path) in paths), None)


def units_of(set_name, paths, seconds):
    """Return the units of a set, in the order of their paths."""
    return [Unit(set_name, path, seconds.get((set_name, path), DEFAULT_SECONDS)) for path in sorted(paths)]


def divide(units, num_parts):
    """Divide ``units``, in their order, into ``num_parts`` consecutive lists of about equal seconds."""
    total, begun = sum(unit.seconds for unit in units), 0.0
    parts = [[] for _ in range(num_parts)]
    for unit in units:
        middle = begun + unit.seconds / 2
        parts[min(num_parts - 1, int(num_parts * middle / total))].append(unit)
        begun += unit.seconds
    return parts


def pack(units, command_seconds):
    """Group the units of one set into lists of about ``command_seconds``, for one pytest process each, by name.

    Docstrings and pages have processes of their own: they leave threads behind, and a test that forks such a process
    can hang.
    """
    groups = {}
    for kind in ("tests", "pages"):
        members = [unit for unit in units if unit.path.startswith("tests/") == (kind == "tests")]
        parts = divide(members, math.ceil(sum(unit.seconds for unit in members) / command_seconds))
        for number, part in enumerate(filter(None, parts), 1):
            groups[f"{kind} {number}/{len(parts)}, {part[0].folder} to {part[-1].folder}"] = part
    return groups


@dataclass(frozen=True)
class SetOfTests:
    """One of the longer sets of tests: which paths it has, and how pytest runs them."""

    name: str
    paths: list
    options: tuple
    variables: dict
    environment: str = ".venv"
    installation: str = "install all"


def longer_sets(paths, fuzz_examples):
    """Return the sets of tests that ``make test`` leaves out."""
    limit = ("--timeout", "900")
    variables = {"PANTHER_FUZZ_EXAMPLES": str(fuzz_examples)}
    sets = [SetOfTests("all", paths, ("-m", ALL_MARKS, *limit), variables)]
    for name, variables, has_all_files in instruction_set_variables():
        files = _inside(paths, FOLDERS) if has_all_files else FILES
        options = ("-m", ISA_MARKS, "-k", "not compile and not export", *limit)
        sets.append(SetOfTests(f"isa {name}", files, options, variables))
    engine_paths = [*_inside(paths, ENGINE_PATHS), "docs/howto"]
    options = ("-m", "engine", *limit)
    return [*sets, SetOfTests("engines", engine_paths, options, {}, ".venv-engines", "install engines")]


def _inside(paths, folders):
    return [path for path in paths if any(path == folder or path.startswith(f"{folder}/") for folder in folders)]


def longer_units(sets, seconds):
    """Return the units of all longer sets; one unit without a path stands for installing the engines."""
    units = [unit for tests in sets for unit in units_of(tests.name, tests.paths, seconds)]
    return [*units, Unit("engines", "", INSTALL_SECONDS["install engines"])]


def recent_units(units, changed_files):
    """Return the units of the folders that ``changed_files`` are in, in the order of these files.

    Docstrings and pages without measured seconds are left out: they have next to no test in the set, and starting
    pytest takes longer. Test files without measured seconds stay, because they may be new.
    """
    folders = dict.fromkeys(_tested_folder(file) for file in changed_files)
    units = [unit for unit in units if unit.path.startswith("tests/") or unit.seconds > DEFAULT_SECONDS]
    return [unit for folder in folders for unit in units if unit.path and unit.folder == folder]


def _tested_folder(file):
    parts = Path(file).parts
    if parts[0] == "kernels":
        return "kernels"
    return Unit("", file, 0.0).folder


def quick_commands(paths, seconds, environment=".venv", options=(), installation="install test", **fields):
    """Return the commands of ``make test``."""
    # Fewer and longer commands import torch and start processes for ranks less often.
    groups = pack(units_of("test", paths, seconds), command_seconds=150)
    tests = SetOfTests("test", paths, ("-m", TEST_MARKS, *options), {}, environment, installation)
    return [_pytest(tests, name, group, priority=ALWAYS, **fields) for name, group in groups.items()]


def longer_commands(sets, units, **fields):
    """Return the commands that run ``units`` of the longer sets."""
    commands = []
    for tests in sets:
        groups = pack([unit for unit in units if unit.set_name == tests.name and unit.path], command_seconds=120)
        commands += [_pytest(tests, name, group, **fields) for name, group in groups.items()]
    return commands


def _pytest(tests, name, group, variables=(), label="", **fields):
    # The built site is tested with the browser, in the set `all`.
    needs_site = tests.name == "all" and any(unit.path.startswith("tests/docs") for unit in group)
    return Command(
        f"{label}{tests.name}: {name}",
        (f"{tests.environment}/bin/pytest", *(unit.path for unit in group), *tests.options),
        seconds=START_SECONDS + sum(unit.seconds for unit in group),
        needs=frozenset({tests.installation}),
        after=frozenset({"docs", "install browser"} if needs_site else ()),
        variables={"OMP_NUM_THREADS": "1", **tests.variables, **dict(variables)},
        is_pytest=True,
        **fields,
    )


def tool_commands(names):
    """Return the commands among ``names`` that are no tests: installations, lint and documentation."""
    targets = {
        "install test": ".venv/.test-stamp",
        "install all": ".venv/.all-stamp",
        "install engines": ".venv-engines/.stamp",
        "install browser": "browser",
        "install oldest triton": ".triton-oldest/.stamp",
        "lint": "lint",
        "docs": "docs",
    }
    return [
        Command(
            name,
            ("sh", "-c", f"make {targets[name]} && ({_COMPILE} || true)")
            if name in COMPILED
            else ("make", targets[name]),
            seconds=INSTALL_SECONDS.get(name, 150),
            priority=FIRST if name in INSTALL_SECONDS else ALWAYS,
            needs=frozenset({"install all"} if name not in INSTALL_SECONDS or "triton" in name else ()),
            # For pip, the value 0 means that it does not compile what it installs.
            variables={"PIP_NO_COMPILE": "0"} if name in INSTALL_SECONDS else {},
        )
        for name in names
    ]


def kernel_commands():
    """Return the commands that compile all kernels for GPUs that are not there, which fail if registers spill."""
    variables = {"newest": {}, "oldest": {"PYTHONPATH": ".triton-oldest"}}
    return [
        Command(
            f"kernels: {chip}, {version} triton",
            (".venv/bin/python", "-m", "benchmarks.gpu.kernel_resources", "--chip", chip, "--processes", "1"),
            seconds=KERNEL_SECONDS,
            priority=SHARE,
            needs=frozenset({"install oldest triton" if version == "oldest" else "install all"}),
            variables={"OMP_NUM_THREADS": "1", **variables[version]},
        )
        for version in variables
        for chip in KERNEL_CHIPS
    ]


def ci_commands(paths, seconds, num_commits, changed_files):
    """Return the commands of ``.ci/run`` for this number of commits and the files that the last ones changed."""
    strict = {"PANTHER_TOLERANCE_MARGIN": "4"}
    sets = longer_sets(paths, fuzz_examples=50)
    units = longer_units(sets, seconds)
    share = divide(units, NUM_SHARES)[num_commits % NUM_SHARES]
    share_has_engines = any(unit.set_name == "engines" for unit in share)
    recent = [
        unit
        for unit in recent_units(units, changed_files)
        # Installing the engines for a few tests takes more time than the tests.
        if unit not in share and (share_has_engines or unit.set_name != "engines")
    ]
    scripts = {"PANTHER_DOCS_SCRIPTS": " ".join(gallery_scripts(num_commits, changed_files))}
    commands = [
        replace(command, variables=command.variables | scripts, seconds=100) if command.name == "docs" else command
        for command in tool_commands(["install all", "install browser", "lint", "docs"])
    ]
    commands += tool_commands(["install engines"]) if share_has_engines else []
    commands += quick_commands(paths, seconds, installation="install all", variables=strict)
    commands += longer_commands(sets, share, priority=SHARE, optional=True)
    for position, folder in enumerate(dict.fromkeys(unit.folder for unit in recent)):
        members = [unit for unit in recent if unit.folder == folder]
        label = f"recent {folder}, "
        commands += longer_commands(sets, members, label=label, priority=RECENT + position, optional=True)
    return commands


def verify_commands(paths, seconds, parts):
    """Return the commands of the named parts of ``make verify``."""
    strict = {"PANTHER_TOLERANCE_MARGIN": "4"}
    tests = quick_commands(paths, seconds, variables=strict) if "test" in parts else []
    sets = [tests for tests in longer_sets(paths, fuzz_examples=200) if tests.name.split()[0] in parts]
    tools = [name for name in ("lint", "docs") if name in parts]
    if sets or tools:
        tools += ["install all"]
    if "all" in parts:
        tools += ["install browser", "docs"]
    if "engines" in parts:
        tools += ["install engines"]
    kernels = kernel_commands() if "kernels" in parts else []
    if kernels:
        tools += ["install all", "install oldest triton"]
    if tests:
        tools += ["install test"]
    # `make test` runs with just what it installs: the other extras come afterwards.
    before = {"install all": {"install test", *(command.name for command in tests)}}
    commands = [
        replace(command, after=command.after | before.get(command.name, set()))
        for command in tool_commands(dict.fromkeys(tools))
    ]
    return commands + tests + longer_commands(sets, longer_units(sets, seconds), priority=SHARE) + kernels


def gallery_scripts(num_commits, changed_files):
    """Return the scripts of the gallery that ``.ci/run`` executes: a sixth of them, and those that changed."""
    scripts = sorted(str(path.relative_to(GALLERY)) for path in GALLERY.glob("*/*.py"))
    changed = {
        str(Path(file).relative_to("docs/gallery")) for file in changed_files if file.startswith("docs/gallery/")
    }
    return [
        script
        for position, script in enumerate(scripts)
        if position % NUM_SHARES == num_commits % NUM_SHARES or script in changed
    ]


def git_state():
    """Return the number of commits, and the files that the last twenty changed, the most recent commit first."""
    count = _git("rev-list", "--count", "HEAD")
    files = _git("log", "-20", "--name-only", "--format=")
    return int(count or 0), list(dict.fromkeys(filter(None, files.splitlines())))


def _git(*arguments):
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


class Progress:
    """The commands of ``make verify`` that have passed for the commit that is checked out.

    Nothing is remembered while files differ from the commit, because then the commit does not say what was tested.
    """

    def __init__(self, path=STATE_FOLDER / "verified.json"):
        self._path = path
        # A run with --record writes the seconds while it goes on.
        changed = _git("status", "--porcelain", "--", ".", f":!{SECONDS_FILE.relative_to(ROOT)}")
        self._commit = "" if changed else _git("rev-parse", "HEAD")
        state = json.loads(path.read_text()) if path.exists() else {}
        self.passed = state.get("passed", []) if self._commit and state.get("commit") == self._commit else []

    def add(self, outcome):
        """Remember that the command of ``outcome`` passed."""
        if outcome.passed and self._commit:
            self.passed.append(outcome.command.name)
            self._path.write_text(json.dumps({"commit": self._commit, "passed": self.passed}))


def main(arguments=None):
    """Run the checks that the command line names, and return the exit code."""
    options = _options(arguments)
    paths, seconds = paths_of_tests(), read_seconds()
    STATE_FOLDER.mkdir(exist_ok=True)
    progress = Progress() if options.checks == "verify" else None
    if options.checks == "test":
        commands = quick_commands(paths, seconds, options.environment, options.pytest)
    elif options.checks == "ci":
        commands = ci_commands(paths, seconds, *git_state())
    else:
        # The seconds of the commit, because a run with --record has changed the file: other seconds would divide the
        # sets in another way, and what has passed would run again.
        committed = parse_seconds(_git("show", f"HEAD:{SECONDS_FILE.relative_to(ROOT)}"))
        commands = verify_commands(paths, committed or seconds, options.parts or PARTS)
        if repeated := [command.name for command in commands if command.name in progress.passed]:
            print(f"Passed before, for this commit, and not run again: {', '.join(repeated)}")
        commands = [command for command in commands if command.name not in progress.passed]
    with tempfile.TemporaryDirectory(prefix="run-", dir=STATE_FOLDER) as folder:
        queue = CommandQueue(
            commands,
            folder,
            num_workers=max(2, min(8, len(os.sched_getaffinity(0)))),
            limit_s=options.limit_s if options.checks == "ci" else None,
        )

        def on_end(outcome):
            if options.record:
                _record(outcome, paths)
            if progress is not None:
                progress.add(outcome)

        queue.run(on_end)
    if options.checks == "verify":
        print("\n" + "\n".join(count_lines.table(count_lines.last_release())))
    return _summarise(queue)


def _options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    checks = parser.add_subparsers(dest="checks", required=True)
    test = checks.add_parser("test", help="every behaviour once")
    test.add_argument("--environment", default=".venv", help="folder of the virtual environment")
    test.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    ci = checks.add_parser("ci", help="every behaviour once, lint, documentation, and a share of the longer sets")
    ci.add_argument("--limit-s", type=float, default=CI_LIMIT_S, help="seconds after which no longer set runs")
    verify = checks.add_parser("verify", help="everything, or the named parts")
    verify.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    for command in (test, verify):
        command.add_argument("--record", action="store_true", help="write the measured seconds to seconds.csv")
    options = parser.parse_args(arguments, argparse.Namespace(record=False, parts=[]))
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}: the parts are {', '.join(PARTS)}")
    return options


def _record(outcome, paths):
    """Replace the seconds of the units that a command ran by the measured ones in the file."""
    measured = Counter()
    set_name = outcome.command.name.partition(":")[0]
    for file, value in outcome.file_seconds.items():
        if path := unit_path(file, paths):
            measured[set_name, path] += value
    write_seconds(read_seconds() | measured)


def _summarise(queue):
    counts = sum((outcome.counts for outcome in queue.outcomes), Counter())
    failed = [outcome.command.name for outcome in queue.outcomes if not outcome.passed]
    print("\nSeconds by command:")
    for outcome in sorted(queue.outcomes, key=lambda outcome: -outcome.seconds):
        print(f"{outcome.seconds:6.0f}  (expected {outcome.command.seconds:.0f})  {outcome.command.name}")
    if queue.left_out:
        print("Left out, because the limit left no time:")
        for command in queue.left_out:
            print(f"        (expected {command.seconds:.0f})  {command.name}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    print(f"All commands took {queue.elapsed_s:.0f} s.")
    print(f"{counts['passed']} passed, {counts['failed'] + counts['errors']} failed, {counts['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
