"""Collect, write and read a checkpoint on all ranks together; an error on one of them is raised on all."""

__all__ = ["Collected", "collect", "consolidate", "read", "remove", "side_group", "write"]

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from panther.distributed.checkpoint import _state as states
from panther.distributed.checkpoint import _storage as files
from panther.distributed.comm._agreement import common_error, gather_objects, run_on_all_ranks, run_on_first_rank
from panther.distributed.comm._ranks import Group, in_process_group, name_ranks
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.errors import CheckpointError, FormatError, PantherError
from panther.nn._specs import module_specs
from panther.nn.io import write_folder


@dataclass
class Collected:
    """This rank's part of a checkpoint, ready to be written."""

    step: int
    tensors: dict[str, Tensor]
    header: dict[str, Any]
    """The other entries of the manifest, gathered from all ranks."""


def collect(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Any,
    per_rank_extra: Any,
    group: Group,
    **arguments: Any,
) -> Collected:
    """Return this rank's tensors and all ranks' other values; ``arguments`` must agree between ranks."""
    rank, world = get_rank(group), get_world_size(group)

    def own() -> tuple[dict[str, Tensor], dict[str, Any]]:
        parts = states.parts_of(model)
        state = states.model_state(parts)
        # Tied tensors are stored once; the manifest lists their other names.
        same = states.aliases(state)
        tensors: dict[str, Tensor] = {}
        values = {}
        for name, value in state.items():
            if name in same:
                continue
            if isinstance(value, Tensor):
                tensors[states.MODEL + name] = value
            else:
                values[name] = states.encode(value, states.MODEL + name, tensors)
        trained = None
        if optimizer is not None:
            more, trained = states.optimizer_state(optimizer, parts)
            tensors |= more
        generators, generator_values = states.random_state(rank)
        tensors |= generators
        # Every rank encodes, so that a value that cannot be stored fails on all; only the first keeps it.
        extras = states.encode(extra, "extra", tensors if rank == 0 else {})
        return tensors, {
            "arguments": {"step": step, "optimizer": optimizer is not None, **arguments},
            "modules": {name: spec for part in parts for name, spec in module_specs(part).items()},
            "aliases": same,
            "names": [name for name in state if name not in same],
            "model_values": values,
            "optimizer": trained,
            "random": generator_values,
            "extra": extras,
            "per_rank_extra": states.encode(per_rank_extra, f"per_rank_extra.{rank}.", tensors),
        }

    tensors, mine = run_on_all_ranks(own, group)
    # One exchange carries the arguments, names and small values of all ranks.
    every = gather_objects(mine, group)
    for rank, one in enumerate(every):
        for name, value in one["arguments"].items():
            if value != (wanted := every[0]["arguments"][name]):
                raise CheckpointError(
                    f"{name} is {wanted!r} on rank 0 and {value!r} on rank {rank}: pass the same value on all"
                )
    if states.are_stages(model):
        _check_stages(tensors, [set(one["names"]) for one in every], group)
    names = {name for one in every for name in one["names"]}
    merged: dict[str, Any] = {
        key: {name: value for one in every for name, value in one[key].items()}
        for key in ("modules", "aliases", "model_values")
    }
    # A tensor that is an alias on one stage can be the only one of its name on another.
    merged["aliases"] = {name: first for name, first in merged["aliases"].items() if name not in names}
    header = {
        "step": step,
        "world_size": world,
        **merged,
        "optimizer": _merged_optimizer([one["optimizer"] for one in every if one["optimizer"] is not None]),
        "random": [one["random"] for one in every],
        "extra": every[0]["extra"],
        "per_rank_extra": [one["per_rank_extra"] for one in every],
    }
    return Collected(step, tensors, header)


def _check_stages(tensors: Mapping[str, Tensor], names: Sequence[set[str]], group: Group) -> None:
    """Raise if stages use one name for different tensors, of which only one would be stored."""
    common = {name for index, one in enumerate(names) for other in names[:index] for name in one & other}
    own = {}
    for name in sorted(common):
        if (tensor := tensors.get(states.MODEL + name)) is not None:
            place, local = files.placed(tensor)
            own[name, place] = files.checksum(local)
    by_place: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, found in enumerate(gather_objects(own, group)):
        for key, value in found.items():
            by_place.setdefault(key, {})[rank] = value
    for (name, _), values in by_place.items():
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"{name!r} names a different tensor on each of {name_ranks(list(values))}: stages must keep the names "
                "of the whole model, as split_stages does"
            )


def _merged_optimizer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not parts:
        return None
    return {
        "class": parts[0]["class"],
        "values": {name: value for part in parts for name, value in part["values"].items()},
        "settings": {name: value for part in parts for name, value in part["settings"].items()},
    }


def write(directory: Path, state: Collected, keep: int | None, group: Group) -> Path:
    """Write a checkpoint under a temporary name, and rename it when all ranks have finished."""
    temporary, final = run_on_first_rank(lambda: _begin(directory, state.step), group)
    try:
        with _dcp_errors(f"the checkpoint of step {state.step} is not written: ", get_world_size(group)):
            dcp_save(
                dict(state.tensors),
                storage_writer=files.Writer(temporary, state.header),
                # Copies of a buffer such as BatchNorm's may differ between ranks, and DDP continues with the first's.
                planner=DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True),
                **_where(group),
            )
        # The rename makes it a checkpoint, so it comes after all ranks have synchronised their files.
        run_on_first_rank(lambda: files.publish(temporary, final), group)
    except BaseException:
        if get_rank(group) == 0:
            remove(temporary)
        raise
    # Old checkpoints go last: until here a failure must leave them.
    run_on_first_rank(lambda: _tidy(directory, final, state.step, keep), group)
    return final


def _begin(directory: Path, step: int) -> tuple[Path, Path]:
    """Make a temporary folder and choose its final name; remove the folders that killed processes left."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("step-*.tmp"):
        remove(leftover)
    # A step can be saved again, after resuming from an earlier one; its first folder stays until then.
    names = {path.name for path in directory.iterdir()}
    name, again = f"step-{step:08d}", 0
    while (f"{name}.{again}" if again else name) in names:
        again += 1
    final = directory / (f"{name}.{again}" if again else name)
    temporary = final.with_name(final.name + ".tmp")
    temporary.mkdir()
    return temporary, final


def _tidy(directory: Path, final: Path, step: int, keep: int | None) -> None:
    """Remove earlier checkpoints of this step, and the oldest ones beyond ``keep``."""
    name = f"step-{step:08d}"
    for folder in files.folders(directory):
        if folder != final and folder.name.partition(".")[0] == name:
            remove(folder)
    for folder in files.folders(directory)[: -keep if keep else 0]:
        if folder != final:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder, renaming it first, so that a killed process never leaves a partial checkpoint."""
    if folder.suffix != ".tmp":
        # A rename is atomic; removing file by file is not.
        aside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        folder = folder.rename(aside)
    shutil.rmtree(folder, ignore_errors=True)


def read(
    folder: Path, manifest: Mapping[str, Any], targets: dict[str, Tensor], group: Group, *, alone: bool = False
) -> None:
    """Read tensors into ``targets``: on every rank its own, or ``alone`` on one rank."""
    with _dcp_errors("", 1 if alone else get_world_size(group)):
        dcp_load(
            targets,
            storage_reader=files.Reader(folder, manifest),
            planner=DefaultLoadPlanner(flatten_state_dict=False),  # states are flat, and lists stay in the manifest
            **({"no_dist": True} if alone else _where(group)),
        )


def _where(group: Group) -> dict[str, Any]:
    return {"process_group": group} if in_process_group() else {"no_dist": True}


@contextmanager
def _dcp_errors(what: str, world: int) -> Iterator[None]:
    """Turn DCP's exception, which holds the errors of all ranks, into one with a single sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process writes alone
            yield
    except CheckpointException as error:
        failed = {rank: (_kind(found), _text(found)) for rank, (found, _) in error.failures.items()}
        told = common_error(failed, world)
        raise type(told)(f"{what}{told}") from None


def _kind(error: BaseException) -> type[Exception]:
    return FormatError if isinstance(error, FormatError) else CheckpointError


def _text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error}: make room there, or name another directory"
    return str(error) if isinstance(error, PantherError) else f"{type(error).__name__}: {error}"


_sides: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def side_group(group: Group) -> Group:
    """Return a gloo group of the same ranks for the writing thread.

    Its collectives would otherwise mix with those of training, in an order that differs between ranks.
    """
    if not in_process_group():
        return None
    parent = group or dist.group.WORLD
    assert parent is not None
    if parent not in _sides:
        # new_group is collective over the ranks of this group only, not over all of them.
        ranks = dist.get_process_group_ranks(parent)
        _sides.clear()  # groups of a process group that no longer exists
        _sides[parent] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _sides[parent]


def consolidate(folder: Path, target: Path) -> None:
    """Write the whole model of a checkpoint in the inference format, in one process."""
    manifest = files.read_manifest(folder)
    if values := list(manifest["model_values"]):
        raise CheckpointError(
            f"state_dict entry {values[0]!r} is not a tensor: the inference format holds only tensors"
        )
    entries = files.tensor_entries(manifest, states.MODEL)
    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in entries.items()
    }
    read(folder, manifest, {states.MODEL + name: tensor for name, tensor in tensors.items()}, None, alone=True)
    write_folder(target, tensors, manifest["modules"], manifest["aliases"])
