"""Give a model on the meta device its values, shard by shard, so that no rank ever holds the entire model."""

__all__ = ["materialize_"]

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from panther._torch import apply_to_tensors
from panther.distributed.checkpoint.state import are_stages, module_name, parts_of, plain
from panther.distributed.checkpoint.weights import StoredWeights, check_architecture, stored_weights, with_saved_layers
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks
from panther.distributed.comm.mesh import get_distributed_info, get_world_size
from panther.distributed.materialize.initialization import planned_draws, set_seeds_
from panther.distributed.pipeline.stage_modules import from_source_, source_of
from panther.distributed.tensor.sharding_plan import shared_parameters, tie_
from panther.errors import CheckpointError, ConfigError
from panther.nn.protocol import compressed_layers
from panther.nn.sketch_record import plain_state, read_record, without_marks


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
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise CheckpointError(
                f"{stored.folder} {kind} {', '.join(listed[:3])}{more}: build the model that was saved there"
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
            if layer.record_mode == "seeded":
                key = plain(f"{name}.sketch_seed" if name else "sketch_seed")
                record = stored.read(names[key], torch.empty(4, dtype=torch.int64))
                layer.seed = read_record(record, layer.num_terms, key)


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
