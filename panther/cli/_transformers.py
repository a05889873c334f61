"""Folders of transformers for ``panther compress``: load one without a network, and split text into batches.

Weights are read from safetensors alone, and code that a folder brings is not run.
"""

__all__ = [
    "empty_model", "has_tokenizer", "load_model", "load_tokenizer", "quietly", "sample_inputs", "text_batches",
    "usable_positions",
]  # fmt: skip

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._text import counted
from panther.cli._user_function import explained
from panther.errors import PantherError, require_extra
from panther.integrations.folders.sentence_transformers import loader_of
from panther.integrations.pretrained import from_pretrained, read_config, without_hub_kernels

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MIN_SAMPLES = 5  # a fifth is held out
_VOCABULARIES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(folder: Path) -> nn.Module:
    """Load the model of a folder that is not compressed, in the class that its config.json names, in eval mode."""
    require_extra("transformers", "transformers")
    compressed = (folder / "panther.json").is_file()
    if not compressed:
        if not (folder / "config.json").is_file():
            saved = "give a folder that save_pretrained of transformers wrote"
            if (loader := loader_of(folder)) is not None:
                saved = (
                    f"call pr.compress(sentence_transformers.{loader}(folder), ...), and save_pretrained of the model"
                )
            raise PantherError(f"{folder} holds no config.json: {saved}")
        compressed = read_config(folder).get("quantization_config") is not None
    if compressed:
        raise PantherError(
            f"{folder} holds a model that is compressed or quantized already: compress the original folder again, with "
            "a smaller budget"
        )
    with quietly(f"the model in {folder} cannot be loaded"):
        model: nn.Module = from_pretrained(folder)
    return model


def empty_model(folder: Path) -> Any:
    """Return the model that a folder's config.json describes, compressed layers too, on the meta device."""
    adapter: Any = require_extra("panther.integrations.transformers", "transformers")
    transformers = require_extra("transformers", "transformers")
    with quietly(f"{folder / 'config.json'} cannot be used"):
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        for setting in without_hub_kernels(read_config(folder)):
            setattr(config, f"_{setting}", None)
        name = next(iter(config.architectures or ()), None)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config) if name is None else getattr(transformers, name)(config)
        entry = getattr(config, "quantization_config", None)
        if isinstance(entry, dict) and entry.get("quant_method") == "panther":
            adapter.put_compressed_(model, entry["modules"])
    return model


def sample_inputs(
    model: Any, batch: int, length: int, fix: str, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Return inputs by name: tokens, or an image of the sizes in the config.

    ``names`` are the inputs that the tokenizer makes, in its order; None stands for tokens and their mask. Inputs that
    the forward does not take are left out. ``fix`` ends the error if the inputs of the model are not known.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main not in ("input_ids", "pixel_values"):
        raise PantherError(f"the inputs of a {type(model).__name__} are not known: {fix}")
    if main == "pixel_values":
        size = getattr(config, "image_size", None)
        if not isinstance(size, int):
            raise PantherError(f"config.json names no image_size: {fix}")
        pixels = torch.linspace(-1, 1, batch * size * size).view(batch, 1, size, size)
        return {"pixel_values": pixels.expand(-1, getattr(config, "num_channels", 3), -1, -1).contiguous()}
    tokens = torch.arange(batch * length).view(batch, length) % (getattr(config, "vocab_size", None) or 2)
    sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if names is not None:
        accepted = inspect.signature(model.forward).parameters
        sample |= {"token_type_ids": torch.zeros_like(tokens)}
        sample = {name: sample[name] for name in names if name in sample and name in accepted}
    decoder = {"decoder_input_ids": tokens[:, : max(1, length - 2)].clone()}
    return sample | (decoder if config.is_encoder_decoder else {})


def usable_positions(model: Any) -> int | None:
    """Return the largest number of tokens of a sample that a model has positions for; None if there is no limit."""
    limits = [getattr(model.config, name, None) for name in ("max_position_embeddings", "n_positions")]
    for name, table in model.named_modules():
        padding, weight = getattr(table, "padding_idx", None), getattr(table, "weight", None)
        if "position" in name.rpartition(".")[2] and isinstance(padding, int) and isinstance(weight, Tensor):
            limits.append(
                len(weight) - padding - 1
            )  # Positions of RoBERTa and its kin begin after that of the padding.
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a vocabulary. Without one, transformers creates a tokenizer that knows no word."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; None if it holds none."""
    if not has_tokenizer(folder):
        return None
    transformers = require_extra("transformers", "transformers")
    with quietly(f"the tokenizer in {folder} cannot be loaded"):
        return transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def text_batches(folder: Path, text: Path, model: Any, max_length: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Make batches of a text: a line a sample, padded; for causal models windows of the running text, without padding.

    Batches are smaller where there would be fewer than five of them, because a fifth is held out. The model or its
    tokenizer can lower ``max_length``, the number of tokens of a sample. A text that does not do raises PantherError.
    """
    if model.config.is_encoder_decoder:
        raise PantherError(
            f"{type(model).__name__} has an encoder and a decoder, and a text is input for the encoder only: "
            "give --calibration module:function, which returns batches with both"
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise PantherError(
            f"{folder} holds no tokenizer, which text needs: save it there with tokenizer.save_pretrained, or give "
            "--calibration module:function"
        )
    lines = _lines(text)
    length = min(max_length, tokenizer.model_max_length, usable_positions(model) or max_length)
    with quietly(f"the tokenizer does not run on {text}"):
        if type(model).__name__.endswith(_CAUSAL) or tokenizer.pad_token is None:
            return _windows(text, lines, tokenizer, length, batch_size)
        if len(lines) < _MIN_SAMPLES:
            raise PantherError(
                f"{text} has {counted(len(lines), 'line')} with text and needs at least {_MIN_SAMPLES}, because a "
                "fifth is held out: give about a thousand lines like the text that the model will read"
            )
        accepted = inspect.signature(model.forward).parameters
        size = min(batch_size, len(lines) // _MIN_SAMPLES)
        batches = []
        for start in range(0, len(lines), size):
            samples = lines[start : start + size]
            encoded = tokenizer(samples, truncation=True, max_length=length, padding=True, return_tensors="pt")
            batches.append({key: value for key, value in encoded.items() if key in accepted})
        return batches


def _windows(path: Path, lines: list[str], tokenizer: Any, length: int, batch_size: int) -> list[dict[str, Tensor]]:
    encoded = tokenizer([line + "\n" for line in lines], add_special_tokens=False, verbose=False)["input_ids"]
    tokens = [token for line in encoded for token in line]
    # Models rely on the token that the tokenizer puts before every text. A token that the tokenizer puts after the text
    # is left out, because it would mark the end of the text.
    first = tokenizer("a")["input_ids"][:1]
    prefix = first if first == [tokenizer.bos_token_id] else []
    step = length - len(prefix)
    windows = [prefix + tokens[start : start + step] for start in range(0, len(tokens) - step + 1, step)]
    if len(windows) < _MIN_SAMPLES:
        raise PantherError(
            f"{path} has {len(tokens)} tokens, {len(windows)} windows of {length}, and needs at least "
            f"{_MIN_SAMPLES}, because a fifth is held out: give more text, or a smaller --max-length"
        )
    size = min(batch_size, len(windows) // _MIN_SAMPLES)
    return [{"input_ids": part} for part in torch.tensor(windows).split(size)]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PantherError(f"{path} is not text in UTF-8 (byte {error.start}): convert it first") from None
    except OSError as error:
        raise PantherError(f"{path} cannot be read: {error.strerror}") from None
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        raise PantherError(f"{path} has no text in it: give one sample a line")
    return lines


@contextmanager
def quietly(failure: str) -> Iterator[None]:
    """Keep transformers from printing bars and tables; turn its errors into a sentence that begins with ``failure``."""
    logging = require_extra("transformers", "transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with explained(failure):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
