"""Stages that end inside a sketched layer: the model of one process, in fewer bytes between the stages."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from covering import half_of
from fake import fake_group
from ranks import on_ranks, take_pipeline_steps, take_steps, weights_of
from torch import nn
from torch.utils.data import TensorDataset

from panther import load_compressed
from panther.distributed import CommunicationCounter, HybridParallelTrainer, checkpoint, make_schedule, split_stages
from panther.distributed.pipeline.stage_modules import FirstHalf, SecondHalf
from panther.distributed.pipeline.stages import plan_stages
from panther.errors import ConfigError
from panther.nn import SKLinear
from panther.train import Callback, TrainConfig, Trainer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
R = 3


def network(seed, fitted=False, bias=True):
    torch.manual_seed(seed)
    middle = SKLinear(48, 64, R, bias=bias)
    if fitted:
        middle = with_stored_sketches(middle)
    layers = [SKLinear(40, 48, 2), nn.Tanh(), middle, nn.GELU(), SKLinear(64, 48, R), nn.Tanh(), nn.Linear(48, 5)]
    return nn.Sequential(*layers).double()


def data(n=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 40, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 3, 5, generator=generator, dtype=torch.float64)


def split(model, n, points, **options):
    return split_stages(model, n, points, inside_sketched_layers=True, **options)


@pytest.mark.parametrize(
    ("name", "n", "order", "points"),
    [("1f1b", 2, "loop", ["2"]), ("zbv", 4, "v", ["1", "3", "5"]), ("interleaved", 4, "loop", ["2", "3", "4"])],
)
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ten_steps_are_those_of_one_process(name, n, order, points, fitted, bias):
    x, y = data()

    def rank():
        stages = split(network(100 + dist.get_rank(), fitted, bias), n, points, order=order)
        schedule = make_schedule(name, stages, 4, nn.MSELoss())
        losses, _ = take_pipeline_steps(torch.optim.SGD(schedule.parameters(), 0.1), schedule, x, y)
        states = [stage.submod.state_dict() for stage in stages]
        return losses, weights_of(*(stage.submod for stage in stages)), states

    single = network(100, fitted, bias)
    losses, _ = take_steps(torch.optim.SGD(single.parameters(), 0.1), lambda: nn.functional.mse_loss(single(x), y))
    results = on_ranks(rank)
    assert [found for found, *_ in results if found[0] is not None] == [pytest.approx(losses, rel=1e-9)]
    parts = [weights for _, weights, _ in results]
    assert sum(map(len, parts)) == len({**parts[0], **parts[1]})  # every parameter once
    union = {key: value for *_, states in results for state in states for key, value in state.items()}
    assert set(union) == set(single.state_dict())
    loaded = network(7, fitted, bias)
    loaded.load_state_dict(union)
    torch.testing.assert_close(loaded(x), single(x), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("inside", "width"), [(False, 48), (True, 2 * R)])
def test_a_boundary_sends_2r_numbers_a_row_both_ways(inside, width):
    x, y = data()

    def rank():
        stages = split_stages(network(0), 2, ["2"], inside_sketched_layers=inside)
        schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
        schedule.step(x, y)
        with CommunicationCounter() as traffic:
            schedule.step(x, y)
        return traffic.bytes_by_operation["send"]

    assert on_ranks(rank) == [8 * 3 * width * 8] * 2  # activations of 8 samples of 3 rows, and their gradients


def test_checkpoints_fit_the_model_and_stages_that_end_elsewhere(tmp_path):
    x, y = data()

    def rank():
        def step(stages):
            schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
            return schedule.step(x, y)[1]

        stages = split(network(3), 2, ["2"])
        modules = [stage.submod for stage in stages]
        step(stages)
        checkpoint.save(tmp_path, modules, step=1)
        expected = step(stages)
        found = []
        for other in (split(network(4), 2, ["2"]), split(network(5), 2, ["4"]), split_stages(network(6), 2, ["2"])):
            checkpoint.load(tmp_path, [stage.submod for stage in other])
            found.append(step(other))
        whole = network(8)
        checkpoint.load(tmp_path, whole)
        return expected, found, nn.functional.mse_loss(whole(x), y).detach()

    _, (expected, found, whole) = on_ranks(rank)
    for loss in (*found, whole):
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


def test_where_stages_begin():
    """A stage begins inside a layer that it would begin with or after; one with hooks or bits stays in one stage."""

    def pieces(points, change=lambda model: None):
        model = network(0)
        change(model)
        plan = plan_stages(model, len(points) + 1, len(points) + 1, points, inside_sketched_layers=True)
        ends = [*plan.begins[1:], len(plan.blocks)]
        stages = [plan.blocks.module(model, *place) for place in zip(plan.begins, ends, strict=True)]
        return [" ".join(f"{name}:{type(child).__name__}" for name, child in s.named_children()) for s in stages]

    with fake_group(2):
        first, second = pieces(["2"])
        assert first == "0:SKLinear 1:Tanh 2:FirstHalf"
        assert second == "2:SecondHalf 3:GELU 4:SKLinear 5:Tanh 6:Linear"
        assert pieces(["3"])[1] == second  # after the layer
        assert pieces(["6"])[1] == "6:Linear"
        assert pieces(["2", "3"])[1:] == ["2:SecondHalf", "3:GELU 4:SKLinear 5:Tanh 6:Linear"]
        hooked = pieces(["2"], lambda model: model[2].register_forward_hook(lambda *args: None))
        assert hooked[1].startswith("2:SKLinear")
        assert pieces(["2"], lambda model: model[2].pack_())[1].startswith("2:SKLinear")


class Traced(nn.Module):
    """Calls its layers itself; ``through`` adds what came before each of them, so that it is sent too."""

    def __init__(self, through=False, widths=(40, 48, 48, 48, 48)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SKLinear(n, m, R) for n, m in pairwise(widths))
        self.head, self.through = nn.Linear(widths[-1], 5), through

    def forward(self, x):
        for layer in self.layers:
            y = torch.tanh(layer(x))
            x = x + y if self.through and y.shape == x.shape else y
        return self.head(x)


def test_where_stages_of_a_traced_model_begin():
    def pieces(model, points, **more):
        n, x = len(points) + 1, torch.ones(2, 3, 40)
        more = {"sample_input": x, "inside_sketched_layers": True, **more}
        plan = plan_stages(model, n, n, points if "layers" not in more else None, **more)
        ends = [*plan.begins[1:], len(plan.blocks)]
        stages = [plan.blocks.module(model, *place) for place in zip(plan.begins, ends, strict=True)]
        for stage in stages:
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        torch.testing.assert_close(x, model(torch.ones(2, 3, 40)))
        kinds = [{name: type(m).__name__ for name, m in s.named_modules() if isinstance(m, SKLinear)} for s in stages]
        keys = [set(stage.state_dict()) for stage in stages]
        assert set().union(*keys) == set(model.state_dict())
        return kinds

    whole = dict.fromkeys([f"layers.{i}" for i in range(4)], "SKLinear")

    def split_at(i):
        first = {name: kind for name, kind in whole.items() if int(name[-1]) < i}
        second = {name: kind for name, kind in whole.items() if int(name[-1]) > i}
        return [{**first, f"layers.{i}": "FirstHalf"}, {f"layers.{i}": "SecondHalf", **second}]

    with fake_group(4):
        assert pieces(Traced(), ["layers.2"]) == split_at(2)
        assert pieces(Traced(), [""], layers="layers") == split_at(2)  # the balance's own choice
        assert pieces(Traced(), ["head"]) == [whole, {}]  # the tanh is between the layer and the head
        residual = pieces(Traced(through=True), ["layers.2"])  # what layer 2 gets is sent in any case
        assert residual == [dict(list(whole.items())[:2]), dict(list(whole.items())[2:])]
        assert [set(kinds) for kinds in pieces(Traced(), ["layers.1", "layers.2"])] == [
            {"layers.0", "layers.1"}, {"layers.1", "layers.2"}, {"layers.2", "layers.3"},
        ]  # fmt: skip

        class After(Traced):
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return self.head(x)

        assert pieces(After(), ["head"]) == [{**whole, "layers.3": "FirstHalf"}, {"layers.3": "SecondHalf"}]
        hooked = Traced()
        hooked.layers[2].register_forward_hook(lambda *args: None)
        assert pieces(hooked, ["layers.2"])[1]["layers.2"] == "SKLinear"


@pytest.mark.parametrize(("dp", "kind", "traced"), half_of([1, 2], ["none", "full"], [False, True]))
def test_hybrid_parallelism_begins_stages_inside_layers(dp, kind, traced):
    x, y = (tensor[:, 0] for tensor in data())
    make, points = (lambda: Traced().double() if traced else network(0)), 2

    def rank():
        config = {"pipeline_parallel_size": 2, "inside_sketched_layers": True, "activation_checkpointing": kind}
        if traced:
            config |= {"pipeline_layers": "layers", "sample_input": x[: 8 // dp // points]}
        trainer = HybridParallelTrainer(make(), config)
        optimizer, own = torch.optim.SGD(trainer.model.parameters(), 0.1), slice(trainer.dp_rank, None, dp)
        criterion = nn.MSELoss()
        losses = [trainer.train_step((x[own], y[own]), optimizer, criterion) for _ in range(3)]
        with CommunicationCounter() as traffic:
            losses.append(trainer.train_step((x[own], y[own]), optimizer, criterion))
        halves = [name for name, m in trainer.model.named_modules() if isinstance(m, FirstHalf | SecondHalf)]
        return losses, traffic.bytes_by_operation["send"], len(halves)

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, _ = take_steps(optimizer, lambda: nn.functional.mse_loss(model(x), y), 4)
    for found, sent, halves in on_ranks(rank, 2 * dp):
        assert found == pytest.approx(losses, rel=1e-9)
        assert sent == 8 // dp * 2 * R * 8  # forward on the first rank, backward on the second
        assert halves == 1


class Sent(Callback):
    """Bytes that were sent to the next or previous stage, after each step."""

    def __init__(self):
        self.traffic, self.after = CommunicationCounter(), []

    def on_step(self, trainer, loss):
        self.after.append(self.traffic.bytes_by_operation["send"])


def test_the_trainer_s_setting(tmp_path):
    x, y = (tensor[:, 0] for tensor in data(16))

    def rank(**more):
        config = TrainConfig(max_steps=2, batch_size=8, learning_rate=0.1, seed=3, **more)
        counts = Sent()
        trainer = Trainer(lambda: network(0), torch.optim.SGD, nn.MSELoss(), config, [counts])
        with counts.traffic:
            history = trainer.fit(TensorDataset(x, y))
        trainer.export(str(tmp_path / str(len(more))))
        return history["loss"][1], counts.after[-1] - counts.after[0]

    losses, _ = rank()
    settings = {"strategy": "pp"}
    results = {inside: on_ranks(partial(rank, inside_sketched_layers=inside, **settings)) for inside in (False, True)}
    for found in results.values():
        assert [loss for loss, _ in found] == [pytest.approx(losses, rel=1e-9)] * 2
    # Each rank sends forward or backward; without the setting, what the layer gets.
    sent = {inside: [sent for _, sent in found] for inside, found in results.items()}
    assert sent == {False: [8 * 64 * 8] * 2, True: [8 * 2 * R * 8] * 2}
    weights = [load_compressed(tmp_path / which, network(9)).state_dict() for which in ("0", "2")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight.double(), weights[1][name].double(), rtol=1e-8, atol=1e-10)
    for more, message in (
        ({"strategy": "ddp"}, "inside_sketched_layers=True is for pipelines: set strategy='pp' or"),
        (
            {"strategy": "pp", "tensor_parallel_size": 2},
            "and tensor_parallel_size=2 do not go together, because halves",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(inside_sketched_layers=True, **more)
    for config, message in (
        ({}, "inside_sketched_layers=True is for pipelines: set pipeline_parallel_size"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "and tensor_parallel_size=2 do not go together"),
    ):
        with pytest.raises(ValueError, match=message):
            HybridParallelTrainer(nn.Linear(2, 2), {"inside_sketched_layers": True, **config})
