"""Random-feature attention sharded by heads over the ranks of a mesh axis.

Every rank projects, attends and projects back with its own heads, and the outputs are summed.
"""

__all__ = ["HeadwiseRandAttention", "heads_refusal", "shard_heads_"]

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from panther._torch import buffers_of, parameters_of
from panther.distributed.comm.collectives import all_reduce, sum_in_backward
from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._module import ShardedModule, become_, distribute, local_parameters, shard_parameter_
from panther.errors import ShapeError, check_size
from panther.nn import RandMultiHeadAttention
from panther.nn.attention.decoding.states import AttentionState


class HeadwiseRandAttention(ShardedModule, RandMultiHeadAttention):
    """Random-feature attention, sharded by heads. Each rank draws the random directions of its heads."""

    action = "heads sharded"
    local_heads: range
    """The heads of this rank."""
    placements: ClassVar[Mapping[str, Placement]] = {
        **dict.fromkeys(("Wq", "Wk", "Wv", "bq", "bk", "bv"), Shard(0)), "W0": Shard(1),
    }  # fmt: skip

    def enter(self, *inputs: Tensor) -> list[Tensor]:
        """Return the inputs, whose gradients are summed over the ranks, because each rank computes a part of them.

        The gradient of a tensor that is passed more than once, as in self-attention, is sent once.
        """
        entered = {id(x): x for x in inputs}
        entered = {key: sum_in_backward(x, self.tp_group) for key, x in entered.items()}
        return [entered[id(x)] for x in inputs]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attend with this rank's heads, and sum."""
        query, key, value = self.enter(query, key, value)
        with self._local_heads() as bias:
            output, _ = super().forward(query, key, value, *args, **kwargs)
        return self._summed(output, bias), None

    def init_state(self, batch_size: int) -> AttentionState:
        """Return the state of this rank's heads before the first token."""
        check_size("batch_size", batch_size, least=0)
        like = self.local("Wq").new_empty(batch_size, len(self.local_heads), 0, self.head_dim)
        return self._first_state(like, like)

    def step(
        self, x: Tensor, state: AttentionState, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Attend from the next tokens with this rank's heads, and sum; the state is of this rank's heads."""
        (x,) = self.enter(x)
        with self._local_heads() as bias:
            output, state = super().step(x, state, key_padding_mask)
        return self._summed(output, bias), state

    @contextmanager
    def _local_heads(self) -> Iterator[Tensor | None]:
        """Use this rank's shards of parameters and directions, and no output bias, which is yielded."""
        bias, directions = self.local("b0"), self.local("directions")
        center = self.local("center") if "center" in buffers_of(self) else None
        with local_parameters(self):
            # The bias is added once, after the sum. nn.Module looks up parameters before buffers of the same name.
            parameters_of(self).update(b0=None, directions=directions)
            if "center" in buffers_of(self):
                parameters_of(self).update(center=center)
            yield bias

    def _summed(self, output: Tensor, bias: Tensor | None) -> Tensor:
        output = all_reduce(output, group=self.tp_group)
        return output if bias is None else output + bias.to(output.dtype)

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N, n, in) -> (N, H here, n, d)
        return F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _draw_directions(self) -> None:
        if self.directions is None:
            return
        with torch.no_grad():  # a rank draws the same directions for its heads as the unsharded layer
            directions = self.local("directions")
            # While materialize_ draws a layer in full, the directions of all heads are drawn.
            heads = range(self.num_heads) if len(directions) == self.num_heads else self.local_heads
            directions.copy_(self._current_directions(heads))


def shard_heads_(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard an attention that is equal on all ranks by heads, in place; nothing is sent."""
    if reason := heads_refusal(module, mesh.size()):
        raise (ShapeError if "ranks" in reason else TypeError)(f"{type(module).__name__} {reason}")
    heads = chunk_ranges(module.num_heads, mesh.size())[mesh.get_local_rank()]  # type: ignore[arg-type]
    attention: HeadwiseRandAttention = become_(module, HeadwiseRandAttention, mesh, local_heads=heads)
    for name in tuple(parameters_of(attention)):
        shard_parameter_(attention, name, mesh, HeadwiseRandAttention.placement(name))
    if attention.directions is not None:
        attention.directions = distribute(attention.directions, mesh, Shard(0))
        if "center" in buffers_of(attention):
            attention.center = distribute(attention.center, mesh, Shard(0))
    return attention


def heads_refusal(module: nn.Module, ranks: int) -> str | None:
    """Return why the heads of an attention cannot be sharded over ``ranks`` ranks, or None if they can."""
    if type(module) is not RandMultiHeadAttention:
        return "is not an attention whose heads can be sharded: name its projections"
    if module.num_heads % ranks:
        return f"has {module.num_heads} heads, which are not a multiple of the {ranks} ranks"
    return "has relative positions of all heads" if module.SRPE is not None else None
