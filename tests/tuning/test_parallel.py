"""Trials in several processes: what they find, a process that is killed, and what they cannot be sent."""

import copy
import os
import signal
import threading
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from compressing import assert_untouched, state_of
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.errors import ConfigError, TuningError
from panther.tuning.evaluation import Outcome
from panther.tuning.goal import Figures
from panther.tuning.plan import Plan
from panther.tuning.runners import OpenTrials, run_on_workers
from panther.tuning.runners.worker import TrialServer, deserialize
from panther.tuning.study import Job

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
    original = state_of(net)
    path = tmp_path / "study.log"
    result = pr.tune(net, Killed(x, labels, tmp_path, 1), batches(x), parallel=2, storage=path, **QUICK)
    assert_untouched(net, original)
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


class Scripted:
    """A worker whose answers are prepared; it notes the calls."""

    def __init__(self, answers, calls):
        self.answers, self.calls = list(answers), calls

    def call(self, method, *values):
        self.calls.append((method, *values))

    def receive(self):
        return self.answers.pop(0)

    def end(self, at_once):
        self.calls.append(("end", at_once))
        return "signal 9"

    @classmethod
    def wait(cls, workers):
        return workers


class Search:
    """As much of a study as runners use: it draws plans with numbers, and ends trials after their second step."""

    def __init__(self):
        self.trials, self.count = [], 0

    def ask(self):
        self.count += 1
        return Job(self.count - 1, None, Plan())

    def report(self, job, step, figures):
        return step == 2

    def tell(self, job, outcome):
        self.trials.append((job.number, outcome.state, outcome.reason))


FIGURES = Figures(0.5, 1, None, 1.0)
COMPLETE = ("outcome", Outcome(FIGURES, "complete"))
PRUNED = ("outcome", Outcome(FIGURES, "pruned"))


def run_scripts(trials, count, *scripts):
    search, calls, rest = Search(), [], iter(scripts)
    run_on_workers(OpenTrials(search, trials, None), lambda: Scripted(next(rest), calls), count, iter(()))
    return search.trials, calls


def test_a_trial_whose_worker_dies_runs_again_twice_on_new_workers():
    trials, calls = run_scripts(2, 1, [("died",)], [("partial", 1, FIGURES), ("died",)], [COMPLETE, COMPLETE])
    assert trials == [(0, "complete", ""), (1, "complete", "")]
    begin = ("begin", 0, "{}")
    assert calls[:3] == [begin, ("end", True), begin]
    assert calls[3:6] == [("proceed", False), ("end", True), begin]
    trials, _ = run_scripts(1, 1, [("died",)], [("died",)], [("died",)], [])
    assert trials == [(0, "failed", "its process died 3 times (signal 9)")]


def test_partial_metrics_end_trials_and_errors_end_the_search():
    trials, calls = run_scripts(2, 2, [("partial", 1, FIGURES), ("partial", 2, FIGURES), PRUNED], [COMPLETE])
    assert sorted(trials) == [(0, "complete", ""), (1, "pruned", "")]
    assert [call for call in calls if call[0] == "proceed"] == [("proceed", False), ("proceed", True)]
    with pytest.raises(TuningError, match="no such file"):
        run_scripts(2, 2, [("error", TuningError("no such file"))], [COMPLETE])


def test_a_worker_answers_what_it_cannot_load():
    server = TrialServer(partial(deserialize, b"cpanther.no_such_module\nname\n."))
    kind, error = server.begin(3, "{}")
    assert kind == "error"
    assert isinstance(error, TuningError)
    assert "cannot be loaded in another process (ModuleNotFoundError" in str(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TuningError("evaluate raised KeyError"), "evaluate raised KeyError"),
        (ConfigError("no such kernel"), "no such kernel"),
        (ZeroDivisionError("division by zero"), "a process of the search failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_worker_answers_what_is_raised(error, message):
    class Raises:
        def trial(self, *_):
            yield 1, None
            raise error

    server = TrialServer(lambda: (Raises(), None))
    assert server.begin(3, "{}") == ("partial", 1, None)
    kind, answer = server.proceed(False)
    assert (kind, str(answer)) == ("error", message)


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
