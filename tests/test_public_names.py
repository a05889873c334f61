"""Public names stay: those of commit f7ae3fc2 can be imported, except for the few that were removed on purpose."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Starts of adapters that PEFT has itself, and the price of a planned run; CHANGELOG says what to call.
REMOVED = {"panther.distributed.TrainingRun"} | {
    f"panther.integrations.peft.{name}" for name in ("InitReport", "InitializedLayer", "init_corda_", "init_pissa_")
}
LISTED = (ROOT / "tests/support/public_names.txt").read_text().split()


@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in LISTED}))
def test_the_names_of_an_earlier_commit_are_there(module):
    names = {name.rpartition(".")[2] for name in LISTED if name.rpartition(".")[0] == module}
    removed = {name.rpartition(".")[2] for name in REMOVED if name.rpartition(".")[0] == module}
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if not module.startswith("panther.integrations."):
            raise
        pytest.skip(f"its library is not installed: {error}")
    assert {name for name in names if not hasattr(found, name)} == removed


def test_removed_names_were_public():
    assert set(LISTED) >= REMOVED


def test_lists_of_lazy_names_are_written_out_and_equal_the_tables():
    from panther import distributed

    tree = ast.parse(Path(distributed.__file__).read_text())
    assigned = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert ast.literal_eval(assigned) == sorted(
        (*distributed._HOME, "checkpoint")
    )  # type checkers read no computed list
