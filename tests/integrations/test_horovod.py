"""Sketched models on two processes of Horovod: equal to one process; faults in a sentence, and no hang."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import waits
from torch import nn

import panther as pr

pytestmark = [pytest.mark.engine_slow, pytest.mark.distributed]
HERE = Path(__file__).parent


def horovodrun(folder, *command):
    pytest.importorskip("horovod.torch")
    bin = Path(sys.executable).parent
    environment = os.environ | {
        "OUT": str(folder), "PYTHONPATH": str(Path(pr.__file__).parents[1]), "PATH": f"{bin}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [bin / "horovodrun", "--gloo", "-np", "2", sys.executable, *command]
    return waits.run(command, 600, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("horovod")
    done = horovodrun(folder, HERE / "horovod_worker.py", folder, "train")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_losses_and_weights_equal_those_of_one_process(outcomes):
    for found in outcomes:
        assert found["size"] == 2
        assert found["none"] == pytest.approx(found["plain"], rel=1e-4)
        assert found["none error"] < 1e-3
        assert found["fp16"] == pytest.approx(found["plain"], rel=1e-2)
        assert 0 < found["fp16 error"] < 0.05
        assert found["none seeds"] == found["fp16 seeds"] == [3, 4]


def test_the_state_of_an_optimizer_is_sent(outcomes):
    assert [found["state"] for found in outcomes] == [[[5], 13]] * 2


def test_bad_input_is_refused_on_every_rank(outcomes):
    expected = [
        (
            "DistributedError",
            r"models differ between ranks: .*\(4, 64\) on rank 0 and .*\(5, 64\) on rank 1.*: build the",
        ),
        ("SketchMismatchError", r"sketches differ between ranks: layer '' is .*: build the same model on every rank"),
        ("ConfigError", "root_rank=2 must be one of the 2 ranks, from 0"),
        ("DistributedError", "root_rank is 0 on rank 0 and 1 on rank 1"),
        ("ConfigError", "compression='int8' is unknown: use 'none' or 'fp16'"),
        ("ConfigError", "optimizer must be a torch optimizer, not a Sequential"),
        ("ConfigError", "named_parameters are taken from the model: leave them out"),
        ("ConfigError", r"loss must be one number, not a tensor of shape \(2,\)"),
    ]
    for found in outcomes:
        for (kind, message), (wanted, pattern) in zip(found["refused"], expected, strict=True):
            assert kind == wanted, message
            assert re.search(pattern, message), message


def test_a_lost_worker_ends_the_run(tmp_path):
    done = horovodrun(tmp_path, HERE / "horovod_worker.py", tmp_path, "lose")
    assert done.returncode != 0
    assert "one or more processes exited with non-zero status" in done.stderr
    assert not list(tmp_path.glob("rank-*.json"))


def test_the_script_of_the_page(tmp_path):
    done = horovodrun(tmp_path, HERE.parents[1] / "docs/howto/scripts/train_horovod.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 5: loss 0." in done.stdout
    assert "on 2 processes" in done.stdout
    pr.load_compressed(tmp_path / "model", nn.Sequential(pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10)))
