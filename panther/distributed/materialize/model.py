"""Give a model on the meta device its values, shard by shard, so that no rank ever holds the entire model."""

__all__ = ["materialize_"]

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from panther._torch import apply_to_tensors
from panther.distributed.checkpoint.state import parts_of
from panther.distributed.checkpoint.weights import stored_weights
from panther.distributed.comm.agreement import run_on_all_ranks
from panther.distributed.comm.mesh import get_distributed_info, get_world_size
from panther.distributed.materialize.initialization import planned_draws, set_seeds_
from panther.distributed.materialize.values import names_in, read_seeds_, read_values_, with_layers_of
from panther.distributed.pipeline.stage_modules import from_source_
from panther.distributed.tensor.sharding_plan import shared_parameters, tie_
from panther.errors import ConfigError


def materialize_(
    model: nn.Module | Sequence[nn.Module],
    weights: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Allocate and fill a model on the meta device, in place. Every rank must call it.

    Shard the model first: :func:`tensor_parallel`, :func:`split_stages`, ``data_parallel(model, strategy="fsdp")`` and
    :class:`HybridParallelTrainer` take a model without values. A rank then allocates only its shards. From ``weights``
    it reads the slices that it needs. Without ``weights``, every module draws its values by its own
    ``reset_parameters`` (or the model's ``_init_weights``, as in transformers) from generators that are seeded by
    ``seed`` and the module's name. Seeds of sketches in layers that were built without a seed are derived in the same
    way. The numbers are the same in every layout and in a single process, and do not depend on earlier draws. A rank
    holds one module at a time in full.

    Layers that ``weights`` holds in compressed form replace dense layers if the model is not sharded. For a model that
    will be sharded, :func:`panther.distributed.checkpoint.restore_architecture` replaces the layers beforehand.

    Args:
        model: The model with all parameters on the meta device, sharded or not; or the modules of this rank's stages,
            ``[stage.submod for stage in stages]``.
        weights: A folder of safetensors (one or more files), as transformers and :func:`panther.save_compressed` write
            it, a checkpoint of ``torch.distributed.checkpoint``, or a checkpoint of Panther. None draws new values.
            torch unpickles the file ``.metadata`` of its own checkpoints, which can run code: trust their writers.
        seed: Seed of the values that are drawn.
        device: Device on which to allocate; None is the device of this rank, :func:`get_distributed_info`.

    Returns:
        The model; or the compressed layer, if the model is itself a layer that is replaced.

    Raises:
        ConfigError: On every rank, if a parameter has values already, or a module has parameters or buffers and no
            initialisation that draws them.
        CheckpointError: On every rank, if the folder does not hold exactly the model's tensors in their shapes, or
            holds compressed layers that a sharded model does not have.
        FormatError: On every rank, if a file is damaged.
        SketchMismatchError: On every rank, if a seed is damaged.

    Cost: the bytes of this rank's shards, read or drawn. Every rank draws the entire model, or its stages.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(
        ...         nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
        ...     )
        >>> materialize_(model, seed=1)[2].weight.shape
        torch.Size([2, 3])
    """
    target = get_distributed_info().device if device is None else torch.device(device)
    parts = parts_of(model)
    _on_all_ranks(lambda: _check_empty(parts))
    stored, names = None, {}
    if weights is not None:
        stored = run_on_all_ranks(lambda: stored_weights(Path(weights)), None)
        model = _on_all_ranks(lambda: with_layers_of(stored, model))
        parts = parts_of(model)
        names = names_in(stored, parts)
    draws = _on_all_ranks(lambda: planned_draws(parts, stored is None))
    # Seeds are set before the model is allocated, because sketches are drawn at the allocation.
    _on_all_ranks(lambda: set_seeds_(parts, seed) if stored is None else read_seeds_(parts, stored, names))
    for part in parts:
        tied = shared_parameters(part)
        apply_to_tensors(
            part, lambda tensor: torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)
        )
        tie_(part, tied)

    def fill() -> None:
        filled: set[int] = set()  # ids of filled tensors; a shared tensor gets the values of the first module
        for draw in draws:
            draw.fill(seed, filled)
        if stored is not None:
            for part in parts:
                read_values_(part, stored, names)

    _on_all_ranks(fill)
    for part in parts:
        from_source_(part, None)
    return model


def _on_all_ranks(work: Callable[[], Any]) -> Any:
    """Do the work, and raise on all ranks if it fails on one, because stages have different modules."""
    return work() if get_world_size() == 1 else run_on_all_ranks(work, None)


def _check_empty(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.is_meta:
                raise ConfigError(
                    f"materialize_ fills a model on the meta device, and {name!r} has values already: build the model "
                    "under torch.device('meta')"
                )
