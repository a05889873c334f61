"""panther launch, and commands that use it, in a process of its own, without the time to import torch again."""

import os
import signal
import sys
from pathlib import Path
from typing import ClassVar

import waits

from panther.cli import main


class Launcher:
    """The command in a forked process, whose imports are done; ``enter`` is called in it first."""

    started: ClassVar = []

    def __init__(self, name, *arguments, enter=lambda: None, command="launch"):
        self.output = Path(f"{name}.txt").absolute()
        self.pid = os.fork()
        Launcher.started.append(self)
        if self.pid == 0:
            code = 99
            try:
                file = os.open(self.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                enter()
                code = main([command, *arguments])
            except BaseException as error:
                print(f"{type(error).__name__}: {error}")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def wait(self, limit_s=180):
        """Return the exit code and what the command wrote."""
        status = None

        def has_ended():
            nonlocal status
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return pid != 0

        waits.until(has_ended, lambda: f"still running: {self.output.read_text()}{waits.stack_of(self.pid)}", limit_s)
        self.pid = 0
        return os.waitstatus_to_exitcode(status), self.output.read_text()

    def end(self):
        """End it with its workers, if it is still there."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)  # which ends the workers too, as SIGKILL would not
            os.waitpid(self.pid, 0)
            self.pid = 0

    @classmethod
    def end_all(cls):
        """End whatever a failed test has left."""
        while cls.started:
            cls.started.pop().end()


def until(pattern, count=1):
    """Wait until so many files have names that match the pattern."""
    waits.until(lambda: len(list(Path().glob(pattern))) >= count, f"no {pattern}")
