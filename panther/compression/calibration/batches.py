"""The batches of a calibration: copies for each forward, positions that count, and the output that is compared.

A batch of sequences has a mask (N, T) of the positions that are not padding, and an encoder-decoder has two, one for
each side. That a tensor begins with (N, T) does not say that it has the positions of a mask: the decoder's input can be
as long as the encoder's, the sequence can come first, and an image can have as many patches as a text has words. So the
model is run once more with each side one position shorter, and what becomes shorter has the positions of that side.
Of the tensors of a batch that begin with the (N, T) of a side, those with two dimensions, such as tokens and masks, are
shortened together. A tensor with more dimensions can be embeddings of the tokens or an image of as many patches: it is
shortened as well if the model does not run otherwise.
"""

__all__ = [
    "MASK_NAMES", "PLAIN", "SHARED", "Masks", "Place", "Places", "ScoreFill", "Shapes", "check_calibration",
    "copy_batch", "counted", "describe_batch", "find_places", "floating_tensor", "is_empty", "is_sentence_model",
    "main_output", "place_batch", "plain_modules", "positions_of", "read_batches", "with_features",
]  # fmt: skip

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

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


MASK_NAMES = ("attention_mask", "decoder_attention_mask")
"""The arguments that hold masks, by the side of the model: encoder, or the only side, and decoder."""

Shapes = dict[nn.Module | None, torch.Size]
"""The shape of the first output of each module, and under None of the model's output."""


class Place(NamedTuple):
    """Which positions the rows of a tensor are."""

    side: int | None
    """The index in MASK_NAMES; None: those of neither side."""
    axis: int
    """The dimension along which the sequence lies; 0 also where batch and sequence are one dimension."""


Places = dict[nn.Module | None, Place]
"""Which positions the output of each module has, and under None that of the model."""


class Masks:
    """The masks of one batch, (N, T) of booleans, by side; None where every position counts.

    Args:
        masks: The masks by side.
        places: Which positions the output of a module has, as far as :func:`find_places` found it.
    """

    def __init__(self, masks: tuple[Tensor | None, ...], places: Places | None = None) -> None:
        self.masks, self._places = masks, places or {}

    def rows(self, x: Tensor, module: nn.Module | None = None) -> Tensor | None:
        """Return the mask of the first dimensions of a tensor at a module, in its layout; None where all rows count.

        The tensor is the module's input or output, or that of the model. Without a known place, the first mask of a
        matching shape counts.
        """
        place = self._places.get(module)
        if place is None:
            matching = (_matching(x, mask, None) for mask in self.masks if mask is not None)
            return next((mask for mask in matching if mask is not None), None)
        mask = None if place.side is None else self.masks[place.side]
        return None if mask is None else _matching(x, mask, place.axis)


def _matching(x: Tensor, mask: Tensor, axis: int | None) -> Tensor | None:
    """Return a mask (N, T) in the layout of x, whose sequence lies along ``axis``; None if x has other dimensions.

    x begins with (N, T) or (T, N), or has N T rows.
    """
    if x.dim() > 2:
        if axis in (None, 1) and x.shape[:2] == mask.shape:
            return mask
        return mask.mT if axis in (None, 0) and x.shape[:2] == mask.shape[::-1] else None
    is_flat = x.dim() == 2 and len(x) == mask.numel() != len(mask)
    return mask.flatten() if is_flat and axis in (None, 0) else None


def positions_of(mask: Any) -> Tensor | None:
    """Return which positions a mask keeps, (N, T) of booleans, or None for what is not a mask.

    A mask that is added to scores has zeros there. A mask (N, ..., T) of pairs, queries by keys, keeps the positions
    that any query of any head reads.
    """
    if not _is_mask(mask):
        return None
    is_added = mask.is_floating_point() and not bool((mask > 0).any())
    positions = mask == 0 if is_added else mask != 0
    return positions.flatten(1, -2).any(1) if positions.dim() > 2 else positions


def counted(x: Tensor, masks: Masks | None, module: nn.Module | None = None) -> Tensor:  # (*, n) -> (rows, n)
    """Return the rows of a tensor at a module that count."""
    if x.dim() < 2:
        return x.reshape(1, -1)
    rows = None if masks is None else masks.rows(x, module)
    return (x if rows is None else x[rows]).flatten(0, -2)


def find_places(batch: Any, shapes_of: Callable[[Any], Shapes]) -> Places:
    """Return which positions the outputs of modules have; nothing where the batch has no mask or cannot be shortened.

    ``shapes_of`` runs the model on a batch. Modules whose output keeps its shape have the positions of neither side.

    Cost: two or three forwards, and one more for each tensor (N, T, ...) that has more dimensions than a mask.
    """
    if not isinstance(batch, Mapping) or not any(_is_mask(batch.get(name)) for name in MASK_NAMES):
        return {}
    shapes = shapes_of(batch)
    places: Places = {}
    is_complete = True
    for side, keys in enumerate(_sides(batch, shapes_of)):
        if not keys:
            continue
        shorter = _shorter_shapes(batch, keys, shapes, shapes_of)
        if shorter is None:
            is_complete = False
            continue
        for module, shape in shapes.items():
            pairs = enumerate(zip(shape, shorter.get(module, shape), strict=False))
            if (axis := next((axis for axis, (old, new) in pairs if old != new), None)) is not None:
                places.setdefault(module, Place(side, axis))
    if is_complete:
        places = {module: Place(None, 0) for module in shapes} | places
    return places


def _shorter_shapes(
    batch: Mapping[str, Any], keys: list[str], shapes: Shapes, shapes_of: Callable[[Any], Shapes]
) -> Shapes | None:
    """Return the shapes where as few of the tensors as possible are shortened; None where the model does not run."""
    flat = [key for key in keys if batch[key].dim() == 2 or key in MASK_NAMES]
    deep = [key for key in keys if key not in flat]
    shorter = None
    for attempt in dict.fromkeys(map(tuple, [flat, *([*flat, key] for key in deep), keys])):
        new_shapes = _shapes_or_none(_shortened(batch, attempt), shapes_of) if attempt else None
        if new_shapes is not None:
            shorter = new_shapes
            if any(shape != shapes.get(module) for module, shape in new_shapes.items()):
                break  # a model that does not read its mask runs with a shorter one, which shows nothing
    return shorter


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() in (2, 3, 4)


def _sides(batch: Mapping[str, Any], shapes_of: Callable[[Any], Shapes]) -> tuple[list[str], list[str]]:
    """Return the arguments that have the positions of the encoder, or of the only side, and those of the decoder."""
    decoder = _alike(batch, [key for key in batch if key.startswith("decoder_")])
    labels = _alike(batch, ["labels"])
    encoder = [key for key in _alike(batch, [MASK_NAMES[0], "input_ids", *batch]) if key not in (*decoder, *labels)]
    masks_of_pairs = [[name] if _is_mask(batch.get(name)) and batch[name].dim() > 2 else [] for name in MASK_NAMES]
    encoder, decoder = encoder + masks_of_pairs[0], decoder + masks_of_pairs[1]
    if labels and not decoder:
        # Labels of a decoder alone are as long as its input, and a model that gets them shorter refuses.
        return (encoder, labels) if _shapes_or_none(_shortened(batch, labels), shapes_of) else ([*encoder, *labels], [])
    return encoder, [*decoder, *labels]


def _alike(batch: Mapping[str, Any], keys: list[str]) -> list[str]:
    """Return the keys of the tensors that begin with the same (N, T) as the first of them, without masks of pairs."""
    tensors = {
        key: batch[key]
        for key in keys
        if isinstance(batch.get(key), Tensor)
        and batch[key].dim() > 1
        and not (key in MASK_NAMES and batch[key].dim() > 2)
    }
    first = next(iter(tensors.values()), None)
    return [] if first is None else [key for key, x in tensors.items() if x.shape[:2] == first.shape[:2]]


def _shortened(batch: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the batch with one position less in these tensors, or with one more where there are one or two.

    One position could be broadcast, and a model would run with tensors of different lengths.
    """

    def changed(x: Tensor, axis: int) -> Tensor:
        length = x.shape[axis]
        return x.narrow(axis, 0, length - 1) if length > 2 else torch.cat([x, x.narrow(axis, length - 1, 1)], axis)

    shorter = dict(batch)
    for key in keys:
        x = batch[key]
        if key in MASK_NAMES and x.dim() > 2:
            shorter[key] = changed(changed(x, -1), -2) if x.shape[-2] == x.shape[-1] else changed(x, -1)
        else:
            shorter[key] = changed(x, 1)
    return shorter


def _shapes_or_none(batch: Any, shapes_of: Callable[[Any], Shapes]) -> Shapes | None:
    try:
        return shapes_of(batch)
    except Exception:  # a model of one length, for example; any error of its forward means that it cannot be told
        return None


_SMALLEST_FILL, _CERTAIN_FILL = 1e4, 1e6
_FILL_GAP = 100.0


@dataclass(frozen=True)
class ScoreFill:
    """The entries of a model's output that hold a large negative number in the place of a score.

    Models fill the scores of choices that are not allowed with -inf, the smallest number of the dtype, -1e9 or -1e4.
    The square of such a number would hide every error in the entries that are scores.
    """

    threshold: float | None
    """Entries up to this number are filled; None where every entry is a score."""
    floor: float
    """The smallest score."""

    @classmethod
    def of(cls, output: Tensor) -> "ScoreFill":
        """Return the fill of an output.

        Entries are filled if their size is 100 times that of all scores or more, and either 1e6 or more, or 1e4 or more
        and for at least half of them, which are at least two, the same number.
        """
        threshold, scores = None, output.detach()
        while scores.numel() and (lowest := scores.amin().item()) <= -_SMALLEST_FILL:
            limit = max(lowest, torch.finfo(scores.dtype).min) / 2
            filled, larger_scores = scores[scores <= limit], scores[scores > limit]
            if not larger_scores.numel() or not _FILL_GAP * larger_scores.abs().amax().item() <= -lowest:
                break
            repeated = int((filled == lowest).sum())
            if lowest > -_CERTAIN_FILL and (repeated < 2 or 2 * repeated < len(filled)):
                break
            threshold, scores = limit, larger_scores
        return cls(threshold, -torch.inf if threshold is None else scores.amin().item())

    def scores(self, output: Tensor) -> Tensor:
        """Return the entries that are scores: one-dimensional where some are filled, otherwise the output itself."""
        return output if self.threshold is None else output[output > self.threshold]

    def replaced(self, output: Tensor) -> Tensor:
        """Return the output with the smallest score in filled entries, so that two outputs can be subtracted."""
        return output if self.threshold is None else output.masked_fill(output <= self.threshold, self.floor)


_OUTPUTS = ("logits", "scores", "sentence_embedding", "last_hidden_state")


def floating_tensor(output: Any) -> Tensor | None:
    """Return the tensor of :func:`main_output`, or None if there is none."""
    return _named_tensor(output)[1]


def main_output(output: Any) -> tuple[str, Tensor]:
    """Return the tensor of a model's output that is compared, and an expression for its place in the output.

    It is the first floating tensor that has a dimension, because a single number is a loss. In a mapping, ``logits``,
    ``scores``, ``sentence_embedding`` and ``last_hidden_state`` come before all further ones.
    """
    name, tensor = _named_tensor(output)
    advice = "pass forward_fn=, a function of the model and a batch that returns the tensor to keep"
    if tensor is None:
        raise CompressionError(
            f"the model returned {_describe_output(output)}, and a floating tensor with at least one dimension is "
            f"needed: {advice}"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "sparse"
        dense = "torch.nested.to_padded_tensor(output, 0.0)" if tensor.is_nested else "output.to_dense()"
        raise CompressionError(f"{name} of the model is a {kind} tensor, and a dense one is needed: {advice}: {dense}")
    return name, tensor


def _named_tensor(output: Any) -> tuple[str, Tensor | None]:
    entries: list[tuple[str, Any]] = []
    if isinstance(output, Tensor):
        entries = [("the output", output)]
    elif isinstance(output, Mapping):
        keys = sorted(output, key=lambda key: _OUTPUTS.index(key) if key in _OUTPUTS else len(_OUTPUTS))
        entries = [(f"output[{key!r}]", output[key]) for key in keys]
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        entries = [(f"output.{name}", getattr(output, name, None)) for name in names]
    elif isinstance(output, (tuple, list)):
        entries = [(f"output[{index}]", entry) for index, entry in enumerate(output)]
    for name, entry in entries:
        if isinstance(entry, Tensor) and entry.is_floating_point() and (entry.is_nested or entry.dim() > 0):
            return name, entry
    return "", None


def _describe_output(output: Any) -> str:
    if isinstance(output, Tensor):
        return "a single number" if output.dim() == 0 else f"a tensor of {output.dtype}"
    return f"a {type(output).__name__} without such a tensor"
