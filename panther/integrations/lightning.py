"""Compressed models in Lightning: a callback for its Trainer. Fabric needs no callback; see the guide."""

__all__ = ["CompressCallback"]

from typing import Any

from torch import nn

import panther as pr
from panther.errors import ConfigError, check_version, require_extra
from panther.integrations._training import checked_options, compare_and_log, compress_and_log

lightning: Any = require_extra("lightning", "lightning")
check_version("lightning", lightning.__version__, 2)


class CompressCallback(lightning.Callback):
    """For Lightning's Trainer: log the sizes of compressed layers, and compress and heal the model after training.

    When fitting starts, the sketches of all processes are compared, and the number of compressed layers, their ranks
    and bytes go to the log (logger ``panther.integrations``, level INFO) and to the Trainer's loggers. When fitting
    ends, the trained model is compressed on all processes jointly if options are given. Checkpoints that Lightning
    wrote earlier hold the uncompressed layers; save the compressed model by :func:`panther.save_compressed`.

    Args:
        module: Name of the model within the LightningModule, as ``"model"`` for ``self.model``; None is the
            LightningModule itself, whose ``forward`` is then called on the batches of ``calibration``.
        options: Arguments of :func:`panther.compress` by name, such as ``bits``, ``calibration`` and ``heal``. Without
            options, the model is not compressed.

    Attributes:
        report: The report of the compression; None before it.

    Raises:
        ConfigError: If an option is unknown, or no option is a size; when fitting starts, if the LightningModule has no
            module of that name.
        CompressionError, TypeError, ValueError: If :func:`panther.compress` does not take an option.
        SketchMismatchError: When fitting starts, if processes have different sketches.

    Example:
        >>> from panther.integrations.lightning import CompressCallback
        >>> callback = CompressCallback(
        ...     "model", bits=4.25, calibration=[], forms=("int8", "int4")
        ... )
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        self.module = module
        self.options = checked_options(options, "CompressCallback") if options else {}
        self.report: pr.CompressionReport | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compare sketches, and log sizes."""
        self._record(trainer, compare_and_log(self._model(pl_module)))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Compress, if there are options."""
        if self.options:
            self.report, entry = compress_and_log(self._model(pl_module), self.options)
            self._record(trainer, entry)

    def _model(self, pl_module: nn.Module) -> nn.Module:
        if self.module is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.module)
        except AttributeError:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise ConfigError(
                f"the {type(pl_module).__name__} has no module {self.module!r}: it has {names or 'none'}"
            ) from None

    def _record(self, trainer: Any, entry: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(entry, step=trainer.global_step)
