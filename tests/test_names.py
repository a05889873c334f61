"""Names and words in the library's code: names say what a value holds, texts use the words of the glossary."""

import ast
from pathlib import Path

import pytest
from glossary import code_complaints

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("panther", "kernels") for path in (ROOT / folder).rglob("*.py"))
NAMES = [path.relative_to(ROOT).as_posix() for path in SOURCES]

# Pronouns, participles and the like, which do not say what a variable holds.
VAGUE = {
    "again", "alike", "apart", "asked", "back", "chosen", "different", "done", "doubts", "drawn", "every", "found",
    "given", "it", "kept", "known", "made", "mine", "named", "one", "others", "ours", "own", "said", "seen", "sent",
    "several", "shown", "some", "taken", "theirs", "them", "those", "together", "told", "used", "wanted", "wary",
    "what", "whole", "wish",
}  # fmt: skip


def vague_bindings(source: str) -> list[tuple[int, str]]:
    """Line and name of each variable, argument, exception and captured pattern that has a vague name."""
    bindings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bindings.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            bindings.append((node.lineno, node.arg))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bindings.append((node.lineno, node.name))
    return sorted((line, name) for line, name in bindings if name in VAGUE)


def package_of(path: str) -> str:
    """Return ``kernels``, or the sub-package of panther, or ``panther`` for modules beside the sub-packages."""
    top, second, *rest = path.split("/")
    return f"{top}/{second}" if top == "panther" and rest else top


def test_names_say_what_a_variable_holds():
    complaints = [
        f"{name}:{line} binds {word!r}"
        for name, path in zip(NAMES, SOURCES, strict=True)
        for line, word in vague_bindings(path.read_text())
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("package", sorted({package_of(name) for name in NAMES}))
def test_the_words_of_the_code_are_those_of_the_glossary(package):
    complaints = [
        f"{name}:{line}: {complaint}"
        for name, path in zip(NAMES, SOURCES, strict=True)
        if package_of(name) == package
        for line, complaint in code_complaints(path.read_text())
    ]
    assert not complaints, "\n".join(complaints)
