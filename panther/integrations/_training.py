"""What the callbacks of all trainers do: compare sketches, log the sizes of compressed layers, compress at the end."""

__all__ = ["checked_options", "compare_and_log", "compress_and_log"]

import dataclasses
import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch.distributed as dist
from torch import nn

import panther as pr
from panther.compression.calibration.runner import check_calibration
from panther.compression.config import SIZES, CompressConfig
from panther.errors import ConfigError
from panther.nn.protocol import compressed_layers
from panther.nn.sketch_record import plain_state

_log = logging.getLogger("panther.integrations")


def checked_options(options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return arguments of pr.compress, or raise its errors before a model is loaded or trained.

    ``owner`` is the name of the class that takes the arguments, for messages.
    """
    arguments = [field.name for field in dataclasses.fields(CompressConfig)]
    for name in options:
        if name not in arguments:
            close = get_close_matches(name, arguments, 1)
            guess = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"{owner} has no argument {name}{guess}: its arguments are those of pr.compress")
    if all(options.get(name) is None for name in SIZES):
        raise ConfigError(
            f"{owner} needs a size to compress to, as {owner}(bits=4.25, calibration=batches): its arguments are those "
            "of pr.compress"
        )
    config = CompressConfig(**options)
    if config.calibration is not None:
        check_calibration(config.calibration)
    return dict(options)


def compare_and_log(model: nn.Module) -> dict[str, Any]:
    """Check that all processes have the same sketches, and return and log the sizes of compressed layers."""
    if _several():
        pr.distributed.verify_sketches(model)
    return _logged(_sizes(model))


def compress_and_log(model: nn.Module, options: Mapping[str, Any]) -> tuple[pr.CompressionReport, dict[str, Any]]:
    """Compress a trained model in evaluation mode, on all processes together, and log its sizes and errors."""
    group = {"group": dist.group.WORLD} if _several() else {}
    was_training = model.training
    model.eval()
    try:
        report = pr.compress(model, **group | dict(options))
    finally:
        model.train(was_training)
    errors = {"measured_error": report.measured_error, "healed_error": report.healed_error}
    return report, _logged(_sizes(model) | {name: error for name, error in errors.items() if error is not None})


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _sizes(model: nn.Module) -> dict[str, Any]:
    layers = [layer for _, layer in compressed_layers(model)]
    size = sum(tensor.nbytes for layer in layers for tensor in plain_state(layer).values())
    ranks = [layer.inner_rank for layer in layers if layer.factor_names and layer.inner_rank is not None]
    sizes: dict[str, Any] = {"compressed_layers": len(layers), "compressed_bytes": size}
    if ranks:
        sizes |= {"least_rank": min(ranks), "mean_rank": sum(ranks) / len(ranks), "largest_rank": max(ranks)}
    return sizes


def _logged(entry: dict[str, Any]) -> dict[str, Any]:
    _log.info("%s", entry)
    return entry
