"""Checkpoints: saved in one layout, loaded in others; bad files; the inference format from any layout."""

import json
import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import panther as pr
from panther.distributed import (
    HybridParallelTrainer,
    checkpoint,
    data_parallel,
    make_mesh,
    split_stages,
    tensor_parallel,
)
from panther.distributed.pipeline.schedules import make_schedule
from panther.errors import CheckpointError, DistributedError, FormatError
from panther.nn import LowRankLinear, SKLinear

WIDTHS = [24, 36, 20, 28, 6]
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


def build(seed=0, fitted=False):
    torch.manual_seed(seed)
    layers = []
    for n, m in pairwise(WIDTHS):
        layer = SKLinear(n, m, 2)
        layers += [with_stored_sketches(layer) if fitted else layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.randint(WIDTHS[-1], (12,), generator=generator)


class Run:
    """A training run in one of several layouts."""

    def __init__(self, layout, seed=0, fitted=False):
        model = build(seed, fitted)
        self.layout, self.schedule, self.share = layout, None, slice(None)
        if layout == "one":
            self.model = model
        elif layout in ("ddp", "zero"):
            self.model = data_parallel(model)
            self.share = slice(dist.get_rank(), None, dist.get_world_size())
        elif layout == "fsdp":
            self.model = data_parallel(model, strategy="fsdp")
            self.share = slice(dist.get_rank(), None, dist.get_world_size())
        elif layout == "tp":
            tensor_parallel(model, make_mesh(tp=dist.get_world_size())["tp"])
            self.model = model
        elif layout == "tp x fsdp":
            mesh = make_mesh(dp=2, tp=2)
            tensor_parallel(model, mesh["tp"])
            self.model = data_parallel(model, mesh["dp"], "fsdp")
            self.share = slice(mesh["dp"].get_local_rank(), None, 2)
        elif layout == "pp":
            stages = split_stages(model, dist.get_world_size())
            self.schedule = make_schedule("gpipe", stages, 2, nn.CrossEntropyLoss())
            self.model = [stage.submod for stage in stages]
        parameters = [p for part in ([self.model] if self.schedule is None else self.model) for p in part.parameters()]
        if layout == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.02)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02)

    def train(self, first, last):
        for step in range(first, last):
            x, y = batch(step)
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step(x, y)
            else:
                nn.functional.cross_entropy(self.model(x[self.share]), y[self.share]).backward()
            self.optimizer.step()
        return self


def reference(fitted=False):
    model = Run("one", 0, fitted).train(0, 6).model
    return {name: value.detach() for name, value in model.state_dict().items()}


def save_at_three(directory, layout, fitted=False):
    run = Run(layout, 0, fitted).train(0, 3)
    return checkpoint.save(directory, run.model, run.optimizer, step=3, extra={"epoch": 1}).name


def go_on(directory, layout, exported, fitted=False):
    run = Run(layout, 77, fitted)
    restored = checkpoint.load(directory, run.model, run.optimizer)
    assert (restored.step, restored.extra) == (3, {"epoch": 1})
    run.train(3, 6)
    checkpoint.export(run.model, exported)


def check_export(exported, expected):
    # Any architecture of the right names serves: what is read are the sketches that were saved.
    whole = pr.load_compressed(exported, build(5)).state_dict()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(whole[name].double(), value.double(), rtol=1e-9, atol=1e-11), name


LAYOUTS = {"one": 1, "ddp": 2, "zero": 2, "fsdp": 3, "tp": 2, "pp": 2, "tp x fsdp": 4}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        # Every layout is saved from and loaded into once; the other pairs are slow together.
        ("ddp", ["zero"]),
        ("fsdp", ["ddp"]),
        ("tp", ["pp"]),
        ("pp", ["fsdp"]),
        ("tp x fsdp", ["one"]),
        pytest.param("one", ["one", "tp", "fsdp"], marks=pytest.mark.slow),
        pytest.param("ddp", ["one", "pp"], marks=pytest.mark.slow),
        pytest.param("zero", ["ddp", "tp", "fsdp"], marks=pytest.mark.slow),
        pytest.param("fsdp", ["tp", "pp"], marks=pytest.mark.slow),
        pytest.param("tp", ["one", "fsdp"], marks=pytest.mark.slow),
        pytest.param("pp", ["ddp", "tp"], marks=pytest.mark.slow),
        pytest.param("tp x fsdp", ["pp", "fsdp", "tp4"], marks=pytest.mark.slow),
    ],
)
def test_saved_in_one_layout_and_trained_on_in_others(tmp_path, saved, loaded):
    expected = reference()
    on_ranks(save_at_three, LAYOUTS[saved], str(tmp_path / "run"), saved)
    for layout in loaded:
        layout, world = ("tp", 4) if layout == "tp4" else (layout, LAYOUTS[layout])
        on_ranks(go_on, world, str(tmp_path / "run"), layout, str(tmp_path / layout))
        check_export(tmp_path / layout, expected)


def test_fitted_sketches_are_saved_whole_and_sharded_again(tmp_path):
    expected = reference(fitted=True)
    on_ranks(save_at_three, 2, str(tmp_path / "run"), "tp", True)
    on_ranks(go_on, 3, str(tmp_path / "run"), "fsdp", str(tmp_path / "out"), True)
    check_export(tmp_path / "out", expected)


def small(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(SKLinear(24, 24, 2), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        ],
        [2],
    )
    return model, optimizer, scheduler


def steps(model, optimizer, scheduler, n):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()  # data from the generator, too
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path):
    model, optimizer, scheduler = small()
    steps(model, optimizer, scheduler, 4)
    checkpoint.save(tmp_path, model, optimizer, step=4, extra={"scheduler": scheduler.state_dict()})
    expected = {name: value.clone() for name, value in steps(model, optimizer, scheduler, 5).items()}
    after = torch.rand(3)

    model, optimizer, scheduler = small(9)
    restored = checkpoint.load(tmp_path, model, optimizer)
    scheduler.load_state_dict(restored.extra["scheduler"])
    state = steps(model, optimizer, scheduler, 5)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert torch.equal(torch.rand(3), after)


def test_every_rank_gets_its_own_generators_and_values_back(tmp_path):
    def run(save):
        rank = dist.get_rank()
        model = nn.Linear(3, 3)
        if save:
            torch.manual_seed(10 + rank)
            checkpoint.save(tmp_path, model, step=1, per_rank_extra={"place": torch.tensor([rank, 5])})
            return torch.rand(2).tolist()
        found = checkpoint.load(tmp_path, model).per_rank_extra
        return torch.rand(2).tolist(), None if found is None else found["place"].tolist()

    expected = on_ranks(run, 2, True)
    assert on_ranks(run, 2, False) == [(expected[0], [0, 5]), (expected[1], [1, 5])]
    assert all(place is None for _, place in on_ranks(run, 3, False))


def test_values_of_all_kinds_come_back():
    value = {
        "a": (1, 2.5, None, [True, "x"]),
        "milestones": Counter((4, 4, 8)),
        3: {"$b": float("inf")},
        "t": torch.arange(3),
        "e": {},
        (1, 2): -0.0,
    }
    from panther.distributed.checkpoint.state import decode, encode

    tensors = {}
    encoded = json.dumps(encode(value, "extra", tensors))
    back = decode(json.loads(encoded), tensors)
    assert torch.equal(back.pop("t"), value.pop("t"))
    assert back == value
    assert [type(back[key]) for key in ("a", "milestones")] == [tuple, Counter]
    with pytest.raises(CheckpointError, match=r"extra.f is a builtin_function_or_method: a checkpoint holds numbers"):
        encode({"f": print}, "extra", {})


class Counting(nn.Linear):
    """Has an entry of its state_dict that is not a tensor, and has one inside."""

    seen = None

    def get_extra_state(self):
        return {"seen": self.seen, "name": "counting"}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_states_of_modules_come_back_with_their_tensors(tmp_path):
    model, other = Counting(2, 2), Counting(2, 2)
    model.seen = torch.arange(3)
    checkpoint.save(tmp_path, model, step=1)
    checkpoint.load(tmp_path, other)
    assert torch.equal(other.seen, model.seen)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    first, second = Tied(), Tied()
    optimizer = torch.optim.Adam(first.parameters())
    folder = checkpoint.save(tmp_path / "run", first, optimizer, step=1)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert manifest["model"]["head.weight"] == manifest["model"]["embedding.weight"]
    assert "model.head.weight" not in manifest["tensors"]
    checkpoint.load(tmp_path / "run", second, torch.optim.Adam(second.parameters()))
    assert torch.equal(first.head.weight, second.head.weight)
    assert second.head.weight is second.embedding.weight
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(10, 6))
    checkpoint.load(tmp_path / "run", untied)
    assert torch.equal(untied.head.weight, first.head.weight)
    checkpoint.export(tmp_path / "run", tmp_path / "out")
    assert torch.equal(pr.load_compressed(tmp_path / "out", Tied()).head.weight, first.head.weight)


def test_a_checkpoint_of_an_earlier_version_of_panther_loads_and_trains_on(tmp_path):
    """Two ranks of FSDP wrote tests/distributed/checkpoint_version_2, with AdamW and two groups of parameters."""
    folder = Path(__file__).parent / "checkpoint_version_2"
    model = nn.Sequential(SKLinear(6, 8, 1, 2, seed=4), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.5},
        {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.5)
    loaded = checkpoint.load(folder, model, optimizer)
    assert (loaded.step, loaded.world_size, loaded.per_rank_extra) == (3, 2, None)
    assert loaded.extra["epoch"] == 1
    assert loaded.extra["pair"] == (1, "a")
    assert loaded.extra[5][1].tolist() == [0, 1, 2]
    for name, value in load_file(folder / "expected.safetensors").items():
        assert torch.equal(model.state_dict()[name], value), name
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002]
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    again = checkpoint.save(tmp_path, model, optimizer, step=4)
    assert checkpoint.load(again, model, optimizer).step == 4


def test_steps_are_ordered_kept_and_written_again(tmp_path):
    model = nn.Linear(2, 2)
    for step in (10, 9, 100_000_000):
        checkpoint.save(tmp_path, model, step=step)
    (tmp_path / "step-00000500.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    names = ["step-00000009", "step-00000010", "step-100000000"]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == names
    assert checkpoint.latest(tmp_path).name == "step-100000000"
    assert checkpoint.save(tmp_path, model, step=10, keep=2).name == "step-00000010.1"
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000010.1", "step-100000000"]
    assert not (tmp_path / "step-00000500.tmp").exists()
    assert (tmp_path / "notes").exists()
    assert checkpoint.checkpoints(tmp_path / "nothing") == []
    assert checkpoint.latest(tmp_path / "nothing") is None
    for wrong in ({"step": -1}, {"step": 1, "keep": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            checkpoint.save(tmp_path, model, **wrong)


def test_what_does_not_fit_is_named(tmp_path):
    model, optimizer, _ = small()
    checkpoint.save(tmp_path, model, step=1)
    first_weight = model[3].weight.clone()

    def message(other, optimizer=None):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path, other, optimizer)
        return str(caught.value)

    assert "saved without an optimizer" in message(model, optimizer)
    assert "missing 4.weight; unexpected none" in message(nn.Sequential(*model, nn.PReLU()))
    assert "missing none; unexpected 3.bias, 3.weight" in message(model[:3])
    wide = nn.Sequential(*model[:3], nn.Linear(24, 5))
    assert "3.weight saved (4, 24), torch.float32; here (5, 24), torch.float32" in message(wide)
    other = nn.Sequential(SKLinear(24, 24, 3), *model[1:])
    assert "layer '0': args" in message(other)
    assert "restore_architecture" in message(other)
    fitted = nn.Sequential(with_stored_sketches(SKLinear(24, 24, 2)), *model[1:])
    assert "mode is fitted and was sparse" in message(fitted)
    assert torch.equal(model[3].weight, first_weight)
    checkpoint.save(tmp_path, model, torch.optim.SGD(model.parameters()), step=2)
    assert "has the state of SGD, but the optimizer is Adam" in message(model, torch.optim.Adam(model.parameters()))
    some = torch.optim.SGD(model[3].parameters())
    assert checkpoint.load(tmp_path, model, some).step == 2
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert "2 of the optimizer's 2 parameters are not the model's" in message(model, stranger)
    checkpoint.save(tmp_path, model, some, step=3)
    assert "did not have 0.S1" in message(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(FormatError, match="is not a checkpoint and contains none"):
        checkpoint.load(tmp_path / "elsewhere", model)


def test_the_architecture_is_built_from_the_checkpoint(tmp_path):
    model, _, _ = small()
    model[3] = LowRankLinear.from_linear(model[3], 4)
    checkpoint.save(tmp_path, model, step=1)
    dense = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
    checkpoint.restore_architecture(tmp_path, dense)
    checkpoint.load(tmp_path, dense)
    x = torch.randn(4, 24)
    assert torch.equal(model.eval()(x), dense.eval()(x))
    with pytest.raises(FormatError, match="the file has a compressed module '0', and the model has no module"):
        checkpoint.restore_architecture(tmp_path, nn.Bilinear(2, 2, 2))


def test_the_architecture_of_compiled_blocks_is_built(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(SKLinear(24, 24, 2), nn.Sequential(nn.ReLU(), SKLinear(24, 4, 1)))
    checkpoint.save(tmp_path, model, step=1)
    blocks = nn.Linear(24, 24), nn.Sequential(nn.ReLU(), nn.Linear(24, 4))
    compiled = nn.Sequential(*(torch.compile(block, backend="eager") for block in blocks))
    wrappers = [*compiled]
    checkpoint.load(tmp_path, checkpoint.restore_architecture(tmp_path, compiled))
    assert [*compiled] == wrappers
    x = torch.randn(3, 24)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_rounding_of_inputs_is_part_of_the_architecture(tmp_path):
    """The tensors of a quantized layer have the same shapes with it and without it."""
    torch.manual_seed(0)
    dense, x = nn.Linear(24, 8), torch.randn(4, 24)
    model = nn.Sequential(pr.nn.QuantizedLinear.from_linear(dense, bits=8, activations="int8")).eval()
    other = nn.Sequential(pr.nn.QuantizedLinear.from_linear(dense, bits=8)).eval()
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match="activations is None and was int8"):
        checkpoint.load(tmp_path, other)
    checkpoint.load(tmp_path, restored := checkpoint.restore_architecture(tmp_path, other).eval())
    assert torch.equal(restored(x), model(x))


def test_asynchronous_checkpoints_hold_what_was_there_when_they_were_asked_for(tmp_path):
    def run():
        model = nn.Linear(40, 40)
        with torch.no_grad():
            model.weight.fill_(1.0)
        data_parallel(model)
        first = checkpoint.async_save(tmp_path, model, step=1)
        with torch.no_grad():
            model.weight.fill_(2.0)
        second = checkpoint.async_save(tmp_path, model, step=2)
        dist.all_reduce(torch.ones(3))
        return first.done(), first.result().name, second.result().name

    assert on_ranks(run) == [(True, "step-00000001", "step-00000002")] * 2
    model = nn.Linear(40, 40)
    for step in (1, 2):
        checkpoint.load(tmp_path / f"step-0000000{step}", model)
        assert torch.all(model.weight == step)


def test_a_rank_that_cannot_write_is_named_and_earlier_checkpoints_stay(tmp_path, monkeypatch):
    def run():
        model = nn.Linear(4, 4)
        checkpoint.save(tmp_path, data_parallel(model, strategy="fsdp"), step=1)
        if dist.get_rank() == 1:

            def full(*args, **kwargs):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("panther.distributed.checkpoint.storage.write_file", full)
        messages = []
        for save in (checkpoint.save, lambda *a, **k: checkpoint.async_save(*a, **k).result()):
            with pytest.raises(CheckpointError) as caught:
                save(tmp_path, model, step=2)
            messages.append(str(caught.value))
        return messages

    results = on_ranks(run, fresh=True)
    expected = "the checkpoint of step 2 is not written: rank 1: [Errno 28] No space left on device: make room there, "
    expected += "or name another directory"
    assert results == [[expected] * 2] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_ranks_with_what_cannot_be_stored_all_hear_of_it(tmp_path):
    def run():
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, per_rank_extra=print if dist.get_rank() else 1)
        return str(caught.value)

    first, second = on_ranks(run)
    assert first == second
    assert first.startswith("rank 1: per_rank_extra.1. is a builtin_function_or_method")
    assert not list(tmp_path.iterdir())


def test_stages_that_share_a_name_are_refused(tmp_path):
    def run():
        torch.manual_seed(dist.get_rank())
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, [nn.Linear(2, 2)], step=1)
        return str(caught.value)

    first, second = on_ranks(run)
    assert first == second
    assert first.startswith("'bias' names a different tensor on each of ranks 0, 1: stages must keep")


def before_manifest(monkeypatch, die):
    monkeypatch.setattr("panther.distributed.checkpoint.storage._Writer.finish", die)


def in_a_file(monkeypatch, die):
    def torn(path, *args):
        path.write_bytes(b"\0" * 100)
        die()

    monkeypatch.setattr("panther.distributed.checkpoint.storage.write_file", torn)


def before_rename(monkeypatch, die):
    monkeypatch.setattr("panther.distributed.checkpoint.folders.publish", die)


def in_removing(monkeypatch, die):
    monkeypatch.setattr("panther.distributed.checkpoint.folders.shutil.rmtree", die)


@pytest.mark.parametrize(
    ("moment", "victim", "left"),
    [(in_a_file, 0, 2), (in_a_file, 1, 2), (before_manifest, 0, 2), (before_rename, 0, 2), (in_removing, 0, 3)],
)
def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path, monkeypatch, moment, victim, left):
    def run():
        model = data_parallel(nn.Linear(4, 4), strategy="fsdp")
        for step in (1, 2):
            checkpoint.save(tmp_path, model, step=step)
        if dist.get_rank() == victim:
            moment(monkeypatch, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save(tmp_path, model, step=3, keep=2)

    with pytest.raises(DistributedError, match=f"rank {victim}"):
        on_ranks(run, fresh=True)
    assert checkpoint.load(tmp_path, nn.Linear(4, 4)).step == left
    checkpoint.save(tmp_path, nn.Linear(4, 4), step=4, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-0000000{left}", "step-00000004"]  # and nothing half written


OPTIMIZERS = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "Adafactor": torch.optim.Adafactor,
    "Adam, a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "Adam, amsgrad, fused": lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "two groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_continues_bit_for_bit(tmp_path, kind):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        return model, OPTIMIZERS[kind](list(model.parameters()))

    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(3))

    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = build(0)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=3)
    expected = train(model, optimizer)
    model, optimizer = build(1)
    checkpoint.load(tmp_path, model, optimizer)
    assert all(map(torch.equal, train(model, optimizer), expected))
    assert all(not torch.equal(old, new) for old, new in zip(expected, train(model, optimizer), strict=True))


class Factored(torch.optim.Optimizer):
    """Divides by a second moment of each row, a state of another shape than the parameter's."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square().mean(-1, keepdim=True)
            state = self.state[parameter]
            state["rows"] = square if "rows" not in state else 0.9 * state["rows"] + 0.1 * square
            parameter.sub_(parameter.grad / (state["rows"].sqrt() + 1e-3), alpha=0.1)


def test_states_of_another_shape_than_their_sharded_parameters(tmp_path):
    def run(layout, save):
        torch.manual_seed(0 if save else 9)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        if layout == "fsdp":
            model = data_parallel(model, strategy="fsdp")
        optimizer = Factored(model.parameters(), {})
        if not save:
            checkpoint.load(tmp_path, model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x).square().sum().backward()
            optimizer.step()
        if save:
            checkpoint.save(tmp_path, model, optimizer, step=1)
        return [p.full_tensor().detach() if layout == "fsdp" else p.detach() for p in model.parameters()]

    run("one", True)
    expected = run("one", False)
    [sharded, _] = on_ranks(run, 2, "fsdp", False)
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(sharded, expected, strict=True))


def test_a_hybrid_trainer_is_saved_under_the_names_of_the_whole_model(tmp_path):
    def train(config, save):
        trainer = HybridParallelTrainer(build(0 if save else 5), config)
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.02)
        if not save:
            checkpoint.load(tmp_path / "run", trainer.model, optimizer)
        for step in range(0, 3) if save else range(3, 6):
            trainer.train_step(batch(step), optimizer, nn.CrossEntropyLoss())
        if save:
            checkpoint.save(tmp_path / "run", trainer.model, optimizer, step=3)
        else:
            checkpoint.export(trainer.model, tmp_path / "out")

    on_ranks(train, 2, {"pipeline_parallel_size": 2, "schedule": "interleaved"}, True)
    on_ranks(train, 2, {"tensor_parallel_size": 2}, False)
    check_export(tmp_path / "out", reference())


def test_ranks_must_mean_the_same_checkpoint(tmp_path):
    def run():
        rank, messages = dist.get_rank(), []
        for directory, step in ((tmp_path, 1 + rank), (tmp_path / str(rank), 1)):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.save(directory, nn.Linear(2, 2), step=step)
            messages.append(str(caught.value))
        return messages

    first, second = on_ranks(run)
    assert first == second
    assert first[0] == "step is 1 on rank 0 and 2 on rank 1: pass the same value on all"
    assert first[1].startswith("directory is ")
    assert not list(tmp_path.iterdir())


def test_one_process_says_it_as_many_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"File exists: .*file"):
        checkpoint.save(tmp_path / "file", nn.Linear(2, 2), step=1)
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*nope"):
        checkpoint.async_save("/proc/nope", nn.Linear(2, 2), step=1).result()


def test_an_error_of_an_asynchronous_checkpoint_is_told_once(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError):
        checkpoint.async_save("/proc/nope", model, step=1).result()
    checkpoint.save(tmp_path, model, step=1)  # it was heard of
    checkpoint.async_save("/proc/nope", model, step=2)
    with pytest.raises(CheckpointError, match="nope"):
        checkpoint.save(tmp_path, model, step=3)
    checkpoint.save(tmp_path, model, step=3)


def test_a_rank_without_parameters_of_a_group_gets_its_settings(tmp_path):
    """A ZeroRedundancyOptimizer gives the only vector to one rank, and schedulers of all ranks read its rate."""

    def rates_after_loading():
        def make(lr, momentum):
            layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
            groups = [{"params": [layers[0].weight, layers[1].weight]}, {"params": [layers[1].bias], "lr": lr}]
            return layers, ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, momentum=momentum)

        model, optimizer = make(0.5, 0.9)
        optimizer.param_groups[0]["lr"] = 0.3
        checkpoint.save(tmp_path / "run", model, optimizer, step=1)
        model, optimizer = make(0.2, 0.0)
        checkpoint.load(tmp_path / "run", model, optimizer)
        return [[(g["lr"], g["momentum"]) for g in o.param_groups] for o in (optimizer, optimizer.optim)]

    assert on_ranks(rates_after_loading, 2) == [[[(0.3, 0.9), (0.5, 0.9)]] * 2] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_a_layer_takes_the_kind_of_a_saved_sketch(tmp_path, strategy):
    """What was saved of signs goes on as signs, and sparse as sparse, whatever kind the new model was built with."""

    def model(kind):
        layers = nn.Sequential(SKLinear(24, 20, 5, sketch=kind), SKLinear(20, 24, 5, sketch=kind))
        if strategy == "tp":
            tensor_parallel(layers, make_mesh(tp=2)["tp"])
            return layers
        return data_parallel(layers, strategy=strategy)

    def rank():
        outputs = []
        for saved, built in (("signs", "sparse"), ("sparse", "signs")):
            folder, x = tmp_path / saved, torch.ones(3, 24)
            first, second = model(saved), model(built)
            checkpoint.save(folder, first, torch.optim.SGD(first.parameters()), step=1)
            checkpoint.load(folder, second, torch.optim.SGD(second.parameters()))
            outputs.append(torch.equal(first(x), second(x)))
        return outputs

    assert on_ranks(rank) == [[True, True]] * 2
