"""Compare InterpolativeLinear to nn.Linear and to low rank in two factors, of as many bytes and of the same rank.

Forward without gradients, at 75 % and 50 % of the numbers of a dense layer. Ratios are to nn.Linear of the same dtype:
2 is twice as fast. Two factors are a LowRankLinear; ranks are multiples of 8.
"""

__all__ = ["run"]

import functools
import math
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import PerformanceWarning
from panther.nn import InterpolativeLinear, LowRankLinear
from panther.nn.sketch_record import plain_state

SHAPES = [(384, 384), (384, 1536), (1536, 384), (4096, 4096)]  # in, out
BATCHES = [1, 32, 512, 4096]
SHARES = [0.75, 0.5]
_MOST = 1 << 34  # multiplications of the dense layer: beyond it a round takes half a minute


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if quick else SHAPES:
        for batch in BATCHES[:1] if quick else [n for n in BATCHES if n * math.prod(shape) <= _MOST]:
            for dtype in (torch.float32, torch.bfloat16):
                found = _case(*shape, batch, dtype, device, budget_s)
                print_table(found)
                rows += found
    if not quick:
        print(f"written to {write_csv('interpolative', rows, device=device)}")


@torch.no_grad()
def _case(
    columns: int, outputs: int, batch: int, dtype: torch.dtype, device: str, budget_s: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    x = torch.randn(batch, columns, **options)
    layers: dict[tuple[float, str, int], nn.Module] = {(1.0, "dense", 0): nn.Linear(columns, outputs, **options)}

    half = (columns + outputs) / 2
    for share in SHARES:
        numbers = share * columns * outputs
        rank = _multiple(half - math.sqrt(max(half**2 - numbers, 0.0)))
        layers[share, "interpolative", rank] = InterpolativeLinear(columns, outputs, rank, **options)
        fewer = _multiple(numbers / (columns + outputs))
        layers[share, "two factors, as many bytes", fewer] = _two_factors(columns, outputs, fewer, **options)
        layers[share, "two factors, same rank", rank] = _two_factors(columns, outputs, rank, **options)
    calls = {key: functools.partial(layer, x) for key, layer in layers.items()}
    timings = interleave({str(key): call for key, call in calls.items()}, device=device, budget_s=budget_s)
    dense = timings[str(next(iter(layers)))]
    return [
        {
            "in": columns,
            "out": outputs,
            "batch": batch,
            "dtype": str(dtype).removeprefix("torch."),
            "share": key[0],
            "form": key[1],
            "rank": key[2] or "",
            "time_us": round(timings[str(key)].median_s * 1e6, 1),
            "x nn.Linear": figure(timings[str(key)].ratio_to(dense)),
            "stored_bytes": sum(tensor.nbytes for tensor in plain_state(layer).values()),
        }
        for key, layer in layers.items()
    ]


def _two_factors(columns: int, outputs: int, rank: int, **options: Any) -> LowRankLinear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # Two factors of the same rank may be larger than one.
        return LowRankLinear(columns, outputs, rank, **options)


def _multiple(rank: float) -> int:
    return int(rank) // 8 * 8


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0)
