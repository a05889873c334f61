"""Compare the time of a token in generation: linear attention with a state, and softmax attention with a cache.

*Layer* rows have one attention layer, 512 wide with 8 heads, projections included: RandMultiHeadAttention with 64
features, and attention of linearize_ with 64 features and a window of 64. *Model* rows have six layers of the sizes of
SmolLM2-135M, with random weights, in the caches of transformers. Sizes are those of a layer's state or cache.
"""

__all__ = ["run"]

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import panther as pr
from benchmarks.harness import Timing, figure, interleave, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra

WIDTH, HEADS, FEATURES, WINDOW = 512, 8, 64, 64
LENGTHS = (100, 1_000, 10_000)
KINDS = ("hermite", "softmax")
MODEL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 1_000, "max_position_embeddings": 16_384,
}  # fmt: skip


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure a token after every length; print the table, and write the CSV."""
    lengths = (40,) if quick else LENGTHS
    rows = _rows("layer", {length: _layers(length, device) for length in lengths}, device, budget_s)
    try:
        require_extra("transformers", "transformers")
    except MissingExtraError as error:
        print(error)
    else:
        models = _models(device, quick)
        rows += _rows("model", {length: _tokens(models, length, device) for length in lengths}, device, budget_s)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('decoding', rows, device=device)}")


_Calls = tuple[dict[str, Callable[[], object]], dict[str, int]]
"""A function that processes one token for each kind of attention, and the bytes of each state or cache."""


def _rows(what: str, calls_by_length: dict[int, _Calls], device: str, budget_s: float) -> list[dict[str, Any]]:
    # All lengths are timed in one rotation, because rows of different lengths are compared too.
    calls = {(length, name): call for length, (calls, _) in calls_by_length.items() for name, call in calls.items()}
    labels = {f"{length} {name}": call for (length, name), call in calls.items()}
    timings: dict[str, Timing] = interleave(labels, device=device, budget_s=budget_s, min_rounds=5)
    rows = []
    for length, name in calls:
        timing = timings[f"{length} {name}"]
        rows.append(
            {
                "what": what,
                "tokens": length,
                "attention": name,
                "ms": figure(timing.median_s * 1e3),
                "x softmax": figure(timing.ratio_to(timings[f"{length} softmax, cache"])),
                "KiB": figure(calls_by_length[length][1][name] / 1024),
            }
        )
    return rows


def _layers(length: int, device: str) -> _Calls:
    """Return one step of each layer after ``length`` tokens, and the bytes of its state."""
    torch.manual_seed(0)
    x, token = torch.randn(1, length, WIDTH, device=device), torch.randn(1, 1, WIDTH, device=device)
    mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    layers: dict[str, Any] = {
        f"{kind}, state": pr.nn.RandMultiHeadAttention.from_mha(mha, FEATURES, kernel_fn=kind, seed=0) for kind in KINDS
    }
    linearized = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device))
    pr.linearize_(linearized, num_features=FEATURES, window=WINDOW)
    layers["linearize_, state"] = linearized[0]
    calls: dict[str, Callable[[], object]] = {}
    sizes = {}
    for name, layer in layers.items():
        with torch.no_grad():
            _, state = layer.eval().step(x, layer.init_state(1))
        calls[name] = _without_gradients(partial(layer.step, token, state))
        sizes[name] = sum(part.nbytes for part in state if isinstance(part, Tensor))
    keys, values = torch.randn(2, 1, HEADS, length + 1, WIDTH // HEADS, device=device).unbind()

    def softmax() -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in F.linear(token, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1)
        )
        keys[:, :, -1:], values[:, :, -1:] = k, v  # a cache with space for all tokens
        y: Tensor = mha.out_proj(F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2))
        return y

    calls["softmax, cache"] = _without_gradients(softmax)
    sizes["softmax, cache"] = keys.nbytes + values.nbytes
    return calls, sizes


def _models(device: str, quick: bool) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = MODEL | (
        {"hidden_size": 36, "num_hidden_layers": 2, "intermediate_size": 64} if quick else {}
    )
    models = {}
    for name in ("softmax, cache", "linearize_, state"):
        models[name] = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().to(device)
    pr.linearize_(models["linearize_, state"], num_features=FEATURES, window=WINDOW)
    return models


def _tokens(models: dict[str, Any], length: int, device: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the forward of one token after ``length`` tokens for each model, and the bytes of a layer's cache."""
    calls: dict[str, Callable[[], object]] = {}
    sizes = {}
    tokens = torch.randint(1_000, (1, length), device=device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for name, model in models.items():
        cache: Any = None
        with torch.no_grad():
            for chunk in tokens.split(1_000, 1):
                cache = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        layer = cache.layers[0]
        parts = (layer.keys, layer.values) if layer.keys is not None else layer.state
        sizes[name] = sum(part.nbytes for part in parts if isinstance(part, Tensor))

        def next_token(model: Any = model, cache: Any = cache, grows: bool = layer.keys is not None) -> object:
            logits = model(token, past_key_values=cache, use_cache=True).logits
            if grows:
                cache.crop(-1)  # so that each call has the same length
            return logits

        calls[name] = _without_gradients(next_token)
    return calls, sizes


def _without_gradients(function: Callable[[], object]) -> Callable[[], object]:
    def inference() -> object:
        with torch.no_grad():
            return function()

    return inference


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=40.0)
