"""The interpolative form: what low rank keeps at one rank, at the rank that fewer numbers allow."""

import copy

import pytest
import torch
from compressing import batches_of, error, quick
from torch import nn

import panther as pr
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings, Option, TargetFit, form_named
from panther.compression.forms.metric import factor, metric_of
from panther.compression.moments import Moments
from panther.nn import InterpolativeLinear
from panther.nn.sketch_record import plain_state


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 96, bias=False), nn.Linear(96, 24)
    )


@pytest.mark.parametrize("size", [(40, 34), (34, 40), (40, 40), (33, 1), (1, 33), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_that_of_low_rank(size, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*size, dtype=dtype))
    (target,) = select_targets(model, smallest=lambda target: 0).targets
    x = torch.randn(300, size[0], dtype=torch.float64) * torch.linspace(0.1, 2, size[0]) + 0.3
    g = torch.randn(300, size[1], dtype=torch.float64) * torch.linspace(2, 0.1, size[1])
    metric = metric_of(target, Moments((x.mT @ x / 300)[None], x.mean(0)[None], (g.mT @ g / 300)[None], 300))
    form = form_named("interpolative")
    for rank in {1, min(7, *size), min(size)}:
        found = factor(metric.source, metric, most=rank, seed=0, dtype=dtype)
        (layer,) = form.convert(
            target, Option(form.name, 0, rank), TargetFit(found), FormSettings((form.name,)), 0
        ).values()
        layer = layer.double()
        E = layer.weight.detach() - metric.source[0]
        loss = (metric.R[0] @ E @ metric.L[0]).square().sum().item()
        assert loss == pytest.approx(found.tails[rank].item(), rel=1e-4, abs=1e-10)
        mean = metric.means[0]  # the bias takes up the change of the mean
        torch.testing.assert_close(layer(mean), copy.deepcopy(model[0]).double()(mean), rtol=1e-5, atol=1e-6)


def test_it_keeps_more_than_low_rank_at_equal_bytes():
    batches = batches_of()
    reports = {
        form: pr.compress(network(), 0.6, batches, forms=form, **quick) for form in ("interpolative", "low_rank")
    }
    ours, theirs = reports.values()
    assert ours.measured_error < 0.9 * theirs.measured_error
    assert ours.eligible_ratio <= 0.6
    ranks = [sum(layer.rank or min(layer.shape) for layer in report.layers) for report in (ours, theirs)]
    assert ranks[0] > ranks[1]


def test_odd_ranks_of_small_weights_and_multiples_of_eight():
    small, large = (select_targets(nn.Sequential(nn.Linear(n, n))).targets[0] for n in (20, 96))
    options = FormSettings(("interpolative",)).options(small)
    assert [option.rank for option in options][:3] == [2, 4, 6]
    assert {option.rank % 8 for option in FormSettings(("interpolative",)).options(large)} == {0}
    assert all(option.bytes < small.dense_bytes for option in options)


def test_shared_weights_and_the_transposed_layers_of_transformers(tmp_path):
    class Conv1D(nn.Module):  # of transformers: known by its name
        __module__ = "transformers.pytorch_utils"

        def __init__(self, inner, outer):
            super().__init__()
            self.nf, self.nx = outer, inner
            self.weight = nn.Parameter(0.1 * torch.randn(inner, outer))
            self.bias = nn.Parameter(torch.randn(outer))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(48, 48), nn.Linear(48, 48), Conv1D(48, 60)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(torch.relu(self.a(x))))

    torch.manual_seed(0)
    model = Model()
    exact = copy.deepcopy(model)
    report = pr.compress(model, 0.9, batches_of(), forms="interpolative", **quick)
    assert {type(layer) for layer in (model.a, model.b, model.c)} == {InterpolativeLinear}
    assert model.a.skeleton is model.b.skeleton
    assert model.a.coefficients is model.b.coefficients
    assert model.a.order is model.b.order
    assert model.a.bias is not model.b.bias
    assert report.bytes_after == sum({t.data_ptr(): t.nbytes for t in plain_state(model).values()}.values())
    x = batches_of()[4]
    assert error(model, exact(x).detach(), x) < 0.3
    again = pr.load_compressed(pr.save_compressed(model, tmp_path), Model())
    assert torch.equal(again(x), model(x))


def test_healing():
    model, batches = network(), batches_of(1280)
    heal = pr.HealConfig(max_steps=60, learning_rate=1e-3)
    report = pr.compress(model, 0.4, batches, forms=("dense", "interpolative"), heal=heal, **quick)
    assert report.healed_error < report.measured_error
    for layer in model:
        if isinstance(layer, InterpolativeLinear):
            layer.check_record()


def test_half_precision():
    model = network().bfloat16()
    pr.compress(model, 0.6, batches_of(dtype=torch.bfloat16), forms="interpolative", **quick)
    assert {layer.dtype for layer in model if isinstance(layer, InterpolativeLinear)} == {torch.bfloat16}
