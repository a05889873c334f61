"""Compress a model whose weights are mapped from files, part by part, with a folder for what is kept meanwhile."""

__all__ = ["CompressConfig", "compress_streamed"]

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from panther._descriptions import describe_function
from panther._version import __version__
from panther.compression._compress import compress_with, plain_tensors
from panther.compression.calibration.descriptions import described_batches, shortened
from panther.compression.calibration.eligibility import check_adapters, check_model
from panther.compression.calibration.model_state import without_compiled_blocks
from panther.compression.calibration.targets import Selector
from panther.compression.config import CompressConfig
from panther.compression.report import CompressionReport
from panther.compression.streaming.runner import StreamingRunner
from panther.compression.streaming.source import SourceFiles
from panther.compression.streaming.spool import freed_blocks_returned
from panther.errors import CompressionError
from panther.sketch import check_seed

_NOT_COMPARED = ("calibration", "group", "progress", "seed")  # fields of the settings


def compress_streamed(
    model: nn.Module,
    config: CompressConfig,
    scratch: Path,
    source: SourceFiles | None = None,
    blocks: Selector | Sequence[Selector] | None = None,
    max_disk_bytes: int | None = None,
) -> CompressionReport:
    """Compress a model in place, as :func:`panther.compress` does, with all that is large in files of ``scratch``.

    If ``scratch`` has files of a process that was killed, their contents are used. The new layers of the model are
    mapped from files that are removed already.

    Args:
        model: The model.
        config: The settings.
        scratch: The folder, which belongs to this call.
        source: The files of the weights, which must not change.
        blocks: The modules that run as blocks, as ``include`` selects layers; None finds them by the model's structure.
        max_disk_bytes: Bytes that the files of this process may take; None is all that the disk has free.

    Raises:
        CompressionError: As for :func:`panther.compress`; if the model cannot be run part by part; if the files of the
            weights change meanwhile; and if ``scratch`` has files of a run with other arguments, or damaged ones.
    """
    check_model(model)
    check_adapters(model)
    with freed_blocks_returned(), plain_tensors() as forward_device, without_compiled_blocks(model):
        runner = StreamingRunner(
            model, config.calibration, config.forward_fn, config.mask_fn, config.group, config.progress,
            config.loss_fn, forward_device, scratch=scratch, blocks=blocks,
            max_disk_bytes=max_disk_bytes, source=source,
        )  # fmt: skip
        spool = runner.spool
        description = {
            "source": f"{source}", "blocks": _described_setting(blocks), "max_disk_bytes": f"{max_disk_bytes}",
            **_described(config, runner),
        }  # fmt: skip
        before = spool.notes.setdefault("description", description)
        seed = spool.notes.setdefault("seed", check_seed(config.seed))
        if config.seed not in (None, seed):
            description, before = description | {"seed": str(config.seed)}, before | {"seed": str(seed)}
        differing = [name for name in description if description[name] != before[name]]
        refusals = [
            f"{scratch} has the work of a run that was killed, with {name} {before[name]}, and now it is "
            f"{description[name]}: give what that run had, or remove {scratch} to begin anew"
            for name in differing
        ]
        if refusals := [refusal for rank_refusals in runner.gathered(refusals) for refusal in rank_refusals]:
            raise CompressionError(refusals[0])
        spool.commit()
        report = compress_with(runner, replace(config, seed=seed))
        runner.check_source(is_end=True)
        return report


def _described(config: CompressConfig, runner: StreamingRunner) -> dict[str, str]:
    """Return what must not change if a run is continued."""
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _NOT_COMPARED}
    return {
        "panther": __version__,
        "torch": torch.__version__,
        "ranks": str(len(runner.gathered(None))),
        "calibration": described_batches([*runner.batches, *runner.held_out]),
        **{name: shortened(_described_setting(value)) for name, value in settings.items()},
    }


def _described_setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described_setting, value))
    return describe_function(value) if callable(value) else f"{value}"
