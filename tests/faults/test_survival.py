"""Runs that are killed, wherever, and resumed end bit for bit as if nothing had been."""

import pytest
from survival import Trial, run_in_group, survive

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]

TRIALS = [  # benchmarks/train/trial_survival.py has a hundred
    Trial(0, "in a step", "worker", 1, 0.6),
    Trial(1, "in a file", "process group", 1, 0.3),
    Trial(2, "before the manifest", "worker", 0, 0.5),
    Trial(3, "in the rename", "process group", 0, 0.7),
    Trial(4, "before an old one goes", "worker", 0, 0.1),
    Trial(5, "while resuming", "process group", 0, 0.4),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digest of a run that nobody disturbed, and its seconds."""
    directory = tmp_path_factory.mktemp("whole")
    digest, seconds = run_in_group(directory, None)
    assert digest
    return digest, seconds


SLOW = ("in a file", "before an old one goes")


@pytest.mark.parametrize(
    "trial",
    [pytest.param(trial, marks=pytest.mark.slow if trial.moment in SLOW else ()) for trial in TRIALS],
    ids=lambda t: f"{t.moment}-{t.victim}".replace(" ", "-"),
)
def test_a_killed_run_ends_as_if_nothing_had_been(tmp_path, trial, whole):
    outcome = survive(tmp_path / "trial", trial, *whole)
    assert outcome.killed
    assert outcome.identical
    assert outcome.unreadable == 0
    assert not outcome.lost
