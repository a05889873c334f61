"""Models of sentence-transformers: they take their features in one dictionary, and people have texts for them.

The library is not imported here. A model of it exists only in a program that has imported it.
"""

__all__ = ["PLAIN", "is_sentence_model", "plain_modules", "with_features"]

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from panther._model_libraries import models_in
from panther.errors import CompressionError

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
    and anything that is not an iterable of batches are returned as they are. A data set may have ``__len__`` and
    ``__getitem__`` alone, as torch's have.

    Raises:
        CompressionError: If the model's tokenizer refuses a batch, or the rows name their texts, as those of a data set
            with columns do.
    """
    if isinstance(calibration, (str, Mapping, Tensor, Iterator)):
        return calibration
    if isinstance(calibration, Iterable):
        batches: list[Any] = list(calibration)
    elif hasattr(calibration, "__getitem__") and hasattr(calibration, "__len__"):
        batches = [calibration[index] for index in range(len(calibration))]
    else:
        return calibration
    if names := next(filter(None, map(_names_of_texts, batches)), None):
        raise CompressionError(
            f"calibration has rows that name their texts ({', '.join(map(repr, names[:3]))}): give the texts, as "
            f"[row[{names[0]!r}] for row in calibration]"
        )
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


def _names_of_texts(row: Any) -> list[str]:
    """Return the names of the texts of a row, or of the lists of texts of a batch; empty unless it has texts alone."""
    if not isinstance(row, Mapping):
        return []
    values = [value if isinstance(value, list) else [value] for value in row.values()]
    return [str(name) for name in row] if all(all(map(_is_text, texts)) for texts in values) else []


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
