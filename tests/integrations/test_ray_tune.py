"""Trials of pr.tune on Ray: all of a study, also where a worker is killed; continued without Ray; errors."""

import copy
import os
import signal
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from compressing import assert_untouched, state_of
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.errors import TuningError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:::ray"),
    pytest.mark.filterwarnings("ignore:.*Ray.*"),
]
number = attrgetter("number")
QUICK = {"trials": 8, "seed": 0, "progress": False, "constraint": ">= 90 %"}


@pytest.fixture(scope="module")
def trained():
    return classifier()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two cores of Ray; what it starts ends with the module."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home directory
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(pr.__file__).parents[1]), *sys.path]))
        ray.init("local", num_cpus=2, include_dashboard=False)
        yield
        ray.shutdown()


def test_eight_trials_on_two_workers_of_which_one_is_killed(trained, tmp_path):
    net, (x, labels) = copy.deepcopy(trained[0]), trained[1:]
    original, search, path = state_of(net), os.getpid(), tmp_path / "study.log"

    def evaluate(model):
        marker = Path(tmp_path, "killed")
        if os.getpid() != search and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            return (model(x[512:]).argmax(1) == labels[512:]).double().mean()

    result = pr.tune(net, evaluate, batches(x), parallel="ray", storage=path, **QUICK)
    assert (tmp_path / "killed").exists()
    assert_untouched(net, original)
    assert sorted(map(number, result.trials)) == list(range(8))
    assert {trial.state for trial in result.trials} == {"complete"}
    assert Accuracy(x, labels)(result.model) == result.best.metric
    again = pr.tune(net, Accuracy(x, labels), batches(x), storage=path, **QUICK)  # without Ray
    assert sorted(again.trials, key=number) == sorted(result.trials, key=number)


def test_asha_ends_trials_and_a_search_is_continued(trained, tmp_path):
    net, (x, labels) = trained[0], trained[1:]

    def evaluate(model):
        for end in range(544, 769, 32):
            with torch.no_grad():
                yield (model(x[512:end]).argmax(1) == labels[512:end]).double().mean()

    options = {**QUICK, "storage": tmp_path / "study.log", "pruner": "asha", "sampler": "random"}
    first = pr.tune(net, evaluate, batches(x), parallel="ray", **options | {"trials": 4})
    result = pr.tune(net, evaluate, batches(x), parallel="ray", **options | {"trials": 14})
    known = {trial.number: trial for trial in result.trials}
    assert all(known[trial.number] == trial for trial in first.trials)
    assert len(result.trials) == 14
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned
    assert all(0 < len(trial.partial) < 8 and not trial.feasible for trial in pruned)
    assert all(len(trial.partial) == 8 for trial in result.trials if trial.state == "complete")
    assert not [trial for trial in result.trials if trial.state == "failed"]


class Unloadable(Accuracy):
    """Cannot be unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise LookupError("no such data")


def test_errors_of_the_function(trained):
    net, x, search = trained[0], trained[1], os.getpid()

    def evaluate(model):
        if os.getpid() != search:
            raise RuntimeError("no such file")
        return 1.0

    with pytest.raises(TuningError, match=r"evaluate raised RuntimeError: no such file for trial \d"):
        pr.tune(net, evaluate, batches(x), parallel="ray", **QUICK)


def test_what_cannot_be_loaded_on_a_worker_ends_the_search(trained):
    net, x = trained[0], trained[1]
    with pytest.raises(TuningError, match=r"cannot be loaded in another process \(LookupError: no such data\)"):
        pr.tune(net, Unloadable(*trained[1:]), batches(x), parallel="ray", **QUICK)


def test_it_is_quiet_without_progress_and_leaves_no_folder(trained, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = trained[1]
    pr.tune(trained[0], Accuracy(*trained[1:]), batches(x), parallel="ray", **QUICK | {"trials": 2})
    assert not list(tmp_path.iterdir())
    out, err = capfd.readouterr()
    assert not out
    assert "panther" not in err
