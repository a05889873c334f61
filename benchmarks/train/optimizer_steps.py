"""Time a step of each optimizer on a transformer of text, all in one process and in turns.

The baselines are torch's AdamW, with its loop and with its fused kernel, and torch's Muon on the hidden matrices with
the fused AdamW beside it. Gradients are random and stay the same. Nothing but the step is timed.
"""

__all__ = ["run"]

import copy
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from benchmarks.trials.text_model import Shape, TextModel
from panther.optim import MuonAdamW, SketchedAdamW

_WIDTHS = (96, 192, 384)
_BASELINE = "AdamW, fused"


def _torch_muon(model: nn.Module) -> Callable[[], None]:
    names = dict(model.named_parameters())
    hidden = [p for name, p in names.items() if name.startswith("blocks.") and p.ndim == 2]
    rest = [p for name, p in names.items() if not (name.startswith("blocks.") and p.ndim == 2)]
    muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


STEPS: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), fused=False).step,
    _BASELINE: lambda model: torch.optim.AdamW(model.parameters(), fused=True).step,
    "torch's Muon, AdamW": _torch_muon,
    "MuonAdamW": lambda model: MuonAdamW(model.named_parameters()).step,
    "MuonAdamW, float32": lambda model: MuonAdamW(model.named_parameters(), precision="float32").step,
    "SketchedAdamW": lambda model: SketchedAdamW(model.named_parameters()).step,
}


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Time, print the table, and write the CSV."""
    rows = []
    for width in (64,) if quick else _WIDTHS:
        model = TextModel(Shape(width=width, hidden=4 * width, layers=1 if quick else 2)).to(device)
        generator = torch.Generator(device).manual_seed(0)
        steps = {}
        for name, make in STEPS.items():
            twin = copy.deepcopy(model)
            for p in twin.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device=device) * 1e-2
            steps[name] = make(twin)
        timings = interleave(steps, device=device, budget_s=budget_s)
        rows += [
            {
                "width": width,
                "optimizer": name,
                "step_ms": figure(1e3 * timing.median_s),
                f"x {_BASELINE}": figure(timings[_BASELINE].ratio_to(timing)),
            }
            for name, timing in timings.items()
        ]
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('optimizer-steps', rows, device=device)}")


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=20.0, memory=["kept"])
