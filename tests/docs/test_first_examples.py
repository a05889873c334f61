"""The first example of a page that trains, compresses or solves something takes real data, not noise or constants.

A page's code is read from its top to the end of the first block that fits. In it no tensor is drawn or filled with a
constant, except for initial parameters, positions of samples, and inputs of a line that only shows an output. Pages
whose subject holds for any input are listed, each with the reason.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FITS = re.compile(
    r"\b(pr\.(compress|tune|linearize_)|linalg\.\w+|backward|fit|train_step|train_epoch|schedule\.step|cross_entropy)\("
)
INVENTED = {"rand", "randn", "randint", "ones", "zeros", "normal", "standard_normal", "uniform"}
ANY_INPUT = {
    "docs/gallery/compress/quantize.py": "adds noise to photographs, because the network learns to remove it",
    "docs/howto/advisor.rst": "reads the shape of a sample input",
    "docs/howto/compress-embeddings.rst": "shows which layers share codes, for any weights and tokens",
    "docs/howto/data-parallel.rst": "counts the bytes of gradients, which do not depend on the samples",
    "docs/howto/tensor-parallel.rst": "checks that shards have the outputs of the whole model, for any input",
}
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/start").glob("*.rst")),
    *sorted((ROOT / "docs/howto").glob("*.rst")),
    *sorted((ROOT / "docs/gallery").glob("*/*.py")),
]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


def code_blocks(path: Path) -> list[str]:
    """The blocks of Python code of a page, without prompts and output."""
    page = path.read_text()
    if path.suffix == ".py":
        return re.split(r"^# %%$", page, flags=re.M)
    if path.suffix == ".md":
        return re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    sessions = re.findall(r"(?:^>>> .*\n(?:.+\n)*)+", page, re.M)
    return [
        "".join(f"{line[4:]}\n" for line in block.splitlines() if line[:4] in (">>> ", "... ")) for block in sessions
    ]


def code_to_the_first_fit(blocks: list[str]) -> str:
    """The code from the top of a page to the end of the first block that fits, or nothing."""
    for number, block in enumerate(blocks, start=1):
        if FITS.search(block):
            return "\n".join(blocks[:number])
    return ""


def invented_data(code: str) -> list[str]:
    """The calls that draw tensors or fill them with a constant, without initial parameters and positions of samples."""
    calls, allowed = [], set()
    statements = [
        statement
        for statement in ast.parse(code).body
        if not isinstance(statement, ast.Expr) or FITS.search(ast.unparse(statement))
    ]
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "Parameter":
                allowed |= {id(child) for child in ast.walk(node)}
            # A position is drawn below the number of samples: torch.randint(len(samples), ...).
            is_position = name == "randint" and re.search(r"len\(|\.shape", ast.unparse(node))
            if name in INVENTED and not is_position and id(node) not in allowed:
                calls.append(ast.unparse(node))
    return calls


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_the_first_example_takes_real_data(path):
    calls = invented_data(code_to_the_first_fit(code_blocks(path)))
    if path.relative_to(ROOT).as_posix() in ANY_INPUT:
        assert calls, "this page is real by now: remove it from ANY_INPUT"
    else:
        assert calls == [], "take digits, text or photographs, or name the page in ANY_INPUT with a reason"
