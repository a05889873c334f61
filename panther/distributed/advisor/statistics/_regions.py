"""What activation checkpointing keeps of a model's blocks, counted in a run that recomputes nothing."""

__all__ = ["Policy", "Regions", "storage", "tensors_in"]

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from panther._torch import TorchDispatchMode, storage_key, tree_leaves, untracked_shard

Policy = Callable[..., CheckpointPolicy]


class Regions(TorchDispatchMode):
    """Counts what activation checkpointing would keep of blocks, and what it would make again.

    Args:
        kept: Gets the bytes that are saved outside of blocks, enter a block, or are saved selectively, by layer.
        keeps_input: Gets whether a layer's input is among them.
        recomputed: Gets, by layer, the bytes of each block that its backward pass holds in addition to what is kept.
        weights: Storages of parameters and buffers, which do not count.
        place: Returns the layer that runs, and the storage of its input.
    """

    def __init__(
        self,
        kept: Any,
        keeps_input: list[bool],
        recomputed: list[list[int]],
        weights: set[int],
        place: Callable[[], tuple[int, int]],
    ) -> None:
        super().__init__()
        self.kept, self.keeps_input, self.recomputed = kept, keeps_input, recomputed
        self._weights, self._place = weights, place
        self._kept: dict[int, Tensor] = {}  # by storage; held, so that no other storage gets its address
        self._block: _Block | None = None  # that runs

    def watch(self, block: nn.Module, policy: Policy | None) -> list[Any]:
        """Register the hooks of a block."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                self._keep(tensor)
            self._block = _Block(policy)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            made, self._block = self._block, None
            if made is not None:
                known = self._weights | (self._kept.keys() - made.selected.keys())
                again = sum(_bytes(tensor) for key, tensor in made.saved.items() if key not in known)
                self.recomputed[self._place()[0]].append(max(0, again - made.taken))

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    def save(self, tensor: Tensor) -> None:
        """Take a tensor that autograd saves."""
        if self._block is None:
            self._keep(tensor)
        else:
            self._block.saved[storage(tensor)] = tensor
            # Backward takes what was selected so far, and recomputes no further than to the last tensor that is saved.
            self._block.taken = sum(map(_bytes, self._block.selected.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what the policy of the block saves."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        block = self._block
        if block is not None and block.policy is not None:
            chosen = block.policy(None, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
            for tensor in tensors_in(out) if chosen else ():
                block.selected[storage(tensor)] = tensor
                self._keep(tensor)
        return out

    def _keep(self, tensor: Tensor) -> None:
        layer, given = self._place()
        key = storage(tensor)
        if key not in self._weights and key not in self._kept:
            self._kept[key] = tensor
            self.kept[layer] += _bytes(tensor)
            self.keeps_input[layer] |= key == given


@dataclass
class _Block:
    """What happens in a block."""

    policy: Policy | None
    saved: dict[int, Tensor] = field(default_factory=dict)
    """What autograd saves, by storage."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """What the policy saves."""
    taken: int = 0
    """Bytes of what the policy had saved before autograd saved the last tensor."""


def storage(tensor: Tensor) -> int:
    return storage_key(untracked_shard(tensor))


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return untracked_shard(tensor).untyped_storage().nbytes()
