"""Adapters to libraries that are not installed are not collected: they cannot be imported."""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = [
    str(path)
    for path in (Path(__file__).parent / "panther/integrations").glob("[!_]*.py")
    if find_spec(path.stem) is None
]
