"""Run commands side by side, one for each core, the longest first, and end within a limit.

This file uses the standard library only, because the installation of everything else is one of the commands. Not
pytest-xdist: its workers have a thread, and forking a process that has threads can hang.
"""

import json
import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRESS_S = 30
_REMOVED_VARIABLES = ("MAKEFLAGS", "MAKELEVEL", "PYTHONDONTWRITEBYTECODE")
_TAIL_CHARACTERS = 60_000
# An optional command is started only if it is expected to end within the limit with this factor to spare.
_SAFETY = 1.2


def _show(line):
    print(line, flush=True)


@dataclass(frozen=True)
class Command:
    """One entry of the queue.

    Attributes:
        name: What the log calls the command, such as ``test nn``.
        arguments: Program and arguments.
        seconds: Expected duration, in seconds of the reference machine.
        priority: Commands of a smaller number are started first; the longest first among equals.
        optional: Whether the command is left out, or stopped, where the limit leaves no time for it.
        after: Names of the commands that must have ended before this one starts.
        needs: Names of the commands that must also have succeeded.
        variables: Environment variables in addition to those of this process.
        is_pytest: Whether the command is pytest, which then reports the result of every test in a file.
    """

    name: str
    arguments: tuple
    seconds: float
    priority: int = 1
    optional: bool = False
    after: frozenset = frozenset()
    needs: frozenset = frozenset()
    variables: dict = field(default_factory=dict)
    is_pytest: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        command: The command.
        counts: Number of tests by ``passed``, ``failed``, ``errors`` and ``skipped``.
        seconds: Duration of the command.
        file_seconds: Seconds of processor time by test file.
        passed: Whether the command succeeded.
    """

    command: Command
    counts: Counter
    seconds: float
    file_seconds: dict
    passed: bool


class CommandQueue:
    """Commands that wait, run and have ended.

    Args:
        commands: The commands. A command does not wait for names that are not in the queue.
        folder: Folder for the logs and the results of the commands.
        num_workers: How many commands run at a time.
        limit_s: Seconds after which no optional command runs, or None for no limit. It holds on a machine as fast as
            the reference machine or slower; on a faster machine it shrinks with the measured ratio.
        show: Function that prints a line.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, commands, folder, num_workers=2, limit_s=None, show=_show, clock=time.monotonic):
        self._waiting = sorted(commands, key=lambda command: (command.priority, -command.seconds))
        self._folder, self._num_workers, self._limit_s = folder, num_workers, limit_s
        self._show, self._clock, self._begun = show, clock, clock()
        self._running, self.outcomes, self.left_out = [], [], []

    def run(self, on_end=lambda outcome: None):
        """Run all commands, and call ``on_end`` with the outcome of each."""
        shown = self._clock()
        try:
            while self._waiting or self._running:
                for process in [process for process in self._running if process.ended()]:
                    self._running.remove(process)
                    outcome = process.outcome(self._clock())
                    self.outcomes.append(outcome)
                    self._report(outcome, process)
                    on_end(outcome)
                self._stop_late_commands()
                self._start_commands()
                time.sleep(0.1)
                if self._running and self._clock() - shown > _PROGRESS_S:
                    shown = self._clock()
                    names = [f"{process.command.name} ({shown - process.begun:.0f} s)" for process in self._running]
                    self._show(f"{shown - self._begun:5.0f} s  running: {', '.join(names)}")
        finally:
            for process in self._running:
                process.stop()

    @property
    def elapsed_s(self):
        """Return the seconds since the queue was made."""
        return self._clock() - self._begun

    @property
    def slowness(self):
        """Return the measured seconds of the commands that have ended divided by their expected seconds."""
        outcomes = [outcome for outcome in self.outcomes if outcome.command.is_pytest]
        expected = sum(outcome.command.seconds for outcome in outcomes)
        return sum(outcome.seconds for outcome in outcomes) / expected if expected > 60 else 1.0

    @property
    def seconds_left(self):
        """Return the seconds until the limit; infinity without one."""
        if self._limit_s is None:
            return float("inf")
        limit_s = self._limit_s * min(1.0, max(0.5, self.slowness))
        return limit_s - self.elapsed_s

    def _start_commands(self):
        for command in list(self._waiting):
            if len(self._running) >= self._num_workers:
                return
            unfinished = {other.name for other in self._waiting} | {other.command.name for other in self._running}
            if (command.after | command.needs) & unfinished:
                continue
            self._waiting.remove(command)
            failed = {outcome.command.name for outcome in self.outcomes if not outcome.passed}
            if missing := sorted(command.needs & failed):
                self._show(f"{self.elapsed_s:5.0f} s  {command.name}: not run, because {', '.join(missing)} failed")
                self.outcomes.append(Outcome(command, Counter(failed=1), 0.0, {}, passed=False))
                continue
            if command.optional and command.seconds * self.slowness * _SAFETY > self.seconds_left:
                self.left_out.append(command)
                continue
            self._running.append(_Process(command, self._folder, self._clock()))

    def _stop_late_commands(self):
        if self.seconds_left > 0:
            return
        for process in [process for process in self._running if process.command.optional]:
            process.stop()
            self._running.remove(process)
            self.left_out.append(process.command)

    def _report(self, outcome, process):
        words = [f"{outcome.counts[word]} {word}" for word in ("passed", "failed", "errors", "skipped")]
        counts = ", ".join(words) if outcome.command.is_pytest else "passed" if outcome.passed else "failed"
        self._show(f"{self.elapsed_s:5.0f} s  {outcome.command.name}: {counts} in {outcome.seconds:.0f} s")
        if not outcome.passed:
            self._show(f"===== output of {outcome.command.name} =====\n{process.output()}\n=====")


class _Process:
    def __init__(self, command, folder, now):
        self.command, self.begun = command, now
        stem = "".join(character if character.isalnum() else "-" for character in command.name)
        self._log, self._results, self._seconds = (Path(folder) / f"{stem}.{end}" for end in ("log", "xml", "json"))
        arguments, variables = [*command.arguments], command.variables
        if command.is_pytest:
            arguments += ["-o", f"cache_dir=.pytest_cache/{stem}"]
            arguments += [f"--junitxml={self._results}"]
            variables = variables | {"PANTHER_SECONDS_FILE": str(self._seconds)}
        # make's own variables would make a command's make take part in the jobs of this one. Without files of compiled
        # modules, every process would take seconds to compile what it imports.
        environment = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment | variables,
                start_new_session=True,  # a group of its own, which stop() ends with all its children
            )

    def ended(self):
        return self._process.poll() is not None

    def output(self):
        text = self._log.read_text(errors="replace")
        left_out = len(text) - _TAIL_CHARACTERS
        return text if left_out <= 0 else f"[{left_out} characters left out]\n{text[-_TAIL_CHARACTERS:]}"

    def outcome(self, now):
        """Return how the command ended; pytest's exit code 5 says that no test was selected."""
        counts = counts_of_tests(self._results) if self.command.is_pytest else Counter()
        file_seconds = json.loads(self._seconds.read_text()) if self._seconds.exists() else {}
        passed = self._process.returncode in ((0, 5) if self.command.is_pytest else (0,))
        if not passed and not counts["failed"] + counts["errors"]:
            counts["errors" if self.command.is_pytest else "failed"] += 1  # it ended before its summary, or is no test
        return Outcome(self.command, counts, now - self.begun, file_seconds, passed)

    def stop(self):
        for signal_number, grace_s in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, signal_number)
                self._process.wait(grace_s)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def counts_of_tests(path):
    """Return the numbers of tests by word in a JUnit file of pytest; none if pytest ended before writing it."""
    counts = Counter()
    if path.exists():
        for test in ElementTree.parse(path).getroot().iter("testcase"):
            tags = {child.tag for child in test}
            counts[next((word for tag, word in _WORDS.items() if tag in tags), "passed")] += 1
    return counts


_WORDS = {"error": "errors", "failure": "failed", "skipped": "skipped"}
