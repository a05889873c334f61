"""The directives of the pages, and links to names of ``panther`` that a package's page describes.

``.. command-help:: NAME`` shows what ``panther NAME --help`` prints. ``.. measured-at:: SUBJECT ...`` shows the commit,
the date and the processor of the rows of ``benchmarks/results`` that a page shows; ``benchmarks/figures/age.py`` lists
the subjects. Tables of sentences get the class ``prose``, by which panther.css stacks their cells on a phone.
"""

__all__ = ["mark_prose", "resolve_short_name", "setup"]

import contextlib
import io
import os
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.util.docutils import SphinxDirective

_WIDTH = "74"  # argparse leaves two columns free
_MOST_COLUMNS, _LONG_CELL = 4, 26  # of a table of sentences: columns at most, and characters of a row's longest cell


class CommandHelp(Directive):
    """Show the help of a subcommand, as wide as the page has room for."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the help as a literal block."""
        from panther.cli import main

        previous_columns, printed = os.environ.get("COLUMNS"), io.StringIO()
        os.environ["COLUMNS"] = _WIDTH  # where argparse looks for the width
        try:
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([*self.arguments[0].split(), "--help"])
        finally:
            os.environ.pop("COLUMNS")
            if previous_columns is not None:
                os.environ["COLUMNS"] = previous_columns
        return [nodes.literal_block(text=printed.getvalue().rstrip(), language="text")]


class MeasuredAt(SphinxDirective):
    """Show where the rows of some subjects were measured, in a table that is folded."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the table, with a line for each file of results and each commit."""
        from benchmarks.figures import age

        lines = [".. dropdown:: Commits of the measurements on this page", "", "   .. csv-table::"]
        lines += [
            "      :header: Rows in benchmarks/results, Commit, Date, Processor and threads",
            "      :class: lookup",
            "",
        ]
        for path in (path for subject in self.arguments[0].split() for path in age.files_of(subject)):
            self.env.note_dependency(str(path))
            name, _, machine = path.stem.partition("-cpu-")
            threads = machine.rpartition("-")[2]
            for commit, date, processor in age.stamps_of(path):
                place = f"{processor}, {threads}" if threads else processor
                lines.append(f'      ``{name}``, ``{commit}``, {date}, "{place}"')
        lines += ["", "   ``make figures-age`` lists the files of code that have changed since."]
        return self.parse_text_to_nodes("\n".join(lines))


def mark_prose(app: Any, doctree: nodes.document) -> None:
    """Mark the tables whose cells are sentences or names, and put the headings of their columns into their cells.

    Beside each other these columns would be wider than a phone. The headings are hidden on wider windows.
    """
    for table in doctree.findall(nodes.table):
        group = next(table.findall(nodes.tgroup))
        head, body = ([*group.findall(kind)] for kind in (nodes.thead, nodes.tbody))
        rows = [[*row.findall(nodes.entry)] for row in body[0].findall(nodes.row)]
        longest = [max(len(entry.astext()) for entry in row[1:] or row) for row in rows]
        if group["cols"] > _MOST_COLUMNS or sum(longest) < _LONG_CELL * len(rows):
            continue
        table["classes"] += ["prose"]
        headings = [entry.astext() for entry in head[0].findall(nodes.entry)] if head else []
        for row in rows if len(headings) > 2 else []:
            for heading, entry in zip(headings[1:], row[1:], strict=False):
                if heading and entry.astext() and isinstance(entry[0], nodes.paragraph):
                    entry[0].insert(0, nodes.inline("", f"{heading}: ", classes=["heading"]))


def resolve_short_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a name such as ``panther.HealConfig`` to the package whose page describes it, or return None."""
    import panther

    package, _, name = node.get("reftarget", "").rpartition(".")
    if package != "panther" or name not in panther._FUNCTIONS_AND_CLASSES:
        return None
    target = f"panther.{panther._FUNCTIONS_AND_CLASSES[name]}.{name}"
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)


def setup(app: Any) -> dict[str, bool]:
    """Register the directives, and the links to short names."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("measured-at", MeasuredAt)
    app.connect("missing-reference", resolve_short_name)
    app.connect("doctree-read", mark_prose)
    return {"parallel_read_safe": True}
