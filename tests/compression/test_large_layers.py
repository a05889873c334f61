"""Layers with more outputs or inputs than the moments of pairs are computed for."""

import pytest
import torch
from torch import nn

import panther as pr
from panther.compression.calibration import targets
from tests.support.compressing import quick


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    monkeypatch.setattr(targets, "_LARGEST_SIDE", 128)


class Classifier(nn.Module):
    """A head of many rows, alone or behind a softmax, on inputs whose directions occur unequally."""

    def __init__(self, rows=300, output="logits"):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.output = nn.Linear(48, 64), nn.Linear(64, rows), output

    def forward(self, x):
        logits = self.head(torch.tanh(self.body(x)))
        return logits if self.output == "logits" else logits.log_softmax(-1)


def batches_of(width=48, sizes=(10, 32), seed=1):
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -1.5, width)
    return [torch.randn(sizes[1], 3, width, generator=generator) * spectrum for _ in range(sizes[0])]


@pytest.mark.parametrize("output", ["logits", "log_softmax"])
def test_a_large_head_is_no_worse_than_with_the_moment_of_all_its_outputs(output, monkeypatch):
    options = {"calibration": batches_of(), "forms": ("int4",), "group_size": 32, **quick}
    large = pr.compress(Classifier(output=output), budget=1.0, **options)
    monkeypatch.setattr(targets, "_LARGEST_SIDE", 1024)
    small = pr.compress(Classifier(output=output), budget=1.0, **options)
    assert [layer.form for layer in large.layers] == ["int4", "int4"]
    assert large.bytes_after == small.bytes_after
    assert large.measured_error < 1.1 * small.measured_error


@pytest.mark.parametrize("method", ["two_sided", "activation", "svd"])
def test_no_matrix_of_all_outputs_or_inputs_is_allocated(method, monkeypatch):
    sizes = []
    original = torch.zeros

    def zeros(*shape, **options):
        result = original(*shape, **options)
        sizes.append(result.numel())
        return result

    def square_zeros(groups, n, device):
        sizes.append(n * n)
        return original(groups, n, n, dtype=torch.float64, device=device)

    for module in ("moments", "weights.table"):
        monkeypatch.setattr(f"panther.compression.{module}.square_zeros", square_zeros)
    monkeypatch.setattr(torch, "zeros", zeros)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 32), nn.Tanh(), nn.Linear(32, 500))
    report = pr.compress(model, bits=6.0, calibration=batches_of(400), method=method, **quick)
    assert max(sizes) <= 500 * 400
    assert {layer.form.startswith("int") for layer in report.layers} == {True}
    assert report.measured_error < 0.15
    for layer in report.layers:
        assert 0.25 < layer.predicted_error / layer.measured_error < 4


def test_inputs_that_occur_often_weigh_more():
    """Only the diagonal is known of many inputs. Two layers differ in how often their inputs occur."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.often, self.rarely = nn.Linear(200, 40), nn.Linear(200, 40)

        def forward(self, x):
            return self.often(x) + 0.02 * self.rarely(x)

    generator = torch.Generator().manual_seed(0)
    batches = [(torch.rand(64, 200, generator=generator) < 0.1).float() for _ in range(10)]
    report = pr.compress(Bags(), bits=5.0, calibration=batches, forms=("int8", "int6", "int4", "int3", "int2"), **quick)
    forms = {layer.names[0]: int(layer.form.removeprefix("int")) for layer in report.layers}
    assert forms["often"] > forms["rarely"]
    assert 0.5 * report.predicted_error < report.measured_error < 2 * report.predicted_error


def test_forms_without_codes_leave_a_large_layer_dense_with_the_reason():
    model = Classifier()
    report = pr.compress(model, budget=0.8, calibration=batches_of(), forms="low_rank", **quick)
    assert type(model.head) is nn.Linear
    [skipped] = report.skipped
    assert skipped.name == "head"
    assert skipped.reason == (
        "has 64 inputs and 300 outputs, and above 128 only codes are fitted: add a form such as 'int8'"
    )


def test_a_large_head_of_one_row_more_and_rows_without_gradients():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(48, 129, bias=False)

        def forward(self, x):
            return self.head(x)[..., :20]

    model = Half()
    report = pr.compress(model, bits=4.5, calibration=batches_of(), **quick)
    assert report.layers[0].form in ("int4", "int5", "int3")
    weight = Half().head.weight
    with torch.no_grad():  # rows that no output of the model reads are not ruined
        assert (model.head.to_linear().weight[20:] - weight[20:]).norm() < 0.2 * weight[20:].norm()
