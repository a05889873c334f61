"""Write the list from which the site's version switcher is made: ``python docs/switcher.py FOLDER ADDRESS``.

The published site has a folder for each version, such as ``0.1.0``, and ``dev``. FOLDER is its local copy, in which
``switcher.json`` is written; ADDRESS is where it is published. The pages show the switcher if they were built with
``PANTHER_DOCS_URL=ADDRESS make docs``.
"""

__all__ = ["entries", "main"]

import json
import re
import sys
from pathlib import Path


def entries(folders: list[str], address: str) -> list[dict[str, str | bool]]:
    """Return the switcher's entries, the newest release first and preferred, then the older ones and ``dev``."""
    releases = [name for name in folders if re.fullmatch(r"\d+(\.\d+)*", name)]
    releases.sort(key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    found: list[dict[str, str | bool]] = []
    for name in [*releases, *(["dev"] if "dev" in folders else [])]:
        entry: dict[str, str | bool] = {"version": name, "url": f"{address.rstrip('/')}/{name}/"}
        if name == next(iter(releases), "dev"):
            entry |= {"name": f"{name} (stable)" if releases else name, "preferred": True}
        found.append(entry)
    return found


def main(arguments: list[str]) -> None:
    """Write switcher.json into the folder."""
    if len(arguments) != 2:
        raise SystemExit(__doc__)
    folder = Path(arguments[0])
    found = entries([path.name for path in folder.iterdir() if path.is_dir()], arguments[1])
    if not found:
        raise SystemExit(f"{folder} has no folder of a version, such as 0.1.0 or dev: copy docs/_build/html into one")
    (folder / "switcher.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
