"""Steps that are taken in the backward pass: equal to ordinary steps, and refused where gradients are not complete."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import panther as pr
from panther.errors import ConfigError, DistributedError
from panther.optim import SketchedAdamW, sketched_param_groups
from panther.optim.sketched_update import UPDATES
from tests.optim.test_exchange import assert_near, laid_out, network, train


class Model(nn.Module):
    """A table whose weight is the head's too, a block that is computed twice, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8), nn.LayerNorm(8))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(checkpoint(self.blocks, self.table(x), use_reentrant=False))


def sketched(model, update="channel"):
    groups = sketched_param_groups(model, rank=3)
    return SketchedAdamW(groups, lr=0.02, rank=3, update=update, period=2, weight_decay=0.1, seed=7)


def losses_of(model, optimizer, steps):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in steps:
        x = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("update", UPDATES)
def test_steps_are_the_ordinary_ones_exactly(update):
    model, twin = Model(), Model()
    expected = losses_of(twin, sketched(twin, update), range(6))
    optimizer = sketched(model, update).step_in_backward_()
    assert losses_of(model, optimizer, range(3)) == expected[:3]
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state[model.unused.weight] == {}
    # A checkpoint continues, and so does a copy, with ordinary steps.
    saved = copy.deepcopy(optimizer.state_dict())
    again, copied = Model(), copy.deepcopy((model, optimizer))
    again.load_state_dict(model.state_dict())
    resumed = sketched(again, update).step_in_backward_()
    resumed.load_state_dict(saved)
    assert not copied[1].steps_in_backward
    for outcome in (
        losses_of(again, resumed, range(3, 6)),
        losses_of(*copied, range(3, 6)),
        losses_of(model, optimizer.step_in_backward_(False), range(3, 6)),
    ):
        assert len(set(outcome)) == 3
    for pair in ((again, copied[0]), (again, model)):
        assert all(map(torch.equal, pair[0].parameters(), pair[1].parameters()))


def largest_gradient_bytes(in_backward):
    """The most bytes that gradients have at the same time in a backward pass, and those of the largest one."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    present = []

    def note(_):
        present.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    optimizer = SketchedAdamW(model.named_parameters(), rank=2, seed=0).step_in_backward_(in_backward)
    model(torch.ones(3, 16)).sum().backward()
    optimizer.step()
    return max(present)


def test_one_gradient_is_in_memory_at_a_time():
    assert largest_gradient_bytes(True) == 16 * 16 * 4
    assert largest_gradient_bytes(False) == 6 * 17 * 16 * 4


def layer_and_optimizer():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    return layer, SketchedAdamW(layer.named_parameters(), rank=2, seed=0).step_in_backward_()


def test_a_second_backward_pass_before_the_step_is_refused():
    layer, optimizer = layer_and_optimizer()
    layer(torch.ones(2, 6)).sum().backward()
    first_state = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer\.step\(\): call optimizer\.step\(\)"):
        layer(torch.ones(2, 6)).sum().backward()
    assert all(torch.equal(first_state[name], value) for name, value in layer.state_dict().items())
    optimizer.zero_grad()
    optimizer.step()
    layer(torch.ones(2, 6)).sum().backward()
    assert not torch.equal(first_state["weight"], layer.weight)


def test_a_closure_runs_its_backward_pass_with_the_hooks():
    layer, optimizer = layer_and_optimizer()

    def closure():
        loss = layer(torch.ones(2, 6)).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first


def test_assigned_gradients_and_added_groups_take_steps():
    layer, optimizer = layer_and_optimizer()
    first_weight = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not torch.equal(first_weight, layer.weight)
    optimizer.zero_grad()
    added = nn.Linear(5, 4)
    optimizer.add_param_group({"params": list(added.named_parameters())})
    first_weight = added.weight.detach().clone()
    added(layer(torch.ones(2, 6))).sum().backward()
    assert not torch.equal(first_weight, added.weight)
    assert added.weight.grad is None


def test_errors_of_a_step_leave_the_backward_pass():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = SketchedAdamW(table.named_parameters(), rank=2, seed=0).step_in_backward_()
    with pytest.raises(ValueError, match=r"the gradient of weight is sparse"):
        table(torch.tensor([1])).sum().backward()
    assert not optimizer.state


def test_hooks_end_with_their_optimizer_and_do_not_keep_a_model_alive():
    layer, optimizer = layer_and_optimizer()
    references = weakref.ref(layer.weight), weakref.ref(optimizer)
    del optimizer
    layer(torch.ones(2, 6)).sum().backward()
    assert layer.weight.grad is not None
    del layer
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_trainer_refuses_it():
    layer, optimizer = layer_and_optimizer()
    trainer = pr.train.Trainer(layer, optimizer, nn.functional.mse_loss, pr.train.TrainConfig(epochs=1, batch_size=2))
    with pytest.raises(ConfigError, match=r"takes steps in the backward pass.*step_in_backward_\(False\)"):
        trainer.fit(torch.utils.data.TensorDataset(torch.ones(4, 6), torch.ones(4, 5)))


def in_backward(model):
    return sketched(model).step_in_backward_()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("n", "layouts"), [(2, ("fsdp", "tp")), pytest.param(4, ("hybrid", "fsdp and tp"), marks=pytest.mark.slow)]
)
def test_models_train_as_on_one_process(n, layouts):
    def rank():
        outcomes = []
        for layout in layouts:
            model = laid_out(network(0), layout)
            outcomes.append(train(model, in_backward(model), range(4)))
            assert all(p.grad is None for p in model.parameters())
        return outcomes

    model = network(0)
    expected = train(model, sketched(model), range(4))
    for outcomes in on_ranks(rank, n):
        for weights in outcomes:
            assert_near(weights, expected)


@pytest.mark.distributed
def test_ddp_is_refused_on_every_rank():
    def rank():
        model = laid_out(network(0), "ddp")
        first_weights = weights_of(model)
        optimizer = sketched(model.module)
        optimizer.step_in_backward_()
        with pytest.raises(ConfigError, match=r"before DistributedDataParallel averages .*: shard the model by fully"):
            model(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
        after = weights_of(model)
        assert all(torch.equal(first_weights[name], after[name]) for name in first_weights)

    on_ranks(rank, 2)


@pytest.mark.distributed
def test_fsdp_accumulates_without_synchronisation():
    def microbatches(model, optimizer, accumulates):
        for step in range(3):
            for part in range(2):
                if accumulates:
                    model.set_requires_gradient_sync(part == 1)
                x = torch.randn(6, 12, generator=torch.Generator().manual_seed(2 * step + part), dtype=torch.float64)
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    def rank():
        model = laid_out(network(0), "fsdp")
        return microbatches(model, in_backward(model), True)

    model = network(0)
    expected = microbatches(model, sketched(model), False)
    for weights in on_ranks(rank, 2):
        assert_near(weights, expected)


@pytest.mark.distributed
def test_ranks_that_update_in_different_orders_are_refused_on_all_of_them():
    """Hooks run in the order of the graph; ranks with different graphs would add up different matrices."""

    def rank():
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = pr.distributed.make_mesh(dp=2)
        first, second = (nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])) for _ in range(2))
        groups = [{"params": [("first", first), ("second", second)], "rank": 2}]
        optimizer = SketchedAdamW(groups).step_in_backward_()
        order = (first, second) if dist.get_rank() == 0 else (second, first)
        with pytest.raises(DistributedError) as caught:
            order[0].to_local().sum().backward()
        assert optimizer.steps_in_backward
        assert all(torch.equal(p.to_local(), torch.ones(4, 6)) for p in (first, second))
        return str(caught.value)

    first, second = on_ranks(rank, 2)
    assert first == second
    assert "first is present on rank 0 and missing on rank 1" in first
