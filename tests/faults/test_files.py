"""Files survive kills, damage and several writers. `make torture` runs the same with 1,000 kills and damaged files."""

import os

import pytest
from file_survival import (
    FORMATS,
    PLAIN_FORMATS,
    damage_files,
    save_and_rename,
    save_at_once,
    shown,
    survive_kills,
    torch_values,
)

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="processes are forked"),
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
]


def test_a_kill_leaves_the_old_or_the_new_model(tmp_path):
    outcomes = survive_kills(tmp_path, 8, seed=0)
    assert outcomes["the old model"] + outcomes["a new model"] == 8, shown(outcomes)
    assert outcomes["files left over"] == 0


def test_a_rename_is_enough_for_kills(tmp_path):
    outcomes = survive_kills(tmp_path, 4, seed=0, save=save_and_rename, load=torch_values, files=1)
    assert outcomes["the old model"] + outcomes["a new model"] == 4, shown(outcomes)
    assert outcomes["files left over"] == 0


@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_damage_of_plain_files_is_counted(tmp_path, name):
    outcomes = damage_files(tmp_path / "folder", name, 20, seed=1)
    assert outcomes["refused"] + outcomes["loaded right"] + outcomes["loaded wrong"] == 20, shown(outcomes)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_or_loads_right(tmp_path, name):
    outcomes = damage_files(tmp_path / "folder", name, 20, seed=0)
    assert outcomes["refused"] > 10
    assert outcomes["refused"] + outcomes["loaded right"] == 20, shown(outcomes)


def test_savers_at_once_tear_nothing(tmp_path):
    outcomes = save_at_once(tmp_path, 16, processes=2)
    assert outcomes["whole models loaded"] > 0
    assert not outcomes["torn or failed loads"], shown(outcomes)
    assert not outcomes["processes that failed"]
    assert not outcomes["files left over"]
