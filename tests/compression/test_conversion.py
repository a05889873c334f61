"""Weighted low-rank fits against closed forms in float64, and the layers that come of them."""

import pytest
import torch
from torch import nn

from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings, Option, TargetFit, form_named, inherit_flags
from panther.compression.forms.metric import factor, leading_components, metric_of, wide_dtype
from panther.compression.moments import Moments
from panther.nn import LowRankConv2d, LowRankLinear


def fit_weight(target, moments, most):
    metric = metric_of(target, moments)
    return factor(metric.source, metric, most=most, seed=0, dtype=wide_dtype(target))


def convert_low_rank(target, components, rank, seed):
    option, form = Option("low_rank", 0, rank), form_named("low_rank")
    return form.convert(target, option, TargetFit(components), FormSettings(("low_rank",)), seed)


def moment(n, rows, seed, groups=1, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, rows, n, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, n) + shift
    return x.mT @ x / rows, x.mean(1), x


def root(A):
    values, vectors = torch.linalg.eigh(A)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def best(W, A, G, rank):
    """G^-1/2 [G^1/2 W A^1/2]_r A^-1/2, by symmetric roots."""
    a, g = root(A), root(G)
    U, sigma, Vt = torch.linalg.svd(g @ W @ a, full_matrices=False)
    core = (U[..., :rank] * sigma[..., None, :rank]) @ Vt[..., :rank, :]
    return torch.linalg.solve(g, core) @ torch.linalg.inv(a)


def loss(D, A, G):
    return torch.einsum("goi,gij,gpj,gop->", D, A, D, G).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [2, 6])
def test_linear_is_the_best_in_the_metric(bias, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 20, bias=bias)).double()
    (target,) = select_targets(model).targets
    A, mean, _ = moment(24, 400, 1, shift=0.5)
    G, _, _ = moment(20, 400, 2)
    found = fit_weight(target, Moments(A, mean, G, 400), 12)
    W = model[0].weight.detach()[None]
    metric = A - mean[:, :, None] * mean[:, None, :] if bias else A
    layer = next(iter(convert_low_rank(target, found, rank, 0).values()))
    D = layer.weight.detach() - W
    exact = loss(best(W, metric, G, rank) - W, metric, G)
    assert loss(D, metric, G) == pytest.approx(exact, rel=2e-3)  # the ridge
    assert found.tails[rank].item() == pytest.approx(exact, rel=2e-2)
    local = torch.einsum("goi,gij,goj->", D, metric, D) / torch.einsum("goi,gij,goj->", W, metric, W)
    error = (found.local_tails[rank] / found.local_tails[0]).sqrt().item()
    assert error == pytest.approx(local.sqrt().item(), rel=2e-2)
    if bias:  # no error in the mean is left
        torch.testing.assert_close(layer(mean[0]), model[0](mean[0]).detach(), rtol=1e-5, atol=1e-5)
    assert isinstance(layer, LowRankLinear)
    assert layer.rank == rank
    # The factors are balanced.
    torch.testing.assert_close(layer.down.square().sum(0), layer.up.square().sum(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_is_the_best_in_the_metric_group_by_group(groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1, groups=groups, bias=False)).double()
    (target,) = select_targets(model).targets
    A, mean, _ = moment(target.inner, 500, 1, groups)
    G, _, _ = moment(target.outer, 500, 2, groups)
    found = fit_weight(target, Moments(A, mean, G, 500), 4)
    layer = next(iter(convert_low_rank(target, found, 4, 0).values()))
    W = target.kind.matrices(target)
    D = layer.weight.detach().flatten(1).unflatten(0, (groups, -1)) - W
    assert isinstance(layer, LowRankConv2d)
    assert loss(D, A, G) == pytest.approx(loss(best(W, A, G, 4) - W, A, G), rel=2e-3)


def test_without_statistics_it_is_the_truncated_svd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40))
    (target,) = select_targets(model).targets
    layer = next(iter(convert_low_rank(target, fit_weight(target, None, 10), 10, 0).values()))
    expected = LowRankLinear.from_linear(model[0], 10)
    torch.testing.assert_close(layer.weight, expected.weight, rtol=1e-4, atol=1e-5)


def test_dead_inputs_and_a_zero_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    nn.init.zeros_(model[1].weight)
    first, second = select_targets(model).targets
    x = torch.randn(300, 3, dtype=torch.float64) @ torch.randn(3, 20, dtype=torch.float64)
    x[:, 10:] = 0
    own = Moments((x.T @ x / 300)[None], x.mean(0)[None], torch.zeros(1, 20, 20, dtype=torch.float64), 300)
    layer = next(iter(convert_low_rank(first, fit_weight(first, own, 6), 6, 0).values()))
    assert (layer(x.float()) - model[0](x.float())).abs().max() < 1e-4  # rank 3 is all there is
    zero = next(iter(convert_low_rank(second, fit_weight(second, own, 6), 6, 0).values()))
    torch.testing.assert_close(zero(x.float()), model[1](x.float()))
    zero(x.float()).square().sum().backward()
    assert zero.down.grad.any()  # unused components can learn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flags_dtype_and_memory_format(dtype):
    model = nn.Sequential(nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last), nn.Linear(32, 32)).to(dtype)
    model[1].weight.requires_grad_(False)
    model[0].eval()
    new = {}
    for target in select_targets(model).targets:
        new |= convert_low_rank(target, fit_weight(target, None, 4), 4, 0)
    inherit_flags(new)
    conv, linear = (new[module] for module in model)
    assert {parameter.dtype for layer in new.values() for parameter in layer.parameters()} == {dtype}
    assert conv.down.is_contiguous(memory_format=torch.channels_last)
    assert not conv.training
    assert linear.training
    assert [linear.down.requires_grad, linear.up.requires_grad, linear.bias.requires_grad] == [False, False, True]
    assert conv.down.requires_grad


def test_large_weights_take_the_randomized_svd():
    """Within a thousandth of the truncated SVD, from components that cover twice a uniform rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1100, bias=False))
    U, _, Vt = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
    sigma = torch.arange(1, 1025) ** -0.7
    model[0].weight.data = (U * sigma) @ Vt
    (target,) = select_targets(model).targets
    most = leading_components(target, 530, 0.1 * 530)
    assert most == 2 * int(0.1 * 530)
    assert leading_components(target, 530, 530.0) == 530
    layer = next(iter(convert_low_rank(target, fit_weight(target, None, most), most, 0).values()))
    error = (layer.weight.detach() - model[0].weight).norm() / sigma[most:].norm()
    assert 0.999 < error < 1.002
