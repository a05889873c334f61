"""``import panther`` makes transformers load compressed folders, without importing transformers or torch.

transformers does not refuse a folder of a quantization method that it does not know: it warns, and fills the layers
with random numbers. So every process that imports Panther registers the method: at once if transformers' registry is
loaded, otherwise as soon as it is. What is registered imports the adapter when transformers first uses it, because the
adapter reads many modules of transformers, which are incomplete while transformers is imported.
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
        # Another thread may be importing it: this waits for the end.
        _register(importlib.import_module(_REGISTRY))
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(registry: ModuleType) -> None:
    """Add the method to transformers' dictionaries; transformers' own functions for it take loaded classes alone."""
    try:
        registry.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(_METHOD, _Unloaded("PantherConfig"))
        registry.AUTO_QUANTIZER_MAPPING.setdefault(_METHOD, _Unloaded("PantherQuantizer"))
    except AttributeError as error:  # the program may have no use for compressed models, and must not end here
        _log.warning(
            "%s: this transformers cannot load compressed models of Panther, and fills them with random numbers",
            error,
        )


class _Unloaded:
    """A class of the adapter, which is imported when the class is called or read from."""

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
    """A finder of one module, which lets the other finders find it, and acts once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Return the spec of transformers' registry; None of all other modules."""
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
        """Make a loader, which is made for one import, end with the registration."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # If this raises an error, the finder stays for the next attempt to import transformers.
            execute(module)
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        loader.exec_module = exec_module
