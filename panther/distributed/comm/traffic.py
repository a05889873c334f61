"""Count the collective operations of a process, and the bytes of their tensors."""

__all__ = ["CommunicationCounter"]

from collections import Counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SENDS_NOTHING = ("_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor")


class CommunicationCounter(TorchDispatchMode):
    """Count the collective operations of this process and the bytes of their inputs, inside a ``with`` block.

    The bytes are those of the tensors a call reads: of the gradients for an all-reduce, once, whatever the algorithm
    behind it puts on the wire. A broadcast counts on every rank, a receive and a barrier on none. DDP's gradient
    buckets are counted when ``backward`` is called inside the block, where it runs on this thread, also on a GPU.

    Attributes:
        calls: Number of operations.
        bytes: Bytes of the tensors that operations read.
        calls_by_operation: Number by name, such as ``"allreduce_"``.
        bytes_by_operation: Bytes by name.

    Example:
        >>> import torch, torch.distributed as dist, panther as pr
        >>> pr.distributed.init()
        >>> with CommunicationCounter() as traffic:
        ...     dist.all_reduce(torch.ones(10))
        >>> traffic.calls, traffic.bytes
        (1, 40)
        >>> pr.distributed.shutdown()
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls_by_operation: Counter[str] = Counter()
        self.bytes_by_operation: Counter[str] = Counter()

    def __enter__(self) -> Self:
        # A dispatch mode does not see autograd's own threads, which it has for GPUs.
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._one_thread.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._one_thread.__exit__(*exception)

    @property
    def calls(self) -> int:
        """Return the number of operations."""
        return self.calls_by_operation.total()

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors that operations read."""
        return self.bytes_by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective and run it."""
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SENDS_NOTHING:
            # Schemas of collectives name what they read input, inputs or input_tensors; the others have it first.
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            inputs = [value for key, value in given.items() if key.startswith("input")] or list(given.values())[:1]
            self.calls_by_operation[name] += 1
            self.bytes_by_operation[name] += sum(
                leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)
            )
        return func(*args, **kwargs)
