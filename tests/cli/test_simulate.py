"""The simulation as a user meets it: what it prints, its checks, and what it refuses."""

import dataclasses
import json
import re

import pytest

from panther.cli import main
from panther.cli.simulate import simulation
from panther.cli.simulate.simulation import Settings, shard
from panther.distributed import get_world_size

PARAMETERS = 64 * 128 + 128 + 2 * (2 * 128 * 4 + 128) + 128 * 10 + 10  # two SKLinear(128, 128, 4) in the middle
DENSE = 64 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 10 + 10
SMALL = ["--hidden", "128", "--sketch-size", "4"]


def settings(**changes):
    given = {"kind": "sketched", "world": 2, "batch": 64, "epochs": 1}
    return Settings(**{**given, "hidden": 128, "sketch_size": 4, "lr": 0.02, "seed": 0, **changes})


def simulate(capfd, *args):
    """Output by section."""
    assert main(["simulate", *SMALL, *args]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out.split("\n\n")


@pytest.mark.distributed
def test_two_ranks(capfd):
    title, samples, counts, gradients, training, checks = simulate(capfd, "--epochs", "2")
    assert "on 2 ranks: the network 64-128-128-128-10 (sketched, sketch size 4)" in title
    assert "1,347 samples of an epoch and deals them to 2 ranks in turn; it repeats 1, so" in samples
    values = dict(line.strip().rsplit(None, 1) for line in counts.splitlines()[1:-1])
    assert (values["samples per step, of each rank"], values["steps per epoch"]) == ("32", "22")
    assert values["gradient bytes of a rank per step"] == f"{8 * PARAMETERS:,}"
    assert values["with dense layers"] == f"{8 * DENSE:,}"
    assert "S1 of the first SKLinear" in gradients
    losses = [line.split()[1:] for line in training.splitlines()[2:4]]
    for first, second, alone in losses:
        assert (float(first) + float(second)) / 2 == pytest.approx(float(alone), abs=1e-4)
    assert float(losses[1][2]) < float(losses[0][2])
    accuracies = re.findall(r"[\d.]+ %", training)
    assert len(accuracies) == 3
    assert len(set(accuracies)) == 1
    assert checks.count("  yes  ") == 6


@pytest.mark.distributed
def test_three_ranks_of_dense_layers(capfd):
    sections = simulate(capfd, "--world-size", "3", "--dense", "--epochs", "1")
    assert sections[1].endswith("deals them to 3 ranks in turn.")
    assert "the weight of the second nn.Linear" in sections[3]
    assert sections[5].count("  yes  ") == 6


@pytest.mark.distributed
def test_what_does_not_hold_is_an_error(capfd, monkeypatch):
    def elsewhere(given):  # one process begins with other weights, and has other samples, than the ranks
        return train(dataclasses.replace(given, seed=5) if get_world_size() == 1 else given)

    train = simulation.train
    monkeypatch.setattr(simulation, "train", elsewhere)
    assert main(["simulate", *SMALL, "--epochs", "1"]) == 1
    out, err = capfd.readouterr()
    assert out.count("  NO  ") == 2
    assert err == (
        "panther: error: checks failed: the mean is the gradient of the whole batch; one process ends with the same "
        "parameters. This is a bug: please report it\n"
    )


def test_a_dry_run_starts_nothing(capfd, monkeypatch):
    monkeypatch.setattr(simulation, "launch", None)
    _, samples, counts = simulate(capfd, "--dry-run", "--world-size", "1024")
    assert "\n...\n1,023" in samples
    assert "repeats 701, so that each of them has 2." in samples
    assert f"{8 * PARAMETERS:,}\n" in counts
    assert f"{8 * DENSE:,}\n" in counts


@pytest.mark.distributed
def test_data_instead_of_tables(capfd):
    (output,) = simulate(capfd, "--json", "--epochs", "2")
    report = json.loads(output)
    assert report["counts"]["gradient bytes of a rank per step"] == 8 * PARAMETERS
    first, second, alone = report["losses"].values()
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(alone)
    assert len(report["checks"]) == 6
    assert all(report["checks"].values())
    (output,) = simulate(capfd, "--json", "--dry-run", "--world-size", "1024")
    assert list(json.loads(output)) == ["counts"]


def test_shards_are_disjoint_and_leave_nothing_out():
    """All ranks of a world that does not divide the samples, in two epochs."""
    epochs = [[shard(settings(world=7), rank, epoch).tolist() for rank in range(7)] for epoch in range(2)]
    for shards in epochs:
        assert {len(one) for one in shards} == {193}
        dealt = [sample for one in shards for sample in one]
        assert set(dealt) == set(range(1347))
        assert len(dealt) - len(set(dealt)) == 7 * 193 - 1347
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["--world-size", "9"],
            "--world-size 9 must be from 2 to 8: use --world-size 8, or add --dry-run, which counts for up to",
        ),
        (["--world-size", "1"], "--world-size 1 must be from 2 to 8"),
        (["--world-size", "2000000", "--dry-run"], "--world-size 2000000 must be from 2 to 1048576"),
        (
            ["--world-size", "4", "--batch", "63"],
            "--batch 63 cannot be divided evenly by --world-size 4: use --batch 60 or 64",
        ),
        (["--world-size", "3", "--batch", "2"], "--batch 2 cannot be divided evenly by --world-size 3: use --batch 3"),
    ],
)
def test_what_cannot_be_run_is_refused(capfd, args, told):
    assert main(["simulate", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert told in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "the tensors of 2 ranks need 4,"),
        (["--dry-run", "--dense", "--world-size", "2000", "--hidden", "10000000"], "the tensors of 1 rank need 6,400,"),
    ],
)
def test_ranks_without_enough_memory_are_not_started(capfd, monkeypatch, args, told):
    monkeypatch.setattr(simulation, "launch", None)
    monkeypatch.setattr(simulation, "physical_memory", lambda: 3_000_000)
    assert main(["simulate", *args]) == 1
    assert f"panther: error: {told}" in capfd.readouterr().err


def test_bad_flags_exit_with_2(capfd):
    with pytest.raises(SystemExit) as exit:
        main(["simulate", "--world-size", "two"])
    assert exit.value.code == 2
    assert "argument --world-size: 'two' is not a whole number" in capfd.readouterr().err
