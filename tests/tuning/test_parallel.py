"""Trials in several processes: what they find, a process that is killed, and what they cannot be sent."""

import copy
import math
import os
import signal
import threading
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from compressing import assert_untouched, state_of
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.errors import ConfigError, TuningError
from panther.tuning.runners import ray as ray_runner

number = attrgetter("number")
QUICK = {"trials": 8, "seed": 0, "progress": False, "constraint": ">= 90 %"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Other processes import this module as ``tests.tuning.test_parallel``."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def trained():
    return classifier()


@pytest.fixture
def net(trained):
    return copy.deepcopy(trained[0])


class Killed(Accuracy):
    """Ends its process once for each of the markers that are not there yet, but never the search's own."""

    def __init__(self, x, labels, folder, times):
        super().__init__(x, labels)
        self.parent, self.markers = os.getpid(), [Path(folder, f"killed-{i}") for i in range(times)]

    def __call__(self, model):
        if os.getpid() != self.parent:
            for marker in self.markers:
                if not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(model)


@pytest.mark.slow  # processes that import torch
def test_eight_trials_in_two_processes_of_which_one_is_killed(net, trained, tmp_path):
    x, labels = trained[1:]
    before = state_of(net)
    path = tmp_path / "study.log"
    result = pr.tune(net, Killed(x, labels, tmp_path, 1), batches(x), parallel=2, storage=path, **QUICK)
    assert_untouched(net, before)
    assert (tmp_path / "killed-0").exists()
    assert sorted(map(number, result.trials)) == list(range(8))
    assert {trial.state for trial in result.trials} == {"complete"}
    accuracy = Accuracy(x, labels)
    assert accuracy(result.model) == result.best.metric
    for trial in result.trials[:3]:
        assert accuracy(result.build(trial)) == trial.metric
    assert len({trial.plan.to_json() for trial in result.trials}) == 8
    again = pr.tune(net, Accuracy(x, labels), batches(x), storage=path, **QUICK)  # from the storage alone
    assert sorted(again.trials, key=number) == sorted(result.trials, key=number)


@pytest.mark.slow  # processes that import torch
def test_functions_of_the_script_partial_metrics_and_a_trial_that_always_dies(net, trained, tmp_path):
    x, labels = trained[1:]
    parent, marker = os.getpid(), tmp_path / "first"

    def evaluate(model):  # cloudpickle sends it
        if os.getpid() != parent and not any(isinstance(layer, torch.nn.Linear) for layer in model):
            marker.touch()
            os._exit(3)
        for end in (600, 700, 768):
            with torch.no_grad():
                yield (model(x[512:end]).argmax(1) == labels[512:end]).double().mean()

    options = {
        **QUICK,
        "trials": 6,
        "space": {"0": {"bits": [8, 4]}, "2": {"bits": [8, 4]}, "4": {"form": ["dense", "int8"]}},
    }
    result = pr.tune(net, evaluate, batches(x), parallel=2, **options)
    assert marker.exists()
    for trial in result.trials:
        dies = len(trial.plan.layers) == 3
        assert trial.state == ("failed" if dies else "complete" if len(trial.partial) == 3 else "pruned")
        if dies:
            assert trial.reason == "its process died 3 times (exit status 3)"
    assert any(trial.state == "failed" for trial in result.trials)


@pytest.mark.slow  # processes that import torch
def test_errors_of_the_function_reach_the_search(net, trained):
    x, labels = trained[1:]
    parent = os.getpid()

    def evaluate(model):
        if os.getpid() != parent:
            raise RuntimeError("no such file")
        return (model(x).argmax(1) == labels).double().mean()

    with pytest.raises(TuningError, match=r"evaluate raised RuntimeError: no such file for trial \d"):
        pr.tune(net, evaluate, batches(x), parallel=2, **QUICK)
    lock = threading.Lock()
    with pytest.raises(TuningError, match=r"cannot be sent to other processes .*parallel=1"):
        pr.tune(net, lambda model: float(lock is not None), batches(x), parallel=2, **QUICK)


@pytest.mark.parametrize("parallel", [0, True, 1.5, "dask"])
def test_parallel_is_a_number_or_ray(net, trained, parallel):
    with pytest.raises(ConfigError, match="must be a number of processes, at least 1, or 'ray'"):
        pr.tune(net, Accuracy(*trained[1:]), parallel=parallel, **QUICK)


class Reports:
    """Stands for ray.tune on a worker."""

    def __init__(self):
        self.all = []

    def report(self, result):
        self.all.append(result)


@pytest.fixture
def ray_tune(monkeypatch):
    reports = Reports()
    monkeypatch.setattr(ray_runner, "require_extra", lambda module, extra: reports)
    monkeypatch.setattr(ray_runner, "_loaded", {})
    return reports


def test_a_worker_of_ray_tells_what_it_cannot_load(ray_tune):
    work = b"cpanther.no_such_module\nname\n."
    ray_runner._trial({"number": 3, "plan": "{}"}, work, "key")
    assert "cannot be loaded in another process (ModuleNotFoundError" in ray_tune.all[0]["raised"]
    assert math.isinf(ray_tune.all[0]["panther_value"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TuningError("evaluate raised KeyError"), "evaluate raised KeyError"),
        (ConfigError("no such kernel"), "no such kernel"),
        (ZeroDivisionError("division by zero"), "a worker of the search failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_worker_of_ray_tells_what_is_raised(ray_tune, error, words):
    class Raises:
        def run(self, *_):
            raise error

    ray_runner._loaded["key"] = Raises(), None
    ray_runner._trial({"number": 3, "plan": "{}"}, b"", "key")
    assert ray_tune.all == [{"raised": words, "panther_value": math.inf}]


def test_folders_of_killed_searches_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = tmp_path / "panther-tune-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (killed / "trial").write_text("x")
    foreign = tmp_path / "panther-tune-of-something-else"
    foreign.mkdir()
    with ray_runner._folder() as first, ray_runner._folder() as second:
        assert {one.name for one in tmp_path.iterdir()} == {foreign.name, Path(first).name, Path(second).name}
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.slow  # processes that import torch
def test_processes_leave_no_files(net, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []

    class Looks(Accuracy):
        def __reduce__(self):  # as the search is sent
            seen.append(sorted(tmp_path.iterdir()))
            return super().__reduce__()

    x, labels = trained[1:]
    pr.tune(net, Looks(x, labels), batches(x), parallel=2, **QUICK | {"trials": 3})
    assert seen == [[]]
    assert not list(tmp_path.iterdir())
