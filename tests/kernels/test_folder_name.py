"""The checkout's folder kernels/ does not disturb code that imports another package of that name."""

import sys
from pathlib import Path

import pytest
import waits

ROOT = Path(__file__).resolve().parents[2]
STATEMENTS = ("import panther", "from transformers.models.bert import modeling_bert")


@pytest.mark.parametrize("statements", [STATEMENTS, STATEMENTS[::-1]], ids=["panther first", "transformers first"])
def test_transformers_may_look_for_its_kernels_in_the_checkout(statements):
    pytest.importorskip("transformers")
    # With -c, Python puts the working directory first on sys.path, as a notebook started there does.
    code = "; ".join((*statements, "import sys", "assert 'kernels' in sys.modules", "panther.kernels.sketched_matmul"))
    done = waits.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
