"""pr.compress on models trained here, at a reduced size: the methods rank as they should, within their budgets."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = ("harness", "text_model", "trials", "trial_encoder", "trial_digits")


@pytest.fixture
def trial(monkeypatch):
    """Rows of a quick trial, by method."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name):
        rows = importlib.import_module(name).run(True, None)
        return {row["method"]: row for row in rows}

    yield run
    torch.set_num_threads(threads)
    for name in MODULES:
        sys.modules.pop(name, None)


def assert_within_budget(rows):
    compressed = [row for row in rows.values() if row["method"] != "original"]
    assert {row["budget"] for row in compressed} == {0.5}
    assert all(row["kept"] <= row["budget"] for row in compressed)
    assert all(row["model_bytes"] < rows["original"]["model_bytes"] for row in compressed)


def test_the_better_metric_keeps_more_of_a_language_model(trial):
    rows = trial("trial_encoder")
    assert_within_budget(rows)
    gaps = {method: row["gap"] for method, row in rows.items()}
    assert gaps["two_sided"] < gaps["svd"] < gaps["random"]
    assert gaps["two_sided"] < gaps["svd"] / 2
    assert rows["two_sided + heal"]["rel_error"] <= 1.05 * rows["two_sided"]["rel_error"]


def test_the_better_metric_keeps_more_of_a_convolutional_net(trial):
    pytest.importorskip("sklearn")
    rows = trial("trial_digits")
    assert_within_budget(rows)
    assert rows["original"]["accuracy"] > 0.95
    assert rows["two_sided"]["kl"] < rows["svd"]["kl"] < rows["random"]["kl"]
    assert rows["two_sided"]["accuracy"] > rows["random"]["accuracy"]
