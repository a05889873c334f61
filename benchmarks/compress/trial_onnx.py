"""ONNX files of a sentence encoder: ours beside the quantizers of onnxruntime.

The encoder is all-MiniLM-L6-v2 of trial_frontier.py. *float32* is the file of the original. *quantize_dynamic* and
*MatMulNBits* (4 bits, blocks of 32, embeddings too) are made of this file by onnxruntime's quantizers in their usual
settings. *Panther* is ``pr.compress`` of all linear layers and embeddings with 16 batches of 32 glosses, and
``panther export --to onnx``; *rounded* is with ``--activations int8``. *Correlation* is how the cosine similarities of
all pairs of 512 held-out glosses correlate with the original's, *error* the relative difference of a file's output to
the output of its own model, and the times are medians for a batch of texts x tokens in onnxruntime, on one thread.
"""

__all__ = ["run"]

import argparse
import copy
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.compress.frontier_tasks import SUBJECTS, Subject
from benchmarks.harness import commit, figure, interleave, print_table, write_csv
from benchmarks.trials.pretrained import correlation
from panther.errors import require_extra
from panther.integrations.onnx import compare_onnx, write_onnx

_COMPRESSED: dict[str, dict[str, Any]] = {
    "Panther, int8": {"bits": 8.5, "forms": "int8"},
    "Panther, int8 and int4": {"bits": 6.0, "forms": ["int4", "int8"]},
    "Panther, int4": {"bits": 4.6, "forms": "int4"},
}
_BATCHES = 16


def run(quick: bool, folder: Path, budget_s: float = 20.0) -> Iterator[dict[str, Any]]:
    """Yield the rows; files are written to a folder, and compressed models that lie there already are read."""
    subject = SUBJECTS["encoder"](quick)
    sample = _with_types(next(iter(subject.inputs.values())), rows=2)
    paths = {"float32": folder / "float32.onnx"}
    write_onnx(subject.model, paths["float32"], sample)
    errors = {"float32": _error(subject.model, paths["float32"], sample)}
    paths |= _stock_files(paths["float32"], folder)
    for name, options in _COMPRESSED.items():
        model = _compressed(subject, folder / name, options)
        for rounds_input in (False, True):
            key = f"{name}, rounded" if rounds_input else name
            paths[key] = folder / f"{key}.onnx"
            for layer in model.modules():
                if isinstance(layer, pr.nn.QuantizedLinear):
                    layer.activations = "int8" if rounds_input else None
            write_onnx(model, paths[key], sample)
            errors[key] = _error(model, paths[key], sample)
    sessions = {name: _session(path) for name, path in paths.items()}
    original = _vectors(sessions["float32"], subject)
    seconds = {
        size: interleave(
            {name: partial(_run, session, batch) for name, session in sessions.items()},
            budget_s=0 if quick else budget_s,
        )
        for size, batch in ((size, _with_types(batch)) for size, batch in subject.inputs.items())
    }
    for name, session in sessions.items():
        yield {
            "model": "encoder",
            "method": name,
            "file_mb": figure(paths[name].stat().st_size / 1e6),
            "correlation": round(correlation(_vectors(session, subject), original), 5),
            "error": f"{errors[name]:.1e}" if name in errors else "",
            **{f"ms_{size[0]}x{size[1]}": figure(1e3 * times[name].median_s) for size, times in seconds.items()},
            "row_commit": commit(),
        }


def _stock_files(path: Path, folder: Path) -> dict[str, Path]:
    """Return the files that the quantizers of onnxruntime make of a file."""
    quantization: Any = require_extra("onnxruntime.quantization", "onnx")
    bits: Any = require_extra("onnxruntime.quantization.matmul_nbits_quantizer", "onnx")
    onnx: Any = require_extra("onnx", "onnx")
    paths = {"quantize_dynamic, int8": folder / "dynamic.onnx", "MatMulNBits, 4 bits": folder / "nbits.onnx"}
    prepared = folder / "prepared.onnx"
    quantization.shape_inference.quant_pre_process(path, prepared, skip_symbolic_shape=True)
    quantization.quantize_dynamic(prepared, paths["quantize_dynamic, int8"])
    quantizer = bits.MatMulNBitsQuantizer(
        onnx.load(prepared), block_size=32, is_symmetric=False, op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )  # fmt: skip
    with numpy.errstate(invalid="ignore"):  # It divides by the scales of blocks of zeros, and replaces the result.
        quantizer.process()
    quantizer.model.save_model_to_file(str(paths["MatMulNBits, 4 bits"]), False)
    return paths


def _compressed(subject: Subject, folder: Path, options: dict[str, Any]) -> nn.Module:
    model = copy.deepcopy(subject.model)
    if (folder / "panther.json").is_file():
        return pr.load_compressed(folder, model).eval()
    pr.compress(
        model, calibration=subject.calibration[:_BATCHES], seed=0, allow_slower=True, measure_speed=False, **options
    )
    pr.save_compressed(model, folder)
    return model


def _error(model: nn.Module, path: Path, sample: dict[str, Tensor]) -> float:
    agreement = compare_onnx(model, path, [sample])
    assert agreement is not None  # the model is in float32
    return agreement.error


def _session(path: Path) -> Any:
    runtime: Any = require_extra("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _with_types(batch: dict[str, Tensor], rows: int | None = None) -> dict[str, Tensor]:
    """Return a batch with the inputs that the tokenizer of BERT makes, in its order; ``rows`` repeats its samples."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if rows is not None:
        ids, mask = ids[:1].repeat(rows, 1), mask[:1].repeat(rows, 1)
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}


def _run(session: Any, batch: dict[str, Tensor]) -> Tensor:
    (states, *_) = session.run(["last_hidden_state"], {name: tensor.numpy() for name, tensor in batch.items()})
    return torch.from_numpy(states)


def _vectors(session: Any, subject: Subject) -> Tensor:
    """Return the means of the last hidden states of the texts that are held out."""
    means = []
    for batch in subject.held_out:
        mask = batch["attention_mask"][..., None]
        means.append((_run(session, _with_types(batch)) * mask).sum(1) / mask.sum(1))
    return torch.cat(means)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random model, nothing written")
    parser.add_argument("--folder", type=Path, help="where compressed models and files stay (default: nowhere)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        rows = list(run(arguments.quick, arguments.folder or Path(temporary)))
    print_table(rows)
    if not arguments.quick:
        write_csv("onnx", rows, device="cpu")
