"""Steps of fsdp in which the ranks use different parameters or blocks, or all leave the same parameters out."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from whole_batches import assert_equal, plain, train, weights

from panther.errors import ConfigError, DistributedError

pytestmark = pytest.mark.distributed
AdamW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3)


class Branches(nn.Module):
    """Has two branches of one size in the root block, and calls those that ``chosen(forward, rank)`` names."""

    def __init__(self, chosen):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))
        self.double()
        self.chosen, self.forwards = chosen, 0

    def forward(self, x):
        self.forwards += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.head(x + sum(getattr(self, name)(x) for name in self.chosen(self.forwards, rank)))


class Dropped(nn.Module):
    """Blocks of one size; each rank leaves another one out of the second forward (Fan and others 2019, LayerDrop)."""

    def __init__(self, drops):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.double()
        self.drops, self.forwards = drops, 0

    def forward(self, x):
        self.forwards += 1
        for number, block in enumerate(self.blocks):
            if self.forwards != 2 or number != self.drops(dist.get_rank()):
                x = x + block(x).tanh()
        return x


def alone(forward, rank):
    """The second branch in the third forward of rank 1."""
    return ("first", "second")[: 2 if forward != 3 or rank == 0 else 1]


def others(forward, rank):
    """Branches of equal size on the two ranks, whose gradients FSDP would add to each other."""
    return ("first", "second") if forward == 1 else (("first", "second")[rank],)


def refusal(model, **settings):
    with pytest.raises(ConfigError) as caught:
        train(model, AdamW, {"strategy": "fsdp", **settings}, micro=settings.pop("micro", 1))
    return str(caught.value)


def test_ranks_that_use_different_parameters_or_blocks_are_told_which():
    def run():
        return [
            refusal(Branches(alone)),
            refusal(Branches(others)),
            refusal(Branches(alone), mixed_precision="bf16"),
            refusal(Dropped(lambda rank: rank + 1)),
        ]

    first, second = on_ranks(run, 2)
    assert first == second
    alone_text, others_text, half_text, dropped_text = first
    for message in (alone_text, half_text):
        assert message.startswith("the loss of rank 1 does not depend on the parameters second.weight, second.bias in")
    assert others_text.startswith("the loss of rank 1 does not depend on the parameters first.weight, first.bias in")
    assert "rank 0 ran 'blocks.2' and rank 1 'blocks.1'" in dropped_text


def sometimes(forward, rank):
    """Both ranks leave the second branch out of every other forward."""
    return ("first", "second")[: 2 if forward % 2 else 1]


@pytest.mark.parametrize("micro", [1, 3])
def test_parameters_that_no_rank_uses_are_left_as_on_one_process(micro):
    """Neither decayed nor moved by a momentum; with several batches a step, a branch may have earlier gradients."""
    chosen = sometimes if micro == 1 else (lambda forward, rank: sometimes((forward - 1) // 3 + 1, rank))
    settings = {"strategy": "fsdp"}
    outcomes = on_ranks(lambda: weights(train(Branches(chosen), AdamW, settings, steps=5, micro=micro)), 2)
    model = Branches(sometimes)
    assert_equal(outcomes, plain(model, AdamW(model.parameters()), steps=5))


def test_a_branch_that_only_one_batch_of_a_step_uses():
    """The last batches of a step leave it out, and the first has given it a gradient that was not reduced."""
    chosen = lambda forward, rank: ("first", "second")[: 2 if forward % 3 == 1 else 1]  # noqa: E731

    def run():
        sharded = weights(train(Branches(chosen), AdamW, {"strategy": "fsdp"}, micro=3))
        settings = {"strategy": "ddp", "find_unused_parameters": True}
        return sharded, weights(train(Branches(chosen), AdamW, settings, micro=3))

    for sharded, replicated in on_ranks(run, 2):
        assert_equal([sharded], replicated)


@pytest.mark.slow
def test_replicas_and_stages_compare_what_they_ran():
    """The two ranks of "replicate", and the two replicas of each stage of a pipeline."""

    class OwnStage(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
            self.forwards = 0

        def forward(self, x):
            self.forwards += 1
            used = dist.get_rank() != 3 or self.forwards < 6
            return self.first(x) + (self.second(x) if used else 0)

    def replicated():
        return refusal(Branches(alone), strategy="replicate"), refusal(Branches(others), strategy="replicate")

    for alone_text, others_text in on_ranks(replicated, 2):
        assert alone_text.startswith("the loss of rank 1 does not depend on the parameters second.weight, second.bias")
        assert others_text.startswith("the loss of rank 1 does not depend on the parameters first.weight, first.bias")

    def staged():
        torch.manual_seed(0)
        model = nn.Sequential(OwnStage(), OwnStage())
        settings = {"pipeline_parallel_size": 2, "num_microbatches": 2, "divided_by": 2}
        train(model, AdamW, {"strategy": "hybrid", **settings})

    with pytest.raises(DistributedError, match=r"loss of rank \d does not depend on the parameters .*second.weight"):
        on_ranks(staged, 4, fresh=True)
