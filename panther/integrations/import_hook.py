"""``import panther`` makes transformers load compressed folders, without importing transformers or torch.

transformers does not refuse a folder of a quantization method that it does not know: it warns, and fills the layers
with random numbers. Every process that imports Panther therefore registers the method, immediately if transformers'
registry is loaded, and otherwise as soon as it is loaded. The registered classes import the adapter when transformers
first uses them, because the adapter reads many modules of transformers, which are incomplete during its import.
"""

__all__ = ["register_with_transformers"]

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

_REGISTRY = "transformers.quantizers.auto"
_ADAPTER = "panther.integrations.transformers"
_METHOD = "panther"
_log = logging.getLogger("panther.integrations")


def register_with_transformers() -> None:
    """Register the method "panther", now or when transformers is imported."""
    if _REGISTRY in sys.modules:
        # A different thread may be importing the registry; import_module waits until it is complete.
        _register(importlib.import_module(_REGISTRY))
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(registry: ModuleType) -> None:
    """Add the method to transformers' dictionaries, because transformers' functions take only loaded classes."""
    try:
        registry.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(_METHOD, _Unloaded("PantherConfig"))
        registry.AUTO_QUANTIZER_MAPPING.setdefault(_METHOD, _Unloaded("PantherQuantizer"))
    except AttributeError as error:  # only a warning, because the program may not use compressed models
        _log.warning(
            "%s: this version of transformers cannot load compressed models of Panther, and fills them with random "
            "numbers",
            error,
        )


class _Unloaded:
    """A placeholder for a class of the adapter, which is imported when the placeholder is called or read."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return an object of the class."""
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def _load(self) -> Any:
        return getattr(importlib.import_module(_ADAPTER), self.__name__)


class _Finder:
    """A finder of transformers' registry: it asks the other finders, and registers the method after the import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Return the spec of transformers' registry, and None for all other modules."""
        if name != _REGISTRY:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Make a loader register the method after it has executed the module; a loader serves a single import."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # If this raises an error, the finder stays for the next attempt to import transformers.
            execute(module)
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        loader.exec_module = exec_module
