"""Work on several ranks, and steps of training whose losses and weights are compared with those of one process."""

import pool
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.pipelining  # as for the compiler: Panther imports both when it needs them
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed import launch

_NORMWISE = {torch.float32: 1e-6, torch.float64: 1e-12}


def on_ranks(work, n=2, *args, fresh=False):
    """Return what ``work(*args)`` returns on each of n ranks; any function, also one of a test.

    Args:
        work: Runs in processes that serve many tests, which get it by cloudpickle: what it changes around it is lost.
        n: World size.
        *args: Of ``work``.
        fresh: Fork processes for this call alone, as a test needs that ends one, starts or leaves a process group
            itself, expects an error of ``launch``, or replaces attributes of modules (``monkeypatch``).
    """
    if fresh:
        return launch(work, *args, nproc=n, start_method="fork")
    return pool.run(work, n, args)


def whole(tensor):
    """The tensor in one piece."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(*models):
    """Copies of the parameters in one piece, under the names that they have without DistributedDataParallel."""
    named = (item for model in models for item in model.named_parameters())
    return {name.removeprefix("module."): whole(p).detach().clone() for name, p in named}


def gradients_of(model):
    """Copies of the gradients in one piece, by the names of the parameters."""
    return {name: whole(p.grad).detach().clone() for name, p in model.named_parameters()}


def results(model, x):
    """The output, the gradient of the input and those of the parameters, of the mean square of the output."""
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    out.square().mean().backward()
    return out.detach(), leaf.grad, gradients_of(model)


def assert_near(found, expected, dtype=torch.float64):
    """Compare tensors, and tensors by name, by the norm of the difference: layers over ranks add in another order."""
    for ours, theirs in zip(found, expected, strict=True):
        pairs = {"": (ours, theirs)} if torch.is_tensor(theirs) else {n: (ours[n], theirs[n]) for n in theirs}
        for name, (one, other) in pairs.items():
            assert (one - other).norm() <= _NORMWISE[dtype] * other.norm() + 1e-30, name


def take_steps(optimizer, loss, steps=10, clip=None):
    """Minimise ``loss()``; its values, and the norms of the gradients where they are clipped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if clip is not None:
            norms.append(whole(nn.utils.clip_grad_norm_(parameters, clip)).item())
        optimizer.step()
        losses.append(value.item())
    return losses, norms


def take_pipeline_steps(optimizer, schedule, x, y, steps=10):
    """Losses, None on ranks that do not have them, and the last output."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output, loss = schedule.step(x, y)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    return losses, output
