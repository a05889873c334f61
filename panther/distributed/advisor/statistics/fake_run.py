"""Run a model on fake tensors, and count its flops, the bytes that autograd saves, and its traffic over the tp axis.

:func:`tensor_parallel` shards a copy of the model on the meta device over torch's fake process group. The copy then
runs forward and backward on torch's fake tensors, which need no memory, so that the operations of the real code are
counted.
"""

__all__ = ["Policy", "Run", "Work", "WorkCounter", "fake_inputs", "fake_mesh", "make_fake_", "meta_copy", "run"]

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from panther._torch import (
    COLLECTIVE_NAMESPACES,
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
    without_fake_log,
)
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.comm.traffic import CommunicationCounter
from panther.errors import DistributedError, ShapeError

Policy = Callable[..., CheckpointPolicy]
"""The policy of selective activation checkpointing, which is given an operation and its arguments."""

_GROUPS = itertools.count()
_MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
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


class Work(NamedTuple):
    """A product: its flops, the bytes that it reads and writes, and, for matrices, its three sizes."""

    flops: int
    moved: int
    sizes: tuple[int, ...]


class WorkCounter(FlopCounterMode):
    """Count the work of the operations that run within the block, except for views and collectives."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.flops, self.moved = 0, 0
        """Flops, and the bytes that operations other than products move, since the beginning."""
        self._products: list[Work] = []
        self._largest: list[int] = []

    def take(self) -> tuple[list[Work], list[int]]:
        """Return the products since the last call, and the bytes of the largest tensor that each operation made."""
        work = self._products, self._largest
        self._products, self._largest = [], []
        return work

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # This method is private, but no public one sees each operation once, after composite operations are decomposed.
        if func_packet in self.flop_registry:
            flops = self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            self.flops += flops
            inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
            sizes: tuple[int, ...] = ()
            if func_packet in _MATRIX_PRODUCTS:
                a, b = inputs[-2:]  # the first input of addmm and baddbmm is the addend
                sizes = (*a.shape[-2:], b.shape[-1])
            self._products.append(Work(flops, sum(map(_used_bytes, inputs + outputs)), sizes))
            self._largest.append(max(map(_used_bytes, outputs)))
            return out
        # A name such as "aten::add"; collectives are counted as traffic.
        if operator_name(func_packet).partition("::")[0] in COLLECTIVE_NAMESPACES:
            return out
        outputs, inputs = tensors_in(out), tensors_in((args, kwargs))
        stored = {storage_key(tensor) for tensor in inputs}
        in_place = func_packet.__name__.endswith("_")
        if outputs and (in_place or any(storage_key(tensor) not in stored for tensor in outputs)):
            read = outputs if func_packet in _ROWS_ONLY else inputs
            self.moved += sum(map(_used_bytes, (*read, *outputs)))
            self._largest.append(max(map(_used_bytes, outputs)))
        return out


class Run:
    """Counts of a forward and backward pass, by layers of the model."""

    def __init__(self, batch: int, layers: int) -> None:
        self.batch = batch
        self.activations, self.output = np.zeros((2, layers), dtype=np.int64)
        """Bytes that autograd saves in each layer, without parameters and buffers; bytes of each layer's output."""
        self.sums = np.zeros((6, layers), dtype=np.int64)
        self.flops, self.moved, self.tp_bytes, self.tp_calls, self.tp_gathered, self.tp_gathers = self.sums
        """Flops of products; bytes that other operations read and write; bytes and calls of collectives over the tp
        axis; bytes and calls of the collectives that gather."""
        self.saves_input = [False] * layers
        self.products: list[list[Work]] = [[] for _ in range(layers)]
        """The products, in the order in which they run."""
        self.largest: list[list[int]] = [[] for _ in range(layers)]
        """Bytes of the largest tensor that each operation makes."""
        self.returns_tensor = [True] * layers
        """Whether each layer returns one tensor."""
        self.kept_bytes = np.zeros(layers, dtype=np.int64)
        """Bytes that are saved outside of blocks, enter a block, or are saved selectively in it."""
        self.keeps_input = [False] * layers
        self.recomputed: list[list[int]] = [[] for _ in range(layers)]
        """For each block in a layer, the bytes that its backward pass holds in addition to the kept ones."""


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
    activation checkpointing would recompute, each with the policy of selectively saved tensors; this run recomputes
    nothing.
    """
    counts = Run(batch, len(layers))
    weights = {storage(tensor) for _, _, tensor in _places_of_tensors(model)}
    saved: dict[int, Tensor] = {}
    inputs_of, current = [-1] * len(layers), 0
    entered: list[Tensor] = []
    work, traffic = WorkCounter(), CommunicationCounter()
    previous_sums = np.zeros(len(counts.sums), dtype=np.int64)
    regions = Regions(counts, weights, lambda: (current, inputs_of[current]))

    def switch_to(layer: int) -> None:
        """Add the counts since the last switch to the current layer, and make ``layer`` the current one."""
        nonlocal current, previous_sums
        products, largest = work.take()
        counts.products[current] += products
        counts.largest[current] += largest
        gathered, gathers = (
            sum(count for name, count in per_operation.items() if "gather" in name)
            for per_operation in (traffic.bytes_by_operation, traffic.calls_by_operation)
        )
        sums = np.array([work.flops, work.moved, traffic.bytes, traffic.calls, gathered, gathers])
        counts.sums[:, current] += sums - previous_sums
        current, previous_sums = layer, sums

    def pack(tensor: Tensor) -> Tensor:
        key = storage(tensor)
        # A tensor that more than one operation saves counts once.
        if key not in weights and key not in saved:
            saved[key] = tensor  # keeps it alive, so that no other storage gets its address
            counts.activations[current] += _stored_bytes(tensor)
            counts.saves_input[current] |= key == inputs_of[current]
        regions.save(tensor)
        return tensor

    def enter(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            switch_to(i)
            input_tensors = tensors_in((args, kwargs))
            inputs_of[i] = storage(input_tensors[0]) if input_tensors else -1
            entered.extend(input_tensors[:1])  # the reference keeps other storages from getting the same address

        return hook

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
        handles.append(layer.register_forward_pre_hook(enter(i), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave(i)))
    handles += [handle for block, policy in blocks for handle in regions.watch(block, policy)]
    autocast = torch.autocast("cpu", autocast_dtype) if autocast_dtype else nullcontext()
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with without_fake_log(), mode, traffic, work, saving:
            with autocast, regions:
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


class Regions(TorchDispatchMode):
    """Count the bytes of blocks that activation checkpointing would keep, and the bytes that it would recompute.

    Args:
        counts: Its ``kept_bytes``, ``keeps_input`` and ``recomputed`` are filled.
        weights: Storages of parameters and buffers, which do not count.
        place: A function that returns the layer that runs, and the storage of its input.
    """

    def __init__(self, counts: Run, weights: set[int], place: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self._counts, self._weights, self._place = counts, weights, place
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
                recomputed = (tensor for key, tensor in block_record.saved.items() if key not in counted_keys)
                recomputed_bytes = sum(map(_stored_bytes, recomputed)) - block_record.selected_bytes
                self._counts.recomputed[self._place()[0]].append(max(0, recomputed_bytes))

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    def save(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves."""
        if self._block is None:
            self._keep(tensor)
        else:
            self._block.saved[storage(tensor)] = tensor
            # Backward uses the tensors that were selected so far, and recomputes only up to the last saved tensor.
            self._block.selected_bytes = sum(map(_stored_bytes, self._block.selected.values()))

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
            self._counts.kept_bytes[layer] += _stored_bytes(tensor)
            self._counts.keeps_input[layer] |= key == input_storage


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


def _stored_bytes(tensor: Tensor) -> int:
    return untracked_shard(tensor).untyped_storage().nbytes()
