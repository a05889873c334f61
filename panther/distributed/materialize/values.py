"""Read the values of a model on the meta device from a folder of weights, module by module."""

__all__ = ["names_in", "read_seeds_", "read_values_", "with_layers_of"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed.checkpoint.state import are_stages, module_name, parts_of, plain
from panther.distributed.checkpoint.weights import StoredWeights, check_architecture, with_saved_layers
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks
from panther.distributed.pipeline.stage_modules import source_of
from panther.errors import CheckpointError
from panther.nn.protocol import compressed_layers
from panther.nn.sketch_record import plain_state, read_record, without_marks


def with_layers_of(stored: StoredWeights, model: Any) -> Any:
    """Return the model with the compressed layers of a folder, or raise if a sharded model does not have them."""
    if not stored.modules:
        return model
    parts = parts_of(model)
    if not are_stages(model) and not any(isinstance(p, DTensor) for p in model.parameters()):
        replaced = with_saved_layers(parts[0], stored.modules)
        return model if replaced is parts[0] else replaced
    check_architecture(parts, stored.modules, stored.folder)
    return model


def names_in(stored: StoredWeights, parts: Sequence[nn.Module]) -> dict[str, str]:
    """Return the name of each of this rank's values in a folder, or raise if the folder does not fit all ranks."""
    state = {name: value for part in parts for name, value in plain_state(part).items()}
    aliases = _aliases(parts)
    rank_names = gather_objects((set(state), stored.folder.name), None)
    of_all = set().union(*(names for names, _ in rank_names))  # the union, because a stage has only its own names

    def found() -> dict[str, str]:
        if stored.is_latest and len({folder for _, folder in rank_names}) > 1:
            raise CheckpointError(
                f"ranks find different checkpoints in {stored.folder.parent} "
                f"({', '.join(sorted({folder for _, folder in rank_names}))}): name the folder of one"
            )
        held = set(without_marks(dict.fromkeys(stored.names())))  # A state_dict that a user saved has marks.
        # A shared tensor has more than one name in the model, and files hold it under one of them.
        names = {name: next((alias for alias in aliases.get(name, [name]) if alias in held), "") for name in state}
        missing = sorted({aliases.get(name, [name])[0] for name, alias in names.items() if not alias})
        unknown = sorted(held - of_all)
        if missing or unknown:
            kind, listed = ("lacks", missing) if missing else ("holds, beside the model's tensors,", unknown)
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise CheckpointError(
                f"{stored.folder} {kind} {', '.join(listed[:3])}{more}: build the model that was saved there"
            )
        for name, alias in names.items():
            if wrong := stored.difference(alias, state[name]):
                raise CheckpointError(f"{name!r} {wrong} in {stored.folder}: build the model that was saved there")
        return names

    return run_on_all_ranks(found, None)


def _aliases(parts: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return, for each name of a tensor in the model, the list of all names of this tensor."""
    names: dict[int, list[str]] = {}
    for source in {id(source): source for source in map(source_of, parts)}.values():
        tensors = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            names.setdefault(id(tensor), []).append(plain(name))
    return {name: shared for shared in names.values() for name in shared}


def read_seeds_(parts: Sequence[nn.Module], stored: StoredWeights, names: Mapping[str, str]) -> None:
    """Read the seeds of sketched layers before the sketches are drawn, so that they are drawn once."""
    for part in parts:
        layers: Iterator[tuple[str, Any]] = compressed_layers(part)
        for name, layer in layers:
            if layer.record_mode == "seeded":
                key = plain(f"{name}.sketch_seed" if name else "sketch_seed")
                record = stored.read(names[key], torch.empty(4, dtype=torch.int64))
                layer.seed = read_record(record, layer.num_terms, key)


def read_values_(part: nn.Module, stored: StoredWeights, names: Mapping[str, str]) -> None:
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
