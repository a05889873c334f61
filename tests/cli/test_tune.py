"""panther tune: a search from a file, what it writes, and what it refuses."""

import json

import pytest
import torch

import panther as pr
from panther.cli import main

WORK = """
import torch
from torch import nn

def data():
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :4] * 2 + x[:, 4:8]).argmax(1)

def net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    x, labels = data()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    return net.eval()

def batches():
    return list(data()[0].split(32))

def accuracy(net):
    x, labels = data()
    with torch.no_grad():
        return (net(x).argmax(1) == labels).double().mean()

def broken(net):
    raise RuntimeError("no such file")

def numbers(net):
    return sum(parameter.numel() for parameter in net.parameters())

def good(metric):
    return metric > 0.6
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with functions, and what writes a file of settings."""
    monkeypatch.chdir(tmp_path)
    name = f"work_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(WORK)

    def write(config):
        (tmp_path / "tune.toml").write_text(config.replace("work:", f"{name}:"))
        return name

    return write


def test_a_search_from_a_file(work, capsys, tmp_path):
    name = work(
        """
        model = "work:net"
        evaluate = "work:accuracy"
        calibration = "work:batches"
        constraint = ">= 90 %"
        trials = 5
        seed = 0
        progress = false
        storage = "study.log"
        [space]
        "0" = { form = ["int4", "low_rank"], rank = { int = [4, 12], step = 4 } }
        "type:Linear" = "auto"
        """.replace('"type:Linear"', '"2"')
    )
    assert main(["tune", "tune.toml", "--out", "small", "--report", "trials.json"]) == 0
    assert "best: trial" in capsys.readouterr().out
    found = json.loads((tmp_path / "trials.json").read_text())
    assert len(found["trials"]) == 5
    names: dict = {}
    exec(WORK, names)
    model = pr.load_compressed("small", names["net"]())
    best = found["trials"][[trial["number"] for trial in found["trials"]].index(found["best"])]
    assert names["accuracy"](model) == best["metric"]
    assert main(["tune", "tune.toml", "--out", "small"]) == 2
    assert "--out small is not empty" in capsys.readouterr().err
    assert name


def test_joint_settings_of_a_class(work, capsys):
    work(
        'model = "work:net"\nevaluate = "work:accuracy"\nobjective = "metric"\ntrials = 2\nseed = 0\nprogress = false\n'
        '[space]\n"joint:type:Linear" = { bits = [8, 4] }\n'
    )
    assert main(["tune", "tune.toml"]) == 0
    assert "2 trials" in capsys.readouterr().out


def test_functions_as_objective_and_constraint(work, tmp_path):
    work(
        'model = "work:net"\nevaluate = "work:accuracy"\ncalibration = "work:batches"\nobjective = "work:numbers"\n'
        'constraint = ["work:good", "size <= 80 %"]\ntrials = 3\nseed = 0\nprogress = false\n'
    )
    assert main(["tune", "tune.toml", "--report", "trials.json"]) == 0
    found = json.loads((tmp_path / "trials.json").read_text())
    assert found["objective"] == "numbers"
    assert found["constraints"] == ["good", "size <= 80 %"]
    assert found["trials"][found["best"]]["metric"] > 0.6


def test_a_plot_that_cannot_be_written_is_refused_before_the_search(work, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    work('model = "work:net"\nevaluate = "work:broken"')
    assert main(["tune", "tune.toml", "--plot", "plot.foo"]) == 2
    assert "no plot can be written to 'plot.foo': use one of the suffixes" in capsys.readouterr().err
    work('model = "work:net"\nevaluate = "work:accuracy"\nobjective = "metric"\ntrials = 2\nseed = 0')
    assert main(["tune", "tune.toml", "--plot", "plot.svg"]) == 0
    assert "best: trial" in capsys.readouterr().out
    assert (tmp_path / "plot.svg").stat().st_size > 5000


def test_the_command_line_names_another_model(work, capsys):
    name = work('model = "work:nowhere"\nevaluate = "work:accuracy"\nobjective = "metric"\ntrials = 2\nseed = 0')
    assert main(["tune", "tune.toml", f"{name}:net"]) == 0
    assert "trial" in capsys.readouterr().out


def test_options_replace_settings_of_the_file(work, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    work('model = "work:net"\nevaluate = "work:accuracy"\nobjective = "metric"\ntrials = 30\nseed = 0')
    options = ["--trials", "2", "--no-progress", "--forms", "int8", "--json", "trials.json"]
    assert main(["tune", "tune.toml", *options]) == 0
    note = "panther: note: write --report in place of --json, which the next version of Panther does not accept\n"
    assert capsys.readouterr().err.startswith(note)
    assert 1 <= len(json.loads((tmp_path / "trials.json").read_text())["trials"]) <= 2
    assert main(["tune", "tune.toml", "--trials", "none"]) == 2
    assert "trials must be an integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message", "status"),
    [
        ('evaluate = "work:accuracy"', "model is missing in tune.toml", 2),
        ('model = "work:net"', "evaluate is missing in tune.toml", 2),
        ('model = "work:net"\nevaluate = "accuracy"', "must be of the form module:function", 2),
        ('model = "nowhere"\nevaluate = "work:accuracy"', "is not a folder, and not of the form", 2),
        ('model = 3\nevaluate = "work:accuracy"', "model = 3 in tune.toml must be a text", 2),
        ('model = "work:data"\nevaluate = "work:accuracy"', "returns a value of type tuple", 2),
        (
            'model = "work:net"\nevaluate = "work:accuracy"\ntrails = 3',
            "'trails' in tune.toml is not a setting",
            2,
        ),
        ('model = "work:net"\nevaluate = "work:accuracy"\ntrials = "3"', "trials", 2),
        ('model = "work:net"\nevaluate = "work:broken"', "evaluate raised RuntimeError: no such file", 1),
        ('model = "work:net"\nevaluate = "work:accuracy"\nconstraint = "> 3"', "is not understood", 2),
        ('model = "work:net"\nevaluate = "work:accuracy"\n[space]\n"9" = "auto"', "matches no layer", 2),
        (
            'model = "work:net"\nevaluate = "work:accuracy"\ntrain = "work:fit"',
            "'train' in tune.toml is not a setting",
            2,
        ),
    ],
)
def test_what_it_refuses(work, capsys, config, message, status):
    work(config)
    assert main(["tune", "tune.toml"]) == status
    assert message in capsys.readouterr().err
    torch.manual_seed(0)
