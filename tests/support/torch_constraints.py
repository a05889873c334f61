"""Print constraints.txt without the versions that the installed torch asks for: ``torch_constraints.py > FILE``.

A torch with CUDA, which is what pip installs on Linux, asks for the one Triton that it was built with. The CPU build
asks for none, and the tests run with a newer Triton. pip refuses to install both versions.
"""

import re
from importlib.metadata import requires
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def constraints_beside(requirements):
    """Return the lines of constraints.txt, except for packages whose version the requirements name."""
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements if "==" in requirement}
    lines = CONSTRAINTS.read_text().splitlines()
    return [line for line in lines if line.partition("==")[0].lower() not in names]


if __name__ == "__main__":
    print("\n".join(constraints_beside(requires("torch"))))
