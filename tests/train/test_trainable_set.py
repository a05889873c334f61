"""Parameters that are frozen, unfrozen or lose their gradient in the middle of a run, under every strategy."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from whole_batches import STRATEGIES, At, assert_equal, build, freeze, module_named, plain, samples, train, weights

from panther.distributed import checkpoint
from panther.errors import ConfigError, DistributedError
from panther.train import TrainConfig, Trainer

pytestmark = pytest.mark.distributed
AdamW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)

# Whether the first layer is frozen at the start, and the steps after which it is unfrozen (True) or frozen.
PLANS = {
    "frozen": (False, {2: False}),
    "unfrozen": (True, {2: True}),
    "frozen for a while": (False, {1: False, 3: True}),
    "unfrozen for a while": (True, {1: True, 3: False}),
}
REFUSING = ("ddp", "zero1", "pp")
LAYOUTS = {
    **{name: settings for name, settings in STRATEGIES.items() if name not in REFUSING},
    "fsdp, accumulated": {"strategy": "fsdp", "micro": 3},
    "fsdp, recomputed": {"strategy": "fsdp", "activation_checkpointing": "full"},
}


def compare(plans, layouts, optimizers=(SGD,)):
    def run():
        outcomes = {}
        for plan in plans:
            at_start, steps = PLANS[plan]
            for layout in layouts:
                settings = dict(LAYOUTS[layout])
                micro = settings.pop("micro", 1)
                for number, optimizer in enumerate(optimizers):
                    model = build()
                    model[0].requires_grad_(not at_start)
                    changes = [At(freeze("0", trained), step) for step, trained in steps.items()]
                    trainer = train(model, optimizer, settings, changes, steps=5, micro=micro)
                    outcomes[plan, layout, number] = weights(trainer)
        return outcomes

    outcomes = on_ranks(run, 2)
    for plan in plans:
        at_start, steps = PLANS[plan]
        for number, optimizer in enumerate(optimizers):
            model = build()
            model[0].requires_grad_(not at_start)
            changes = {step: partial(model[0].requires_grad_, trained) for step, trained in steps.items()}
            expected = plain(model, optimizer(model.parameters()), changes, steps=5)
            for layout in layouts:
                assert_equal([outcome[plan, layout, number] for outcome in outcomes], expected)


def test_parameters_that_are_frozen_or_unfrozen_are_trained_as_on_one_process():
    compare(("frozen", "unfrozen"), ("fsdp", "replicate"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_layout_trains_what_one_process_trains(plan):
    compare((plan,), LAYOUTS, (SGD, AdamW))


def raised_on_ranks(run):
    """The error that ends a run in which the ranks wait for each other in vain."""
    with pytest.raises(DistributedError) as caught:
        on_ranks(run, fresh=True)
    return str(caught.value)


def changed_on_one_rank(strategy):
    """pytorch#69031, on one rank only, for example by a threshold of a loss that differs between ranks."""
    change = freeze("0")
    train(build(), SGD, STRATEGIES[strategy], [At(lambda trainer: dist.get_rank() == 1 and change(trainer), 1)])


def lost_on_one_rank(strategy):
    train(Partly((3,), only_rank=1), SGD, STRATEGIES[strategy], steps=4)


REFUSED = {
    "fsdp": (partial(changed_on_one_rank, "fsdp"), "rank 1 has frozen or unfrozen 0.weight, 0.bias, as 1 of 2 ranks"),
    "tp": (partial(changed_on_one_rank, "tp"), "rank 1 has frozen or unfrozen 0.weight, 0.bias, as 1 of 2 ranks"),
    "lost": (partial(lost_on_one_rank, "ddp"), "not depend on the parameters first.weight, first.bias, and DDP waits"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_alone_does_ends_the_run_with_a_name(name):
    run, message = REFUSED[name]
    assert message in raised_on_ranks(run)


def test_changes_that_a_layout_or_a_rank_does_not_share_are_told():
    """Lightning#20340, ClassyVision#398: DDP never averaged what was unfrozen, and stopped or went on with what was
    frozen."""

    def run():
        outcomes = []
        for strategy in (*REFUSING, "replicate"):
            names = ("0", "4") if strategy == "pp" else ("0", "0") if strategy in REFUSING else ("0", "2")
            change = freeze(names[dist.get_rank()])
            with pytest.raises(ConfigError) as caught:
                train(build(), SGD, STRATEGIES[strategy], [At(change, 2)])
            outcomes.append(str(caught.value))
        return outcomes

    *refused, differing = on_ranks(run, 2)[0]
    for message in refused:
        assert "0.weight, 0.bias was frozen or unfrozen in the run, and DistributedDataParallel" in message
    assert "do not both freeze or unfreeze '0.bias'" in differing


def extended(trainer):
    """What fine-tuning does when its first phase ends."""
    module = module_named(trainer, "0").requires_grad_(True)
    trainer.optimizer.add_param_group({"params": list(module.parameters()), "lr": 0.03, "weight_decay": 0.5})


def head_only(parameters):
    return torch.optim.AdamW(list(parameters), lr=0.02)


def breaks(trainer):
    raise KeyError("on purpose")


def expected_of_groups(steps):
    """A plain loop with a linear schedule, in which the group joins after the second step."""
    model = build()
    model[0].requires_grad_(False)
    optimizer = head_only(p for p in model.parameters() if p.requires_grad)
    x, y = samples()
    peaks = [0.02]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.03, "weight_decay": 0.5})
            peaks.append(0.03)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "strategies",
    [("fsdp",), pytest.param(("tp", "replicate", "hybrid"), marks=pytest.mark.slow)],
    ids=lambda value: ", ".join(value),
)
def test_groups_that_a_callback_adds_are_scheduled_saved_and_resumed(tmp_path, strategies):
    """Lightning#20340: a resumed run would have lost the group."""

    def run():
        outcomes = []
        for strategy in strategies:
            settings = {**STRATEGIES[strategy], "checkpoint_dir": str(tmp_path / strategy), "schedule": "linear"}
            settings["checkpoint_every_n_steps"] = 3
            for callbacks in ([At(extended, 2), At(breaks, 4)], [At(extended, 2)]):  # The second run resumes the first.
                model = build()
                model[0].requires_grad_(False)
                try:
                    trainer = train(model, head_only, settings, callbacks, steps=6)
                except KeyError:
                    continue
            outcomes.append(weights(trainer))
        return outcomes

    outcomes = on_ranks(run, 2)
    for number, _ in enumerate(strategies):
        assert_equal([outcome[number] for outcome in outcomes], expected_of_groups(6))


def test_a_group_with_names_that_a_callback_adds_is_resumed(tmp_path):
    """torch takes groups without names only into optimizers without names, and the resumed run ended with its error."""

    def extended_by_name(trainer):
        module = module_named(trainer, "0").requires_grad_(True)
        trainer.optimizer.add_param_group({"params": list(module.named_parameters("0")), "lr": 0.03})

    def run(folder, *callbacks):
        model = build()
        model[0].requires_grad_(False)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        settings = {"checkpoint_dir": str(tmp_path / folder), "checkpoint_every_n_steps": 3}
        changes = [At(extended_by_name, 2), *callbacks]
        return weights(train(model, torch.optim.AdamW(named, lr=0.02), settings, changes, steps=6))

    with pytest.raises(KeyError, match="on purpose"):
        run("stopped", At(breaks, 4))
    assert_equal([run("stopped")], run("whole"))


class Partly(nn.Module):
    """Leaves a layer out of some forwards, on all ranks or on one."""

    def __init__(self, left_out, only_rank=None, both=False):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.first, self.second = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.left_out, self.only_rank, self.forwards = left_out, only_rank, 0

    def forward(self, x):
        self.forwards += 1
        output = self.second(self.used(x).tanh())
        rank = dist.get_rank() if dist.is_initialized() else None
        if self.forwards in self.left_out and self.only_rank in (None, rank):
            return output
        return output + self.first(x)


class Ends(nn.Module):
    """Receives SIGTERM on the first rank, in the middle of a forward."""

    def __init__(self, model, at):
        super().__init__()
        self.model, self.at = model, at

    def forward(self, x):
        if self.model.forwards + 1 == self.at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.model(x)


def stopped(folder, model, settings, **more):
    """The error that ends a run, the step that it was in, and the steps of its checkpoints."""
    settings = {"checkpoint_dir": str(folder), "checkpoint_every_n_steps": 1, "keep_checkpoints": None, **settings}
    with pytest.raises(ConfigError) as caught:
        train(model, SGD, settings, **more)
    return str(caught.value), [path.name for path in checkpoint.checkpoints(folder)]


LOSSES = {
    "in the middle": ({"strategy": "ddp"}, 3, 6, 1),
    "in the last step": ({"strategy": "ddp"}, 4, 4, 1),
    "in many buckets": ({"bucket_cap_mb": 0.0003}, 3, 6, 1),
    "zero1": ({"strategy": "zero1"}, 3, 6, 1),
    "compressed": ({"comm_hook": "fp16"}, 3, 6, 1),
    # An earlier batch of the step has reached the layer, which therefore has a gradient that was not averaged.
    "in the last batch of a step": ({"strategy": "ddp"}, 9, 6, 3),
}


@pytest.mark.parametrize(
    "names",
    [
        ("in the middle", "in the last batch of a step"),
        pytest.param(tuple(LOSSES), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_a_lost_gradient_ends_the_run_in_its_step(tmp_path, names):
    """pytorch#69031: a step with gradients that were not averaged was logged and saved before an error came."""

    def run(ended):
        outcomes = []
        for name in names:
            settings, at, steps, micro = LOSSES[name]
            model = Partly((at,))
            model = Ends(model, at) if ended else model
            folder = tmp_path / f"{name} {ended}"
            outcomes.append(stopped(folder, model, settings, steps=steps, micro=micro))
        return outcomes

    for ended in (False, True):
        first, second = on_ranks(lambda ended=ended: run(ended), 2)
        assert first == second
        for name, (message, saved) in zip(names, first, strict=True):
            _, at, _, micro = LOSSES[name]
            assert "does not depend on the parameters " in message
            assert "first.weight" in message
            assert "set find_unused_parameters=True" in message
            assert saved == [f"step-{step:08}" for step in range(1, at // micro)]


def halves(left_out, only_rank, steps):
    """The weights of a plain loop whose halves of a step take the ways of two ranks."""
    models = [Partly(left_out, only_rank=None if only_rank in (None, rank) else "none") for rank in range(2)]
    models[1].used, models[1].first, models[1].second = models[0].used, models[0].first, models[0].second
    x, y = samples()
    optimizer = SGD(models[0].parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for model in models:
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in models[0].named_parameters()}


@pytest.mark.parametrize("only_rank", [None, 1])
def test_unused_parameters_are_trained_as_on_one_process(only_rank):
    """Not moved at all where no rank uses them, neither by momentum nor by decay."""

    def run():
        outcomes = []
        for settings in ({}, {"strategy": "zero1"}):
            config = TrainConfig(**{"strategy": "ddp", "max_steps": 5, "find_unused_parameters": True, **settings})
            trainer = Trainer(Partly((2, 4), only_rank), SGD, nn.CrossEntropyLoss(), config)
            x, y = samples()
            # Every other sample is a rank's, so both have all of them.
            trainer.fit(DataLoader(TensorDataset(x.repeat_interleave(2, 0), y.repeat_interleave(2)), len(x)))
            outcomes.append(weights(trainer))
        return outcomes

    outcomes = on_ranks(run, 2)
    for number in range(2):
        assert_equal([outcome[number] for outcome in outcomes], halves((2, 4), only_rank, 5))


@pytest.mark.parametrize(
    ("plan", "layouts"),
    [
        ("unfrozen", [("replicate", "fsdp")]),
        pytest.param("unfrozen", [("fsdp", "hybrid"), ("fsdp", "tp"), ("tp", "replicate")], marks=pytest.mark.slow),
        pytest.param("frozen", [("tp", "fsdp"), ("fsdp", "fsdp, accumulated")], marks=pytest.mark.slow),
    ],
    ids=["one", "more", "frozen"],
)
def test_a_resumed_run_trains_what_the_stopped_one_did(tmp_path, plan, layouts):
    """In another layout, and although its callback does not freeze or unfreeze anything again."""
    at_start, changes = PLANS[plan]
    ((step, trained),) = changes.items()

    def run():
        outcomes = []
        for number, pair in enumerate(layouts):
            for layout, callbacks in zip(pair, ([At(freeze("0", trained), step), At(breaks, 4)], []), strict=True):
                model = build()
                model[0].requires_grad_(not at_start)
                settings = {**LAYOUTS[layout], "checkpoint_dir": str(tmp_path / str(number))}
                micro = settings.pop("micro", 1)
                try:
                    trainer = train(
                        model, SGD, settings | {"checkpoint_every_n_steps": 3}, callbacks, steps=6, micro=micro
                    )
                except KeyError:
                    continue
            outcomes.append(weights(trainer))
        return outcomes

    outcomes = on_ranks(run, 2)
    model = build()
    model[0].requires_grad_(not at_start)
    expected = plain(model, SGD(model.parameters()), {step: partial(model[0].requires_grad_, trained)}, steps=6)
    for number, _ in enumerate(layouts):
        assert_equal([outcome[number] for outcome in outcomes], expected)


def test_one_process_trains_what_is_unfrozen():
    """The class of the optimizer was given the trainable parameters at the start only."""
    for plan in PLANS:
        at_start, changes = PLANS[plan]
        models = build(), build()
        for model in models:
            model[0].requires_grad_(not at_start)
        callbacks = [At(freeze("0", trained), step) for step, trained in changes.items()]
        of_plan = {step: partial(models[1][0].requires_grad_, trained) for step, trained in changes.items()}
        expected = plain(models[1], AdamW(models[1].parameters()), of_plan)
        assert_equal([weights(train(models[0], AdamW, {}, callbacks))], expected)


def to_be_added_by_function(parameters):
    return torch.optim.SGD(list(parameters), lr=0.1)


def test_what_is_unfrozen_and_in_no_group_is_named():
    """The optimizer of a function or of the user is not extended: other groups may be meant."""
    for optimizer in (to_be_added_by_function, None):
        model = build()
        model[0].requires_grad_(False)
        if optimizer is None:
            optimizer = torch.optim.SGD(list(model[2:].parameters()), lr=0.1)
        with pytest.raises(ConfigError, match=r"0.weight, 0.bias was unfrozen after step 2, .*add_param_group\("):
            train(model, optimizer, {}, [At(freeze("0", True), 2)])


def test_trainable_parameters_that_the_optimizer_does_not_have_are_logged(caplog):
    model = build()
    optimizer = torch.optim.AdamW([*model[2].parameters(), model[4].bias], lr=0.02)
    found = weights(train(model, optimizer, {}))
    assert "does not have the trainable parameters 0.weight, 0.bias, 4.weight, which therefore stay" in caplog.text
    model = build()
    expected = plain(model, torch.optim.AdamW([*model[2].parameters(), model[4].bias], lr=0.02))
    assert_equal([found], expected)
    assert all(parameter.grad is None or parameter.grad.abs().max() < 1 for parameter in model.parameters())


class Scaled(nn.Module):
    """A loss with a temperature, as ArcFace or contrastive losses have one."""

    def __init__(self, teacher=None):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.teacher = teacher

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.temperature, target)


class Distilled(nn.Module):
    """A loss whose teacher is trainable by its flags, but is only read."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, output, target):
        with torch.no_grad():
            self.teacher(output)
        return nn.functional.cross_entropy(output, target)


def test_a_loss_with_trainable_parameters_is_refused_before_the_first_step():
    """pytorch-metric-learning#710: the weights of ArcFace were never trained."""
    model = build()
    first_values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"trainable parameters of its own \(temperature\).*whose forward\(input"):
        train(model, SGD, {}, loss_fn=Scaled())
    assert_equal([dict(model.named_parameters())], first_values)


def test_a_loss_whose_parameters_are_only_read_or_the_model_s_is_trained():
    model = build()
    regularized = lambda output, target: nn.functional.cross_entropy(output, target) + 0 * model[0].weight.sum()  # noqa: E731
    for loss_fn in (Distilled(), Scaled().requires_grad_(False), regularized):
        assert train(model, SGD, {}, loss_fn=loss_fn).step == 4


def test_a_loss_with_trainable_parameters_is_named_on_several_ranks():
    def run():
        texts = []
        for strategy in ("ddp", "fsdp"):
            with pytest.raises(ConfigError) as caught:
                train(build(), SGD, STRATEGIES[strategy], loss_fn=Scaled())
            texts.append(str(caught.value))
        return texts

    assert all("of its own (temperature)" in message for texts in on_ranks(run, 2) for message in texts)
