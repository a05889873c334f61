"""A small decoder before and after compression, and its files in llama.cpp: the figures of a tutorial of the gallery.

The script docs/gallery/compress/faster_decoder.py is run whole: it trains a decoder of 14 million parameters, which
answers 16 questions, and compresses it to 4 bits. Both models and both in bfloat16 are then timed in turns with
llama.cpp, which runs their files: the original in float32 and bfloat16, and the codes as they are (Q4_1). A call writes
20 tokens after a question of four, in one process and on one thread; a token is a twentieth of it. *Right* counts right
answers. llama.cpp is the package xllamacpp, compiled for AVX2 (``make .venv-llama/.stamp``, and
``PYTHONPATH=.venv-llama``); without it, its rows are left out.
"""

__all__ = ["run"]

import argparse
import copy
import importlib.util
import os
import runpy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, figure, interleave, print_table, test_support, write_csv
from panther.errors import require_extra
from panther.integrations.gguf import write_gguf

_SCRIPT = ROOT / "docs" / "gallery" / "compress" / "faster_decoder.py"
_TOKENS = 20  # as in the tutorial
_END = ord("\n")


def run(quick: bool, budget_s: float = 10.0) -> list[dict[str, Any]]:
    """Run the tutorial, and return a row for each model and program."""
    os.environ.pop("PANTHER_DOCS_QUICK", None)
    if quick:
        os.environ["PANTHER_DOCS_QUICK"] = "1"
    try:
        values = runpy.run_path(str(_SCRIPT))
    finally:
        os.environ.pop("PANTHER_DOCS_QUICK", None)
    original, small = values["model"], values["small"]
    half, small_half = (copy.deepcopy(model).bfloat16() for model in (original, small))
    models = {
        "original, float32": (original, "transformers", _bytes(original)),
        "original, bfloat16": (half, "transformers", _bytes(half)),
        "4 bits, float32": (small, "Panther", values["report"].bytes_after),
        "4 bits, bfloat16": (small_half, "Panther", values["report"].bytes_after),
    }
    calls: dict[tuple[str, str], Callable[[], object]] = {
        (name, program): partial(values["answer"], model, 404, min_new_tokens=_TOKENS)
        for name, (model, program, _) in models.items()
    }
    right = {(name, program): values["right_answers"](model) for name, (model, program, _) in models.items()}
    sizes = {(name, program): size for name, (_, program, size) in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("xllamacpp"):
            for name, model in {"original, float32": original, "original, bfloat16": half, "4 bits": small}.items():
                path = Path(folder) / f"{name}.gguf"
                write_gguf(model, path, tokenizer=_characters())
                engine = test_support("llama_engine").LlamaCpp(path, positions=64)
                calls[name, "llama.cpp"] = partial(engine.decode, _prompt(404), _TOKENS)
                right[name, "llama.cpp"] = sum(_answer(engine, each) == each.phrase for each in values["questions"])
                sizes[name, "llama.cpp"] = path.stat().st_size
        timings = interleave({" | ".join(key): call for key, call in calls.items()}, budget_s=0 if quick else budget_s)
    base = timings["original, bfloat16 | transformers"]
    return [
        {
            "model": name,
            "program": program,
            "mb": figure(sizes[name, program] / 1e6),
            "right": right[name, program],
            "token_ms": figure(1e3 * timings[f"{name} | {program}"].median_s / _TOKENS),
            "x bfloat16": figure(timings[f"{name} | {program}"].ratio_to(base)),
        }
        for name, program in calls
    ]


def _bytes(model: Any) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def _prompt(question: int) -> list[int]:
    return list(f"{question} ".encode())


def _answer(engine: Any, status: Any) -> str:
    tokens, _ = engine.decode(_prompt(status.value), _TOKENS, ignore_end=False)
    return bytes(tokens).decode().strip()


def _characters() -> Any:
    """Return a tokenizer whose tokens are the characters of ASCII, by their numbers."""
    tokenizers: Any = require_extra("tokenizers", "transformers")
    transformers: Any = require_extra("transformers", "transformers")
    splitter = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Byte-level tokenizers write a byte as the character of this place in their alphabet.
    names = [splitter.pre_tokenize_str(chr(number))[0][0] for number in range(128)]
    merges = [(names[0], names[0])]  # llama.cpp wants one: two NULs take the place of the last character.
    names[-1] = 2 * names[0]
    model = tokenizers.Tokenizer(tokenizers.models.BPE({name: number for number, name in enumerate(names)}, merges))
    model.pre_tokenizer = splitter
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=names[_END])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller decoder, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(arguments.quick)
    print_table(rows)
    if not arguments.quick:
        write_csv("decoder", rows, device="cpu")
