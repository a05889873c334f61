"""Pipelines over ranks against the model in one process: loss, gradients, training."""

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from covering import half_of
from ranks import on_ranks, take_pipeline_steps, weights_of
from torch import nn

from panther.distributed import make_mesh, make_schedule, split_stages
from panther.distributed.data.strategies import fully_shard_
from panther.errors import DistributedError, ShapeError
from panther.nn import SKLinear

pytestmark = pytest.mark.distributed


def network(seed, fitted=False):
    torch.manual_seed(seed)
    middle = with_stored_sketches(SKLinear(48, 48, 3)) if fitted else SKLinear(48, 48, 3)
    layers = [SKLinear(40, 48, 2), nn.ReLU(), middle, nn.Tanh(), nn.Linear(48, 48), nn.GELU(), SKLinear(48, 48, 2)]
    return nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5)).double()


def data(n=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 40, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 5, generator=generator, dtype=torch.float64)


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "looped_bfs": 2, "zero_bubble": 2}


@pytest.mark.parametrize(("name", "reduction"), half_of([*SCHEDULES], ["mean", "sum"]))
def test_ten_steps_are_those_of_one_process(name, reduction):
    per_rank = SCHEDULES[name]
    x, y = data()
    criterion = nn.MSELoss(reduction=reduction)
    rate = 0.1 if reduction == "mean" else 0.002

    def rank():
        model = network(100 + dist.get_rank(), fitted=True)  # other weights and sketches on every rank
        stages = split_stages(model, 2 * per_rank)
        schedule = make_schedule(name, stages, 4, criterion)
        losses, output = take_pipeline_steps(torch.optim.SGD(schedule.parameters(), rate), schedule, x, y)
        weights = weights_of(*(stage.submod for stage in stages))
        return losses, weights, None if output is None else output.detach()

    single = network(100, fitted=True)
    optimizer = torch.optim.SGD(single.parameters(), rate)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        expected = single(x)
        loss = criterion(expected, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results = on_ranks(rank)
    found = [result for result in results if result[2] is not None]
    assert len(found) == 1
    assert found[0][0] == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(found[0][2], expected.detach(), rtol=1e-8, atol=1e-10)
    weights = {**results[0][1], **results[1][1]}
    assert set(weights) == {name for name, _ in single.named_parameters()}  # global names, every one once
    assert len(weights) == len(results[0][1]) + len(results[1][1])
    for key, parameter in single.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("points", [None, ["2", "8"]])
def test_stages_by_size_or_by_name_over_three_ranks(points):
    def rank():
        (stage,) = split_stages(network(0), 3, points, mesh=make_mesh(pp=3)["pp"])
        return list(stage.submod._modules), sum(p.numel() for p in stage.submod.parameters())

    results = on_ranks(rank, 3)
    assert [name for names, _ in results for name in names] == [str(i) for i in range(11)]
    if points:
        assert [names[0] for names, _ in results] == ["0", *points]
    else:
        assert max(size for _, size in results) < 0.5 * sum(size for _, size in results)


def test_what_is_refused():
    def rank():
        model = network(0)
        one, two = (split_stages(model, n) for n in (2, 4))
        loss = nn.MSELoss()
        x, y = data()
        messages = []
        for call in (
            lambda: split_stages(model, 3),
            lambda: split_stages(model, 2, ["x"]),
            lambda: split_stages(model, 12),
            lambda: split_stages(nn.Linear(2, 2), 2),
            lambda: make_schedule("2f2b", one, 2, loss),
            lambda: make_schedule("gpipe", two, 2, loss),
            lambda: make_schedule("gpipe", one, 2, nn.MSELoss(reduction="none")),
            lambda: make_schedule("gpipe", one, 5, loss).step(x, y),
            lambda: make_schedule("1f1b", [], 2, loss),
            lambda: make_schedule("1f1b", one, 2, "mse_loss"),
            lambda: split_stages("model", 2),
        ):
            with pytest.raises((ValueError, TypeError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    messages = on_ranks(rank)[0]
    assert messages[0] == "n=3 stages must be a multiple of the ranks (2): use n=4"
    assert messages[1].startswith("points=['x'] must be 1 different names of children after the first")
    assert messages[2] == "11 layers cannot make 12 stages of at least one layer: use fewer stages"
    assert messages[3].startswith("split_stages splits an nn.Sequential by itself, but not a Linear")
    assert messages[4].startswith("schedule '2f2b' is unknown: use one of 'gpipe', '1f1b'")
    assert messages[5] == "schedule 'gpipe' takes one stage a rank, not 2: use n=2 stages"
    assert messages[6] == "the loss has reduction='none', and must have 'mean' or 'sum'"
    rule = "12 samples cannot be split into num_microbatches=5 of equal size"
    fix = "set num_microbatches to one of 1, 2, 3, 4, 6, 12, or use a batch of a multiple of 5 samples"
    assert messages[7] == f"{rule}: {fix}"
    assert messages[8].startswith("stages is empty, and must have the stages of this rank")
    assert messages[9] == "loss_fn must be a function of output and target, not a str"
    assert messages[10] == "split_stages takes an nn.Module, not 'model'"
    with pytest.raises(DistributedError, match=r"call panther.distributed.init\(\) first"):
        split_stages(network(0), 2)


def test_too_few_microbatches():
    """What torch refuses is said with the values."""

    def rank():
        with pytest.raises(ShapeError) as caught:
            make_schedule("1f1b", split_stages(network(0), 2), 1, nn.MSELoss())
        return str(caught.value)

    for message in on_ranks(rank):
        assert message.startswith("schedule '1f1b' cannot take num_microbatches=1 over 2 stages: ")


def test_gradients_are_added_to_those_of_earlier_steps():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))
        schedule = make_schedule("gpipe", split_stages(model, 2), 3, nn.CrossEntropyLoss())
        for piece in (slice(0, 6), slice(6, 12)):
            schedule.step(x[piece], y[piece])
        found = {name: p.grad for name, p in schedule.stages[0].submod.named_parameters()}
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        for piece in (slice(0, 6), slice(6, 12)):
            nn.functional.cross_entropy(whole(x[piece]), y[piece]).backward()
        return [torch.allclose(grad, whole.get_parameter(name).grad, rtol=1e-12) for name, grad in found.items()]

    assert on_ranks(run) == [[True, True], [True, True]]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_batches_of_several_sizes_are_those_of_one_process(name):
    """As the last one of an epoch is smaller; gradients of earlier steps stay."""
    per_rank = SCHEDULES[name]
    x, y = data()
    sizes = 8, 4, 8, 2
    criterion = nn.MSELoss()

    def rank():
        model = network(100)
        schedule = make_schedule(name, split_stages(model, 2 * per_rank), 2, criterion)
        found = [schedule.step(x[:n], y[:n]) for n in sizes]
        # A batch of the size of the step before, which all versions of torch can evaluate.
        given, wanted = (x[:2],) if schedule.is_first else (), {"target": y[:2]} if schedule.is_last else {}
        evaluated = schedule.schedule.eval(*given, **wanted)
        found.append(schedule.step(x[:4], y[:4]))
        gradients = {key: p.grad for stage in schedule.stages for key, p in stage.submod.named_parameters()}
        return [(o.detach(), loss.detach()) for o, loss in found if o is not None], gradients, evaluated

    single = network(100)
    expected = [(single(x[:n]), criterion(single(x[:n]), y[:n])) for n in (*sizes, 4)]
    for _, loss in expected:
        loss.backward()
    first, second = on_ranks(rank)
    steps, evaluated = (first, second)[not first[0]][::2]
    assert len(steps) == len(expected)
    for found, wanted in zip(steps, expected, strict=True):
        torch.testing.assert_close(found, tuple(t.detach() for t in wanted), rtol=1e-10, atol=1e-12)
    assert torch.allclose(evaluated, single(x[:2]), rtol=1e-10)
    for key, parameter in single.named_parameters():
        torch.testing.assert_close({**first[1], **second[1]}[key], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_batch_of_another_size_keeps_the_gradients_of_sharded_stages():
    x, y = data()

    def rank():
        mesh = make_mesh(dp=2, pp=1)
        (stage,) = split_stages(network(100), 1, mesh=mesh["pp"])
        fully_shard_(stage.submod, mesh["dp"], "fsdp", one_block=True)
        schedule = make_schedule("gpipe", [stage], 2, nn.MSELoss())
        for n in (8, 4):
            schedule.step(x[:n], y[:n])
        return {name: p.grad.full_tensor() for name, p in stage.submod.named_parameters()}

    single = network(100)
    for n in (8, 4):
        nn.functional.mse_loss(single(x[:n]), y[:n]).backward()
    for found in on_ranks(rank):
        for key, parameter in single.named_parameters():
            torch.testing.assert_close(found[key], parameter.grad, rtol=1e-10, atol=1e-12)
