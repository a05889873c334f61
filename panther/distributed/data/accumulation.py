"""Accumulate gradients on each rank, and average the sum over the ranks in a later backward pass."""

__all__ = ["DATA_PARALLEL_MODELS", "no_sync"]

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DATA_PARALLEL_MODELS: WeakSet[nn.Module] = WeakSet()
"""Modules that ``data_parallel`` has returned in this process and that still exist."""


@contextmanager
def no_sync(model: nn.Module | None = None) -> Iterator[None]:
    """Do not send gradients in the backward passes of this block; the first backward pass after it sends the sum.

    A Trainer does this itself for its ``gradient_accumulation_steps``.

    Args:
        model: The model that :func:`data_parallel` returned; None is every such model of this process. A model that is
            neither wrapped nor sharded sends nothing, so that the same loop runs in a single process.

    Cost: with ``"fsdp"``, memory for the gradients of the entire model; otherwise nothing.

    Example:
        >>> import torch, panther as pr
        >>> pr.distributed.init()
        >>> model = pr.distributed.data_parallel(nn.Linear(4, 2))
        >>> with no_sync(model):
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.module.bias.grad
        tensor([6., 6.])
        >>> pr.distributed.shutdown()
    """
    if model is None:
        with ExitStack() as stack:
            for wrapped_model in list(DATA_PARALLEL_MODELS):
                stack.enter_context(no_sync(wrapped_model))
            yield
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"no_sync takes the model that data_parallel returned, not a {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
