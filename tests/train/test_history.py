"""What a run leaves behind: rows, tables, pictures."""

import csv
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from panther.train import History, history
from panther.train.history import peak_memory

ROWS = [
    {"step": 5, "epoch": 0, "loss": 2.0, "learning_rate": 0.1, "gradient_norm": None},
    {"step": 10, "epoch": 0, "loss": 1.0, "learning_rate": 0.1, "gradient_norm": 3.0},
    {"step": 10, "epoch": 0, "validation_loss": 1.5, "validation_accuracy": 0.5},
    {"step": 20, "epoch": 1, "validation_loss": 1.25, "validation_accuracy": 0.75},
    {"step": 30, "epoch": 1, "validation_loss": 1.4, "validation_accuracy": 0.7},
]


def test_columns():
    history = History(ROWS)
    assert history["loss"] == ([5, 10], [2.0, 1.0])
    assert history["gradient_norm"] == ([10], [3.0])
    assert history.names[:4] == ["step", "epoch", "loss", "learning_rate"]
    assert len(history) == 5
    assert history.last["step"] == 30
    assert history.last["gradient_norm"] == 3.0
    with pytest.raises(KeyError, match="no record has 'accuracy': choose one of step, epoch, loss"):
        history["accuracy"]
    with pytest.raises(KeyError, match="no record has 'loss': the history has no records, train first"):
        History()["loss"]


def test_it_is_a_copy():
    rows = [{"step": 1, "loss": 1.0}]
    history = History(rows)
    rows[0]["loss"] = 2.0
    assert history["loss"] == ([1], [1.0])
    assert list(History(history)) == list(history)


def test_best_is_that_of_validation_where_there_is_one():
    assert History(ROWS).best == ROWS[3]
    assert History(ROWS[:2]).best == ROWS[1]
    with pytest.raises(ValueError, match="the history has no records: train first"):
        History().best


def test_best_is_never_a_value_that_is_not_finite():
    rows = [{"step": i, "validation_loss": value} for i, value in enumerate([math.nan, 2.0, -math.inf, 1.0])]
    assert History(rows).best == rows[3]
    assert History([*rows[:1], {"step": 1, "loss": 4.0}]).best == {"step": 1, "loss": 4.0}


def test_time_and_accuracy_of_a_run():
    rows = [{**row, "elapsed_s": 0.5 * i} for i, row in enumerate(ROWS)]
    assert History(rows).total_time == 2.0
    assert History(rows).best_accuracy == 0.75
    assert History().total_time == 0.0
    with pytest.raises(ValueError, match="no record has validation_accuracy: pass metrics="):
        assert History(ROWS[:2]).best_accuracy


def test_csv_has_a_row_a_record(tmp_path):
    History(ROWS).to_csv(tmp_path / "history.csv")
    with open(tmp_path / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["5", "10", "10", "20", "30"]
    assert [row["validation_accuracy"] for row in rows] == ["", "", "0.5", "0.75", "0.7"]
    assert rows[0]["gradient_norm"] == ""


@pytest.mark.parametrize(("rows", "labels"), [(ROWS, [["loss", "validation loss"], ["validation accuracy"]]), ([], [])])
def test_plot(tmp_path, rows, labels):
    figure = History(rows).plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    found = [[line.get_label() for line in panel.lines] for panel in figure.axes if panel.lines]
    assert found == labels
    if rows:
        assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[5, 10], [10, 20, 30]]


@pytest.mark.skipif(sys.platform != "linux", reason="the file that is compared with is Linux's")
def test_peak_memory_is_this_process_s_own():
    with open("/proc/self/status") as status:
        own = 1024 * int(re.search("VmHWM:(.*) kB", status.read())[1])
    assert peak_memory() == pytest.approx(own, rel=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="getrusage begins with the parent's peak on Linux")
def test_a_peak_that_getrusage_has_from_the_parent_is_left_out(monkeypatch):
    own = peak_memory()
    rusage = lambda who: SimpleNamespace(ru_maxrss=10 * own)  # noqa: E731
    monkeypatch.setattr(history, "resource", SimpleNamespace(getrusage=rusage, RUSAGE_SELF=0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert peak_memory() == pytest.approx(own, rel=0.02)
