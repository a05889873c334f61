"""Run a model on fake tensors, and count its flops, the bytes that autograd saves, and its traffic over the tp axis.

:func:`tensor_parallel` shards a copy of the model on the meta device over torch's fake process group. The copy then
runs forward and backward on torch's fake tensors, which need no memory, so that the operations of the real code are
counted.
"""

__all__ = ["Policy", "Run", "WorkCounter", "fake_inputs", "fake_mesh", "make_fake_", "meta_copy", "run"]

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from panther._process_settings import ProcessSetting
from panther._torch import (
    COLLECTIVE_NAMESPACES,
    FAKE_LOG,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    fake_group,
    operator_name,
    parameters_of,
    storage_key,
    tree_leaves,
    tree_map_only,
    untracked_shard,
)
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.comm.traffic import CommunicationCounter
from panther.errors import DistributedError, ShapeError

Policy = Callable[..., CheckpointPolicy]
"""The policy of selective activation checkpointing, which is given an operation and its arguments."""

_GROUPS = itertools.count()
_NO_FAKE_LOG = ProcessSetting(lambda: FAKE_LOG.disabled, partial(setattr, FAKE_LOG, "disabled"), True)
_ROWS_ONLY = (torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.gather)


@contextmanager
def fake_mesh(ranks: int) -> Iterator[DeviceMesh]:
    """Yield a tp mesh of ``ranks`` ranks on the fake backend, which sends nothing; this process is its first rank.

    A process group that exists already is not changed.
    """
    alone = not in_process_group()  # if there is no default group, one is made, and destroyed at the end
    # DTensor caches results by mesh and compares meshes by name, so that every mesh needs a different name.
    name = f"panther_plan_{next(_GROUPS)}"
    group = fake_group(ranks, name)
    try:
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group(group)
        if alone:
            dist.destroy_process_group()


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, in training mode, without copying any weight.

    Raises:
        DistributedError: If layers are sharded already.
    """
    memo: dict[int, Any] = {}
    for _, _, tensor in _places_of_tensors(model):
        if isinstance(tensor, DTensor):
            raise DistributedError("layers of the model are already sharded: plan before sharding it")
        # deepcopy uses the tensors in its memo, so that tied tensors stay tied and no values are copied.
        if id(tensor) not in memo:
            meta_tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            trained = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad) if trained else meta_tensor
    return copy.deepcopy(model, memo).train()


def make_fake_(model: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype | None) -> None:
    """Replace a model's tensors by fake ones, in place; tied tensors stay tied, parameters get the compute dtype."""
    fakes: dict[int, Tensor] = {}
    with mode:
        for place, name, tensor in _places_of_tensors(model):
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(tensor, compute_dtype)
            # The dictionaries of the module are written directly, because setattr would run hooks and type checks.
            place[name] = fakes[id(tensor)]


def _places_of_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield each tensor of a model's modules with the dictionary that holds it and its key."""
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), vars(module))
        for place in places:
            for name, value in list(place.items()):
                if isinstance(value, Tensor):
                    yield place, name, value


def _fake(tensor: Tensor, compute_dtype: torch.dtype | None) -> Tensor:
    parameter = isinstance(tensor, nn.Parameter)
    dtype = compute_dtype if compute_dtype and parameter and tensor.is_floating_point() else tensor.dtype
    local = untracked_shard(tensor)
    fake = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device="cpu")
    if isinstance(tensor, DTensor):
        fake = DTensor.from_local(
            fake, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if parameter else fake


def fake_inputs(sample: Any, times: int, mode: FakeTensorMode, compute_dtype: torch.dtype | None) -> tuple[Any, int]:
    """Return a fake sample input with ``times`` the batch size of ``sample``, and its batch size."""
    tensors = tensors_in(sample)
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise ShapeError(
            "sample_input has no tensor with a batch dimension: pass a batch of samples as the forward takes it"
        )
    batch = len(tensors[0])

    def grown(tensor: Tensor) -> Tensor:
        # Masks and tables that do not have the batch size keep their shapes.
        per_sample = tensor.dim() > 0 and tensor.shape[0] == batch
        shape = (times * batch, *tensor.shape[1:]) if per_sample else tensor.shape
        dtype = compute_dtype if compute_dtype and tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="cpu")

    with mode:
        return tree_map_only(Tensor, grown, sample), times * batch


class WorkCounter(FlopCounterMode):
    """Count the work of the operations that run within the block, except for views and collectives."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.flops = self.moved = self.calls = 0
        """Flops of products, bytes that operations read and write, and number of operations."""
        self.made: list[int] = []
        """Bytes of the largest tensor that each operation makes; the user of the counter may clear the list."""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # This method is private, but no public one sees each operation once, after composite operations are decomposed.
        # A name such as "aten::add"; collectives are counted as traffic.
        if operator_name(func_packet).partition("::")[0] in COLLECTIVE_NAMESPACES:
            return out
        outputs, inputs = tensors_in(out), tensors_in((args, kwargs))
        stored = {storage_key(tensor) for tensor in inputs}
        in_place = func_packet.__name__.endswith("_")
        if outputs and (in_place or any(storage_key(tensor) not in stored for tensor in outputs)):
            if func_packet in self.flop_registry:
                self.flops += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            read = outputs if func_packet in _ROWS_ONLY else inputs
            self.moved += sum(map(_used_bytes, (*read, *outputs)))
            self.calls += 1
            self.made.append(max(map(_used_bytes, outputs)))
        return out


class _SelectedResults(TorchDispatchMode):
    """Call a function with each result that the policy of selective activation checkpointing saves."""

    def __init__(self, policy_now: Callable[[], Policy | None], select: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._policy_now, self._select = policy_now, select

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        out = func(*args, **(kwargs or {}))
        policy = self._policy_now()
        if policy is not None and policy(None, func, *args, **(kwargs or {})) is CheckpointPolicy.MUST_SAVE:
            for tensor in tensors_in(out):
                self._select(tensor)
        return out


class Run:
    """Counts of a forward and backward pass, by layers of the model."""

    def __init__(self, batch: int, layers: int) -> None:
        self.batch = batch
        self.activations, self.output = np.zeros((2, layers), dtype=np.int64)
        """Bytes that are kept in each layer for its backward pass, without parameters and buffers; bytes of each
        layer's output."""
        self.sums = np.zeros((7, layers), dtype=np.int64)
        self.flops, self.moved, self.calls, self.tp_bytes, self.tp_calls, self.tp_gathered, self.tp_gathers = self.sums
        """The counts of a WorkCounter; bytes and calls of collectives over the tp axis, and of those that gather."""
        self.made: list[list[int]] = [[] for _ in range(layers)]
        """Bytes of the largest tensor that each operation makes."""
        self.returns_tensor = [True] * layers
        """Whether each layer returns one tensor."""
        self.recomputed = np.zeros(layers, dtype=np.int64)
        """The most bytes that the backward pass of a recomputed block holds in addition to the kept ones."""


class _Block:
    """A block that activation checkpointing recomputes, while it runs."""

    def __init__(self, policy: Policy | None, sums: np.ndarray[Any, Any]) -> None:
        self.policy, self.first_sums = policy, sums
        self.saved: dict[int, Tensor] = {}
        """Tensors that autograd saves, by storage."""
        self.selected: dict[int, Tensor] = {}
        """Tensors that the policy saves, by storage."""


def run(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    inputs: Any,
    batch: int,
    loss_fn: Callable[[Any], Tensor] | None,
    mode: FakeTensorMode,
    *,
    autocast_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    blocks: Sequence[tuple[nn.Module, Policy | None]] = (),
) -> Run:
    """Run a fake model forward and backward, and return the counts.

    The output is cast to ``output_dtype`` for the loss; None does not cast it. ``blocks`` are the modules that
    activation checkpointing recomputes, each with the policy of selectively saved tensors; None saves only their
    inputs. They run once here, and the work of their forward is counted twice.
    """
    counts = Run(batch, len(layers))
    weights = {storage(tensor) for _, _, tensor in _places_of_tensors(model)}
    kept_tensors: dict[int, Tensor] = {}  # references, so that no other storage gets the same address
    current = 0
    block: _Block | None = None
    work, traffic = WorkCounter(), CommunicationCounter()
    previous_sums = np.zeros(len(counts.sums), dtype=np.int64)

    def sums_now() -> np.ndarray[Any, Any]:
        gathered, gathers = (
            sum(count for name, count in per_operation.items() if "gather" in name)
            for per_operation in (traffic.bytes_by_operation, traffic.calls_by_operation)
        )
        return np.array([work.flops, work.moved, work.calls, traffic.bytes, traffic.calls, gathered, gathers])

    def switch_to(layer: int) -> None:
        """Add the counts since the last switch to the current layer, and make ``layer`` the current one."""
        nonlocal current, previous_sums
        counts.made[current] += work.made
        work.made = []
        sums = sums_now()
        counts.sums[:, current] += sums - previous_sums
        current, previous_sums = layer, sums

    def keep(tensor: Tensor) -> None:
        key = storage(tensor)
        # A tensor that more than one operation saves counts once.
        if key not in weights and key not in kept_tensors:
            kept_tensors[key] = tensor
            counts.activations[current] += _stored_bytes(tensor)

    def select(tensor: Tensor) -> None:
        if block is not None:
            block.selected[storage(tensor)] = tensor
            keep(tensor)

    def pack(tensor: Tensor) -> Tensor:
        if block is None:
            keep(tensor)
        else:
            block.saved[storage(tensor)] = tensor
        return tensor

    def enter_block(policy: Policy | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal block
            for tensor in tensors_in((args, kwargs)):
                keep(tensor)
            block = _Block(policy, sums_now())

        return hook

    def leave_block(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal block
        if block is None:
            return
        work_again = sums_now() - block.first_sums
        if block.policy is not None:  # which saves what ranks have summed
            work_again[3:] = 0
        counts.sums[:, current] += work_again
        held = {key: tensor for key, tensor in block.saved.items() if key not in weights and key not in kept_tensors}
        # What the policy saves and autograd does not is freed when backward reaches the block.
        freed = [tensor for key, tensor in block.selected.items() if key not in block.saved]
        recomputed = sum(map(_stored_bytes, held.values())) - sum(map(_stored_bytes, freed))
        counts.recomputed[current] = max(counts.recomputed[current], recomputed)
        block = None

    def enter(i: int) -> Callable[..., None]:
        return lambda module, args: switch_to(i)

    def leave(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            counts.returns_tensor[i] &= isinstance(output, Tensor)
            leaves = [leaf for leaf in tree_leaves(output) if _is_float(leaf)]
            counts.output[i] += sum(leaf.numel() * leaf.itemsize for leaf in leaves)
            for leaf in leaves:
                if leaf.requires_grad:  # its gradient is ready just before the layer's backward pass begins
                    leaf.register_hook(lambda gradient: switch_to(i))

        return hook

    handles: list[Any] = []
    for i, (_, layer) in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(enter(i)))
        handles.append(layer.register_forward_hook(leave(i)))
    for module, policy in blocks:
        handles.append(module.register_forward_pre_hook(enter_block(policy), with_kwargs=True))
        handles.append(module.register_forward_hook(leave_block))
    autocast = torch.autocast("cpu", autocast_dtype) if autocast_dtype else nullcontext()
    selecting = _SelectedResults(lambda: block.policy if block is not None else None, select)
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _NO_FAKE_LOG.held(), mode, traffic, work, saving:
            with autocast, selecting:
                output = _call(model, inputs)
                if output_dtype is not None:
                    output = tree_map_only(Tensor, lambda x: x.to(output_dtype) if _is_float(x) else x, output)
                scalar = loss_fn(output) if loss_fn is not None else _sum(output)
            scalar.backward()
            switch_to(0)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return counts


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _sum(output: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(output) if _is_float(leaf) and leaf.requires_grad]
    if not leaves:
        raise ShapeError("the model's output depends on no trainable parameter: there is nothing to plan")
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _used_bytes(tensor: Tensor) -> int:
    # An expanded tensor counts with the memory of its storage.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def storage(tensor: Tensor) -> int:
    """Return a number that tensors share if they share their memory."""
    return storage_key(untracked_shard(tensor))


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _stored_bytes(tensor: Tensor) -> int:
    return untracked_shard(tensor).untyped_storage().nbytes()
