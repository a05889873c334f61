"""Measure what is sent, instead of computing what should be."""

__all__ = ["CommunicationCounter"]

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CommunicationCounter(TorchDispatchMode):
    """Count the collective operations of this process and the bytes it hands to them, inside a ``with`` block.

    The bytes are those of the tensors a call reads: of the gradients for an all-reduce, once, whatever the algorithm
    behind it puts on the wire. A broadcast counts on every rank. DDP's gradient buckets are seen, on the CPU, when
    ``backward`` is called inside the block.

    Attributes:
        calls: Number of operations.
        bytes: Bytes handed over.
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

    @property
    def calls(self) -> int:
        """Number of operations."""
        return self.calls_by_operation.total()

    @property
    def bytes(self) -> int:
        """Bytes handed over."""
        return self.bytes_by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective and run it."""
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            # all_gather and reduce_scatter list their output first; what a rank gives is the input.
            given = {"allgather_": args[1:2], "reduce_scatter_": args[1:2], "_allgather_base_": args[1:2]}.get(
                name, args[:1]
            )
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            if tensors:
                self.calls_by_operation[name] += 1
                self.bytes_by_operation[name] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs)
