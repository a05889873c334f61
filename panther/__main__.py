"""``python -m panther`` is the ``panther`` command."""

__all__: list[str] = []

import sys

from panther.cli import main

if __name__ == "__main__":
    sys.exit(main())
