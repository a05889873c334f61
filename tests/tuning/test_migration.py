"""The page for users of panther-ml: each row of its table of the tuner is run."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import panther as pr
from panther.tuning import Choice, Float, Group, Int

optuna = pytest.importorskip("optuna")
PAGE = Path(__file__).resolve().parents[2] / "docs/howto/migrate-panther-ml.rst"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        for layer in self.encoder:
            x = layer(x).relu()
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def rows():
    table = (
        PAGE.read_text()
        .partition("The tuner\n---")[2]
        .partition(":class: lookup")[2]
        .partition("\n\nWithout a metric")[0]
    )
    found = re.findall(r"\* - (.*?)\n     - (.*?)(?=\n   \* -|\Z)", table, re.DOTALL)[1:]
    return [pytest.param(code, id=re.sub(r"\W+", "-", name)[:60]) for name, code in found]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(24, 8, 32)
    wanted = model(x).detach()

    def accuracy(model):
        with torch.no_grad():
            return 1 - ((model(x) - wanted).norm() / wanted.norm())

    def seconds(model):
        start = time.process_time()
        model(x)
        return time.process_time() - start

    few = {"trials": 2, "seed": 0, "progress": False}
    found = {
        "pr": pr, "model": model, "accuracy": accuracy, "seconds": seconds, "batches": list(x.split(4)), "few": few,
        "Group": Group, "Int": Int, "Float": Float, "Choice": Choice, "nn": nn, "optuna": optuna,
        "folder": tmp_path_factory.mktemp("migration"),
    }  # fmt: skip
    found["result"] = pr.tune(model, accuracy, found["batches"], constraint=">= 0.5", **few)
    return found


@pytest.mark.parametrize("code", rows())
@pytest.mark.filterwarnings("ignore::UserWarning:optuna")
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_each_row_runs(names, code, capsys):
    for snippet in re.findall(r"``(.*?)``", code, re.DOTALL):
        if snippet.startswith("panther tree") or (snippet == "result.to_dataframe()" and not _has_pandas()):
            continue
        if ".plot(" in snippet:
            pytest.importorskip("matplotlib")
        previous_names = dict(names)
        exec(snippet, names)
        if snippet.startswith("space = "):
            options = {"space": names["space"], "objective": "metric", **names["few"]}
            result = pr.tune(names["model"], names["accuracy"], names["batches"], **options)
            assert all(trial.plan.layers or trial.plan.attention for trial in result.trials[-1:])
        names.update(previous_names)


def _has_pandas():
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True
