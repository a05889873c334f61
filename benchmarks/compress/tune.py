"""What a trial of pr.tune costs over the call of the user's function: CPU time, on one thread.

Models are encoders of transformers with random weights, and the function embeds sentences of 32 tokens. ``prepare_s``
are moments and decompositions, once for all trials, and ``choose_s`` the choices of pr.compress for the first trials,
which run candidates on the held-out batches. ``trial_s`` is the mean of a trial without these, ``evaluate_s`` of the
function within it, and ``over`` by what share the first is more. *black box* is what a search without shared moments
costs: a call of pr.compress for each trial, and the function.
"""

__all__ = ["run"]

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.harness import figure, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra
from panther.tuning import search
from panther.tuning.compressed_models import CompressedModels

CASES = [(2, 128, 512), (3, 384, 256), (3, 384, 1024), (6, 384, 1024)]  # layers, width, sentences
TRIALS = 30
CALIBRATION = 512  # sentences
QUICK = (1, 64, 64)
FORMS = ("low_rank", "int8", "int6", "int5", "int4", "int3", "int2")


class _Clock:
    """CPU seconds of a function, summed over its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - start
            self.calls += 1


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, and write the CSV."""
    try:
        transformers = require_extra("transformers", "transformers")
        require_extra("optuna", "tune")
    except MissingExtraError as error:
        print(error)
        return
    rows = []
    for case in [QUICK] if quick else CASES:
        rows.append(_case(transformers, *case, *((3, 64) if quick else (TRIALS, CALIBRATION))))
        print_table(rows[-1:])
        if not quick:
            print(f"written to {write_csv('tune', rows, device=device)}")


def _case(transformers: Any, layers: int, width: int, sentences: int, trials: int, calibration: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    model: nn.Module = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids = torch.randint(2000, (sentences, 32))
    batches = [{"input_ids": part} for part in torch.randint(2000, (calibration, 32)).split(32)]

    @torch.no_grad()
    def embedded(model: nn.Module) -> Tensor:
        return torch.cat([model(input_ids=part).last_hidden_state.mean(1) for part in ids.split(64)])

    wanted = nn.functional.normalize(embedded(model), dim=-1)

    def likeness(model: nn.Module) -> float:
        return (nn.functional.normalize(embedded(model), dim=-1) * wanted).sum(-1).mean().item()

    evaluate, trial = _Clock(likeness), _Clock(search.run_trials)
    prepare, choose = _Clock(search.prepare_models), _Clock(CompressedModels.choose)
    options: dict[str, Any] = {"include": "encoder.*", "forms": FORMS, "seed": 0}
    kept = search.run_trials, search.prepare_models, CompressedModels.choose
    unchanged_s = [0.0]

    def trials_alone(*args: Any, **kwargs: Any) -> Any:
        unchanged_s[0] = evaluate.seconds  # the unchanged model's
        return trial(*args, **kwargs)

    search.run_trials, search.prepare_models = trials_alone, prepare
    CompressedModels.choose = lambda self, budget: choose(self, budget)  # type: ignore[method-assign]
    try:
        result = pr.tune(model, evaluate, batches, constraint=">= 0.98", trials=trials, progress=False, **options)
    finally:
        search.run_trials, search.prepare_models = kept[:2]
        CompressedModels.choose = kept[2]  # type: ignore[method-assign]
    count = len(result.trials)
    inside = (evaluate.seconds - unchanged_s[0]) / count
    whole = (trial.seconds - choose.seconds) / count
    box = copy.deepcopy(model)
    start = time.process_time()
    pr.compress(box, 0.15, batches, measure_speed=False, **options)
    box_s = time.process_time() - start + inside
    return {
        "layers": layers, "width": width, "sentences": sentences, "trials": count,
        "unchanged_s": figure(unchanged_s[0] / 2), "prepare_s": figure(prepare.seconds),
        "choose_s": figure(choose.seconds), "trial_s": figure(whole), "evaluate_s": figure(inside),
        "over": round(whole / inside - 1, 4), "black_box_trial_s": figure(box_s),
    }  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0, memory=("kept",))
