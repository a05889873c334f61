"""Panther: sketched layers for PyTorch, on one device or on many.

>>> import panther as pr
>>> layer = pr.nn.SKLinear(1024, 1024, num_terms=1, low_rank=16)  # drop-in for nn.Linear
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import compression, errors, linalg, nn, sketch
from ._version import __version__
from .compression import CompressionReport, HealConfig, SketchConfig, compress, sketch_layers_
from .nn.io import load_compressed, save_compressed

if TYPE_CHECKING:
    from . import distributed, train
    from .distributed import choose_parallelism_strategy, plan_parallelism

_LAZY = {  # PEP 562: when first asked for
    "distributed": "distributed",
    "train": "train",
    "choose_parallelism_strategy": "distributed",
    "plan_parallelism": "distributed",
}

__all__ = [
    "CompressionReport",
    "HealConfig",
    "SketchConfig",
    "__version__",
    "choose_parallelism_strategy",
    "compress",
    "compression",
    "distributed",
    "errors",
    "linalg",
    "load_compressed",
    "nn",
    "plan_parallelism",
    "save_compressed",
    "sketch",
    "sketch_layers_",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = import_module(f"{__name__}.{_LAZY[name]}")
        return module if name == _LAZY[name] else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
