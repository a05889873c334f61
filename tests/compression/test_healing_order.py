"""Healing leaves the model as it was until its end, and is a function of the seed."""

import random

import numpy as np
import pytest
import torch
from healing_models import compressed, healed, runner_of, same, state

from panther.compression import HealConfig
from panther.compression.healing import heal, shuffled


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
