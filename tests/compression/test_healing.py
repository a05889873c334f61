"""Healing: better than before and never worse, resumable to the bit, and the model untouched until the end."""

import copy
import json
import math
import random
from collections import OrderedDict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.compression import HealConfig
from panther.compression.calibration.masks import Masks
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import swap_modules
from panther.compression.forms import default_forms
from panther.compression.heal import healing
from panther.compression.heal.distillation import lost_variance
from panther.compression.heal.healing import check_ranks, heal, shuffled
from panther.errors import CompressionError, ConfigError, DistributedError, FormatError
from panther.nn import InterpolativeLinear, QuantizedLinear, SKLinear

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


def compressed(dtype=torch.float32, rank=4):
    """A model of two blocks and a head, and new layers for those of the blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(2)  # so that blocks do something
    model.to(dtype)
    layers = [getattr(block, name) for block in model[:2] for name in ("up", "down")]
    return model, {dense: SKLinear.from_linear(dense, 1, rank, seed=1) for dense in layers}


def data(count=12, dtype=torch.float32, seed=1):
    """Batches (8, 6, WIDTH) of inputs in a subspace of 6 dimensions: what plain SVD of a weight does not know."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9))
    return [(torch.randn(8, 6, 6, generator=generator) @ mix / 2).to(dtype) for _ in range(count)]


def runner_of(model, *, batches=None, held_out=None, call=None, mask=None, group=None):
    dtype = next(model.parameters()).dtype
    runner = Runner(model, data(2), call, mask, group, False)
    runner.batches = data(dtype=dtype)[:9] if batches is None else batches
    runner.held_out = data(dtype=dtype)[9:] if held_out is None else held_out
    runner.difference = 0.0  # which compress measures before it heals
    return runner


def healed(model, new, *, seed=0, **options):
    """Heal, put the result into the model as compress does, and return what happened."""
    names = ("batches", "held_out", "call", "mask", "group")
    runner = runner_of(model, **{name: options.pop(name) for name in names if name in options})
    config = HealConfig(**{"max_steps": 40, "validate_every_n_steps": 10, "learning_rate": 5e-3} | options)
    result, write_ = heal(runner, new, config, seed=seed)
    write_()
    swap_modules(model, new)
    return result


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def distance(model, new, batches):
    """Relative squared error of the compressed model's output against the original's."""
    originals = {layer: dense for dense, layer in new.items()}
    x = torch.cat(batches)
    with torch.no_grad():
        output = copy.deepcopy(model).eval()(x).double()
        swap_modules(model, originals)
        wanted = copy.deepcopy(model).eval()(x).double()
        swap_modules(model, new)
    return ((output - wanted).square().mean() / wanted.var()).item()


# What it reaches


@pytest.mark.parametrize("match", ["hidden", "output"])
def test_a_healed_model_is_nearer_to_the_original(match):
    model, new = compressed()
    unseen = data(4, seed=5)
    swap_modules(model, new)
    before = distance(model, new, unseen)
    swap_modules(model, {layer: dense for dense, layer in new.items()})
    result = healed(model, new, match=match, max_steps=60)
    assert distance(model, new, unseen) < 0.3 * before
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
    before = state(nn.ModuleList(new.values()))
    result = healed(model, new, max_steps=60, validate_every_n_steps=5, learning_rate=30.0)
    assert (result.steps, result.diverged, result.best_step) == (5, True, 0)
    assert result.loss_after == result.loss_before
    assert same(state(nn.ModuleList(new.values())), before)


def test_divergence_ends_healing_at_the_best_point():
    result = healed(*compressed(), max_steps=150, validate_every_n_steps=5, learning_rate=0.3)
    assert result.diverged
    assert 0 < result.best_step < result.steps < 150
    assert result.loss_after < 0.8 * result.loss_before


def test_a_loss_that_is_not_finite_is_divergence():
    model, new = compressed()
    before = state(nn.ModuleList(new.values()))
    result = healed(model, new, batches=[data(1)[0] * math.inf], max_steps=10)
    assert (result.diverged, result.steps, result.history) == (True, 1, ())
    assert same(state(nn.ModuleList(new.values())), before)


# What is trained


def test_only_the_factors_are_trained_and_all_of_them():
    model, new = compressed()
    before, dense = state(model), [state(layer) for layer in new]
    factors = [state(layer) for layer in new.values()]
    healed(model, new, max_steps=5)
    after = state(model)
    assert all(torch.equal(after[n], value) for n, value in before.items() if ".up." not in n and ".down." not in n)
    assert all(same(state(layer), old) for layer, old in zip(new, dense, strict=True))
    for layer, old in zip(new.values(), factors, strict=True):
        changed = {name for name, value in state(layer).items() if not torch.equal(value, old[name])}
        assert changed == {"S1", "S2", "U1", "U2", "bias"}


def test_everything_can_be_trained_and_the_original_keeps_its_values():
    model, new = compressed()
    model[0].norm.bias.requires_grad_(False)
    before, original = state(model), copy.deepcopy(model).eval()
    factors_only = healed(*compressed(), max_steps=60).loss_after
    # Were the head the original's too, training it would change what is to be matched.
    result = healed(model, new, train="all", max_steps=60)
    assert result.loss_after < factors_only
    after = state(model)
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert torch.equal(after["0.norm.bias"], before["0.norm.bias"])
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
    before = state(model.gru)
    result = healed(model, {model.head: SKLinear.from_linear(model.head, 1, 3)}, train="all")
    assert result.loss_after < result.loss_before
    assert not any(torch.equal(value, before[name]) for name, value in state(model.gru).items())
    assert all(held is getattr(model.gru, n) for held, n in zip(model.gru._flat_weights, before, strict=True))


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
    layer = SKLinear.from_linear(dense, 1, 3)
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
    assert model[0].S1 is model[2].S1


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


# Which positions and which hidden states count


def test_masked_positions_do_not_matter():
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(8, 6, generator=generator) < 0.6 for _ in range(12)]
    plain = [{"x": x, "mask": mask} for x, mask in zip(data(), masks, strict=True)]
    changed = [b | {"x": torch.where(b["mask"][..., None], b["x"], 5 * torch.randn_like(b["x"]))} for b in plain]
    states, results = [], []
    for batches in (plain, changed):
        for mask in (lambda batch: batch["mask"], None):
            model, new = compressed()
            results.append(
                healed(
                    model, new, batches=batches[:9], held_out=batches[9:], max_steps=4,
                    call=lambda model, batch: model(batch["x"]), mask=mask,
                )
            )  # fmt: skip
            states.append(state(model))
    assert same(states[0], states[2])
    assert results[0] == results[2]
    assert results[1] != results[3]


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x["state"] if isinstance(x, dict) else x
        return x


class Wrapped(nn.Module):
    """A block that gives more than a tensor."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.mlp(x)
        return (x, None) if self.kind == "tuple" else OrderedDict(none=None, state=x)


def new_layers(model):
    return {m: SKLinear.from_linear(m, 1, 3, seed=1) for m in model.modules() if isinstance(m, nn.Linear)}


def names_of_blocks(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[parent.get_submodule(name)] for parent, name in blocks_of(model, set(new_layers(model)))]


def test_which_modules_are_blocks():
    assert names_of_blocks(Stack(Block(), Block())) == ["layers.0", "layers.1"]
    assert names_of_blocks(nn.Sequential(Block(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))) == ["0", "2"]
    wrapped = nn.Sequential(Stack(Block(), Block()), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert names_of_blocks(wrapped) == ["0.layers.0", "0.layers.1", "1"]
    assert names_of_blocks(Stack(Wrapped("tuple"), Wrapped("dict"))) == ["layers.0", "layers.1"]
    assert names_of_blocks(Stack(Wrapped("tuple"))) == ["layers.0"]
    nested = Stack()
    nested.layers.append(nn.ModuleList([Block(), Block()]))
    assert names_of_blocks(nested) == ["layers.0.0", "layers.0.1"]
    assert names_of_blocks(Block()) == []


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_the_first_tensor_of_what_a_block_gives_is_matched(kind):
    torch.manual_seed(0)
    model = Stack(Wrapped(kind), Wrapped(kind))
    new, x = new_layers(model), data()[9]
    losses = {}
    for match in ("output", "hidden"):
        config = HealConfig(max_steps=1, learning_rate=1e-30, match=match)
        losses[match] = heal(runner_of(model, held_out=[x]), new, config, seed=0)[0].loss_before
    # The last block's output is the model's: the hidden part is the mean of it and the first block's.
    up, down = list(new.values())[:2]
    wanted = model.layers[0](x)
    wanted = wanted[0] if kind == "tuple" else wanted["state"]
    first = lost_variance(x + down(nn.functional.gelu(up(x))), wanted, None).item()
    assert losses["hidden"] == pytest.approx(losses["output"] + (first + losses["output"]) / 2, rel=1e-5)


def test_transformer_encoder_of_torch():
    """Its fast path would give nested tensors, and skip the hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True), 2)
    layers = [getattr(block, name) for block in model.layers for name in ("linear1", "linear2")]
    mask = torch.arange(6) < (torch.arange(8) % 5 + 2)[:, None]
    result = healed(
        model, {dense: SKLinear.from_linear(dense, 1, 3) for dense in layers}, max_steps=20,
        call=lambda model, x: model(x, src_key_padding_mask=~mask), mask=lambda x: mask,
    )  # fmt: skip
    assert result.loss_after < 0.8 * result.loss_before
    assert torch.backends.mha.get_fastpath_enabled()


def test_layers_under_activation_checkpointing_run_again_as_the_compressed_ones():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for kind in (Block, Checkpointed):
        model, new = compressed()
        model[1].__class__ = kind
        results.append(healed(model, new, max_steps=4))
    assert results[0] == results[1]


# What is left alone


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("train", ["factors", "all"])
def test_the_model_flags_and_generators_are_as_before(train, fails):
    model, new = compressed()
    model.train()
    model[0].norm.eval()
    model[1].up.weight.requires_grad_(False)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    modules, parameters, before = dict(model.named_modules()), dict(model.named_parameters()), state(model)
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
    assert same(state(model), before)
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


# Interrupted and continued


def folder(tmp_path):
    return {"checkpoint_dir": tmp_path / "healing", "validate_every_n_steps": 7, "max_steps": 21}


@pytest.mark.parametrize(
    ("dtype", "options", "after"),
    [
        (torch.float32, {}, 3),
        (torch.float32, {"train": "all", "weight_decay": 0.1}, 15),
        (torch.float16, {}, 15),
    ],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, dtype, options, after):
    options = folder(tmp_path) | options
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
    expected = healed(model, new, **folder(tmp_path) | options)
    again, new = compressed()
    steps = []

    def call(model, batch):
        steps.append(torch.is_grad_enabled())
        return model(batch)

    assert healed(again, new, call=call, **folder(tmp_path) | options) == expected
    assert not any(steps)
    assert same(state(again), state(model))
    assert expected.diverged == ("learning_rate" in options)


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        ({"rank": 3}, {}, r"a different run \(0.up.S1 \(24, 4\) torch.float32 instead of \(24, 3\)"),
        ({}, {"seed": 1}, r"\(seed 0 instead of 1\)"),
        ({}, {"learning_rate": 1e-3}, r"\(learning_rate 0.005 instead of 0.001\)"),
        ({}, {"train": "all"}, r"\(train 'factors' instead of 'all'"),
        ({}, {"held_out": data(2)}, r"\(batches \[\(9, 3\)\] instead of \[\(9, 2\)\]\): give a new folder, or delete"),
    ],
)
def test_the_checkpoint_of_a_different_run_is_refused(tmp_path, build, options, match):
    healed(*compressed(), **folder(tmp_path) | {"max_steps": 2})
    model, new = compressed(**build)
    before = state(model)
    with pytest.raises(FormatError, match=match):
        healed(model, new, **folder(tmp_path) | {"max_steps": 2} | options)
    assert same(state(model), before)


def test_the_checkpoint_of_different_weights_is_refused(tmp_path):
    healed(*compressed(), **folder(tmp_path) | {"max_steps": 2})
    model, new = compressed()
    with torch.no_grad():
        next(iter(new)).weight[0, 0] += 1e-6
    with pytest.raises(FormatError, match=r"\(the original checksum .* instead of checksum"):
        healed(model, new, **folder(tmp_path) | {"max_steps": 2})


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text('{"max_')])
def test_checkpoints_of_an_unknown_run_are_refused(damage, tmp_path):
    healed(*compressed(), **folder(tmp_path) | {"max_steps": 2})
    damage(next(tmp_path.rglob("healing.json")))
    with pytest.raises(FormatError, match=r"has checkpoints of an unknown run \(.*\): give a new folder"):
        healed(*compressed(), **folder(tmp_path) | {"max_steps": 2})


# Bounded by time, and what is not computed twice


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves where a test says so, in seconds."""
    now = [0.0]
    monkeypatch.setattr("panther.compression.heal.healing.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def ticking(clock, seconds=1.0):
    """Return a forward that takes this long where the compressed model runs, and nothing for the original."""

    def call(model, batch):
        clock[0] += seconds * any(isinstance(module, SKLinear) for module in model.modules())
        return model(batch)

    return call


def test_healing_ends_in_time_at_the_end_of_its_schedule(clock, tmp_path):
    options = {"call": ticking(clock), "max_steps": 1000, "checkpoint_dir": tmp_path, "validate_every_n_steps": 15}
    result = healed(*compressed(), max_seconds=60.0, **options)
    assert result.seconds == clock[0]
    assert 55 < result.seconds <= 61
    assert 35 < result.steps < 52
    assert not result.diverged
    assert result.loss_after < 0.5 * result.loss_before
    assert result.history[-1][0] == result.steps
    assert result.history[-1][2] is not None
    records = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    peak = rates.index(max(rates))
    assert 2 < peak < 10
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.02 * max(rates)


def test_a_bound_that_is_not_reached_changes_nothing(clock):
    model, new = compressed()
    expected = healed(model, new, max_steps=12)
    other, news = compressed()
    assert healed(other, news, call=ticking(clock), max_steps=12, max_seconds=1e6) == expected
    assert same(state(model), state(other))


def test_no_step_is_done_where_there_is_no_time_for_one(clock):
    model, new = compressed()
    before = {name: value.clone() for layer in new.values() for name, value in layer.state_dict().items()}
    result = healed(model, new, call=ticking(clock), max_seconds=2.0)
    assert (result.steps, result.best_step, result.loss_after) == (0, 0, result.loss_before)
    assert all(torch.equal(value, before[name]) for name, value in [*new.values()][-1].state_dict().items())


def test_a_continued_run_counts_the_time_that_is_used(clock, tmp_path):
    options = folder(tmp_path) | {"max_steps": 1000, "max_seconds": 60.0}
    once = ticking(clock)
    whole = healed(*compressed(), call=once, **options | {"checkpoint_dir": None})
    begun = clock[0]

    def call(model, batch):
        if clock[0] - begun > 30:
            raise KeyboardInterrupt
        return once(model, batch)

    with pytest.raises(KeyboardInterrupt):
        healed(*compressed(), call=call, **options)
    clock[0] += 1000.0  # of which nothing is healing
    result = healed(*compressed(), call=once, **options)
    assert 55 < result.seconds <= 61
    assert abs(result.steps - whole.steps) <= 2
    assert healed(*compressed(), call=once, **options).steps == result.steps


@pytest.mark.distributed
def test_ranks_whose_clocks_differ_stop_at_the_same_step():
    def rank():
        rank, now = dist.get_rank(), [0.0]
        model, new = compressed()
        options = {"call": ticking(now, 1.0 + rank), "group": dist.group.WORLD, "max_steps": 1000}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
            return healed(model, new, max_seconds=60.0, **options), state(model)

    first, second = on_ranks(rank)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    assert 15 < first[0].steps < 40


@pytest.mark.parametrize("match", ["hidden", "output"])
def test_the_original_runs_once_for_each_batch_where_memory_suffices(match, monkeypatch):
    def run(spare):
        calls = []
        monkeypatch.setattr(Runner, "spare_bytes", lambda self, most: spare)

        def call(model, batch):
            if not any(isinstance(module, SKLinear) for module in model.modules()):
                calls.append(batch)
            return model(batch)

        model, new = compressed()
        return healed(model, new, call=call, max_steps=18, match=match), state(model), len(calls)

    tensors = 8 * 6 * (8 + 2 * WIDTH * (match == "hidden")) * 4  # of one batch
    kept, values, calls = run(2**30)
    assert kept.kept_bytes == 12 * tensors
    assert calls == 1 + 12 + 3  # to see how large they are, once each, and for the final error
    partly, others, more = run(7 * tensors + 1)
    assert partly.kept_bytes == 7 * tensors + 1
    assert more == calls + 5  # batches of training that do not fit, two epochs in place of one
    never, without, most = run(0)
    assert never.kept_bytes == 0
    assert most == 1 + 18 + 3 * (1 + len(never.history) // 10 + 1) + 3
    assert kept == partly == never
    assert same(values, others)
    assert same(values, without)


def test_checks_take_a_twentieth_of_the_cost():
    assert HealConfig(max_steps=1000).check_interval(6) == 40
    assert HealConfig(max_steps=100).check_interval(6) == 25
    assert HealConfig(max_steps=1).check_interval(6) == 25
    assert HealConfig(max_steps=100, validate_every_n_steps=7).check_interval(6) == 7


# Several processes


@pytest.mark.distributed
def test_ranks_heal_together(tmp_path):
    """With one rank's batches they do as it does; with their own, and different values to start from, they average."""

    def run(rank, group, **options):
        model, new = compressed()
        if rank and group:
            with torch.no_grad():
                new[model[0].up].S1.add_(1)  # the first rank's values are taken
        mine = data(6 - rank, seed=20 + rank)
        options |= {"max_steps": 20, "validate_every_n_steps": 10}
        result = healed(model, new, batches=mine[2:], held_out=mine[:2], group=group, **options)
        return result, state(model)

    def rank():
        rank, world = dist.get_rank(), dist.group.WORLD
        model, new = compressed()
        same_batches = healed(model, new, group=world, max_steps=10), state(model)
        whole = run(rank, world)
        run(rank, world, checkpoint_dir=tmp_path)
        resumed = run(rank, world, checkpoint_dir=tmp_path)
        errors = []
        for change in (lambda: healed(*compressed(rank=3 + rank), group=world), lambda: check_ranks(None)):
            try:
                change()
            except DistributedError as error:
                errors.append(str(error))
        return same_batches, whole, resumed, errors

    model, new = compressed()
    expected = healed(model, new, max_steps=10), state(model)
    first, second = on_ranks(rank)
    for (result, end), *_ in (first, second):
        assert result == expected[0]
        assert same(end, expected[1])
    assert first[1][0] == second[1][0] == first[2][0]
    assert same(first[1][1], second[1][1])
    assert same(first[1][1], first[2][1])
    alone = [run(rank, None)[0] for rank in (0, 1)]
    result = first[1][0]
    assert result.loss_after < 0.8 * result.loss_before
    assert result.history[0][1] == pytest.approx(sum(r.history[0][1] for r in alone) / 2, rel=1e-5)
    assert result.loss_before == pytest.approx(sum(r.loss_before for r in alone) / 2, rel=1e-5)
    assert first[3] == second[3]
    assert "0.up.S1 is (24, 3) torch.float32 on rank 0 and (24, 4) torch.float32 on rank 1" in first[3][0]
    assert first[3][1].startswith("healing trains on all 2 ranks together, and the group of this call has 1")


def test_a_launcher_s_process_that_heals_alone_is_told_so_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, _ = compressed()
    before = state(model)
    with pytest.raises(DistributedError, match="all 2 ranks together, and the group of this call has 1: call compress"):
        pr.compress(model, 0.5, [], heal=HealConfig())
    assert same(state(model), before)


# Bad input


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"max_seconds": 0}, "max_seconds=0.0 must be positive and finite: None is for no bound"),
        ({"max_seconds": math.inf}, "max_seconds=inf must be positive and finite"),
        ({"max_seconds": "1 h"}, "max_seconds='1 h' must be a number, not str"),
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
        ({"checkpoint_dir": 3}, "checkpoint_dir=3 must be a string, not int"),
        ({"steps": 3}, "'steps' is not a setting of HealConfig: did you mean 'max_steps'"),
        ({"lr": 1e-3}, "did you mean 'learning_rate'"),
    ],
)
def test_bad_config(values, match):
    with pytest.raises(ConfigError, match=match):
        HealConfig(**values)


def test_bad_input():
    model, new = compressed()
    before = state(model)
    with pytest.raises(CompressionError, match="is nan before the first step and must be finite"):
        healed(model, new, held_out=[data(1)[0] * math.nan])
    with pytest.raises(ConfigError, match="the loss depends on no trainable parameter"):
        healed(model, new, match="output", call=lambda model, x: model(x).detach())
    with pytest.raises(CompressionError, match=r"a tensor of torch.int64, and a floating tensor"):
        healed(model, new, call=lambda model, x: model(x).argmax(-1))
    assert same(state(model), before)


def test_each_parameter_has_a_rate_that_suits_its_size():
    """AdamW's first step moves every entry by the rate: 0.003 of the size of what is not a low-rank factor."""
    model, new = compressed()
    with torch.no_grad():
        model[0].norm.weight.mul_(100)
        model[1].norm.weight.mul_(1e-3)
        model[2].bias.zero_()
    before = {name: value for name, value in model.named_parameters() if "up" not in name and "down" not in name}
    before = {name: value.detach().clone() for name, value in before.items()}
    healed(model, new, train="all", max_steps=1, learning_rate=None, gradient_clipping=None)
    after = dict(model.named_parameters())
    for name, old in before.items():
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
    made = [SKLinear.from_linear(layers[0], 1, 4, seed=1), InterpolativeLinear.from_linear(layers[1], 4)]
    made += [
        QuantizedLinear.from_linear(layer, int(form[3:]), group_size=16)
        for layer, form in zip(layers[2:], widths, strict=True)
    ]
    result = healed(model, dict(zip(layers, made, strict=True)), max_steps=60, learning_rate=None)
    assert result.loss_after < 0.8 * result.loss_before
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), build())
    x = data(1, seed=5)[0]
    assert torch.equal(again.eval()(x), model.eval()(x))
