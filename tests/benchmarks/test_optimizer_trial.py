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


def test_all_methods_run_on_images_and_times_are_measured_in_turns(trial):
    pytest.importorskip("sklearn")
    from benchmarks.train.optimizer_methods import METHODS

    progress = trial.Progress()
    seeds = {"AdamW": (0, 1), "tensor, rank 1": (0, 1), "Muon": (0,)}
    methods = [replace(METHODS[name], most_rates=1, seeds=of_method) for name, of_method in seeds.items()]
    methods[-1] = replace(methods[-1], first_rates=(0.1,), rate_of="AdamW")
    assert [task.name for task in trial.run(["images"], methods, progress, quick=True)] == ["images"] * 3
    kinds = {name: [row["equal"] for row in progress.rows if row["method"] == name] for name in seeds}
    swept = ["speed", *["steps"] * 3]
    expected = {"AdamW": [*swept, "steps"], "tensor, rank 1": [*swept, "steps", "time", "time"], "Muon": swept[:3]}
    assert kinds == expected
    first = [row for row in progress.rows if row.get("seed") == 0 and row["equal"] == "steps"]
    best = min((row for row in first if row["method"] == "AdamW"), key=lambda row: row["chosen_by"])
    assert [row["lr"] for row in first if row["method"] == "Muon"] == [0.1, best["lr"]]
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


def test_losses_of_layers_stand_in_a_line_for_each_size():
    from benchmarks.figures.optimizers_table import layers_table

    losses = {"dense": (2.0, ""), "narrower, a quarter": (2.5, 1.5), "Monarch, a quarter": (2.25, 1.75)}
    runs = [
        {"method": method, "equal": equal, "lr": "0.1", "loss": str(loss + shift)}
        for method, of_method in losses.items()
        for equal, loss in zip(("steps", "time"), of_method, strict=True)
        for shift in (-0.125, 0.125)
        if loss
    ]
    assert layers_table([("words-96", runs)]).rstrip().splitlines()[3:] == [
        "   ,dense,narrower,sparse,signs,pair,Monarch",
        '   "words 96, a quarter",2.000,2.500 / 1.500,,,,2.250 / 1.750',
        '   "words 96, a tenth",2.000,,,,,',
    ]


def test_rates_are_compared_with_those_of_the_dense_network_under_the_same_optimizer():
    from benchmarks.figures.optimizers_table import rates_table

    def rows(method, losses):
        common = {"method": method, "equal": "steps", "seed": "0"}
        return [
            common | {"lr": str(lr), "chosen_by": str(chosen_by), "loss": str(loss)}
            for lr, (chosen_by, loss) in losses.items()
        ]

    runs = [
        *rows("dense", {0.001: (2.0, 2.1), 0.002: (2.5, 2.0)}),
        *rows("Monarch, a tenth", {0.002: (2.25, 2.25), 0.004: (2.5, 2.5)}),
        *rows("Monarch, a tenth, stated rates", {0.001: (2.375, 2.375), 0.002: (2.125, 2.25)}),
        *rows("Monarch, a tenth, Muon", {0.004: (1.0, 1.0), 0.008: (1.5, 1.5)}),
        *rows("dense, Muon", {0.004: (3.0, 3.0), 0.008: (2.0, 2.0)}),
    ]
    lines = rates_table([("words-96", runs), ("words-192", runs[:2])]).splitlines()
    assert [line for line in lines if any(word in line for word in ("dense", "Monarch", "words"))] == [
        ".. csv-table:: AdamW: loss less the least, at the dense network's rate, ×best rate",
        "   ,words 96,words 192",
        "   dense,0.001,0.001",
        '   "Monarch, a tenth",×2,',
        ".. csv-table:: stated rates: loss less the least, at the dense network's rate, ×best rate",
        "   ,words 96",
        '   "Monarch, a tenth",0.125 ×2',
        ".. csv-table:: Muon: loss less the least, at the dense network's rate, ×best rate",
        "   ,words 96",
        "   dense,0.008",
        '   "Monarch, a tenth",0.500 ×0.5',
    ]
