"""Install the wheel in dist/ into a new, empty environment, and run its demo from an empty folder.

``release_check.py [--torch-index URL]``, after ``python -m build``: see ``make release-check``. torch is installed
first, alone, at the version of constraints.txt, from the index that is given or from pip's own.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch-index")
    torch_index = parser.parse_args(arguments).torch_index
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"dist/ has {len(wheels)} wheels, one is needed: rm -r dist; python -m build")
    with tempfile.TemporaryDirectory(prefix="panther-release-") as folder:
        environment, empty = Path(folder, "environment"), Path(folder, "empty")
        empty.mkdir()
        venv.create(environment, with_pip=True)
        python = environment / "bin/python"
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-c", ROOT / "constraints.txt"]
        index = ["--index-url", torch_index] if torch_index else []
        run([*install, *index, "--no-deps", "torch"], empty)
        run([*install, f"{wheels[0]}[demo]"], empty)
        where = [python, "-c", "import panther; print(panther.__file__, panther.__version__)"]
        printed = run(where, empty, capture_output=True).stdout
        if not printed.startswith(str(environment)):
            raise SystemExit(f"panther was imported from {printed}, not from {environment}")
        run([environment / "bin/panther", "demo", "--runs", "1", "--epochs", "3"], empty)
    print(f"{wheels[0].name} works in an empty environment")


def run(command, folder, **options):
    done = subprocess.run(list(map(str, command)), cwd=folder, text=True, timeout=1800, **options)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {' '.join(map(str, command))}")
    return done


if __name__ == "__main__":
    main(sys.argv[1:])
