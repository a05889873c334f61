"""Run commands side by side, one for each core, the longest first, and end within a limit.

This file uses the standard library only, because the installation of everything else is one of the commands. Not
pytest-xdist: its workers have a thread, and forking a process that has threads can hang.
"""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRESS_S = 30
_REMOVED_VARIABLES = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "PYTHONDONTWRITEBYTECODE")
_TAIL_CHARACTERS = 60_000
# An optional command is started only if it is expected to end within the limit with this factor to spare.
_SAFETY = 1.2


def _show(line):
    print(line, flush=True)


@dataclass(frozen=True)
class Command:
    """One entry of the queue, which waits until ``after`` and ``needs`` have ended, and ``needs`` have succeeded.

    Commands of a smaller ``priority`` are started first, and the longest first among equals. ``seconds`` are those of
    the reference machine. An optional command is left out, or stopped, where the limit leaves no time.
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
    """How a command ended: the numbers of tests by result, and the processor seconds of each test file."""

    command: Command
    counts: Counter
    seconds: float
    file_seconds: dict
    passed: bool


class CommandQueue:
    """Commands that wait, run and have ended. After ``limit_s`` seconds, no optional command runs."""

    def __init__(self, commands, folder, num_workers=2, limit_s=None, show=_show):
        self._waiting = sorted(commands, key=lambda command: (command.priority, -command.seconds))
        self._folder, self._num_workers, self._limit_s = folder, num_workers, limit_s
        self._show, self._begun = show, time.monotonic()
        self._running, self.outcomes, self.left_out = [], [], []

    def run(self, on_end=lambda outcome: None):
        """Run all commands, and call ``on_end`` with the outcome of each."""
        shown = time.monotonic()
        try:
            while self._waiting or self._running:
                for process in [process for process in self._running if process.ended()]:
                    self._running.remove(process)
                    outcome = process.outcome(time.monotonic())
                    self.outcomes.append(outcome)
                    self._report(outcome, process)
                    on_end(outcome)
                self._stop_late_commands()
                self._start_commands()
                time.sleep(0.1)
                if self._running and time.monotonic() - shown > _PROGRESS_S:
                    shown = time.monotonic()
                    names = [f"{process.command.name} ({shown - process.begun:.0f} s)" for process in self._running]
                    self._show(f"{shown - self._begun:5.0f} s  running: {', '.join(names)}")
        finally:
            for process in self._running:
                process.stop()

    @property
    def elapsed_s(self):
        """Return the seconds since the queue was made."""
        return time.monotonic() - self._begun

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
        return self._limit_s - self.elapsed_s

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
            self._running.append(_Process(command, self._folder, time.monotonic()))

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
        self._log, self._results = (Path(folder) / f"{stem}.{end}" for end in ("log", "json"))
        arguments, variables = [*command.arguments], command.variables
        if command.is_pytest:
            arguments += ["-o", f"cache_dir=.pytest_cache/{stem}"]
            variables = variables | {"PANTHER_RESULTS_FILE": str(self._results)}
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
        results = json.loads(self._results.read_text()) if self._results.exists() else {}
        counts = Counter(results.get("counts"))
        passed = self._process.returncode in ((0, 5) if self.command.is_pytest else (0,))
        if not passed and not counts["failed"] + counts["errors"]:
            counts["errors" if self.command.is_pytest else "failed"] += 1  # it ended before its summary, or is no test
        return Outcome(self.command, counts, now - self.begun, results.get("seconds", {}), passed)

    def stop(self):
        for signal_number, grace_s in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, signal_number)
                self._process.wait(grace_s)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
