"""The search: what it finds, that it leaves the model alone, that it can be continued, and what it refuses."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from compressing import assert_untouched, state_of
from torch import nn
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.compression.selection.allocation import model_bytes
from panther.errors import CompressionError, ConfigError, FormatError, TuningError
from panther.files.records import record_checksum
from panther.tuning import Float, Group, Int

QUICK = {"trials": 8, "seed": 0, "progress": False}


@pytest.fixture(scope="module")
def trained():
    return classifier()


@pytest.fixture
def net(trained):
    return copy.deepcopy(trained[0])


@pytest.fixture
def accuracy(trained):
    return Accuracy(*trained[1:])


@pytest.fixture
def data(trained):
    return batches(trained[1])


def test_it_finds_a_small_model_that_is_good_enough_and_leaves_the_given_one(net, accuracy, data, tmp_path):
    original, generator = state_of(net), torch.get_rng_state()
    result = pr.tune(net, accuracy, data, constraint=">= 95 %", **QUICK)
    assert_untouched(net, original)
    assert torch.equal(generator, torch.get_rng_state())
    assert accuracy.calls == QUICK["trials"] + 2  # of the unchanged model, twice
    best = result.best
    assert best.metric >= 0.95 * result.unchanged.metric == 0.95 * accuracy(net).item()
    assert best.size < result.unchanged.size / 4 == model_bytes(net) / 4
    assert best.size == min(trial.size for trial in result.trials if trial.feasible)
    assert accuracy(result.model) == best.metric
    assert model_bytes(result.model) == result.report.bytes_after == best.size
    folder = pr.save_compressed(result.model, tmp_path / "tuned")
    assert accuracy(pr.load_compressed(folder, copy.deepcopy(net))) == best.metric
    other = next(trial for trial in result.trials if trial.plan != best.plan)
    assert accuracy(result.build(other.number)) == other.metric
    with pytest.raises(KeyError, match="there is no trial 99"):
        result.build(99)


def test_trials_share_layers_which_the_results_do_not(net, accuracy, data, monkeypatch):
    result = pr.tune(net, accuracy, data, constraint=">= 95 %", **QUICK)
    models, plan = result.models, result.best.plan
    first, again = models.trial_layers(plan), models.trial_layers(plan)
    assert first
    assert all(again[old] is new for old, new in first.items())
    for model in (result.model, result.build(result.best)):
        assert not set(first.values()) & set(model.modules())
    fresh, _ = models.replacement(plan)
    for old, new in fresh.items():
        state = first[old].state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in new.state_dict().items())
    monkeypatch.setattr("panther.tuning.compressed_models._CACHED_SHARE", 0.05)  # of the dense bytes
    models.trial_layers(plan)
    assert sum(size for size, _ in models._layers.values()) <= 0.05 * models.dense_cost


def test_the_first_trials_are_choices_of_compress(net, accuracy, data):
    options = {"forms": ("dense", "low_rank", "int8", "int4"), "seed": 3}
    result = pr.tune(net, accuracy, data, constraint=">= 0.75", trials=4, first=4, progress=False, **options)
    for trial in result.trials:
        model = copy.deepcopy(net)
        report = pr.compress(model, trial.params["budget"], data, measure_speed=False, **options)
        assert model_bytes(model) == trial.size
        assert accuracy(model) == trial.metric
        assert {layer.names[0]: layer.form for layer in report.layers if layer.form != "dense"} == {
            name: settings["form"] for name, settings in trial.plan.layers.items()
        }
    budgets = [trial.params["budget"] for trial in result.trials]
    fine = [trial.params["budget"] for trial in result.trials if trial.feasible]
    missed = [budget for budget in budgets if budget not in fine]
    assert max(missed, default=0) < min(fine)  # they close in on where the constraint is met


def test_a_search_that_was_ended_goes_on_as_if_it_had_not_been(net, trained, data, tmp_path):
    options = {**QUICK, "trials": 12, "constraint": ">= 90 %"}
    whole = pr.tune(net, Accuracy(*trained[1:]), data, **options)

    def end(model):
        raise KeyboardInterrupt

    path = tmp_path / "study.log"
    for call in (3, 9):  # in the first trial, and in the eighth, the unchanged model being evaluated twice each time
        with pytest.raises(KeyboardInterrupt):
            pr.tune(net, Accuracy(*trained[1:], at=call, do=end), data, storage=path, **options)
    accuracy = Accuracy(*trained[1:])
    continued = pr.tune(net, accuracy, data, storage=str(path), **options | {"seed": None})
    assert accuracy.calls == 2 + 12 - 6
    assert continued.trials == whole.trials
    assert continued.best == whole.best
    assert continued.seed == whole.seed
    again = pr.tune(net, Accuracy(*trained[1:]), data, storage=path, **options)
    assert again.trials == whole.trials
    assert torch.equal(again.model[0](trained[1]), whole.model[0](trained[1]))


def test_partial_metrics_end_poor_trials_early(net, trained, data):
    x, labels = trained[1][512:], trained[2][512:]
    seen = []

    def evaluate(model):
        right = 0
        for index, (inputs, target) in enumerate(zip(x.split(32), labels.split(32), strict=True)):
            seen.append(index)
            with torch.no_grad():
                right += (model(inputs).argmax(1) == target).sum().item()
            yield right / (32 * (index + 1))

    result = pr.tune(net, evaluate, data, constraint=">= 90 %", **{**QUICK, "trials": 16})
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned
    assert all(len(trial.partial) < 8 and not trial.feasible for trial in pruned)
    complete = [trial for trial in result.trials if trial.state == "complete"]
    assert all(len(trial.partial) == 8 and trial.partial[-1] == trial.metric for trial in complete)
    assert len(seen) == 2 * 8 + sum(len(trial.partial) for trial in result.trials)
    whole = Accuracy(*trained[1:])
    assert whole(result.model) == result.best.metric
    every = pr.tune(net, evaluate, data, constraint=">= 90 %", pruner="none", **QUICK)
    assert {trial.state for trial in every.trials} == {"complete"}


def test_without_a_constraint_the_front_is_searched(net, accuracy, data):
    result = pr.tune(net, accuracy, data, **QUICK)
    trials = [trial for trial in result.trials if trial.state == "complete"]
    beaten = {
        one.number
        for one in trials
        for other in trials
        if (other.size <= one.size and other.metric >= one.metric)
        and (other.size, -other.metric) != (one.size, -one.metric)
    }
    front = {(trial.size, trial.metric) for trial in trials if trial.number not in beaten}
    assert {(trial.size, trial.metric) for trial in result.front} == front
    assert result.best.metric == max(trial.metric for trial in trials)
    assert len(result.study.directions) == 2


def test_the_best_metric_within_a_size(net, accuracy, data):
    result = pr.tune(net, accuracy, data, objective="metric", constraint="size <= 25 %", **QUICK)
    fine = [trial for trial in result.trials if trial.size <= 0.25 * result.unchanged.size]
    assert result.best in fine
    assert result.best.metric == max(trial.metric for trial in fine)


def test_a_smaller_metric_and_a_function_as_objective(net, trained, data):
    x, labels = trained[1][512:], trained[2][512:]

    def loss(model):
        with torch.no_grad():
            return nn.functional.cross_entropy(model(x), labels)

    def ranks(model):
        return sum(parameter.numel() for parameter in model.parameters())

    bound = 1.4 * loss(net).item()
    options = {"forms": "low_rank", "constraint": f"<= {bound}", **QUICK}
    result = pr.tune(net, loss, data, objective=ranks, **options)
    assert not result.higher_is_better
    assert result.best.metric <= bound
    assert result.best.objective == ranks(result.model) < ranks(net)
    assert result.objective == "ranks"
    assert "ranks" in str(result)


def test_settings_of_layers_one_by_one_and_jointly(net, accuracy, data):
    space = {
        Group(type=nn.Linear, indices=range(0, 2), joint=True): {
            "form": ["int8", "low_rank"],
            "rank": Int(4, 24, step=4),
        },
        "4": {"bits": [8, 4, 2]},
    }
    result = pr.tune(net, accuracy, data, space=space, constraint=">= 90 %", **QUICK)
    forms = set()
    for trial in result.trials:
        layers = trial.plan.layers
        assert layers["0"]["form"] == layers["2"]["form"] == trial.params["* Linear [0:2:1]/form"]
        assert layers["4"] == {"form": f"int{trial.params['4/bits']}", "bits": trial.params["4/bits"]}
        if layers["0"]["form"] == "low_rank":
            assert layers["0"]["rank"] <= trial.params["* Linear [0:2:1]/rank"]
            assert isinstance(result.build(trial)[0], pr.nn.LowRankLinear)
        forms.add(layers["0"]["form"])
    assert forms == {"int8", "low_rank"}
    result = pr.tune(net, accuracy, data, space={nn.Linear: {"share": Float(0.2, 0.8)}}, constraint=">= 90 %", **QUICK)
    for layer in result.report.layers:
        assert layer.bytes_after <= result.best.params[f"{layer.names[0]}/share"] * layer.bytes_before


def test_without_batches_weights_are_fitted_to_themselves(net, accuracy):
    result = pr.tune(net, accuracy, constraint=">= 90 %", **QUICK)
    assert result.best.size < result.unchanged.size / 2
    assert result.report.method == "svd"


def test_reports_as_rows_json_and_a_plot(net, accuracy, data, tmp_path):
    result = pr.tune(net, accuracy, data, constraint=">= 90 %", **QUICK)
    rows = result.rows()
    assert [row["number"] for row in rows] == list(range(8))
    assert all(row["metric"] == trial.metric for row, trial in zip(rows, result.trials, strict=True))
    found = json.loads(result.to_json(tmp_path / "tuned.json").read_text())
    assert found["best"] == result.best.number
    assert found["trials"][3]["params"] == dict(result.trials[3].params)
    assert found["report"]["bytes_after"] == result.best.size
    assert "best: trial" in str(result)
    assert f"trial {result.best.number} of 8" in repr(result)
    read = pr.TuneResult.from_json(tmp_path / "tuned.json")
    assert read.to_dict() == result.to_dict()
    assert str(read) == str(result)
    assert (read.best, read.front, read.report) == (result.best, result.front, result.report)
    with pytest.raises(TuningError, match="was read from a file, which has no models"):
        read.build(0)
    matplotlib = pytest.importorskip("matplotlib")
    users_settings = dict(matplotlib.rcParams)
    for drawn in (result, read):
        for x in (None, "trial", "budget"):
            assert drawn.plot(tmp_path / "tuned.svg", x).stat().st_size > 5000
    assert dict(matplotlib.rcParams) == users_settings
    with pytest.raises(ConfigError, match="x='budgets' is not a parameter of the search: use one of 'trial', 'budget'"):
        read.plot(tmp_path / "tuned.svg", "budgets")


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """The text of a file of a result."""
    net, x, labels = trained
    options = {**QUICK, "trials": 2, "constraint": ">= 50 %"}
    result = pr.tune(copy.deepcopy(net), Accuracy(x, labels), batches(x), **options)
    return result.to_json(tmp_path_factory.mktemp("result") / "tuned.json").read_text()


def _without_checksum(record):
    return {name: value for name, value in record.items() if name != "checksum"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(best=7), "does not match its checksum"),
        (lambda record: record.update(format="panther.compress"), "was not written by TuneResult.to_json"),
        (lambda record: record.update(format_version=3), "this Panther reads 2"),
        (lambda record: record.update(best=7), "names trial 7, which it does not have"),
        (lambda record: record.update(best="0"), "best is '0', which is not a int"),
        (lambda record: record.pop("seed"), "has no entry 'seed'"),
        (lambda record: record["trials"][0].update(state="lost"), "trial 0 has the unknown state 'lost'"),
        (lambda record: record["trials"][0].update(metrics=1), r"trials\[0\] has the unknown entry 'metrics'"),
        (lambda record: record["trials"][1].pop("size"), r"trials\[1\] has no entry 'size'"),
        (lambda record: record["trials"][1].update(number=0), "two trials of one number"),
        (lambda record: record["report"]["layers"][0].update(shape=[2, "3"]), r"layers\[0\].shape\[1\] is '3'"),
    ],
)
def test_a_damaged_file_of_a_result(written, tmp_path, change, message):
    record = json.loads(written)
    change(record)
    if "checksum" not in message:
        record["checksum"] = record_checksum(_without_checksum(record))
    (tmp_path / "damaged.json").write_text(json.dumps(record))
    with pytest.raises(FormatError, match=message):
        pr.TuneResult.from_json(tmp_path / "damaged.json")


def test_a_file_of_a_commit_whose_plans_had_settings_of_a_training_is_read(written, tmp_path):
    record = json.loads(written)
    for trial in (record["unchanged"], *record["trials"]):
        trial["plan"] |= {"train": {"max_steps": 3}, "model": {}}
    record["checksum"] = record_checksum(_without_checksum(record))
    (tmp_path / "earlier.json").write_text(json.dumps(record))
    (tmp_path / "today.json").write_text(written)
    earlier, today = (pr.TuneResult.from_json(tmp_path / f"{name}.json") for name in ("earlier", "today"))
    assert earlier == today


def test_a_table_needs_pandas(net, accuracy, data, monkeypatch):
    result = pr.tune(net, accuracy, data, constraint=">= 90 %", **{**QUICK, "trials": 2})
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(pr.errors.MissingExtraError, match="pip install pandas"):
        result.to_dataframe()


@pytest.mark.parametrize("sampler", ["gp", "random"])
def test_other_samplers(net, accuracy, data, sampler):
    result = pr.tune(net, accuracy, data, constraint=">= 90 %", sampler=sampler, **{**QUICK, "trials": 6, "first": 3})
    assert len(result.trials) == 6
    assert result.best.feasible


def test_a_space_that_is_exhausted_ends_the_search(net, accuracy, data):
    result = pr.tune(net, accuracy, data, space={"2": {"bits": [8, 4, 3]}}, constraint=">= 0", **QUICK)
    assert len(result.trials) == 3
    assert "ended after 3 of 8 trials: no plan was found that was not tried before" in result.notes
    assert accuracy.calls == 5


def test_the_generators_are_seeded_before_each_evaluation(net, trained, data):
    x, labels = trained[1][512:], trained[2][512:]

    def evaluate(model):
        model.train()  # no one has to put it back
        chosen = [
            *torch.randint(256, (40,)),
            *np.random.randint(0, 256, 40),
            *(random.randrange(256) for _ in range(40)),
        ]
        with torch.no_grad():
            return (model(x[chosen]).argmax(1) == labels[chosen]).float().mean()

    result = pr.tune(net, evaluate, data, constraint=">= 90 %", **{**QUICK, "trials": 3})
    assert not result.model.training


def change_weight(model):
    model[0].weight.data.mul_(1.0 + 1e-6)


def change_buffer(model):
    model.register_buffer("note", torch.zeros(1))


def change_layer(model):
    model[1] = nn.Tanh()


def fail(model):
    raise RuntimeError("no such file")


@pytest.mark.parametrize(
    ("at", "do", "message"),
    [
        (1, fail, r"evaluate raised RuntimeError: no such file for the unchanged model \(test_tune.py, line \d+\)"),
        (4, fail, r"evaluate raised RuntimeError: no such file for trial 1 \(test_tune.py"),
        (1, change_weight, "evaluate changed parameter '0.weight' of the unchanged model, and must not"),
        (2, change_buffer, "evaluate changed buffer 'note' of the unchanged model"),
        (5, change_layer, "evaluate changed module '1' of trial 2"),
    ],
)
def test_an_evaluation_that_raises_or_changes_the_model(net, trained, data, at, do, message):
    original = state_of(net)
    with pytest.raises(TuningError, match=message):
        pr.tune(net, Accuracy(*trained[1:], at=at, do=do), data, constraint=">= 90 %", **QUICK)
    assert_untouched(net, original)


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda model: math.nan, "evaluate returned nan for the unchanged model, and must return a finite number"),
        (lambda model: None, "evaluate returned a NoneType for the unchanged model, and must return a number"),
        (lambda model: torch.ones(2), "evaluate returned a Tensor for the unchanged model"),
        (lambda model: "0.9", "evaluate returned a str for the unchanged model"),
        (lambda model: iter(()), "evaluate returned a tuple_iterator"),
        (lambda model: (value for value in ()), "evaluate yielded nothing"),
    ],
)
def test_an_evaluation_that_returns_no_number(net, data, evaluate, message):
    with pytest.raises(TuningError, match=message):
        pr.tune(net, evaluate, data, **QUICK)


def test_an_evaluation_that_varies(net, data):
    values = iter([0.9, 0.8, 0.9, 0.8, *[0.7] * 40])
    with pytest.raises(TuningError, match=r"not deterministic: it returned 0\.9 and then 0\.8 for the unchanged model"):
        pr.tune(net, lambda model: next(values), data, **QUICK)
    result = pr.tune(net, lambda model: next(values), data, repeats=2, **{**QUICK, "trials": 2})
    assert [trial.metric for trial in result.trials] == [0.7, 0.7]


def test_trials_without_a_number_are_failed(net, trained, data):
    class Sometimes(Accuracy):
        def __call__(self, model):
            value = super().__call__(model)
            return math.nan if self.calls in (4, 6) else value

    result = pr.tune(net, Sometimes(*trained[1:]), data, constraint=">= 90 %", **QUICK)
    assert [trial.number for trial in result.trials if trial.state == "failed"] == [1, 3]
    assert "trial 1 failed: evaluate returned nan" in result.notes
    assert json.loads(json.dumps(result.to_dict()))["trials"][1]["metric"] is None

    class Never(Accuracy):
        def __call__(self, model):
            value = super().__call__(model)
            return value if self.calls < 3 else math.inf

    with pytest.raises(TuningError, match=r"no trial of 8 was completed \(evaluate returned inf\)"):
        pr.tune(net, Never(*trained[1:]), data, constraint=">= 90 %", **QUICK)


def test_a_constraint_that_nothing_satisfies_says_the_best_reached(net, accuracy, data):
    with pytest.raises(TuningError) as caught:
        pr.tune(net, accuracy, data, constraint=">= 1.01", **QUICK)
    assert "no trial of 8 satisfies constraint='>= 1.01': the best reached is metric 0.79" in str(caught.value)
    assert "and the unchanged model has metric" in str(caught.value)


def test_a_storage_whose_functions_differ(net, accuracy, data, tmp_path):
    def weighted(weight):
        return lambda model, batch: weight * model(batch)

    optuna = pytest.importorskip("optuna")
    storage = optuna.storages.InMemoryStorage()
    options = {**QUICK, "trials": 2, "storage": storage, "constraint": ">= 80 %"}
    pr.tune(net, accuracy, data, forward_fn=weighted(1.0), **options)
    pr.tune(net, accuracy, data, forward_fn=weighted(1.0), **options)
    with pytest.raises(ConfigError, match=r"has another study .*forward_fn .* instead of"):
        pr.tune(net, accuracy, data, forward_fn=weighted(2.0), **options)


def test_a_storage_of_another_study(net, accuracy, data, tmp_path):
    path = tmp_path / "study.log"
    options = {**QUICK, "trials": 2, "storage": path}
    pr.tune(net, accuracy, data, constraint=">= 80 %", **options)
    for changed, difference in (
        ({"constraint": ">= 70 %"}, r"constraint >= 80 % instead of >= 70 %"),
        ({"objective": "metric"}, "objective size instead of metric"),
        ({"space": {"0": {"bits": [8, 4]}}}, "space auto instead of 0"),
        ({"seed": 1}, "seed 0 instead of 1"),
    ):
        with pytest.raises(ConfigError, match=f"has another study .*{difference}"):
            pr.tune(net, accuracy, data, **{"constraint": ">= 80 %"} | options | changed)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(ConfigError, match="model Sequential"):
        pr.tune(other, accuracy, data, constraint=">= 80 %", **options)
    with pytest.raises(ConfigError, match="in which evaluate returned"):
        pr.tune(net, lambda model: 0.5, data, constraint=">= 80 %", **options)
    path.write_text("{}\nnonsense\n")
    with pytest.raises(ConfigError, match="cannot be opened"):
        pr.tune(net, accuracy, data, constraint=">= 80 %", **options)


def test_what_is_caught_fails_its_trial_and_ends_nothing(net, accuracy, data):
    """A model of one trial may need more memory than there is."""

    def evaluate(model):
        calls.append(model)
        if len(calls) in (4, 6):
            model.train()
            raise MemoryError("of one trial")
        return accuracy(model)

    calls, options = [], QUICK | {"constraint": ">= 80 %", "trials": 5}
    result = pr.tune(net, evaluate, data, catch=(MemoryError, ValueError), **options)
    assert [trial.state for trial in result.trials] == ["complete", "failed", "complete", "failed", "complete"]
    assert result.trials[1].reason.startswith("evaluate raised MemoryError: of one trial for trial 1 (test_tune.py")
    assert any("failed: evaluate raised MemoryError" in note for note in result.notes)
    assert result.best.feasible
    calls = []
    with pytest.raises(TuningError, match="evaluate raised MemoryError"):
        pr.tune(net, evaluate, data, catch=ValueError, **options)
    calls = [None] * 3
    with pytest.raises(TuningError, match="raised MemoryError: of one trial for the unchanged model"):
        pr.tune(net, evaluate, data, catch=MemoryError, **options)
    for wrong in (3, "MemoryError", [int], KeyboardInterrupt):
        with pytest.raises(TypeError, match="catch must be exception classes"):
            pr.tune(net, evaluate, data, catch=wrong, **QUICK)


def test_a_function_that_changes_the_model_before_it_raises_ends_the_search(net, accuracy, data):
    def evaluate(model):
        calls.append(model)
        if len(calls) == 4:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
            raise MemoryError
        return accuracy(model)

    calls = []
    with pytest.raises(TuningError, match=r"evaluate, which raised MemoryError\(\), changed"):
        pr.tune(net, evaluate, data, catch=MemoryError, constraint=">= 80 %", **QUICK)


def test_a_storage_cut_short_by_a_kill_is_mended_and_open_in_one_search(net, accuracy, data, tmp_path):
    path = tmp_path / "study.log"
    options = {**QUICK, "trials": 5, "constraint": ">= 80 %", "storage": path}
    whole = pr.tune(net, accuracy, data, **options)
    written = path.read_bytes()
    torn = [index for index in (len(written) // 2, len(written) - 9) if written[index - 1 : index] != b"\n"]
    assert torn
    for length in torn:
        path.write_bytes(written[:length])
        continued = pr.tune(net, accuracy, data, **options)
        assert [trial.plan for trial in continued.trials] == [trial.plan for trial in whole.trials]
        assert [trial.metric for trial in continued.trials] == [trial.metric for trial in whole.trials]
        assert any("ended within a line: its" in note for note in continued.notes)

    def search(model):
        pr.tune(net, accuracy, data, **options)

    with pytest.raises(TuningError) as caught:
        pr.tune(net, search, data, **options)
    assert "is open in another search" in str(caught.value)


def test_a_second_search_of_a_storage_that_has_no_lock_ends_the_first_one(net, trained, data):
    optuna = pytest.importorskip("optuna")
    storage = optuna.storages.InMemoryStorage()
    options = {**QUICK, "trials": 3, "constraint": ">= 80 %", "storage": storage}
    results = []

    def search(model):
        results.append(pr.tune(net, Accuracy(*trained[1:]), data, **options))

    first = Accuracy(*trained[1:], at=4, do=search)  # in its second trial
    with pytest.raises(TuningError, match="another search continues the study of this storage, and has ended a trial"):
        pr.tune(net, first, data, **options)
    assert len(results[0].trials) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {}}, "must be 'auto', or a dict"),
        ({"space": {"0": {}}}, "must be 'auto' or a dict of settings"),
        ({"space": {"0": {"ranks": [2]}}}, "has the unknown setting 'ranks': use"),
        ({"space": {"0": {"form": ["int7"], "rank": [2]}}}, "form 'int7' is unknown"),
        ({"space": {"0": {"form": "interpolative"}}}, "has the form 'interpolative' and no rank"),
        ({"space": {"0": {"rank": [2], "share": [0.5]}}}, "are alternatives"),
        ({"space": {"0": {"bits": [2]}, nn.Linear: {"bits": [4]}}}, "is in two lines of the space"),
        ({"space": {"0": {"bits": [2]}}, "forms": "int8"}, "forms= is for the space 'auto'"),
        ({"space": {"0": {"bits": [2]}}, "include": "2"}, "include= is for space='auto'"),
        ({"sampler": "best"}, "sampler='best' is unknown"),
        ({"sampler": 3}, "sampler must be a name"),
        ({"pruner": "never"}, "pruner='never' is unknown"),
        ({"storage": 3}, "storage must be a path"),
        ({"timeout_s": 0}, "timeout_s=0 must be positive"),
    ],
)
def test_arguments_that_are_not_understood(net, accuracy, data, options, message):
    with pytest.raises(ConfigError, match=message):
        pr.tune(net, accuracy, data, **QUICK | options)
    assert accuracy.calls == 0


def test_arguments_of_the_wrong_kind(net, accuracy, data):
    with pytest.raises(TypeError, match="evaluate must be a function of a model, not a float"):
        pr.tune(net, 0.9, data)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, or a function that returns one, not a int"):
        pr.tune(3, accuracy, data)
    with pytest.raises(TuningError, match="the model's function raised TypeError"):
        pr.tune(accuracy, accuracy, data)
    with pytest.raises(ConfigError, match="latency needs calibration="):
        pr.tune(net, accuracy, objective="latency")
    with pytest.raises(CompressionError, match="at least 2"):
        pr.tune(net, accuracy, data[:1])
