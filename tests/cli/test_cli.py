"""The panther command as a user meets it: exit codes, messages, files."""

import dataclasses
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import typing
from importlib import import_module

import pytest
import torch.distributed as dist
import waits
from panther.kernels import has_compiled_kernel

import panther
from panther.cli import _COMMANDS, main
from panther.cli.demo import _summarise, _table, _verdict
from panther.errors import ConfigError, DistributedError, MissingExtraError, PantherError, install_command


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"panther {panther.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"]] + [[command, "--help"] for command in _COMMANDS if command != "launch"],
    ids=" ".join,
)
def test_help_does_not_import_torch(arguments):
    """In a fresh interpreter, because this one has imported it; torch takes 2 s and 200 MiB."""
    code = (
        "import sys\nfrom panther.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as exit:\n"
        "    assert exit.code == 0\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = waits.run([sys.executable, "-c", code, *arguments])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("usage: panther", "panther "))


def test_what_the_library_logs_is_shown_while_a_command_runs(capsys, monkeypatch):
    logger = logging.getLogger("panther.train.trainer")

    def run(args):
        logger.info("resumed from step %d", 3)
        logger.debug("hidden")
        return 0

    monkeypatch.setattr("panther.cli.doctor.run", run)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().err == "panther: resumed from step 3\n"
    logger.info("after it")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (PantherError("--out is empty: name a folder"), 2, "--out is empty: name a folder"),
        (ConfigError("epochs=0 must be at least 1"), 2, "epochs=0 must be at least 1"),
        (DistributedError("rank 1 is missing"), 1, "rank 1 is missing"),
        (MissingExtraError("run pip install x"), 1, "run pip install x"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 1, "a/b: No such file or directory"),
        (OSError("no space"), 1, "no space"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_a_sentence_and_an_exit_status(error, status, sentence, capsys, monkeypatch):
    def run(args):
        raise error

    monkeypatch.setattr("panther.cli.doctor.run", run)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"panther: error: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["advise", "--num-processes=4"], "--num-processes=4: did you mean --world-size?"),
        (["advise", "--batch-size=64"], "--batch-size=64: did you mean --batch?"),
        (["train", "--epoch", "3"], "--epoch: did you mean --epochs?"),
        (["train", "--lr=3"], "--lr=3: did you mean --learning-rate?"),
        (["train", "--criterion=mse_loss"], "--criterion=mse_loss: did you mean --loss-fn?"),
        (["train", "--dataset=x:y"], "--dataset=x:y: did you mean --data?"),
        (["train", "--metric=x:y"], "--metric=x:y: did you mean --metrics?"),
        (["train", "--zero-stage=1"], "--zero-stage=1: use strategy='zero1' for stage 1"),
        (["demo", "--frob", "3"], "--frob 3; panther demo --help lists the options\n"),
        (["compress", "--metod", "svd"], "--metod: did you mean --method?\n"),  # before the missing MODEL and --out
        (["compress", "--bogus"], "--bogus; panther compress --help lists the options\n"),
        (["tune", "--trails=3"], "--trails=3: did you mean --trials?\n"),
        (["init", "slurm", "--nods=2", "train.py"], "--nods=2: did you mean --nodes?\n"),
    ],
)
def test_an_option_of_another_name_is_told(arguments, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"unrecognized arguments: {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "path", "reason"),
    [
        (["init", "torchrun", "--out", "PATH", "t.py"], "file/below", "cannot be written to (Not a directory)"),
        (["init", "torchrun", "--out", "PATH", "t.py"], 300 * "a", "cannot be written to (File name too long)"),
        (["init", "torchrun", "--config", "PATH"], "file/below.toml", "cannot be read (Not a directory)"),
        (
            ["compress", "m:f", "--budget=1", "--out=o", "--report", "PATH"],
            "file/below",
            "cannot be written: name a file",
        ),
        (["train", "--config", "PATH"], "file/below.toml", "cannot be read (Not a directory)"),
    ],
)
def test_an_impossible_path_is_a_sentence(arguments, path, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([path if word == "PATH" else word for word in arguments]) == 2
    assert f"{path} {reason}" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_doctor_names_everything(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "cuda", "gloo found", "triton", "kernels", "extra demo", "extra triton"):
        assert word in out


def test_output_that_nobody_reads_is_not_an_error(tmp_path):
    command = [sys.executable, "-m", "panther", "init", "torchrun", "-m", "package.train"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        waits.until(lambda: process.poll() is not None, "the command does not end")
        assert process.returncode == 1


def test_doctor_gives_the_install_line_of_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("panther.cli.doctor._version", lambda name: None)
    main(["doctor"])
    assert f"missing scikit-learn, matplotlib, tqdm: {install_command('demo')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["demo", "--nproc-per-node", "0"], "argument --nproc-per-node: 0 must be at least 1"),
        (["demo", "--epochs", "many"], "argument --epochs: 'many' is not a whole number"),
        (["demo", "--seed", "-1"], "argument --seed: -1 must be at least 0"),
        (["demo", "--seed", str(2**32)], "argument --seed: 4294967296 must be at most 4294967295"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["demo", "--sketch"], "argument --sketch-size: expected one argument"),
        (["demo", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_flags_exit_with_2(args, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_truth_values_are_options_without_a_value(monkeypatch):
    seen = []
    monkeypatch.setattr("panther.cli.train.run", lambda args: seen.append(args) or 0)
    assert main(["train", "--no-progress", "--compile", "--deterministic", "--no-cpu-offload"]) == 0
    (args,) = seen
    assert (args.progress, args.compile, args.deterministic, args.cpu_offload) == (False, True, True, False)
    assert "profile" not in args


@pytest.mark.parametrize("wrong", ["word", "-e=2"])
def test_an_unknown_setting_gets_the_usage_of_its_command(wrong, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "a:b", "--seed=1", "--config", "f", wrong])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: panther train ")
    assert err.endswith(
        f"panther train: error: unrecognized arguments: {wrong}; panther train --help lists the options\n"
    )


@pytest.mark.parametrize("command", ["compress", "tune", "export", "advise", "train"])
def test_errors_of_commands_with_many_options_are_two_lines(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--bogus"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: panther {command} ")
    assert error.startswith(f"panther {command}: error: ")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.split("\n\n")[1][0].isupper(), "no sentence says what the command does"


def test_a_missing_kind_lists_all_kinds_and_an_example(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["init"])
    err = capsys.readouterr().err
    for line in (
        "slurm     an sbatch script",
        "ray       a RayJob for KubeRay",
        "torchrun  a shell script for torchrun",
    ):
        assert line in err
    assert "example: panther init slurm --nodes 2 " in err
    assert err.endswith("panther init: error: the following arguments are required: KIND\n")


SETTINGS = {
    "compress": ("compression.config", "CompressConfig"),
    "tune": ("tuning.config", "TuneConfig"),
    "train": ("train.config", "TrainConfig"),
}


@pytest.mark.parametrize("command", SETTINGS)
def test_options_are_those_of_the_settings(command, capsys):
    """Each has the name, the choices, the default and a sentence of its class, which --help reads without torch."""
    module, name = SETTINGS[command]
    settings = getattr(import_module(f"panther.{module}"), name)
    types = typing.get_type_hints(settings)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    described = " ".join(capsys.readouterr().out.split())
    names = [field.name for field in dataclasses.fields(settings)]

    def members(hint):
        return [hint, *typing.get_args(hint)]

    numbers = [name for name in names if {int, float} & set(filter(inspect.isclass, members(types[name])))]
    assert len(numbers) >= 5
    for name in numbers:
        assert re.search(rf" --{name.replace('_', '-')} N \w+ \w+", described), name
    for name in names:
        if typing.get_origin(types[name]) is typing.Literal:
            choices = typing.get_args(types[name])
            short = f"--{name.replace('_', '-')} {{{','.join(choices)}}}"
            assert short in described or f"({', '.join(choices)})" in described


def test_what_cannot_be_done_is_said_before_training(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["demo", "--out", ""]) == 2
    assert "--out is empty: name a folder" in capsys.readouterr().err
    assert main(["demo", "--out", str(file)]) == 2
    assert f"--out {file} cannot be written to (Not a directory): give another folder" in capsys.readouterr().err
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert main(["demo", "--out", str(tmp_path), "--nproc-per-node", "9"]) == 2
    message = "--nproc-per-node 9 must be at most 8, four processes per core and at least 8: use fewer"
    assert message in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device cuda needs a CUDA device and none is visible: use --device cpu" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "1 are visible: use --nproc-per-node 1" in capsys.readouterr().err


def test_a_missing_extra_names_its_install_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert f"sklearn is needed here and is not installed: run {install_command('demo')}" in capsys.readouterr().err


def result(kind, seed, accuracy):
    return {
        "kind": kind,
        "seed": seed,
        "losses": [1.0, 0.5],
        "seconds_per_epoch": 0.1,
        "parameters": 1000,
        "gradient_bytes": 4000,
        "sketch_bytes": 64,
        "accuracy": accuracy,
        "folder": f"{kind}-{seed}",
        "weight_bytes": 4000 if kind == "dense" else 400,
    }


def test_table_and_verdict_say_what_was_measured():
    kinds = {"dense": 0.97, "pair": 0.95, "sketched": 0.96}
    results = [result(kind, seed, accuracy + seed / 100) for seed in range(2) for kind, accuracy in kinds.items()]
    reloaded = {r["folder"]: r["accuracy"] for r in results}
    columns = _summarise(results, reloaded)
    table = _table(columns, 2)
    cells = {line.rpartition("  ")[0].split("  ")[0]: line.split()[-6:] for line in table.splitlines()}
    assert cells["test accuracy, mean of 2 seeds"] == ["97.5", "%", "95.5", "%", "96.5", "%"]
    assert table.count("identical") == 3
    assert _verdict(columns) == "Sketched: 10 % of the dense bytes, 1.0 points below dense, 1.0 points above pair."
    reloaded["sketched-1"] += 0.01
    assert "DIFFERENT" in _table(_summarise(results, reloaded), 2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_demo_end_to_end(tmp_path, capfd):
    out = tmp_path / "out"
    options = ["--epochs=2", "--runs=1", "--hidden=128", "--sketch-size=4", "--device=cpu", f"--out={out}"]
    assert main(["demo", *options]) == 0
    printed, err = capfd.readouterr()
    messages = err.splitlines()
    if not has_compiled_kernel():
        messages = [message for message in messages if "run without the compiled CPU kernel" not in message]
    assert messages == []
    for kind in ("dense", "narrower", "pair", "sketched", "Monarch"):
        assert json.loads((out / f"{kind}-0" / "panther.json").read_text())["format"] == "panther"
    lines = {
        line[:30].strip(): line[30:].split()
        for line in printed.splitlines()
        if line.startswith(("param", "grad", "sketch "))
    }
    assert lines["parameters"] == ["42,634", "11,830", "11,914", "11,914", "11,914"]
    # Every parameter's gradient is sent once, in float32.
    assert lines["gradient bytes per step"] == ["170,536", "47,320", "47,656", "47,656", "47,656"]
    assert lines["sketch bytes, once"] == ["0", "0", "0", "32", "0"]
    assert printed.count("identical") == 5
    assert re.search(r"^seed 0: dense [\d.]+ %, narrower [\d.]+ %, pair [\d.]+ %, sketched", printed, re.M)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_demo_ends_when_a_worker_dies(tmp_path, capfd, monkeypatch):
    def dies():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    monkeypatch.setattr("panther.cli.demo.training.load_digits", dies)
    assert main(["demo", "--device=cpu", f"--out={tmp_path / 'out'}"]) == 1
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith("panther: error: rank 1 ")
    assert "was ended by SIGKILL" in first
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["compress", "export", "tree", "advise", "tune", "train"])
def test_a_model_is_a_positional_argument_and_may_be_a_function(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    positional = shown.partition("positional arguments:")[2].partition("options:")[0]
    assert "MODEL" in positional
    assert "module:function" in (shown if command == "train" else positional)


def test_a_command_that_is_gone_says_what_to_use(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["profile", "train.py"])
    assert caught.value.code == 2
    assert "'profile' is not a command any more: torch.profiler records a script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (["epochs=1", "--config", "f", "num_microbatches=null", "--nproc-per-node", "2", "seed=-3"], 3),
        (["--epochs=1", "--config", "f", "--nproc-per-node", "2", "--num-microbatches", "null", "--seed=-3"], 0),
        (["--config", "f", "epochs=1", "--seed=-3", "--num-microbatches=null"], 1),
    ],
)
def test_settings_are_options_and_may_have_their_old_form(arguments, replaced, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    seen = []
    monkeypatch.setattr("panther.cli.train.run", lambda args: seen.append(args) or 0)
    assert main(["train", *arguments]) == 0
    (args,) = seen
    assert (args.config, args.epochs, args.seed, args.num_microbatches) == ("f", 1, -3, None)
    notes = capsys.readouterr().err
    assert notes.startswith("panther: note: write --epochs=1 ") == (replaced > 0)
    assert len(re.findall(r"[a-z]=", notes.partition("in place of")[2])) == replaced


@pytest.mark.parametrize(
    ("arguments", "new_name"),
    [
        (["demo", "--nproc", "3"], "--nproc-per-node"),
        (["train", "--nproc", "3"], "--nproc-per-node"),
        (["simulate", "--world", "3"], "--world-size"),
        (["advise", "--gpus", "3"], "--world-size"),
        (["tune", "tune.toml", "--json", "3"], "--report"),
        (["compress", "m:f", "--budget=1", "--out=o", "--scratch", "3"], "--scratch-dir"),
    ],
)
def test_the_old_name_of_an_option_sets_the_new_one(arguments, new_name, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    seen = []
    monkeypatch.setattr(f"panther.cli.{arguments[0]}.run", lambda args: seen.append(vars(args)) or 0)
    assert main(arguments) == 0
    note = f"write {new_name} in place of {arguments[-2]}, which the next version of Panther does not accept"
    assert capsys.readouterr().err == f"panther: note: {note}\n"
    assert main([*arguments[:-2], new_name, "3"]) == 0
    assert capsys.readouterr().err == ""
    old, new = ({name: value for name, value in values.items() if name not in ("argv", "run")} for values in seen)
    assert old == new
    monkeypatch.setenv("RANK", "0")  # the command that started this rank has printed the note
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
