"""Which parameters healing trains, in which dtypes, and with which gradients."""

import copy
from functools import cache

import pytest
import torch
from healing_models import WIDTH, compressed, data, distance, healed, same, state
from torch import nn

from panther.compression.healing import lost_variance
from panther.nn import LowRankLinear


def test_only_the_factors_are_trained_and_all_of_them():
    model, new = compressed()
    initial, dense = state(model), [state(layer) for layer in new]
    factors = [state(layer) for layer in new.values()]
    healed(model, new, max_steps=5)
    after = state(model)
    assert all(torch.equal(after[n], value) for n, value in initial.items() if ".up." not in n and ".down." not in n)
    assert all(same(state(layer), old) for layer, old in zip(new, dense, strict=True))
    for layer, old in zip(new.values(), factors, strict=True):
        changed = {name for name, value in state(layer).items() if not torch.equal(value, old[name])}
        assert changed == {"down", "up", "bias"}


def test_everything_can_be_trained_and_the_original_keeps_its_values():
    model, new = compressed()
    model[0].norm.bias.requires_grad_(False)
    initial, original = state(model), copy.deepcopy(model).eval()
    factors_only = healed(*compressed(), max_steps=60).loss_after
    # Were the head the original's too, training it would change what is to be matched.
    result = healed(model, new, train="all", max_steps=60)
    assert result.loss_after < factors_only
    after = state(model)
    assert not torch.equal(after["2.weight"], initial["2.weight"])
    assert torch.equal(after["0.norm.bias"], initial["0.norm.bias"])
    with torch.no_grad():
        x = torch.cat(data(4, seed=5))
        error = lost_variance(model.eval()(x), original(x), None).item()
    assert error < 0.5 * result.loss_before


def test_the_weights_of_a_recurrent_layer_are_trained():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.head(self.gru(x)[0])

    torch.manual_seed(0)
    model = Recurrent()
    first_state = state(model.gru)
    result = healed(model, {model.head: LowRankLinear.from_linear(model.head, 6)}, train="all")
    assert result.loss_after < result.loss_before
    assert not any(torch.equal(value, first_state[name]) for name, value in state(model.gru).items())
    assert all(weight is getattr(model.gru, n) for weight, n in zip(model.gru._flat_weights, first_state, strict=True))


def test_a_parameter_that_new_and_dense_layer_share_stays_in_the_original():
    model, new = compressed()
    for dense, layer in new.items():
        layer.bias = dense.bias
    twin, twins = compressed()
    assert healed(model, new, max_steps=8) == healed(twin, twins, max_steps=8)
    assert same(state(model), state(twin))


@pytest.mark.parametrize("shared", ["module", "parameters"])
def test_a_layer_in_two_places_is_healed_in_both(shared):
    torch.manual_seed(0)
    dense = nn.Linear(WIDTH, WIDTH)
    other = dense
    layer = LowRankLinear.from_linear(dense, 6)
    new = {dense: layer}
    if shared == "parameters":
        other = nn.Linear(WIDTH, WIDTH)
        other.weight, other.bias = dense.weight, dense.bias
        new[other] = copy.deepcopy(layer)
        for name, p in layer.named_parameters():
            setattr(new[other], name, p)
    model = nn.Sequential(dense, nn.Tanh(), other, nn.Tanh())
    result = healed(model, new)
    assert result.loss_after < 0.8 * result.loss_before
    assert (model[0], model[2]) == (layer, new[other])
    assert model[0].down is model[2].down


@pytest.mark.parametrize("train", ["factors", "all"])
def test_the_factors_of_a_frozen_model_are_trained(train):
    model, new = compressed()
    model.requires_grad_(False)
    twin, twins = compressed()
    assert healed(model, new, train=train, max_steps=6) == healed(twin, twins, max_steps=6)
    assert same(state(model), state(twin))


@cache
def float32_loss(**options):
    return healed(*compressed(), **options).loss_after


@pytest.mark.parametrize(("dtype", "near"), [(torch.float16, 0.05), (torch.bfloat16, 0.25), (torch.float64, 1e-3)])
def test_dtypes_follow_float32(dtype, near):
    # Steps below half a unit in the last place of most entries: rounded after each, nothing would be learned.
    options = {"max_steps": 50, "learning_rate": 2e-3}
    model, new = compressed(dtype)
    result = healed(model, new, **options)
    assert result.loss_after == pytest.approx(float32_loss(**options), rel=near)
    assert distance(model, new, data(4, dtype, seed=5)) < 0.7 * result.loss_before
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("size", [1e-3, 6000.0])
def test_float16_gradients_of_any_size(size):
    """The loss has the output's square in its denominator: gradients underflow, or overflow once they are scaled."""
    model, new = compressed(torch.float16)
    model[2].weight.data.mul_(size)
    model[2].bias.data.mul_(size)
    large = [torch.cat(data(32, torch.float16, seed)) for seed in (1, 2)]
    result = healed(model, new, batches=large[:1], held_out=large[1:], match="output", max_steps=30)
    assert result.loss_after < 0.25 * result.loss_before
    assert not result.diverged


def test_mixed_precision_computes_in_half():
    expected = healed(*compressed(), max_steps=20)
    seen = set()
    model, new = compressed()
    model[2].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    result = healed(model, new, mixed_precision="bf16", max_steps=20)
    assert torch.bfloat16 in seen
    assert result.loss_after == pytest.approx(expected.loss_after, rel=0.1)


def test_clipping_applies_to_the_gradient_and_not_to_its_float16_scaling():
    for dtype in (torch.float32, torch.float16):
        losses = {}
        for clipping in (1e-9, None):  # far below AdamW's eps: nearly no step
            result = healed(*compressed(dtype), max_steps=4, gradient_clipping=clipping)
            losses[clipping] = result.history[-1][2] / result.loss_before
        assert losses[1e-9] == pytest.approx(1, abs=0.05)
        assert losses[None] < 0.9
