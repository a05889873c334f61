"""Compress a model whose weights are mapped from files, part by part, with a folder for what is kept meanwhile."""

__all__ = ["CompressConfig", "compress_streamed"]

from pathlib import Path

from torch import nn

from panther.compression._compress import compress_with, plain_tensors
from panther.compression.calibration.checks import check_adapters, check_model
from panther.compression.calibration.model_state import without_compiled_blocks
from panther.compression.config import CompressConfig
from panther.compression.report import CompressionReport
from panther.compression.streaming.runner import StreamingRunner
from panther.compression.streaming.spool import Spool, freed_blocks_returned


def compress_streamed(model: nn.Module, config: CompressConfig, scratch: Path) -> CompressionReport:
    """Compress a model in place, as :func:`panther.compress` does, with all that is large in files of ``scratch``.

    The new layers of the model are mapped from files that are removed already.
    """
    check_model(model)
    check_adapters(model)
    with freed_blocks_returned(), plain_tensors() as forward_device, without_compiled_blocks(model):
        runner = StreamingRunner(
            model, config.calibration, config.forward_fn, config.mask_fn, config.group, config.progress,
            config.loss_fn, forward_device, spool=Spool(scratch),
        )  # fmt: skip
        return compress_with(runner, config)
