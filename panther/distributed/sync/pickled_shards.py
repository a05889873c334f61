"""Warn about shards of a model that are pickled, for example by ``torch.save(model.state_dict())`` on one rank.

The file then has the shards of one rank, and loads neither into the model nor on another machine. A state dictionary
does not tell whether it will be pickled, because ``torch.distributed.checkpoint`` and Panther's own checkpoints take
the same dictionary. They write shards as plain tensors and pickle no DTensor, so a pickled DTensor is always a mistake.
"""

__all__ = ["warn_of_pickled_shards"]

import copyreg
import inspect
import threading
import warnings
from typing import Any

from torch.distributed.tensor import DTensor

_warned = threading.Event()
_PICKLING = 4  # frames from the warning to the caller of torch.save


def warn_of_pickled_shards() -> None:
    """Warn when this process first pickles a DTensor of several ranks. Sharding a model calls this function."""
    copyreg.pickle(DTensor, _reduce)


def _reduce(shard: DTensor) -> Any:
    if not _warned.is_set() and shard.device_mesh.size() > 1 and not _is_moved_by_torch():
        _warned.set()
        local = tuple(shard.to_local().shape)
        held = "holds all of it" if local == tuple(shard.shape) else f"holds {local} of its {tuple(shard.shape)}"
        warnings.warn(
            f"a tensor of a distributed model was pickled, as by torch.save, and this rank {held}: the file loads only "
            "on as many processes, each with a file of its own. Call Trainer.export(folder), or "
            "panther.distributed.checkpoint.export(model, folder), on every rank to save the whole model, or "
            "full_tensor() of each tensor; panther.distributed.checkpoint.save is for continuing the training",
            UserWarning,
            stacklevel=_PICKLING,
        )
    return shard.__reduce_ex__(2)


def _is_moved_by_torch() -> bool:
    """Return whether torch.distributed.checkpoint pickles, which hands a state to a process that writes it."""
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
    return False
