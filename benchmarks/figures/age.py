"""List the committed results whose code has changed since they were measured: ``make figures-age``.

A row names the commit that it was measured at. The code of a file of results is the script that wrote it and the
packages that the script measures; a commit that changes only comments or docstrings counts too.
"""

__all__ = ["SOURCES", "changes_since", "main", "sources_of"]

import subprocess

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
    "decoding": ("benchmarks/layers/decoding.py", "panther/nn/attention/decoding", "kernels/ops/attention.py"),
    "distributed-bytes": ("benchmarks/distributed/bytes_sent.py", "panther/distributed"),
    "distributed-muon": ("benchmarks/distributed/muon.py", "panther/optim"),
    "distributed-overhead": ("benchmarks/distributed/overhead.py", "panther/distributed"),
    "distributed-scaling": ("benchmarks/distributed/overhead.py", "panther/distributed"),
    "engine-forms": ("benchmarks/engines", "panther/cli/export.py", "panther/integrations/compressed_tensors"),
    "engines-slow": ("tests/support/engine_results.py", "panther/integrations"),
    "environment": ("benchmarks/train/environment.py",),
    "faults": ("benchmarks/train/trial_faults.py", "panther/train", "panther/distributed"),
    "file-survival": ("benchmarks/train/trial_files.py", "panther/files"),
    "files": ("benchmarks/compress/trial_files.py", *_COMPRESSION),
    "files-peers": ("benchmarks/compress/trial_peers.py", *_COMPRESSION),
    "folder": ("benchmarks/compress/trial_folder.py", *_COMPRESSION),
    "folder-equal": ("benchmarks/compress/trial_folder_equal.py", *_COMPRESSION),
    "frontier": ("benchmarks/compress/trial_frontier.py", *_COMPRESSION),
    "frontier-speed": ("benchmarks/compress/trial_frontier_speed.py", *_COMPRESSION, "kernels/cpu"),
    "host": ("benchmarks/gpu/host.py", "kernels/ops", "kernels/_triton"),
    "interpolative": ("benchmarks/layers/interpolative.py", "panther/nn/interpolative.py"),
    "kernel_resources": ("benchmarks/gpu/kernel_resources.py", "benchmarks/gpu/kernel_cases.py", "kernels/_triton"),
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
    "lora": ("benchmarks/layers/lora.py", "panther/nn/quantized"),
    "lstsq": ("benchmarks/linalg/lstsq.py", "panther/linalg"),
    "muon-ranks": ("benchmarks/train/trial_muon_ranks.py", "panther/optim"),
    "onnx": ("benchmarks/compress/trial_onnx.py", "panther/integrations/onnx", *_COMPRESSION),
    "optimizers": (
        "benchmarks/train/trial_optimizers.py",
        "benchmarks/train/optimizer_methods.py",
        "benchmarks/train/optimizer_tasks.py",
        "panther/optim",
    ),
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


def sources_of(results: str) -> tuple[str, ...]:
    """Return the code of a file of results, by the name of the file.

    Raises:
        KeyError: If no entry of ``SOURCES`` fits.

    Example:
        >>> sources_of("train-text-runs-cpu-amd-epyc-threads-1.csv")
        ('benchmarks/train/trial_text.py', 'panther/train')
    """
    beginnings = [
        beginning for beginning in SOURCES if results.startswith((f"{beginning}-", f"{beginning}_", f"{beginning}."))
    ]
    if not beginnings:
        raise KeyError(f"{results} has no entry in benchmarks.figures.age.SOURCES: add its script")
    return SOURCES[max(beginnings, key=len)]


def changes_since(commit: str, paths: tuple[str, ...]) -> list[str] | None:
    """Return the commits after a commit that change one of the paths, the latest first; None if it is unknown."""
    command = ["git", "log", "--format=%h %cs %s", f"{commit.removesuffix('-dirty')}..HEAD", "--", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def main() -> None:
    """Print a row for each file of results whose code has changed, the oldest measurement first."""
    rows, files = [], sorted(RESULTS.glob("*.csv"))
    for path in files:
        stamps = {row["commit"]: row["date"] for row in read_csv(path) if row.get("commit")}
        for commit, date in stamps.items():
            changes = changes_since(commit, sources_of(path.name))
            if changes is None or changes:
                rows.append(
                    {
                        "measured": date,
                        "at": commit,
                        "results": path.stem,
                        "commits since": "unknown" if changes is None else len(changes),
                        "last change": "" if changes is None else changes[0][:72],
                    }
                )
    if rows:
        print_table(sorted(rows, key=lambda row: str(row["measured"])))
    print(f"{len({row['results'] for row in rows})} of {len(files)} files of results are older than their code")


if __name__ == "__main__":
    main()
