"""Stages that end inside a sketched layer: the model of one process, in fewer bytes between the stages."""

import pytest
import torch
import torch.distributed as dist
from fake import fake_group
from ranks import on_ranks, take_pipeline_steps, take_steps, weights_of
from torch import nn

from panther.distributed import CommunicationCounter, checkpoint, make_schedule, split_stages
from panther.distributed.pipeline.stages import plan_stages
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
R = 3


def network(seed, fitted=False, bias=True):
    torch.manual_seed(seed)
    middle = SKLinear(48, 64, R, bias=bias)
    if fitted:
        middle = SKLinear.from_linear(nn.Linear(48, 64, bias), 1, R)
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
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        with pytest.raises(TypeError, match=r"inside_sketched_layers divides children of an nn.Sequential"):
            plan_stages(encoder, 2, 2, layers="layers", sample_input=torch.ones(1, 5, 8), inside_sketched_layers=True)
