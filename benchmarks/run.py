"""Run every benchmark that takes minutes: ``python -m benchmarks.run [arguments for each]``."""

__all__ = ["SUBJECTS"]

import subprocess
import sys

from benchmarks.harness import ROOT

SUBJECTS = (
    "layers.sklinear",
    "layers.conv",
    "layers.quantized",
    "layers.quantized_conv",
    "layers.interpolative",
    "layers.monarch",
    "layers.attention",
    "layers.windowed_attention",
    "layers.decoding",
    "linalg.sketches",
    "linalg.randomized_svd",
    "linalg.cqrrpt",
    "linalg.lstsq",
    "linalg.sparse",
    "linalg.drivers",
    "compress.tune",
    "train.trainer",
    "train.environment",
    "train.optimizer_steps",
    "distributed.overhead",
    "distributed.processes",
    "distributed.muon",
    "distributed.advisor",
)
"""The benchmarks that take the arguments of ``harness.main``. Trials, figures and the GPU suite take others."""

if __name__ == "__main__":
    for subject in SUBJECTS:
        print(f"== {subject}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{subject}", *sys.argv[1:]], cwd=ROOT, check=True)
