"""One process of test_horovod.py, started by horovodrun: ``horovod_worker.py FOLDER (train | lose)``."""

import json
import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import panther as pr
from panther.errors import PantherError
from panther.integrations.horovod import DistributedOptimizer, broadcast_model, metric_average

STEPS, ROWS = 5, 8


def network(seed=3, head=4):
    torch.manual_seed(seed)
    stored = pr.nn.SKLinear(64, 64, 2)
    stored.set_fitted_({name: 0.1 * torch.randn(shape) for name, shape in stored.sketch_shapes().items()})
    for name in stored.sketch_names:
        getattr(stored, name).requires_grad_(False)
    return nn.Sequential(
        pr.nn.SKLinear(32, 64, 2, seed=seed),
        nn.ReLU(),
        stored,
        pr.nn.SKLinear(64, 64, 2, seed=seed + 1, packed=True),
        nn.BatchNorm1d(64).eval(),
        nn.Linear(64, head),
    )


def steps_of(model, optimizer, rank=0, size=1):
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(ROWS, 32, generator=generator), torch.randint(4, (ROWS,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rank::size]), y[rank::size])
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if size == 1 else metric_average(loss, "loss"))
    return losses


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, weight_decay=0.1)


def train():
    rank, size = hvd.rank(), hvd.size()
    plain = network()
    found = {"size": size, "plain": steps_of(plain, adamw(plain))}
    for compression in ("none", "fp16"):
        model = network(seed=3 + 10 * rank)  # rank 0's must win
        found[compression] = steps_of(
            model, DistributedOptimizer(adamw(model), model, compression=compression), rank, size
        )
        found[f"{compression} seeds"] = [model[0].seed, model[3].seed]
        found[f"{compression} error"] = max(
            (a.double() - b.double()).abs().max().item()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
    # The state of an optimizer that has one, from rank 1.
    model = network(seed=3)
    optimizer = adamw(model)
    if rank == 1:
        steps_of(model, optimizer)
    DistributedOptimizer(optimizer, model, root_rank=1)
    found["state"] = [sorted({int(entry["step"]) for entry in optimizer.state.values()}), len(optimizer.state)]
    found["refused"] = [said(call) for call in (
        lambda: broadcast_model(network(head=4 + rank)),
        lambda: broadcast_model(pr.nn.SKLinear(32, 32, 1 + rank)),
        lambda: broadcast_model(network(), root_rank=2),
        lambda: broadcast_model(network(), root_rank=rank),
        lambda: DistributedOptimizer(adamw(model), model, compression="int8"),
        lambda: DistributedOptimizer(model, model),
        lambda: DistributedOptimizer(adamw(model), model, named_parameters=[]),
        lambda: metric_average(torch.ones(2), "loss"),
    )]  # fmt: skip
    return found


def said(call):
    try:
        call()
    except PantherError as error:
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


def lose():
    model = network()
    optimizer = DistributedOptimizer(adamw(model), model)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps_of(model, optimizer, hvd.rank(), 2)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    outcome = {"train": train, "lose": lose}[sys.argv[2]]()
    (Path(sys.argv[1]) / f"rank-{hvd.rank()}.json").write_text(json.dumps(outcome))
    hvd.shutdown()
