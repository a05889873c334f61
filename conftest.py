"""What is not collected: adapters whose library is not installed, and the guide's scripts, which would run."""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = [
    "docs/guide/scripts",
    *(
        str(path)
        for path in (Path(__file__).parent / "panther/integrations").glob("[!_]*.py")
        if find_spec(path.stem) is None
    ),
]
