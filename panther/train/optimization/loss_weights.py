"""The weight of a batch's mean loss in the mean over a step: by samples, by tokens, or by class weights.

The loss of a step is ``sum(weight * loss) / sum(weight)`` over its batches on all ranks. With the weight by which the
loss function itself divides, this is the loss of one large batch, and so is its gradient.
"""

__all__ = ["LossWeights"]

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from panther.distributed.pipeline.losses import reduction_of
from panther.errors import ConfigError

_IGNORED = -100  # the label that torch and transformers ignore by default
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)


class LossWeights:
    """The weight of each batch, for a loss function that is a mean; ``loss_weight`` is as for the Trainer.

    Torch's losses of classes and their functions count by their divisor, the sum of the class weights of the labels
    that are not ignored, and all other losses count by samples.
    """

    def __init__(self, loss_fn: Any, loss_weight: Callable[[Any], Any] | str | int | None) -> None:
        self.loss_fn, self.loss_weight = loss_fn, loss_weight
        is_mean = reduction_of(loss_fn) == "mean"
        if loss_weight is not None:
            if isinstance(loss_weight, bool) or not (isinstance(loss_weight, str | int) or callable(loss_weight)):
                raise ConfigError(
                    "loss_weight must be a function of a batch, or the key or index of an entry of a batch, not a "
                    f"{type(loss_weight).__name__}"
                )
            if not is_mean:
                raise ConfigError(
                    f"loss_weight is for a loss that is a mean, and loss_fn has reduction={reduction_of(loss_fn)!r}: "
                    "leave loss_weight out"
                )
        self.by_classes = loss_weight is None and is_mean and _divides_by_classes(loss_fn)
        self.by_samples = loss_weight is None and not self.by_classes
        """Whether every batch counts by the number of its samples."""
        # torch's other losses are means over samples.
        is_known = type(loss_fn).__module__ == "torch.nn.modules.loss"
        self._watches = self.by_samples and is_mean and not is_known

    def of(self, data: Any, samples: int) -> float:
        """Return the weight of a batch on this rank, before it is moved to a device."""
        if samples == 0:  # a filler
            return 0.0
        if self.by_samples:
            return float(samples)
        if self.by_classes:
            is_pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
            return self._sum_of_classes(data[1]) if is_pair else float(samples)
        weight = self._weight_by_user(data)
        if not 0 <= weight < math.inf:
            raise ConfigError(f"the loss_weight of a batch is {weight}, and must be at least 0 and finite")
        return weight

    def warn_of_ignored_labels(self, data: Any) -> None:
        """Warn once if labels of a batch are ignored by a loss whose divisor is not known."""
        if not self._watches:
            return
        if self.loss_fn is None:
            labels = data.get("labels") if isinstance(data, Mapping) else None
        else:
            labels = data[1] if isinstance(data, tuple | list) and len(data) == 2 else None
        # Reading labels on a GPU would wait for the GPU.
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or not labels.is_cpu:
            return
        if (labels == _IGNORED).any():
            self._watches = False
            key = "labels" if self.loss_fn is None else 1
            warnings.warn(
                f"labels of a batch are {_IGNORED}, which losses of torch ignore, and batches count by their samples: "
                "if the loss is a mean over the labels that are not ignored, pass their number to Trainer, "
                f"loss_weight=lambda batch: (batch[{key!r}] != {_IGNORED}).sum()",
                UserWarning,
                stacklevel=2,
            )

    def _sum_of_classes(self, target: Tensor) -> float:
        if target.is_floating_point():  # probabilities of classes, (samples, classes, ...)
            return float(target.numel() // target.shape[1]) if target.dim() > 1 else 1.0
        if isinstance(self.loss_fn, nn.Module):
            options = {name: getattr(self.loss_fn, name) for name in ("weight", "ignore_index")}
        else:
            options = getattr(self.loss_fn, "keywords", {})
        counts: Tensor = target.ne(options.get("ignore_index", _IGNORED))
        weight: Tensor | None = options.get("weight")
        if weight is None:
            return float(counts.sum())
        return float(weight.to(target.device, torch.float64)[target[counts]].sum())

    def _weight_by_user(self, data: Any) -> float:
        if callable(self.loss_weight):
            return float(self.loss_weight(data))
        entries: dict[Any, Any] = dict(data) if isinstance(data, Mapping) else {}
        if isinstance(data, tuple | list):
            entries = dict(enumerate(data))
            if data and isinstance(data[0], Mapping):  # inputs by keyword, beside the target of a loss_fn
                entries |= data[0]
        if self.loss_weight in entries:
            entry = entries[self.loss_weight]
            return float(entry.double().sum() if isinstance(entry, Tensor) else entry)
        names = ", ".join(map(repr, entries)) or "none"
        raise ConfigError(
            f"loss_weight={self.loss_weight!r} is not an entry of a batch: use a function, or one of {names}"
        )


def _divides_by_classes(loss_fn: Any) -> bool:
    """Return whether a loss divides by the class weights of the labels that it does not ignore."""
    if isinstance(loss_fn, _CLASS_LOSSES):
        # A subclass of the user may compute a different loss.
        return type(loss_fn).forward in (kind.forward for kind in _CLASS_LOSSES)
    if isinstance(loss_fn, functools.partial):
        return loss_fn.func in _CLASS_FUNCTIONS and not loss_fn.args
    return loss_fn in _CLASS_FUNCTIONS
