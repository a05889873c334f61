"""Measured losses of single layers against forwards of the changed model, and what a second measurement costs."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import panther as pr
from panther.compression import preparation
from panther.compression.calibration.targets import replace_modules
from panther.compression.config import CompressConfig
from panther.compression.forms import Option
from panther.compression.preparation import make_runner, prepare
from panther.compression.selection.allocation import choose_global, options_near_global
from panther.compression.selection.trials import Trials, convert_all
from tests.support.compressing import quick


class Encoder(nn.Module):
    def __init__(self, batch_first=True, rows=False):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.rows, self.batch_first = nn.Linear(32, 24), rows, batch_first

    def forward(self, x):  # (N, T, 32)
        states = self.blocks(x if self.batch_first else x.transpose(0, 1))
        states = states if self.batch_first else states.transpose(0, 1)
        # All samples' rows in one dimension, as some models flatten them.
        return self.head(states.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.rows else self.head(states)


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.GELU(), nn.Conv2d(24, 24, 3, groups=2), nn.Flatten(1), nn.Linear(864, 8)
    )


KINDS = {
    "encoder": (Encoder, (9, 32)),
    "time first": (lambda: Encoder(batch_first=False), (9, 32)),
    "rows": (lambda: Encoder(rows=True), (9, 32)),
    "images": (images, (3, 10, 10)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_single_layers_are_those_of_the_changed_model(kind, monkeypatch):
    build, shape = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, *shape, generator=generator) for _ in range(6)]
    config = CompressConfig(bits=5.0, calibration=batches, forms=("int6", "int5", "int4"), measure_speed=False)
    model = build().eval()
    runner = make_runner(model, config)
    # 16 samples in 64 directions: a relative standard deviation of 0.044.
    monkeypatch.setattr("panther.compression.selection.trials._PAIRS", 1024)
    monkeypatch.setattr("panther.compression.selection.trials._DIRECTIONS", 64)
    monkeypatch.setattr("panther.compression.selection.trials._MOST_PASSES", 64)
    with runner.calibrating(0):
        prepared = prepare(runner, config, 0)
        choice = prepared.allocation.choice
        losses = Trials(runner, prepared.survey, prepared.fits, 0)._losses(choice, "losses")
        new = convert_all(prepared.survey, prepared.fits, choice, 0)
        variants = [
            partial(replace_modules, model, {module: new[module] for module in target.modules}) for target in choice
        ]
        errors = runner.errors(variants, "single layers", runner.batches[:1])
    assert list(losses) == list(choice)
    for target, error in zip(choice, errors, strict=True):
        assert math.isclose(losses[target], error**2, rel_tol=0.25), (target.name, losses[target], error**2)


def test_a_choice_is_measured_once_and_an_option_is_made_once(monkeypatch):
    batches = list(torch.randn(96, 9, 32).split(16))
    config = CompressConfig(bits=5.0, calibration=batches, forms=("int6", "int5", "int4"), measure_speed=False)
    runner = make_runner(Encoder().eval(), config)
    with runner.calibrating(0):
        prepared = prepare(runner, config, 0)
        first = {target: options[0] for target, options in prepared.fits.options.items()}
        target = next(iter(first))
        second = first | {target: prepared.fits.options[target][1]}
        made, measured = [], []
        monkeypatch.setattr(
            "panther.compression.selection.trials.convert_target",
            lambda target, fits, option, seed: made.append((target, option)) or {},
        )
        monkeypatch.setattr(
            type(runner), "errors", lambda self, variants, _: measured.append(len(variants)) or [0.5] * len(variants)
        )
        trials = Trials(runner, prepared.survey, prepared.fits, 0)
        assert trials.errors([first, first]) == [0.5, 0.5]
        assert trials.errors([second, first]) == [0.5, 0.5]
    assert measured == [1, 1]
    assert len(made) == len(first) + 1


def test_a_layer_whose_output_shows_no_samples_keeps_its_predicted_loss():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.first = nn.Linear(32, 48), nn.Linear(32, 48)

        def forward(self, x):  # (N, 32)
            return self.first(x) + self.shared(x.mean(0))

    ratios = ratios_of(Pooled(), (32,))
    assert ratios["shared"] == {1.0}
    assert len(ratios["first"]) == 1
    assert ratios["first"] != {1.0}


def ratios_of(model, shape):
    """Return measured over predicted losses of each layer, in batches of 16 samples."""
    batches = list(torch.randn(160, *shape, generator=torch.Generator().manual_seed(0)).split(16))
    config = CompressConfig(bits=5.0, calibration=batches, forms=("int6", "int5", "int4"), measure_speed=False)
    runner = make_runner(model.eval(), config)
    with runner.calibrating(0):
        prepared = prepare(runner, config, 0)
        trials = Trials(runner, prepared.survey, prepared.fits, 0)
        options = prepared.fits.options
        corrected = trials.corrected(options, prepared.allocation.choice)
    return {
        target.name: {
            new.loss / old.loss for new, old in zip(corrected[target], options[target], strict=True) if old.loss
        }
        for target in options
    }


def options_of_widths(losses, widths=(2, 3, 4, 5, 6, 8), size=1000):
    return {
        index: [*(Option(f"int{b}", b * size, None, b, loss * 4.0**-b) for b in widths), Option("dense", 32 * size)]
        for index, loss in enumerate(losses)
    }


@pytest.mark.parametrize("bits", [2.0, 2.3, 3.7, 4.25, 6.9, 8.0, 20.0])
def test_options_near_a_global_choice_are_those_of_losses_that_differ_by_the_factor(bits):
    generator = torch.Generator().manual_seed(0)
    losses = (4.0 ** (2 * torch.rand(40, generator=generator, dtype=torch.float64))).tolist()
    options, limit = options_of_widths(losses), int(40_000 * bits)
    near = options_near_global(options, limit, 2.0)
    choice = choose_global(options, limit)
    assert sum(option.bytes for option in choice.values()) <= limit
    # The last bytes can go to a weight out of order.
    assert sum(option in near[index] for index, option in choice.items()) >= 39
    for factor in (0.55, 1.8):
        for index in range(0, 40, 7):
            changed = [loss * (factor if index == other else 1.0) for other, loss in enumerate(losses)]
            option = choose_global(options_of_widths(changed), limit)[index]
            assert option.bits in {each.bits for each in near[index]}
    assert sum(map(len, near.values())) <= 2.5 * 40


def test_few_widths_are_rounded_and_the_error_is_that_of_all_widths(monkeypatch):
    batches = list(torch.randn(96, 9, 32, generator=torch.Generator().manual_seed(0)).split(16))
    rounded = []
    original = preparation.fit_quantized

    def count(tasks, *settings, **options):
        rounded.extend(len(task.widths) for task in tasks)
        return original(tasks, *settings, **options)

    monkeypatch.setattr("panther.compression.preparation.fit_quantized", count)
    few = pr.compress(Encoder().eval(), bits=4.5, calibration=batches, **quick)
    num_few, number = sum(rounded), len(rounded)
    rounded.clear()
    monkeypatch.setattr("panther.compression.preparation._WRONG", 1e6)
    every = pr.compress(Encoder().eval(), bits=4.5, calibration=batches, **quick)
    assert num_few <= 3 * number < 5 * number <= sum(rounded)
    assert few.measured_error <= 1.1 * every.measured_error


@pytest.mark.parametrize("forms", ["int4", ("int4", "int6"), ("dense", "int4"), ("low_rank", "int8")])
@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_a_budget_that_dense_layers_meet(forms, budget):
    batches = list(torch.randn(96, 9, 32, generator=torch.Generator().manual_seed(0)).split(16))
    model = Encoder().eval()
    report = pr.compress(model, budget=budget, calibration=batches, forms=forms, **quick)
    assert {layer.form for layer in report.layers} <= ({forms} if isinstance(forms, str) else set(forms))
    assert report.eligible_ratio <= budget
