"""The trial of optimizers with small states: its logic, at a reduced size."""

import math
from dataclasses import replace

import pytest
import torch

pytestmark = [pytest.mark.tool, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def trial():
    from benchmarks.train import trial_optimizers

    return trial_optimizers


@pytest.fixture
def characters():
    from benchmarks.train.optimizer_tasks import TASKS

    return TASKS["characters"][0](48, True)


def losses_by_rate(trial, monkeypatch, loss_of, method, task):
    """The rates of a sweep in their order and the rate chosen, if a rate has the loss ``loss_of(rate)``."""
    rates = []

    def train(task, method, settings):
        rates.append(settings.lr)
        return {"chosen_by": loss_of(settings.lr), "loss": 0.0}

    monkeypatch.setattr(trial, "train", train)
    best = trial.Trial(task, method, trial.Progress())._sweep()
    return rates, best


def test_methods_have_the_memory_that_their_names_say(trial, characters):
    from benchmarks.train.optimizer_methods import BASELINE, METHODS

    settings = trial.Run("steps", 3e-3, 0, 2)
    rows = {name: trial.train(characters, method, settings) for name, method in METHODS.items() if "8 bits" not in name}
    numbers = {name: row["state_numbers"] / rows[BASELINE]["state_numbers"] for name, row in rows.items()}
    for name in ("channel, a quarter", "projected, a quarter", "AdamW, narrower", "LoRA", "sketched layers"):
        assert 0.15 < numbers[name] <= 0.25, name
    assert numbers["tensor, rank 1"] < 0.2
    assert 0.5 < numbers["Muon"] < 0.7
    assert numbers["Adafactor"] < 0.05
    for row in rows.values():
        assert row["state_mb"] == pytest.approx(4e-6 * row["state_numbers"], rel=0.01)
        assert row["loss"] < 5  # nats; log 98 is 4.6


def test_methods_start_with_outputs_of_the_same_size(characters):
    from benchmarks.train.optimizer_methods import METHODS

    inputs, _ = characters.batch(0, 0)
    norms = {}
    for name in ("AdamW", "LoRA", "sketched layers"):
        torch.manual_seed(0)
        norms[name] = METHODS[name].build(characters)(inputs).norm().item()
    assert norms["LoRA"] == norms["AdamW"]  # the product of the factors is zero at the start
    assert norms["sketched layers"] == pytest.approx(norms["AdamW"], rel=0.2)


@pytest.mark.parametrize(("exponent", "number"), [(0, 3), (2, 5), (-2, 5), (6, 6)])
def test_a_sweep_continues_until_its_best_rate_is_between_two_others(trial, monkeypatch, characters, exponent, number):
    from benchmarks.train.optimizer_methods import METHODS

    method = METHODS["AdamW"]
    optimum = method.first_rates[1] * 2.0**exponent
    rates, best = losses_by_rate(trial, monkeypatch, lambda lr: abs(math.log(lr / optimum)), method, characters)
    assert len(rates) == len(set(rates)) == number
    assert best == (max(rates) if exponent == 6 else pytest.approx(optimum))


def test_a_sweep_takes_no_rate_that_diverges_and_no_more_rates_than_allowed(trial, monkeypatch, characters):
    from benchmarks.train.optimizer_methods import METHODS

    method = replace(METHODS["AdamW"], most_rates=3)
    rates, best = losses_by_rate(trial, monkeypatch, lambda lr: math.inf if lr > 2e-3 else 1.0, method, characters)
    assert (len(rates), best) == (3, min(rates))


def test_a_diverged_training_has_an_infinite_loss(trial, characters):
    from benchmarks.train.optimizer_methods import METHODS

    row = trial.train(characters, METHODS["AdamW"], trial.Run("steps", 1e30, 0, 4))
    assert row["loss"] == row["chosen_by"] == math.inf


def test_a_trial_continues_after_the_last_complete_row(trial, tmp_path, monkeypatch, characters):
    from benchmarks.train.optimizer_methods import METHODS

    calls = []

    def train(task, method, settings):
        calls.append(settings)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return {"chosen_by": settings.lr, "loss": settings.lr, "state_mb": 1.0}

    monkeypatch.setattr(trial, "train", train)
    monkeypatch.setattr(trial.Trial, "_measure_step", lambda self: {"step_ms": 1.0, "x_adamw": 2.0, "peak_mb": 1.0})
    method = replace(METHODS["Muon"], most_rates=3)
    path = tmp_path / "folder" / "progress.jsonl"
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(characters, method, trial.Progress(path)).run()
    with open(path, "a") as file:
        file.write('{"task": "torn')
    progress = trial.Progress(path)
    assert len(progress.rows) == 5  # the time of a step, and four trainings
    trial.Trial(characters, method, progress).run()
    assert len(calls) == 1 + 3 + 2 + 3  # a training was interrupted; rates, seeds, and seeds for equal time
    assert [row["equal"] for row in progress.rows] == ["speed", *["steps"] * 5, *["time"] * 3]
    assert {row["steps"] for row in progress.rows if row["equal"] == "time"} == {characters.steps // 2}
    trial.Trial(characters, method, trial.Progress(path)).run()
    assert len(calls) == 9
    assert trial.Progress(path).rows == progress.rows
    (row,) = trial.summary(progress.rows)
    assert (row["method"], row["loss_steps"], row["x_adamw"]) == ("Muon", min(method.first_rates), 2.0)


def test_all_methods_run_on_images_and_times_are_measured_in_turns(trial):
    pytest.importorskip("sklearn")
    from benchmarks.train.optimizer_methods import METHODS

    progress = trial.Progress()
    methods = [replace(METHODS[name], most_rates=1, seeds=(0,)) for name in ("AdamW", "tensor, rank 1")]
    assert [task.name for task in trial.run(["images"], methods, progress, quick=True)] == ["images"] * 2
    assert [row["equal"] for row in progress.rows] == ["speed", *["steps"] * 3, "speed", *["steps"] * 3, "time"]
    assert all(row["x_adamw"] > 0 for row in progress.rows if row["equal"] == "speed")


@pytest.mark.parametrize("name", ["encoder", "smollm2"])
def test_pretrained_models_are_fine_tuned(trial, name):
    pytest.importorskip("transformers")
    from benchmarks.train.optimizer_methods import METHODS
    from benchmarks.train.optimizer_tasks import TASKS

    task = TASKS[name][0](0, True)
    rows = {}
    for method in ("AdamW", "LoRA", "tensor, rank 1"):
        (lr, *_) = METHODS[method].rates(task)
        rows[method] = trial.train(task, METHODS[method], trial.Run("steps", lr, 0, 2))
        assert math.isfinite(rows[method]["loss"])
    assert rows["LoRA"]["state_numbers"] <= rows["AdamW"]["state_numbers"] / 4
    assert rows["tensor, rank 1"]["state_numbers"] < rows["AdamW"]["state_numbers"]
    assert {"AdamW, narrower", "sketched layers"} <= set(task.excluded)


def state_numbers(methods):
    """How many numbers the optimizer of each method keeps, after a reduced run of all."""
    from benchmarks.train.trial_optimizers import Progress, run

    methods = [replace(method, seeds=(0,), most_rates=1) for method in methods.values()]
    progress = Progress()
    for _ in run(["characters"], methods, progress, quick=True):
        pass
    return {row["method"]: row["state_numbers"] for row in progress.rows if row["equal"] == "steps"}


def test_default_optimizers_select_matrices_by_themselves():
    from benchmarks.train.trial_default_optimizers import METHODS

    numbers = state_numbers(METHODS)
    assert numbers["MuonAdamW"] < numbers["AdamW"]
    assert numbers["SketchedAdamW"] < numbers["AdamW"]
