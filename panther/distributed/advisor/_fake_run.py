"""What one rank holds, computes, keeps and sends of a model, measured on tensors without values.

A copy of the model on the meta device is cut by :func:`tensor_parallel` itself, over a process group that sends
nothing, and then runs forward and backward on torch's fake tensors. That costs no memory, and shows what autograd
keeps.
"""

__all__ = ["Run", "fake_inputs", "make_fake_", "meta_copy", "pretended_mesh", "run"]

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from panther.distributed.comm._ranks import in_process_group
from panther.distributed.comm.traffic import CommunicationCounter
from panther.errors import DistributedError, ShapeError

_GROUPS = itertools.count()


@contextmanager
def pretended_mesh(ranks: int) -> Iterator[DeviceMesh]:
    """A tp axis of so many ranks, of which this process is the first, and on which nothing is sent.

    Whatever process group there is stays as it is.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    alone = not in_process_group()
    if alone:
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    members = list(range(dist.get_rank(), dist.get_rank() + ranks))
    name = f"panther_plan_{next(_GROUPS)}"
    group, _ = distributed_c10d._new_process_group_helper(
        ranks,
        0,
        members,
        "fake",
        FakeStore(),
        distributed_c10d.GroupName(name),
        timeout=timedelta(minutes=1),
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    try:
        # By a name of its own: DTensor keeps what it found for a mesh, and takes equal ones for the same.
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group(group)
        if alone:
            dist.destroy_process_group()


def meta_copy(model: nn.Module) -> nn.Module:
    """The model on the meta device, in training mode; no weight is copied.

    Raises:
        DistributedError: If layers are cut or sharded already.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, DTensor):
                raise DistributedError("layers of the model are cut over ranks already: plan for the model as it was")
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                trained = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if trained else made
    return copy.deepcopy(model, memo).train()


def make_fake_(model: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype | None) -> None:
    """Give a model fake tensors for its own, shared where they are, parameters in the dtype to compute in."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, compute_dtype)
        return made[id(tensor)]

    with mode:
        for module in model.modules():
            places: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for place in places:
                for name, tensor in list(place.items()):
                    if isinstance(tensor, Tensor):
                        place[name] = fake(tensor)


def _fake(tensor: Tensor, compute_dtype: torch.dtype | None) -> Tensor:
    parameter = isinstance(tensor, nn.Parameter)
    dtype = compute_dtype if compute_dtype and parameter and tensor.is_floating_point() else tensor.dtype
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    made = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device="cpu")
    if isinstance(tensor, DTensor):
        made = DTensor.from_local(
            made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if parameter else made


def fake_inputs(sample: Any, times: int, mode: FakeTensorMode, compute_dtype: torch.dtype | None) -> tuple[Any, int]:
    """The sample input with ``times`` its batch, and that batch: the first size of its first tensor."""
    tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise ShapeError("sample_input holds no tensor with a batch: give a batch of samples as the model reads them")
    batch = len(tensors[0])

    def grown(tensor: Tensor) -> Tensor:
        per_sample = tensor.dim() > 0 and tensor.shape[0] == batch
        shape = (times * batch, *tensor.shape[1:]) if per_sample else tensor.shape
        dtype = compute_dtype if compute_dtype and tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="cpu")

    with mode:
        return tree_map_only(Tensor, grown, sample), times * batch


class Run:
    """What a forward and backward pass did, by elements of the model."""

    def __init__(self, batch: int, elements: int) -> None:
        self.batch = batch
        self.flops, self.backward_flops = [0] * elements, [0] * elements
        self.kept = [0] * elements
        """Bytes that autograd first keeps in the element, parameters and buffers left out."""
        self.keeps_input = [False] * elements
        self.output = [0] * elements
        self.sent, self.backward_sent = [0] * elements, [0] * elements
        """Bytes handed to the tp axis."""
        self.calls, self.backward_calls = [0] * elements, [0] * elements


def run(
    model: nn.Module,
    elements: list[tuple[str, nn.Module]],
    inputs: Any,
    batch: int,
    loss_fn: Callable[[Any], Tensor] | None,
    mode: FakeTensorMode,
) -> Run:
    """Run a fake model forward and backward, and record."""
    n = len(elements)
    done = Run(batch, n)
    held = (*model.parameters(), *model.buffers(), *(v for m in model.modules() for v in vars(m).values()))
    weights = {_storage(tensor) for tensor in held if isinstance(tensor, Tensor)}
    seen: dict[int, Tensor] = {}
    inputs_of, current, before = [-1] * n, 0, (0, 0, 0)
    flops, traffic = FlopCounterMode(display=False), CommunicationCounter()

    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in weights and key not in seen:
            seen[key] = tensor  # held, so that no other storage gets its address
            done.kept[current] += _local(tensor).untyped_storage().nbytes()
            done.keeps_input[current] |= key == inputs_of[current]
        return tensor

    def enter(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal current
            current = i
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            inputs_of[i] = _storage(given[0]) if given else -1
            done.flops[i] -= flops.get_total_flops()
            done.sent[i] -= traffic.bytes
            done.calls[i] -= traffic.calls

        return hook

    def leave(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            done.flops[i] += flops.get_total_flops()
            done.sent[i] += traffic.bytes
            done.calls[i] += traffic.calls
            made = [leaf for leaf in tree_leaves(output) if _is_float(leaf)]
            done.output[i] += sum(leaf.numel() * leaf.itemsize for leaf in made)
            for leaf in made:
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient: backward_enters(i))

        return hook

    def backward_enters(i: int) -> None:
        """What backward did until now was of the element that it was in."""
        nonlocal current, before
        now = flops.get_total_flops(), traffic.bytes, traffic.calls
        counts = (done.backward_flops, done.backward_sent, done.backward_calls)
        for count, new, old in zip(counts, now, before, strict=True):
            count[current] += new - old
        current, before = i, now

    handles: list[Any] = []
    for i, (_, element) in enumerate(elements):
        handles.append(element.register_forward_pre_hook(enter(i), with_kwargs=True))
        handles.append(element.register_forward_hook(leave(i)))
    try:
        with (
            mode,
            flops,
            traffic,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            output = _call(model, inputs)
            scalar = loss_fn(output) if loss_fn is not None else _sum(output)
            before = flops.get_total_flops(), traffic.bytes, traffic.calls
            scalar.backward()
            backward_enters(0)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return done


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _sum(output: Any) -> Tensor:
    made = [leaf for leaf in tree_leaves(output) if _is_float(leaf) and leaf.requires_grad]
    if not made:
        raise ShapeError("the model's output depends on no parameter that is trained: there is nothing to plan")
    return torch.stack([leaf.sum() for leaf in made]).sum()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata
