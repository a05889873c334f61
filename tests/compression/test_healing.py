"""Healing: better than before and never worse, resumable to the bit, and nothing else touched."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from panther.compression.distillation import blocks_of, lost_variance
from panther.compression.healing import HealConfig, _order, heal
from panther.distributed import launch
from panther.errors import DistributedError, FormatError
from panther.nn import SKLinear

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
    """A model of two blocks and a head whose linear layers were replaced, and what they replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(2)  # so that blocks do something
    model.to(dtype)
    replaced = {}
    for block in model[:2]:
        for name in ("up", "down"):
            dense = getattr(block, name)
            setattr(block, name, SKLinear.from_linear(dense, 1, rank, seed=1))
            replaced[getattr(block, name)] = dense
    return model, replaced


def data(count=12, dtype=torch.float32, seed=1):
    """Batches (8, 6, WIDTH) of inputs in a subspace of 6 dimensions: what plain SVD of a weight does not know."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9))
    return [(torch.randn(8, 6, 6, generator=generator) @ mix / 2).to(dtype) for _ in range(count)]


def everywhere(batch):
    return None


def healed(model, replaced, *, batches=None, held_out=None, call=None, mask=everywhere, seed=0, group=None, **config):
    dtype = next(model.parameters()).dtype
    config = HealConfig(**{"steps": 40, "check_every": 10, "learning_rate": 5e-3} | config)
    return heal(
        model,
        replaced,
        data(dtype=dtype)[:9] if batches is None else batches,
        data(dtype=dtype)[9:] if held_out is None else held_out,
        call or model,
        mask,
        config,
        seed=seed,
        group=group,
    )


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def distance(model, replaced, batches):
    """Relative squared error of the output against the original's, computed with a copy."""
    original = copy.deepcopy(model).eval()
    for (name, _), dense in zip([n for n in model.named_modules() if n[1] in replaced], replaced.values(), strict=True):
        original.set_submodule(name, dense)
    model = copy.deepcopy(model).eval()
    x = torch.cat(batches)
    with torch.no_grad():
        wanted = original(x).double()
        return ((model(x).double() - wanted).square().mean() / wanted.var()).item()


# What it reaches


@pytest.mark.parametrize("match", ["hidden", "output"])
def test_a_healed_model_is_nearer_to_the_original(match):
    model, replaced = compressed()
    unseen = data(4, seed=5)
    before = distance(model, replaced, unseen)
    result = healed(model, replaced, match=match, steps=60)
    assert distance(model, replaced, unseen) < 0.3 * before
    assert result.loss_after < 0.3 * result.loss_before
    assert (result.steps, result.diverged, result.rollbacks) == (60, False, 0)
    assert [step for step, _, held_out in result.history if held_out is not None] == list(range(10, 61, 10))
    best = dict((step, held_out) for step, _, held_out in result.history)[result.best_step]
    assert result.loss_after == best == min(h for _, _, h in result.history if h is not None)


def test_matching_hidden_states_brings_them_nearer_than_matching_the_output():
    errors = {}
    for match in ("hidden", "output"):
        model, replaced = compressed()
        healed(model, replaced, match=match)
        first = nn.Sequential(model[0])
        own = {new: dense for new, dense in replaced.items() if new in set(first.modules())}
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
    assert lost_variance(poisoned, wanted, mask).item() == pytest.approx(expected, rel=1e-3)
    image = torch.randn(2, 4, 3, 3, generator=generator)  # channels second
    expected = (0.25 / image.movedim(1, -1).flatten(0, 2).var(0).mean()).item()
    assert lost_variance(image + 0.5, image, None).item() == pytest.approx(expected, rel=1e-3)
    pooled = torch.randn(6, 5, generator=generator)  # has the mask's shape, and no dimension of features beyond
    assert lost_variance(pooled + 0.5, pooled, mask) == lost_variance(pooled + 0.5, pooled, None)


@pytest.mark.parametrize("shape", [(), (3,), (1, 4), (1, 1), (5, 1), (2, 3, 1), (0, 4)])
@pytest.mark.parametrize("value", [0.0, 7.0])
def test_the_loss_is_finite_where_nothing_varies(shape, value):
    wanted = torch.full(shape, value)
    assert lost_variance(wanted, wanted, None).item() == 0
    assert math.isfinite(lost_variance(wanted + 1, wanted, None).item())


def test_a_mask_of_nothing_costs_nothing():
    wanted = torch.ones(2, 3, 4)
    assert lost_variance(wanted + 1, wanted, torch.zeros(2, 3)).item() == 0


def test_never_worse_than_at_the_start():
    model, replaced = compressed()
    before = state(model)
    result = healed(model, replaced, steps=8, check_every=4, learning_rate=30.0)
    assert result.loss_after == result.loss_before
    assert result.best_step == 0
    assert same(state(model), before)


def test_divergence_goes_back_and_halves_and_then_gives_up():
    model, replaced = compressed()
    before = state(model)
    result = healed(model, replaced, steps=60, check_every=5, learning_rate=1e4)
    assert (result.diverged, result.rollbacks, result.best_step) == (True, 3, 0)
    assert result.steps == len(result.history) < 60
    assert same(state(model), before)


def test_divergence_is_survived_with_a_smaller_rate():
    model, replaced = compressed()
    result = healed(model, replaced, steps=150, check_every=5, learning_rate=0.3)
    assert 1 <= result.rollbacks <= 3
    assert not result.diverged
    assert result.steps == 150
    assert result.loss_after < 0.8 * result.loss_before


def test_a_loss_that_is_not_finite_is_divergence():
    model, replaced = compressed()
    before = state(model)
    bad = data(1)[0] * math.inf
    result = healed(model, replaced, batches=[bad], steps=10)
    assert (result.diverged, result.steps) == (True, 4)
    assert all(math.isnan(loss) and held_out is None for _, loss, held_out in result.history)
    assert same(state(model), before)


# What is trained


def test_only_the_factors_are_trained_and_all_of_them():
    model, replaced = compressed()
    before, dense = state(model), [state(layer) for layer in replaced.values()]
    healed(model, replaced, steps=5)
    changed = {name for name, value in state(model).items() if not torch.equal(value, before[name])}
    factors = {f"{i}.{name}.{p}" for i in (0, 1) for name in ("up", "down") for p in ("S1", "S2", "U1", "U2", "bias")}
    assert changed == factors
    assert all(same(state(layer), old) for layer, old in zip(replaced.values(), dense, strict=True))


def test_everything_can_be_trained_and_the_original_keeps_its_values():
    model, replaced = compressed()
    model[0].norm.bias.requires_grad_(False)
    before = state(model)
    factors_only = healed(*compressed(), steps=60).loss_after
    # Were the head the teacher's too, training it would change what is to be matched.
    start = copy.deepcopy(model)
    result = healed(model, replaced, train="all", steps=60)
    assert result.loss_after < factors_only
    after = state(model)
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert torch.equal(after["0.norm.bias"], before["0.norm.bias"])
    # The result, with factors and head, against the original as it was at the start.
    for (name, new), dense in zip(
        [n for n in model.named_modules() if n[1] in replaced], replaced.values(), strict=True
    ):
        assert new in replaced
        start.set_submodule(name, dense)
    with torch.no_grad():
        x = torch.cat(data(4, seed=5))
        error = lost_variance(model.eval()(x), start.eval()(x), None).item()
    assert error < 0.5 * result.loss_before


def test_a_parameter_that_new_and_dense_layer_share_stays_in_the_original():
    model, replaced = compressed()
    for new, dense in replaced.items():
        new.bias = dense.bias
    twin, twins = compressed()
    result, expected = healed(model, replaced), healed(twin, twins)
    assert result == expected
    assert same(state(model), state(twin))


@pytest.mark.parametrize("shared", ["module", "parameters"])
def test_a_layer_in_two_places_is_put_back_in_both(shared):
    torch.manual_seed(0)
    dense = nn.Linear(WIDTH, WIDTH)
    new = SKLinear.from_linear(dense, 1, 3)
    other = new
    replaced = {new: dense}
    if shared == "parameters":
        other = copy.deepcopy(new)
        for name, p in new.named_parameters():
            setattr(other, name, p)
        replaced[other] = dense
    model = nn.Sequential(new, nn.Tanh(), other, nn.Tanh())
    result = healed(model, replaced)
    assert result.loss_after < 0.8 * result.loss_before
    assert (model[0], model[2]) == (new, other)
    assert new.S1 is other.S1


@pytest.mark.parametrize("train", ["factors", "all"])
def test_the_factors_of_a_frozen_model_are_trained(train):
    model, replaced = compressed()
    model.requires_grad_(False)
    twin, twins = compressed()
    assert healed(model, replaced, train=train) == healed(twin, twins)
    assert same(state(model), state(twin))
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    model, replaced = compressed(dtype)
    before = distance(model, replaced, data(4, dtype, seed=5))
    # Steps below half a unit in the last place of most entries: rounded after each, nothing would be learned.
    result = healed(model, replaced, steps=100, learning_rate=2e-3)
    assert result.loss_after < 0.7 * result.loss_before
    assert distance(model, replaced, data(4, dtype, seed=5)) < 0.7 * before
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_half_precision_follows_float32():
    results = {dtype: healed(*compressed(dtype)).loss_after for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert results[torch.float16] == pytest.approx(results[torch.float32], rel=0.05)
    assert results[torch.bfloat16] == pytest.approx(results[torch.float32], rel=0.25)


@pytest.mark.parametrize("size", [1e-3, 6000.0])
def test_float16_gradients_of_any_size(size):
    """The loss has the output's square in its denominator: gradients underflow, or overflow once they are scaled."""
    model, replaced = compressed(torch.float16)
    model[2].weight.data.mul_(size)
    model[2].bias.data.mul_(size)
    large = [torch.cat(data(32, torch.float16, seed)) for seed in (1, 2)]
    result = healed(model, replaced, batches=large[:1], held_out=large[1:], match="output", steps=30)
    assert result.loss_after < 0.25 * result.loss_before
    assert result.rollbacks == 0


def test_clipping_applies_to_the_gradient_and_not_to_its_float16_scaling():
    losses = {}
    for dtype in (torch.float32, torch.float16):
        for clipping in (1e-9, math.inf):  # far below AdamW's eps: nearly no step
            result = healed(*compressed(dtype), steps=4, gradient_clipping=clipping)
            losses[dtype, clipping] = result.history[-1][2] / result.loss_before
    for dtype in (torch.float32, torch.float16):
        assert losses[dtype, 1e-9] == pytest.approx(1, abs=0.05)
        assert losses[dtype, math.inf] < 0.9


# Which positions and which hidden states count


def test_masked_positions_do_not_matter():
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(8, 6, generator=generator) < 0.6 for _ in range(12)]
    plain = [{"x": x, "mask": mask} for x, mask in zip(data(), masks, strict=True)]
    changed = [b | {"x": torch.where(b["mask"][..., None], b["x"], 5 * torch.randn_like(b["x"]))} for b in plain]
    states, results = [], []
    for batches in (plain, changed):
        for mask in (lambda batch: batch["mask"], everywhere):
            model, replaced = compressed()
            call = lambda batch, model=model: model(batch["x"])  # noqa: E731
            results.append(healed(model, replaced, batches=batches[:9], held_out=batches[9:], call=call, mask=mask))
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


def swap_linears(model):
    replaced = {}
    for name, dense in [n for n in model.named_modules() if isinstance(n[1], nn.Linear)]:
        new = SKLinear.from_linear(dense, 1, 3, seed=1)
        model.set_submodule(name, new)
        replaced[new] = dense
    return model, replaced


def names_of_blocks(model):
    model, replaced = swap_linears(model)
    names = {module: name for name, module in model.named_modules()}
    return [names[parent.get_submodule(name)] for parent, name in blocks_of(model, set(replaced))]


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
    model, replaced = swap_linears(Stack(Wrapped(kind), Wrapped(kind)))
    output_only = heal_loss(model, replaced, "output")
    both = heal_loss(model, replaced, "hidden")
    # The last block's output is the model's: the hidden part is the mean of it and the first block's.
    x = data()[9]
    up, down = list(replaced.values())[:2]
    given = model.layers[0](x)
    given = given[0] if kind == "tuple" else given["state"]
    wanted = x + down(nn.functional.gelu(up(x)))
    first = lost_variance(given, wanted, None).item()
    assert both == pytest.approx(output_only + (first + output_only) / 2, rel=1e-5)


def heal_loss(model, replaced, match):
    before = state(model)
    result = healed(model, replaced, held_out=data()[9:10], steps=1, learning_rate=1e-30, match=match)
    model.load_state_dict(before)
    return result.loss_before


def test_transformer_encoder_of_torch():
    """Its fast path would hand on nested tensors, and skip the hooks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    replaced = {}
    for block in model.layers:
        for name in ("linear1", "linear2"):
            dense = getattr(block, name)
            setattr(block, name, SKLinear.from_linear(dense, 1, 3))
            replaced[getattr(block, name)] = dense
    lengths = torch.arange(8) % 5 + 2
    mask = torch.arange(6) < lengths[:, None]
    call = lambda x: model(x, src_key_padding_mask=~mask)  # noqa: E731
    result = healed(model, replaced, call=call, mask=lambda x: mask, steps=20)
    assert result.loss_after < 0.8 * result.loss_before
    assert torch.backends.mha.get_fastpath_enabled()


# What is left alone


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("train", ["factors", "all"])
def test_flags_generators_and_modules_are_put_back(train, fails):
    model, replaced = compressed()
    model.train()
    model[0].norm.eval()
    model[1].up.S1.requires_grad_(False)
    next(iter(replaced.values())).eval()
    model[2].weight.grad = torch.ones_like(model[2].weight)
    everything = [*model.modules(), *replaced.values()]
    flags = [m.training for m in everything], [p.requires_grad for p in model.parameters()]
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    storages = [p.data_ptr() for p in model.parameters()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    head = state(model[2])
    torch.manual_seed(4)
    generator = torch.get_rng_state()
    calls = []

    def call(batch):
        calls.append(model[0].training or replaced[modules["0.up"]].training)
        torch.rand(3)  # a model that draws
        if fails and len(calls) == 12:
            raise KeyError("forward")
        return model(batch)

    if fails:
        with pytest.raises(KeyError, match="forward"):
            healed(model, replaced, call=call, train=train)
        assert same(state(model[2]), head)
    else:
        with torch.no_grad():
            healed(model, replaced, call=call, train=train)
    assert not any(calls)
    assert flags == ([m.training for m in everything], [p.requires_grad for p in model.parameters()])
    assert modules == dict(model.named_modules())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert storages == [p.data_ptr() for p in model.parameters()]
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "2.weight")
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_seed_decides():
    states = []
    for seed in (3, 3, 4):
        model, replaced = compressed()
        torch.manual_seed(len(states))
        healed(model, replaced, seed=seed, steps=20)
        states.append(state(model))
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_a_model_that_draws_draws_the_same_for_both_and_in_every_run():
    results = []
    for noise in (0.0, 1.0, 1.0):
        model, replaced = compressed()
        torch.manual_seed(len(results))
        call = lambda x, model=model, noise=noise: model(x + noise * torch.randn_like(x))  # noqa: E731
        results.append(healed(model, replaced, call=call, steps=20))
    assert results[1] == results[2]
    assert results[1].loss_after < 0.8 * results[1].loss_before
    assert results[1].loss_before < 1.5 * results[0].loss_before


def test_the_order_visits_every_batch_and_can_be_entered_anywhere():
    order = _order(5, 7, 0)
    indices = [next(order) for _ in range(23)]
    assert all(sorted(indices[i : i + 5]) == list(range(5)) for i in range(0, 20, 5))
    assert indices[:5] != indices[5:10]
    for start in range(20):
        later = _order(5, 7, start)
        assert [next(later) for _ in range(3)] == indices[start : start + 3]


def test_progress_sees_every_step():
    seen = []

    def progress(steps, description, total):
        for step in steps:
            seen.append((step, description, total))
            yield step

    model, replaced = compressed()
    heal(model, replaced, data(2), data(1), model, everywhere, HealConfig(steps=4), seed=0, progress=progress)
    assert seen == [(step, "healing", 4) for step in range(4)]


# Interrupted and continued


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("dtype", "options", "after"),
    [
        (torch.float32, {}, 3),
        (torch.float32, {}, 20),
        (torch.float32, {}, 37),
        (torch.float32, {"train": "all", "weight_decay": 0.1}, 20),
        (torch.float16, {}, 20),
        (torch.float32, {"learning_rate": 0.3, "steps": 60}, 20),  # with rollbacks
        (torch.float32, {"learning_rate": 0.3, "steps": 60}, 50),
    ],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, dtype, options, after):
    options = {"checkpoint": tmp_path / "healing.pt", "check_every": 7} | options
    whole, replaced = compressed(dtype)
    expected = healed(whole, replaced, **options | {"checkpoint": None})
    if "learning_rate" in options:
        assert expected.rollbacks

    model, replaced = compressed(dtype)
    steps = 0

    def call(batch):
        nonlocal steps
        steps += torch.is_grad_enabled()
        if steps == after:
            raise KilledError
        return model(batch)

    with pytest.raises(KilledError):
        healed(model, replaced, call=call, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["healing.pt"]
    model, replaced = compressed(dtype)  # a new process
    assert healed(model, replaced, **options) == expected
    assert same(state(model), state(whole))


def test_a_finished_run_is_not_run_again(tmp_path):
    options = {"checkpoint": str(tmp_path / "healing.pt"), "steps": 12}
    model, replaced = compressed()
    expected = healed(model, replaced, **options)
    again, replaced = compressed()
    calls = []
    assert healed(again, replaced, call=calls.append, **options) == expected
    assert not calls
    assert same(state(again), state(model))


def test_a_run_that_was_given_up_is_not_taken_up(tmp_path):
    options = {"checkpoint": tmp_path / "healing.pt", "steps": 60, "check_every": 5, "learning_rate": 1e4}
    expected = healed(*compressed(), **options)
    assert expected.diverged
    assert healed(*compressed(), call=None, **options) == expected


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        ({"rank": 3}, {}, r"of another run \(other parameters\)"),
        ({}, {"seed": 1}, r"\(seed 0 instead of 1\)"),
        ({}, {"learning_rate": 1e-3}, r"\(learning_rate 0.005 instead of 0.001\)"),
        ({}, {"train": "all"}, r"\(train factors instead of all, other parameters\)"),
        ({}, {"held_out": data(2)}, r"\(other batches\): give another path, or delete it"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, build, options, match):
    file = tmp_path / "healing.pt"
    healed(*compressed(), checkpoint=file, steps=2)
    content = file.read_bytes()
    model, replaced = compressed(**build)
    before = state(model)
    with pytest.raises(FormatError, match=match):
        healed(model, replaced, **{"checkpoint": file, "steps": 2} | options)
    assert same(state(model), before)
    assert file.read_bytes() == content


def test_the_checkpoint_of_other_weights_is_refused(tmp_path):
    healed(*compressed(), checkpoint=tmp_path / "healing.pt", steps=2)
    model, replaced = compressed()
    with torch.no_grad():
        next(iter(replaced.values())).weight[0, 0] += 1e-6
    with pytest.raises(FormatError, match=r"\(other weights of the original\)"):
        healed(model, replaced, checkpoint=tmp_path / "healing.pt", steps=2)


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    file = tmp_path / "healing.pt"
    torch.save({"weight": torch.ones(2)}, file) if content is None else file.write_bytes(content)
    with pytest.raises(FormatError, match=r"healing.pt must be a file that healing wrote"):
        healed(*compressed(), checkpoint=file)


# Several processes


@pytest.mark.distributed
def test_two_ranks_with_one_rank_s_batches_do_as_it_does():
    def rank():
        model, replaced = compressed()
        result = healed(model, replaced, group=dist.group.WORLD)
        return result, state(model)

    model, replaced = compressed()
    expected = healed(model, replaced)
    for result, end in launch(rank, nproc=2, start_method="fork"):
        assert result == expected
        assert same(end, state(model))


@pytest.mark.distributed
def test_ranks_with_their_own_batches_stay_alike_and_average(tmp_path):
    def run(rank, group, **options):
        model, replaced = compressed()
        if rank and group:
            with torch.no_grad():
                model[0].up.S1.add_(1)  # whatever differs at the start is the first rank's afterwards
        mine = data(6 - rank, seed=20 + rank)
        result = healed(model, replaced, batches=mine[1 + rank :], held_out=mine[: 1 + rank], group=group, **options)
        return result, state(model)

    def rank():
        rank = dist.get_rank()
        file = tmp_path / f"{rank}.pt"  # as on machines without a common disk
        whole = run(rank, dist.group.WORLD)
        run(rank, dist.group.WORLD, steps=40, checkpoint=file)
        resumed = run(rank, dist.group.WORLD, steps=40, checkpoint=file)
        return whole, resumed, file.exists()

    (one, again, wrote), (other, _, wrote_too) = launch(rank, nproc=2, start_method="fork")
    assert one[0] == other[0] == again[0]
    assert same(one[1], other[1])
    assert same(one[1], again[1])
    assert (wrote, wrote_too) == (True, False)
    assert one[0].loss_after < 0.5 * one[0].loss_before
    alone = [run(rank, None)[0] for rank in (0, 1)]
    assert one[0].history[0][1] == pytest.approx(sum(r.history[0][1] for r in alone) / 2, rel=1e-5)
    expected = (alone[0].loss_before + 2 * alone[1].loss_before) / 3
    assert one[0].loss_before == pytest.approx(expected, rel=1e-5)


@pytest.mark.distributed
def test_ranks_that_differ_are_told_so():
    def rank():
        try:
            healed(*compressed(rank=3 + dist.get_rank()), group=dist.group.WORLD)
        except DistributedError as error:
            return str(error)

    errors = launch(rank, nproc=2, start_method="fork")
    assert errors[0] == errors[1]
    assert "must have one model, config and seed, and theirs differ" in errors[0]


# Bad input


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"steps": 0}, ValueError, "steps=0 must be at least 1: for no healing, give no HealConfig"),
        ({"steps": 2.5}, TypeError, "steps must be an integer, not float"),
        ({"steps": True}, TypeError, "steps must be an integer, not bool"),
        ({"check_every": -1}, ValueError, "check_every=-1 must be at least 1: use 25"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate=0.0 must be positive and finite: use 5e-4"),
        ({"learning_rate": math.nan}, ValueError, "learning_rate=nan must be"),
        ({"learning_rate": math.inf}, ValueError, "learning_rate=inf must be"),
        ({"learning_rate": "1e-3"}, TypeError, "learning_rate must be a number, not str"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1 must be at least 0 and finite: use 0"),
        ({"gradient_clipping": 0}, ValueError, "gradient_clipping=0 must be positive: use math.inf for none"),
        ({"match": "logits"}, ValueError, "match='logits' is unknown: use one of 'hidden', 'output'"),
        ({"train": "none"}, ValueError, "train='none' is unknown: use one of 'factors', 'all'"),
        ({"checkpoint": 3}, TypeError, "checkpoint must be the path of a file, not int"),
    ],
)
def test_bad_config(values, error, match):
    with pytest.raises(error, match=match):
        HealConfig(**values)


def test_config_accepts_its_limits():
    HealConfig(steps=1, learning_rate=1, weight_decay=0, gradient_clipping=math.inf, check_every=1)
    model, replaced = compressed()
    assert healed(model, replaced, steps=1, check_every=1, gradient_clipping=math.inf).steps == 1


def test_bad_input():
    model, replaced = compressed()
    before = state(model)
    with pytest.raises(ValueError, match="batches is empty and must hold at least one batch"):
        healed(model, replaced, batches=[])
    with pytest.raises(ValueError, match="held_out is empty"):
        healed(model, replaced, held_out=[])
    with pytest.raises(ValueError, match="replaced must name layers inside of the model, and no layer is not"):
        healed(model, {})
    with pytest.raises(ValueError, match="and SKLinear is not: give the model whose"):
        healed(model[0].up, {model[0].up: replaced[model[0].up]})
    with pytest.raises(ValueError, match="is nan before the first step and must be finite"):
        healed(model, replaced, held_out=[data(1)[0] * math.nan])
    with pytest.raises(ValueError, match="the model's output carries no gradient"):
        healed(model, replaced, match="output", call=lambda x: model(x).detach())
    with pytest.raises(TypeError, match=r"must be a floating tensor, not torch\.int64"):
        healed(model, replaced, call=lambda x: model(x).argmax(-1))
    with pytest.raises(TypeError, match="must be a floating tensor, not tuple"):
        healed(model, replaced, call=lambda x: (model(x),))
    assert same(state(model), before)
