"""Give a model on the meta device its values, shard by shard, so that no rank ever holds the entire model."""

__all__ = ["Draw", "materialize_", "planned_draws", "set_seeds_"]

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther._process_settings import preserved_generators, seed_cpu_generators
from panther._text import list_names
from panther._torch import apply_to_tensors, buffers_of, drawing_method, parameters_of, unsaved_buffers_of
from panther.distributed.checkpoint.state import are_stages, module_name, parts_of, plain
from panther.distributed.checkpoint.storage import placed
from panther.distributed.checkpoint.weights import StoredWeights, check_architecture, stored_weights, with_saved_layers
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks
from panther.distributed.comm.mesh import get_distributed_info, get_world_size
from panther.distributed.pipeline.stage_modules import from_source_, source_of
from panther.distributed.sync.sketches import sketch_ids
from panther.distributed.tensor.sharding_plan import shared_parameters, tie_
from panther.errors import CheckpointError, ConfigError
from panther.nn.protocol import CompressedModule, compressed_layers
from panther.nn.sketch_record import plain_state, read_record, recorded_sketch, without_marks


def set_seeds_(parts: Sequence[nn.Module], seed: int) -> None:
    """Derive the seeds of sketches and random features that were not given, from ``seed`` and the module's name."""
    for part in parts:
        for name, module in part.named_modules():
            if not getattr(module, "seed_is_given", True) and module.seed is not None:
                module.seed = _number(f"sketch {seed} {module_name(name)}", 8) >> 1  # below 2^63


class Draw(NamedTuple):
    """A module whose tensors have to be drawn."""

    name: str
    module: nn.Module
    names: list[str]
    """Names of the module's own tensors that have no values."""
    owner: nn.Module
    """The module that draws the values: for the code of a stage, the module of the full model."""
    draw: Callable[[], Any]
    """A function that draws all values of ``owner``."""

    def fill(self, seed: int, filled: set[int]) -> None:
        """Draw the module in full on the CPU, and copy this rank's shards into the tensors that are not filled yet."""
        with _full_tensors(self.owner) as full_values, preserved_generators():
            seed_cpu_generators(_number(f"{seed} {self.name}", 7))
            self.draw()
        for name in self.names:
            tensor, full = getattr(self.module, name), full_values[name]
            if id(tensor) in filled:
                continue
            if full.is_floating_point() and full.sum().isnan():
                raise ConfigError(
                    f"{name!r} of a {type(self.owner).__name__} was not drawn by the initialisation of its model or "
                    "class: give the class a reset_parameters that draws it, or weights that hold it"
                )
            offsets, shard = placed(tensor)
            shard.copy_(full[tuple(slice(o, o + size) for o, size in zip(offsets, shard.shape, strict=True))])
            filled.add(id(tensor))


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest())


def planned_draws(parts: Sequence[nn.Module], draw_all: bool) -> list[Draw]:
    """Return the modules that have to be drawn, or raise if the model cannot be filled."""
    draws = []
    for part in parts:
        source = source_of(part)
        for name, module in part.named_modules():
            tensors = {**parameters_of(module), **buffers_of(module)}
            names = [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]
            if not names or not (draw_all or _is_unsaved(module)):
                continue
            owner = module if source is part else source.get_submodule(name)
            if (draw := _drawing(source, owner)) is None:
                raise ConfigError(
                    f"{name!r}, a {type(owner).__name__}, has tensors and no reset_parameters that draws their values: "
                    "give the class one, or weights that hold them all"
                )
            sketches = _seeded_buffers(module)
            draws.append(Draw(module_name(name), module, [key for key in names if key not in sketches], owner, draw))
    return draws


def _seeded_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that a module draws from its seed when it is allocated."""
    return module.drawn_names() if isinstance(module, CompressedModule) else ()


def _drawing(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """Return a function that draws the values of a module's own tensors, or None if there is none."""
    draw_module: Any = drawing_method(module)
    if _seeded_buffers(module):
        draw_module = module.reset_factors
    initialize = getattr(model, "_init_weights", None)
    if not callable(draw_module) and not callable(initialize):
        return None

    def draw() -> None:
        if callable(draw_module):
            draw_module()
        if callable(initialize):  # called last; models of transformers ignore modules that they do not know
            initialize(module)

    return draw


def _is_unsaved(module: nn.Module) -> bool:
    """Return whether a module has buffers that files do not hold, except for sketches, which are drawn from seeds."""
    sketches = sketch_ids(module)
    return any(
        id(buffer) not in sketches and name in unsaved_buffers_of(module)
        for name, buffer in module.named_buffers(recurse=False)
    )


@contextmanager
def _full_tensors(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace a module's own tensors by full ones on the CPU within the block.

    The dictionary that is yielded has the drawn tensors at the end of the block.
    """
    places: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    saved_places = [dict(place) for place in places]
    packed = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}  # bits of sketches
    seeded = _seeded_buffers(module)
    for place in places:
        for name, tensor in place.items():
            if tensor is not None and name not in seeded:
                full = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                trained = isinstance(tensor, nn.Parameter)
                place[name] = nn.Parameter(full, tensor.requires_grad) if trained else full
    full_values: dict[str, Tensor] = {}
    try:
        yield full_values
        for place in places:
            full_values.update(place)
    finally:
        for place, tensors in zip(places, saved_places, strict=True):
            place.clear()
            place.update(tensors)
        vars(module).update(packed)


def materialize_(
    model: nn.Module | Sequence[nn.Module],
    weights: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Allocate and fill a model on the meta device, in place. Every rank must call it.

    Shard the model first: :func:`tensor_parallel`, :func:`split_stages`, ``data_parallel(model, strategy="fsdp")`` and
    :class:`HybridParallelTrainer` take a model without values. A rank then allocates only its shards. From ``weights``
    it reads the slices that it needs. Without ``weights``, every module draws its values by its own
    ``reset_parameters`` (or the model's ``_init_weights``, as in transformers) from generators that are seeded by
    ``seed`` and the module's name. Seeds of sketches in layers that were built without a seed are derived in the same
    way. The numbers are the same in every layout and in a single process, and do not depend on earlier draws. A rank
    holds one module at a time in full.

    Layers that ``weights`` holds in compressed form replace dense layers if the model is not sharded. For a model that
    will be sharded, :func:`panther.distributed.checkpoint.restore_architecture` replaces the layers beforehand.

    Args:
        model: The model with all parameters on the meta device, sharded or not; or the modules of this rank's stages,
            ``[stage.submod for stage in stages]``.
        weights: A folder of safetensors (one or more files), as transformers and :func:`panther.save_compressed` write
            it, a checkpoint of ``torch.distributed.checkpoint``, or a checkpoint of Panther. None draws new values.
            torch unpickles the file ``.metadata`` of its own checkpoints, which can run code: trust their writers.
        seed: Seed of the values that are drawn.
        device: Device on which to allocate; None is the device of this rank, :func:`get_distributed_info`.

    Returns:
        The model; or the compressed layer, if the model is itself a layer that is replaced.

    Raises:
        ConfigError: On every rank, if a parameter has values already, or a module has parameters or buffers and no
            initialisation that draws them.
        CheckpointError: On every rank, if the folder does not hold exactly the model's tensors in their shapes, or
            holds compressed layers that a sharded model does not have.
        FormatError: On every rank, if a file is damaged.
        SketchMismatchError: On every rank, if a seed is damaged.

    Cost: the bytes of this rank's shards, read or drawn. Every rank draws the entire model, or its stages.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(
        ...         nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
        ...     )
        >>> materialize_(model, seed=1)[2].weight.shape
        torch.Size([2, 3])
    """
    target = get_distributed_info().device if device is None else torch.device(device)
    parts = parts_of(model)
    _on_all_ranks(lambda: _check_empty(parts))
    stored, names = None, {}
    if weights is not None:
        stored = run_on_all_ranks(lambda: stored_weights(Path(weights)), None)
        model = _on_all_ranks(lambda: _with_layers_of(stored, model))
        parts = parts_of(model)
        names = _names_in(stored, parts)
    draws = _on_all_ranks(lambda: planned_draws(parts, stored is None))
    # Seeds are set before the model is allocated, because sketches are drawn at the allocation.
    _on_all_ranks(lambda: set_seeds_(parts, seed) if stored is None else _read_seeds_(parts, stored, names))
    for part in parts:
        tied = shared_parameters(part)
        apply_to_tensors(
            part, lambda tensor: torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)
        )
        tie_(part, tied)

    def fill() -> None:
        filled: set[int] = set()  # ids of filled tensors; a shared tensor gets the values of the first module
        for draw in draws:
            draw.fill(seed, filled)
        if stored is not None:
            for part in parts:
                _read_values_(part, stored, names)

    _on_all_ranks(fill)
    for part in parts:
        from_source_(part, None)
    return model


def _on_all_ranks(work: Callable[[], Any]) -> Any:
    """Do the work, and raise on all ranks if it fails on one, because stages have different modules."""
    return work() if get_world_size() == 1 else run_on_all_ranks(work, None)


def _check_empty(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.is_meta:
                raise ConfigError(
                    f"materialize_ fills a model on the meta device, and {name!r} has values already: build the model "
                    "under torch.device('meta')"
                )


def _with_layers_of(stored: StoredWeights, model: Any) -> Any:
    """Return the model with the compressed layers of a folder, or raise if a sharded model does not have them."""
    if not stored.modules:
        return model
    parts = parts_of(model)
    if not are_stages(model) and not any(isinstance(p, DTensor) for p in model.parameters()):
        replaced = with_saved_layers(parts[0], stored.modules)
        return model if replaced is parts[0] else replaced
    check_architecture(parts, stored.modules, stored.folder)
    return model


def _names_in(stored: StoredWeights, parts: Sequence[nn.Module]) -> dict[str, str]:
    """Return the name of each of this rank's values in a folder, or raise if the folder does not fit all ranks."""
    state = {name: value for part in parts for name, value in plain_state(part).items()}
    aliases = _aliases(parts)
    rank_names = gather_objects((set(state), stored.folder.name), None)
    of_all = set().union(*(names for names, _ in rank_names))  # the union, because a stage has only its own names

    def checked_names() -> dict[str, str]:
        if stored.is_latest and len({folder for _, folder in rank_names}) > 1:
            raise CheckpointError(
                f"ranks find different checkpoints in {stored.folder.parent} "
                f"({', '.join(sorted({folder for _, folder in rank_names}))}): name the folder of one"
            )
        stored_names = set(without_marks(dict.fromkeys(stored.names())))  # A state_dict that a user saved has marks.
        # A shared tensor has more than one name in the model, and files hold it under one of them.
        names = {
            name: next((alias for alias in aliases.get(name, [name]) if alias in stored_names), "") for name in state
        }
        absent = sorted({aliases.get(name, [name])[0] for name, alias in names.items() if not alias})
        unknown = sorted(stored_names - of_all)
        if absent or unknown:
            kind, listed = ("lacks", absent) if absent else ("holds, beside the model's tensors,", unknown)
            raise CheckpointError(
                f"{stored.folder} {kind} {list_names(listed, 3)}: build the model that was saved there"
            )
        for name, alias in names.items():
            if wrong := stored.difference(alias, state[name]):
                raise CheckpointError(f"{name!r} {wrong} in {stored.folder}: build the model that was saved there")
        return names

    return run_on_all_ranks(checked_names, None)


def _aliases(parts: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return, for each name of a tensor in the model, the list of all names of this tensor."""
    names: dict[int, list[str]] = {}
    for source in {id(source): source for source in map(source_of, parts)}.values():
        tensors = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            names.setdefault(id(tensor), []).append(plain(name))
    return {name: shared for shared in names.values() for name in shared}


def _read_seeds_(parts: Sequence[nn.Module], stored: StoredWeights, names: Mapping[str, str]) -> None:
    """Read the seeds of sketched layers before the sketches are drawn, so that they are drawn once."""
    for part in parts:
        layers: Iterator[tuple[str, Any]] = compressed_layers(part)
        for name, layer in layers:
            if layer.is_seeded:
                key = plain(f"{name}.sketch_seed" if name else "sketch_seed")
                record = stored.read(names[key], torch.empty(4, dtype=torch.int64))
                seed = read_record(record, layer.num_terms, key)
                if recorded_sketch(record) == layer.sketch:  # Otherwise load_state_dict changes the kind.
                    layer.seed = seed


def _read_values_(part: nn.Module, stored: StoredWeights, names: Mapping[str, str]) -> None:
    """Read the values of a part, module by module."""
    modules = {module_name(name): module for name, module in part.named_modules(remove_duplicate=False)}
    entries: dict[str, dict[str, Any]] = {}
    for name, value in plain_state(part, keep_vars=True).items():
        owner, _, key = name.rpartition(".")
        entries.setdefault(owner, {})[key] = name, value
    filled: set[int] = set()
    for owner, owner_entries in entries.items():
        state = {}
        for key, (name, value) in owner_entries.items():
            state[key] = value if id(value) in filled else stored.read(names[name], value)
            filled.add(id(value))
        # load_state_dict of the module also checks the records of its form.
        modules[owner].load_state_dict(state, strict=False)
