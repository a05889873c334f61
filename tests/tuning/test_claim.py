"""A study in a database is open in one search at a time, and the search that is older goes on.

People expected what a file gives them: the search that comes second is refused, and the search of hours is not the one
that ends.
"""

import copy
import json
import os
import threading

import pytest
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.errors import ConfigError, TuningError
from panther.tuning.study import storage as claim

optuna = pytest.importorskip("optuna")

OPTIONS = {"trials": 3, "seed": 0, "progress": False, "constraint": ">= 50 %", "first": 3}


class Study:
    """As much of a study as a claim reads and writes."""

    def __init__(self):
        self.user_attrs = {}

    def set_user_attr(self, name, value):
        self.user_attrs[name] = value


class Clock:
    """A clock that goes on only by sleeping, and calls a function for each sleep."""

    def __init__(self, tick=lambda: None):
        self.now, self.tick = 0.0, tick

    def sleep(self, seconds):
        self.now += seconds
        self.tick()

    def __call__(self):
        return self.now


def enter(study, name, **changes):
    study.user_attrs[claim._PREFIX + name] = json.dumps(claim._place() | {"state": "holds", "beat": 0} | changes)


def wait(study, clock, name="m"):
    claim._wait_for_others(study, claim._PREFIX + name, "sqlite:///x.db", clock, clock.sleep)


def test_a_second_search_is_refused_at_once_and_the_first_one_goes_on(tmp_path):
    pytest.importorskip("sqlalchemy")
    net, x, labels = classifier()
    accuracy, refusals = Accuracy(x, labels), []

    def evaluate(model):
        if not refusals:
            with pytest.raises(ConfigError) as caught:
                pr.tune(copy.deepcopy(net), accuracy, batches(x), storage=options["storage"], **OPTIONS)
            refusals.append(str(caught.value))
        return accuracy(model)

    options = {"storage": f"sqlite:///{tmp_path / 'x.db'}"}
    result = pr.tune(net, evaluate, batches(x), **options, **OPTIONS)
    assert len(result.trials) == 3
    assert f"is open in another search, process {os.getpid()} on" in refusals[0]
    # A search of this machine that was killed left its entry: its process is looked for.
    study = optuna.load_study(study_name="panther.tune", storage=options["storage"])
    enter(entered := Study(), "killed", start=1)
    study.set_user_attr(*entered.user_attrs.popitem())
    again = pr.tune(net, accuracy, batches(x), **options, **(OPTIONS | {"trials": 4}))
    assert [trial.plan for trial in again.trials[:3]] == [trial.plan for trial in result.trials]
    assert not any(thread.name == "panther-tune" for thread in threading.enumerate())


def test_a_storage_of_optuna_in_memory_is_open_in_one_search():
    net, x, labels = classifier()
    storage = optuna.storages.InMemoryStorage()

    def evaluate(model):
        pr.tune(net, Accuracy(x, labels), batches(x), storage=storage, **OPTIONS)

    with pytest.raises(TuningError, match="is open in another search"):
        pr.tune(net, evaluate, batches(x), storage=storage, **OPTIONS)


def test_a_search_of_another_machine_lives_as_long_as_it_is_renewed():
    study = Study()
    enter(study, "a", machine="elsewhere", beat=7)
    clock = Clock()
    wait(study, clock)
    assert claim._SILENT_S <= clock.now < claim._SILENT_S + 1

    def renew():
        if clock.now > claim._SILENT_S / 2:
            enter(study, "a", machine="elsewhere", beat=8)

    clock = Clock(renew)
    with pytest.raises(ConfigError, match="on elsewhere: wait until it has ended"):
        wait(study, clock)
    assert clock.now < claim._SILENT_S / 2 + 1
    enter(study, "a", space="pid:[1]")  # another container of this machine
    clock = Clock()
    wait(study, clock)
    assert clock.now >= claim._SILENT_S


@pytest.mark.parametrize("ends", ["holds", None])
def test_of_searches_that_start_together_one_goes_on(ends):
    study = Study()
    enter(study, "z", state="claims")

    def decide():
        enter(study, "z", state=ends) if ends else study.set_user_attr(claim._PREFIX + "z", None)

    if ends is None:  # it has seen this one, whose name comes first, and gave way
        wait(study, Clock(decide))
    else:  # it had looked before this one came
        with pytest.raises(ConfigError, match="is open in another search"):
            wait(study, Clock(decide))
    enter(study, "z", state="claims")
    with pytest.raises(ConfigError, match="is open in another search"):
        wait(study, Clock(), name="zz")


def test_a_process_is_told_from_a_later_one_of_its_number():
    entry = claim._place()
    assert claim._is_alive(entry) is True
    if entry["start"] is not None:
        assert claim._is_alive(entry | {"start": entry["start"] - 1}) is False
    assert claim._is_alive(entry | {"machine": "elsewhere"}) is None
    assert claim._is_alive(entry | {"process": "1"}) is None


def test_an_entry_is_renewed_while_the_storage_is_away_for_a_while(monkeypatch):
    study, renewed = Study(), threading.Event()
    failures = [OSError("away")]  # of the first renewal, which another thread than that of the search writes

    def set_user_attr(name, value):
        if threading.current_thread() is not threading.main_thread() and failures:
            raise failures.pop()
        study.user_attrs[name] = value
        if value is not None and json.loads(value)["beat"] >= 2:
            renewed.set()

    study.set_user_attr, study.beats = set_user_attr, 0
    monkeypatch.setattr(claim, "_BEAT_S", 1e-3)
    with claim.exclusive_access(study, "sqlite:///x.db"):
        renewed.wait()
    assert list(study.user_attrs.values()) == [None]
