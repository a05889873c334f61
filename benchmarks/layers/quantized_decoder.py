"""Time of a token of a decoder whose linear layers are quantized, beside the dense decoder in float32 and bfloat16.

The decoder has the architecture of Llama, 100 million parameters and random weights. A token follows 32 others, whose
keys and values are in the cache of transformers. *torch* rows compute the same layers without the compiled kernel, in
the same process. *Linear layers alone* is the time above that of a decoder whose linear layers cost nothing, which is
what transformers itself takes; GB/s are the bytes of the weights over that time.
"""

__all__ = ["run"]

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from benchmarks.layers.quantized import torch_alone
from panther.errors import require_extra
from panther.nn import QuantizedLinear
from panther.nn.sketch_record import plain_state

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
FORMS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8, "group_size": 64},
    "6 bits": {"bits": 6, "group_size": 64},
    "4 bits": {"bits": 4, "group_size": 64},
    "3 bits": {"bits": 3, "group_size": 64},
    "4 bits + rank 16": {"bits": 4, "group_size": 64, "low_rank": 16},
    "4 bits, rounded inputs": {"bits": 4, "group_size": 64, "activations": "int8"},
}
CONTEXT = 32


class _Free(nn.Module):
    """A linear layer that costs next to nothing."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.output = nn.Buffer(torch.zeros(1, 1, layer.out_features, dtype=layer.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros."""
        return self.output.expand(*x.shape[:-1], -1)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure all forms, print the table, and write the CSV."""
    transformers: Any = require_extra("transformers", "transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **(QUICK if quick else SIZES), vocab_size=100 if quick else 16_000, tie_word_embeddings=False
    )
    decoder = transformers.LlamaForCausalLM(config).eval()
    models = {"dense float32": decoder, "dense bfloat16": copy.deepcopy(decoder).bfloat16()}
    models["without linear layers"] = _replaced(decoder, _Free).bfloat16()
    for form, arguments in FORMS.items():
        models[f"{form}, bfloat16"] = _replaced(decoder, functools.partial(_quantized, arguments)).bfloat16()
    models["4 bits, float32"] = _replaced(decoder, functools.partial(_quantized, FORMS["4 bits"]))
    calls: dict[str, Callable[[], object]] = {name: _token(model) for name, model in models.items()}
    calls |= {f"{name}, torch": _without_kernel(models[name]) for name in ("4 bits, bfloat16", "4 bits, float32")}
    timings = interleave(calls, device=device, budget_s=budget_s)
    rows = []
    for name, timing in timings.items():
        layers = [module for module in models[name.removesuffix(", torch")].modules() if _is_linear(module)]
        stored = sum(tensor.nbytes for layer in layers for tensor in plain_state(layer).values())
        above = timing.median_s - timings["without linear layers"].median_s
        rows.append(
            {
                "decoder": name,
                "token_ms": figure(1e3 * timing.median_s),
                "x bfloat16": figure(timing.ratio_to(timings["dense bfloat16"])),
                "linear_mb": figure(stored / 1e6),
                "gb_per_s": figure(stored / 1e9 / max(above, 1e-9)) if layers else "",
            }
        )
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('quantized-decoder', rows, device=device)}")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, QuantizedLinear))


def _quantized(arguments: dict[str, Any], layer: nn.Linear) -> nn.Module:
    return QuantizedLinear.from_linear(layer, **arguments)


def _replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return a copy of a model with another layer for each linear layer."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, make(layer))
    return model


def _token(model: Any) -> Callable[[], object]:
    """Return a function that computes one token after a context."""
    tokens = torch.arange(CONTEXT)[None] % 50

    @torch.no_grad()
    def call() -> object:
        output = model(tokens[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)  # The next call computes the same token.
        return output

    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    return call


def _without_kernel(model: nn.Module) -> Callable[[], object]:
    """Return the function of a copy whose layers never had the kernel, because a layer keeps a prepared call of it."""
    with torch_alone():
        call = _token(copy.deepcopy(model))

    def other() -> object:
        with torch_alone():
            return call()

    return other


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=60.0, memory=("default",))
