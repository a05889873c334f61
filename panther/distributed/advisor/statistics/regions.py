"""Count the bytes that activation checkpointing would keep of a model's blocks, in a run that recomputes nothing."""

__all__ = ["Policy", "Regions", "storage", "tensors_in"]

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from panther._torch import TorchDispatchMode, storage_key, tree_leaves, untracked_shard

Policy = Callable[..., CheckpointPolicy]


class Regions(TorchDispatchMode):
    """Count the bytes of blocks that activation checkpointing would keep, and the bytes that it would recompute.

    Args:
        kept_bytes: Is increased, by layer, by the bytes of tensors that are saved outside of blocks, enter a block, or
            are saved selectively.
        keeps_input: Is set, by layer, to whether these tensors include the layer's input.
        recomputed: Gets, by layer, the bytes of each block that its backward pass holds in addition to the kept ones.
        weights: Storages of parameters and buffers, which do not count.
        place: A function that returns the layer that runs, and the storage of its input.
    """

    def __init__(
        self,
        kept_bytes: Any,
        keeps_input: list[bool],
        recomputed: list[list[int]],
        weights: set[int],
        place: Callable[[], tuple[int, int]],
    ) -> None:
        super().__init__()
        self.kept_bytes, self.keeps_input, self.recomputed = kept_bytes, keeps_input, recomputed
        self._weights, self._place = weights, place
        self._kept: dict[int, Tensor] = {}  # by storage; references keep other storages from getting the same address
        self._block: _Block | None = None  # the block that runs

    def watch(self, block: nn.Module, policy: Policy | None) -> list[Any]:
        """Register the hooks of a block."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                self._keep(tensor)
            self._block = _Block(policy)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            block_record, self._block = self._block, None
            if block_record is not None:
                counted_keys = self._weights | (self._kept.keys() - block_record.selected.keys())
                recomputed_bytes = sum(
                    _bytes(tensor) for key, tensor in block_record.saved.items() if key not in counted_keys
                )
                self.recomputed[self._place()[0]].append(max(0, recomputed_bytes - block_record.selected_bytes))

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    def save(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves."""
        if self._block is None:
            self._keep(tensor)
        else:
            self._block.saved[storage(tensor)] = tensor
            # Backward uses the tensors that were selected so far, and recomputes only up to the last saved tensor.
            self._block.selected_bytes = sum(map(_bytes, self._block.selected.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its results if the policy of the block saves them."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        block = self._block
        if block is not None and block.policy is not None:
            is_selected = block.policy(None, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
            for tensor in tensors_in(out) if is_selected else ():
                block.selected[storage(tensor)] = tensor
                self._keep(tensor)
        return out

    def _keep(self, tensor: Tensor) -> None:
        layer, input_storage = self._place()
        key = storage(tensor)
        if key not in self._weights and key not in self._kept:
            self._kept[key] = tensor
            self.kept_bytes[layer] += _bytes(tensor)
            self.keeps_input[layer] |= key == input_storage


@dataclass
class _Block:
    """The tensors that are saved in a block."""

    policy: Policy | None
    saved: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that autograd saves, by storage."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that the policy saves, by storage."""
    selected_bytes: int = 0
    """Bytes of the tensors that the policy had saved when autograd saved the last tensor."""


def storage(tensor: Tensor) -> int:
    """Return a number that tensors share if they share their memory."""
    return storage_key(untracked_shard(tensor))


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return untracked_shard(tensor).untyped_storage().nbytes()
