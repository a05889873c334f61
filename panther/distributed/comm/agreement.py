"""Compare the arguments of all ranks, before calls that would give wrong results silently if they differ."""

__all__ = [
    "agree", "common_error", "describe_settings", "difference_error", "differences", "gather_objects",
    "run_on_all_ranks", "run_on_first_rank",
]  # fmt: skip

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
    call_name: str,
    describe: Callable[[], Mapping[str, str]],
    group: dist.ProcessGroup | None,
    fix: str,
    noun: str = "calls",
) -> None:
    """Raise the same error on every rank unless all give the same description, or if ``describe`` raises on one.

    It costs a gather of 16 bytes a rank; descriptions are sent only where they differ. Messages name the ``noun`` of
    the compared things and end in the advice ``fix``.
    """
    if is_fake(group):
        describe()  # no other rank exists, but the arguments of this rank are checked nevertheless
        return
    if not in_process_group():
        describe()  # it may raise a more specific error than ranks_of
    ranks = ranks_of(group)
    failure, described = None, {}
    try:
        described = dict(describe())
    except Exception as error:  # it is raised below, because the other ranks are about to wait for this rank
        failure = error
    # Python's own hash differs between processes.
    digest = hashlib.blake2b(json.dumps([call_name, list(described.items())]).encode(), digest_size=8).digest()
    digest_and_failure = torch.tensor(
        [int.from_bytes(digest, signed=True), failure is not None], dtype=torch.int64, device=transport(group)
    )
    gathered = [torch.empty_like(digest_and_failure) for _ in ranks]
    if "nccl" in dist.get_backend(group) and len(ranks) > 1:  # NCCL's watchdog ends a process that waits too long
        gather_all(call_name, group)
    with watched(call_name, group):
        dist.all_gather(gathered, digest_and_failure, group=group)
        rows = [tensor.tolist() for tensor in gathered]
        if all(row == rows[0] for row in rows) and not rows[0][1]:
            return
        answers: list[Any] = [None] * len(ranks)
        dist.all_gather_object(answers, (call_name, _encode_error(failure), described), group=group)
    by_rank = dict(zip(ranks, answers, strict=True))
    failures = {rank: encoded for rank, (_, encoded, _) in by_rank.items() if encoded is not None}
    if failure is not None and len(failures) == len(ranks) and len(set(failures.values())) == 1:
        raise failure
    if failures:
        raise common_error(failures, len(ranks))
    if calls := differences({rank: {"the call": call} for rank, (call, _, _) in by_rank.items()}):
        raise DistributedError(f"ranks make different calls: {calls['the call']}: make the same call on every rank")
    raise difference_error({rank: description for rank, (_, _, description) in by_rank.items()}, noun, fix)


def difference_error(described: dict[int, dict[str, str]], noun: str, fix: str) -> Exception:
    """Return the error about ranks whose descriptions differ; SketchMismatchError if sketched layers do."""
    differing = differences(described)
    sketches = any(name.startswith(LAYER) for name in differing)
    parts = list(differing.values())
    # A model of thousands of layers may differ in all of them.
    more = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    text = "; ".join(parts[:5]) + more or "the entries are in a different order"
    kind = SketchMismatchError if sketches else DistributedError
    return kind(f"{'sketches' if sketches else noun} differ between ranks: {text}: {fix}")


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as texts that can be compared: the repr of plain values, and the type of all other values."""
    plain = (str, int, float, bool, type(None), torch.dtype, torch.Size, torch.device, tuple, list)
    return {
        f"{name}=": repr(value) if isinstance(value, plain) else type(value).__name__
        for name, value in settings.items()
    }


def differences(described: dict[int, dict[str, str]]) -> dict[str, str]:
    """Return a text with the values and their ranks for each name whose value differs between ranks."""
    parts = {}
    for name in dict.fromkeys(name for descriptions in described.values() for name in descriptions):
        by_value = _ranks_by_value({rank: texts.get(name, "missing") for rank, texts in described.items()})
        if len(by_value) > 1:
            values = " and ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            parts[name] = f"{name}{'' if name.endswith('=') else ' is '}{values}"
    return parts


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return by_value


def run_on_all_ranks(work: Callable[[], _T], group: Group) -> _T:
    """Call ``work`` on every rank, and raise the same error on all ranks if it fails on one of them."""
    result, error = _attempt(work)  # if a rank raised here, the other ranks would wait for it in the gather
    errors = gather_objects(_encode_error(error), group)
    if failed := {rank: encoded for rank, encoded in enumerate(errors) if encoded is not None}:
        raise common_error(failed, len(errors)) from error
    return result  # type: ignore[return-value]


def run_on_first_rank(work: Callable[[], _T], group: Group) -> _T:
    """Call ``work`` on the first rank, and return its result, or raise its error, on every rank."""
    result, error = _attempt(work) if get_rank(group) == 0 else (None, None)
    answer: list[Any] = [(result, _encode_error(error))]
    if get_world_size(group) > 1:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    result, encoded_error = answer[0]
    if encoded_error is not None:
        raise common_error({0: encoded_error}, 1) from error
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


def _encode_error(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return the class and text of an error, to be sent. Other ranks may not be able to import a class of the user."""
    if error is None:
        return None
    return type(error) if isinstance(error, PantherError) else DistributedError, str(error)


def common_error(failed: Mapping[int, tuple[type[Exception], str]], world: int) -> Exception:
    """Return one error for all ranks: the class of the first error, and every message with its ranks."""
    by_text = _ranks_by_value({rank: text for rank, (_, text) in failed.items()})
    kind = next(iter(failed.values()))[0]
    if len(by_text) == 1 and len(failed) == world:
        return kind(next(iter(by_text)))
    return kind("; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()))


def gather_objects(value: _T, group: Group) -> list[_T]:
    """Return the values of all ranks, in the order of ranks."""
    if get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
