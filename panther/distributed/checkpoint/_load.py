"""Load a checkpoint into a model of any layout, build its architecture, or export the full model for inference."""

__all__ = ["LoadedCheckpoint", "export", "load", "restore_architecture"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther._model_libraries import model_files
from panther._text import list_names
from panther.distributed.checkpoint import state as states
from panther.distributed.checkpoint._save import save
from panther.distributed.checkpoint.folders import folder_of, make_temporary, note_damage, remove
from panther.distributed.checkpoint.manifest import read_manifest
from panther.distributed.checkpoint.rank_states import rank_state_of, target_of
from panther.distributed.checkpoint.storage import empty, read_tensors, reader_of
from panther.distributed.checkpoint.weights import check_architecture, saved_modules, with_saved_layers
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks, run_on_first_rank
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.distributed.sync.replicas import built
from panther.errors import CheckpointError, FormatError
from panther.nn.attention.record import optional_names
from panther.nn.io import unwrapped, write_folder
from panther.nn.module_state import ModuleState
from panther.nn.quantized.state import SCALE_LOGS, STORED_SCALES, fold_scales
from panther.nn.specs import TRAINED_SCALES


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of :func:`load`."""

    path: Path
    """The folder that was loaded."""
    step: int
    """The number of steps after which the checkpoint was saved."""
    extra: Any
    """The first rank's ``extra`` of :func:`save`."""
    per_rank_extra: Any
    """This rank's ``per_rank_extra`` of :func:`save`; None if the number of ranks has changed."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    rank_states: Any = None
    """This rank's ``rank_states`` of :func:`save`, if they were asked for; None in checkpoints of earlier versions."""
    optimizer_groups: list[list[str]] | None = None
    """Names of the parameters of each group that the saved optimizer had; None without one, and in older checkpoints.
    """


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    random_state: bool = True,
    check: Callable[[Any], object] | None = None,
    rank_states: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into a model and its optimizer, in any layout. Every rank must call it.

    Everything is read and checked on all ranks before anything is changed. If a load hook of a module or the optimizer
    raises an error, all changes are undone. The model must have the sketched layers that were saved: see
    :func:`restore_architecture`.

    Args:
        path: Folder of a checkpoint, or a directory of checkpoints, whose latest one is loaded.
        model: The model that was saved; its layout may be different.
        optimizer: The model's optimizer, without state. None loads only the model.
        random_state: Whether to set the random generators, if the number of ranks is the same.
        check: Called with ``extra`` before anything is changed; it may raise an error.
        rank_states: Whether to read the values ``rank_states`` of :func:`save`. Values that cannot be divided among
            another number of ranks are then an error.
        group: As for :func:`save`.

    Returns:
        The step, and the ``extra`` values that :func:`save` stored.

    Raises:
        FormatError: On every rank, if a file is missing, foreign, truncated or damaged, or there is no checkpoint.
        CheckpointError: On every rank, if the checkpoint does not fit the model or the optimizer; the error has names.

    Cost: this rank's tensors are in memory twice while they are read. The model is copied once more if a module could
        refuse to load, because it has a load hook, overrides ``load_state_dict``, or has quantized weights.
    """
    folder = run_on_first_rank(lambda: folder_of(Path(path)), group)
    try:
        loaded = _load(folder, model, optimizer, random_state, check, rank_states, group)
    except FormatError as error:
        if get_rank(group) == 0:
            note_damage(folder, str(error))
        raise
    if get_rank(group) == 0:
        note_damage(folder, None)
    return loaded


def _load(
    folder: Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    random_state: bool,
    check: Callable[[Any], object] | None,
    rank_states: bool,
    group: dist.ProcessGroup | None,
) -> LoadedCheckpoint:
    manifest = run_on_all_ranks(lambda: read_manifest(folder), group)
    parts = states.parts_of(model)
    # The state of each rank is meaningful only for the same number of ranks.
    rank = get_rank(group) if manifest["world_size"] == get_world_size(group) else None
    per_rank_extra, generators = (None if rank is None else manifest[key][rank] for key in ("per_rank_extra", "random"))
    # Earlier versions did not save them.
    trees, layouts = (manifest.get("rank_states", [None]), manifest.get("layouts", {})) if rank_states else ([None], {})
    tree = rank_state_of(trees, get_rank(group), get_world_size(group))
    parameters = states.parameters_by_name(parts)
    # state_dict() of a sharded model can communicate, so that it is called once, on all ranks at the same time.
    state = run_on_all_ranks(lambda: states.model_state(parts), group)
    # Checkpoints of earlier versions have no records of attention.
    for name in {states.plain(name) for part in parts for name in optional_names(part)} - manifest["model"].keys():
        state.pop(name, None)
    names = gather_objects(set(state), group)
    entries = {name: entry for name, entry in manifest["model"].items() if name in state}

    def targets_of_rank() -> dict[str, Tensor]:
        check_architecture(parts, manifest["modules"], folder)
        _check_names(state, names, manifest, folder)
        targets = {
            place: empty(manifest["tensors"][place])
            for place in states.places([manifest["extra"], per_rank_extra, generators, entries])
        }
        for place in states.places(tree):
            targets[place] = target_of(manifest["tensors"][place], layouts.get(place), parameters)
        targets |= {entries[name]["$tensor"]: torch.empty_like(x) for name, x in state.items() if isinstance(x, Tensor)}
        if optimizer is not None:
            if manifest["optimizer"] is None:
                raise CheckpointError(f"{folder} was saved without an optimizer: load it without one")
            targets |= states.optimizer_targets(optimizer, parts, manifest["optimizer"], manifest["tensors"])
        return targets

    # An error must reach all ranks before DCP begins to read, because reading is a collective.
    targets = run_on_all_ranks(targets_of_rank, group)
    read_tensors(reader_of(folder, manifest), targets, group)

    values = states.decode(entries, targets)
    generator_states = states.decode(generators, targets) if random_state else None

    def checked() -> tuple[dict[str, Any] | None, Callable[[], None]]:
        if check is not None:
            check(states.decode(manifest["extra"], targets))
        if optimizer is None:
            return None, _undo_of(parts, None)
        values_of_optimizer = states.optimizer_values(optimizer, parts, manifest["optimizer"], targets)
        return values_of_optimizer, _undo_of(parts, optimizer)

    optimizer_values, undo = run_on_all_ranks(checked, group)

    def fill() -> None:
        # The model is filled last, because undoing the others needs no copy.
        if generator_states is not None:
            states.set_random_state(generator_states)
        if optimizer is not None and optimizer_values is not None:
            states.fill_optimizer(optimizer, optimizer_values)
        states.fill_model(parts, values)

    # Changes begin only now: all tensors were read, and all checksums are correct.
    try:
        run_on_all_ranks(fill, group)
    except BaseException:
        undo()
        raise
    return LoadedCheckpoint(
        path=folder,
        step=manifest["step"],
        extra=states.decode(manifest["extra"], targets),
        per_rank_extra=states.decode(per_rank_extra, targets),
        world_size=manifest["world_size"],
        rank_states=states.decode(tree, targets),
        optimizer_groups=(manifest["optimizer"] or {}).get("groups"),
    )


def _undo_of(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Return a function that restores the present state of modules, an optimizer and the random generators."""
    model = ModuleState(parts)
    undo_optimizer = None if optimizer is None else states.optimizer_undo(optimizer)
    tensors: dict[str, Tensor] = {}
    generators = states.random_state("random", tensors)

    def undo() -> None:
        if undo_optimizer is not None:
            undo_optimizer()
        model.restore()
        states.set_random_state(states.decode(generators, tensors))

    return undo


def export(
    model: nn.Module | Sequence[nn.Module] | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the full model for inference, from any layout, in the format of :func:`panther.save_compressed`.

    Scales of quantized layers that were trained in a wider dtype are rounded to the format's bfloat16.

    Args:
        model: A model as for :func:`save`, for which every rank must call the function; or the folder of a checkpoint
            or a directory of checkpoints, for which only one process may call it.
        directory: Folder to write, the same for all ranks, for :func:`panther.load_compressed`.
        group: As for :func:`save`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the folder cannot be written.
        FormatError: If a checkpoint is damaged.

    Cost: tensors are first written to a temporary checkpoint beside ``directory``. One process then writes them again,
        and holds one tensor at a time.

    Example:
        >>> import tempfile, torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.SKLinear(256, 64, 2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = export(model, directory)
        ...     restored = pr.load_compressed(
        ...         path, torch.nn.Sequential(torch.nn.Linear(256, 64))
        ...     )
        >>> torch.equal(model[0].S1, restored[0].S1)
        True
    """
    target = Path(directory)
    if isinstance(model, str | os.PathLike):
        _consolidate(folder_of(Path(model)), target)
        return target

    # Beside the target, so that renaming does not cross file systems.
    temporary = run_on_first_rank(lambda: make_temporary(target.parent, ".export", ".export.*"), group)
    try:
        saved = save(temporary, model, step=0, group=group)
        full_model = unwrapped(model) if isinstance(model, nn.Module) else None  # not the stages of a pipeline
        run_on_first_rank(lambda: _consolidate(saved, target, full_model), group)
    finally:
        if get_rank(group) == 0:
            remove(temporary)
    return target


def _consolidate(folder: Path, target: Path, model: nn.Module | None = None) -> None:
    """Write the full model of a checkpoint in the inference format, in one process."""
    manifest = read_manifest(folder)
    modules = {
        name: {key: value for key, value in spec.items() if key != TRAINED_SCALES}
        for name, spec in manifest["modules"].items()
    }
    quantized = [name for name, spec in modules.items() if spec.get("mode") == "quantized"]
    # The name of each tensor of scales, with the name of the factors by which training has multiplied the scales.
    scales = {
        f"{name}.{key}" if name else key: f"{name}.{logs}" if name else logs
        for name in quantized
        for key, logs in SCALE_LOGS.items()
    }

    def rounded(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(STORED_SCALES) if name in scales else tensor  # training may use a wider dtype for scales

    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    logs_places: dict[str, str] = {}
    for name, entry in manifest["model"].items():
        if not states.is_tensor(entry):
            raise CheckpointError(f"state_dict entry {name!r} is not a tensor: the inference format holds only tensors")
        if name in scales.values():
            logs_places[name] = entry["$tensor"]
            continue
        place = places[name] = entry["$tensor"]
        if first.setdefault(place, name) == name:
            tensors[name] = rounded(name, empty(manifest["tensors"][place], "meta"))
        else:
            aliases[name] = first[place]
    reader = reader_of(folder, manifest)

    def value_of(name: str) -> Tensor:
        place = places[name]
        value = empty(manifest["tensors"][place])
        read_tensors(reader, {place: value}, alone=True)
        if (logs_place := logs_places.get(scales.get(name, ""))) is not None:
            logs = empty(manifest["tensors"][logs_place])
            read_tensors(reader, {logs_place: logs}, alone=True)
            value = fold_scales(value, logs)
        return rounded(name, value)

    files = {} if model is None else model_files(model, modules)
    write_folder(target, tensors, value_of, modules, aliases, files)


def restore_architecture(path: str | os.PathLike[str], model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Replace layers of a model, in place, by the compressed layers that a folder has under their names.

    Layers that have the saved class, sizes and mode are not replaced.

    The new layers have no trained values. :func:`load` loads the values, or :func:`panther.distributed.materialize_` if
    the model, and therefore the new layers, are on the meta device. Call this function before the model is wrapped or
    sharded, and before its optimizer is made.

    Args:
        path: Folder of a checkpoint, or a directory of checkpoints, or the folder of a compressed model that
            :func:`panther.save_compressed` or transformers' ``save_pretrained`` wrote.
        model: The architecture, with dense or with compressed layers; or a function that builds it, which is called
            with ``torch.device("meta")``. New layers have the dtype of the layers that they replace.

    Returns:
        ``model``, or the new layer if the model is itself a layer that is replaced.

    Raises:
        FormatError: If the folder is damaged or holds no model, or does not fit the model.

    Example:
        >>> import tempfile, torch, panther as pr
        >>> compressed = torch.nn.Sequential(
        ...     pr.nn.SKLinear.from_linear(torch.nn.Linear(256, 64), 1, 4)
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = restore_architecture(
        ...         pr.save_compressed(compressed, folder),
        ...         lambda: torch.nn.Sequential(torch.nn.Linear(256, 64)),
        ...     )
        ...     (
        ...         model[0].U1.is_meta,
        ...         type(
        ...             pr.distributed.materialize_(model, folder)[0]
        ...         ).__name__,
        ...     )
        (True, 'SKLinear')
    """
    return with_saved_layers(built(model), saved_modules(Path(path)))


def _check_names(state: dict[str, Any], names: list[set[str]], manifest: dict[str, Any], folder: Path) -> None:
    """Raise unless the union of all ranks' names equals the saved names, with the same shapes and kinds of dtype."""
    saved = manifest["model"].keys()
    # A pipeline rank has only the names of its stages, so that the union of the names of all ranks is compared.
    here = set().union(*names)
    wrong = []
    for name, value in state.items():
        entry = manifest["model"].get(name)
        if name in saved and isinstance(value, Tensor) != states.is_tensor(entry):
            wrong.append(f"{name} saved {'as a tensor' if states.is_tensor(entry) else 'without a tensor'}")
        elif isinstance(value, Tensor) and states.is_tensor(entry):
            stored = manifest["tensors"][entry["$tensor"]]
            dtype = getattr(torch, stored["dtype"])
            # float32 may be loaded into bfloat16. Floats and integers mean that the model is a different one.
            if list(value.shape) != stored["shape"] or value.is_floating_point() != dtype.is_floating_point:
                form = f"{tuple(value.shape)}, {value.dtype}"
                wrong.append(f"{name} saved {tuple(stored['shape'])}, {dtype}; here {form}")
    missing, extra = sorted(here - saved), sorted(saved - here)
    if missing or extra or wrong:
        raise CheckpointError(
            f"{folder} does not fit the model: missing {list_names(missing, 5)}; unexpected {list_names(extra, 5)}; "
            f"different shapes or kinds {list_names(wrong, 5)}: build the model that was saved, sketched layers by "
            "restore_architecture"
        )
