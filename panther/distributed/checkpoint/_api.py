"""The public functions of `panther.distributed.checkpoint`: each is one exchange between all ranks."""

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
    """What :func:`load` found beside the model and the optimizer."""

    path: Path
    step: int
    extra: Any
    """What :func:`save` was given on the first rank."""
    per_rank_extra: Any
    """What this rank gave; None where the world has another size now."""
    world_size: int
    """Ranks that wrote the checkpoint."""


class PendingSave:
    """A checkpoint that is being written; made by :func:`async_save`."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, args=(work,), name="panther-checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the checkpoint and return its folder.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            CheckpointError: If it could not be written.
            TimeoutError: If it is not written in time; it is then still being written.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint is not written after {timeout} seconds")
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._path is not None
        return self._path


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
    """Write a checkpoint; every rank of the group must call it.

    It holds the model, the optimizer, the states of torch's, Python's and NumPy's generators on every rank, and what
    the caller adds. Tensors are stored once, by the lowest of the ranks that have them.

    Args:
        directory: Where checkpoints are, the same for all ranks; made if missing.
        model: The model, wrapped or cut in whatever way, or the modules of this rank's pipeline stages.
        optimizer: Its optimizer; a ZeroRedundancyOptimizer too.
        step: Steps trained so far, which names the folder.
        extra: Numbers, strings, None, tensors, and lists, tuples and dicts of them: a scheduler's state_dict, say. The
            first rank's is stored.
        per_rank_extra: The same, of every rank: its place in the data, say.
        keep: How many checkpoints to leave in the directory, those of the latest steps; this one stays in any case.
            None leaves all.
        group: Process group; None is the world, or this process alone.

    Returns:
        The folder. A step that is there already gets a second folder, and the first one goes when it is whole.

    Raises:
        CheckpointError: On every rank, if one cannot write, or has something that cannot be stored. Checkpoints that
            were there stay.

    Cost: every byte is written once, shards by the rank that has them, and synchronised with the disk.

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
    """As :func:`save`, but only copy the tensors now, and write them in a thread while training goes on.

    Ranks exchange what they must in a group of their own, on gloo. If an earlier asynchronous checkpoint is still being
    written, it is waited for, and its error raised.

    Returns:
        What to call ``result()`` on, at the latest before leaving the process group.

    Cost: a copy of this rank's tensors, in the CPU's memory until they are written.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     pending = async_save(directory, torch.nn.Linear(2, 2), step=1)
        ...     pending.result().name
        'step-00000001'
    """
    state = _collect(directory, model, optimizer, step, extra, per_rank_extra, keep, group)
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
    """Read a checkpoint into a model, and its optimizer, in whatever layout they are; every rank must call it.

    Everything is read and checked, on all ranks, before anything is changed. Sketched layers must be in the model as
    they were saved: see :func:`restore_architecture`.

    Args:
        path: A checkpoint's folder, or the directory of them, of which the latest is taken.
        model: The same model, cut over ranks as it is now.
        optimizer: Its optimizer, new; None leaves it.
        random_state: Whether to set the generators of a rank as they were, if the world has the size it had.
        group: As for :func:`save`.

    Returns:
        The step, and what the caller had added.

    Raises:
        FormatError: If a file is missing, foreign, truncated or damaged, or the directory has no checkpoint.
        CheckpointError: If the checkpoint does not fit the model or the optimizer; names are given. Both on every rank.

    Cost: this rank's tensors are in memory twice while they are read.
    """
    folder = run_on_first_rank(lambda: _folder(Path(path)), group)
    manifest = run_on_all_ranks(lambda: files.read_manifest(folder), group)
    parts = states.parts_of(model)
    rank = get_rank(group)
    same_world = manifest["world_size"] == get_world_size(group)
    own = run_on_all_ranks(lambda: states.model_state(parts), group)
    names = gather_objects(set(own), group)
    saved_names: dict[str, str] = {}

    def targets_of_rank() -> dict[str, Tensor]:
        _check_architecture(parts, manifest["modules"], folder)
        _check_names(own, names, manifest, folder)
        targets, same = states.model_targets(own, manifest["aliases"])
        saved_names.update(same)
        for name, entry in manifest["tensors"].items():
            of_rank = name.startswith((f"random.{rank}.", f"per_rank_extra.{rank}."))
            if name.startswith("extra") or (of_rank and same_world):
                targets[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        if optimizer is not None:
            if manifest["optimizer"] is None:
                raise CheckpointError(f"{folder} was saved without an optimizer: load it without one")
            targets |= states.optimizer_targets(optimizer, parts, manifest["optimizer"], manifest["tensors"])
        return targets

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

    run_on_all_ranks(fill, group)
    return LoadedCheckpoint(
        path=folder,
        step=manifest["step"],
        extra=states.decode(manifest["extra"], targets),
        per_rank_extra=states.decode(manifest["per_rank_extra"][rank], targets) if same_world else None,
        world_size=manifest["world_size"],
    )


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Folders of the finished checkpoints of a directory, the oldest step first; what is being written is not."""
    return files.folders(Path(directory))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The folder of the latest checkpoint whose files are all there, None if there is none.

    Warns of every later one that is passed over. Contents are checked when they are loaded.

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
        warnings.warn(f"{folder} is passed over: {wrong}", UserWarning, stacklevel=2)
    return None


def prune(directory: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all but the last checkpoints; on one rank only.

    Args:
        directory: Where they are.
        keep: How many to leave, at least one.

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
    """Write a model for inference, whole, from any layout, as :func:`panther.save_compressed` does.

    Args:
        model: A model as for :func:`save`: every rank must call it; or a checkpoint's folder, or the directory of them,
            for one process alone.
        directory: Folder to write, the same for all ranks, for :func:`panther.load_compressed`.
        group: As for :func:`save`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If it cannot be written.
        FormatError: If a checkpoint is damaged.

    Cost: a model's tensors go through files beside ``directory``; one process holds the whole model.

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

    temporary = Path(run_on_first_rank(beside, group))
    try:
        saved = save(temporary, model, step=0, group=group)
        run_on_first_rank(lambda: ranks.consolidate(saved, target), group)
    finally:
        if get_rank(group) == 0:
            ranks.remove(temporary)
    return target


def restore_architecture(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Put the sketched layers that a checkpoint names into a model of the original architecture, in place.

    The new layers have no trained values yet: :func:`load` brings them. Call it before the model is wrapped or cut and
    before its optimizer is made.

    Args:
        path: A checkpoint's folder, or the directory of them.
        model: The architecture, with dense or with sketched layers.

    Returns:
        ``model``; the new layer, if the model is one itself.

    Raises:
        FormatError: If the checkpoint is damaged, or does not fit the model.
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
    """What is to be written, after the checkpoint that is still being written."""
    _finish_pending(group)
    check_size("step", step, least=0)
    if keep is not None:
        check_size("keep", keep, least=1)
    where = os.fspath(directory)
    return ranks.collect(model, optimizer, step, extra, per_rank_extra, group, directory=where, keep=keep)


def _finish_pending(group: dist.ProcessGroup | None) -> None:
    """Wait for this group's asynchronous checkpoint, and raise its error if nobody has heard of it."""
    waiting = [entry for entry in _pending if entry[0] is group]
    _pending[:] = [entry for entry in _pending if entry[0] is not group]
    for _, pending in waiting:
        if not pending._told:
            pending.result()


def _folder(path: Path) -> Path:
    """A checkpoint's folder, or the latest of a directory."""
    if (path / files.MANIFEST).exists():
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        found = latest(path)
    if found is None:
        raise FormatError(
            f"{path} is no checkpoint and has none: give a folder that panther.distributed.checkpoint wrote"
        )
    return found


def _check_architecture(parts: Sequence[nn.Module], saved: dict[str, Any], folder: Path) -> None:
    """Sketched layers must be those that were saved, seeded or fitted as they were."""
    keys = ("class", "args", "mode")
    for part in parts:
        for name, spec in module_specs(part).items():
            found = {key: spec.get(key) for key in keys}
            wanted = {key: saved.get(name, {}).get(key) for key in keys}
            if found != wanted:
                differ = {key: (wanted[key], found[key]) for key in keys if wanted[key] != found[key]}
                told = "; ".join(f"{key} {was} there, {now} here" for key, (was, now) in differ.items())
                raise CheckpointError(
                    f"{folder} does not fit layer {name!r}: {told}: build the model by restore_architecture first"
                )


def _check_names(own: dict[str, Any], names: list[set[str]], manifest: dict[str, Any], folder: Path) -> None:
    """All ranks together must have what was saved, of the same shapes and kinds."""
    entries = files.tensor_entries(manifest, states.MODEL)
    saved = entries.keys() | manifest["model_values"].keys() | manifest["aliases"].keys()
    here = set().union(*names)
    wrong = []
    for name, value in own.items():
        entry = entries.get(manifest["aliases"].get(name, name))
        if isinstance(value, Tensor) and entry is not None:
            dtype = getattr(torch, entry["dtype"])
            if list(value.shape) != entry["shape"] or value.is_floating_point() != dtype.is_floating_point:
                wrong.append(f"{name} {tuple(entry['shape'])}, {dtype} for {tuple(value.shape)}, {value.dtype}")
    missing, extra = sorted(here - saved), sorted(saved - here)
    if missing or extra or wrong:
        raise CheckpointError(
            f"{folder} does not fit the model: missing {_some(missing)}; unexpected {_some(extra)}; other shapes or "
            f"kinds {_some(wrong)}: give the model that was saved, sketched layers by restore_architecture"
        )


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "none"
