"""Healing leaves the model as it was until its end, and an interrupted run continues to the bit."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from healing_models import checkpointed_options, compressed, data, healed, runner_of, same, state

from panther.compression import HealConfig
from panther.compression.healing import heal, shuffled
from panther.errors import FormatError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("train", ["factors", "all"])
def test_the_model_flags_and_generators_are_as_before(train, fails):
    model, new = compressed()
    model.train()
    model[0].norm.eval()
    model[1].up.weight.requires_grad_(False)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    modules, parameters, first_state = dict(model.named_modules()), dict(model.named_parameters()), state(model)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    generators = torch.manual_seed(4).get_state(), random.getstate(), np.random.get_state()[1].tolist()
    calls = []

    def call(model, batch):
        calls.append(model[0].training)
        torch.rand(3)  # a model that draws
        if fails and len(calls) == 12:
            raise KeyboardInterrupt
        return model(batch)

    config = HealConfig(max_steps=10, train=train)
    with pytest.raises(KeyboardInterrupt) if fails else torch.no_grad(), torch.enable_grad():
        heal(runner_of(model, call=call), new, config, seed=0)
    assert not any(calls)
    assert flags == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    assert modules == dict(model.named_modules())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert same(state(model), first_state)
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "2.weight")
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]


def test_the_seed_decides():
    states = []
    for seed in (3, 3, 4):
        model, new = compressed()
        torch.manual_seed(len(states))
        healed(model, new, seed=seed, max_steps=6)
        states.append(state(model))
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_a_model_that_draws_draws_the_same_for_both_and_in_every_run():
    results = []
    for noise in (0.0, 1.0, 1.0):
        torch.manual_seed(len(results))
        call = lambda model, x, noise=noise: model(x + noise * torch.randn_like(x))  # noqa: E731
        results.append(healed(*compressed(), call=call, max_steps=20))
    assert results[1] == results[2]
    assert results[1].loss_after < 0.8 * results[1].loss_before
    assert results[1].loss_before < 1.5 * results[0].loss_before


def test_the_order_visits_every_batch():
    indices = shuffled(5, 23, 7).tolist()
    assert len(indices) == 23
    assert all(sorted(indices[i : i + 5]) == list(range(5)) for i in range(0, 20, 5))
    assert indices[:5] != indices[5:10]


@pytest.mark.parametrize(
    ("dtype", "options", "after"),
    [
        (torch.float32, {}, 3),
        (torch.float32, {"train": "all", "weight_decay": 0.1}, 15),
        (torch.float16, {}, 15),
    ],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, dtype, options, after):
    options = checkpointed_options(tmp_path) | options
    whole, new = compressed(dtype)
    expected = healed(whole, new, **options | {"checkpoint_dir": None})
    steps = 0

    def call(model, batch):
        nonlocal steps
        steps += torch.is_grad_enabled()
        if steps == after:
            raise KeyboardInterrupt
        return model(batch)

    with pytest.raises(KeyboardInterrupt):
        healed(*compressed(dtype), call=call, **options)
    model, new = compressed(dtype)  # a new process
    assert healed(model, new, **options) == expected
    assert same(state(model), state(whole))
    assert (tmp_path / "healing" / "log.jsonl").is_file()


@pytest.mark.parametrize("options", [{"max_steps": 12}, {"max_steps": 60, "learning_rate": 1e4}])
def test_a_run_that_is_finished_or_diverged_is_not_run_again(tmp_path, options):
    model, new = compressed()
    expected = healed(model, new, **checkpointed_options(tmp_path) | options)
    again, new = compressed()
    steps = []

    def call(model, batch):
        steps.append(torch.is_grad_enabled())
        return model(batch)

    assert healed(again, new, call=call, **checkpointed_options(tmp_path) | options) == expected
    assert not any(steps)
    assert same(state(again), state(model))
    assert expected.diverged == ("learning_rate" in options)


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        ({"rank": 3}, {}, r"a different run \(0.up.down \(24, 8\) torch.float32 instead of \(24, 6\)"),
        ({}, {"seed": 1}, r"\(seed 0 instead of 1\)"),
        ({}, {"learning_rate": 1e-3}, r"\(learning_rate 0.005 instead of 0.001\)"),
        ({}, {"train": "all"}, r"\(train 'factors' instead of 'all'"),
        ({}, {"held_out": data(2)}, r"\(batches \[\(9, 3\)\] instead of \[\(9, 2\)\]\): give a new folder, or delete"),
    ],
)
def test_the_checkpoint_of_a_different_run_is_refused(tmp_path, build, options, match):
    healed(*compressed(), **checkpointed_options(tmp_path) | {"max_steps": 2})
    model, new = compressed(**build)
    first_state = state(model)
    with pytest.raises(FormatError, match=match):
        healed(model, new, **checkpointed_options(tmp_path) | {"max_steps": 2} | options)
    assert same(state(model), first_state)


def test_the_checkpoint_of_different_weights_is_refused(tmp_path):
    healed(*compressed(), **checkpointed_options(tmp_path) | {"max_steps": 2})
    model, new = compressed()
    with torch.no_grad():
        next(iter(new)).weight[0, 0] += 1e-6
    with pytest.raises(FormatError, match=r"\(the original checksum .* instead of checksum"):
        healed(model, new, **checkpointed_options(tmp_path) | {"max_steps": 2})


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text('{"max_')])
def test_checkpoints_of_an_unknown_run_are_refused(damage, tmp_path):
    healed(*compressed(), **checkpointed_options(tmp_path) | {"max_steps": 2})
    damage(next(tmp_path.rglob("healing.json")))
    with pytest.raises(FormatError, match=r"has checkpoints of an unknown run \(.*\): give a new folder"):
        healed(*compressed(), **checkpointed_options(tmp_path) | {"max_steps": 2})
