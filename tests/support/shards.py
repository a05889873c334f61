"""Run the tests as two pytest processes side by side, one for each core, and print their outputs one after the other.

``shards.py [ARGUMENTS]``: the arguments are passed to both. The first shard starts processes, which wait for each other
much of the time; the second has everything else, new folders too. The last line of the output is their sum. Not
pytest-xdist: its workers have a thread, and forking a process that has threads can hang.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Balanced by measured seconds.
RANKS = ("tests/distributed", "tests/train", "tests/faults", "tests/cli")
SHARDS = {"ranks": list(RANKS), "core": [f"--ignore={folder}" for folder in RANKS]}
_PROGRESS_S = 30


def main(arguments):
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="panther-tests-") as folder:
        outputs = {name: Path(folder) / name for name in SHARDS}
        running = {name: _start(name, arguments, outputs[name]) for name in SHARDS}
        processes = dict(running)
        try:
            _wait(running, outputs)
        finally:
            for process in running.values():
                process.terminate()
                process.wait()
        counts = Counter()
        for name, process in processes.items():
            text = outputs[name].read_text(errors="replace")
            print(f"\n===== tests of the shard {name!r} =====\n{text}", flush=True)
            found = _counts(text)
            if process.returncode not in (0, 5) and not found["failed"] + found["errors"]:
                found["errors"] += 1  # it ended before its summary, or could not start
            counts += found
    seconds = time.monotonic() - begun
    words = [f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "errors")]
    print(f"{', '.join(words)} in {seconds:.0f} s")
    return 1 if counts["failed"] + counts["errors"] else 0


def _start(name, arguments, output):
    command = [str(Path(sys.executable).parent / "pytest"), *SHARDS[name], "-o", f"cache_dir=.pytest_cache/{name}"]
    with output.open("w") as file:
        return subprocess.Popen(command + arguments, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)


def _wait(running, outputs):
    """Remove each process from ``running`` when it has ended, with a line of progress now and then."""
    shown = time.monotonic()
    while running:
        time.sleep(0.2)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            del running[name]
            print(f"shard {name!r}: done", flush=True)
        if running and time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            print(", ".join(f"shard {name!r}: {_percent(outputs[name])}" for name in running), flush=True)


def _percent(output):
    found = re.findall(r"\[ *(\d+)%\]", output.read_text(errors="replace"))
    return f"{found[-1] if found else 0} %"


def _counts(text):
    """Read pytest's summary, such as ``= 2 failed, 30 passed, 1 error in 4.2s =``."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in \d+\.\d+s", line)]
    found = Counter()
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|error|xfailed)", lines[-1] if lines else ""):
        found["errors" if word == "error" else word] += int(number)
    return found


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(sys.argv[1:]))
