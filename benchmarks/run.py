"""Run every benchmark subject: ``python benchmarks/run.py [arguments for each]``."""

__all__: list[str] = []

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    for subject in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {subject.stem}", flush=True)
        subprocess.run([sys.executable, str(subject), *sys.argv[1:]], check=True)
