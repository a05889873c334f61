"""Moments that are sketches of the gradients: one process."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from panther.errors import ShapeError
from panther.optim import MuonAdamW, SketchedAdamW, sketched_param_groups
from panther.optim.sketched_update import UPDATES

SETTINGS = {"lr": 0.01, "rank": 3, "period": 2, "betas": (0.8, 0.9), "weight_decay": 0.1, "seed": 5}


def parameters(shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [(f"layers.{i}.weight", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(shapes)]


def projections(optimizer, name, shape, step):
    """The projection of a step, as the optimizer draws it for the identity."""
    from panther.optim.sketched_update import PeriodSigns, SketchedUpdate

    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    p.grad = torch.zeros_like(p)
    state = {"step": torch.tensor(float(step - 1)), "sketch_avg": None, "sketch_avg_sq": None}
    update = SketchedUpdate(name, p, optimizer.param_groups[0], state, None, PeriodSigns())
    return update.signs() / math.sqrt(optimizer.param_groups[0]["rank"])


@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (3, 40)])
def test_updates_follow_the_formulas(kind, shape):
    ((name, p),) = parameters([shape])
    optimizer = SketchedAdamW([{"params": [(name, p)], "rank": 3}], update=kind, **SETTINGS)
    generator = torch.Generator().manual_seed(1)
    W = p.detach().clone()
    tall = (lambda x: x) if shape[0] >= shape[1] else (lambda x: x.mT)
    m = v = 0.0
    norm = None
    drawn = []
    for step in range(1, 7):
        G = torch.randn(shape, generator=generator, dtype=torch.float64)
        p.grad = G.clone()
        optimizer.step()
        P = projections(optimizer, name, shape, step)
        drawn.append(P)
        R = tall(G) @ P.mT
        m, v = 0.8 * m + 0.2 * R, 0.9 * v + 0.1 * R**2
        Q = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        root = math.sqrt(min(shape) / 3)
        if kind == "projected":
            U = Q @ P
        else:
            dims = {"dim": 1, "keepdim": True} if kind == "channel" else {}
            ratio = torch.linalg.vector_norm(Q, **dims) / torch.linalg.vector_norm(tall(G), **dims)
            U = tall(G) * ratio * root
            if norm is not None:
                limit = max(1.01 * norm, 0.5 * math.sqrt(G.numel()))
                U = U * min(1.0, limit / U.norm().item())
            norm = U.norm().item()
        W = 0.999 * W - 0.01 * tall(U)
        torch.testing.assert_close(p.detach(), W)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    moments = optimizer.state[p]["sketch_avg"]
    assert sorted(moments.shape) == sorted((3, max(shape)))


@pytest.mark.parametrize("kind", UPDATES)
def test_updates_have_the_size_of_those_of_adam(kind):
    shape = (60, 300)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for rank in (1, 4, 20):
        if (kind, rank) == ("channel", 1):  # the reciprocal of one normal number has no variance
            continue
        (entry,) = parameters([shape], torch.float32)
        first_value = entry[1].detach().clone()
        entry[1].grad = G.clone()
        SketchedAdamW([entry], lr=1.0, rank=rank, update=kind, weight_decay=0.0, seed=0).step()
        size = (entry[1].detach() - first_value).square().mean().sqrt()
        assert 0.6 < size < 1.6


def test_what_is_no_matrix_and_groups_without_rank_get_adamw():
    shapes = [(8,), (), (2, 3, 4), (6, 5)]
    ours, theirs = parameters(shapes), parameters(shapes)
    plain = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer = SketchedAdamW(
        [{"params": ours[:3], "rank": 2}, {"params": ours[3:], "rank": None}], rank=3, seed=0, **plain
    )
    expected = torch.optim.AdamW([p for _, p in theirs], **plain)
    for step in range(4):
        for (_, p), (_, q) in zip(ours, theirs, strict=True):
            if step != 2 or p.dim() != 2:  # a parameter that a step skips
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step), dtype=p.dtype)
                q.grad = p.grad.clone()
            else:
                p.grad = q.grad = None
        optimizer.step()
        expected.step()
    for (_, p), (_, q) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_the_order_of_named_parameters_does_not_matter():
    results = []
    for order in (1, -1):
        named = parameters([(6, 5), (5, 9), (8, 4)])
        optimizer = SketchedAdamW(named[::order], **SETTINGS)
        for step in range(3):
            for number, (_, p) in enumerate(named):
                p.grad = torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(10 * step + number), dtype=p.dtype
                )
            optimizer.step()
        results.append([p.detach() for _, p in named])
    assert all(map(torch.equal, *results))


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "checkpoint_wrapper": checkpoint_wrapper,
    "its part": lambda model: nn.ModuleDict({name: checkpoint_wrapper(part) for name, part in model.named_children()}),
    "several": lambda model: nn.DataParallel(torch.compile(checkpoint_wrapper(model), backend="eager")),
}


@pytest.mark.parametrize("attribute", ["layers", "module", "_orig_mod"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_do_not_change_the_projections(wrapper, attribute):
    """The names of a model differ from those of its wrapper, and a model may have an attribute `module` itself."""
    results = []
    for wrap in (lambda model: model, WRAPPERS[wrapper]):
        torch.manual_seed(0)
        model = nn.Module()
        setattr(model, attribute, nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)))
        named = list(wrap(model).named_parameters())
        optimizer = SketchedAdamW(named, **SETTINGS)
        for _, p in named:
            p.grad = torch.ones_like(p)
        optimizer.step()
        results.append([p.detach() for _, p in named])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("make", [SketchedAdamW, MuonAdamW])
def test_a_compiled_step_is_the_step(make):
    """pytorch#120814 and torchtune#2718; three widths gave an internal error."""
    results = []
    for compiled in (False, True):
        named = parameters([(16, 32), (32, 32), (32, 4), (4,)])
        if make is SketchedAdamW:
            optimizer = make(named, **SETTINGS)
        else:
            optimizer = make([p for _, p in named[:3]], orthogonalize=True)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number), dtype=p.dtype)
            step()
        results.append([p.detach() for _, p in named])
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair)


def test_the_seed_does_not_depend_on_generators():
    seeds = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        groups = [{"params": [nn.Parameter(torch.ones(4, 4))], "seed": None}]
        seeds += [group["seed"] for group in SketchedAdamW(groups, rank=2).param_groups]
        assert torch.initial_seed() == seed
    assert seeds == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", UPDATES)
def test_a_state_that_is_loaded_continues_bit_for_bit(dtype, kind):
    def steps(named, optimizer, numbers):
        for step in numbers:
            for number, (_, p) in enumerate(named):
                generator = torch.Generator().manual_seed(10 * step + number)
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()

    shapes = [(6, 5), (5, 9), (7,), (0, 4), (4, 1)]
    named = parameters(shapes, dtype)
    settings = SETTINGS | {"rank": 1, "update": kind}
    optimizer = SketchedAdamW([{"params": named, "rank": 1}], **settings)
    steps(named, optimizer, range(3))
    wide = torch.promote_types(dtype, torch.float32)
    assert optimizer.state[named[0][1]]["sketch_avg"].dtype == wide
    saved, copies = (
        copy.deepcopy(optimizer.state_dict()),
        [(name, nn.Parameter(p.detach().clone())) for name, p in named],
    )
    steps(named, optimizer, range(3, 6))
    again = SketchedAdamW([{"params": copies, "rank": 1}], **(settings | {"seed": 99}))
    again.load_state_dict(saved)
    steps(copies, again, range(3, 6))
    for (_, p), (_, q) in zip(named, copies, strict=True):
        assert torch.equal(p, q)


def test_signs_are_drawn_once_a_period_and_kept_as_bits(monkeypatch):
    from panther.optim import sketched_update

    draws = []

    def draw(seed, *arguments, **options):
        draws.append(seed)
        return signs(seed, *arguments, **options)

    signs = sketched_update.signs
    monkeypatch.setattr(sketched_update, "signs", draw)
    entries = parameters([(70, 40), (40, 70)], torch.float32)
    optimizer = SketchedAdamW([{"params": entries, "rank": 3}], update="projected", **SETTINGS)
    for _ in range(5):
        for _, p in entries:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
        optimizer.step()
    assert len(draws) == len(set(draws)) == 6  # two matrices in three periods of two steps
    moments = optimizer.state[entries[0][1]]["sketch_avg"]
    packed = [packed for _, packed in optimizer.period_signs._words.values()]
    assert 64 * max(tensor.nbytes for tensor in packed) <= 2 * moments.nbytes
    assert all(
        set(state) == {"step", "sketch_avg", "sketch_avg_sq", "update_norm"} for state in optimizer.state.values()
    )


def test_gradients_of_zero_change_nothing_but_the_decay():
    for kind in UPDATES:
        ((name, p),) = parameters([(6, 5)])
        first_value = p.detach().clone()
        p.grad = torch.zeros_like(p)
        optimizer = SketchedAdamW([{"params": [(name, p)], "rank": 3}], update=kind, **SETTINGS)
        optimizer.step()
        torch.testing.assert_close(p.detach(), first_value * (1 - 0.01 * 0.1))
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p.detach() - first_value).abs().max() > 1e-4  # no limit comes from the step without an update


def deep():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    return model, {"rank": 4, "lr": 0.01}


def steps_of(model, optimizer, scales):
    """Take steps whose losses have these factors; the norms of the changes of the first matrix."""
    sizes = []
    for number, scale in enumerate(scales):
        first_weight = model[0].weight.detach().clone()
        optimizer.zero_grad()
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(number))
        (scale * model(x).square().mean()).backward()
        optimizer.step()
        sizes.append(float((model[0].weight.detach() - first_weight).norm()))
    return sizes


@pytest.mark.parametrize("kind", UPDATES)
def test_steps_without_gradients_do_not_trap_a_matrix(kind):
    """A limit on the growth of steps must let go of zero: FluxML/Optimisers.jl#196."""
    model, settings = deep()
    optimizer = SketchedAdamW(model.parameters(), update=kind, weight_decay=0.0, **settings)
    first = steps_of(model, optimizer, [0, 0, 1])
    again = steps_of(model, optimizer, [1, 1] + [0] * 12 + [1])
    fresh, settings = deep()
    usual = steps_of(fresh, SketchedAdamW(fresh.parameters(), update=kind, weight_decay=0.0, **settings), [1])
    assert first[:2] == [0, 0]
    assert 0.5 < first[2] / usual[0] < 2
    assert again[-1] > 0.1 * usual[0]


@pytest.mark.parametrize("kind", UPDATES)
def test_states_are_plain_tensors_that_may_be_loaded_safely_or_cleared(kind, tmp_path):
    """Projectors in states cannot be read by weights_only (ms-swift#10161), or be reset (Ecosystem_WebUI#383)."""
    models, settings = [deep()[0] for _ in range(2)], deep()[1]
    optimizers = [SketchedAdamW(model.parameters(), update=kind, **settings) for model in models]
    steps_of(models[0], optimizers[0], [1] * 3)
    torch.save([models[0].state_dict(), optimizers[0].state_dict()], tmp_path / "state.pt")
    for target, state in zip((models[1], optimizers[1]), torch.load(tmp_path / "state.pt"), strict=True):
        target.load_state_dict(state)
    for model, optimizer in zip(models, optimizers, strict=True):
        steps_of(model, optimizer, [1] * 3)
        optimizer.state.clear()
        steps_of(model, optimizer, [1])
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


def test_bad_input_is_refused_before_anything_changes():
    named = parameters([(6, 5), (9, 4)])
    for settings, error, message in [
        ({"rank": 0}, ShapeError, "rank=0 must be at least 1"),
        ({"rank": True}, TypeError, "rank must be an integer, not bool"),
        ({"rank": 5}, ShapeError, r"rank=5 is above the shorter side of layers\.1\.weight, of shape \(9, 4\)"),
        ({"period": 0}, ShapeError, "period=0 must be at least 1"),
        ({"update": "row"}, ValueError, "update='row' must be one of 'channel', 'tensor', 'projected'"),
        ({"lr": -1.0}, ValueError, "lr must be at least 0"),
        ({"betas": (1.0, 0.9)}, ValueError, "betas must be in"),
        ({"seed": -1}, ValueError, "seed=-1 must be in"),
    ]:
        settings = SETTINGS | settings
        with pytest.raises(error, match=message):
            SketchedAdamW([{"params": named, "rank": settings["rank"]}], **settings)
    optimizer = SketchedAdamW([{"params": named, "rank": 3}], **SETTINGS)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    first_values = [p.detach().clone() for _, p in named]
    named[1][1].grad = torch.ones_like(named[1][1]).to_sparse()
    with pytest.raises(ValueError, match=r"the gradient of layers\.1.weight is sparse"):
        optimizer.step()
    named[1][1].grad = None
    named[1][1].data = torch.ones(8, 4, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"layers\.1\.weight has the shape \(9, 3\), and with .* shape \(8, 4\)"):
        optimizer.step()
    assert torch.equal(named[0][1], first_values[0])


def test_groups_leave_tables_heads_and_small_matrices_to_adamw():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.blocks = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 2), nn.Conv1d(4, 5, 3)])
            self.tied = nn.Linear(8, 20)
            self.tied.weight = self.table.weight
            self.head = nn.Linear(8, 10)
            self.frozen = nn.Parameter(torch.ones(9, 9), requires_grad=False)

    model = Model()
    groups = sketched_param_groups(model, rank=3, lr=0.1, weight_decay=0.2)
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names[0] == ["blocks.0.weight", "blocks.1.weight"]
    assert names[1] == ["table.weight", "blocks.2.weight", "blocks.3.weight", "head.weight"]
    assert all(name.endswith("bias") for name in names[2])
    assert [(group["rank"], group["weight_decay"], group["lr"]) for group in groups] == [
        (3, 0.2, 0.1), (None, 0.2, 0.1), (None, 0.0, 0.1),
    ]  # fmt: skip
    optimizer = SketchedAdamW(groups, rank=3, seed=0)
    assert optimizer.param_groups[0]["param_names"] == names[0]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[model.blocks[0].weight]["sketch_avg"].shape == (12, 3)
    assert optimizer.state[model.head.weight]["exp_avg"].shape == (10, 8)
    chosen = sketched_param_groups(model, rank=1, include=lambda name, layer: name == "head")
    assert [name for name, _ in chosen[0]["params"]] == ["head.weight"]
