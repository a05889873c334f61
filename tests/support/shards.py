"""Run the tests as pytest processes, two at a time, one for each core: ``shards.py [ARGUMENTS]``.

Each process has a few folders of tests, and gets the arguments. One core takes them from the front of the list, where
the tests start processes that wait for each other much of the time; the other core takes them from the back, until they
meet. The last line of the output is the sum. Not pytest-xdist: its workers have a thread, and forking a process that
has threads can hang.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Folders and files of tests/. Ray's are apart, because most of `make test-engines` is theirs.
_SHARDS = (
    "distributed", "train", "faults cli", "integrations/test_ray.py integrations/test_ray_tune.py", "rest",
    "tuning sketch", "compression linalg", "docs", "nn", "integrations", "kernels",
)  # fmt: skip
_PROGRESS_S = 30


def shards():
    """Return pytest's arguments for each process by name; ``rest`` is all that no other has, such as a new folder."""
    paths = {names: [f"tests/{name}" for name in names.split()] for names in _SHARDS}
    paths["rest"] = []
    everything = [path for some in paths.values() for path in some]
    found = {}
    for names, own in paths.items():
        inside = [path for path in everything if not own or any(path.startswith(f"{folder}/") for folder in own)]
        found[names] = own + [f"--ignore={path}" for path in inside]
    return found


def main(arguments):
    begun = time.monotonic()
    waiting, counts = deque(shards().items()), Counter()
    with tempfile.TemporaryDirectory(prefix="panther-tests-") as folder:
        cores, shown = {"front": None, "back": None}, begun
        try:
            while waiting or any(cores.values()):
                for core, running in cores.items():
                    if running and running.ended():
                        counts += running.counts()
                        cores[core] = running = None
                    if waiting and not running:
                        name, paths = waiting.popleft() if core == "front" else waiting.pop()
                        cores[core] = _Shard(name, paths + arguments, Path(folder) / name.replace("/", "."))
                time.sleep(0.2)
                if time.monotonic() - shown > _PROGRESS_S:
                    shown = time.monotonic()
                    at_work = [f"{shard.name}: {shard.percent()}" for shard in cores.values() if shard]
                    print(", ".join(at_work), flush=True)
        finally:
            for shard in filter(None, cores.values()):
                shard.stop()
    words = [f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "errors")]
    print(f"{', '.join(words)} in {time.monotonic() - begun:.0f} s")
    return 1 if counts["failed"] + counts["errors"] else 0


class _Shard:
    def __init__(self, name, arguments, output):
        self.name, self._output = name, output
        cache = f"cache_dir=.pytest_cache/{output.name}"
        command = [str(Path(sys.executable).parent / "pytest"), "-o", cache, "--durations=8", *arguments]
        with output.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)

    def ended(self):
        return self._process.poll() is not None

    def counts(self):
        """Print the output, and return what its summary counts."""
        text = self._output.read_text(errors="replace")
        print(f"\n===== tests of {self.name} =====\n{text}", flush=True)
        found = _counts(text)
        if self._process.returncode not in (0, 5) and not found["failed"] + found["errors"]:
            found["errors"] += 1  # it ended before its summary, or could not start
        return found

    def percent(self):
        found = re.findall(r"\[ *(\d+)%\]", self._output.read_text(errors="replace"))
        return f"{found[-1] if found else 0} %"

    def stop(self):
        self._process.terminate()
        self._process.wait()


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
