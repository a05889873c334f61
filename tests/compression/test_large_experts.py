"""Stacked experts whose moments would take gigabytes, and experts that are fitted a few at a time."""

import copy

import pytest
import torch
from compressing import error, quick
from expert_models import Experts, mixtures, sequences
from torch import nn

import panther as pr
from panther.compression.calibration import targets
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings
from panther.compression.forms.metric import RIDGE
from panther.compression.moments import Moments, moments_bytes
from panther.compression.weights import experts as expert_fits
from panther.compression.weights.experts import ExpertSums
from panther.compression.weights.table import TABLES, TableMoments, Use

OPTIONS = {**quick, "calibration": sequences(), "group_size": 24}
SETTINGS = FormSettings(("int3", "int5"), group_size=12)


def fit_stack(stack, moments, widths):
    return stack.kind.fit(stack, moments, widths, SETTINGS, RIDGE)


def stack_and_linears(transposed=False):
    """Return the first stacked weight of three experts, and a linear layer for the weight of each expert."""
    torch.manual_seed(0)
    experts = Experts(3, 24, 20, transposed=transposed)
    linears = nn.ModuleList(nn.Linear(24, 40, bias=False) for _ in range(3))
    for weight, linear in zip(experts.gate_up_proj, linears, strict=True):
        linear.weight = nn.Parameter((weight.mT if transposed else weight).detach().clone())
    (stack, _), separate = (
        select_targets(module, smallest=lambda target: 1, has_codes=True).targets
        for module in (nn.Sequential(experts), linears)
    )
    return stack, separate


def moments_of_inputs():
    roots = torch.randn(3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return roots @ roots.mT + 0.1 * torch.eye(24)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_rows_of_large_experts_are_rounded_as_the_rows_of_large_linear_layers(transposed, is_wide, monkeypatch):
    monkeypatch.setattr(targets, "_LARGEST_SIDE", 20 if is_wide else 39)
    stack, separate = stack_and_linears(transposed)
    assert (stack.is_large, stack.is_wide) == (True, is_wide)
    A, rows = moments_of_inputs(), torch.rand(3, 40, dtype=torch.float64)
    A = A.diagonal(dim1=1, dim2=2) if is_wide else A
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    fit = fit_stack(stack, Moments(A, A.new_zeros(3, 24), rows, 100.0, shares=shares), [3, 5])
    total = 0.0
    for expert, target in enumerate(separate):
        moments = TableMoments((Use(1.0, shares[expert] * rows[expert], A[expert], None, A[expert]),), 1.0)
        expected = TABLES.fit(target, moments, [3, 5], SETTINGS, RIDGE)
        total += expected.codes[3].residual.tails.item()
        for bits in (3, 5):
            own = slice(40 * expert, 40 * (expert + 1))
            assert torch.equal(fit.codes[bits].weight.codes[own], expected.codes[bits].weight.codes)
            assert torch.equal(fit.codes[bits].weight.scales[own], expected.codes[bits].weight.scales)
    assert fit.codes[3].residual.tails.item() == pytest.approx(total)


@pytest.mark.parametrize("joint", [1, 2])
def test_experts_fitted_a_few_at_a_time_have_the_same_codes(joint, monkeypatch):
    stack, _ = stack_and_linears()
    A = moments_of_inputs()
    moments = Moments(A, A[:, 0], None, 100.0)
    together, estimate = fit_stack(stack, moments, [3, 5]), stack.kind.sensitivity(stack, moments, RIDGE)
    monkeypatch.setattr(expert_fits, "JOINT_ENTRIES", joint * 2 * 24 * 40)
    separate = fit_stack(stack, moments, [3, 5])
    assert stack.kind.sensitivity(stack, moments, RIDGE) == pytest.approx(estimate)
    for bits, fit in together.codes.items():
        assert torch.equal(separate.codes[bits].weight.codes, fit.weight.codes)
        assert torch.equal(separate.codes[bits].weight.scales, fit.weight.scales)
        assert separate.codes[bits].residual.tails.item() == pytest.approx(fit.residual.tails.item())
    assert separate.components.local_tails.item() == pytest.approx(together.components.local_tails.item())


def test_experts_share_moments_as_if_each_had_the_same():
    stack, _ = stack_and_linears()
    A, roots = moments_of_inputs()[:1], torch.randn(1, 40, 40, dtype=torch.float64)
    G, shares = roots @ roots.mT + 0.1 * torch.eye(40), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    mean = A.new_zeros(3, 24)
    shared = fit_stack(stack, Moments(A, mean, G, 100.0, shares=shares), [3])
    separate = fit_stack(
        stack, Moments(A.repeat(3, 1, 1), mean, shares[:, None, None] * G, 100.0, shares=torch.ones(3)), [3]
    )
    assert torch.equal(shared.codes[3].weight.codes, separate.codes[3].weight.codes)
    assert shared.codes[3].residual.tails.item() == pytest.approx(separate.codes[3].residual.tails.item())


@pytest.mark.parametrize("method", ["two_sided", "activation"])
# Of four experts, with 24, 20 and 40 inputs or outputs, moments of 40 are shared; of 24 too; all are diagonals.
@pytest.mark.parametrize("limit", [60, 40, 19])
def test_large_experts_are_compressed(method, limit, monkeypatch):
    monkeypatch.setattr(targets, "_LARGEST_SIDE", limit)
    sizes = []
    original = torch.zeros

    def square_zeros(groups, n, device):
        sizes.append(groups * n * n)
        return original(groups, n, n, dtype=torch.float64, device=device)

    monkeypatch.setattr("panther.compression.weights.experts.square_zeros", square_zeros)
    model = mixtures(unused=(1,))
    x = torch.cat(sequences(4, seed=2))
    exact = copy.deepcopy(model)(x).detach()
    with pytest.warns(pr.errors.NumericalWarning, match="1 of 4 experts"):
        report = pr.compress(model, bits=6.0, method=method, **OPTIONS)
    assert max(sizes, default=0) <= limit**2
    assert bool(sizes) is (limit > 19)
    stacks = [layer for layer in report.layers if "experts" in layer.names[0]]
    assert len(stacks) == 4
    assert all(0.25 < layer.predicted_error / layer.measured_error < 4 for layer in stacks)
    assert report.measured_error < 0.15
    assert error(model, exact, x) < 0.2  # a router that reads other values sends some tokens to other experts


def test_the_bytes_of_the_moments_of_large_experts(monkeypatch):
    stack, _ = stack_and_linears()
    assert moments_bytes([stack], True) == 8 * 3 * (24**2 + 40**2)
    for limit, inputs, outputs in (
        (45, 3 * 24**2, 40**2), (40, 24**2, 40**2), (39, 24**2, 3 * 40), (23, 3 * 24, 3 * 40),
    ):  # fmt: skip
        monkeypatch.setattr(targets, "_LARGEST_SIDE", limit)
        assert moments_bytes([stack], True) == 8 * (inputs + outputs)
        assert moments_bytes([stack], False) == 8 * inputs
        sums = ExpertSums(stack, True, torch.device("cpu"))
        assert sums.A.nbytes + sums.G.nbytes == moments_bytes([stack], True)
