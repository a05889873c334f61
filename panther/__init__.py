"""Panther: sketched layers for PyTorch, on one device or on many.

>>> import panther as pr
>>> # A drop-in for nn.Linear.
>>> layer = pr.nn.SKLinear(1024, 1024, num_terms=1, low_rank=16)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._hints import missing_name
from ._version import __version__

if TYPE_CHECKING:
    from . import compat, compression, distributed, errors, inspect, kernels, linalg, nn, optim, sketch, train, tuning
    from .compression import (
        CompressionReport,
        HealConfig,
        LinearizationReport,
        SketchConfig,
        compress,
        linearize_,
        sketch_layers_,
    )
    from .distributed import choose_parallelism_strategy, plan_parallelism
    from .nn.fusion import fuse_
    from .nn.io import load_compressed, save_compressed
    from .nn.linears import to_linears_
    from .nn.quantized import PackReport, pack_, unpack_
    from .tuning import TuneResult, tune

# PEP 562: modules are imported when they are first used, so that `panther --version` does not wait for torch.
_MODULES = (
    "nn",
    "optim",
    "sketch",
    "linalg",
    "kernels",
    "compression",
    "train",
    "tuning",
    "distributed",
    "errors",
    "inspect",
    "compat",
)
_FUNCTIONS_AND_CLASSES = {
    "CompressionReport": "compression",
    "HealConfig": "compression",
    "LinearizationReport": "compression",
    "PackReport": "nn.quantized",
    "SketchConfig": "compression",
    "TuneResult": "tuning",
    "choose_parallelism_strategy": "distributed",
    "compress": "compression",
    "compress_folder": "integrations.folders.compress",
    "from_pretrained": "integrations.pretrained",
    "fuse_": "nn.fusion",
    "linearize_": "compression",
    "load_compressed": "nn.io",
    "pack_": "nn.quantized",
    "plan_parallelism": "distributed",
    "save_compressed": "nn.io",
    "sketch_layers_": "compression",
    "to_linears_": "nn.linears",
    "tune": "tuning",
    "unpack_": "nn.quantized",
}

__all__ = [
    "CompressionReport", "HealConfig", "LinearizationReport", "PackReport", "SketchConfig", "TuneResult", "__version__",
    "choose_parallelism_strategy", "compat", "compress", "compress_folder", "compression", "distributed", "errors",
    "from_pretrained", "fuse_", "inspect", "kernels", "linalg", "linearize_", "load_compressed", "nn", "optim", "pack_",
    "plan_parallelism", "save_compressed", "sketch", "sketch_layers_", "to_linears_", "train", "tune", "tuning",
    "unpack_",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS_AND_CLASSES:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS_AND_CLASSES[name]}"), name)
    if name.startswith("_"):  # inspect and pickle ask for names with underscores, and need no suggestion
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    places = [f"{module.__name__}.{name}" for module in modules if name in module.__all__]
    raise missing_name(__name__, name, __all__, f"use {places[0]}" if places else None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


import_module(f"{__name__}.integrations.import_hook").register_with_transformers()
