"""The simulation as a user meets it: what it prints, its checks, and what it refuses."""

import json

import pytest
import torch
from torch import nn

from panther.cli import main
from panther.cli.simulate import _estimate, _report, _training
from panther.cli.simulate._training import Settings, shard

PARAMETERS = 64 * 128 + 128 + 2 * (2 * 128 * 4 + 128) + 128 * 10 + 10  # two SKLinear(128, 128, 4) in the middle
DENSE = 64 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 10 + 10
SMALL = ["--hidden", "128", "--sketch-size", "4"]


def settings(**changes):
    given = {"kind": "sketched", "world": 2, "batch": 64, "epochs": 1, "steps": None}
    return Settings(**{**given, "hidden": 128, "sketch_size": 4, "seed": 0, **changes})


def simulate(capfd, tmp_path, *args):
    """Exit code, output by section, and the report."""
    report = tmp_path / "report.json"
    code = main(["simulate", *SMALL, *args, "--report", str(report)])
    out, err = capfd.readouterr()
    assert err == ""
    return code, out.split("\n\n"), json.loads(report.read_text())


@pytest.mark.distributed
def test_two_ranks(capfd, tmp_path):
    code, sections, report = simulate(capfd, tmp_path, "--epochs", "2")
    title, samples, gradients, training, sent, checks = sections
    assert code == 0
    assert "2 processes of this machine" in title
    assert "1,347 samples of an epoch and deals them to 2 ranks in turn; it repeats 1, so" in samples
    assert "A step has 64 samples, 32 of each rank, the last of an epoch 4; an epoch has 22 steps." in samples
    assert "S1 of the first SKLinear" in gradients
    assert len(training.splitlines()) == 1 + 1 + 2 + 1 + 3 + 1
    assert f"{8 * PARAMETERS:,}" in sent
    assert f"{8 * DENSE:,}" in sent
    assert checks.count("yes") == 5
    assert "1,347 of 1,347" in checks
    assert report["gradient_bytes"] == 8 * PARAMETERS
    assert report["dense_gradient_bytes"] == 8 * DENSE
    assert report["sketch_bytes"] == 16 + 2 * 8  # a fingerprint, and a seed a layer
    assert report["accuracy"][0] == report["accuracy"][1] == report["single_accuracy"]
    assert len(report["losses"][0]) == 44
    means = [(a + b) / 2 for a, b in zip(*report["losses"], strict=True)]
    assert means == pytest.approx(report["single_losses"], rel=1e-12)
    assert means[-1] < means[0]


@pytest.mark.distributed
def test_three_ranks_of_dense_layers_for_some_steps(capfd, tmp_path):
    code, sections, report = simulate(capfd, tmp_path, "--world", "3", "--dense", "--steps", "3")
    assert code == 0
    assert "A step has 63 samples, 21 of each rank, the last of an epoch 24" in sections[1]
    assert "with dense layers" not in sections[4]
    assert report["gradient_bytes"] == 8 * DENSE
    assert report["checks"][0]["name"] == "no sample is seen by two ranks"
    assert len(report["losses"]) == 3
    assert all(len(losses) == 3 for losses in report["losses"])


@pytest.mark.distributed
def test_what_does_not_hold_is_an_error(capfd, monkeypatch):
    def elsewhere(given, seen):
        return single(settings(seed=5, world=given.world), seen)  # other weights than those the ranks start from

    single = _training.record_single
    monkeypatch.setattr(_report, "record_single", elsewhere)
    assert main(["simulate", *SMALL, "--steps", "2"]) == 1
    out, err = capfd.readouterr()
    assert out.count("  NO  ") == 2
    assert err == (
        "panther: error: checks failed: the mean is the gradient of the whole batch; one process ends with the same "
        "parameters. This is a bug: please report it\n"
    )


def test_a_dry_run_starts_nothing(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("panther.distributed.launch", None)
    code, sections, report = simulate(capfd, tmp_path, "--dry-run", "--world", "1024")
    assert code == 0
    assert "1,024 ranks, counted and not run" in sections[0]
    assert "\n...\n1,023" in sections[1]
    assert "repeats 701, so that each of them has 2." in sections[1]
    assert "Note: 34 % of an epoch would be repeated samples." in sections[2]
    assert report["samples_per_rank"] == report["steps_per_epoch"] == 2
    assert report["gradient_bytes"] == 8 * PARAMETERS
    assert report["dense_gradient_bytes"] == 8 * DENSE
    assert list(report["shards"]) == ["0", "1", "2", "3", "1023"]


def test_shards_are_disjoint_and_leave_nothing_out():
    """All ranks of a world that does not divide the samples, in two epochs."""
    epochs = [[shard(1347, settings(world=7), rank, epoch) for rank in range(7)] for epoch in range(2)]
    for shards in epochs:
        assert {len(one) for one in shards} == {193}
        dealt = [place for one in shards for place in one]
        assert set(dealt) == set(range(1347))
        assert len(dealt) - len(set(dealt)) == 7 * 193 - 1347
    assert epochs[0] != epochs[1]


def test_counted_memory_is_that_of_the_tensors():
    plan = _estimate.estimate(settings())
    torch.manual_seed(0)
    model = settings().build()
    assert plan["memory"]["parameters"] == sum(p.nbytes for p in model.parameters()) == 8 * PARAMETERS
    assert plan["memory"]["sketches"] == sum(b.nbytes for b in model.buffers())
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(
            model(torch.randn(32, 64, dtype=torch.float64)), torch.zeros(32, dtype=torch.int64)
        )
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert plan["memory"]["kept for backward"] == sum(size for place, size in kept.items() if place not in own)
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--world", "2000", "--batch", "64"], "--batch 64 cannot be divided evenly by --world 2000: use --batch 2000"),
        (["--dense", "--hidden", "10000000"], "the tensors of 1 rank need 6,400,032,320,019,528 bytes"),
    ],
)
def test_a_dry_run_says_what_does_not_fit(capfd, args, told):
    assert main(["simulate", "--dry-run", *args]) == 1
    assert f"Does not fit: {told}" in capfd.readouterr().out


def test_a_dry_run_notes_what_is_a_waste(capfd, monkeypatch):
    monkeypatch.setattr(_estimate, "_physical_memory", lambda: 10**9)
    assert main(["simulate", "--dry-run", "--world", "2000"]) == 0
    out = capfd.readouterr().out
    assert "There are more ranks than samples: 653 ranks would see only repeated ones." in out
    assert "The memory of this machine, 1,000,000,000 bytes, is too small for all ranks together." in out
    assert main(["simulate", "--dry-run", "--batch", "4000"]) == 0
    assert "a step would have 1,348 samples, not 4,000." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["--world", "9"],
            "--world 9 must be from 2 to 8: use --world 8, or add --dry-run, which counts for up to 1,048,576",
        ),
        (["--world", "1"], "--world 1 must be from 2 to 8"),
        (["--world", "2000000", "--dry-run"], "--world 2000000 must be from 1 to 1048576"),
        (["--world", "4", "--batch", "63"], "--batch 63 cannot be divided evenly by --world 4: use --batch 60 or 64"),
        (["--world", "3", "--batch", "2"], "--batch 2 cannot be divided evenly by --world 3: use --batch 3"),
        (["--report", "nowhere/report.json"], "--report nowhere/report.json cannot be written"),
    ],
)
def test_what_cannot_be_run_is_refused(capfd, monkeypatch, args, told):
    monkeypatch.setattr("panther.distributed.launch", None)
    assert main(["simulate", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert told in err


def test_ranks_that_are_too_many_for_the_memory_are_not_started(capfd, monkeypatch):
    monkeypatch.setattr("panther.distributed.launch", None)
    monkeypatch.setattr(_estimate, "_physical_memory", lambda: 3_000_000)
    assert main(["simulate"]) == 2
    assert "the tensors of 2 ranks need 4,675,856 bytes" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--world", "two"], "argument --world: 'two' is not a whole number"),
        (["--dense", "--sketched"], "argument --sketched: not allowed with argument --dense"),
        (["--epochs", "10", "--steps", "5"], "argument --steps: not allowed with argument --epochs"),
    ],
)
def test_bad_flags_exit_with_2(capfd, args, told):
    with pytest.raises(SystemExit) as exit:
        main(["simulate", *args])
    assert exit.value.code == 2
    assert told in capfd.readouterr().err
