"""The tokenizer of a GGUF file: tokens, merges and special tokens of a fast tokenizer of transformers."""

__all__ = ["write_vocabulary"]

import json
from typing import Any

from panther.errors import PantherError

# How llama.cpp's rules split this text; the parts tell the rules apart, however a tokenizer writes them.
_PROBE = "It's 12345 DON'T,\n\n  no camelCase 你好"
_END = (" no", " camelCase", " 你好")
_RULES = {
    ("It", "'s", " ", "123", "45", " DON", "'T", ",\n\n", " ", *_END): "llama-bpe",
    ("It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", ",\n\n", " ", *_END): "qwen2",
    ("It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'", "T", ",", "\n\n ", *_END): "smollm",
    ("It", "'s", " 12345", " DON", "'", "T", ",", "\n\n ", *_END): "gpt-2",
}
_SPACE = "▁"  # how vocabularies of sentencepiece write a space


def write_vocabulary(writer: Any, tokenizer: Any, vocab_size: int, token_types: Any) -> None:
    """Write the vocabulary and the chat template of a tokenizer by a GGUFWriter; None writes no vocabulary.

    Byte-level BPE is written with its merges. BPE with bytes as a fallback, as sentencepiece trains it, is written with
    scores, the negative ranks of the merges that make the tokens.

    Raises:
        PantherError: If llama.cpp does not have such a tokenizer, or the model has fewer embeddings than tokens.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PantherError(f"{type(tokenizer).__name__} is not a fast tokenizer: save the tokenizer as tokenizer.json")
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE" or not model["merges"]:  # llama.cpp does not load a file without merges.
        raise PantherError(f"the tokenizer is of type {model['type']}, and only BPE with merges can be written in GGUF")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(tokens) >= vocab_size:
        raise PantherError(f"the tokenizer has {max(tokens) + 1} tokens, and the model {vocab_size} embeddings")
    types = dict.fromkeys(tokens, token_types.NORMAL)
    for number, token in backend.get_added_tokens_decoder().items():
        types[number] = token_types.CONTROL if token.special else token_types.USER_DEFINED
    for number in range(vocab_size):
        tokens.setdefault(number, f"[PAD{number}]")
        types.setdefault(number, token_types.UNUSED)
    if model.get("byte_fallback"):
        _write_scores(writer, tokenizer, tokens, types, merges, token_types)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitting_rule(backend))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list([tokens[number] for number in range(vocab_size)])
    writer.add_token_types([types[number] for number in range(vocab_size)])
    _write_special(writer, tokenizer)


def _write_scores(
    writer: Any,
    tokenizer: Any,
    tokens: dict[int, str],
    types: dict[int, Any],
    merges: list[tuple[str, ...]],
    token_types: Any,
) -> None:
    """Write what sentencepiece has instead of merges: a score of each token."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    for number, token in tokens.items():
        if types[number] is token_types.NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[number] = token_types.BYTE
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = token_types.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(ranks.get(tokens[number], len(merges))) for number in range(len(tokens))])
    parts = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    writer.add_add_space_prefix(parts[0].startswith(_SPACE))


def _splitting_rule(backend: Any) -> str:
    """Return llama.cpp's name of the rule by which a text is split before merges."""
    splitter = backend.pre_tokenizer
    parts = tuple(_PROBE[start:end] for _, (start, end) in splitter.pre_tokenize_str(_PROBE)) if splitter else ()
    if parts not in _RULES:
        raise PantherError(
            f"the tokenizer splits {_PROBE!r} into {parts}, which is none of the rules {', '.join(_RULES.values())}, "
            "the only ones that can be written in GGUF: write the file with tokenizer=None"
        )
    return _RULES[parts]


def _write_special(writer: Any, tokenizer: Any) -> None:
    """Write the special tokens, which of them frame a text, and the chat template."""
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    framed = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(len(framed) > 1 and framed[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(framed) > 1 and framed[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": each} for name, each in template.items()]
    if template:
        writer.add_chat_template(template)
