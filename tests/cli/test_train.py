"""panther train as users type it."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import panther as pr
from panther.cli import main
from panther.distributed import checkpoint
from panther.train import TrainConfig

WORK = """
import os, signal, torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def load():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    return data, data

class Deadly(TensorDataset):
    def __getitem__(self, index):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.path.exists("runs/step-00000002"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

def dies():
    return Deadly(*load()[0].tensors)

def metrics():
    return {"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()}

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

def positives(batch):
    return batch[1].sum()

def nothing():
    return 3

def fails():
    raise RuntimeError("no such file")
"""
TOML = """
model = "{work}:build"
data = "{work}:load"
loss_fn = "cross_entropy"
[train]
epochs = 2
batch_size = 8
learning_rate = 0.01
checkpoint_dir = "runs"
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a module of the user's, whose name nobody has imported before."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    module = f"work_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(WORK)
    (tmp_path / "run.toml").write_text(TOML.format(work=module))
    yield module
    sys.modules.pop(module, None)


def log():
    return [json.loads(line) for line in Path("runs/log.jsonl").read_text().splitlines()]


def test_a_file_and_settings_over_it(work, capsys, caplog):
    assert (
        main(["train", "--config", "run.toml", "--epochs=3", f"--metrics={work}:metrics", "--log-every-n-steps=1"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("step 18  epoch 3  loss 0.")
    assert "validation_accuracy 0." in out
    assert [row["step"] for row in log() if "loss" in row] == list(range(1, 19))
    assert checkpoint.checkpoints("runs")[-1].name == "step-00000018"
    assert main(["train", "--config", "run.toml", "--epochs", "3"]) == 0
    assert "training is finished (step 18): raise epochs or max_steps to continue" in caplog.text
    capsys.readouterr()
    assert main(["train", "--config", "run.toml", "--max-steps=3", "--checkpoint-dir=short"]) == 0  # in place of epochs
    assert capsys.readouterr().out.startswith("step 3  epoch 0")


def test_without_a_file(work, capsys):
    settings = [f"{work}:build", f"--data={work}:load", "--loss-fn=cross_entropy", "--batch-size=8", "--max-steps=4"]
    assert main(["train", *settings, f"--optimizer={work}:optimizer", "--log-every-n-steps=2"]) == 0
    assert "learning_rate 0.1" in capsys.readouterr().out
    texts = ["--run-name=5", "--trackers=jsonl", "--pipeline-layers=null"]
    assert main(["train", *settings, *texts, "--optimizer=SGD", "--learning-rate=.5", "--no-progress"]) == 0
    assert not Path("runs").exists()


def test_the_weight_of_a_batch(work):
    """An index of the batch, in a file or not, and a function of it; the labels are 0 and 1."""
    losses = []
    Path("run.toml").write_text(f"loss_weight = 1\n{TOML.format(work=work)}".replace('"runs"', '"file"'))
    for folder, arguments in {
        "file": ["--config", "run.toml"],
        "function": ["--config", "run.toml", f"--loss-weight={work}:positives", "--checkpoint-dir=function"],
        "none": ["--config", "run.toml", "--loss-weight=null", "--checkpoint-dir=none"],
    }.items():
        assert main(["train", *arguments, "--log-every-n-steps=1", "--gradient-accumulation-steps=2"]) == 0
        rows = map(json.loads, Path(folder, "log.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] != losses[2]


def test_a_scheduler(work):
    arguments = ["train", "--config", "run.toml", f"--scheduler={work}:scheduler", "--scheduler-interval=epoch"]
    assert main([*arguments, "--log-every-n-steps=1"]) == 0
    rows = map(json.loads, Path("runs", "log.jsonl").read_text().splitlines())
    assert {row["learning_rate"] for row in rows if "loss" in row} == {0.01, 0.005}


def test_no_name_of_a_setting_is_taken_for_a_slip(work):
    """Such as ``schedule``, which is near to ``scheduler``."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    settings = {name: value for name, value in defaults.items() if isinstance(value, str | int | float)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    head = TOML.format(work=work).partition("[train]")[0]
    Path("run.toml").write_text("\n".join([head, "[train]", *lines]))
    given = ["--max-steps=2", "--learning-rate=0.01", "--schedule=cosine", "--batch-size=8", "--log-every-n-steps=1"]
    assert len(lines) > 20
    assert main(["train", "--config", "run.toml", *given, "--checkpoint-dir=runs"]) == 0
    assert [row["learning_rate"] for row in log() if "loss" in row] == [0.01, 0.005]


def test_export(work):
    assert main(["train", "--config", "run.toml", "--export", "model"]) == 0
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    restored = pr.load_compressed("model", model)
    again = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    checkpoint.load("runs", again)
    assert all(map(torch.equal, restored.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--epochs=many"], "epochs='many' must be a whole number, not str"),
        (["--loss-fn=cross_entropie"], "loss_fn=cross_entropie is not a function of torch.nn.functional"),
        (
            ["--loss-weight=1.5"],
            "loss_weight must be a function of a batch, or the key or index of an entry",
        ),
        (["--loss-weight=WORK:weight"], "has no function weight: it has"),
        (["--optimizer=Adamm"], "optimizer=Adamm is not an optimizer of torch.optim"),
        (["--optimizer=Muon"], "Muon only supports 2D parameters"),
        (["--optimizer=Optimizer"], "missing 1 required positional argument: 'defaults' (no optimizer was made"),
        (["--optimizer=LBFGS"], "LBFGS evaluates the loss several times a step"),
        (["--model=nowhere:build"], "there is no module nowhere"),
        (["--model=WORK:bild"], "has no function bild: it has"),
        (["--model=build"], "model=build must be of the form module:function"),
        (["--model=WORK:nothing"], "returns a value of type int: it must return an nn.Module"),
        (["--data=WORK:fails"], "fails failed: RuntimeError: no such file"),
        (["--data=WORK:nothing"], "the data must be a DataLoader, a Dataset or a list of samples, not a int"),
        (["--metrics=WORK:nothing"], "returns a value of type int: it must return a mapping of names to functions"),
        (["--resume=Never"], "resume='Never' must be 'auto', 'never' or the path of a checkpoint"),
        (["--max-steps=3", "--epochs=2"], "epochs=2 and max_steps=3 exclude each other: give one"),
        (["--batch-size=null"], "a TensorDataset needs batch_size"),
        (["--export", "run.toml"], "--export run.toml cannot be written to (Not a directory): give another folder"),
        (["--checkpoint-dir=run.toml"], "checkpoint_dir run.toml cannot be written to (Not a directory)"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(work, given, message, capsys):
    given = [item.replace("WORK", work) for item in given]
    assert main(["train", "--config", "run.toml", *given]) == 2
    err = capsys.readouterr().err
    assert err.startswith("panther: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epoch = 3", "'epoch' is not a setting of TrainConfig: did you mean 'epochs'?"),
        ("loss = 'mse_loss'", "'loss' is not a setting: did you mean 'loss_fn'?"),
        ("criterion = 'mse_loss'", "'criterion' is not a setting: did you mean 'loss_fn'?"),
        ("train_loader = 'x:y'", "'train_loader' is not a setting: did you mean 'data'?"),
        ("modle = 'x:y'", "'modle' is not a setting: did you mean 'model'?"),
        ("trian = 3", "'trian' is not a setting: did you mean 'train'?"),
        ("seed = 'x'", "seed='x' must be a whole number, not str"),
    ],
)
@pytest.mark.usefixtures("work")
def test_an_unknown_name_in_a_file_is_told(line, message, capsys):
    Path("run.toml").write_text(f"{line}\n{Path('run.toml').read_text()}")
    assert main(["train", "--config", "run.toml"]) == 2
    assert message in capsys.readouterr().err


def test_several_processes_run_this_command(work, monkeypatch):
    seen = []
    monkeypatch.setattr("panther.cli.launch.start", lambda arguments, name: seen.append((arguments, name)) or 3)
    options = ["--config", "run.toml", "--nproc-per-node", "2", "--max-restarts", "1", "--export", "model"]
    assert main(["train", *options, "--epochs=3"]) == 3
    ((arguments, name),) = seen
    place = arguments.index("panther")
    assert {"--nproc-per-node=2", "--max-restarts=1", "--module"} <= set(arguments[:place])
    assert any(argument.endswith("runs/logs") for argument in arguments[:place])
    assert arguments[place:] == ["panther", "train", *options, "--epochs=3"]
    assert name == "train"


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.slow
def test_processes_that_are_started_again_continue(work, capfd):
    settings = [f"--data={work}:dies", "--checkpoint-every-n-steps=1", "--batch-size=4"]
    assert main(["train", "--config", "run.toml", "--nproc-per-node", "2", "--max-restarts", "1", *settings]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("step 12  epoch 2  loss 0.")
    assert "2 processes of train; logs in runs/logs" in err
    assert [row["step"] for row in log()] == [10, 12]


@pytest.mark.distributed
@pytest.mark.slow
def test_what_fails_on_several_processes_is_a_sentence_too(work, capfd):
    assert main(["train", "--config", "run.toml", "--nproc-per-node", "2", f"{work}:fails"]) == 1  # as torchrun
    assert "fails failed: RuntimeError: no such file" in capfd.readouterr().err


@pytest.mark.usefixtures("work")
def test_bad_files_and_flags(capsys):
    assert main(["train", "--config", "none.toml"]) == 2
    assert "none.toml cannot be read" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "model is missing: add module:function" in capsys.readouterr().err
    Path("run.toml").write_text("train = 3")
    Path("run.yaml").write_text("epochs: 3")
    assert main(["train", "--config", "run.yaml"]) == 2
    assert "run.yaml must end in .toml or .json" in capsys.readouterr().err
    assert main(["train", "--config", "run.toml"]) == 2
    assert "'train' in run.toml must be a table" in capsys.readouterr().err
    assert main(["train", "a:b", "--data", "a:c", "--nproc-per-node", "0"]) == 2
    assert "there is no module a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--script", "train.py", "--num-gpus", "4"], "give it to panther launch, which starts scripts"),
        (["a:b", "--num-gpus", "4"], "in panther launch --nproc-per-node and --nnodes"),
        (["a:b", "--address", "ray://head:10001"], "in panther launch --rdzv-endpoint HOST:PORT"),
        (["a:b", "--gpus-per-node", "8"], "did you mean --nproc-per-node?"),
    ],
)
def test_options_of_launchers_are_answered_with_those_of_panther(arguments, advice, capsys):
    """As a guide to distributed training writes it: python -m distributed.cli train --script train.py --num-gpus 4."""
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert caught.value.code == 2
    assert advice in capsys.readouterr().err


def test_a_script_is_answered_with_the_command_that_starts_it(capsys):
    assert main(["train", "train.py", "--nproc-per-node", "2"]) == 2
    assert "train.py is a script, which panther launch starts" in capsys.readouterr().err


def test_settings_in_their_old_form_train_the_same(work, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    settings = [f"data={work}:load", "loss_fn=cross_entropy", "batch_size=8", "max_steps=2", "progress=false"]
    records = []
    for model in (f"{work}:build", f"model={work}:build"):
        assert main(["train", model, *settings]) == 0
        out, err = capsys.readouterr()
        records.append(re.findall(r"(?:step|loss|learning_rate) \S+", out))
        options = "--loss-fn=cross_entropy --batch-size=8 --max-steps=2 --no-progress"
        assert options in err
        assert err.endswith("which the next version of Panther does not accept\n")
    new = [f"--data={work}:load", *options.split()]
    assert main(["train", f"{work}:build", *new]) == 0
    assert [re.findall(r"(?:step|loss|learning_rate) \S+", capsys.readouterr().out)] * 2 == records
    with pytest.raises(SystemExit, match="2"):
        main(["train", f"{work}:build", f"{work}:build", *new])
    assert f"unrecognized arguments: {work}:build" in capsys.readouterr().err


def test_the_number_of_processes_is_checked_and_has_an_old_name(work, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--config", "run.toml", "--nproc", "0"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("panther: note: write --nproc-per-node in place of --nproc, ")
    assert error == "panther: error: nproc_per_node=0 must be at least 1 and finite"
