"""Runs that are killed, wherever, and resumed end bit for bit as if nothing had been."""

import pytest
from survival import run_in_group, survive, trials

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digest of a run that nobody disturbed, and its seconds."""
    directory = tmp_path_factory.mktemp("whole")
    digest, seconds = run_in_group(directory, None)
    assert digest
    return digest, seconds


@pytest.mark.parametrize("trial", trials(12), ids=lambda t: f"{t.seed}-{t.moment}-{t.victim}".replace(" ", "-"))
def test_a_killed_run_ends_as_if_nothing_had_been(tmp_path, trial, whole):
    outcome = survive(tmp_path / "trial", trial, *whole)
    assert outcome.identical
    assert outcome.unreadable == 0
    assert not outcome.lost
