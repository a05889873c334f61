"""Compare RandMultiHeadAttention to nn.MultiheadAttention, both with the same projections: time, memory and error.

*nn.MultiheadAttention* is the layer as it comes, whose inference has a fast path of its own; *with SDPA* is the same
without that path, on torch's scaled_dot_product_attention, and is the faster at some lengths. Peak memory is what a
forward allocates beyond its input. Errors are relative, of the heads' outputs, against exact softmax attention, for
freshly initialised weights (those of queries and keys also multiplied, which makes attention peaked) and for the layers
of a small language model trained here; *mean of the values* is every key with the same weight, the line to stay below.
"""

__all__ = ["run"]

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from benchmarks.trials.text_model import Shape, TextModel, blocks, gather, train
from panther.nn import RandMultiHeadAttention

EMBED, HEADS, FEATURES = 256, 8, 64
LENGTHS = (256, 1024, 4096, 16384)
# As it comes nn.MultiheadAttention forms all weights, 8 GiB and more at the next length.
_LONGEST_EXACT = 4096
FACTORS = (1, 2, 3, 5)
STEPS = 400  # of training
_EXACT, _FAST, _MEAN = "nn.MultiheadAttention", "with SDPA", "mean of the values"
# Name: kernel, features, whether it is calibrated.
_TIMED = {
    "hermite": ("hermite", FEATURES, False),
    "hermite, calibrated": ("hermite", FEATURES, True),
    "hermite, 256": ("hermite", 256, False),
    "softmax": ("softmax", FEATURES, False),
    "relu": ("relu", FEATURES, False),
    "taylor": ("taylor", FEATURES, False),
}


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every length, then errors; print the tables, and write the CSVs."""
    rows = [row for length in (LENGTHS[:1] if quick else LENGTHS) for row in _length(length, device, budget_s, quick)]
    print_table(rows)
    errors = [row for case in _cases(quick) for row in _errors(*case, quick=quick)]
    print_table(errors)
    if not quick:
        print(f"written to {write_csv('attention', rows, device=device)}")
        print(f"written to {write_csv('attention-error', errors, device=device)}")


def _converted(mha: nn.MultiheadAttention, kernel: str, features: int, x: Tensor | None, seed: int = 0) -> Any:
    """Return the layer by features, calibrated to ``x`` if there is one."""
    layer = RandMultiHeadAttention.from_mha(mha, features, kernel_fn=kernel, seed=seed)
    layer._unchecked = False  # no warnings: the errors are what this measures
    return layer if x is None else layer.calibrate_(x)


def _length(length: int, device: str, budget_s: float, quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, device=device).eval()
    x = torch.randn(1, length, EMBED, device=device)
    layers = {
        name: _converted(mha, kernel, features, x if calibrated else None)
        for name, (kernel, features, calibrated) in _TIMED.items()
    }
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

        calls = {_EXACT: exact(True)} if length <= _LONGEST_EXACT else {}
        calls |= {_FAST: exact(False), **{name: sketched(name) for name in layers}}
        rounds = 3 if length <= 4096 else 1  # of half a minute each, at the greatest length on one thread
        timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=rounds)
        torch.backends.mha.set_fastpath_enabled(True)
        best = min((name for name in (_EXACT, _FAST) if name in timings), key=lambda name: timings[name].median_s)
        for name, timing in timings.items():
            rows.append(
                {
                    "length": length,
                    "causal": causal,
                    "attention": name,
                    "time_ms": round(timing.median_s * 1e3, 2),
                    f"x {_EXACT}": figure(timing.ratio_to(timings[_EXACT])) if _EXACT in timings else "",
                    "x better of both": figure(timing.ratio_to(timings[best])),
                    "peak_memory_bytes": "" if quick or device != "cpu" else _peak_memory(name, length, causal),
                }
            )
    return rows


_PEAK = """
import sys, torch
from panther.nn import RandMultiHeadAttention
name, length, causal = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
kernel, features, calibrated = {timed}.get(name, (None, 1, False))
torch.set_num_threads(1)
mha = torch.nn.MultiheadAttention({embed}, {heads}, batch_first=True).eval()
torch.backends.mha.set_fastpath_enabled(name == "{exact}")
exact = name in ("{exact}", "{fast}")
layer = None if exact else RandMultiHeadAttention.from_mha(mha, features, kernel_fn=kernel, seed=0)
if layer is not None:
    layer._unchecked = False
    if calibrated:
        layer.calibrate_(torch.randn(1, 100, {embed}))
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
    code = _PEAK.format(embed=EMBED, heads=HEADS, timed=_TIMED, exact=_EXACT, fast=_FAST)
    command = [sys.executable, "-c", code, name, str(length), str(causal)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


def _cases(quick: bool) -> Iterator[tuple[str, nn.MultiheadAttention, Tensor, tuple[bool, ...]]]:
    """Yield names, softmax attention, inputs, and whether to attend causally."""
    sizes = [
        (HEADS, length, factor) for length in (256, 1024, 4096) for factor in FACTORS if length == 256 or factor < 3
    ]
    for heads, length, factor in sizes[:1] if quick else [*sizes, (HEADS // 2, 256, 1)]:
        torch.manual_seed(0)
        mha = nn.MultiheadAttention(EMBED, heads, batch_first=True).eval()
        with torch.no_grad():
            mha.in_proj_weight[: 2 * EMBED] *= factor
        name = "fresh" if heads == HEADS else f"fresh, {heads} heads"
        yield f"{name}, weights x {factor}", mha, torch.randn(1, length, EMBED), (False, True)
    if quick:
        return
    texts = gather()
    torch.manual_seed(0)
    model = train(TextModel(Shape(EMBED, 3 * EMBED, 3, HEADS, 256)), texts[0], steps=STEPS, batch=8).eval()
    with torch.no_grad():
        tokens = blocks(texts[1], 256, 1, 0)
        x = model.embedding(tokens) + model.position.weight
        for index, block in enumerate(model.blocks):
            mha = nn.MultiheadAttention(EMBED, HEADS, bias=False, batch_first=True).eval()
            q, k, v = block.get_submodule("q"), block.get_submodule("k"), block.get_submodule("v")
            mha.in_proj_weight.copy_(torch.cat([layer.get_parameter("weight") for layer in (q, k, v)]))
            yield f"trained, layer {index}", mha, block.get_submodule("norm_1")(x), (True,)
            x = block(x)


def _errors(
    name: str, mha: nn.MultiheadAttention, x: Tensor, causals: tuple[bool, ...], quick: bool = False, seeds: int = 3
) -> list[dict[str, Any]]:
    """Measure every kernel and number of features; of random ones the root mean square over seeds."""
    mha = copy.deepcopy(mha)
    with torch.no_grad():
        mha.out_proj.weight.copy_(torch.eye(EMBED))  # the heads' outputs
    v = x @ mha.in_proj_weight[2 * EMBED :].detach().mT
    rows = []
    for causal in causals:
        q, k, heads_v = (
            F.linear(x, W).unflatten(-1, (mha.num_heads, -1)).transpose(1, 2)
            for W in mha.in_proj_weight.detach().chunk(3)
        )
        exact = F.scaled_dot_product_attention(q, k, heads_v, is_causal=causal).transpose(1, 2).flatten(2)
        mean = v.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] if causal else v.mean(1, keepdim=True)

        def row(
            kernel: str, features: int | str, *outputs: Tensor, exact: Tensor = exact, causal: bool = causal
        ) -> None:
            squares = [((output - exact).norm() / exact.norm()).item() ** 2 for output in outputs]
            case = {"data": name, "length": x.shape[1], "causal": causal, "kernel": kernel, "features": features}
            rows.append(case | {"rel_error": float(f"{(sum(squares) / len(squares)) ** 0.5:.3g}")})

        row(_MEAN, "", mean)
        for kernel, calibrated in (("hermite", False), ("hermite", True), ("softmax", False), ("oprf", True)):
            for features in (64,) if quick else (32, 64, 128, 256, 1024):
                drawn = range(1 if kernel == "hermite" or quick else seeds)
                layers = (_converted(mha, kernel, features, x if calibrated else None, seed) for seed in drawn)
                with torch.no_grad():
                    outputs = [layer(x, x, x, is_causal=causal)[0] for layer in layers]
                row(f"{kernel}, calibrated" if calibrated else kernel, features, *outputs)
        for kernel in ("taylor", "relu"):
            with torch.no_grad():
                output = _converted(mha, kernel, FEATURES, None)(x, x, x, is_causal=causal)[0]
            row(kernel, FEATURES if kernel == "relu" else "", output)
    return rows


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=6.0)
