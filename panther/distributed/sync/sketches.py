"""Keep the sketches of all ranks equal by sending one seed per layer."""

__all__ = [
    "describe_layer", "describe_source", "drawing_modules", "send_sketches", "sketch_ids", "sketched_layers",
    "sync_sketches", "verify_sketches",
]  # fmt: skip

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed.comm.agreement import LAYER, agree
from panther.distributed.comm.ranks import is_fake, ranks_of, transport
from panther.errors import DistributedError
from panther.files.tensors import contents_checksum
from panther.nn import RandMultiHeadAttention, sinSRPE
from panther.nn.base import SketchedModule

_FITTED = -1


def sync_sketches(model: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the sketches of rank ``src``. Every rank of the group must call it.

    Seeded layers get the seed of ``src`` and draw their sketches from it; fitted sketches are sent in full. Attention
    by random features, and :class:`~panther.nn.sinSRPE`, get the seed and the number of draws of ``src``. Other
    parameters and buffers are not sent; :func:`data_parallel` sends them.

    Args:
        model: The model, built in the same way on every rank.
        src: Global rank whose sketches are sent.
        group: Process group; None is the world.

    Raises:
        SketchMismatchError: On every rank, if models differ in names, shapes, modes or num_terms of their sketched
            layers or in ``src``, ``src`` is not in the group, or its ``sketch_seed`` is damaged. The error names layers
            and ranks, and nothing is changed.
        DistributedError: If there is no process group.

    Cost: a gather of 16 bytes per rank, a broadcast of 8 bytes per seeded layer, and the bytes of fitted sketches.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sync_sketches(pr.nn.SKLinear(256, 256, 4))
        >>> pr.distributed.shutdown()
    """
    fix = "build the same model on every rank, and pass the same src"
    agree("sync_sketches", lambda: describe_source(model, src, group), group, fix)
    send_sketches(model, src, group)


def verify_sketches(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank has the same sketches. Every rank of the group must call it.

    A ``sketch_seed`` that was changed in place, for example by a broadcast of buffers, takes effect first. Sketches of
    fitted layers are compared by a checksum.

    Args:
        model: The model, wrapped or not.
        group: Process group; None is the world.

    Raises:
        SketchMismatchError: On every rank, if anything differs; layers, ranks and values are named.
        DistributedError: If there is no process group.

    Cost: a gather of 16 bytes per rank, and a pass over fitted sketches.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> verify_sketches(pr.nn.SKLinear(256, 256, 4))
        >>> pr.distributed.shutdown()
    """

    def describe() -> dict[str, str]:
        described = {}
        for name, layer in sketched_layers(model).items():
            layer.check_record()
            contents = f"seed {layer.seed}"
            if layer.is_fitted:
                sketches = [getattr(layer, key).detach() for key in layer.sketch_names]
                full = [sketch.full_tensor() if isinstance(sketch, DTensor) else sketch for sketch in sketches]
                contents = f"contents {' '.join(f'{contents_checksum(sketch):x}' for sketch in full)}"
            described[f"{LAYER}{name!r}"] = f"{describe_layer(layer)}, {contents}"
        return described

    agree("verify_sketches", describe, group, "call sync_sketches(model) on every rank before training")


def describe_source(
    model: nn.Module, src: int, group: dist.ProcessGroup | None, *, empty_too: bool = False
) -> dict[str, str]:
    """Return a description of the sketched layers, which must be equal on all ranks before sketches are sent.

    With ``empty_too``, fitted layers on the meta device are allowed, which have no sketches to send yet.
    """
    ranks, layers = ranks_of(group), sketched_layers(model)
    if src not in ranks:
        raise DistributedError(f"src={src} must be a global rank of the group, one of {ranks}")
    if dist.get_rank() == src:  # only here, because the seeds of other ranks will be replaced
        for layer in layers.values():
            layer.check_record()
    if not (empty_too or is_fake(group)) and any(
        layer.is_fitted and layer.sketch_like().is_meta for layer in layers.values()
    ):
        raise DistributedError("a fitted layer is on the meta device and has no sketches to send: load it first")
    sketched = {f"{LAYER}{name!r}": describe_layer(layer) for name, layer in layers.items()}
    drawing = {f"{LAYER}{name!r}": type(module).__name__ for name, module in drawing_modules(model).items()}
    return sketched | drawing | {"src": str(src)}


def drawing_modules(model: nn.Module) -> dict[str, RandMultiHeadAttention | sinSRPE]:
    """Return the modules that draw random numbers during training, from their seed and a count of draws."""
    return {name: m for name, m in model.named_modules() if isinstance(m, RandMultiHeadAttention | sinSRPE)}


def send_sketches(model: nn.Module, src: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast seeds, counts of draws and fitted sketches of ``src``, after the ranks have compared their models."""
    if is_fake(group):
        return
    device = transport(group)
    for module in drawing_modules(model).values():
        state = module.get_extra_state().to(device)
        dist.broadcast(state, src, group=group)
        module.set_extra_state(state.cpu())
    layers = sketched_layers(model)
    if not layers:
        return
    seeds = [_FITTED if layer.seed is None else layer.seed for layer in layers.values()]
    # All seeds are in one message, and fitted sketches follow in full.
    packed = torch.tensor(seeds, dtype=torch.int64, device=device)
    dist.broadcast(packed, src, group=group)
    for layer, seed in zip(layers.values(), packed.tolist(), strict=True):
        if seed == _FITTED:
            for name in layer.sketch_names:
                sketch = getattr(layer, name).detach()
                if sketch.is_meta:
                    continue
                sketch = sketch.to_local() if isinstance(sketch, DTensor) else sketch
                message = sketch.to(device).contiguous()
                dist.broadcast(message, src, group=group)
                sketch.copy_(message)
        else:
            layer.set_seeded_(seed)


def sketched_layers(model: nn.Module) -> dict[str, SketchedModule]:
    """Return the sketched layers by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, not {model!r}")
    return {name: module for name, module in model.named_modules() if isinstance(module, SketchedModule)}


def sketch_ids(model: nn.Module) -> set[int]:
    """Return the ids of the tensors that are sketches or mirror their seeds."""
    layers = sketched_layers(model).values()
    return {id(getattr(layer, name)) for layer in layers for name in (*layer.sketch_names, "sketch_seed")}


def describe_layer(layer: SketchedModule) -> str:
    """Describe the properties of a layer that must be equal on all ranks before its sketches are sent."""
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in layer.sketch_shapes().items())
    mode = layer.record_mode
    kind, dtype = type(layer).__name__, layer.sketch_like().dtype
    return f"{mode} {kind} in {dtype} with num_terms={layer.num_terms}, {shapes}"
