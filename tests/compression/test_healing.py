"""Healing: better than before and never worse, bad input refused, and rates that suit the parameters."""

import math

import pytest
import torch
from healing_models import WIDTH, Block, compressed, data, distance, healed, same, state
from torch import nn

import panther as pr
from panther.compression import HealConfig
from panther.compression.calibration.batches import Masks
from panther.compression.calibration.targets import swap_modules
from panther.compression.forms import default_forms
from panther.compression.healing import lost_variance
from panther.errors import CompressionError, ConfigError
from panther.nn import InterpolativeLinear, LowRankLinear, QuantizedLinear


@pytest.mark.parametrize("match", ["hidden", "output"])
def test_a_healed_model_is_nearer_to_the_original(match):
    model, new = compressed()
    unseen = data(4, seed=5)
    swap_modules(model, new)
    first_distance = distance(model, new, unseen)
    swap_modules(model, {layer: dense for dense, layer in new.items()})
    result = healed(model, new, match=match, max_steps=60)
    assert distance(model, new, unseen) < 0.3 * first_distance
    assert result.loss_after < 0.3 * result.loss_before
    assert (result.steps, result.diverged) == (60, False)
    assert [step for step, _, held_out in result.history if held_out is not None] == list(range(10, 61, 10))
    best = dict((step, held_out) for step, _, held_out in result.history)[result.best_step]
    assert result.loss_after == best == min(h for _, _, h in result.history if h is not None)


def test_matching_hidden_states_brings_them_nearer_than_matching_the_output():
    errors = {}
    for match in ("hidden", "output"):
        model, new = compressed()
        healed(model, new, match=match)
        first = nn.Sequential(model[0])
        own = {dense: layer for dense, layer in new.items() if layer in set(first.modules())}
        errors[match] = distance(first, own, data(4, seed=5))
    assert errors["hidden"] < 0.8 * errors["output"]


def test_the_loss_is_the_share_of_variance_lost():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(6, 5, 4, generator=generator) * 3 + 100 * torch.arange(4)
    flat = wanted.flatten(0, 1)
    expected = (0.25 / flat.var(0).mean()).item()
    assert lost_variance(wanted + 0.5, wanted, None).item() == pytest.approx(expected, rel=1e-3)
    assert lost_variance(wanted, wanted, None).item() == 0
    mask = torch.rand(6, 5, generator=generator) < 0.5
    poisoned = torch.where(mask[..., None], wanted + 0.5, torch.nan)
    expected = (0.25 / wanted[mask].var(0).mean()).item()
    masks = Masks((mask,))
    assert lost_variance(poisoned, wanted, masks).item() == pytest.approx(expected, rel=1e-3)
    assert lost_variance(poisoned.mT.mT.transpose(0, 1), wanted.transpose(0, 1), masks).item() == pytest.approx(
        expected, rel=1e-3
    )  # (T, N, ...) too
    image = torch.randn(2, 4, 3, 3, generator=generator)  # channels second
    expected = (0.25 / image.movedim(1, -1).flatten(0, 2).var(0).mean()).item()
    assert lost_variance(image + 0.5, image, None).item() == pytest.approx(expected, rel=1e-3)
    pooled = torch.randn(6, 5, generator=generator)  # has the mask's shape, and no dimension of features beyond
    assert lost_variance(pooled + 0.5, pooled, masks) == lost_variance(pooled + 0.5, pooled, None)
    assert lost_variance(wanted + 1, wanted, Masks((torch.zeros(6, 5, dtype=torch.bool),))).item() == 0


@pytest.mark.parametrize("shape", [(), (3,), (1, 4), (1, 1), (5, 1), (2, 3, 1), (0, 4)])
@pytest.mark.parametrize("value", [0.0, 7.0])
def test_the_loss_is_finite_where_nothing_varies(shape, value):
    wanted = torch.full(shape, value)
    assert lost_variance(wanted, wanted, None).item() == 0
    assert math.isfinite(lost_variance(wanted + 1, wanted, None).item())


def test_never_worse_than_at_the_start():
    model, new = compressed()
    first_state = state(nn.ModuleList(new.values()))
    result = healed(model, new, max_steps=60, validate_every_n_steps=5, learning_rate=30.0)
    assert (result.steps, result.diverged, result.best_step) == (5, True, 0)
    assert result.loss_after == result.loss_before
    assert same(state(nn.ModuleList(new.values())), first_state)


def test_divergence_ends_healing_at_the_best_point():
    result = healed(*compressed(), max_steps=150, validate_every_n_steps=5, learning_rate=0.3)
    assert result.diverged
    assert 0 < result.best_step < result.steps < 150
    assert result.loss_after < 0.8 * result.loss_before


def test_a_loss_that_is_not_finite_is_divergence():
    model, new = compressed()
    first_state = state(nn.ModuleList(new.values()))
    result = healed(model, new, batches=[data(1)[0] * math.inf], max_steps=10)
    assert (result.diverged, result.steps, result.history) == (True, 1, ())
    assert same(state(nn.ModuleList(new.values())), first_state)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"max_steps": 2.5}, "max_steps=2.5 must be a whole number, not float"),
        ({"max_steps": None}, "max_steps=None must be a whole number, not NoneType"),
        ({"validate_every_n_steps": -1}, "validate_every_n_steps=-1 must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive and finite"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3' must be a number, not str"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0 and finite: use 0"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be"),
        ({"gradient_clipping": 0}, "gradient_clipping=0.0 must be positive and finite"),
        ({"mixed_precision": "fp8"}, "'fp8' is unknown: use one of"),
        ({"match": "logits"}, "match='logits' is unknown: use one of 'hidden', 'output'"),
        ({"train": "none"}, "train='none' is unknown: use one of 'factors', 'all'"),
        ({"steps": 3}, "'steps' is not a setting of HealConfig: did you mean 'max_steps'"),
        ({"lr": 1e-3}, "did you mean 'learning_rate'"),
    ],
)
def test_bad_config(values, match):
    with pytest.raises(ConfigError, match=match):
        HealConfig(**values)


def test_bad_input():
    model, new = compressed()
    first_state = state(model)
    with pytest.raises(CompressionError, match="is nan before the first step and must be finite"):
        healed(model, new, held_out=[data(1)[0] * math.nan])
    with pytest.raises(ConfigError, match="the loss depends on no trainable parameter"):
        healed(model, new, match="output", call=lambda model, x: model(x).detach())
    with pytest.raises(CompressionError, match=r"a tensor of torch.int64, and a floating tensor"):
        healed(model, new, call=lambda model, x: model(x).argmax(-1))
    assert same(state(model), first_state)


def test_each_parameter_has_a_rate_that_suits_its_size():
    """AdamW's first step moves every entry by the rate: 0.003 of the size of what is not a low-rank factor."""
    model, new = compressed()
    with torch.no_grad():
        model[0].norm.weight.mul_(100)
        model[1].norm.weight.mul_(1e-3)
        model[2].bias.zero_()
    first_values = {name: value for name, value in model.named_parameters() if "up" not in name and "down" not in name}
    first_values = {name: value.detach().clone() for name, value in first_values.items()}
    healed(model, new, train="all", max_steps=1, learning_rate=None, gradient_clipping=None)
    after = dict(model.named_parameters())
    for name, old in first_values.items():
        size = max(old.square().mean().sqrt().item(), 0.01 if name.endswith("bias") else 0.0)
        moved = (after[name].detach() - old).abs().max().item()
        assert moved == pytest.approx(0.003 * size, rel=2e-3), name


def test_the_default_rate_heals_quantized_layers():
    model, _ = compressed()
    layers = [getattr(block, name) for block in model[:2] for name in ("up", "down")]
    new = {dense: QuantizedLinear.from_linear(dense, 2, group_size=16) for dense in layers}
    result = healed(model, new, max_steps=60, learning_rate=None)
    assert result.loss_after < 0.5 * result.loss_before


def test_layers_of_every_default_form_are_healed_together_and_saved(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 8))

    model = build()
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(2)
    layers = [getattr(block, name) for block in model[:4] for name in ("up", "down")]
    widths = [form for form in default_forms() if form.startswith("int") and form != "interpolative"]
    made = [LowRankLinear.from_linear(layers[0], 8, seed=1), InterpolativeLinear.from_linear(layers[1], 4)]
    made += [
        QuantizedLinear.from_linear(layer, int(form[3:]), group_size=16)
        for layer, form in zip(layers[2:], widths, strict=True)
    ]
    result = healed(model, dict(zip(layers, made, strict=True)), max_steps=60, learning_rate=None)
    assert result.loss_after < 0.8 * result.loss_before
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), build())
    x = data(1, seed=5)[0]
    assert torch.equal(again.eval()(x), model.eval()(x))
