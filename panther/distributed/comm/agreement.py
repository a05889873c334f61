"""Compare what all ranks pass, before anything that would go wrong silently if it differs."""

__all__ = [
    "agree",
    "common_error",
    "differences",
    "gather_objects",
    "in_words",
    "run_on_all_ranks",
    "run_on_first_rank",
]

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from panther.distributed.comm.diagnostics import gather_all, watched
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.distributed.comm.ranks import Group, in_process_group, is_fake, name_ranks, ranks_of, transport
from panther.errors import CheckpointError, DistributedError, PantherError, SketchMismatchError

_T = TypeVar("_T")

LAYER = "layer "
"""Prefix of the description of a sketched layer; ranks that differ there raise SketchMismatchError."""


def agree(
    what: str, describe: Callable[[], Mapping[str, str]], group: dist.ProcessGroup | None, fix: str, noun: str = "calls"
) -> None:
    """Raise the same error on every rank unless all give the same description.

    An agreement costs a gather of 16 bytes a rank; descriptions are sent only where they differ.

    Args:
        what: The call, for errors.
        describe: Checks and describes the arguments of this rank. An error that it raises is raised on every rank.
        group: The ranks that make the call together.
        fix: The advice of the message if ranks differ.
        noun: The noun for what is compared, for the message.
    """
    if is_fake(group):
        describe()  # no other rank exists, but this one's arguments are checked all the same
        return
    if not in_process_group():
        describe()  # its own error may be more specific than that of ranks_of
    ranks = ranks_of(group)
    failure, described = None, {}
    try:
        described = dict(describe())
    except Exception as error:  # raised below: the other ranks are about to wait for this one
        failure = error
    # Python's own hash differs between processes.
    digest = hashlib.blake2b(json.dumps([what, list(described.items())]).encode(), digest_size=8).digest()
    mine = torch.tensor(
        [int.from_bytes(digest, signed=True), failure is not None], dtype=torch.int64, device=transport(group)
    )
    gathered = [torch.empty_like(mine) for _ in ranks]
    if "nccl" in dist.get_backend(group) and len(ranks) > 1:  # whose watchdog ends a process that waits too long
        gather_all(what, group)
    with watched(what, group):
        dist.all_gather(gathered, mine, group=group)
        prints = [tensor.tolist() for tensor in gathered]
        if all(print_ == prints[0] for print_ in prints) and not prints[0][1]:
            return
        answers: list[Any] = [None] * len(ranks)
        dist.all_gather_object(answers, (what, _told(failure), described), group=group)
    by_rank = dict(zip(ranks, answers, strict=True))
    failures = {rank: told for rank, (_, told, _) in by_rank.items() if told is not None}
    if failure is not None and len(failures) == len(ranks) and len(set(failures.values())) == 1:
        raise failure
    if failures:
        raise common_error(failures, len(ranks))
    if calls := differences({rank: {"the call": call} for rank, (call, _, _) in by_rank.items()}):
        raise DistributedError(f"ranks make different calls: {calls['the call']}: make the same call on every rank")
    differing = differences({rank: found for rank, (_, _, found) in by_rank.items()})
    sketches = any(name.startswith(LAYER) for name in differing)
    parts = list(differing.values())
    # A model of thousands of layers may differ in all of them.
    more = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    text = "; ".join(parts[:5]) + more or "the entries are in a different order"
    kind = SketchMismatchError if sketches else DistributedError
    raise kind(f"{'sketches' if sketches else noun} differ between ranks: {text}: {fix}")


def in_words(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of a call in a form that can be compared: plain values by themselves, others by their type."""
    plain = (str, int, float, bool, type(None), torch.dtype, torch.Size, torch.device, tuple, list)
    return {
        f"{name}=": repr(value) if isinstance(value, plain) else type(value).__name__
        for name, value in settings.items()
    }


def differences(described: dict[int, dict[str, str]]) -> dict[str, str]:
    """Return, by name, the values of each rank where they differ."""
    parts = {}
    for name in dict.fromkeys(name for descriptions in described.values() for name in descriptions):
        by_value = _ranks_by_value({rank: found.get(name, "missing") for rank, found in described.items()})
        if len(by_value) > 1:
            found = " and ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            parts[name] = f"{name}{'' if name.endswith('=') else ' is '}{found}"
    return parts


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def run_on_all_ranks(work: Callable[[], _T], group: Group) -> _T:
    """Do the work on every rank, and raise on all of them if it fails on one."""
    result, error = _attempt(work)  # a rank that raised here would leave the others waiting in the gather
    errors = gather_objects(_told(error), group)
    if failed := {rank: told for rank, told in enumerate(errors) if told is not None}:
        raise common_error(failed, len(errors)) from error
    return result  # type: ignore[return-value]


def run_on_first_rank(work: Callable[[], _T], group: Group) -> _T:
    """Do the work on the first rank, and give all of them its result, or its error."""
    result, error = _attempt(work) if get_rank(group) == 0 else (None, None)
    answer: list[Any] = [(result, _told(error))]
    if get_world_size(group) > 1:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    result, told = answer[0]
    if told is not None:
        raise common_error({0: told}, 1) from error
    return result


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except PantherError as error:
        return None, error
    except OSError as error:
        return None, CheckpointError(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")


def _told(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error in the form that is sent; other ranks need not be able to import a class that is not ours."""
    if error is None:
        return None
    return type(error) if isinstance(error, PantherError) else DistributedError, str(error)


def common_error(failed: Mapping[int, tuple[type[Exception], str]], world: int) -> Exception:
    """Return one error for all ranks: of the first's class, with every message and the ranks that had it."""
    by_text = _ranks_by_value({rank: text for rank, (_, text) in failed.items()})
    kind = next(iter(failed.values()))[0]
    if len(by_text) == 1 and len(failed) == world:
        return kind(next(iter(by_text)))
    return kind("; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()))


def gather_objects(value: _T, group: Group) -> list[_T]:
    """Return every rank's value, by rank."""
    if get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
