"""Long lines of output on pages: sentences wrap, and lines of tables keep their columns."""

import importlib.util
import re
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="sphinx is in the extra docs")

MODULE = Path(__file__).resolve().parents[2] / "docs/output_lines.py"
SENTENCE = "panther.errors.ConfigError: 'zero_stage' is not a setting of TrainConfig: use strategy='zero1' for stage 1"
TABLE = "rank  host       address    interface  MTU   Python  torch       Panther     GPUs  free disk  clock"


def highlighted(output, language):
    """The HTML of a block."""
    from pygments import highlight
    from pygments.lexers import get_lexer_by_name

    spec = importlib.util.spec_from_file_location("output_lines", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return highlight(output, get_lexer_by_name(language), module.OutputFormatter())


@pytest.mark.parametrize(
    ("language", "command"),
    [
        ("text", "a short line"),
        ("console", "$ panther doctor"),
        ("pycon", ">>> f()\nTraceback (most recent call last):"),
    ],
)
def test_sentences_are_marked_and_tables_are_not(language, command):
    shown = highlighted(f"{command}\n{SENTENCE}\n{TABLE}\n", language)
    lines = [line for line in shown.splitlines() if 'class="sentence"' in line]
    assert len(lines) == 1
    assert "zero_stage" in lines[0]


def test_the_text_is_unchanged():
    output = f"$ panther doctor\n{SENTENCE}\n\n{TABLE}\nlast\n"
    shown = highlighted(output, "text")
    assert unescape(re.sub(r"<[^>]*>", "", shown)).strip() == output.strip()
