"""A search over models that are trained from scratch."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from tuning import CLASSES, WIDTH, Accuracy, classifier

import panther as pr
from panther.errors import ConfigError, TrainingError, TuningError
from panther.train import Trainer
from panther.tuning import Float, Int

QUICK = {"trials": 4, "seed": 0, "progress": False}


def net(width=64):
    return nn.Sequential(
        nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


@pytest.fixture(scope="module")
def data():
    return classifier()[1:]


@pytest.fixture(scope="module")
def train(data):
    x, labels = data[0][:512], data[1][:512]

    def fit(model, config):
        Trainer(model, None, nn.functional.cross_entropy, config).fit(TensorDataset(x, labels))

    return fit


SPACE = {
    "2": {"num_terms": [1, 2], "low_rank": Int(0, 6)},
    "model": {"width": [32, 64]},
    "train": {"learning_rate": Float(3e-3, 3e-2, log=True), "max_steps": [30], "batch_size": 64, "progress": False},
}


def test_sizes_arguments_and_training(data, train, tmp_path):
    generator = torch.get_rng_state()
    accuracy = Accuracy(*data)
    options = {**QUICK, "space": SPACE, "train": train, "objective": "metric", "storage": tmp_path / "study.log"}
    result = pr.tune(net, accuracy, **options)
    assert torch.equal(generator, torch.get_rng_state())
    assert len(result.trials) == 4
    assert accuracy(result.model) == result.best.metric == max(trial.metric for trial in result.trials)
    for trial in result.trials:
        sizes = trial.plan.layers.get("2")
        assert (sizes is None) == (trial.params["2/low_rank"] == 0)
        assert trial.plan.train["learning_rate"] == trial.params["train/learning_rate"]
        assert trial.plan.model["width"] == trial.params["model/width"]
    sketched = next(trial for trial in result.trials if trial.plan.layers)
    model = result.build(sketched)
    assert isinstance(model[2], pr.nn.SKLinear)
    assert model[2].low_rank == sketched.params["2/low_rank"]
    assert model[2].num_terms == sketched.params["2/num_terms"]
    assert result.report is None
    assert result.to_dict()["report"] is None
    calls = accuracy.calls
    again = pr.tune(net, accuracy, **options)
    assert again.trials == result.trials
    assert accuracy.calls == calls + 3  # of the unsketched model, twice, and of the best one, trained again


def test_training_that_fails_is_a_failed_trial(data):
    def train(model, config):
        if config.learning_rate > 0.5:
            raise TrainingError("the loss is nan")

    space = {"2": {"low_rank": [2]}, "train": {"learning_rate": [1e-3, 1.0]}}
    result = pr.tune(net, Accuracy(*data), train=train, space=space, objective="metric", **QUICK)
    assert {trial.params["train/learning_rate"]: trial.state for trial in result.trials} == {
        1e-3: "complete",
        1.0: "failed",
    }
    assert any("train raised TrainingError for trial" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"space": "auto"}, ConfigError, "must be a dict of layers"),
        ({"space": {"2": {"rank": [4]}}}, ConfigError, "a layer that is trained has 'low_rank'"),
        ({"space": {"train": {"lr": [1.0]}}}, ConfigError, "did you mean 'learning_rate'"),
        ({"space": {"train": 3}}, ConfigError, "must be a dict of settings"),
        ({"space": {"model": {"depth": [1]}}}, TuningError, "the model's function raised TypeError"),
        ({"space": SPACE, "objective": "latency"}, ConfigError, "latency is not measured for models"),
        ({"space": SPACE, "train": 3}, ConfigError, "each trial trains a new model"),
        ({"space": {"train": {"max_steps": [3]}}}, TuningError, "train raised ConfigError"),
    ],
)
def test_what_is_not_understood(data, train, options, error, words):
    with pytest.raises(error, match=words):
        pr.tune(net, Accuracy(*data), **{"train": train, **QUICK, **options})
