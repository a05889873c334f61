"""Files in the format GGUF, run by llama.cpp.

The package xllamacpp has llama.cpp compiled for processors with AVX2; ``make .venv-llama/.stamp`` brings it.
"""

__all__ = ["LlamaCpp"]

import importlib
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class LlamaCpp:
    """A model that llama.cpp has loaded, on one thread, with its keys and values in float32.

    Args:
        path: The file.
        positions: Tokens of the longest text.
    """

    def __init__(self, path: Path, *, positions: int) -> None:
        self._library: Any = importlib.import_module("xllamacpp")
        parameters = self._library.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel = positions, 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = self._library.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = self._library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.warmup, parameters.fit_params, parameters.verbosity = False, False, 0
        self._server = self._library.Server(parameters)

    def decode(
        self,
        prompt: str | Sequence[int],
        count: int,
        words: int = 0,
        *,
        ignore_end: bool = True,
    ) -> tuple[list[int], Tensor]:  # (count, words)
        """Return the tokens of greedy decoding, and the logarithms of the probabilities before each of them.

        Args:
            prompt: A text or the numbers of its tokens.
            count: Tokens to decode.
            words: Tokens of the vocabulary; 0 returns no probabilities.
            ignore_end: Whether to continue where the text would end.
        """
        request = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt), "n_predict": count, "temperature": 0,
            "n_probs": max(words, 1), "cache_prompt": False, "ignore_eos": ignore_end,
        }  # fmt: skip
        answer = self._server.handle_completions(request)
        places = answer["choices"][0]["logprobs"]["content"]
        table = torch.full((len(places), words), float("nan"))
        for row, place in zip(table, places, strict=True):
            for entry in place["top_logprobs"] if words else ():
                row[entry["id"]] = entry["logprob"]
        return [place["id"] for place in places], table

    def tokens(self, text: str) -> list[int]:
        """Return the numbers of the tokens of a text, with the tokens that frame it."""
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            json.dumps({"content": text, "add_special": True}).encode(),
            {"Content-Type": "application/json"},
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=60) as answer:
            numbers: list[int] = json.load(answer)["tokens"]
        return numbers
