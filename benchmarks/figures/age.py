"""List the committed results whose code has changed since they were measured: ``make figures-age``.

A row names the commit that it was measured at. The code of a file of results is the script that wrote it and the
packages that the script measures, in ``SOURCES``. It has changed if a file of these differs at HEAD: Python by its
syntax tree without docstrings, so that comments and formatting do not count, and other files by their text. Pages
(``.md``, ``.rst``) do not count. A file that was moved is compared with itself at its old place, and a new file in a
folder counts by the changes of the files that import it.

Rows that were measured on changed files, whose commit ends in ``-dirty``, and rows whose commit is not in the history
of HEAD are compared from the commit that added them, because that commit has the changed files as well.
"""

__all__ = ["SOURCES", "Measurement", "changed_files", "files_of", "main", "measurements", "stamps_of", "subject_of"]

import ast
import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, print_table, read_csv

# The beginning of a file's name, and its code. The longest beginning that fits is taken.
_COMPRESSION = ("panther/compression", "panther/nn/quantized")
SOURCES: dict[str, tuple[str, ...]] = {
    "activations": ("benchmarks/train/trial_activations.py", "benchmarks/train/sketched_activations.py"),
    "advisor": ("benchmarks/distributed/advisor.py", "panther/distributed/advisor"),
    "advisor-link": ("benchmarks/distributed/advisor_link.py", "panther/distributed/advisor"),
    "attention": ("benchmarks/layers/attention.py", "panther/nn/attention", "kernels"),
    "compress-digits": ("benchmarks/compress/trial_digits.py", *_COMPRESSION),
    "compress-encoder": ("benchmarks/compress/trial_encoder.py", *_COMPRESSION),
    "conv": ("benchmarks/layers/conv.py", "panther/nn/conv", "kernels/cpu/sketched.py"),
    "cqrrpt": ("benchmarks/linalg/cqrrpt.py", "panther/linalg"),
    "decoder": (
        "benchmarks/compress/trial_decoder.py",
        "docs/gallery/compress/faster_decoder.py",
        "kernels/cpu/native",
    ),
    "decoding": ("benchmarks/layers/decoding.py", "panther/nn/attention/decoding", "kernels/ops/attention.py"),
    "distributed-bytes": ("benchmarks/distributed/bytes_sent.py", "panther/distributed"),
    "distributed-muon": ("benchmarks/distributed/muon.py", "panther/optim"),
    "distributed-overhead": ("benchmarks/distributed/overhead.py", "panther/distributed"),
    "distributed-processes": ("benchmarks/distributed/processes.py", "panther/distributed"),
    "distributed-scaling": ("benchmarks/distributed/overhead.py", "panther/distributed"),
    "engine-forms": ("benchmarks/engines", "panther/cli/export.py", "panther/integrations/compressed_tensors"),
    "engines-slow-llama-cpp": ("tests/support/llama_engine.py", "panther/integrations/gguf"),
    "engines-slow": ("tests/support/engine_results.py", "panther/integrations"),
    "environment": ("benchmarks/train/environment.py",),
    "faults": ("benchmarks/train/trial_faults.py", "panther/train", "panther/distributed"),
    "file-survival": ("benchmarks/train/trial_files.py", "panther/files"),
    "file-survival-plain": ("benchmarks/train/trial_files.py", "tests/support/file_survival.py"),
    "files": ("benchmarks/compress/trial_files.py", *_COMPRESSION),
    "files-peers": ("benchmarks/compress/trial_peers.py", *_COMPRESSION),
    "folder": ("benchmarks/compress/trial_folder.py", *_COMPRESSION),
    "folder-equal": ("benchmarks/compress/trial_folder_equal.py", *_COMPRESSION),
    "frontier": ("benchmarks/compress/trial_frontier.py", *_COMPRESSION),
    "frontier-speed": ("benchmarks/compress/trial_frontier_speed.py", *_COMPRESSION, "kernels/cpu"),
    "host": ("benchmarks/gpu/host.py", "kernels/ops", "kernels/_triton"),
    "gguf": ("benchmarks/compress/trial_gguf.py", "panther/integrations/gguf", *_COMPRESSION),
    "interpolative": ("benchmarks/layers/interpolative.py", "panther/nn/interpolative.py"),
    "kernel_resources": ("benchmarks/gpu/kernel_resources.py", "benchmarks/gpu/kernel_cases.py", "kernels/_triton"),
    "default-optimizers": (
        "benchmarks/train/trial_default_optimizers.py",
        "benchmarks/train/optimizer_tasks.py",
        "panther/optim",
    ),
    "layers": (
        "benchmarks/train/trial_layers.py",
        "benchmarks/train/trial_optimizers.py",
        "benchmarks/train/optimizer_tasks.py",
        "panther/nn/linear.py",
        "panther/nn/monarch.py",
        "kernels/ops/folded.py",
    ),
    "linearize": (
        "benchmarks/compress/trial_linearize.py",
        "panther/compression/linearization",
        "panther/nn/attention",
    ),
    "link": (
        "benchmarks/distributed/trial_link.py",
        "benchmarks/distributed/link_worker.py",
        "panther/distributed/data",
    ),
    "link-scale": ("benchmarks/distributed/link_scale.py", "panther/distributed/data"),
    "linalg-drivers": ("benchmarks/linalg/drivers.py", "panther/linalg"),
    "lstsq": ("benchmarks/linalg/lstsq.py", "panther/linalg"),
    "monarch": ("benchmarks/layers/monarch.py", "panther/nn/monarch.py"),
    "onnx": ("benchmarks/compress/trial_onnx.py", "panther/integrations/onnx", *_COMPRESSION),
    "optimizer-steps": ("benchmarks/train/optimizer_steps.py", "panther/optim"),
    "optimizers": (
        "benchmarks/train/trial_optimizers.py",
        "benchmarks/train/optimizer_methods.py",
        "benchmarks/train/optimizer_tasks.py",
        "panther/optim",
    ),
    "places": ("benchmarks/train/trial_places.py", "benchmarks/train/trial_layers.py", "panther/nn/linear.py"),
    "quantized-decoder": ("benchmarks/layers/quantized_decoder.py", "kernels/cpu/native", "panther/nn/quantized"),
    "quantized": ("benchmarks/layers/quantized.py", "panther/nn/quantized", "kernels/cpu"),
    "quantized-conv": ("benchmarks/layers/quantized_conv.py", "panther/nn/quantized", "kernels/cpu"),
    "randomized-svd": ("benchmarks/linalg/randomized_svd.py", "panther/linalg"),
    "scratch": ("benchmarks/train/trial_scratch.py", "panther/nn/linear.py", "panther/optim"),
    "serve": ("benchmarks/compress/trial_serve.py", "docs/gallery/compress/serve_an_encoder.py", *_COMPRESSION),
    "sketch": ("benchmarks/linalg/sketches.py", "panther/sketch"),
    "sketch-variants": ("benchmarks/train/sketch_variants.py", "panther/optim"),
    "sklinear": ("benchmarks/layers/sklinear.py", "panther/nn/linear.py", "kernels/cpu/sketched.py"),
    "sparse": ("benchmarks/linalg/sparse.py", "panther/linalg", "panther/sketch"),
    "step-in-backward": ("benchmarks/train/step_in_backward.py", "panther/optim"),
    "survival": ("benchmarks/train/trial_survival.py", "panther/distributed/checkpoint", "panther/train"),
    "survival-layouts": (
        "benchmarks/train/trial_survival.py",
        "panther/distributed/checkpoint",
        "panther/train",
        "panther/optim",
    ),
    "train": ("benchmarks/train/trainer.py", "panther/train"),
    "train-messages": ("benchmarks/train/messages.py", "panther/train", "panther/distributed/data"),
    "train-newcomer": ("benchmarks/train/newcomer.py", "panther/cli"),
    "train-restart": ("benchmarks/train/restart.py", "panther/train"),
    "train-text": ("benchmarks/train/trial_text.py", "panther/train"),
    "tune": ("benchmarks/compress/tune.py", "panther/tuning"),
    "tune-digits": ("benchmarks/compress/trial_tune.py", "panther/tuning"),
    "tune-retrieval": ("benchmarks/compress/trial_tune.py", "panther/tuning"),
    "windowed-attention": ("benchmarks/layers/windowed_attention.py", "kernels/ops/windowed_attention.py"),
}
_DOCUMENTATION = (".md", ".rst")


@dataclass(frozen=True)
class Measurement:
    """Rows of a file of results that were measured at one commit.

    Attributes:
        results: The name of the file.
        commit: The commit as the rows name it; empty if they name none.
        date: The day of the measurement; empty likewise.
        compared_from: The commit from which the code is compared.
        changes: The files of its code that have changed since.
    """

    results: str
    commit: str
    date: str
    compared_from: str
    changes: tuple[str, ...]


def subject_of(results: str) -> str:
    """Return the key of ``SOURCES`` of a file of results, by the name of the file.

    Raises:
        KeyError: If no key fits.

    Example:
        >>> subject_of("train-text-runs-cpu-amd-epyc-threads-1.csv")
        'train-text'
    """
    subjects = [subject for subject in SOURCES if results.startswith((f"{subject}-", f"{subject}_", f"{subject}."))]
    if not subjects:
        raise KeyError(f"{results} has no entry in benchmarks.figures.age.SOURCES: add its script")
    return max(subjects, key=len)


def files_of(subject: str) -> list[Path]:
    """Return the files of results of a subject.

    Raises:
        KeyError: If there are none.
    """
    files = [path for path in sorted(RESULTS.glob("*.csv")) if subject_of(path.name) == subject]
    if not files:
        raise KeyError(f"{subject} has no files in benchmarks/results: its name is a key of age.SOURCES")
    return files


def stamps_of(path: Path) -> list[tuple[str, str, str]]:
    """Return the commit, the date and the processor of the rows of a file, each combination once.

    Rows that name no commit, because nothing was timed, have the commit that wrote the file.
    """
    stamps = {(row.get("commit", ""), row.get("date", ""), row.get("device", "")): None for row in read_csv(path)}
    if ("", "", "") in stamps:
        log = _git("log", "-1", "--format=%h %cs", "--", path.relative_to(ROOT).as_posix()).split()
        return [(log[0], log[1], "none: compiled only")] if log else [("none", "", "")]
    return list(stamps)


def measurements() -> list[Measurement]:
    """Return the measurements of all files of results, the oldest first."""
    stamps = {
        (path.name, row.get("commit", "")): row.get("date", "")
        for path in sorted(RESULTS.glob("*.csv"))
        for row in read_csv(path)
    }
    starts = [_compared_from(results, commit) for results, commit in stamps]
    changes = changed_files(
        [(start, SOURCES[subject_of(results)]) for start, (results, _) in zip(starts, stamps, strict=True)]
    )
    listed = [
        Measurement(results, commit, date, start, files)
        for ((results, commit), date), start, files in zip(stamps.items(), starts, changes, strict=True)
    ]
    return sorted(listed, key=lambda measurement: measurement.date)


def changed_files(starts: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Return, for each commit and its paths, the files of these paths whose code at HEAD differs from that commit."""
    candidates = [
        [
            (old, new, path)
            for old, new, path in _differences(commit)
            if path in paths  # a file of its own that is new is listed too
            or (int(old, 16) and path.startswith(tuple(f"{folder}/" for folder in paths)))
        ]
        for commit, paths in starts
    ]
    codes = _codes({(blob, path) for files in candidates for *blobs, path in files for blob in blobs})
    return [
        tuple(
            path
            for old, new, path in files
            if not path.endswith(_DOCUMENTATION) and codes[old, path] != codes[new, path]
        )
        for files in candidates
    ]


def _compared_from(results: str, commit: str) -> str:
    """Return the commit of the rows if it has all that was measured, or the commit that added them to the history."""
    if commit and not commit.endswith("-dirty") and any(known.startswith(commit) for known in _history()):
        return commit
    path = (RESULTS / results).relative_to(ROOT).as_posix()
    search = [f"-S{commit}", "--reverse"] if commit else ["-1"]
    commits = _git("log", *search, "--format=%h", "--", path).split()
    return commits[0] if commits else "HEAD"  # rows that are not committed yet


@functools.cache
def _history() -> tuple[str, ...]:
    return tuple(_git("rev-list", "HEAD").split())


@functools.cache
def _differences(commit: str) -> tuple[tuple[str, str, str], ...]:
    """Return the old blob, the new blob and the path of each file that differs at HEAD; zeros stand for no file."""
    lines = _git("diff", "--raw", "--no-abbrev", "--find-renames", "--diff-filter=AMR", commit, "HEAD").splitlines()
    return tuple((line.split()[2], line.split()[3], line.split("\t")[-1]) for line in lines)


def _codes(files: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return what counts of each file, a blob and its path: a syntax tree without docstrings, or the text."""
    blobs = sorted({blob for blob, _ in files if int(blob, 16)})
    output = _git("cat-file", "--batch", text="\n".join(blobs)).encode()
    texts, position = {}, 0
    for blob in blobs:
        header = output.index(b"\n", position)
        start, size = header + 1, int(output[position:header].split()[-1])
        texts[blob], position = output[start : start + size].decode(), start + size + 1
    trees = {blob: _tree(texts[blob]) for blob, path in files if blob in texts and path.endswith(".py")}
    return {(blob, path): trees.get(blob, texts.get(blob, "")) for blob, path in files}


def _tree(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            del node.body[0]
    return ast.dump(tree)


def _git(*arguments: str, text: str | None = None) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print a row for each measurement whose code has changed, the oldest first."""
    listed = measurements()
    changed = [measurement for measurement in listed if measurement.changes]
    if changed:
        print_table(
            [
                {
                    "measured": measurement.date,
                    "at": measurement.commit,
                    "compared from": measurement.compared_from,
                    "results": measurement.results.removesuffix(".csv"),
                    "changed files": len(measurement.changes),
                    "first": measurement.changes[0],
                }
                for measurement in changed
            ]
        )
    files = len({measurement.results for measurement in listed})
    print(
        f"{len({measurement.results for measurement in changed})} of {files} files of results are older than their code"
    )


if __name__ == "__main__":
    main()
