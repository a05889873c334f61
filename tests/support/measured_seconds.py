"""What the checks consist of, and how long each part took when it was last measured.

A *unit* is one test file, or one folder of pages or docstrings, in one set of tests. ``seconds.csv`` holds the seconds
of each unit. They are used to divide the longer sets into shares of equal duration, to start the longest commands
first, and to leave out what would not end before the limit. ``python tests/support/checks.py verify --record`` writes
the file anew.
"""

import csv
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS_FILE = Path(__file__).with_name("seconds.csv")
NUM_SHARES = 6

# A unit that is not in the file, because it is new or takes less than a second, is counted with this many seconds.
DEFAULT_SECONDS = 0.5
# A unit of a set of which no unit was measured, so that a new set is not one command for one core.
UNMEASURED_SECONDS = 15.0
# Importing torch and collecting the tests, before the first test of a command runs.
START_SECONDS = 8.0


@dataclass(frozen=True)
class Unit:
    """A path that pytest collects in the set of tests ``set_name``, and the seconds that its tests take."""

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
    is_measured = any(name == set_name for name, _ in seconds)
    default = DEFAULT_SECONDS if is_measured else UNMEASURED_SECONDS
    return [Unit(set_name, path, seconds.get((set_name, path), default)) for path in sorted(paths)]


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
    """Group the units of one set into lists for one pytest process each, by name.

    A folder that takes more than ``command_seconds`` is divided; folders that take less share a process. Docstrings and
    pages have processes of their own: they leave threads behind, and a test that forks such a process can hang.
    """
    groups = {}
    for is_test in (True, False):
        groups |= _packed([unit for unit in units if unit.path.startswith("tests/") == is_test], command_seconds)
    return groups


def _packed(units, command_seconds):
    folders = defaultdict(list)
    for unit in units:
        folders[unit.folder if unit.path.startswith("tests/") else "docstrings and pages"].append(unit)
    groups, small, small_names = {}, [], []
    for name, members in sorted(folders.items()):
        total = sum(unit.seconds for unit in members)
        if total > command_seconds / 2:
            parts = [part for part in divide(members, math.ceil(total / command_seconds)) if part]
            for number, part in enumerate(parts, 1):
                groups[f"{name} {number}/{len(parts)}" if len(parts) > 1 else name] = part
            continue
        if small and sum(unit.seconds for unit in small) + total > command_seconds:
            groups[_range_name(small_names)] = small
            small, small_names = [], []
        small, small_names = small + members, [*small_names, name]
    if small:
        groups[_range_name(small_names)] = small
    return groups


def _range_name(names):
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
