"""Write the list from which the site's version switcher is made: ``python docs/switcher.py FOLDER ADDRESS [PAGES]``.

The published site has a folder for each version, such as ``0.1.0``, and ``dev``. FOLDER is its local copy, in which
``switcher.json`` is written; ADDRESS is where it is published. PAGES are the built pages of this version, which are
copied into its folder first. They show the switcher if they were built with ``PANTHER_DOCS_URL=ADDRESS make docs``:
``make site`` does both.
"""

__all__ = ["entries", "folder_of", "main"]

import json
import re
import shutil
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


def folder_of(version: str) -> str:
    """Return the folder of a version of Panther: ``dev`` for all versions between releases.

    Example:
        >>> folder_of("0.1.0"), folder_of("0.2.0.dev0")
        ('0.1.0', 'dev')
    """
    return "dev" if "dev" in version else version


def main(arguments: list[str]) -> None:
    """Write switcher.json into the folder, and copy the pages of this version there if they are given."""
    if len(arguments) not in (2, 3):
        raise SystemExit(__doc__)
    folder = Path(arguments[0])
    if arguments[2:]:
        from panther import __version__

        pages = folder / folder_of(__version__)
        shutil.rmtree(pages, ignore_errors=True)
        shutil.copytree(arguments[2], pages)
    found = entries([path.name for path in folder.iterdir() if path.is_dir()], arguments[1])
    if not found:
        raise SystemExit(f"{folder} has no folder of a version, such as 0.1.0 or dev: copy docs/_build/html into one")
    (folder / "switcher.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
