"""Every benchmark runs; how fast anything is, is not a test's affair."""

import os
import sys
from pathlib import Path

import pytest
import waits

pytestmark = pytest.mark.tool
ROOT = Path(__file__).parents[2]
# In one process, which imports the libraries once. Processes are forked first, before threads of a gradient exist.
ALL_SUBJECTS = """
import importlib, time, torch
from benchmarks.run import SUBJECTS
torch.set_num_threads(1)
for subject in sorted(SUBJECTS, key=lambda name: not name.startswith(("train.", "distributed."))):
    begun = time.process_time()
    importlib.import_module(f"benchmarks.{subject}").run("cpu", 0.0, True)
    print(f"== {subject}: {time.process_time() - begun:.1f} s of processor time", flush=True)
"""


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = waits.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True).stdout
    print(output)  # the seconds, for whoever asks with -s
    return output


def test_every_subject_runs():
    run("-c", ALL_SUBJECTS)


def test_a_subject_starts_itself_with_other_settings_of_the_allocator():
    output = run("-m", "benchmarks.layers.sklinear", "--quick", "--memory", "kept")
    assert "memory kept" in output
    heading = next(line for line in output.splitlines() if "x optimum" in line)
    assert all(column in heading for column in ("time_us", "x nn.Linear", "stored_bytes", "rms_error"))


def test_the_first_run_of_a_newcomer_is_that_of_the_readme():
    from benchmarks.train.newcomer import LOOP_SCRIPT, README_SCRIPT

    compile(LOOP_SCRIPT, "loop.py", "exec")
    compile(README_SCRIPT, "train.py", "exec")
    assert README_SCRIPT.count("Trainer(") == 1
    assert "for _ in range" not in README_SCRIPT


@pytest.mark.distributed
def test_bytes_sent_are_those_of_the_formulas():
    from benchmarks.distributed.bytes_sent import Sizes, data_parallel_bytes, tensor_parallel_bytes

    sizes = Sizes(width=512, sketch_size=8, batch=4)
    rows = tensor_parallel_bytes(sizes) + data_parallel_bytes(sizes)
    assert all(row["bytes"] == row["formula"] for row in rows)
    sent = {(row["case"], row["layer"]): row["bytes"] for row in rows}
    numbers = {kind: sum(p.numel() for p in sizes.layer(kind).parameters()) for kind in ("SKLinear", "nn.Linear")}
    for strategy in ("ddp", "replicate", "fsdp"):
        sketched, dense = (sent[f"data parallel, {strategy}", kind] for kind in numbers)
        assert sketched * numbers["nn.Linear"] == dense * numbers["SKLinear"]
        assert sent[f"data parallel, {strategy}", "pair of nn.Linear"] == sketched
    assert sent["sync_sketches", "8 SKLinear"] - sent["sync_sketches", "1 SKLinear"] == 7 * 8  # a seed a layer
