"""Words that pages, examples and the library's own text do not use, and what to write in place of each."""

__all__ = ["code_complaints", "complaints", "prose"]

import ast
import io
import re
import tokenize

# What to write in place of words that readers outside of this project do not use so.
INSTEAD = {
    r"\bof which\b": "a relative clause with its noun, or a new sentence",
    r"\bas ever\b": "as usual, or nothing",
    r"\bat the price of\b": "the cost, with its unit",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|need\b|reason\b)[a-z]": "is not a",
    r"(?<!by )\bhand(s|ed|ing)? (on|over)\b": "send, pass",
    r"\b(goes|go|went|going) on\b": "continue",
    r"\bcuts?\b(?! off)(?=.*\b(layer|rank|model|stage|outputs|inputs)s?\b)": "shard, split",
    r"\bbut for\b": "except for",
    r", say[,.;)]| say\)": "for example",
    r"\bat hand\b": "available",
    r"\bthe dearest\b": "the most expensive, the bottleneck",
    r"\bwhole on every rank\b": "replicated",
    r"\bas it comes\b": "at its defaults",
    r"\bpieces?\b": "shard, part, passage, microbatch",
    r"(?<!virtual )\bmachines\b": "nodes",
    r"(?<!\d )\bother (samples|entries|sketches)\b": "different",
    r"\bin another (order|layout|way)\b": "in a different",
    r"\b(is|are)\W+(not\W+)?what (?!to\b)": "the noun",
    r"(^|[.:;] )What (is|was|are|were) \w+ (is|are|was|were|on|by|in)\b": "the noun",
    r"\bwhat it takes\b(?! to)": "memory, time, bytes",
    r"\bcosts? what\b": "includes the time of",
    r"\bbesides(?=[.,;:]| \()": "also",
    r"\bat worst\b": "at most",
    r"\bin the median\b": "a median of",
    r"\b(one|to) another in silence\b": "silently",
    r"\b(bring|brings|bringing|brought)( it| them)? together\b": "gather",
    r"\bhow (it|they) lies?\b": "placement, layout",
    r"\bfore(see|sees|saw|seen|seeing)\b": "predict",
    r"\baccumulation windows?\b": "accumulation group",
    r"\b(take|takes|taking|took|taken) out\b": "remove",
}


def complaints(text: str) -> list[tuple[int, str]]:
    """Return the line of each such word in a text, with the words around it and what to write instead."""
    return [
        (
            text.count("\n", 0, match.start()) + 1,
            f"{match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 30]!r}: write {better}",
        )
        for pattern, better in INSTEAD.items()
        for match in re.finditer(pattern, text)
    ]


def prose(text: str) -> str:
    """Return a page or docstring without code, literals, tables' options and what a program printed, line by line."""
    text = re.sub(r"```.*?```", _lines_of, text, flags=re.S)  # Markdown's blocks
    lines, block, doctest = [], None, False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        # A doctest ends with its output, at the next blank line.
        doctest = bool(line.strip()) and (doctest or line.lstrip().startswith(">>>"))
        if doctest or (block is not None and (not line.strip() or indent > block)):
            lines.append("")
            continue
        block = None
        if re.match(r"\s*\.\. (code-block|literalinclude|math|image|include|command-help)::", line):
            block = indent
            lines.append("")
            continue
        if line.rstrip().endswith("::"):
            block = indent
        lines.append(line)
    return re.sub(r"``[^`]*``|`[^`]*`", lambda match: "x" + _lines_of(match), "\n".join(lines))


def code_complaints(source: str) -> list[tuple[int, str]]:
    """Return the :func:`complaints` about comments, docstrings and messages of Python code; names are not read."""
    texts = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    in_message = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            in_message.update(map(id, node.values))
            fields = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            texts.append((node.lineno, "".join(fields)))
        elif isinstance(node, ast.Constant) and id(node) not in in_message and " " in str(node.value):
            texts.append((node.lineno, str(node.value)))  # a string without a space is a name, not a text
    return sorted((first + line - 1, complaint) for first, text in texts for line, complaint in complaints(prose(text)))


def _lines_of(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")
