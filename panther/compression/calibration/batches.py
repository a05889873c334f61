"""Check calibration batches, move them to a device, and copy them for each forward, which may change its arguments."""

__all__ = [
    "PLAIN", "SHARED", "check_calibration", "copy_batch", "describe_batch", "is_empty",
    "is_sentence_model", "place_batch", "plain_modules", "read_batches", "with_features",
]  # fmt: skip

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from panther._model_libraries import models_in
from panther._torch import tree_leaves
from panther.errors import CompressionError

# Types that are not copied: a forward cannot change them, or a batch refers to them without owning them.
SHARED = (
    str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, nn.Module, torch.Size, torch.dtype,
    torch.device,
)  # fmt: skip


def check_calibration(calibration: Any) -> None:
    """Raise CompressionError unless the batches can be read more than once."""
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        fix = "for one tensor use calibration=list(tensor.split(32))"
        if not isinstance(calibration, Tensor):
            fix = "each batch is the model's input: a tensor, a dict or a tuple"
        raise CompressionError(f"calibration must be a list or a DataLoader of batches, not a {kind}: {fix}")
    if isinstance(calibration, Iterator):
        raise CompressionError(
            f"calibration is a {type(calibration).__name__}, which can be read only once: pass a list of its batches "
            "(list(itertools.islice(batches, 32))) or a DataLoader"
        )


def read_batches(calibration: Iterable[Any], device: torch.device) -> list[Any]:
    """Return all batches on a device.

    Batches of a list stay the caller's tensors if they are on the device already, so that they take no further memory.
    Any other iterable may write each batch into the memory of the one before, so its tensors are copied.
    """
    read = place_batch if isinstance(calibration, (Sequence, DataLoader)) else copy_batch
    return [read(batch, device) for batch in calibration]


def place_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch whose tensors are on a device; tensors that are on the device already are not copied."""
    return _rebuilt(batch, lambda x: x.to(device), {}, top=True)


def copy_batch(batch: Any, device: torch.device | None = None) -> Any:
    """Return a copy of a batch whose tensors and containers a forward may change.

    Tensors, arrays, generators, containers and the attributes of other objects, such as a cache of keys and values, are
    copied; two references to one object stay two references to one copy. Modules, functions and classes are not copied.
    """

    def copied(x: Tensor) -> Tensor:
        moved = x.detach() if device is None else x.detach().to(device)
        same_memory = moved.device == x.device
        # The copy is a leaf with the caller's requires_grad, as a forward expects.
        return (moved.clone() if same_memory else moved).requires_grad_(x.requires_grad)

    return _rebuilt(batch, copied, {}, top=True)


def _rebuilt(value: Any, convert: Callable[[Tensor], Tensor], copies: dict[int, Any], *, top: bool = False) -> Any:
    """Return a value in which ``convert`` was applied to each tensor; ``copies`` are the results by address."""
    if value is None or isinstance(value, SHARED):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        result: Any = convert(value)
    elif isinstance(value, np.ndarray):
        result = value.copy()
    elif isinstance(value, torch.Generator):
        result = value.clone_state()
    elif top and isinstance(value, Mapping):
        # The keywords of the forward. A BatchEncoding of transformers is a mapping and not a dictionary.
        result = {key: _rebuilt(entry, convert, copies) for key, entry in value.items()}
    elif isinstance(value, tuple):
        entries = [_rebuilt(entry, convert, copies) for entry in value]
        result = value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    else:
        return _rebuilt_object(value, convert, copies)
    copies[id(value)] = result
    return result


def _rebuilt_object(value: Any, convert: Callable[[Tensor], Tensor], copies: dict[int, Any]) -> Any:
    try:
        result = copy.copy(value)
    except Exception:  # an object that cannot be copied, such as an open file, is passed on
        return value
    copies[id(value)] = result  # stored before the contents are copied, because they can refer to the object
    if result is value:
        return value
    if isinstance(result, list):
        result[:] = [_rebuilt(entry, convert, copies) for entry in value]
    elif isinstance(result, dict):
        for key, entry in value.items():
            result[key] = _rebuilt(entry, convert, copies)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(value, "__dict__", ()), *slots]:
        if name not in ("__dict__", "__weakref__") and hasattr(value, name):
            # object.__setattr__, because the __setattr__ of a frozen dataclass raises.
            object.__setattr__(result, name, _rebuilt(getattr(value, name), convert, copies))
    return result


def is_empty(batch: Any) -> bool:
    """Return whether a batch has tensors, and none of them has entries."""
    tensors = _tensors_of(batch)
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _tensors_of(batch: Any) -> list[Tensor]:
    entries = [*batch.values()] if isinstance(batch, Mapping) else batch
    return [leaf for leaf in tree_leaves(entries) if isinstance(leaf, Tensor)]


def describe_batch(batch: Any) -> str:
    """Return a description of a batch for messages."""
    if isinstance(batch, Tensor) and batch.is_nested:
        return f"a nested tensor of {batch.size(0)} tensors"
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(repr, batch))}" if batch else "an empty dict"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}, passed as separate arguments"
    return f"an object of type {type(batch).__name__}"


PLAIN = (
    "is outside of the transformers model, in a module that sentence-transformers loads with plain layers only: to "
    "compress it even so, name its type in include=, and save the model with pr.save_compressed"
)
_CLASSES = ("BaseModel", "SentenceTransformer")  # the base of all models, and the class that versions before 6 have
_BATCH_SIZE = 32  # what encode of sentence-transformers takes
_LEAST_BATCHES = 5  # a fifth is held out


def is_sentence_model(model: nn.Module) -> bool:
    """Return whether a model is a SentenceTransformer, a SparseEncoder or a CrossEncoder."""
    return any(
        kind.__name__ in _CLASSES and kind.__module__.partition(".")[0] == "sentence_transformers"
        for kind in type(model).__mro__
    )


def plain_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that the library could not load if they were compressed; none of another model.

    The transformers models in it are loaded by ``from_pretrained``, which builds compressed layers. Modules such as
    ``Dense`` and ``StaticEmbedding`` load a state_dict into the layers that they make.
    """
    if not is_sentence_model(model):
        return set()
    loadable = {module for inner in models_in(model) for module in inner.modules()}
    return set(model.modules()) - loadable


def with_features(model: Any, calibration: Any) -> Any:
    """Return calibration batches in which texts are replaced by the features that the model's ``encode`` would make.

    Texts in one list are divided into batches of 32, or into five batches if there are fewer than 160 texts. A batch
    can also be a list of texts. A text is a string, or for a CrossEncoder a tuple of two strings. Batches of features
    and anything that is not an iterable of batches are returned as they are.
    """
    if isinstance(calibration, (str, Mapping, Tensor, Iterator)):
        return calibration
    if isinstance(calibration, Iterable):
        batches: list[Any] = list(calibration)
    elif hasattr(calibration, "__getitem__") and hasattr(calibration, "__len__"):
        batches = [calibration[index] for index in range(len(calibration))]
    else:
        return calibration
    if all(map(_is_text, batches)):
        size = max(1, min(_BATCH_SIZE, len(batches) // _LEAST_BATCHES))
        batches = [batches[start : start + size] for start in range(0, len(batches), size)]
    is_texts = [isinstance(batch, (list, tuple)) and bool(batch) and all(map(_is_text, batch)) for batch in batches]
    if not any(is_texts):
        return calibration  # a DataLoader, for example, whose batches are read by the rules for other models
    return [_features(model, list(batch)) if texts else batch for batch, texts in zip(batches, is_texts, strict=True)]


def _is_text(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return isinstance(value, str) or is_pair


def _features(model: Any, texts: list[Any]) -> Any:
    """Return the features of texts, with the prompt that ``encode`` puts before a text by default."""
    name = getattr(model, "default_prompt_name", None)
    prompt = None if name is None else model.prompts.get(name)
    try:
        return model.preprocess(texts, prompt=prompt)
    except Exception as error:
        raise CompressionError(
            f"{type(error).__name__}: {error}: the tokenizer of the {type(model).__name__} raised this for calibration "
            "texts: give batches of model.preprocess(texts)"
        ) from error
