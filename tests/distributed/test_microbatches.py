"""Stages and microbatches against the model and the batch in one piece."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from panther.distributed import MicrobatchPipelineTrainer, PipelineParallelSketchedModel
from panther.distributed.pipeline.balance import balance_stages
from panther.errors import ShapeError
from panther.nn import SKLinear

CONFIGS = [
    {"in_features": n, "out_features": m, "sketch_size": k} for n, m, k in ((40, 60, 3), (60, 50, 2), (50, 6, 1))
]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_stages_make_the_model(devices):
    torch.manual_seed(0)
    model = PipelineParallelSketchedModel(CONFIGS, ["cpu"] * devices).double()
    assert len(model.stages) == devices
    assert all(any(isinstance(layer, SKLinear) for layer in stage) for stage in model.stages)
    torch.manual_seed(0)
    layers = [SKLinear(**config).double() for config in CONFIGS]
    x = torch.randn(5, 40, dtype=torch.float64)
    expected = layers[2](layers[1](layers[0](x).relu()).relu())
    torch.testing.assert_close(model(x), expected)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=8), n=st.integers(1, 5))
def test_fuzz_the_largest_stage_is_as_small_as_possible(costs, n):
    if len(costs) < n:
        with pytest.raises(ShapeError, match=f"{len(costs)} layers cannot make {n} stages"):
            balance_stages(costs, n)
        return

    def dearest(begins):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([*begins, len(costs)]))

    begins = balance_stages(costs, n)
    assert begins[0] == 0
    assert len(begins) == n
    assert begins == sorted(set(begins))
    every = itertools.combinations(range(1, len(costs)), n - 1)
    assert dearest(begins) == min(dearest((0, *rest)) for rest in every)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("samples", "pieces"), [(12, 4), (13, 4), (3, 5), (7, 1)])
def test_microbatches_train_as_the_batch_does(reduction, samples, pieces):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 40, generator=generator, dtype=torch.float64)
    y = torch.randint(6, (samples,), generator=generator)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    results = []
    for whole in (True, False):
        torch.manual_seed(1)
        model = PipelineParallelSketchedModel(CONFIGS, ["cpu", "cpu"]).double()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []
        for _ in range(10):
            if whole:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            else:
                losses.append(
                    MicrobatchPipelineTrainer(model, pieces).forward_backward_pipeline(x, y, criterion, optimizer)
                )
        results.append((losses, [parameter.detach() for parameter in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_a_function_is_taken_to_mean_and_old_gradients_do_not_count():
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    expected = model.weight.grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loss = MicrobatchPipelineTrainer(model, 2).forward_backward_pipeline(x, y, nn.functional.mse_loss, optimizer)
    torch.testing.assert_close(model.weight.grad, expected)
    assert loss == pytest.approx(nn.functional.mse_loss(model(x), y).item())


def test_what_is_refused():
    with pytest.raises(ShapeError, match="3 layers cannot make 4 stages"):
        PipelineParallelSketchedModel(CONFIGS, ["cpu"] * 4)
    with pytest.raises(ShapeError, match="devices is empty"):
        PipelineParallelSketchedModel(CONFIGS, [])
    model = nn.Linear(3, 1)
    trainer, optimizer = MicrobatchPipelineTrainer(model, 2), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="reduction='none', and must have 'mean' or 'sum'"):
        trainer.forward_backward_pipeline(torch.ones(2, 3), torch.ones(2, 1), nn.MSELoss(reduction="none"), optimizer)
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(1, 1\)"):
        trainer.forward_backward_pipeline(torch.ones(2, 3), torch.ones(2, 1), lambda a, b: a - b, optimizer)
    with pytest.raises(ShapeError, match="has 2 and 3"):
        trainer.forward_backward_pipeline(torch.ones(2, 3), torch.ones(3, 1), nn.MSELoss(), optimizer)
    with pytest.raises(ShapeError, match="has 0 and 0"):
        trainer.forward_backward_pipeline(torch.ones(0, 3), torch.ones(0, 1), nn.MSELoss(), optimizer)
    with pytest.raises(ShapeError, match="num_microbatches=0"):
        MicrobatchPipelineTrainer(model, 0)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not str"):
        MicrobatchPipelineTrainer("model", 2)
    with pytest.raises(TypeError, match="batch_data must be a tensor, not list"):
        trainer.forward_backward_pipeline([[1.0]], torch.ones(1, 1), nn.MSELoss(), optimizer)
    with pytest.raises(TypeError, match=r"the criterion is the class MSELoss: pass an object, MSELoss\(\)"):
        trainer.forward_backward_pipeline(torch.ones(2, 3), torch.ones(2, 1), nn.MSELoss, optimizer)
    with pytest.raises(TypeError, match="the criterion must be a function of output and target, not str"):
        trainer.forward_backward_pipeline(torch.ones(2, 3), torch.ones(2, 1), "mse", optimizer)
    with pytest.raises(TypeError, match=r"must be a list with a device for each stage, not a str: use \['cpu'\]"):
        PipelineParallelSketchedModel(CONFIGS, "cpu")
    with pytest.raises(ValueError, match="device='gpu:0' is not a device of torch: use for example 'cpu' or 'cuda:0'"):
        PipelineParallelSketchedModel(CONFIGS, ["cpu", "gpu:0"])
    with pytest.raises(TypeError, match=r"layer_configs\[1\]\['sketch_size'\] must be an integer, not str"):
        PipelineParallelSketchedModel([CONFIGS[0], CONFIGS[1] | {"sketch_size": "2"}], ["cpu"])
