"""Turn the small part of reStructuredText that the topics use into plain text for a terminal.

Headings, tables, literal blocks and examples can be read as they are. Markup within lines is removed, paragraphs and
lists are filled to the width, and a figure becomes its description.
"""

__all__ = ["render"]

import re
import textwrap

_ROLE = re.compile(r":[\w:]+:`([^`]+)`")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*\n]+)(?<=\S)\*{1,2}(?![\w*])")
_FIGURE = re.compile(r"^\.\. figure:: .*\n((?:   .*\n|\n)*)", re.M)
_ITEM = re.compile(r"- |\d+\. ")


def render(text: str, width: int) -> str:
    """Return the text without markup, in lines of at most ``width`` characters except for code and tables."""
    text = _FIGURE.sub(_describe, text)
    blocks, literal = [], False
    for block in re.split(r"\n{2,}", text.strip()):
        literal = literal and block.startswith("    ")
        if block == "::":
            literal = True
            continue
        verbatim = literal or block.startswith(">>>")
        blocks.append(block if verbatim else _filled(block, width))
        literal |= not verbatim and block.endswith("::")
    return "\n\n".join(blocks)


def _describe(match: re.Match[str]) -> str:
    alt = re.search(r"^   :alt: (.*)$", match[1], re.M)
    return f"[Figure: {alt[1]}]\n\n" if alt else ""


def _filled(block: str, width: int) -> str:
    """Return a paragraph, a list, a heading or a table without markup; the latter two keep their lines."""
    if block.startswith("==="):  # each literal loses two backticks and gets two spaces, so that columns stay aligned
        padded = re.sub(r"``([^`]+)``", r"`\1`  ", block)
        return "\n".join(line.rstrip() for line in padded.split("\n"))
    block = _ROLE.sub(lambda role: re.sub(r"^~|\s*<.*>$", "", role[1]), re.sub(r"::$", ":", block))
    block = _EMPHASIS.sub(r"\1", block.replace("``", "`"))
    lines = block.split("\n")
    if len(lines) == 2 and set(lines[1]) <= set("=-"):
        return block
    paragraphs: list[list[str]] = []
    for line in lines:
        # A paragraph begins at an item of a list, at the definition after a term and at the term after a definition.
        if not paragraphs or _ITEM.match(line) or _other_indent(line, paragraphs[-1]):
            paragraphs.append([])
        paragraphs[-1].append(line)
    return "\n".join(_fill(paragraph, width) for paragraph in paragraphs)


def _other_indent(line: str, paragraph: list[str]) -> bool:
    """Return whether a paragraph is not an item of a list, and the line is indented differently from it."""
    return not _ITEM.match(paragraph[0]) and line.startswith(" ") != paragraph[0].startswith(" ")


def _fill(lines: list[str], width: int) -> str:
    item = _ITEM.match(lines[0])
    first = "    " if lines[0].startswith(" ") else ""
    rest = " " * len(item[0]) if item else first
    text = " ".join(line.strip() for line in lines)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
