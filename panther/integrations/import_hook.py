"""``import panther`` makes transformers load compressed folders and PEFT adapt them, without importing any of these.

transformers does not refuse a folder of a quantization method that it does not know: it warns, and fills the layers
with random numbers. Every process that imports Panther therefore registers the method, immediately if transformers'
registry is loaded, and otherwise as soon as it is loaded. The registered classes import the adapter when transformers
first uses them, because the adapter reads many modules of transformers, which are incomplete during its import.

The method alone does not suffice. transformers asks it only if the config that is saved or read names compressed
layers. Models are often saved with other configs: a model that contains a compressed one, a part, or a dense model of
the same config. ``save_pretrained`` and ``from_pretrained`` of all models are therefore wrapped: saving writes the
record of the layers that the model has, and loading refuses weights of compressed layers that it would not use.

PEFT skips layers that it does not know in silence, and copies integer codes to train them. Its methods that would do so
are wrapped when PEFT is imported, and the adapter is imported when one of them meets the first compressed layer.
"""

__all__ = ["MARKS", "register_with_transformers"]

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from panther._model_libraries import register_library

_REGISTRY, _MODELS = "transformers.quantizers.auto", "transformers.modeling_utils"
_ADAPTER = "panther.integrations.transformers"
_METHOD = "panther"
# Last parts of the names of tensors that only compressed layers have.
MARKS = ("S1", "S2", "sketch_seed", "codes", "scales", "factor_scales", "skeleton", "down", "up")
_log = logging.getLogger("panther.integrations")
_PEFT_ADAPTER = "panther.integrations.peft"
# The methods, and the functions of the adapter that are called first with the same arguments.
_PEFT_METHODS = (
    ("peft.tuners.tuners_utils", "BaseTuner", "__init__", "before_tuner"),
    ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter", "before_injection"),
    ("peft.tuners.tuners_utils", "BaseTuner", "_inject_parameters", "before_parameters"),
    ("peft.tuners.trainable_tokens", "TrainableTokensLayer", "__init__", "before_token_training"),
    ("peft.utils.other", "ModulesToSaveWrapper", "update", "before_copy"),
)


def register_with_transformers() -> None:
    """Register the method "panther" and wrap saving and loading, now or when transformers is imported; wrap PEFT."""
    for name, complete in ((_REGISTRY, _register), (_MODELS, _wrap), ("peft", _wrap_peft)):
        if name in sys.modules:
            # A different thread may be importing the module; import_module waits until it is complete.
            complete(importlib.import_module(name))
        elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, complete))


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


def _wrap(models: ModuleType) -> None:
    """Wrap ``save_pretrained`` and ``from_pretrained`` of the base class of all models, once."""
    base = getattr(models, "PreTrainedModel", None)
    if base is None or hasattr(base.save_pretrained, "_panther"):
        return
    register_library(_Transformers(base))
    save, load = base.save_pretrained, base.from_pretrained.__func__

    @functools.wraps(save)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "panther.nn.protocol" not in sys.modules and not _is_recorded(model):
            return save(model, *args, **kwargs)  # no layer is compressed, and the adapter needs not be imported
        state = kwargs.get("state_dict", args[2] if len(args) > 2 else None)  # folder, is_main_process, state_dict
        folder = kwargs.get("save_directory", args[0] if args else None)
        with _adapter().saving(model, folder, state=state):
            return save(model, *args, **kwargs)

    @functools.wraps(load)
    def from_pretrained(kind: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        model, info = load(kind, *args, output_loading_info=True, **kwargs)
        names = (name.rpartition(".")[2] for key in ("missing_keys", "unexpected_keys") for name in info[key])
        if any(name in MARKS for name in names):
            _adapter().check_loaded(model, info)
        return (model, info) if output_loading_info else model

    save_pretrained._panther = True  # type: ignore[attr-defined]
    base.save_pretrained, base.from_pretrained = save_pretrained, classmethod(from_pretrained)


def _is_recorded(model: Any) -> bool:
    entry = getattr(model.config, "quantization_config", None)
    return isinstance(entry, Mapping) and entry.get("quant_method") == _METHOD


def _adapter() -> Any:
    return importlib.import_module(_ADAPTER)


class _Transformers:
    """transformers, for the layers below; the adapter is imported at the first model with compressed layers."""

    def __init__(self, base: type) -> None:
        self._pretrained_class = base

    def is_model(self, module: Any) -> bool:
        """Return whether a module is a PreTrainedModel."""
        return isinstance(module, self._pretrained_class)

    def layers_replaced(self, model: Any) -> None:
        """Update the names of tied weights."""
        _adapter().layers_replaced(model)

    def files(self, model: Any, specs: Mapping[str, Any]) -> dict[str, bytes]:
        """Return config.json, the settings of generation, and the code of a model of trust_remote_code."""
        files: dict[str, bytes] = _adapter().model_files(model, specs)
        return files


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
        return getattr(_adapter(), self.__name__)


class _Finder:
    """A finder of one module of transformers: it asks the other finders, and completes the module after its import."""

    def __init__(self, name: str, complete: Callable[[ModuleType], None]) -> None:
        self.name, self._complete = name, complete

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Return the spec of the module, and None for all other modules."""
        if name != self.name:
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
        """Make a loader complete the module after it has executed it; a loader serves a single import."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # If this raises an error, the finder stays for the next attempt to import transformers.
            execute(module)
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._complete(module)

        loader.exec_module = exec_module


def _wrap_peft(peft: ModuleType) -> None:
    """Wrap the methods, once."""
    for place, class_name, name, function in _PEFT_METHODS:
        kind = getattr(sys.modules.get(place), class_name, None)
        if hasattr(kind, name) and not hasattr(getattr(kind, name), "_panther"):  # a version need not have all of them
            setattr(kind, name, _asking(getattr(kind, name), function))


def _asking(method: Any, function: str) -> Any:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch and the class are loaded if there is a layer of the class.
        layers = getattr(sys.modules.get("panther.nn.protocol"), "CompressedModule", None)
        arguments = (*args, *kwargs.values(), getattr(self, "original_module", None))
        modules = (module for x in arguments if hasattr(x, "modules") for module in x.modules())
        if layers is not None and any(isinstance(module, layers) for module in modules):
            getattr(importlib.import_module(_PEFT_ADAPTER), function)(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    wrapped._panther = True  # type: ignore[attr-defined]
    return wrapped
