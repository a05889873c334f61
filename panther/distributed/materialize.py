"""Give a model on the meta device its values, shard by shard: no rank ever holds the whole."""

__all__ = ["materialize_"]

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from panther.distributed.checkpoint._folders import checkpoints
from panther.distributed.checkpoint._load import load
from panther.distributed.checkpoint._storage import MANIFEST
from panther.distributed.comm._agreement import run_on_all_ranks
from panther.distributed.comm.mesh import get_distributed_info
from panther.distributed.sync.sketches import sketch_ids
from panther.distributed.tensor._plan import shared_parameters, tie_
from panther.errors import CheckpointError
from panther.nn._sketched import CompressedModule


def materialize_(
    model: nn.Module,
    weights: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Allocate and fill a model on the meta device, in place. Every rank must call it.

    Shard the model first: ``data_parallel(model, strategy="fsdp")`` takes one without values. A rank then allocates its
    shards alone. From ``weights`` it reads the slices that it needs. Without, every module draws its values by its own
    ``reset_parameters`` (or the model's ``_init_weights``, as those of transformers) from a generator that is seeded by
    ``seed`` and the module's name: the same numbers in every layout and on one process. A rank holds one module whole
    at a time, on the CPU.

    Args:
        model: With all parameters on the meta device, sharded or not.
        weights: A folder of safetensors (one file or several), as transformers and :func:`panther.save_compressed`
            write it, a checkpoint of ``torch.distributed.checkpoint``, or one of Panther's. None draws new values.
        seed: Of the values that are drawn.
        device: Where to allocate; None is the device of this rank, :func:`get_distributed_info`.

    Returns:
        The model.

    Raises:
        ValueError: If a parameter has values already, or a module has parameters or buffers and no way to draw them.
        CheckpointError: If the folder does not hold the model's tensors, all of them and no others, in their shapes.

    Cost: the bytes of this rank's shards, read or drawn; drawing takes every rank the time of the whole model.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> materialize_(model, seed=1)[2].weight.shape
        torch.Size([2, 3])
    """
    target = get_distributed_info().device if device is None else torch.device(device)
    drawn = [(name, module) for name, module in model.named_modules() if weights is None or _is_unsaved(module)]
    _check(model, drawn)
    read = None if weights is None else run_on_all_ranks(lambda: _reading(model, Path(weights)), None)
    tied = shared_parameters(model)
    model.to_empty(device=target)
    tie_(model, tied)
    filled: set[int] = set()  # what modules share has the values of the first
    for name, module in drawn:
        own = name.replace("_checkpoint_wrapped_module.", "")  # as it is without activation checkpointing
        with _whole_on_cpu(module, filled), _seeded(f"{seed} {own}"):
            if (draw := _drawing(model, module)) is not None:
                draw()
    if read is not None:
        read()
    return model


def _check(model: nn.Module, drawn: list[tuple[str, nn.Module]]) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ValueError(
                f"materialize_ fills a model on the meta device, and {name!r} has values already: build the model "
                "under torch.device('meta')"
            )
    for name, module in drawn:
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(tensor is not None for tensor in own) and _drawing(model, module) is None:
            raise ValueError(
                f"{name!r}, a {type(module).__name__}, has tensors and no reset_parameters that draws their values: "
                "give the class one, or weights that hold them all"
            )


def _drawing(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """Return what draws the values of a module's own tensors; None if nothing is known to."""
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    initialize = getattr(model, "_init_weights", None)
    if not callable(own) and not callable(initialize):
        return None

    def draw() -> None:
        if callable(own):
            own()
        if callable(initialize):  # that of transformers' models has the last word, and leaves what it does not know
            initialize(module)

    return draw


def _is_unsaved(module: nn.Module) -> bool:
    """Return whether a module has buffers that files do not hold, and that are not sketches, which are drawn anew."""
    sketches = sketch_ids(module)
    return any(
        id(buffer) not in sketches and name in module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False)
    )


@contextmanager
def _whole_on_cpu(module: nn.Module, filled: set[int]) -> Iterator[None]:
    """Let a module's own tensors be whole and on the CPU; afterwards, keep what this rank has of those not filled."""
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    kept = [dict(place) for place in places]
    for place in places:
        for name, tensor in place.items():
            if tensor is not None:
                whole = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                trained = isinstance(tensor, nn.Parameter)
                place[name] = nn.Parameter(whole, tensor.requires_grad) if trained else whole
    try:
        yield
        drawn = [dict(place) for place in places]
    finally:
        for place, before in zip(places, kept, strict=True):
            place.clear()
            place.update(before)
    with torch.no_grad():
        for before, after in zip(kept, drawn, strict=True):
            for name, tensor in before.items():
                if tensor is not None and id(tensor) not in filled:
                    if after[name].is_floating_point() and after[name].isnan().any():
                        raise ValueError(
                            f"{name!r} of a {type(module).__name__} was not drawn by its model's or its own "
                            "initialisation: give the class a reset_parameters that draws it, or weights that hold it"
                        )
                    _local(tensor).copy_(_part_of(after[name], tensor))
                    filled.add(id(tensor))


def _part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return whole
    part = distribute_tensor(
        whole.detach().to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return part.to_local()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()))
        yield


def _reading(model: nn.Module, folder: Path) -> Callable[[], Any]:
    """Check that a folder holds the model's tensors; return what reads this rank's slices of them."""
    if (folder / MANIFEST).exists() or checkpoints(folder):
        return lambda: load(folder, model, random_state=False)
    if not (folder / ".metadata").is_file() and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds no weights: give a folder with safetensors, a checkpoint of torch.distributed.checkpoint, "
            "or one of Panther's"
        )
    held = _reader(folder).read_metadata().state_dict_metadata
    # Names that share a tensor are one: files hold it once.
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    groups: dict[int, list[str]] = {}
    for name in shapes:
        groups.setdefault(id(_object_called(model, name)), []).append(name)
    wanted = {names[0]: next((name for name in names if name in held), None) for names in groups.values()}
    missing = sorted(first for first, name in wanted.items() if name is None)
    unknown = sorted(held.keys() - shapes.keys())
    if missing or unknown:
        kind, some = ("lacks", missing) if missing else ("holds, beside the model's tensors,", unknown)
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        raise CheckpointError(f"{folder} {kind} {', '.join(some[:3])}{more}: build the model that was saved there")
    for first, chosen in wanted.items():
        assert chosen is not None
        found: Any = held[chosen]
        if found.size != shapes[first]:
            raise CheckpointError(
                f"{first!r} has the shape {tuple(shapes[first])}, and {tuple(found.size)} in {folder}: build the model "
                "that was saved there"
            )

    def read() -> None:
        state = model.state_dict()
        tensors: dict[str, Any] = {name: state[first] for first, name in wanted.items() if name is not None}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tensors, storage_reader=_reader(folder), no_dist=not dist.is_initialized())
        for module in model.modules():
            if isinstance(module, CompressedModule):
                module.check_record()

    return read


def _object_called(model: nn.Module, name: str) -> Any:
    """Return the module's own object, which shared names have in common; state_dict returns other ones."""
    path, _, own = name.rpartition(".")
    return getattr(model.get_submodule(path), own, name)


def _reader(folder: Path) -> Any:
    return (
        dcp.FileSystemReader(folder) if (folder / ".metadata").is_file() else dcp.HuggingFaceStorageReader(str(folder))
    )
