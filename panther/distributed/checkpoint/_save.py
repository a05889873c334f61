"""Save a checkpoint: collect the state of all ranks, and write it at once or in a thread."""

__all__ = ["PendingSave", "async_save", "save"]

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from panther._docstrings import inherit_arguments
from panther.distributed.checkpoint import folders
from panther.distributed.checkpoint import state as states
from panther.distributed.checkpoint.rank_states import encode_rank_states, merge_rank_states
from panther.distributed.checkpoint.storage import placed, write_tensors
from panther.distributed.comm.agreement import gather_objects, run_on_all_ranks, run_on_first_rank
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.distributed.comm.ranks import Group, in_process_group, name_ranks, new_group
from panther.errors import CheckpointError, check_size
from panther.files.tensors import contents_checksum
from panther.nn.specs import module_specs

_pending: dict[Group, "PendingSave"] = {}


class PendingSave(Future[Path]):
    """The future of a checkpoint that :func:`async_save` is writing; its result is the checkpoint's folder.

    Args:
        write: Function that writes the checkpoint and returns its folder; it runs in a thread.
    """

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
        """Wait for the checkpoint and return its folder; raise TimeoutError after ``timeout`` seconds."""
        if not wait([self], timeout).done:
            raise TimeoutError(f"the checkpoint is not written after {timeout} seconds")
        self.result_was_read = True
        return super().result()


def save(
    directory: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    per_rank_extra: Any = None,
    rank_states: Any = None,
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
        rank_states: The same types and DTensors on meshes of the model, such as an average of the parameters. What is
            equal on all ranks, and DTensors, load on any number of ranks and in any layout; each rank's own values
            load on the same number of ranks.
        keep: Number of checkpoints to keep in the directory: this checkpoint and the latest steps. None keeps all.
        group: Process group; None is all ranks, or this process alone.

    Returns:
        The folder. Saving a step again makes a second folder, and removes the first one when that is complete.

    Raises:
        CheckpointError: On every rank, if one cannot write, or has a value that cannot be stored. Earlier checkpoints
            stay.

    Cost: every byte is written once, shards by the rank that has them, and synchronised with the disk (fsync).

    Example:
        >>> import tempfile, torch
        >>> from panther.distributed import checkpoint
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = checkpoint.save(
        ...         directory, model, optimizer, step=100, extra={"epoch": 3}
        ...     )
        ...     restored = checkpoint.load(directory, model, optimizer)
        >>> path.name, restored.step, restored.extra
        ('step-00000100', 100, {'epoch': 3})
    """
    _wait_for_earlier(group)
    with watched(f"the checkpoint of step {step}", group):
        return _write(
            _collect(directory, model, optimizer, step, extra, per_rank_extra, rank_states, keep, group), group
        )


@inherit_arguments(save)
def async_save(
    directory: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    per_rank_extra: Any = None,
    rank_states: Any = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Copy the tensors of a checkpoint and write them in a thread while training continues; otherwise as :func:`save`.

    The thread communicates in a separate gloo group. If an earlier asynchronous checkpoint is still being written,
    this call waits for it and raises its error.

    Returns:
        The pending checkpoint. Call its ``result()`` before leaving the process group at the latest.

    Raises:
        CheckpointError: On every rank, if one has a value that cannot be stored, or if an earlier asynchronous
            checkpoint failed. If this one cannot be written, its ``result()`` raises the error.

    Cost: a copy of this rank's tensors in CPU memory until they are written.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     pending = async_save(directory, torch.nn.Linear(2, 2), step=1)
        ...     pending.result().name
        'step-00000001'
    """
    _wait_for_earlier(group)
    with watched(f"the checkpoint of step {step}", group):
        state = _collect(directory, model, optimizer, step, extra, per_rank_extra, rank_states, keep, group)
        # Training changes the tensors while the thread writes, so it gets copies.
        state.tensors = BlockingAsyncStager().stage(state.tensors)
        side = _side_group(group)

    def write() -> Path:
        with watched(f"the checkpoint of step {step}", side):
            return _write(state, side)

    pending = PendingSave(write)
    _pending[group] = pending
    return pending


def _wait_for_earlier(group: Group) -> None:
    """Wait for this group's pending checkpoint, and raise its error unless its result was read."""
    pending = _pending.pop(group, None)
    if pending is not None and not pending.result_was_read:
        pending.result()


@dataclass
class _Collected:
    """This rank's part of a checkpoint, ready to be written."""

    directory: Path
    step: int
    keep: int | None
    tensors: dict[str, Tensor]
    header: dict[str, Any]
    """The remaining entries of the manifest, gathered from all ranks."""


def _collect(
    directory: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Any,
    per_rank_extra: Any,
    rank_states: Any,
    keep: int | None,
    group: Group,
) -> _Collected:
    """Return this rank's tensors and all ranks' other values, for the arguments of :func:`save`."""
    check_size("step", step, least=0)
    if keep is not None:
        check_size("keep", keep, least=1)
    folder, rank = os.fspath(directory), get_rank(group)
    tensors: dict[str, Tensor] = {}

    def values_of_this_rank() -> dict[str, Any]:
        parts = states.parts_of(model)
        state = states.model_state(parts)
        # Tied tensors are stored once, under the first of their names.
        first = states.first_names(state)
        entries = {name: states.encode(value, f"model.{first[name]}", tensors) for name, value in state.items()}
        parameters = states.parameters_by_name(parts)
        return {
            "arguments": {"step": step, "optimizer": optimizer is not None, "directory": folder, "keep": keep},
            "modules": {name: spec for part in parts for name, spec in module_specs(part, in_training=True).items()},
            "model": entries,
            "optimizer": None if optimizer is None else states.optimizer_state(optimizer, parts, tensors),
            "random": states.random_state(f"random.{rank}", tensors),
            # Every rank encodes, so that a value that cannot be stored fails on all; only the first keeps it.
            "extra": _encode_whole(extra, "extra", tensors if rank == 0 else {}),
            "per_rank_extra": _encode_whole(per_rank_extra, f"per_rank_extra.{rank}.", tensors),
            "rank_states": encode_rank_states(rank_states, parameters, tensors),
        }

    # One exchange carries the arguments, names and small values of all ranks.
    values_by_rank = gather_objects(run_on_all_ranks(values_of_this_rank, group), group)
    for other_rank, values in enumerate(values_by_rank):
        for name, value in values["arguments"].items():
            if value != (expected := values_by_rank[0]["arguments"][name]):
                raise CheckpointError(
                    f"{name} is {expected!r} on rank 0 and {value!r} on rank {other_rank}: pass the same value on all"
                )
    if states.are_stages(model):
        _check_stages(tensors, [set(states.places(values["model"])) for values in values_by_rank], group)
    trained = None
    if optimizer is not None:
        # The ranks of a pipeline or of a ZeroRedundancyOptimizer have the states of different parameters.
        optimizer_states = [values["optimizer"] for values in values_by_rank]
        trained = optimizer_states[0] | {key: _union(optimizer_states, key) for key in ("states", "settings")}
        groups = zip_longest(*(state["groups"] for state in optimizer_states), fillvalue=[])
        trained["groups"] = [list(dict.fromkeys(chain.from_iterable(names_of_ranks))) for names_of_ranks in groups]
    header = {
        "step": step,
        "world_size": get_world_size(group),
        "modules": _union(values_by_rank, "modules"),
        "model": _union(values_by_rank, "model"),
        "optimizer": trained,
        "random": [values["random"] for values in values_by_rank],
        "extra": values_by_rank[0]["extra"],
        "per_rank_extra": [values["per_rank_extra"] for values in values_by_rank],
        **merge_rank_states([values["rank_states"] for values in values_by_rank]),
    }
    return _Collected(Path(folder), step, keep, tensors, header)


def _encode_whole(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value of this rank alone for JSON; a DTensor needs the other ranks."""
    encoded = states.encode(value, place, tensors)
    if sharded := [name for name in states.places(encoded) if isinstance(tensors[name], DTensor)]:
        raise CheckpointError(f"{sharded[0]} is a DTensor: store it in rank_states, or store its full_tensor()")
    return encoded


def _check_stages(tensors: Mapping[str, Tensor], names: Sequence[set[str]], group: Group) -> None:
    """Raise if stages use one name for different tensors, because only one of them would be stored."""
    common = {name for index, stage in enumerate(names) for other in names[:index] for name in stage & other}
    checksums = {}
    for name in sorted(common):
        if name in tensors:
            place, local = placed(tensors[name])
            checksums[name, place] = contents_checksum(local)
    first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for rank, checksums_of_rank in enumerate(gather_objects(checksums, group)):
        for (name, place), value in checksums_of_rank.items():
            other, expected = first.setdefault((name, place), (rank, value))
            if value != expected:
                raise CheckpointError(
                    f"{name.removeprefix('model.')!r} names a different tensor on each of {name_ranks([other, rank])}: "
                    "stages must keep the names of the whole model, as split_stages does"
                )


def _union(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part[key].items()}


def _write(state: _Collected, group: Group) -> Path:
    """Write a checkpoint under a temporary name, and rename it when all ranks have finished."""
    name = f"step-{state.step:08d}"
    temporary = run_on_first_rank(lambda: folders.make_temporary(state.directory, name, "step-*"), group)
    try:
        failure = f"the checkpoint of step {state.step} is not written: "
        write_tensors(temporary, state.tensors, state.header, group, failure)
        # The rename makes it a checkpoint, so it comes after all ranks have synchronised their files.
        final = run_on_first_rank(lambda: folders.publish(temporary), group)
    except BaseException:
        if get_rank(group) == 0:
            folders.remove(temporary)
        raise
    # Old checkpoints go last: until here a failure must leave them.
    run_on_first_rank(lambda: folders.tidy(final, state.keep), group)
    return final


_sides: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _side_group(group: Group) -> Group:
    """Return a gloo group for the writing thread, whose collectives must not mix with the collectives of training."""
    if not in_process_group():
        return None
    parent = group or dist.group.WORLD
    assert parent is not None
    if parent not in _sides:
        ranks = dist.get_process_group_ranks(parent)
        _sides.clear()  # groups of a process group that no longer exists
        _sides[parent] = new_group(ranks, "gloo")
    return _sides[parent]
