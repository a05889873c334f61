"""mypy sees the types of the kernels under the name by which the library imports them."""

import sys
from pathlib import Path

import pytest
import waits

ROOT = Path(__file__).resolve().parents[1]
CALLS = """
from panther.kernels import sketched_matmul
from panther.kernels.selection import backend

reveal_type(backend())
sketched_matmul(1)
"""


@pytest.mark.tool
def test_calls_into_the_kernels_are_checked(tmp_path):
    pytest.importorskip("mypy")
    # Without reading torch and the rest of Panther, which would take a minute and do not matter here.
    skipped = (
        '[[tool.mypy.overrides]]\nmodule = ["numpy.*", "panther", "torch.*", "triton.*"]\nfollow_imports = "skip"\n'
    )
    config = tmp_path / "pyproject.toml"
    config.write_text((ROOT / "pyproject.toml").read_text() + skipped)
    snippet = tmp_path / "calls.py"
    snippet.write_text(CALLS)
    options = ("--config-file", config, "--cache-dir", tmp_path / "cache")
    run = waits.run([sys.executable, "-m", "mypy", *options, snippet], cwd=ROOT)
    assert 'Revealed type is "str"' in run.stdout, run.stdout + run.stderr
    assert 'Missing positional arguments "S1", "U1", "S2", "U2" in call to "sketched_matmul"' in run.stdout
