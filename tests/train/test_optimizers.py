"""Optimizers that users made, under every strategy: the steps are those of a plain loop on one process."""

import functools
import re
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import TensorDataset
from whole_batches import STRATEGIES, At, assert_equal, build, plain, train, weights

from panther.errors import ConfigError
from panther.optim import MuonAdamW, SketchedAdamW, sketched_param_groups
from panther.train import Callback, TrainConfig, Trainer

pytestmark = pytest.mark.distributed


def groups(model):
    """The usual groups: matrices decay, biases do not, and the last layer has a rate of its own."""
    *body, head = [m for m in model if isinstance(m, nn.Linear)]
    return [
        {"params": [m.weight for m in body], "weight_decay": 0.2},
        {"params": [m.bias for m in body], "weight_decay": 0.0},
        {"params": list(head.parameters()), "lr": 0.05},
    ]


class Strange(torch.optim.Optimizer):
    """As third parties write them: a required argument, and ``defaults`` that the constructor does not take."""

    def __init__(self, params, total_steps, *, lr=0.02):
        self.total_steps = total_steps
        super().__init__(params, {"lr": lr, "momentum": 0.9, "count": 0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(buffer, alpha=-group["lr"] * (1 - group["count"] / self.total_steps))


class Holding(torch.optim.SGD):
    """Refers to its parameters outside of the groups."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.everything = {"all": [p for group in self.param_groups for p in group["params"]]}


class Local(torch.optim.SGD):
    """Reads the norm of each parameter, as LARS and LAMB do; of a shard, that is the norm of the shard."""

    def __init__(self, params):
        super().__init__(params, 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * p.norm().item() / (1 + p.grad.norm().item()))


class Global(torch.optim.SGD):
    """Divides by a norm over all parameters, of which a stage and ``zero1`` have a part."""

    def __init__(self, params):
        super().__init__(params, 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.div_(norm + 1)
        super().step()


def muon(model):
    """Matrices of the body by Muon, the rest by AdamW."""
    *body, head = [m for m in model if isinstance(m, nn.Linear)]
    rest = [*(m.bias for m in body), *head.parameters()]
    return MuonAdamW([{"params": [m.weight for m in body], "orthogonalize": True}, {"params": rest}], lr=0.02)


def sketched(model):
    """Moments of the body's matrices as sketches, of one row, because the layers are small."""
    groups = sketched_param_groups(model, rank=1, lr=0.02)
    return SketchedAdamW(groups, rank=1, update="tensor", period=2, seed=7)


def taken_steps(model):
    """State that is already present, of a step that was taken before."""
    optimizer = torch.optim.Adam(groups(model), lr=0.02)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


MAKERS = {
    "AdamW": lambda model: torch.optim.AdamW(groups(model), lr=0.02),
    "Muon": muon,
    "sketched": sketched,
    "third party": lambda model: Strange(groups(model), 9),
    "foreach": lambda model: torch.optim.AdamW(groups(model), lr=0.02, foreach=True),
    "fused": lambda model: torch.optim.AdamW(groups(model), lr=0.02, fused=True),
    "tensor rate": lambda model: torch.optim.AdamW(groups(model), lr=torch.tensor(0.02, dtype=torch.float64)),
    "amsgrad": lambda model: torch.optim.Adam(groups(model), lr=0.02, amsgrad=True),
    "names": lambda model: torch.optim.NAdam(
        [{"params": list(model[0].named_parameters())}, {"params": list(model[2:].named_parameters()), "lr": 0.05}],
        lr=0.02,
    ),
    "momentum": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True),
    "some": lambda model: torch.optim.RAdam([{"params": list(model[4].parameters()), "lr": 0.1}]),
    "none on a stage": lambda model: torch.optim.AdamW(list(model[0].parameters()), lr=0.1),
    "maximize": lambda model: torch.optim.RMSprop(groups(model), lr=0.002, momentum=0.5, centered=True),
}


def compare(strategies, makers, steps=4):
    def run():
        outcomes = {}
        for strategy in strategies:
            for name in makers:
                model = build()
                optimizer = MAKERS[name](model)
                settings = STRATEGIES.get(strategy, {"strategy": strategy})
                trainer = train(model, optimizer, settings, steps=steps)
                if strategy != "zero1":
                    assert trainer.optimizer is optimizer
                outcomes[strategy, name] = weights(trainer)
        return outcomes

    outcomes = on_ranks(run, 2)
    for name in makers:
        model = build()
        expected = plain(model, MAKERS[name](model), steps=steps)
        for strategy in strategies:
            assert_equal([outcome[strategy, name] for outcome in outcomes], expected)


def test_optimizers_with_groups_take_the_steps_of_one_process():
    """pykeen#1569: AdamW that was made again of its ``defaults`` refused a key of them."""
    compare(("zero1", "fsdp"), ("AdamW", "Muon", "sketched"), steps=2)


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("pp", marks=pytest.mark.slow)])
def test_sketches_without_names_are_refused_where_the_order_changes(strategy):
    refusals = (
        r"without names of parameters depend .*model\.named_parameters\(\)|by their order, .*an optimizer of the model"
    )

    def run():
        model = build()
        for optimizer in (
            SketchedAdamW(model.parameters(), rank=1, update="tensor", seed=7),
            functools.partial(SketchedAdamW, rank=1, update="tensor", seed=7),
        ):
            with pytest.raises(ConfigError, match=refusals):
                train(build() if callable(optimizer) else model, optimizer, STRATEGIES[strategy], steps=1)

    on_ranks(run, 2)


@pytest.mark.slow
def test_the_layout_that_auto_chooses_takes_the_steps_of_one_process():
    compare(("auto",), ("AdamW",))


@pytest.mark.slow
def test_what_is_right_on_shards_and_refused_on_parts_is_told_apart():
    """A trial refuses what would be wrong, and nothing else: norms by operations of torch are right on shards."""

    def run():
        return {
            (strategy, kind.__name__): weights(train(build(), kind, STRATEGIES[strategy]))
            for strategy, kind in (
                ("fsdp", Global),
                ("replicate", Local),
                ("zero1", Local),
                ("zero1", torch.optim.Rprop),
            )
        }

    outcomes = on_ranks(run, 2)
    for strategy, name in outcomes[0]:
        model = build()
        kind = {"Global": Global, "Local": Local, "Rprop": torch.optim.Rprop}[name]
        assert_equal([outcome[strategy, name] for outcome in outcomes], plain(model, kind(model.parameters())))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_optimizer_takes_the_steps_of_one_process(strategy):
    compare((strategy,), MAKERS)


def test_the_default_optimizer_and_functions_are_made_of_shards():
    """A function may make groups, which ZeroRedundancyOptimizer compares with its own."""

    def grouped(parameters):
        parameters = list(parameters)
        decayed = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() == 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.02)

    makers = {"grouped": grouped, "Adagrad": torch.optim.Adagrad, "default": None}

    def run():
        return [
            {name: weights(train(build(), maker, STRATEGIES[strategy])) for name, maker in makers.items()}
            for strategy in ("zero1",)
        ]

    outcomes = on_ranks(run, 2)
    for name, maker in makers.items():
        model = build()
        expected = plain(model, (maker or torch.optim.AdamW)(model.parameters()))
        assert_equal([outcome[0][name] for outcome in outcomes], expected)


class Steps(Callback):
    """Steps a scheduler that was attached to the user's own optimizer."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def on_step(self, trainer, loss):
        self.scheduler.step()


def attached(model):
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)


def refusals():
    """What is refused before the first step, by strategy: the optimizer's maker, settings, and the reason."""

    def without_rate(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        del optimizer.param_groups[0]["lr"]
        return optimizer

    holding = r"Holding keeps parameters in its attribute 'everything' too, and strategy='{}' "
    return [
        ("fsdp", lambda model: Holding(model.parameters(), 0.1), {}, holding.format("fsdp")),
        ("tp", lambda model: Holding(model.parameters(), 0.1), {}, holding.format("tp")),
        ("pp", lambda model: Holding(model.parameters(), 0.1), {}, holding.format("pp")),
        ("zero1", lambda model: Holding(model.parameters(), 0.1), {}, holding.format("zero1")),
        ("zero1", lambda model: attached(model)[0], {"schedule": "callback"}, "the optimizer has a scheduler, or "),
        ("ddp", lambda model: attached(model)[0], {}, r"the optimizer has a scheduler, and schedule='constant'"),
        ("ddp", taken_steps, {}, "Adam has a state for parameters already.* pass its class, or a function"),
        (
            "fsdp",
            lambda model: torch.optim.Adagrad(model.parameters()),
            {},
            "Adagrad has a state for parameters already",
        ),
        ("ddp", without_rate, {}, "a group of SGD has no 'lr'"),
        ("ddp", lambda model: torch.optim.SGD(build().parameters(), lr=0.1), {}, "parameters that are not the model's"),
    ]


def test_what_cannot_work_is_refused_before_anything_has_changed():
    def run():
        texts = []
        for strategy, maker, settings, _ in refusals():
            model = build()
            with pytest.raises(ConfigError) as caught:
                train(model, maker(model), STRATEGIES[strategy] | settings)
            texts.append(str(caught.value))
        return texts

    for texts in on_ranks(run, 2):
        for message, (strategy, _, _, reason) in zip(texts, refusals(), strict=True):
            assert re.search(reason, message), (strategy, message)


def test_the_first_rank_warns_of_optimizers_that_may_read_numbers_of_all_parameters():
    makers = [("fsdp", lambda model: Local), ("zero1", lambda model: Global), ("fsdp", lambda model: torch.optim.SGD)]

    def run():
        counts = []
        for strategy, maker in makers:
            model = build()
            with patch("panther.train.optimization.optimizer._log.warning") as warn:
                train(model, maker(model), STRATEGIES[strategy])
            counts.append(sum("computes each entry by itself" in call.args[0] for call in warn.mock_calls))
        return counts

    assert on_ranks(run, 2) == [[1, 1, 0], [0, 0, 0]]


def test_a_scheduler_that_was_attached_to_the_object_keeps_working():
    strategies = ("ddp", "fsdp", "pp")

    def run():
        outcomes = []
        for strategy in strategies:
            model = build()
            optimizer, scheduler = attached(model)
            settings = STRATEGIES[strategy] | {"schedule": "callback"}
            outcomes.append(weights(train(model, optimizer, settings, [Steps(scheduler)])))
        return outcomes

    outcomes = on_ranks(run, 2)
    model = build()
    optimizer, scheduler = attached(model)
    expected = plain(model, optimizer, scheduler=scheduler)
    for number in range(len(strategies)):
        assert_equal([outcome[number] for outcome in outcomes], expected)


def test_a_rate_that_a_callback_sets_is_not_overwritten_in_silence():
    def halve(trainer):
        trainer.optimizer.param_groups[0]["lr"] /= 2

    with pytest.raises(ConfigError, match=r"group 0 was set to 0.05 after step 2, and schedule='constant' sets it in"):
        train(build(), functools.partial(torch.optim.SGD, lr=0.1), {}, [At(halve, 2)])
    assert train(build(), functools.partial(torch.optim.SGD, lr=0.1), {"schedule": "callback"}, [At(halve, 2)]).step


class Embedded(nn.Module):
    """Its first gradient is sparse, and has rows several times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(10, 8, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.rows((x[:, :3] * 2).long().clamp(0, 9)).mean(1))


def test_sparse_gradients_are_averaged_and_clipped_or_refused():
    settings = {"gradient_clipping": 0.2}
    sgd = functools.partial(torch.optim.SGD, lr=0.5)

    def run():
        trained = [train(Embedded(), sgd, STRATEGIES[name] | settings) for name in ("ddp", "zero1")]
        with pytest.raises(ConfigError) as caught:
            train(Embedded(), sgd, STRATEGIES["fsdp"])
        return [weights(trainer) for trainer in trained], str(caught.value)

    outcomes = on_ranks(run, 2)
    assert outcomes[0][1].startswith("the Embedding 'rows' has sparse=True, and strategy='fsdp' cannot send sparse")
    dense = Embedded()
    dense.rows.sparse = False
    optimizer = sgd(dense.parameters())
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(dense.parameters(), 0.2) and None)
    expected = plain(dense, optimizer)
    assert_equal([weights(train(Embedded(), sgd, settings))], expected, atol=1e-6)  # of the denominator of the factor
    for number in range(2):
        assert_equal([outcome[0][number] for outcome in outcomes], expected, atol=1e-6)


class Clamped(nn.Linear):
    """A layer that limits its weight inside its forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


def changing_models():
    ids, kinds = {"dtype": torch.float64}, (nn.Embedding, nn.EmbeddingBag)
    for setting in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        for kind in kinds:
            model = Embedded()
            model.rows = kind(10, 8, **ids, **setting)
            yield next(iter(setting)), model
    model = Embedded()
    model.rows.sparse = False
    model.head = Clamped(8, 8, dtype=torch.float64)
    yield "the weight of the Clamped 'head' was changed inside its forward", model


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "replicate"])
def test_what_a_strategy_cannot_reproduce_is_refused(name):
    """Each rank limits the rows of its own samples."""

    def run():
        messages = []
        for _, model in changing_models():
            with pytest.raises(ConfigError) as caught:
                train(model, functools.partial(torch.optim.SGD, lr=0.5), STRATEGIES.get(name, {"strategy": name}))
            messages.append(str(caught.value))
        return messages

    for messages in on_ranks(run, 2):
        assert all(part in message for (part, _), message in zip(changing_models(), messages, strict=True))


class Rates(Callback):
    """A scheduler that is made in on_start, as on the page about training; it notes the rates of all groups."""

    saved = None

    def __init__(self, make):
        self.make, self.rates = make, []

    def note(self, trainer):
        keys = ("lr", "momentum")
        self.rates.append([float(group[key]) for group in trainer.optimizer.param_groups for key in keys])

    def on_start(self, trainer):
        self.scheduler = self.make(trainer.optimizer)
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
        self.note(trainer)

    def on_step(self, trainer, loss):
        self.scheduler.step()
        self.note(trainer)

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.saved = state


L = torch.optim.lr_scheduler
SCHEDULERS = {
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.5),
    "LinearLR": lambda o: L.LinearLR(o, 0.1, total_iters=7),
    "LambdaLR": lambda o: L.LambdaLR(o, lambda i: min(1, i / 3) * max(0, 1 - i / 20)),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.LinearLR(o, total_iters=3), L.CosineAnnealingLR(o, 10)], [3]),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.1, 4), L.ExponentialLR(o, 0.9)]),
    "OneCycleLR": lambda o: L.OneCycleLR(o, 0.3, total_steps=12),
    "CyclicLR": lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 4),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 9, 2.0),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_on_start_makes_resumes_with_the_rates_of_a_whole_run(name, rate, tmp_path):
    def sgd(model):
        groups = [{"params": [p], "lr": rate / (1 + i)} for i, p in enumerate(model.parameters())]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def rates_of(folder, steps):
        callback, model = Rates(SCHEDULERS[name]), nn.Linear(4, 3)
        config = TrainConfig(max_steps=steps, batch_size=4, schedule="callback", checkpoint_dir=str(folder))
        data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        Trainer(model, sgd(model), nn.CrossEntropyLoss(), config, [callback]).fit(data)
        return torch.tensor(callback.rates, dtype=torch.float64)

    expected = rates_of(tmp_path / "whole", 9)
    rates_of(tmp_path / "parts", 5)
    begin = isinstance(rate, torch.Tensor)  # the rate is restored after on_start, which notes the first one
    resumed = rates_of(tmp_path / "parts", 9)
    torch.testing.assert_close(resumed[begin:], expected[5 + begin :], rtol=1e-6, atol=0)
