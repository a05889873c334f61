"""The public functions of `panther.distributed.checkpoint`. Each one must be called by all ranks of the group."""

__all__ = [
    "LoadedCheckpoint",
    "PendingSave",
    "async_save",
    "checkpoints",
    "export",
    "latest",
    "load",
    "prune",
    "restore_architecture",
    "save",
]  # fmt: skip

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from panther.distributed.checkpoint import _save_load as ranks
from panther.distributed.checkpoint import _state as states
from panther.distributed.checkpoint import _storage as files
from panther.distributed.comm._agreement import gather_objects, run_on_all_ranks, run_on_first_rank
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.errors import CheckpointError, FormatError, check_size
from panther.nn._specs import build_modules, module_specs

Model = nn.Module | Sequence[nn.Module]
_pending: list[tuple[dist.ProcessGroup | None, "PendingSave"]] = []


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What :func:`load` returns in addition to loading the model and the optimizer."""

    path: Path
    step: int
    extra: Any
    """The first rank's ``extra`` of :func:`save`."""
    per_rank_extra: Any
    """This rank's ``per_rank_extra`` of :func:`save`; None if the number of ranks is different now."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""


class PendingSave(Future[Path]):
    """The future of a checkpoint that :func:`async_save` is writing; its result is the checkpoint's folder."""

    def __init__(self, write: Callable[[], Path]) -> None:
        super().__init__()
        self.result_was_read = False  # so that an error is not raised again by the next save
        # Not a daemon: the interpreter waits for the thread, so that leaving the script does not lose the checkpoint.
        threading.Thread(target=self._run, args=(write,), name="panther-checkpoint").start()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.set_result(write())
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the checkpoint and return its folder.

        Args:
            timeout: Largest number of seconds to wait.

        Raises:
            CheckpointError: If it could not be written.
            TimeoutError: If it is not written in time; writing continues.
        """
        if not wait([self], timeout).done:
            raise TimeoutError(f"the checkpoint is not written after {timeout} seconds")
        self.result_was_read = True
        return super().result()


def save(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    per_rank_extra: Any = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint. Every rank of the group must call it.

    It holds the model, the optimizer, the states of the generators of torch, Python and NumPy on every rank, and what
    the caller adds. Replicated tensors are stored once, by the lowest rank that has them.

    Args:
        directory: Directory of the checkpoints, the same for all ranks. It is made if it is missing.
        model: The model in any layout, or the modules of this rank's pipeline stages.
        optimizer: Its optimizer, which may be a ZeroRedundancyOptimizer.
        step: Number of steps so far, which names the folder.
        extra: Numbers, strings, None, tensors, and lists, tuples and dicts of them, such as the state_dict of a
            scheduler. The first rank's is stored.
        per_rank_extra: The same types; every rank's own is stored, such as its position in the data.
        keep: Number of checkpoints to keep in the directory, those of the latest steps and this one. None keeps all.
        group: Process group; None is all ranks, or this process alone.

    Returns:
        The folder. Saving a step again makes a second folder, and removes the first one when that is complete.

    Raises:
        CheckpointError: On every rank, if one cannot write, or has a value that cannot be stored. Earlier checkpoints
            stay.

    Cost: every byte is written once, shards by the rank that has them, and synchronised with the disk (fsync).

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = save(directory, model, optimizer, step=100, extra={"epoch": 3})
        ...     restored = load(directory, model, optimizer)
        >>> path.name, restored.step, restored.extra
        ('step-00000100', 100, {'epoch': 3})
    """
    state = _collect(directory, model, optimizer, step, extra, per_rank_extra, keep, group)
    return ranks.write(Path(directory), state, keep, group)


def async_save(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    per_rank_extra: Any = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Copy the tensors of a checkpoint and write them in a thread while training continues; otherwise as :func:`save`.

    The thread communicates in a gloo group of its own. If an earlier asynchronous checkpoint is still being written,
    this call waits for it and raises its error.

    Returns:
        The pending checkpoint. Call its ``result()`` before leaving the process group at the latest.

    Cost: a copy of this rank's tensors in CPU memory until they are written.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     pending = async_save(directory, torch.nn.Linear(2, 2), step=1)
        ...     pending.result().name
        'step-00000001'
    """
    state = _collect(directory, model, optimizer, step, extra, per_rank_extra, keep, group)
    # Training changes the tensors while the thread writes, so it gets copies.
    state.tensors = BlockingAsyncStager().stage(state.tensors)
    side = ranks.side_group(group)
    pending = PendingSave(lambda: ranks.write(Path(directory), state, keep, side))
    _pending.append((group, pending))
    return pending


def load(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    random_state: bool = True,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into a model and its optimizer, in any layout. Every rank must call it.

    Everything is read and checked on all ranks before anything is changed. The model must have the sketched layers that
    were saved: see :func:`restore_architecture`.

    Args:
        path: Folder of a checkpoint, or the directory of checkpoints, whose latest is loaded.
        model: The same model; its layout may be different.
        optimizer: Its optimizer, without state. None loads the model alone.
        random_state: Whether to set the random generators, if the number of ranks is the same.
        group: As for :func:`save`.

    Returns:
        The step, and the ``extra`` values that :func:`save` stored.

    Raises:
        FormatError: On every rank, if a file is missing, foreign, truncated or damaged, or there is no checkpoint.
        CheckpointError: On every rank, if the checkpoint does not suit the model or the optimizer; names are given.

    Cost: this rank's tensors are in memory twice while they are read.
    """
    folder = run_on_first_rank(lambda: _folder(Path(path)), group)
    manifest = run_on_all_ranks(lambda: files.read_manifest(folder), group)
    parts = states.parts_of(model)
    rank = get_rank(group)
    same_world = manifest["world_size"] == get_world_size(group)
    # state_dict() of a sharded model can communicate, so it is called once, on all ranks together.
    own = run_on_all_ranks(lambda: states.model_state(parts), group)
    names = gather_objects(set(own), group)
    saved_names: dict[str, str] = {}

    def targets_of_rank() -> dict[str, Tensor]:
        _check_architecture(parts, manifest["modules"], folder)
        _check_names(own, names, manifest, folder)
        targets, same = states.model_targets(own, manifest["aliases"])
        saved_names.update(same)
        for name, entry in manifest["tensors"].items():
            # Generators and per-rank values have a meaning only for the same number of ranks.
            of_rank = name.startswith((f"random.{rank}.", f"per_rank_extra.{rank}."))
            if name.startswith("extra") or (of_rank and same_world):
                targets[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        if optimizer is not None:
            if manifest["optimizer"] is None:
                raise CheckpointError(f"{folder} was saved without an optimizer: load it without one")
            targets |= states.optimizer_targets(optimizer, parts, manifest["optimizer"], manifest["tensors"])
        return targets

    # An error here must reach all ranks before DCP begins to read, which is a collective.
    targets = run_on_all_ranks(targets_of_rank, group)
    ranks.read(folder, manifest, targets, group)
    values = {name: states.decode(value, targets) for name, value in manifest["model_values"].items()}
    values |= {name: targets[states.MODEL + saved] for name, saved in saved_names.items()}

    def fill() -> None:
        states.fill_model(parts, values)
        if optimizer is not None:
            states.fill_optimizer(optimizer, parts, manifest["optimizer"], targets)
        if random_state and same_world:
            states.set_random_state(states.decode(manifest["random"][rank], targets))

    # Only now does anything change: all tensors have been read and their checksums hold.
    run_on_all_ranks(fill, group)
    return LoadedCheckpoint(
        path=folder,
        step=manifest["step"],
        extra=states.decode(manifest["extra"], targets),
        per_rank_extra=states.decode(manifest["per_rank_extra"][rank], targets) if same_world else None,
        world_size=manifest["world_size"],
    )


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the complete checkpoints of a directory, the oldest step first."""
    return files.folders(Path(directory))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the latest checkpoint whose files are all there, or None.

    It warns of every later one that it skips. The contents of files are checked by :func:`load`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     latest(directory) is None
        True
    """
    for folder in reversed(files.folders(Path(directory))):
        try:
            wrong = files.damage(folder, files.read_manifest(folder))
        except FormatError as error:
            wrong = str(error)
        if wrong is None:
            return folder
        warnings.warn(f"{folder} is skipped: {wrong}", UserWarning, stacklevel=2)
    return None


def prune(directory: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all checkpoints except the last ones. Call it on one rank only.

    Args:
        directory: Directory of the checkpoints.
        keep: Number of checkpoints to keep, at least one.

    Returns:
        The removed folders.

    Raises:
        ShapeError: If ``keep`` is not positive.
    """
    check_size("keep", keep, least=1)
    removed = files.folders(Path(directory))[:-keep]
    for folder in removed:
        ranks.remove(folder)
    return removed


def export(
    model: Model | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the whole model for inference, from any layout, in the format of :func:`panther.save_compressed`.

    Args:
        model: A model as for :func:`save`, and then every rank must call it; or, in one process, the folder of a
            checkpoint or the directory of checkpoints.
        directory: Folder to write, the same for all ranks, for :func:`panther.load_compressed`.
        group: As for :func:`save`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If it cannot be written.
        FormatError: If a checkpoint is damaged.

    Cost: tensors are written to a temporary checkpoint beside ``directory`` first. One process holds the whole model.

    Example:
        >>> import tempfile, torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.SKLinear(256, 64, 2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = export(model, directory)
        ...     restored = pr.load_compressed(path, torch.nn.Sequential(torch.nn.Linear(256, 64)))
        >>> torch.equal(model[0].S1, restored[0].S1)
        True
    """
    target = Path(directory)
    if isinstance(model, str | os.PathLike):
        folder = _folder(Path(model))
        ranks.consolidate(folder, target)
        return target

    def beside() -> str:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".export-", suffix=".tmp", dir=target.parent)

    # Beside the target, so that renaming does not cross file systems.
    temporary = Path(run_on_first_rank(beside, group))
    try:
        saved = save(temporary, model, step=0, group=group)
        run_on_first_rank(lambda: ranks.consolidate(saved, target), group)
    finally:
        if get_rank(group) == 0:
            ranks.remove(temporary)
    return target


def restore_architecture(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Replace layers of a model, in place, by the sketched layers that a checkpoint has under their names.

    The new layers have no trained values: :func:`load` brings them. Call this before the model is wrapped or sharded,
    and before its optimizer is made.

    Args:
        path: Folder of a checkpoint, or the directory of checkpoints.
        model: The architecture, with dense or with sketched layers.

    Returns:
        ``model``, or the new layer if the model is itself a layer that is replaced.

    Raises:
        FormatError: If the checkpoint is damaged, or does not suit the model.
    """
    manifest = files.read_manifest(_folder(Path(path)))
    built = build_modules(manifest["modules"], model)
    if "" in built:
        return built[""]
    for name, module in built.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    return model


def _collect(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Any,
    per_rank_extra: Any,
    keep: int | None,
    group: dist.ProcessGroup | None,
) -> ranks.Collected:
    """Wait for this group's pending checkpoint, and collect the new one."""
    waiting = [pending for of, pending in _pending if of is group]
    _pending[:] = [entry for entry in _pending if entry[0] is not group]
    for pending in waiting:
        if not pending.result_was_read:
            pending.result()
    check_size("step", step, least=0)
    if keep is not None:
        check_size("keep", keep, least=1)
    where = os.fspath(directory)
    return ranks.collect(model, optimizer, step, extra, per_rank_extra, group, directory=where, keep=keep)


def _folder(path: Path) -> Path:
    """Return the path if it is the folder of a checkpoint, else the folder of the latest checkpoint in it."""
    if (path / files.MANIFEST).exists():
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        found = latest(path)
    if found is None:
        raise FormatError(
            f"{path} is not a checkpoint and contains none: give a folder that panther.distributed.checkpoint wrote"
        )
    return found


def _check_architecture(parts: Sequence[nn.Module], saved: dict[str, Any], folder: Path) -> None:
    """Raise unless sketched layers have the class, the arguments and the mode that were saved."""
    keys = ("class", "args", "mode")
    for part in parts:
        for name, spec in module_specs(part).items():
            found = {key: spec.get(key) for key in keys}
            wanted = {key: saved.get(name, {}).get(key) for key in keys}
            if found != wanted:
                differ = {key: (wanted[key], found[key]) for key in keys if wanted[key] != found[key]}
                told = "; ".join(f"{key} is {now} and was {was}" for key, (was, now) in differ.items())
                raise CheckpointError(
                    f"{folder} does not fit layer {name!r}: {told}: call restore_architecture on the model first"
                )


def _check_names(own: dict[str, Any], names: list[set[str]], manifest: dict[str, Any], folder: Path) -> None:
    """Raise unless all ranks together have what was saved, with the same shapes and kinds of dtype."""
    entries = files.tensor_entries(manifest, states.MODEL)
    saved = entries.keys() | manifest["model_values"].keys() | manifest["aliases"].keys()
    # A pipeline rank has only its own names, so the names of all ranks together are compared.
    here = set().union(*names)
    wrong = []
    for name, value in own.items():
        entry = entries.get(manifest["aliases"].get(name, name))
        if isinstance(value, Tensor) and entry is not None:
            dtype = getattr(torch, entry["dtype"])
            # float32 may be loaded into bfloat16; a float into an integer is a different model.
            if list(value.shape) != entry["shape"] or value.is_floating_point() != dtype.is_floating_point:
                wrong.append(f"{name} saved {tuple(entry['shape'])}, {dtype}; here {tuple(value.shape)}, {value.dtype}")
    missing, extra = sorted(here - saved), sorted(saved - here)
    if missing or extra or wrong:
        raise CheckpointError(
            f"{folder} does not fit the model: missing {_some(missing)}; unexpected {_some(extra)}; different "
            f"shapes or kinds {_some(wrong)}: build the model that was saved, sketched layers by restore_architecture"
        )


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "none"
