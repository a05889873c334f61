"""The directive of the command-line reference: ``.. command-help:: NAME`` shows what ``panther NAME --help`` prints."""

__all__ = ["setup"]

import contextlib
import io
import os
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

_WIDTH = "74"  # argparse leaves two columns free


class CommandHelp(Directive):
    """Show the help of a subcommand, as wide as the page has room for."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the help as a literal block."""
        from panther.cli import main

        before, printed = os.environ.get("COLUMNS"), io.StringIO()
        os.environ["COLUMNS"] = _WIDTH  # where argparse looks for the width
        try:
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([*self.arguments[0].split(), "--help"])
        finally:
            os.environ.pop("COLUMNS")
            if before is not None:
                os.environ["COLUMNS"] = before
        return [nodes.literal_block(text=printed.getvalue().rstrip(), language="text")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
