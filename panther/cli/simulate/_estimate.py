"""The counts of ``panther simulate``, for any number of ranks: samples, bytes and memory, without processes."""

__all__ = ["estimate", "too_large"]

import os
from typing import Any

import torch
from torch.nn import functional as F

from panther._text import counted
from panther.cli.demo._training import TRAIN_SAMPLES
from panther.cli.simulate._training import Settings, shard

_FIRST_RANKS, _MANY_RANKS = 4, 8


def estimate(settings: Settings) -> dict[str, Any]:
    """Return counts by torch's own sampler and by the network on the meta device.

    Returns:
        ``shards``, the samples of epoch 1 by rank, of a large world those of some ranks; ``samples_per_rank``;
        ``repeated``, samples added so that all ranks have equally many; ``batch_per_rank``; ``steps_per_epoch``; the
        bytes of gradients that a rank sends in a step, and with dense layers; ``memory``, bytes of a rank by content;
        ``obstacles`` and ``notes``, sentences.
    """
    world, samples = settings.world, TRAIN_SAMPLES
    ranks = range(world) if world <= _MANY_RANKS else (*range(_FIRST_RANKS), world - 1)
    shards = {rank: shard(samples, settings, rank) for rank in ranks}
    per_rank, batch = len(shards[0]), max(1, settings.batch // world)
    sizes = _sizes(settings, settings.kind)
    gradients = sizes["parameters"]
    memory = {
        **sizes,
        "gradients": gradients,
        "DDP's buckets": gradients,
        "momentum": gradients,
        "kept for backward": _kept_bytes(settings, min(batch, per_rank)),
    }
    figures = {
        "shards": shards,
        "samples_per_rank": per_rank,
        "repeated": per_rank * world - samples,
        "batch_per_rank": batch,
        "steps_per_epoch": -(-per_rank // batch),
        "gradient_bytes": gradients,
        "dense_gradient_bytes": _sizes(settings, "dense")["parameters"],
        "memory": memory,
        "obstacles": [text for text in (_uneven_batch(settings), too_large(1, memory)) if text],
    }
    return figures | {"notes": _notes(world, figures)}


def too_large(ranks: int, memory: dict[str, int]) -> str | None:
    """Return why the memory of this many ranks exceeds that of this machine, or None."""
    needed, available = ranks * sum(memory.values()), _physical_memory()
    if available is None or needed <= available:
        return None
    fix = "use a smaller --hidden" if ranks == 1 else "use a smaller --hidden or --world"
    return (
        f"the tensors of {counted(ranks, 'rank')} need {needed:,} bytes of memory, and this machine has {available:,}: "
        f"{fix}"
    )


def _physical_memory() -> int | None:
    """Return the bytes of memory of this machine, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _uneven_batch(settings: Settings) -> str | None:
    """Return why the global batch cannot be divided evenly, or None."""
    batch, world = settings.batch, settings.world
    if batch % world == 0:
        return None
    below, above = batch // world * world, (batch // world + 1) * world
    fix = f"{below} or {above}" if below else f"{above}"
    return f"--batch {batch} cannot be divided evenly by --world {world}: use --batch {fix}"


def _on_meta(settings: Settings, kind: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return settings.build(kind)


def _sizes(settings: Settings, kind: str) -> dict[str, int]:
    model = _on_meta(settings, kind)
    return {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "sketches": sum(buffer.nbytes for buffer in model.buffers()),
    }


def _kept_bytes(settings: Settings, batch: int) -> int:
    """Return the bytes that autograd keeps of a forward, without the network's own tensors."""
    model = _on_meta(settings, settings.kind)
    kept: dict[Any, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # _cdata names a storage, as meta storages have no address.
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.device("meta"):
        x, y = torch.empty(batch, 64, dtype=torch.float64), torch.empty(batch, dtype=torch.int64)
        loss = F.cross_entropy(model(x), y)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    del loss  # until here it keeps the storages alive, whose names could be reused otherwise
    return sum(size for name, size in kept.items() if name not in own)


def _notes(world: int, figures: dict[str, Any]) -> list[str]:
    """Return notes on settings that waste samples or memory."""
    notes = []
    per_rank, batch, repeated = figures["samples_per_rank"], figures["batch_per_rank"], figures["repeated"]
    if world > TRAIN_SAMPLES:
        idle = counted(world - TRAIN_SAMPLES, "rank")
        notes.append(f"There are more ranks than samples: {idle} would see only repeated ones.")
    elif repeated > TRAIN_SAMPLES // 10:
        notes.append(f"{100 * repeated / (per_rank * world):.0f} % of an epoch would be repeated samples.")
    if batch > per_rank:
        notes.append(
            f"The batch is larger than the data: a step would have {counted(per_rank * world, 'sample')}, not "
            f"{batch * world:,}."
        )
    if too_large(world, figures["memory"]) and not too_large(1, figures["memory"]):
        notes.append(f"The memory of this machine, {_physical_memory():,} bytes, is too small for all ranks together.")
    return notes
