"""Compare RandMultiHeadAttention to nn.MultiheadAttention, both with the same projections: time, memory and error.

*nn.MultiheadAttention* is the layer as it comes, whose inference has a fast path of its own; *with SDPA* is the same
without that path, on torch's scaled_dot_product_attention, and is the faster at some lengths. Peak memory is what a
forward allocates beyond its input. Errors are relative, of the attention alone, for normal queries and keys of a given
variance in 32 dimensions; *uniform* attention, the mean of all values, is the line to stay below.
"""

__all__ = ["run"]

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import figure, interleave, main, print_table, write_csv
from torch import Tensor, nn

from panther.nn import RandMultiHeadAttention
from panther.nn.attention._features import optimal_shift, orthogonal_gaussian, positive_features, taylor_features

EMBED, HEADS, FEATURES = 256, 8, 64
LENGTHS = (256, 1024, 4096, 16384)
VARIANCES = (0.05, 0.25, 0.5, 1.0, 2.0)
_EXACT, _FAST = "nn.MultiheadAttention", "with SDPA"


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every length, then errors; print the tables, and write the CSVs."""
    rows = [row for length in (LENGTHS[:1] if quick else LENGTHS) for row in _length(length, device, budget_s, quick)]
    print_table(rows)
    errors = [row for variance in (VARIANCES[:1] if quick else VARIANCES) for row in _errors(variance)]
    print_table(errors)
    if not quick:
        print(f"written to {write_csv('attention', rows, device=device)}")
        print(f"written to {write_csv('attention-error', errors, device=device)}")


def _length(length: int, device: str, budget_s: float, quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, device=device).eval()
    layers = {
        name: RandMultiHeadAttention.from_mha(mha, FEATURES, kernel_fn=name, seed=0) for name in ("softmax", "relu")
    }
    x = torch.randn(1, length, EMBED, device=device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    rows = []
    for causal in (False, True):
        options = {"attn_mask": mask, "is_causal": True} if causal else {}

        def exact(fast_path: bool, options: dict[str, Any] = options) -> Callable[[], Tensor]:
            def call() -> Tensor:
                torch.backends.mha.set_fastpath_enabled(fast_path)
                with torch.no_grad():
                    return mha(x, x, x, need_weights=False, **options)[0]

            return call

        def sketched(name: str, causal: bool = causal) -> Callable[[], Tensor]:
            def call() -> Tensor:
                with torch.no_grad():
                    return layers[name](x, x, x, is_causal=causal)[0]

            return call

        calls = {_EXACT: exact(True), _FAST: exact(False), **{name: sketched(name) for name in layers}}
        rounds = 3 if length <= 4096 else 1  # of half a minute each, at the greatest length on one thread
        timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=rounds)
        torch.backends.mha.set_fastpath_enabled(True)
        best = min((_EXACT, _FAST), key=lambda name: timings[name].median_s)
        for name, timing in timings.items():
            rows.append(
                {
                    "length": length,
                    "causal": causal,
                    "attention": name,
                    "time_ms": round(timing.median_s * 1e3, 2),
                    f"x {_EXACT}": figure(timing.ratio_to(timings[_EXACT])),
                    "x better of both": figure(timing.ratio_to(timings[best])),
                    "peak_memory_bytes": "" if quick or device != "cpu" else _peak_memory(name, length, causal),
                }
            )
    return rows


_PEAK = """
import sys, torch
from panther.nn import RandMultiHeadAttention
name, length, causal = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
torch.set_num_threads(1)
mha = torch.nn.MultiheadAttention({embed}, {heads}, batch_first=True).eval()
torch.backends.mha.set_fastpath_enabled(name == "{exact}")
exact = name in ("{exact}", "{fast}")
layer = None if exact else RandMultiHeadAttention.from_mha(mha, {features}, kernel_fn=name, seed=0)
x = torch.randn(1, length, {embed})
mask = torch.ones(length, length, dtype=torch.bool).triu(1) if exact and causal else None
def call(x):
    with torch.no_grad():
        if exact:
            n = x.shape[1]
            own = None if mask is None else mask[:n, :n]
            return mha(x, x, x, need_weights=False, attn_mask=own, is_causal=causal)
        return layer(x, x, x, is_causal=causal)
def peak():  # of this program alone: what getrusage says outlives exec
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
call(x[:, :16])
before = peak()
call(x)
print(peak() - before)
"""


def _peak_memory(name: str, length: int, causal: bool) -> int:
    """Return the bytes by which a forward raises the peak memory of a fresh process."""
    code = _PEAK.format(embed=EMBED, heads=HEADS, features=FEATURES, exact=_EXACT, fast=_FAST)
    command = [sys.executable, "-c", code, name, str(length), str(causal)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


def _errors(variance: float, d: int = 32, n: int = 512, seeds: int = 5) -> list[dict[str, Any]]:
    """Return the relative error of every kernel and number of features, the root mean square over heads and seeds."""
    torch.manual_seed(0)
    q, k = (variance**0.5 * torch.randn(HEADS, n, d, dtype=torch.float64) * d**-0.25 for _ in range(2))
    v = torch.randn(HEADS, n, d, dtype=torch.float64)
    exact = torch.softmax(q @ k.mT, -1) @ v

    def error(weights: Tensor) -> float:
        out = weights / weights.sum(-1, keepdim=True) @ v
        return ((out - exact).norm() / exact.norm()).item()

    def row(kernel: str, features: int | str, value: float) -> dict[str, Any]:
        return {"variance": variance, "kernel": kernel, "features": features, "rel_error": float(f"{value:.3g}")}

    rows = [row("uniform", "", error(torch.ones(HEADS, n, n, dtype=torch.float64)))]
    rows.append(row("taylor", 1 + d + d * (d + 1) // 2, error(taylor_features(q) @ taylor_features(k).mT)))
    for features in (16, 64, 256, 1024):
        for kernel, shift in (("softmax", 0.0), ("oprf", optimal_shift(2 * variance * d**0.5, d))):
            squares = 0.0
            for seed in range(seeds):
                W = orthogonal_gaussian(features, d, heads=HEADS, seed=seed, stream=0)
                (fq, _), (fk, c) = positive_features(q, W, shift), positive_features(k, W, shift)
                squares += error(fq @ (fk * (c - c.amax(-1, keepdim=True)).exp()[..., None]).mT) ** 2
            rows.append(row(kernel, features, (squares / seeds) ** 0.5))
    return rows


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=6.0)
