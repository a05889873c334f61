"""Outputs and errors of models that somebody else wrote."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from compressing import low_rank
from foreign_models import WIDTH, Model, compressed, inputs, relative_error
from torch import nn

import panther as pr
from panther.compression.calibration.batches import ScoreFill
from panther.errors import CompressionError


@dataclass
class Output:
    loss: torch.Tensor
    prediction: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda loss, y: {"loss": loss, "prediction": y}, "output['prediction']"),
        (lambda loss, y: (loss, y), "output[1]"),
        (lambda loss, y: Output(loss, y), "output.prediction"),
        (lambda loss, y: OrderedDict(a=y.argmax(-1), b=loss, c=y), "output['c']"),
        (lambda loss, y: [y], "output[0]"),
    ],
)
def test_a_loss_is_never_the_output(wrap, name):
    class Trained(Model):
        def forward(self, x):
            y = self.network(x)
            return wrap(y.square().mean(), y)

    model, plain = Trained(), Model()
    report, _, _ = compressed(model, inputs())
    assert report.measured_error == compressed(plain, inputs())[0].measured_error
    assert report.output == name
    assert f"relative error of the output ({name})" in str(report)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda y: y.mean(), "returned a single number, and a floating tensor with at least one dimension is needed"),
        (lambda y: {"loss": y.mean()}, "returned a dict without such a tensor"),
        (lambda y: torch.nested.nested_tensor([y[:3], y[3:]]), "the output of the model is a nested tensor"),
        (lambda y: y.to_sparse(), "the output of the model is a sparse tensor"),
        (lambda y: None, "returned a NoneType without such a tensor"),
    ],
)
def test_outputs_that_cannot_be_compared(wrap, message):
    class Wrapped(Model):
        def forward(self, x):
            return wrap(self.network(x))

    with pytest.raises(CompressionError, match=message):
        pr.compress(Wrapped(), 0.3, inputs(), **low_rank)


def test_a_layer_that_returns_a_tuple():
    class WithBias(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.bias

    class Parallel(Model):
        def __init__(self):
            super().__init__()
            self.last = WithBias(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(self.network(x))[0]

    with pytest.raises(
        CompressionError, match=r"'last' \(WithBias\) returns a tuple, and a new layer takes and returns"
    ):
        pr.compress(Parallel(), 0.5, inputs(), include=(nn.Linear,), **low_rank)
    report = pr.compress(Parallel(), 0.5, inputs(), **low_rank)
    assert len(report.layers) == 2


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("an odd size"), "ValueError: an odd size"),
        (AssertionError(), "Asse"),
    ],
)
def test_a_message_begins_with_the_error_of_the_model(error, shown):
    class Failing(Model):
        def forward(self, x):
            raise error

    with pytest.raises(CompressionError) as caught:
        pr.compress(Failing(), 0.5, inputs(), **low_rank)
    assert str(caught.value).startswith(shown)
    assert "pass batches" not in str(caught.value)  # the batch fits the arguments of forward


def test_advice_where_the_batch_does_not_fit():
    with pytest.raises(
        CompressionError, match=r"too many positional arguments.*forward_fn=lambda .*model\(batch\[0\]\)"
    ):
        pr.compress(Model(), 0.5, [(x, x) for x in inputs()], **low_rank)
    with pytest.raises(CompressionError, match=r"missing a required argument: 'x'.*pass batches that hold only these"):
        pr.compress(Model(), 0.5, [{"y": x} for x in inputs()], **low_rank)


def masked(y, value):
    return y.masked_fill(torch.arange(WIDTH) % 3 == 0, value)


@pytest.mark.parametrize(
    "fill",
    [
        lambda y: masked(y, -torch.inf),
        lambda y: masked(y, torch.finfo(y.dtype).min),
        lambda y: masked(y, -1e4),
        lambda y: y - 1e9 * (torch.arange(WIDTH) % 3 == 0),
        lambda y: masked(masked(y, -1e9), -torch.inf).where(torch.arange(WIDTH) != 3, -torch.inf),
    ],
    ids=["-inf", "smallest", "-1e4", "added", "two numbers"],
)
def test_scores_that_a_mask_has_filled_hide_no_error(fill):
    class Filled(Model):
        def forward(self, x):
            return fill(self.network(x))

    model = Filled()
    report, exact, held_out = compressed(model, inputs(), heal=pr.HealConfig(max_steps=20))
    scores = [each.network(held_out)[..., torch.arange(WIDTH) % 3 != 0] for each in (model, exact)]
    assert report.healed_error == pytest.approx(relative_error(*scores), rel=1e-3)
    assert 0.01 < report.healed_error < report.measured_error
    assert 0.5 < report.predicted_error / report.measured_error < 2


def test_a_choice_that_is_filled_in_one_output_only_counts_as_the_smallest_score():
    exact, output = torch.tensor([[3.0, -torch.inf, 1.0, -2.0]]), torch.tensor([[3.0, 0.5, -torch.inf, -2.0]])
    fill = ScoreFill.of(exact)
    assert fill.scores(exact).tolist() == [3.0, 1.0, -2.0]
    assert (fill.replaced(output) - fill.replaced(exact)).tolist() == [[0.0, 2.5, -3.0, 0.0]]


@pytest.mark.parametrize(
    "values",
    [
        [1.0, -2e4, -9e3],
        [1.0, -2e4, -2e4, -400.0],
        [0.5, -3e5, -2.9e5],
        [-1e9, -1e9],
        [1.0, torch.nan, -1e9],
        [1.0, torch.inf, -1e9],
        [],
    ],
)
def test_large_outputs_that_are_no_fill_count(values):
    output = torch.tensor(values)
    assert ScoreFill.of(output).threshold is None
    assert ScoreFill.of(output).scores(output) is output
