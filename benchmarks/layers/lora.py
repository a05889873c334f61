"""Compare PiSSA starts of LoRA adapters with PEFT's own.

PEFT's ``"pissa"`` takes LAPACK's SVD of the whole weight, and ``"pissa_niter_4"`` torch.svd_lowrank, which does not
oversample. ``excess`` is the norm of what the weight keeps over that with the whole SVD, less 1. Weights are a sum of
directions that fall slowly and of noise, as trained ones are.
"""

__all__ = ["run"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra

STARTS = [
    (768, 768, 16), (768, 3072, 16), (768, 3072, 64), (2048, 2048, 16), (2048, 2048, 128), (1024, 4096, 32),
    (4096, 4096, 64),
]  # fmt: skip
CALIBRATED = [(768, 768, 16), (768, 3072, 16), (2048, 2048, 32)]
SEEDS = 3
_ONCE = 2048 * 2048  # entries from which a slow baseline is run in one round only


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print a table of each as it comes, and write the CSV."""
    try:
        peft = require_extra("peft", "peft")
        ours = require_extra("panther.integrations.peft", "peft")
    except MissingExtraError as error:
        print(error)
        return
    subjects: list[tuple[str, list[tuple[int, int, int]], Callable[..., list[dict[str, Any]]]]] = [
        ("lora-start", STARTS, _start),
        ("lora-calibrated", CALIBRATED, _calibrated),
    ]
    for subject, cases, measure in subjects:
        rows: list[dict[str, Any]] = []
        for out, inner, rank in [(96, 64, 8)] if quick else cases:
            found = [
                {"out": out, "in": inner, "rank": rank, **row}
                for row in measure(peft, ours, out, inner, rank, device, budget_s)
            ]
            print_table(found)
            rows += found
        if not quick:
            print(f"written to {write_csv(subject, rows, device=device)}")


def _weight(out: int, inner: int, device: str) -> Tensor:
    torch.manual_seed(0)
    least = min(out, inner)
    sizes = torch.arange(1, least // 4 + 1) ** -0.5
    trend = (torch.randn(out, len(sizes)) * sizes) @ torch.randn(len(sizes), inner)
    return ((trend + 0.3 * torch.randn(out, inner)) / least**0.5).to(device)


def _start(peft: Any, ours: Any, out: int, inner: int, rank: int, device: str, budget_s: float) -> list[dict[str, Any]]:
    W = _weight(out, inner, device)
    config = peft.LoraConfig(r=rank, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(inner, out, bias=False, device=device)), config)
    layer = model.base_model.model[0]
    seed = 0

    def again(call: Callable[[], object]) -> Callable[[], None]:
        def started() -> None:
            with torch.no_grad():
                layer.base_layer.weight.copy_(W)
                layer.lora_B["default"].weight.zero_()
            torch.manual_seed(seed)  # svd_lowrank draws from torch's generator
            call()

        return started

    calls = {
        "panther": again(lambda: ours.init_pissa_(model, seed=seed)),
        "PEFT pissa_niter_4": again(lambda: layer.pissa_init("default", "pissa_niter_4")),
        "PEFT pissa": again(lambda: layer.pissa_init("default", "pissa")),
    }
    timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=1 if W.numel() >= _ONCE else 3)
    rows: list[dict[str, Any]] = []
    least = 0.0
    for name, call in reversed(calls.items()):  # the whole SVD first
        errors, changes = [], []
        for seed in range(1 if name == "PEFT pissa" else SEEDS):  # noqa: B007  # read by the calls
            call()
            left = layer.base_layer.weight.detach()
            norm = float(torch.linalg.vector_norm(left, dtype=torch.float64))
            least = least or norm
            errors.append(norm / least - 1)
            product = layer.get_delta_weight("default").detach() + left - W
            changes.append(float(product.norm() / W.norm()))
        rows.insert(
            0,
            {
                "method": name,
                "time_ms": figure(timings[name].median_s * 1e3),
                **{f"x {other}": figure(timings[name].ratio_to(timings[other])) for other in list(calls)[1:]},
                "excess": f"{max(errors):.1e}",
                "change of the weight": f"{max(changes):.1e}",
            },
        )
    return rows


def _calibrated(
    peft: Any, ours: Any, out: int, inner: int, rank: int, device: str, budget_s: float
) -> list[dict[str, Any]]:
    """Compare both modes from batches on, with the pass over them; the error is that of the outputs on new inputs."""
    corda: Any = require_extra("peft.tuners.lora.corda", "peft")
    W = _weight(out, inner, device)
    levels = torch.logspace(0, -2, inner, device=device)[torch.randperm(inner)]
    mixing = torch.linalg.qr(torch.randn(inner, inner))[0].to(device)
    batches = [(torch.randn(1024, inner, device=device) * levels) @ mixing for _ in range(10)]  # ours holds two out
    rows = []
    for short, mode in (("ipm", "instruction_previewed"), ("kpm", "knowledge_preserved")):
        made: dict[str, Any] = {}

        def theirs(short: str = short, made: dict[str, Any] = made) -> None:
            net = _net(W)
            config = peft.LoraConfig(
                r=rank,
                target_modules=["0"],
                init_lora_weights="corda",
                corda_config=peft.tuners.lora.config.CordaConfig(corda_method=short),
            )
            corda.preprocess_corda(net, config, run_model=lambda: [net(x) for x in batches])
            made["PEFT"] = peft.get_peft_model(net, config)

        def own(mode: str = mode, made: dict[str, Any] = made) -> None:
            model = peft.get_peft_model(_net(W), peft.LoraConfig(r=rank, target_modules=["0"]))
            ours.init_corda_(model, batches, mode, seed=0)
            made["panther"] = model

        timings = interleave({"panther": own, "PEFT": theirs}, device=device, budget_s=budget_s, min_rounds=1)
        x = (torch.randn(4096, inner, device=device) * levels) @ mixing
        expected = x @ W.mT
        for name, timing in timings.items():
            layer = made[name].base_model.model[0]
            change = made[name](x).detach() - expected
            adapter = x @ layer.get_delta_weight("default").detach().mT
            change = (made[name](x).detach() - expected).norm() / expected.norm()
            rows.append(
                {
                    "mode": short,
                    "method": name,
                    "time_ms": figure(timing.median_s * 1e3),
                    "x PEFT": figure(timing.ratio_to(timings["PEFT"])),
                    "energy of the adapter": f"{float((adapter.norm() / expected.norm()).square()):.1e}",
                    "error of the adapter": f"{float((adapter - expected).norm() / expected.norm()):.5f}",
                    "change of the output": f"{float(change):.1e}",
                }
            )
    return rows


def _net(W: Tensor) -> nn.Sequential:
    linear = nn.Linear(W.shape[1], W.shape[0], bias=False, device=W.device)
    with torch.no_grad():
        linear.weight.copy_(W)
    return nn.Sequential(linear).requires_grad_(False)


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=10.0, memory=("default",))
