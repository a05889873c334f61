"""Data parallelism: every rank has its own samples, and gradients are averaged.

``"ddp"`` is torch's DistributedDataParallel, which replicates the model. ``"fsdp"`` is torch's FSDP2
(``fully_shard``), which shards it over the ranks, and gathers it block by block when it is needed. ``"replicate"`` is
FSDP2 with shards of size one: it replicates the model, and supports tensor parallelism, which DDP does not.
"""

__all__ = [
    "DATA_PARALLEL_MODELS", "STRATEGIES", "compute_dtype", "data_parallel", "fsdp_blocks", "has_no_forward",
    "no_sync", "own_outputs_",
]  # fmt: skip

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from panther._hints import value_hint
from panther._torch import Alias, base_of_view, ignore_in_ddp, ignored_in_ddp, parameters_of, tree_leaves, tree_map_only
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.mesh import groups_of
from panther.distributed.comm.ranks import mesh_of_group, ranks_of, split_axis, transport
from panther.distributed.data.comm_hooks import check_hook, register_hook, register_replica_hook
from panther.distributed.sync.replicas import built, check_same_model, send_model, warn_of_pickled_shards
from panther.distributed.sync.sketches import send_sketches, sketch_ids
from panther.errors import DistributedError, ShapeError
from panther.nn.quantized.state import QuantizedState


def has_no_forward(module: nn.Module) -> bool:
    """Return whether a module is only a container without a forward, so that FSDP would never gather its parameters."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def fsdp_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children of ModuleLists and Sequentials, except for children that share a parameter with a module.

    A parameter in two blocks would be sharded twice; the root unit holds it instead.
    """
    blocks = list(dict.fromkeys(_candidates(model)))
    users = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    inside = {module for block in blocks for module in block.modules()}
    outside = {p for module in model.modules() if module not in inside for p in parameters_of(module).values()}
    shared = {parameter for parameter, count in users.items() if count > 1} | outside
    return [block for block in blocks if not shared.intersection(block.parameters())]


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    # A list without a forward cannot be a block, because FSDP gathers a block when its forward begins.
    stack = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) or has_no_forward(child) or not stack:
            yield from _candidates(child)
        elif any(True for _ in child.parameters()):
            yield child


def own_outputs_(module: nn.Module) -> None:
    """Let a module return no views that need a gradient. Call it before ``fully_shard``, whose hooks must come later.

    FSDP2 gathers the parameters for the backward pass by a hook on the module's output. An operation in place on a view
    (``y += x``) replaces the view's node in the graph, and so removes the hook, without an error. Here the output
    becomes a separate tensor on the same memory; only views of an input, a parameter or another output's memory are
    copied.
    """
    module.register_forward_hook(_own_outputs, with_kwargs=True)


def _own_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(_is_trained_view(leaf) for leaf in outputs):
        return None
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Count the inputs and outputs that share a memory.
    bases = [_base(leaf) for leaf in (*inputs, *outputs)]
    uses = Counter(map(id, bases))

    def own(leaf: Tensor) -> Tensor:
        if not _is_trained_view(leaf):
            return leaf
        is_only_use = uses[id(_base(leaf))] == 1 and not _base(leaf).is_leaf
        return Alias.apply(leaf) if is_only_use else leaf.clone()

    return tree_map_only(Tensor, own, output)


def _base(leaf: Tensor) -> Tensor:
    base = base_of_view(leaf)
    return leaf if base is None else base


def _is_trained_view(leaf: Tensor) -> bool:
    return leaf.requires_grad and base_of_view(leaf) is not None


STRATEGIES = ("ddp", "fsdp", "replicate")
_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def data_parallel(
    model: nn.Module | Callable[[], nn.Module],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    strategy: str = "ddp",
    *,
    comm_hook: str | None = None,
    powersgd_rank: int | None = None,
    powersgd_start_step: int | None = None,
    sketch_fraction: float | None = None,
    mixed_precision: str | None = None,
    cpu_offload: bool = False,
    **options: Any,
) -> Any:
    """Prepare a model for data-parallel training. Every rank must call it.

    Sketches are synchronised in this call, by one seed per layer, and not sent again; torch's DDP would broadcast them
    in every forward with the other buffers. Other buffers, such as BatchNorm's, are broadcast by DDP; FSDP does not
    synchronise them.

    Args:
        model: The model, built in the same way on every rank, on its device. Weights and seeds may differ; the first
            rank's are used. Load a fitted checkpoint before this call, because DDP and FSDP collect the parameters
            here, and make the optimizer afterwards. Strategies other than ``"ddp"`` also take a model on the meta
            device, or a function that builds one, which is called with ``torch.device("meta")``: the model is sharded
            without values, and :func:`materialize_` fills it.
        mesh: One-dimensional DeviceMesh, or a process group; None is the world. ``"fsdp"`` also takes a mesh of two
            axes, ``mesh["replicate", "dp"]``: the model is sharded along the second and replicated along the first
            (HSDP).
        strategy: ``"ddp"``, ``"fsdp"`` or ``"replicate"``. The last two change the model in place; its blocks, the
            children of ModuleLists and Sequentials, are sharded one by one.
        comm_hook: The compression of gradients, for ``"ddp"`` between all ranks, and for ``"fsdp"`` with a mesh of two
            axes between the replicas: ``"fp16"``, ``"bf16"``, ``"powersgd"`` (low rank, after uncompressed steps, of
            shards between replicas; Vogels and others 2019, arXiv:1905.13727), or ``"sketch"`` (sums of a few entries
            with random signs, new in every step, decoded without a bias). None sends them uncompressed. Checkpoints of
            a :class:`panther.train.Trainer` contain the state of PowerSGD and sketches; in a loop of your own,
            :func:`panther.distributed.checkpoint.save` does not save it.
        powersgd_rank: Rank to which each gradient is approximated; 4 if None. PowerSGD does not follow a loss scale.
        powersgd_start_step: Number of uncompressed steps at the start, at least 2; 10 if None.
        sketch_fraction: For ``"sketch"``, the number of sums that are sent for each entry; 0.1 if None.
        mixed_precision: For ``"fsdp"`` and ``"replicate"``, the dtype of the computation, ``"bf16"`` or ``"fp16"``;
            parameters, sums of gradients and the output stay float32.
        cpu_offload: For ``"fsdp"``, whether parameters, gradients and optimizer states are kept in the CPU's memory.
        **options: For :class:`torch.nn.parallel.DistributedDataParallel`, such as ``find_unused_parameters=True``, or
            for :func:`torch.distributed.fsdp.fully_shard`, such as ``reshard_after_forward``.

    Returns:
        With ``"ddp"``, the wrapped model, whose attribute ``module`` is the original; otherwise the model itself.

    Raises:
        ValueError: If ``strategy``, ``comm_hook`` or ``mixed_precision`` is unknown, an option belongs to a different
            strategy, no parameter of the model can be trained, or FSDP would shard a list of modules that has no
            forward.
        TypeError: If the model or the mesh has a different type.
        ShapeError: If ``mesh`` has too many axes, or a parameter that FSDP would shard has no dimension.
        SketchMismatchError: On every rank, if sketched layers differ between ranks.
        DistributedError: On every rank, if models, arguments or versions of the libraries differ between ranks, or a
            rank has ended or does not answer in time; if there is no process group, or the mesh's was destroyed; if the
            model is wrapped or sharded already; or if tensor parallelism has sharded layers and the strategy is
            ``"ddp"``, which loses their parameters.

    Cost: a broadcast of the model here. A step sends the gradients of the trained factors once with ``"ddp"`` and
    ``"replicate"``; ``"fsdp"`` gathers the factors twice and scatters the gradients.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> model = data_parallel(pr.nn.SKLinear(256, 256, 4))
        >>> model(torch.randn(8, 256)).shape
        torch.Size([8, 256])
        >>> pr.distributed.shutdown()
    """
    model = built(model)
    hook_settings: dict[str, Any] = {
        "powersgd_rank": powersgd_rank,
        "powersgd_start_step": powersgd_start_step,
        "sketch_fraction": sketch_fraction,
    }

    def settings() -> dict[str, Any]:
        check_hook(comm_hook, hook_settings)
        _check_options(mesh, strategy, comm_hook, mixed_precision, cpu_offload)
        check_model(model, strategy)
        axes = (mesh.mesh_dim_names, tuple(mesh.shape)) if isinstance(mesh, DeviceMesh) else None
        arguments = {"mesh": axes, "strategy": strategy, "comm_hook": comm_hook, "mixed_precision": mixed_precision}
        return {**arguments, **hook_settings, "cpu_offload": cpu_offload, **options}

    # new_group returns a number on ranks that are not in the group; ranks_of raises an error for it.
    if not (
        mesh is None or isinstance(mesh, DeviceMesh | dist.ProcessGroup) or mesh == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise TypeError(f"data_parallel takes a DeviceMesh, a process group or None, not {mesh!r}")
    groups = groups_of(mesh) if isinstance(mesh, DeviceMesh) else [mesh]
    # All axes are compared before anything is sent, because a rank that raises must not leave ranks in a broadcast.
    for group in groups:
        check_same_model(model, group, "data_parallel", settings)
    if strategy == "ddp":
        send_sketches(model, ranks_of(groups[0])[0], groups[0])  # sends seeds; DDP broadcasts all other tensors
        parallel = wrap_in_ddp(model, groups[0], **options)
        if comm_hook is not None:
            register_hook(parallel, comm_hook, hook_settings)
        DATA_PARALLEL_MODELS.add(parallel)
        return parallel
    if not isinstance(mesh, DeviceMesh):
        mesh = mesh_of_group(mesh or dist.group.WORLD, transport(mesh).type, "dp")  # type: ignore[arg-type]
    for axis in range(mesh.ndim):  # along the axes one after the other, so that all ranks get the first rank's tensors
        send_model(model, mesh.get_group(axis), "data_parallel")
    if comm_hook is None:
        fully_shard_(model, mesh, strategy, mixed_precision, cpu_offload, **options)
    else:
        fully_shard_(model, shard_axis(mesh), strategy, mixed_precision, cpu_offload, **options)
        register_replica_hook(model, comm_hook, hook_settings, mesh)
    DATA_PARALLEL_MODELS.add(model)
    return model


def fully_shard_(
    model: nn.Module,
    mesh: DeviceMesh,
    strategy: str,
    mixed_precision: str | None = None,
    cpu_offload: bool = False,
    *,
    one_block: bool = False,
    **options: Any,
) -> Any:
    """Apply ``"fsdp"`` or ``"replicate"`` to a model that is equal on all ranks already; nothing is sent.

    With ``one_block``, the model is one unit: zero-bubble schedules compute wrong gradients for stages of several
    units. FSDP requires trained parameters of one dtype, so factors of scales are converted to the dtype of their
    layer.
    """
    for module in model.modules():
        if isinstance(module, QuantizedState):
            module.hold_scale_logs_(module.dtype)
    if strategy == "replicate":
        mesh = split_axis(mesh, ("replicate", "shard"))
    dtype = compute_dtype(mixed_precision)
    # Gradients are reduced in float32, because sums over many ranks lose small gradients in half precision.
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    place = partial(_placement, mesh.shape[-1])
    options = {"mesh": mesh, "offload_policy": offload, "shard_placement_fn": place, **options}
    for block in () if one_block else fsdp_blocks(model):
        own_outputs_(block)
        fully_shard(block, mp_policy=half, **options)
    own_outputs_(model)
    warn_of_pickled_shards()
    # Only the model's output is converted to float32; activations between blocks stay in the compute dtype.
    return fully_shard(model, mp_policy=replace(half, output_dtype=torch.float32 if dtype else None), **options)


def shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the second axis of a mesh of two axes; a model sharded along it leaves the sum over replicas to a hook.

    Along both axes, FSDP2 calls the hook after its own sum.
    """
    return mesh_of_group(mesh.get_group(1), mesh.device_type, "dp")


def _check_options(
    mesh: Any, strategy: str, comm_hook: str | None, mixed_precision: str | None, cpu_offload: bool
) -> None:
    if strategy not in STRATEGIES:
        hint = value_hint("strategy", strategy, STRATEGIES, "data_parallel")
        raise ValueError(f"strategy={strategy!r} is unknown: {hint}")
    has_replicas = strategy == "fsdp" and isinstance(mesh, DeviceMesh) and mesh.ndim == 2
    if comm_hook is not None and strategy != "ddp" and not has_replicas:
        raise ValueError(
            f"comm_hook={comm_hook!r} is for strategy='ddp', and for 'fsdp' with a mesh of two axes, "
            f"mesh['replicate', 'dp']: with {strategy!r} use mixed_precision"
        )
    compute_dtype(mixed_precision)
    if (mixed_precision is not None or cpu_offload) and strategy == "ddp":
        option = "cpu_offload" if cpu_offload else "mixed_precision"
        raise ValueError(f"{option} is for strategy='fsdp': with 'ddp' use torch.autocast, or ZeroRedundancyOptimizer")
    if cpu_offload and strategy == "replicate":
        raise ValueError("cpu_offload needs strategy='fsdp', because it moves shards to the CPU")
    most = 2 if strategy == "fsdp" else 1
    if isinstance(mesh, DeviceMesh) and mesh.ndim > most:
        raise ShapeError(
            f"strategy={strategy!r} takes a mesh of {'one axis' if most == 1 else 'one or two axes'}, and the mesh has "
            f"{mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}: pass mesh['dp']"
            + (", or mesh['replicate', 'dp']" if most == 2 else "")
        )


def compute_dtype(mixed_precision: str | None) -> torch.dtype | None:
    """Return the dtype of matrix products with ``mixed_precision``, or None without it."""
    if mixed_precision not in _DTYPES:
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown: use 'bf16', 'fp16' or None")
    return _DTYPES[mixed_precision]


def check_model(model: nn.Module, strategy: str) -> None:
    """Raise if a strategy does not support the model, before torch raises with a part of the model sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"data parallelism takes an nn.Module, not {model!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "data parallelism averages gradients, and no parameter of the model requires one: train it as it is"
        )
    if strategy == "ddp" and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model has tensors on the meta device, without values, and strategy='ddp' broadcasts values: call "
            "panther.distributed.materialize_(model) first, or use strategy='fsdp', and call it afterwards"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            state = "sharded" if isinstance(module, FSDPModule) else "wrapped by DistributedDataParallel"
            raise DistributedError(
                f"a model can be wrapped or sharded once, and {f'{name!r} in it' if name else 'this one'} is {state}: "
                "train it as it is, or build a new one"
            )
    if strategy == "ddp":
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise DistributedError(
                "layers of the model are sharded by tensor parallelism, and DistributedDataParallel loses their "
                "parameters after the first forward: use strategy='fsdp' or 'replicate' with mesh['dp']"
            )
        return
    if has_no_forward(model):
        raise ValueError(
            f"a model that is sharded must have a forward, in which its parameters are gathered, and a "
            f"{type(model).__name__} has none: pass the module whose forward uses it"
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ShapeError(
                f"parameters that are sharded must have a dimension, and {name!r} has the shape (): give it the shape "
                "(1,), or use strategy='ddp'"
            )


def _placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return ``Shard(1)`` for a matrix such as S2, (R, out), if its columns are a multiple of the ranks and R is not.

    None leaves FSDP's default, which shards the rows and would pad them. Columns are chosen only in this case, because
    gathering them needs one more copy.
    """
    if isinstance(parameter, DTensor) or parameter.dim() != 2:
        return None
    rows, columns = parameter.shape
    return Shard(1) if rows % ranks and columns % ranks == 0 else None


def wrap_in_ddp(model: nn.Module, group: dist.ProcessGroup | None, **options: Any) -> DistributedDataParallel:
    """Wrap a model whose sketches (with ``init_sync=False``, all tensors) are equal on all ranks already."""
    # Seeded sketches never change in training. Without this list, DDP would broadcast them in every forward.
    sketches = sketch_ids(model)
    fixed = [name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in sketches]
    device = next(model.parameters()).device
    users = ignored_in_ddp(model)
    ignore_in_ddp(model, [*users, *fixed])
    try:
        with watched("data_parallel", group):
            parallel = DistributedDataParallel(
                model, device_ids=[device] if device.type == "cuda" else None, process_group=group, **options
            )
    finally:  # DDP reads the list only at construction; a layer that is fitted later must not stay in it
        ignore_in_ddp(model, users)
    # Attributes are freed in the order in which they were set. If the reducer held the last reference to the group (in
    # a model that outlives shutdown()), it would destroy the group while it holds the GIL, and wait for gloo's threads,
    # which may need the GIL to end.
    parallel.process_group = parallel.__dict__.pop("process_group")
    return parallel


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
