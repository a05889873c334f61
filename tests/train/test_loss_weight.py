"""Losses that are means over tokens or class weights: several batches and ranks equal one large batch.

People expect of accumulation and of more processes that they change nothing. The mean of the means of batches with
different numbers of tokens is not the mean over all tokens, and frameworks had to mend this one after the other.
"""

import functools

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from panther.errors import ConfigError, TrainingError
from panther.nn import SKLinear
from panther.train import TrainConfig, Trainer
from panther.train.optimization.loss_weights import LossWeights

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
STEP, STEPS, CLASSES = 24, 4, 4  # samples of a step over all ranks, and steps
WEIGHTS = torch.tensor([0.1, 2.0, 0.7, 5.0], dtype=torch.float64)
RATE, CLIP = 0.5, 0.3


def build(ends_in=nn.Identity):
    torch.manual_seed(0)
    first, second = (SKLinear(24, 20, 2), nn.Tanh(), nn.Linear(20, 16), nn.Tanh()), (nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(*first, *second, nn.Linear(16, CLASSES), ends_in()).double()


def labels(ignored=-100, n=STEP * STEPS):
    """Some are ignored; in the second step all of the second of two ranks, in the third the first half of all."""
    y = torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(3))
    number = torch.arange(n)
    y[number % 5 == 0] = ignored
    y[(number // STEP == 1) & (number % 2 == 1)] = ignored
    y[(number // STEP == 2) & (number % STEP < STEP // 2)] = ignored
    return y


def inputs(n=STEP * STEPS):
    return torch.randn(n, 24, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def masked_error(output, target):
    """Not a number where nothing counts, and neither is its gradient."""
    counts = target != -100
    return ((output.softmax(1)[:, 0] - target) ** 2 * counts).sum() / counts.sum()


def count_labels(batch):
    return (batch[1] != -100).sum()


def probabilities():
    return torch.rand(STEP * STEPS, CLASSES, generator=torch.Generator().manual_seed(5), dtype=torch.float64).softmax(1)


# Of each loss: the function, its targets, loss_weight, and how the model ends.
LOSSES = {
    "ignored labels": (nn.CrossEntropyLoss(), labels, None, nn.Identity),
    "a mean of the user's": (masked_error, labels, count_labels, nn.Identity),
    "class weights": (nn.CrossEntropyLoss(WEIGHTS), lambda: labels(1), None, nn.Identity),
    "an ignored class": (nn.CrossEntropyLoss(ignore_index=2), lambda: labels(2), None, nn.Identity),
    "weights, smoothing and ignored labels": (
        nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), labels, None, nn.Identity,
    ),
    "log-likelihoods": (
        nn.NLLLoss(WEIGHTS, ignore_index=0), lambda: labels(0), None, functools.partial(nn.LogSoftmax, 1),
    ),
    "a partial": (functools.partial(F.cross_entropy, weight=WEIGHTS), labels, None, nn.Identity),
    "probabilities": (nn.CrossEntropyLoss(WEIGHTS), probabilities, None, nn.Identity),
    "a sum": (nn.CrossEntropyLoss(WEIGHTS, reduction="sum"), labels, None, nn.Identity),
}  # fmt: skip


@functools.cache
def expected(name):
    """What a loop over large batches, without any of Panther's training, gives: losses, norms, and validation."""
    loss_fn, targets, _, ends_in = LOSSES[name]
    model, x, y = build(ends_in), inputs(), targets()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / (STEP if name == "a sum" else 1))
    rows = []
    for step in range(STEPS):
        part = slice(step * STEP, (step + 1) * STEP)
        loss = loss_fn(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            validation = loss_fn(model(x[:19]), y[:19])
        # The history has losses by the sample also where a loss is a sum.
        losses = [value.item() / n for value, n in ((loss, STEP), (validation, 19))] if name == "a sum" else None
        losses = losses or [loss.item(), validation.item()]
        rows.append([losses[0], norm.item(), losses[1]])
    return rows


def trained(name, ranks=1, accumulation=4, **settings):
    loss_fn, targets, loss_weight, ends_in = LOSSES[name]
    config = TrainConfig(
        max_steps=STEPS,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=CLIP,
        learning_rate=RATE / (STEP if name == "a sum" else 1),
        log_every_n_steps=1,
        validate_every_n_steps=1,
        **settings,
    )
    trainer = Trainer(build(ends_in), torch.optim.SGD, loss_fn, config, loss_weight=loss_weight)
    data = TensorDataset(inputs(), targets())
    validation = TensorDataset(*(tensor[:19] for tensor in data.tensors))
    history = trainer.fit(DataLoader(data, STEP // ranks // accumulation), DataLoader(validation, 5))
    columns = (history[key][1] for key in ("loss", "gradient_norm", "validation_loss"))
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_on_one_process_equals_one_large_batch(name):
    for row, wanted in zip(trained(name), expected(name), strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


STRATEGIES = {
    "ddp": (2, 2, {"strategy": "ddp"}),
    "fsdp": (2, 2, {"strategy": "fsdp"}),
    "zero1": (2, 2, {"strategy": "zero1"}),
    "replicate": (2, 2, {"strategy": "replicate"}),
    "tp": (2, 1, {"strategy": "tp"}),
    "pp": (2, 1, {"strategy": "pp"}),
    "pp, three microbatches": (2, 1, {"strategy": "pp", "pipeline_schedule": "gpipe", "num_microbatches": 3}),
    "pp, zero bubble": (2, 1, {"strategy": "pp", "pipeline_schedule": "zero_bubble", "num_microbatches": 4}),
    "pp, interleaved": (2, 1, {"strategy": "pp", "pipeline_schedule": "interleaved", "num_microbatches": 2}),
    "ddp, without accumulation": (2, 2, {"strategy": "ddp", "accumulation": 1}),
    "ddp, with unused parameters": (2, 2, {"strategy": "ddp", "find_unused_parameters": True}),
    "hybrid": (4, 2, {"strategy": "hybrid", "tensor_parallel_size": 2}),
    "hybrid with stages": (4, 2, {"strategy": "hybrid", "pipeline_parallel_size": 2}),
    "ddp, 4 ranks": (4, 4, {"strategy": "ddp", "accumulation": 3}),
}
QUICK = ("a mean of the user's", "weights, smoothing and ignored labels")


@pytest.mark.parametrize(
    ("names", "strategies"),
    [
        (QUICK, ("ddp", "fsdp", "tp", "pp")),
        pytest.param(
            tuple(LOSSES), tuple(one for one in STRATEGIES if STRATEGIES[one][0] == 2), marks=pytest.mark.slow
        ),
        pytest.param(
            tuple(LOSSES), tuple(one for one in STRATEGIES if STRATEGIES[one][0] == 4), marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "2 ranks", "4 ranks"],
)
def test_every_strategy_equals_one_large_batch(names, strategies):
    world = STRATEGIES[strategies[0]][0]

    def run():
        results = {}
        for strategy in strategies:
            _, size, settings = STRATEGIES[strategy]
            for name in names:
                results[strategy, name] = trained(name, size, **{"accumulation": 2, **settings})
        return results

    for results in on_ranks(run, world):
        for (strategy, name), rows in results.items():
            for row, wanted in zip(rows, expected(name), strict=True):
                assert row == pytest.approx(wanted, rel=1e-6), (strategy, name)


class Speaks(nn.Module):
    """A language model that returns its loss, the mean over the labels that it does not ignore, shifted by one."""

    def __init__(self, returns_logits):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.returns_logits = returns_logits
        self.double()

    def forward(self, input_ids, labels, mask=None):
        logits = self.head(self.embedding(input_ids))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits.clone()} if self.returns_logits else loss


def spoken():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (24, 6), generator=generator)
    lengths = torch.randint(1, 7, (24,), generator=generator)
    lengths[1::2] = 1  # nothing is to be predicted by the second of two ranks
    lengths[0] = 6
    targets = torch.where(torch.arange(6) < lengths[:, None], ids, -100)
    mask = (targets[:, 1:] != -100).long()
    return [{"input_ids": i, "labels": t, "mask": m} for i, t, m in zip(ids, targets, mask, strict=True)]


def count_tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("returns_logits", [True, False])
def test_models_that_return_their_loss_take_a_function_or_a_key(returns_logits):
    def run(batch_size=4, **settings):
        rows = []
        for loss_weight in (count_tokens, "mask"):
            config = TrainConfig(epochs=2, learning_rate=0.5, log_every_n_steps=1, **settings)
            trainer = Trainer(Speaks(returns_logits), torch.optim.SGD, config=config, loss_weight=loss_weight)
            history = trainer.fit(DataLoader(spoken(), batch_size), DataLoader(spoken(), 5))
            rows.append((history["loss"][1], history["validation_loss"][1]))
        return rows

    model = Speaks(returns_logits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    [(batch)] = DataLoader(spoken(), 24)
    losses, validations = [], []
    for _ in range(2):
        optimizer.zero_grad()
        output = model(**batch)
        loss = output["loss"] if returns_logits else output
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            output = model(**batch)
        validations.append((output["loss"] if returns_logits else output).item())
    accumulated = {"gradient_accumulation_steps": 3}
    several = on_ranks(lambda: run(strategy="ddp", **accumulated) + run(strategy="fsdp", **accumulated), 2)
    for rows in (run(8, **accumulated), *several):
        for found, found_validations in rows:
            assert found == pytest.approx(losses, rel=1e-9)
            assert found_validations == pytest.approx(validations, rel=1e-9)


def test_labels_that_an_unknown_loss_may_ignore_are_warned_of_once():
    def run(loss_fn, **settings):
        config = TrainConfig(epochs=1, batch_size=8, gradient_accumulation_steps=2)
        Trainer(build(), torch.optim.SGD, loss_fn, config, **settings).fit(TensorDataset(inputs(), labels()))

    with pytest.warns(UserWarning, match=r"loss_weight=lambda batch: \(batch\[1\] != -100\)\.sum\(\)") as caught:
        run(lambda output, target: F.cross_entropy(output, target))
    assert len(caught) == 1
    config = TrainConfig(epochs=1, batch_size=8, gradient_accumulation_steps=3)
    with pytest.warns(UserWarning, match=r"batch\['labels'\]"):
        Trainer(Speaks(True), torch.optim.SGD, config=config).fit(spoken())
    # Warnings are errors.
    run(nn.CrossEntropyLoss())
    run(lambda output, target: F.cross_entropy(output, target), loss_weight=count_labels)


def test_a_step_of_no_weight_stops_or_is_skipped():
    y = labels()
    y[STEP : 2 * STEP] = -100
    data = TensorDataset(inputs(), y)

    def run():
        steps = []
        for settings in ({}, {"on_nonfinite": "skip"}):
            config = TrainConfig(epochs=1, gradient_accumulation_steps=2, log_every_n_steps=1, **settings)
            trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
            try:
                trainer.fit(DataLoader(data, STEP // 2))
            except TrainingError as error:
                steps.append(str(error))
            steps.append((trainer.step, trainer.skipped))
        return steps

    told, *steps = run()
    assert told.startswith(
        "step 2 is not finite: the weights of all its samples are 0, because their labels are ignored"
    )
    assert steps == [(1, 0), (STEPS, 1)]


@pytest.mark.parametrize(
    ("loss_fn", "loss_weight", "sentence"),
    [
        (nn.CrossEntropyLoss(), 1.5, "loss_weight must be a function of a batch, or the key or index of an entry"),
        (nn.CrossEntropyLoss(), True, "loss_weight must be a function"),
        (
            nn.MSELoss(reduction="sum"),
            "mask",
            "loss_weight is for a loss that is a mean, and loss_fn has reduction='sum'",
        ),
        (masked_error, lambda batch: -1.0, "the loss_weight of a batch is -1.0, and must be at least 0 and finite"),
        (masked_error, lambda batch: batch[0].sum() * float("nan"), "the loss_weight of a batch is nan"),
        (masked_error, "mask", "loss_weight='mask' is not an entry of a batch: use a function, or one of 0, 1"),
        (masked_error, 7, "loss_weight=7 is not an entry of a batch"),
    ],
)
def test_wrong_weights_are_refused(loss_fn, loss_weight, sentence):
    def run():
        trainer = Trainer(build(), torch.optim.SGD, loss_fn, TrainConfig(max_steps=1), loss_weight=loss_weight)
        trainer.fit(DataLoader(TensorDataset(inputs(), labels()), 8))

    with pytest.raises(ConfigError, match=sentence):
        run()


def test_weights_of_torch_s_losses_are_what_they_divide_by():
    """Also over positions, as images and texts have, and for targets of all kinds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, CLASSES, 5, generator=generator, dtype=torch.float64)
    classes = torch.randint(CLASSES, (12, 5), generator=generator)
    classes[classes.sum(1) % 3 == 0] = -100
    cases = [
        (nn.CrossEntropyLoss(weight, label_smoothing=smoothing, ignore_index=ignored), classes)
        for weight in (None, WEIGHTS)
        for smoothing in (0.0, 0.1)
        for ignored in (-100,)
    ]
    cases += [(nn.CrossEntropyLoss(weight), x.softmax(1)) for weight in (None, WEIGHTS)]
    cases += [(nn.NLLLoss(WEIGHTS), classes), (F.cross_entropy, classes), (F.nll_loss, classes)]
    cases += [(functools.partial(F.nll_loss, ignore_index=1), classes.clamp(min=1))]
    cases += [(loss, x * 0.1) for loss in (nn.MSELoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)))]
    for loss_fn, target in cases:
        weights = LossWeights(loss_fn, None)
        parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
        total = [weights.of((x[part], target[part]), part.stop - part.start) for part in parts]
        losses = [loss_fn(x[part], target[part]).item() if w else 0.0 for part, w in zip(parts, total, strict=True)]
        mean = sum(w * loss for w, loss in zip(total, losses, strict=True)) / sum(total)
        assert mean == pytest.approx(loss_fn(x, target).item(), rel=1e-12)
