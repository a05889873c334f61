"""Sentences in output wrap at the width of a page, and lines of tables keep their columns.

Code has at most 72 columns, so a longer line is output: an error message, a note, a list. Its box scrolls if the line
has columns, which two spaces separate; other long lines become ``<span class="sentence">``, which panther.css wraps
with an indent. The text that is copied from the page stays one line.
"""

__all__ = ["OutputFormatter", "setup"]

import html
import re
from collections.abc import Iterator
from typing import Any

from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

_CODE_WIDTH = 72  # columns


class OutputFormatter(HtmlFormatter):
    """Mark the lines of a block that are sentences wider than code."""

    def wrap(self, source: Any) -> Any:
        """Return the lines in their block, with the sentences marked."""
        return super().wrap(_mark_sentences(source))


def _mark_sentences(lines: Any) -> Iterator[tuple[int, str]]:
    for kind, line in lines:
        line = line.rstrip("\n")
        sentence = html.unescape(re.sub(r"<[^>]*>", "", line))
        if len(sentence) > _CODE_WIDTH and not re.search(r"\S {2,}\S", sentence):
            line = f'<span class="sentence">{line}</span>'
        yield kind, f"{line}\n"


def setup(app: Any) -> dict[str, bool]:
    """Take this formatter for the blocks of pages."""
    PygmentsBridge.html_formatter = OutputFormatter
    return {"parallel_read_safe": True}
