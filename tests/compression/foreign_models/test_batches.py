"""Batches that the forward of somebody else's model writes, pops from, and appends to."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compressing import low_rank
from foreign_models import WIDTH, Model, compressed, inputs, true_error
from torch import nn

import panther as pr
from panther.compression.calibration.batches import copy_batch


class Scaled(Model):
    def forward(self, x):
        return self.network(x.sub_(3.0).div_(2.0))


class Masked(Model):
    def forward(self, x, ids):
        ids.masked_fill_(ids < 3, 0)
        x[:, 0] = 0
        return self.network(x + ids)


class Popping(Model):
    def forward(self, batch):
        x = batch.pop("x")
        batch["seen"] = True
        batch["sizes"].append(len(x))
        assert len(batch["sizes"]) == 1
        return self.network(x)


@dataclass
class Sample:
    x: torch.Tensor
    history: list


class Pair(NamedTuple):
    x: torch.Tensor
    y: np.ndarray


class Consuming(Model):
    def forward(self, sample):
        sample.history.append(1)
        sample.x += len(sample.history)
        return self.network(sample.x)


class Cache:
    """Keys of the past, which a forward appends to, as transformers' caches are."""

    __slots__ = ("keys",)

    def __init__(self, keys):
        self.keys = keys


class Caching(Model):
    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, x])
        return self.network(x + cache.keys.mean(0))


@pytest.mark.parametrize(
    ("model", "batches", "call"),
    [
        (Scaled, lambda: [2 * x + 3 for x in inputs()], None),
        (Scaled, lambda: [(2 * x + 3,) for x in inputs()], None),
        (Masked, lambda: [{"x": x, "ids": torch.arange(WIDTH).expand(64, -1).clone()} for x in inputs()], None),
        (Popping, lambda: [{"x": x, "sizes": []} for x in inputs()], lambda model, batch: model(batch)),
        (Popping, lambda: [OrderedDict(x=x, sizes=[]) for x in inputs()], lambda model, batch: model(batch)),
        (Consuming, lambda: [Sample(x, []) for x in inputs()], None),
        (Consuming, lambda: [(Sample(x, []),) for x in inputs()], None),
        (Caching, lambda: [(x, Cache(x[:5].clone())) for x in inputs()], None),
    ],
)
def test_a_forward_may_write_its_batch(model, batches, call):
    model, batches = model(), batches()
    originals = copy.deepcopy(batches)
    report, exact, last = compressed(model, batches, forward_fn=call)

    def run(model, batch):
        if call is not None:
            return call(model, batch)
        return model(**batch) if isinstance(batch, dict) else model(*(batch if isinstance(batch, tuple) else (batch,)))

    assert report.measured_error == pytest.approx(true_error(model, exact, last, run), rel=1e-4)
    assert 0 < report.measured_error < 0.8
    flat, others = (torch.utils._pytree.tree_leaves(each) for each in (batches, originals))
    for ours, theirs in zip(flat, others, strict=True):
        pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else []
        if isinstance(ours, Sample):
            assert ours.history == []
            pairs = [(ours.x, theirs.x)]
        if isinstance(ours, Cache):
            pairs = [(ours.keys, theirs.keys)]
        assert all(torch.equal(a, b) for a, b in pairs)
    if isinstance(batches[0], dict):
        assert [*batches[0]] == [*originals[0]]


def test_a_copy_of_a_batch_shares_nothing_that_a_forward_can_write():
    shared, base = torch.randn(3), torch.randn(1, 4)
    generator = torch.Generator().manual_seed(3)
    batch = {
        "first": shared, "second": [shared, (base.expand(5, 4),)], "pair": Pair(base.mT, np.ones(3)),
        "generator": generator, "layer": nn.Linear(2, 2), "graph": torch.randn(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(), "none": None, "empty": {},
    }  # fmt: skip
    copied = copy_batch(batch)
    assert copied["first"] is copied["second"][0]
    assert copied["first"] is not shared
    assert copied["layer"] is batch["layer"]
    assert copied["graph"].requires_grad
    assert copied["graph"].is_leaf
    copied["second"][1][0].add_(1)
    copied["first"].add_(1)
    copied["pair"].y.fill(0)
    torch.rand(2, generator=copied["generator"])
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(copied["pair"].x, base.mT)
    assert batch["pair"].y.sum() == 3
    assert torch.equal(batch["second"][1][0], base.expand(5, 4))
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))


def test_batches_that_a_loader_writes_into_one_buffer():
    class Loader:
        def __iter__(self):
            buffer = torch.empty(64, WIDTH)
            for x in inputs():
                yield buffer.copy_(x)

    ours, theirs = Model(), Model()
    first = pr.compress(ours, 0.3, Loader(), **low_rank)
    second = pr.compress(theirs, 0.3, inputs(), **low_rank)
    assert first.measured_error == second.measured_error
