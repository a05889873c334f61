"""What an integration does for the models of its library: layers are replaced in them, and they have further files.

The layers below the integrations know no other library. An integration registers one object for its library, and the
functions of this module ask the registered objects.
"""

__all__ = ["ModelLibrary", "layers_replaced", "model_files", "models_in", "register_library"]

from collections.abc import Mapping
from typing import Any, Protocol


class ModelLibrary(Protocol):
    """A library whose models have names of tied weights and files of their own."""

    def is_model(self, module: Any) -> bool:
        """Return whether a module is a model of the library."""

    def layers_replaced(self, model: Any) -> None:
        """Update what a model notes about its layers, after some layers were replaced."""

    def files(self, model: Any, specs: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the files, by name, that lie beside the weights of a model; ``specs`` records compressed layers."""


_libraries: list[ModelLibrary] = []


def register_library(library: ModelLibrary) -> None:
    """Register a library; it is asked before all that were registered earlier."""
    _libraries.insert(0, library)


def models_in(model: Any) -> list[Any]:
    """Return the outermost models of registered libraries in a module, which may be the module itself."""
    if _library_of(model) is not None:
        return [model]
    return [inner for child in model.children() for inner in models_in(child)]


def layers_replaced(model: Any) -> None:
    """Tell the library of each model in a module that layers were replaced."""
    for inner in models_in(model):
        if (library := _library_of(inner)) is not None:
            library.layers_replaced(inner)


def model_files(model: Any, specs: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files, by name, that the library of a model writes beside its weights; none for other modules."""
    library = _library_of(model)
    return {} if library is None else library.files(model, specs)


def _library_of(module: Any) -> ModelLibrary | None:
    return next((library for library in _libraries if library.is_model(module)), None)
