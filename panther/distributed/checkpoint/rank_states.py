"""Values that may differ between ranks, such as states of callbacks, and that load in other layouts where possible.

Tensors that are equal on several ranks have one name, and are stored once. DTensors are stored like parameters.
"""

__all__ = ["encode_rank_states", "merge_rank_states", "rank_state_of", "target_of"]

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from panther.distributed.checkpoint import state as states
from panther.distributed.checkpoint.storage import empty, placed
from panther.distributed.comm.ranks import name_ranks
from panther.errors import CheckpointError
from panther.files.tensors import contents_checksum


def encode_rank_states(value: Any, parameters: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a value for JSON (``tree``), and by name the layouts and checksums of the DTensors in it.

    Its tensors are added to ``tensors``, under names that are equal on two ranks if the tensors are.
    """
    by_place: dict[str, Tensor] = {}
    tree = states.encode(value, "rank_states", by_place)
    names, layouts, shards = {}, {}, {}
    for place, tensor in by_place.items():
        offsets, local = placed(tensor)
        checksum = contents_checksum(local)
        name = f"{place}, {tensor.dtype}, {tuple(tensor.shape)}, "
        if isinstance(tensor, DTensor):
            layout = _layout(place, tensor, parameters)
            name += f"{tensor.placements} like {layout['like']}"
            layouts[name], shards[name] = layout, (offsets, checksum)
        else:
            name += str(checksum)
        names[place], tensors[name] = name, tensor
    tree = json.loads(json.dumps(tree), object_hook=lambda x: {"$tensor": names[x["$tensor"]]} if "$tensor" in x else x)
    return {"tree": tree, "layouts": layouts, "shards": shards}


def _layout(place: str, tensor: DTensor, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a parameter on the mesh of a DTensor, and the sharded dimensions unless the parameter has the same."""
    mesh, placements = tensor.device_mesh, tensor.placements
    on_mesh = {k: p for k, p in parameters.items() if isinstance(p, DTensor) and p.device_mesh == mesh}
    same = {name: parameter for name, parameter in on_mesh.items() if parameter.placements == placements}
    if not on_mesh or not (same or all(type(each) in (Shard, Replicate) for each in placements)):
        raise CheckpointError(
            f"{place} is a DTensor with the placements {placements} on {mesh}, which no parameter has: store its "
            "full_tensor() or its to_local()"
        )

    def likeness(name: str) -> tuple[int, bool]:  # a copy of a parameter is named like it, or has at least its shape
        is_named_like = states.plain(place).rstrip("'").endswith((f".{name}", f"'{name}"))
        return len(name) * is_named_like, parameters[name].shape == tensor.shape

    dims = None if same else [each.dim if isinstance(each, Shard) else None for each in placements]
    return {"like": max(same or on_mesh, key=likeness), "dims": dims, "ranks": mesh.size()}


def merge_rank_states(encoded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entries for what :func:`encode_rank_states` returned on all ranks: equal values once.

    A DTensor must be on all ranks of its mesh, and equal on ranks with the same shard.
    """
    layouts = {name: layout for values in encoded for name, layout in values["layouts"].items()}
    for name, layout in layouts.items():
        shards = {rank: values["shards"][name] for rank, values in enumerate(encoded) if name in values["shards"]}
        first = dict(reversed(shards.values()))
        if len(shards) % layout["ranks"] or any(first[offsets] != checksum for offsets, checksum in shards.values()):
            raise CheckpointError(
                f"{name}, is a DTensor on {layout['ranks']} ranks, and only {name_ranks(list(shards))} store it, or "
                "their replicas differ: store it on all of its ranks, or store its to_local()"
            )
    trees = [values["tree"] for values in encoded]
    # As text, because NaN is not equal to NaN, and the keys may be in a different order.
    are_equal = len({json.dumps(tree, sort_keys=True) for tree in trees}) == 1
    return {"rank_states": trees[:1] if are_equal else trees, "layouts": layouts}


def rank_state_of(trees: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return the encoded value of a rank, given the values of all ranks that saved, or one if they were equal.

    On another number of ranks, values are divided only if all ranks after the first had nothing in place of what the
    first rank had, such as the state of a tracker; otherwise a CheckpointError has the keys.
    """
    if len(trees) in (1, world_size):
        return trees[rank % len(trees)]
    names: dict[str, Any] = {place: place for tree in trees for place in states.places(tree)}
    first, *later = (_leaves(states.decode(tree, names)) for tree in trees)
    if all(leaves == later[0] for leaves in later) and all(
        leaf in ("None", "''", "{}", "[]", "()") or first.get(key) == leaf for key, leaf in later[0].items()
    ):
        return trees[min(rank, 1)]
    key = next((key for leaves in later for key in first | leaves if leaves.get(key) != first.get(key)), "a container")
    raise CheckpointError(
        f"{key} differs between the {len(trees)} ranks that saved it, and cannot be divided among {world_size} ranks: "
        f"continue on {len(trees)} ranks, or save values that are equal on all ranks, or DTensors"
    )


def _leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return the values in nested containers as text, by their keys joined with dots."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    leaves = {name: leaf for k, item in items for name, leaf in _leaves(item, f"{key}.{k}".lstrip(".")).items()}
    return leaves or {key: repr(value)}


def target_of(entry: Mapping[str, Any], layout: Mapping[str, Any] | None, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return an uninitialised tensor for a saved one; a DTensor gets the present layout of its parameter."""
    parameter = parameters.get(layout["like"]) if layout else None
    if layout is None or not isinstance(parameter, DTensor):
        return empty(entry)
    dims, dtype, mesh = layout["dims"], getattr(torch, entry["dtype"]), parameter.device_mesh
    if dims is None and list(parameter.shape) == entry["shape"]:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # A tensor whose dimensions do not suit is replicated.
    placements = parameter.placements if dims is None else [Replicate() if k is None else Shard(k) for k in dims]
    if len(placements) != mesh.ndim or any(getattr(each, "dim", 0) >= len(entry["shape"]) for each in placements):
        placements = [Replicate()] * mesh.ndim
    return empty_dtensor(entry["shape"], dtype=dtype, device_mesh=mesh, placements=placements)
