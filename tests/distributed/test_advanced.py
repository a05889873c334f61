import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from panther.distributed import AdvancedDistributedTrainer, CommunicationCounter
from panther.errors import DistributedError, ShapeError, SketchMismatchError
from panther.nn import SKLinear

pytestmark = pytest.mark.distributed


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(SKLinear(40, 48, 2), nn.ReLU(), SKLinear(48, 5, 2)).double()


def batches(count, seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 40, generator=generator, dtype=torch.float64),
            torch.randint(5, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def test_an_epoch_is_that_of_one_process():
    every = batches(6)
    criterion = nn.CrossEntropyLoss()

    def rank():
        r = dist.get_rank()
        trainer = AdvancedDistributedTrainer(network(100 + r), r, 2, gradient_clipping=0.5)
        optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 0.5)
        own = [(x[2 * r : 2 * r + 2], y[2 * r : 2 * r + 2]) for x, y in every]
        return trainer.train_epoch(own, optimizer, criterion), [p.detach() for p in trainer.model.parameters()]

    model = network(100)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for x, y in every:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    for loss, weights in on_ranks(rank):
        assert loss == pytest.approx(sum(losses) / 6, rel=1e-9)
        for ours, theirs in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-8, atol=1e-10)


def test_ranks_with_different_numbers_of_batches_stay_equal():
    def rank():
        r = dist.get_rank()
        trainer = AdvancedDistributedTrainer(network(r), r, 3)
        optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 0.1)
        losses = [trainer.train_epoch(batches(1 + 2 * r, r, 3 + r), optimizer, nn.CrossEntropyLoss()) for _ in range(2)]
        return losses, [parameter.detach() for parameter in trainer.model.parameters()]

    first, *others = on_ranks(rank, 3)
    for losses, weights in others:
        assert losses == first[0]
        assert all(torch.equal(a, b) for a, b in zip(weights, first[1], strict=True))
    assert first[0][1] < first[0][0]


def test_sketches_are_checked_and_not_sent():
    def rank():
        r = dist.get_rank()
        trainer = AdvancedDistributedTrainer(network(r), r, 2)
        with CommunicationCounter() as traffic:
            trainer.synchronize_sketching_matrices()
        trainer.model[0].set_seeded_(r)
        with pytest.raises(SketchMismatchError, match="sketches differ between ranks: layer '0'"):
            trainer.train_epoch(batches(1), torch.optim.SGD(trainer.model.parameters(), 0.1), nn.CrossEntropyLoss())
        return traffic.bytes

    assert on_ranks(rank) == [16, 16]


class Partial(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(40, 5).double(), nn.Linear(40, 5).double()

    def forward(self, x):
        return self.used(x)


def test_parameters_that_a_forward_does_not_use():
    def rank():
        r, losses = dist.get_rank(), []
        for settings in ({}, {"find_unused_parameters": False}):
            torch.manual_seed(0)
            trainer = AdvancedDistributedTrainer(Partial(), r, 2, **settings)
            optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 0.1)
            try:
                losses.append(trainer.train_epoch(batches(2, r), optimizer, nn.CrossEntropyLoss()))
            except RuntimeError as error:
                losses.append("find_unused_parameters" in str(error))
        return losses

    (first, refused), (second, refused_too) = on_ranks(rank, fresh=True)
    assert first == second > 0
    assert refused is refused_too is True


def test_what_cannot_be_trained_is_said_on_every_rank():
    def rank():
        with pytest.raises(ValueError, match="gradient_clipping=-1 must be positive"):
            AdvancedDistributedTrainer(network(0), dist.get_rank(), 2, gradient_clipping=-1)
        trainer = AdvancedDistributedTrainer(network(0), dist.get_rank(), 2)
        optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 0.5)
        with pytest.raises(ShapeError) as caught:
            trainer.train_epoch(iter([]), optimizer, nn.CrossEntropyLoss())
        return str(caught.value)

    told = "no rank has a batch, so nothing was trained: pass a loader, which can be read more than once"
    assert on_ranks(rank) == [told, told]


def test_without_a_group():
    with pytest.raises(DistributedError, match=r"call panther.distributed.init\(\) first"):
        AdvancedDistributedTrainer(network(0), 0, 1)
