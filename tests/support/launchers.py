"""panther launch in a process of its own, without the seconds that a new Python takes to import torch."""

import os
import signal
import sys
import time
from pathlib import Path

from panther.cli import main


class Launcher:
    """The command in a forked process, whose imports are done."""

    def __init__(self, name, *arguments):
        self.output = Path(f"{name}.txt")
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                file = os.open(self.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                code = main(["launch", *arguments])
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def wait(self, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status), self.output.read_text()
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"still running: {self.output.read_text()}")
