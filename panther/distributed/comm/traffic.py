"""Count the collective operations of a process, and the bytes of their tensors."""

__all__ = ["CommunicationCounter"]

import sys
from collections import Counter
from typing import Any, Self

import torch
from torch import Tensor

from panther._torch import COLLECTIVE_NAMESPACES, TorchDispatchMode, schema_of, tree_leaves

_SENDS_NOTHING = ("_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor")


class CommunicationCounter(TorchDispatchMode):
    """Count the collective operations of this process and the bytes of their inputs, inside a ``with`` block.

    A call counts the bytes of the tensors that it reads. An all-reduce of gradients counts the bytes of the gradients
    once, for any algorithm. A broadcast counts on every rank, a receive and a barrier on no rank. DDP's gradient
    buckets are counted if ``backward`` is called inside the block, where it runs on this thread, also on a GPU, and
    so are messages that operations on DTensors send. Messages that callbacks on other threads send are not counted, for
    example PowerSGD's factors.

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
        # A dispatch mode does not see operations of autograd's own threads, which run backward passes on GPUs.
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._one_thread.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._one_thread.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective and run it."""
        # Operations on DTensors run on their shards and send messages. These messages reach a mode only if the mode
        # leaves the operation itself to the DTensors.
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and any(issubclass(kind, module.DTensor) for kind in types):
            return NotImplemented
        self._record(func, args)
        return func(*args, **(kwargs or {}))

    @property
    def calls(self) -> int:
        """Return the number of operations."""
        return self.calls_by_operation.total()

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors that operations read."""
        return self.bytes_by_operation.total()

    def _record(self, func: Any, args: Any) -> None:
        name = schema_of(func).name.partition("::")[2]
        if func.namespace not in COLLECTIVE_NAMESPACES or name in _SENDS_NOTHING:
            return
        # The inputs are called input, inputs or input_tensors in schemas of collectives, or they are the first
        # argument.
        arguments = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False))
        inputs = [value for key, value in arguments.items() if key.startswith("input")] or list(arguments.values())[:1]
        self.calls_by_operation[name] += 1
        self.bytes_by_operation[name] += sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
