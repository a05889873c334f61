"""Give a model on the meta device its values, shard by shard: no rank ever holds the whole."""

__all__ = ["materialize_"]

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from panther.distributed.checkpoint._folders import checkpoints
from panther.distributed.checkpoint._load import load
from panther.distributed.checkpoint._state import parts_of
from panther.distributed.checkpoint._storage import MANIFEST
from panther.distributed.comm._agreement import gather_objects, run_on_all_ranks
from panther.distributed.comm.mesh import get_distributed_info, get_world_size
from panther.distributed.pipeline._modules import from_source_, source_of
from panther.distributed.sync.sketches import sketch_ids
from panther.distributed.tensor._plan import shared_parameters, tie_
from panther.errors import CheckpointError, ConfigError
from panther.nn._sketched import CompressedModule

_CHECKPOINTED = "_checkpoint_wrapped_module."  # what activation checkpointing adds to names


def materialize_(
    model: nn.Module | Sequence[nn.Module],
    weights: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Allocate and fill a model on the meta device, in place. Every rank must call it.

    Shard the model first: :func:`tensor_parallel`, :func:`split_stages`, ``data_parallel(model, strategy="fsdp")`` and
    :class:`HybridParallelTrainer` take one without values. A rank then allocates its shards alone. From ``weights`` it
    reads the slices that it needs. Without, every module draws its values by its own ``reset_parameters`` (or the
    model's ``_init_weights``, as those of transformers) from a generator that is seeded by ``seed`` and the module's
    name: the same numbers in every layout and on one process. A rank holds one module at a time in full.

    Args:
        model: With all parameters on the meta device, sharded or not; or the modules of this rank's stages,
            ``[stage.submod for stage in stages]``.
        weights: A folder of safetensors (one file or several), as transformers and :func:`panther.save_compressed`
            write it, a checkpoint of ``torch.distributed.checkpoint``, or one of Panther's. None draws new values.
        seed: Of the values that are drawn.
        device: Where to allocate; None is the device of this rank, :func:`get_distributed_info`.

    Returns:
        The model.

    Raises:
        ConfigError: On every rank, if a parameter has values already, or a module has parameters or buffers and no way
            to draw them.
        CheckpointError: On every rank, if the folder does not hold the model's tensors, all of them and no others, in
            their shapes.

    Cost: the bytes of this rank's shards, read or drawn. Drawing takes every rank the time of the whole model, or of
    its stages.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> materialize_(model, seed=1)[2].weight.shape
        torch.Size([2, 3])
    """
    target = get_distributed_info().device if device is None else torch.device(device)
    parts = parts_of(model)
    draws = _on_all_ranks(lambda: _planned(parts, weights is None))
    read = None if weights is None else _reading(model, parts, Path(weights))
    for part in parts:
        tied = shared_parameters(part)
        part._apply(lambda tensor: torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target))
        tie_(part, tied)

    def fill() -> None:
        filled: set[int] = set()  # what modules share has the values of the first
        for draw in draws:
            draw.fill(seed, filled)

    _on_all_ranks(fill)
    if read is not None:
        read()
    for part in parts:
        from_source_(part, None)
    return model


def _on_all_ranks(work: Callable[[], Any]) -> Any:
    """Do the work, and raise on all ranks if it fails on one: stages have different modules."""
    return work() if get_world_size() == 1 else run_on_all_ranks(work, None)


class _Draw(NamedTuple):
    """A module whose tensors are to be drawn."""

    name: str
    module: nn.Module
    names: list[str]
    """Of its own tensors without values."""
    owner: nn.Module
    """The module that draws them: of a stage's code, and of half a layer, that of the model."""
    draw: Callable[[], Any]

    def fill(self, seed: int, filled: set[int]) -> None:
        """Draw the module in full on the CPU, and copy this rank's shards to those of its tensors not filled yet."""
        with _in_full(self.owner) as drawn, _seeded(f"{seed} {self.name.replace(_CHECKPOINTED, '')}"):
            self.draw()
        for name in self.names:
            tensor, full = getattr(self.module, name), drawn[name]
            if id(tensor) in filled:
                continue
            if full.is_floating_point() and full.sum().isnan():
                raise ConfigError(
                    f"{name!r} of a {type(self.owner).__name__} was not drawn by its model's or its own "
                    "initialisation: give the class a reset_parameters that draws it, or weights that hold it"
                )
            with torch.no_grad():
                _local(tensor).copy_(_shard_of(full, tensor))
            filled.add(id(tensor))


def _planned(parts: Sequence[nn.Module], draw_all: bool) -> list[_Draw]:
    """Return what is to be drawn, or raise if the model cannot be filled."""
    draws = []
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.is_meta:
                raise ConfigError(
                    f"materialize_ fills a model on the meta device, and {name!r} has values already: build the model "
                    "under torch.device('meta')"
                )
        source = source_of(part)
        for name, module in part.named_modules():
            tensors = {**module._parameters, **module._buffers}
            names = [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]
            if not names or not (draw_all or _is_unsaved(module)):
                continue
            owner = module if source is part else source.get_submodule(name)
            if (draw := _drawing(source, owner)) is None:
                raise ConfigError(
                    f"{name!r}, a {type(owner).__name__}, has tensors and no reset_parameters that draws their values: "
                    "give the class one, or weights that hold them all"
                )
            draws.append(_Draw(name, module, names, owner, draw))
    return draws


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
def _in_full(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let a module's own tensors be full and on the CPU; return what they are at the end."""
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    kept = [dict(place) for place in places]
    packed = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}  # bits of sketches
    for place in places:
        for name, tensor in place.items():
            if tensor is not None:
                full = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                trained = isinstance(tensor, nn.Parameter)
                place[name] = nn.Parameter(full, tensor.requires_grad) if trained else full
    drawn: dict[str, Tensor] = {}
    try:
        yield drawn
        for place in places:
            drawn.update(place)
    finally:
        for place, before in zip(places, kept, strict=True):
            place.clear()
            place.update(before)
        vars(module).update(packed)


def _shard_of(full: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return full
    shard = distribute_tensor(
        full.detach().to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return shard.to_local()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()))
        yield


def _reading(model: Any, parts: Sequence[nn.Module], folder: Path) -> Callable[[], Any]:
    """Check that a folder holds the tensors of all ranks; return what reads this rank's slices of them."""
    shapes = {name: tensor.shape for part in parts for name, tensor in part.state_dict().items()}
    of_all = set().union(*gather_objects(set(shapes), None))  # a stage has only its own
    aliases = _aliases(parts)

    def chosen() -> dict[str, str] | None:
        if (folder / MANIFEST).exists() or checkpoints(folder):
            return None
        if not (folder / ".metadata").is_file() and not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"{folder} holds no weights: give a folder with safetensors, a checkpoint of "
                "torch.distributed.checkpoint, or one of Panther's"
            )
        held: Any = _reader(folder).read_metadata().state_dict_metadata
        # Names that share a tensor are one: files hold it once.
        found = {name: next((alias for alias in aliases[name] if alias in held), None) for name in shapes}
        missing = sorted({aliases[name][0] for name, alias in found.items() if alias is None})
        unknown = sorted(held.keys() - of_all)
        if missing or unknown:
            kind, some = ("lacks", missing) if missing else ("holds, beside the model's tensors,", unknown)
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise CheckpointError(f"{folder} {kind} {', '.join(some[:3])}{more}: build the model that was saved there")
        for name, alias in found.items():
            if held[alias].size != shapes[name]:
                raise CheckpointError(
                    f"{name!r} has the shape {tuple(shapes[name])}, and {tuple(held[alias].size)} in {folder}: build "
                    "the model that was saved there"
                )
        return found  # type: ignore[return-value]

    names = run_on_all_ranks(chosen, None)
    if names is None:
        return lambda: load(folder, model, random_state=False)

    def read() -> None:
        tensors: dict[str, list[Any]] = {}
        for part in parts:
            for name, tensor in part.state_dict().items():
                tensors.setdefault(names[name], []).append(tensor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            first = {name: found[0] for name, found in tensors.items()}
            dcp.load(first, storage_reader=_reader(folder), no_dist=not dist.is_initialized())
        for found in tensors.values():  # two stages of a rank may have halves of a layer, with its record in each
            for other in found[1:]:
                other.copy_(found[0])
        for part in parts:
            for module in part.modules():
                if isinstance(module, CompressedModule):
                    module.check_record()

    return read


def _aliases(parts: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return the names of each shared tensor of the model, by each of them."""
    names: dict[int, list[str]] = {}
    for source in {id(source): source for source in map(source_of, parts)}.values():
        named = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name.replace(_CHECKPOINTED, ""))
    return {name: shared for shared in names.values() for name in shared}


def _reader(folder: Path) -> Any:
    return (
        dcp.FileSystemReader(folder) if (folder / ".metadata").is_file() else dcp.HuggingFaceStorageReader(str(folder))
    )
