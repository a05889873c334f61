"""Moments of inputs and gradients against the same taken by hand, with masks, convolutions and shared inputs."""

import contextlib

import pytest
import torch
from torch import nn

from panther.compression.calibration.batches import main_output
from panther.compression.calibration.runner import Runner, free_bytes
from panther.compression.calibration.survey import select_targets, survey_targets
from panther.compression.moments import gather_moments, moments_bytes, split_passes
from panther.errors import CompressionError


def run(model, batches, gradients=True, **kwargs):
    runner = Runner(model, batches, kwargs.pop("forward_fn", None), kwargs.pop("mask_fn", None), None, False)
    selection = select_targets(model)
    with runner.calibrating(0):
        found = survey_targets(runner, selection, gradients=True)
        options = {"gradients": gradients, "seed": 5, "description": ""}
        parts = [*gather_moments(runner, found.inputs, **options)]
        moments = {target: each for part in parts for target, each in part.moments.items()}
        energy = parts[0].energy
    return runner, selection.targets, found, {target.name: moments[target] for target in moments}, energy


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def weights_of(g, first):
    """Return a weight for each position from its gradients; the first batch has so many positions."""
    squares = g.square().sum(-1)
    return squares / squares[:first].mean() + 0.25


def weighted(x, weights):
    return (x * weights[:, None]).mT @ x / weights.sum()


def test_moments_of_a_chain_in_closed_form():
    """For y = B A x the gradient at A's output is B^T v, and at B's it is v."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 8)).double()
    batches = list(torch.randn(60, 5, 12, dtype=torch.float64).split(10))
    runner, _, found, moments, energy = run(model, batches)
    assert len(runner.batches) == 5
    assert len(runner.held_out) == 1
    x = torch.cat(runner.batches).flatten(0, 1)
    h = model[0](x).detach()
    v = torch.cat([torch.randn(b.shape[0], 5, 8, generator=torch.Generator().manual_seed(5 + i)) for i, b in
                   enumerate(runner.batches)]).double().flatten(0, 1)  # fmt: skip
    g = v @ model[1].weight.detach()
    weights = weights_of(g, 50)
    close(moments["0"].A[0], weighted(x, weights))
    close(moments["0"].mean[0], (x * weights[:, None]).sum(0) / weights.sum())
    close(moments["1"].A[0], weighted(h, weights_of(v, 50)))
    close(moments["0"].G[0], g.T @ g / len(x))
    close(moments["1"].G[0], v.T @ v / len(x))
    assert moments["0"].positions == len(x)
    assert energy == pytest.approx(model(x).square().sum().item())
    assert [[target.name for target in several] for several in found.inputs] == [["0"], ["1"]]


class Attention(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.flat = flat
        self.q, self.k, self.o = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, attention_mask):
        weights = (self.q(x) @ self.k(x).mT).masked_fill(~attention_mask[:, None].bool(), -torch.inf).softmax(-1)
        logits = self.o(weights @ x)
        return {"hidden": x, "logits": logits.flatten(0, 1) if self.flat else logits}


@pytest.mark.parametrize("flat", [False, True])
def test_padding_has_no_influence(flat):
    torch.manual_seed(0)
    model = Attention(flat)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = mask[2, :2] = 0

    def batches(fill):
        generator = torch.Generator().manual_seed(1)
        parts = [torch.randn(3, 7, 16, generator=generator) for _ in range(6)]
        return [{"x": x.masked_fill(mask[..., None] == 0, fill), "attention_mask": mask} for x in parts]

    _, _, found, ours, energy = run(model, batches(0.0))
    _, _, _, other, energy2 = run(model, batches(100.0))
    assert [[target.name for target in several] for several in found.inputs] == [["q", "k"], ["o"]]
    assert energy == pytest.approx(energy2, rel=1e-5)
    assert ours["q"].positions == 5 * mask.sum().item()
    for name in ours:
        torch.testing.assert_close(ours[name].A, other[name].A, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[name].G, other[name].G, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "groups": 2},
        {"kernel_size": (2, 4), "padding": "same", "dilation": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ],
)
def test_what_a_convolution_multiplies(options):
    """W rows^T is the convolution's output, and G that of its output's gradient."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, bias=False, **options).double()
    model = nn.Sequential(conv)
    batches = list(torch.randn(12, 16, 9, 8, dtype=torch.float64).split(2))
    runner, (target,), _, moments, energy = run(model, batches)
    own = moments["0"]
    W = target.kind.matrices(target)
    out = torch.cat([model(batch).detach() for batch in runner.batches])
    rows = out.unflatten(1, (target.groups, -1)).transpose(0, 1).movedim(2, -1).flatten(1, -2)  # (g, places, out)
    places = rows.shape[1]
    assert own.positions == places
    assert energy == pytest.approx(out.square().sum().item())
    v = torch.cat([torch.randn(model(b).shape, generator=torch.Generator().manual_seed(5 + i)) for i, b in
                   enumerate(runner.batches)]).double()  # fmt: skip
    slopes = v.unflatten(1, (target.groups, -1)).transpose(0, 1).movedim(2, -1).flatten(1, -2)
    close(own.G, slopes.mT @ slopes / places)
    squares = slopes.square().sum(-1)
    first = squares[:, : places // len(runner.batches)].mean()
    weights = (squares / first + 0.25)[..., None]
    close(W @ own.A @ W.mT, (rows * weights).mT @ rows / weights.sum(1, keepdim=True))
    close((W @ own.mean[..., None])[..., 0], (rows * weights).sum(1) / weights.sum(1))


def test_a_layer_used_twice_and_layers_never_used():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.idle, self.blind = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            self.blind(x)
            return self.twice(torch.relu_(self.twice(x)))

    model, x = Model(), torch.randn(8, 16)
    runner = Runner(model, [x, x, x], None, None, None, False)
    with runner.calibrating(0):
        found = survey_targets(runner, select_targets(model), gradients=True)
        (gathered,) = gather_moments(runner, found.inputs, gradients=True, seed=0, description="")
        moments = gathered.moments
    reasons = {entry.name: entry.reason for entry in found.skipped}
    assert reasons["idle"] == "is not called on any calibration batch"
    assert reasons["blind"].startswith("has no gradient")
    (twice,) = found.targets
    h = torch.relu(model.twice(x)).detach().double()
    direction = torch.cat(
        [torch.randn(8, 16, generator=torch.Generator().manual_seed(0 + i)) for i in range(2)]
    ).double()
    last = direction  # of each batch
    slope = (last @ model.twice.weight.detach().double()) * (h.repeat(2, 1) > 0)
    first = torch.cat((last[:8], slope[:8]))
    level = first.square().sum(1).mean()
    both = torch.cat((x.double(), h)).repeat(2, 1)
    slopes = torch.cat((slope[:8], last[:8], slope[8:], last[8:]))
    weights = slopes.square().sum(1) / level + 0.25
    torch.testing.assert_close(moments[twice].A[0], weighted(both, weights), rtol=1e-5, atol=1e-6)
    assert moments[twice].positions == 32


def test_passes_fit_into_the_memory():
    model = nn.Sequential(*(nn.Linear(n, n) for n in (32, 64, 32, 48, 16)))
    inputs = [[target] for target in select_targets(model).targets]
    sizes = [moments_bytes(several, True) for several in inputs]
    assert sizes[0] == 8 * 2 * 32**2
    split = split_passes(inputs, True, limit := sum(sorted(sizes)[-3:]))
    assert all(sum(moments_bytes(several, True) for several in one) <= limit for one in split)
    assert [target for one in split for several in one for target in several] == [several[0] for several in inputs]
    assert len(split_passes(inputs, True, 1)) == 5
    assert len(split_passes(inputs, True, 10**9)) == 1


def test_flags_and_random_state_are_put_back():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    running_mean, state = model[2].running_mean.clone(), torch.get_rng_state()
    runner = Runner(model, None, None, None, None, False)
    with contextlib.suppress(KeyError), runner.calibrating(3):
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        model(torch.randn(5, 8))
        raise KeyError
    assert [module.training for module in model] == [True, False, True]
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[2].running_mean, running_mean)


def test_which_output_counts():
    x, y = torch.zeros(2), torch.ones(3)
    loss = torch.tensor(0.5)
    assert main_output({"loss": x, "logits": y}) == ("output['logits']", y)
    assert main_output({"last_hidden_state": y, "other": x}) == ("output['last_hidden_state']", y)
    assert main_output({"token_embeddings": x, "sentence_embedding": y}) == ("output['sentence_embedding']", y)
    assert main_output({"loss": loss, "pred": y}) == ("output['pred']", y)
    assert main_output((torch.tensor(1), [x], loss, y)) == ("output[3]", y)
    with pytest.raises(CompressionError, match="pass forward_fn="):
        main_output(torch.tensor([1]))
    with pytest.raises(CompressionError, match="returned a NoneType without such a tensor"):
        main_output(None)


def of_inputs(model, batches):
    """Return the only layer's moments, without gradients and so without weights, and its inputs in float64."""
    runner, _, _, moments, _ = run(model, batches, gradients=False)
    (own,) = moments.values()
    return own, torch.cat(runner.batches).double()


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_a_large_mean_costs_no_accuracy(scale):
    """Standard deviations from 1 to 0.001, means of about 1,000; several strips of columns and blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    n, wide = 300, {"dtype": torch.float64, "generator": generator}
    x = torch.randn(5000, n, **wide) * torch.logspace(0, -3, n, dtype=torch.float64) @ torch.randn(n, n, **wide)
    x = ((x + 1000 * torch.randn(n, **wide)) * scale).float()
    own, x = of_inputs(nn.Sequential(nn.Linear(n, 4)), [x[:2500], x[2500:2500], x[2500:4000], x[4000:]])
    assert own.positions == 4000
    exact = (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)
    ours = own.A[0] - own.mean[0][:, None] * own.mean[0]
    deviations = exact.diagonal().sqrt()
    # Rounding of a mean of products; in float32 without a shift the error is above 0.1.
    assert ((ours - exact).abs() / (deviations[:, None] * deviations)).max() < 4e-6
    assert ((own.mean[0] - x.mean(0)).abs() / deviations).max() < 1e-6


def test_other_precisions_of_the_user_do_not_reach_the_moments():
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(96, 64, bias=False)), list(torch.randn(256, 96).split(64))
    plain, _ = of_inputs(model, batches)
    users_precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            ours, _ = of_inputs(model, batches)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(users_precision)
    assert torch.equal(ours.A, plain.A)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_as_it_is(dtype):
    torch.manual_seed(0)
    batches = list((torch.randn(640, 24) + 50).to(dtype).split(64))
    own, x = of_inputs(nn.Sequential(nn.Linear(24, 8, bias=False)).to(dtype), batches)
    torch.testing.assert_close(own.A[0], x.T @ x / len(x), rtol=1e-6, atol=0)


def test_moments_take_half_of_what_is_free_up_to_a_limit(monkeypatch):
    runner = Runner(nn.Linear(3, 3), None, None, None, None, False)
    for free, spare in ((10**9, 1000), (600, 300), (0, 0), (None, 1000)):
        monkeypatch.setattr("panther.compression.calibration.runner.free_bytes", lambda _, free=free: free)
        assert runner.spare_bytes(1000) == spare


def test_free_memory_is_told():
    free = free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
