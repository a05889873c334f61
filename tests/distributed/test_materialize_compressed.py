"""Compressed models that start without values: their layers are made first, then sharded, then filled."""

import copy

import pytest
import torch
from compressed_layers import with_stored_sketches
from ranks import on_ranks, whole
from torch import nn

import panther as pr
from panther.distributed import HybridParallelTrainer, checkpoint, data_parallel, make_mesh, materialize_
from panther.distributed import tensor_parallel as tensor_parallel_
from panther.errors import CheckpointError, ConfigError, FormatError
from panther.nn import (
    InterpolativeLinear,
    LowRankConv2d,
    LowRankLinear,
    QuantizedConv2d,
    QuantizedLinear,
    RandMultiHeadAttention,
    SKLinear,
)
from panther.train import TrainConfig, Trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.pairs = nn.ModuleList(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)) for _ in range(3))
        self.attention = RandMultiHeadAttention(24, 4, 32)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 12)
        self.other, self.tied = nn.Linear(24, 12), nn.Linear(24, 12, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):  # (N, 3, 3, 2)
        x = self.stem(x)[..., 0].flatten(1)
        for pair in self.pairs:
            x = x + pair(x)
        x = x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return self.head(self.norm(x)) - self.tied(x) + self.other(x)


def build():
    return Net()


def empty():
    with torch.device("meta"):
        return Net()


FORMS = {
    "stem.0": lambda conv: LowRankConv2d.from_conv(conv, 8),
    "stem.2": lambda conv: QuantizedConv2d.from_conv(conv, 8, group_size=24),
    "pairs.0.0": lambda linear: LowRankLinear.from_linear(linear, 8),
    "pairs.0.2": lambda linear: with_stored_sketches(SKLinear.from_linear(linear, 2, 3)),
    "pairs.1.0": lambda linear: SKLinear.from_linear(linear, 1, 4),
    "pairs.1.2": lambda linear: SKLinear.from_linear(linear, 1, 3, sketch="signs").pack_(),
    "pairs.2.0": lambda linear: QuantizedLinear.from_linear(linear, 4, group_size=8, low_rank=2),
    "pairs.2.2": lambda linear: InterpolativeLinear.from_linear(linear, 9),
    "other": lambda linear: QuantizedLinear.from_linear(linear, None, low_rank=3),
}
X = torch.randn(6, 3, 3, 2, generator=torch.Generator().manual_seed(2))


def compressed():
    torch.manual_seed(0)
    model = Net()
    model(X)  # for the statistics of the norm
    for name, compress in FORMS.items():
        model.set_submodule(name, compress(model.get_submodule(name)))
    return model.eval()


def saved(folder, kind):
    model = compressed()
    if kind == "inference":
        pr.save_compressed(model, folder)
    else:
        checkpoint.save(folder, model, step=1)
    with torch.no_grad():
        return model, model(X)


def sharded(layout, folder):
    if layout == "hybrid":
        trainer = HybridParallelTrainer(checkpoint.restore_architecture(folder, build), {"tensor_parallel_size": 2})
        return trainer.model, trainer.report
    model = checkpoint.restore_architecture(folder, empty())
    if layout == "fsdp":
        return data_parallel(model, strategy="fsdp"), None
    report = tensor_parallel_(model, make_mesh(tp=2)["tp"])
    return report.model, report


@pytest.mark.parametrize("kind", ["inference", "checkpoint"])
def test_one_process_puts_the_layers_in_place(kind, tmp_path):
    model, expected = saved(tmp_path, kind)
    started = materialize_(empty(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(started(X), expected)
    state = model.state_dict()
    found = started.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    assert [type(started.get_submodule(name)) for name in FORMS] == [type(model.get_submodule(name)) for name in FORMS]
    if kind == "inference":
        with torch.no_grad():
            assert torch.equal(pr.load_compressed(tmp_path, Net()).eval()(X), expected)
    [layer] = materialize_(nn.Sequential(nn.Linear(24, 40, device="meta")), _only(model, tmp_path / "one"))
    assert torch.equal(layer.up, model.pairs[0][0].up)


def _only(model, folder):
    return pr.save_compressed(nn.Sequential(model.pairs[0][0]), folder)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("fsdp", "inference"),
        pytest.param("tp", "inference", marks=pytest.mark.slow),
        ("tp", "checkpoint"),
        pytest.param("hybrid", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_layers_are_sharded_before_they_have_values(layout, kind, tmp_path):
    model, expected = saved(tmp_path, kind)

    def run():
        started, report = sharded(layout, tmp_path)
        assert all(parameter.is_meta for parameter in started.parameters())
        materialize_(started, tmp_path)
        state = {name: whole(tensor).clone() for name, tensor in started.state_dict().items()}
        shapes = {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in started.named_parameters()}
        actions = {entry.name: entry for entry in report.placements} if report else {}
        with torch.no_grad():
            output = started.eval()(X)
        checkpoint.export(started, tmp_path / "exported")
        started.train()(X).square().mean().backward()
        assert all(p.grad is not None for name, p in started.named_parameters() if not name.startswith("tied"))
        return output, state, shapes, {name: (entry.action, entry.reason) for name, entry in actions.items()}

    state = model.state_dict()
    results = on_ranks(run, 4 if layout == "hybrid" else 2)
    with torch.no_grad():  # scales, which FSDP held in float32, are exported in bfloat16
        torch.testing.assert_close(pr.load_compressed(tmp_path / "exported", Net()).eval()(X), expected)
    for output, found, shapes, actions in results:
        torch.testing.assert_close(output, expected)
        assert found.keys() == state.keys()
        assert [
            name for name, tensor in found.items() if not torch.equal(tensor.to(state[name].dtype), state[name])
        ] == []
        ranks = {"fsdp": {0: 2}, "tp": {1: 2}, "hybrid": {0: 2, 1: 2}}[layout]
        size = model.pairs[0][0].up.numel()
        assert shapes["pairs.0.0.up"][0] * shapes["pairs.0.0.up"][1] * 2 ** len(ranks) == size
        if actions:
            assert actions["pairs.0.0"][0] == "outputs sharded"
            assert actions["pairs.1.2"][0] == "inputs sharded"
            for name in ("pairs.2.0", "pairs.2.2", "other"):
                action, reason = actions[name]
                assert action == "replicated"
                assert reason.startswith(f"the form of a {type(model.get_submodule(name)).__name__} is not sharded")


def test_trained_scales_are_saved_continued_and_exported(tmp_path):
    def dense():
        return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8))

    torch.manual_seed(0)
    start = dense()
    start[0] = QuantizedLinear.from_linear(start[0], 4, group_size=8, low_rank=2).train_scales_()
    x = torch.randn(6, 24)

    def run():
        model = data_parallel(copy.deepcopy(start), strategy="fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), 0.02)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        checkpoint.save(tmp_path / "run", model, optimizer, step=3)
        checkpoint.export(model, tmp_path / "out")
        with torch.no_grad():
            return model(x)

    expected = on_ranks(run, 2)[0]
    continued = checkpoint.restore_architecture(tmp_path / "run", dense())
    optimizer = torch.optim.AdamW(continued.parameters(), 0.02)
    checkpoint.load(tmp_path / "run", continued, optimizer)
    checkpoint.export(tmp_path / "run", tmp_path / "consolidated")
    assert continued[0].scale_logs.abs().mean() > 0.01
    assert not torch.allclose(start(x), expected, atol=1e-3)
    exported = [pr.load_compressed(tmp_path / name, dense()) for name in ("out", "consolidated")]
    for model in (continued, *exported):
        torch.testing.assert_close(model(x), expected)
    assert [name for name, _ in exported[0][0].named_parameters()] == ["bias"]
    with pytest.raises(CheckpointError, match="trained_scales is None and was True: call restore_architecture"):
        checkpoint.load(tmp_path / "run", exported[0])


def test_stages_of_a_compressed_model(tmp_path):
    def dense():
        return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24), nn.Linear(24, 24), nn.Linear(24, 24))

    torch.manual_seed(0)
    model, names = dense(), ("pairs.0.0", "pairs.1.2", "pairs.2.0", "pairs.2.2")
    for i, name in zip((0, 2, 3, 4), names, strict=True):
        model[i] = FORMS[name](model[i])
    pr.save_compressed(model, tmp_path)
    x = torch.randn(4, 24)

    def run():
        restored = checkpoint.restore_architecture(tmp_path, dense)
        trainer = HybridParallelTrainer(restored, {"pipeline_parallel_size": 2})
        materialize_(trainer.model, tmp_path)
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.0)
        return trainer.train_step((x, torch.zeros(4, 24)), optimizer, nn.MSELoss())

    assert on_ranks(run) == [pytest.approx(model(x).square().mean().item())] * 2


def test_what_a_sharded_model_lacks_is_said(tmp_path):
    pr.save_compressed(nn.Sequential(with_stored_sketches(SKLinear(24, 40, 4))), tmp_path / "fitted")

    def dense():
        return nn.Sequential(nn.Linear(24, 40))

    def seeded():
        return nn.Sequential(SKLinear(24, 40, 1, 4))

    def run():
        messages = []
        for model in (dense, seeded):
            with pytest.raises(CheckpointError) as caught:
                materialize_(data_parallel(model, strategy="fsdp"), tmp_path / "fitted")
            messages.append(str(caught.value))
        return messages

    for first, second in on_ranks(run):
        assert "does not fit layer '0': a FSDPLinear is not the SKLinear that was saved: call restore_arch" in first
        assert "does not fit layer '0': mode is sparse and was fitted: call restore_architecture" in second
    with pytest.raises(FormatError, match=r"module '0' was saved for a Linear with \{'in_features': 24\}, and the"):
        materialize_(nn.Sequential(nn.Linear(25, 40, device="meta")), tmp_path / "fitted")
    with pytest.raises(FormatError, match="holds no model: give a folder that panther"):
        checkpoint.restore_architecture(tmp_path, dense)
    with pytest.raises(ValueError, match="has no values"):
        SKLinear.from_linear(nn.Linear(24, 40, device="meta"), 1, 4)


def test_layers_keep_the_dtype_and_the_form_of_the_model(tmp_path):
    layers = nn.Linear(24, 40), SKLinear(40, 24, 2, sketch="signs")
    pr.save_compressed(nn.Sequential(LowRankLinear.from_linear(layers[0], 8), layers[1]).bfloat16(), tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(24, 40), SKLinear(40, 24, 2, packed=True))
    kept = model[1]
    materialize_(model, tmp_path)
    assert model[1] is kept
    assert model[1].packed
    assert model[1].seed == layers[1].seed
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    x = torch.randn(3, 24)
    torch.testing.assert_close(model(x), pr.load_compressed(tmp_path, nn.Sequential(*layers)).float()(x))


@pytest.mark.parametrize("settings", [{"strategy": "fsdp"}, {"strategy": "tp"}], ids=["fsdp", "tp"])
def test_a_trainer_starts_from_a_compressed_folder(settings, tmp_path):
    model, _ = saved(tmp_path, "inference")
    data = [(x, x.mean((1, 2)).repeat(4)) for x in X]

    def run(**settings):
        more = {"learning_rate": 1e-9, "log_every_n_steps": 1, **settings}
        config = TrainConfig(max_steps=2, batch_size=6, initial_weights=str(tmp_path), seed=1, **more)
        trainer = Trainer(build, torch.optim.SGD, nn.MSELoss(), config)
        trainer.fit(data)
        state = trainer.model.state_dict()
        return trainer.history["loss"][1], type(trainer.model.get_submodule("pairs.2.2")).__name__, len(state)

    expected, _, size = run()
    assert size == len(model.state_dict())
    for losses, kind, found in on_ranks(lambda: run(**settings)):
        assert "InterpolativeLinear" in kind
        assert found == size
        if settings["strategy"] == "tp":
            assert losses == pytest.approx(expected, rel=1e-4)
    dense, config = empty(), TrainConfig(max_steps=1, batch_size=6, initial_weights=str(tmp_path))
    trainer = Trainer(dense, torch.optim.SGD(dense.parameters()), nn.MSELoss(), config)
    with pytest.raises(ConfigError, match="has compressed layers in the place of some that the optimizer was made of"):
        trainer.fit(data)
