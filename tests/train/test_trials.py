"""What newcomers and adversaries try: another order of calls, other settings, odd sizes."""

import json

import pytest
import torch
from breaking import Breaks
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import checkpoint
from panther.errors import CheckpointError, ConfigError
from panther.train import TrainConfig, Trainer


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


def samples(n=50):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator))


def trainer_of(callbacks=(), optimizer=None, **settings):
    return Trainer(build(), optimizer, nn.CrossEntropyLoss(), TrainConfig(**settings), callbacks)


def shuffled(n=50, size=8, **settings):
    return DataLoader(samples(n), size, shuffle=True, **settings)


def same(one, other):
    first, second = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_groups_keep_their_ratio():
    model = build()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), TrainConfig(max_steps=2, schedule="linear"))
    trainer.fit(shuffled())
    assert trainer.optimizer is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.005])


def test_evaluating_before_training_changes_nothing():
    first, second = trainer_of(epochs=2), trainer_of(epochs=2)
    first.evaluate(shuffled(11, 4))
    for trainer in (first, second):
        trainer.fit(shuffled())
    assert same(first, second)


def test_a_callback_that_raises_leaves_a_trainer_that_continues():
    whole, broken = trainer_of(max_steps=10), trainer_of([Breaks(4, KeyboardInterrupt)], max_steps=10)
    whole.fit(shuffled())
    with pytest.raises(KeyboardInterrupt):
        broken.fit(shuffled())
    broken.callbacks.clear()
    broken.fit(shuffled())
    assert broken.step == 10
    assert same(whole, broken)


def test_a_finished_run_says_so(caplog):
    trainer = trainer_of(epochs=1)
    rows = len(trainer.fit(shuffled()))
    assert len(trainer.fit(shuffled())) == rows
    assert caplog.messages == ["training is finished (step 7): raise epochs or max_steps to continue"]


def test_a_profile_of_too_few_steps_says_so(tmp_path, caplog):
    trainer_of(max_steps=4, profile=True, checkpoint_dir=str(tmp_path)).fit(shuffled())
    assert "profiled 1 of 5 steps: the run had only 4" in caplog.messages
    assert (tmp_path / "profile" / "rank-0.txt").exists()


def test_another_batch_size_leaves_no_sample_out(tmp_path):
    seen = []

    class Data(TensorDataset):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    def run(size, **settings):
        trainer = trainer_of(epochs=1, checkpoint_dir=str(tmp_path), checkpoint_every_n_steps=3, **settings)
        return trainer, DataLoader(Data(*samples(48).tensors), size, shuffle=True)

    trainer, data = run(8)
    trainer.callbacks.append(Breaks(4, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data)
    first_samples, seen[:] = seen[:24], []
    trainer, data = run(10)
    trainer.fit(data)
    assert sorted({*first_samples, *seen}) == list(range(48))
    assert len(seen) == 28  # from sample 20 on, of the 24 that were seen


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    model = build()
    checkpoint.save(tmp_path, model, torch.optim.AdamW(model.parameters()), step=3)
    with pytest.raises(CheckpointError, match=r"step-00000003 was not written by a Trainer"):
        trainer_of(checkpoint_dir=str(tmp_path)).fit(shuffled())


def test_what_a_trainer_cannot_use_is_said():
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times a step"):
        trainer_of(optimizer=torch.optim.LBFGS).fit(shuffled())
    with pytest.raises(ConfigError, match=r"samples do not fill a batch on every process \(together 8\)"):
        trainer_of().fit(shuffled(5, drop_last=True))


def test_profile_and_deterministic_algorithms(tmp_path):
    users_setting = torch.are_deterministic_algorithms_enabled()
    trainer_of(max_steps=9, profile=True, deterministic=True, checkpoint_dir=str(tmp_path)).fit(shuffled())
    assert torch.are_deterministic_algorithms_enabled() == users_setting
    assert json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert "addmm" in (tmp_path / "profile" / "rank-0.txt").read_text()


@pytest.mark.slow
def test_compiled_models_learn_the_same():
    plain, compiled = (trainer_of(epochs=2, compile=on) for on in (False, True))
    losses = [trainer.fit(shuffled(48)).last["loss"] for trainer in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], abs=0.2)  # dropout is drawn otherwise


@pytest.mark.distributed
def test_a_pipelines_last_window_may_be_shorter():
    def run(size, **settings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        x, y = samples(40).tensors
        trainer = Trainer(
            model,
            lambda p: torch.optim.SGD(p, 0.1),
            nn.CrossEntropyLoss(),
            TrainConfig(epochs=2, gradient_accumulation_steps=2, log_every_n_steps=1, **settings),
        )
        return trainer.fit(DataLoader(TensorDataset(x.double(), y), size))["gradient_norm"][1]

    norms = run(8)
    assert len(norms) == 6
    assert on_ranks(lambda: run(8, strategy="pp"))[0] == pytest.approx(norms, rel=1e-9)
