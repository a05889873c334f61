"""The work behind ``panther simulate --dry-run``: what a world of any size would do, without its processes."""

__all__ = ["DryRun", "dry_run", "too_large"]

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from panther._text import counted
from panther.cli.demo._training import TRAIN_SAMPLES, build
from panther.cli.simulate._training import Settings, shard

_FIRST_RANKS = 4
_MANY_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What would be done."""

    shards: dict[int, list[int]]
    """Samples of the first epoch, by rank; of a large world those of some ranks."""
    samples_per_rank: int
    repeated: int
    """Samples that the sampler adds so that all ranks have as many."""
    batch_per_rank: int
    steps_per_epoch: int
    gradient_bytes: int
    """That a rank hands to the all-reduce in a step."""
    dense_gradient_bytes: int
    memory: dict[str, int]
    """Bytes a rank, by what they hold."""
    obstacles: list[str]
    notes: list[str]


def dry_run(settings: Settings) -> DryRun:
    """Count, on torch's own sampler and on the network without its numbers."""
    world, samples = settings.world, TRAIN_SAMPLES
    ranks = range(world) if world <= _MANY_RANKS else (*range(_FIRST_RANKS), world - 1)
    shards = {rank: shard(samples, settings, rank) for rank in ranks}
    per_rank = len(shards[0])
    batch = max(1, settings.batch // world)
    memory = _memory(settings, min(batch, per_rank))
    repeated = per_rank * world - samples
    return DryRun(
        shards=shards,
        samples_per_rank=per_rank,
        repeated=repeated,
        batch_per_rank=batch,
        steps_per_epoch=-(-per_rank // batch),
        gradient_bytes=memory["gradients"],
        dense_gradient_bytes=_sizes("dense", settings)["parameters"],
        memory=memory,
        obstacles=[text for text in (_uneven_batch(settings), too_large(1, memory)) if text],
        notes=_notes(settings, batch, per_rank, repeated, memory),
    )


def _memory(settings: Settings, batch: int) -> dict[str, int]:
    """Bytes of the tensors that a rank holds in a step, by what they are."""
    sizes = _sizes(settings.kind, settings)
    return {
        **sizes,
        "gradients": sizes["parameters"],
        "DDP's buckets": sizes["parameters"],
        "momentum": sizes["parameters"],
        "kept for backward": _kept_bytes(settings, batch),
    }


def too_large(ranks: int, memory: dict[str, int]) -> str | None:
    """Why so many ranks do not fit into this machine, or None."""
    needed, there = ranks * sum(memory.values()), _physical_memory()
    if there is None or needed <= there:
        return None
    fix = "use a smaller --hidden" if ranks == 1 else "use a smaller --hidden or --world"
    held = f"the tensors of {counted(ranks, 'rank')} take {needed:,} bytes of memory"
    return f"{held}, and this machine has {there:,}: {fix}"


def _physical_memory() -> int | None:
    """Bytes of this machine, where the system says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _uneven_batch(settings: Settings) -> str | None:
    """Why the global batch cannot be shared, or None."""
    batch, world = settings.batch, settings.world
    if batch % world == 0:
        return None
    below, above = batch // world * world, (batch // world + 1) * world
    fix = f"{below} or {above}" if below else f"{above}"
    return f"--batch {batch} cannot be shared evenly by --world {world}: use --batch {fix}"


def _sizes(kind: str, settings: Settings) -> dict[str, int]:
    model = _without_numbers(kind, settings)
    return {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "sketches": sum(buffer.nbytes for buffer in model.buffers()),
    }


def _without_numbers(kind: str, settings: Settings) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build(kind, settings.hidden, settings.sketch_size).double()


def _kept_bytes(settings: Settings, batch: int) -> int:
    """What autograd keeps of a forward, but for the network's own tensors."""
    model = _without_numbers(settings.kind, settings)
    kept: dict[Any, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.device("meta"):
        x, y = torch.empty(batch, 64, dtype=torch.float64), torch.empty(batch, dtype=torch.int64)
        loss = F.cross_entropy(model(x), y)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    del loss  # until here it holds on to what was kept, whose places could be given away else
    return sum(size for place, size in kept.items() if place not in own)


def _notes(settings: Settings, batch: int, per_rank: int, repeated: int, memory: dict[str, int]) -> list[str]:
    notes = []
    world, samples = settings.world, TRAIN_SAMPLES
    if world > samples:
        idle = counted(world - samples, "rank")
        notes.append(f"There are more ranks than samples: {idle} would see nothing but repeated ones.")
    elif repeated > samples // 10:
        notes.append(f"Of an epoch's work {100 * repeated / (per_rank * world):.0f} % would go to repeated samples.")
    if batch > per_rank:
        notes.append(
            f"The batch is larger than the data: a step would have {counted(per_rank * world, 'sample')}, not "
            f"{batch * world:,}."
        )
    if too_large(world, memory) and not too_large(1, memory):
        notes.append(f"The memory of this machine, {_physical_memory():,} bytes, is too small for all ranks together.")
    return notes
