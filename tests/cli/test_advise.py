"""panther advise as a user meets it."""

import json
import sys

import pytest

from panther.cli import main

MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.ones(4, 32)

def model_only():
    return nn.Linear(2, 2)

def single():
    return nn.Linear(2, 2), torch.ones(4, 2)

def wrong_batch():
    return nn.Linear(2, 2), torch.ones(4, 3)
"""


@pytest.fixture(autouse=True)
def no_statistics_of_other_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "advised_models.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("advised_models", None)


def test_the_table_and_the_reasons(models, capsys):
    assert (
        main(["advise", "--model", "advised_models:net", "--world-size", "4", "--memory", "80GB", "--batch", "16"]) == 0
    )
    out = capsys.readouterr().out
    assert "layout" in out.splitlines()[0]
    assert " is best: it has the shortest step of the " in out
    assert "times as long as the best: " in out


def test_recomputed_activations_take_less_memory(capsys):
    def memory(*more):
        arguments = ["advise", "--model", "transformer/125m", "--sequence", "64", "--world-size", "1", "--batch", "64"]
        assert main([*arguments, "--json", *more]) == 0
        plan = json.loads(capsys.readouterr().out)
        return {str(option["layout"]): option["memory_bytes"]["activations"] for option in plan["options"]}

    kept, again = memory(), memory("--activation-checkpointing", "full")
    assert again
    assert all(again[layout] < 0.6 * kept[layout] for layout in again)


def test_the_options_that_are_not_shown_can_be_had(models, capsys, monkeypatch):
    monkeypatch.setattr("panther.cli.advise._SHOWN", 2)
    arguments = ["advise", "--model", "advised_models:net", "--world-size", "4", "--batch", "16"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    left = len(json.loads(capsys.readouterr().out)["options"]) - 2
    assert left > 0
    assert f"{left} more options are not shown: --json prints all\n" in out
    assert ".options" not in out


def test_json_has_every_option(models, capsys):
    args = ["advise", "--model", "advised_models:net", "--world-size", "2", "--memory", "100", "--json"]
    assert main([*args, "--objective", "memory"]) == 1  # nothing fits
    plan = json.loads(capsys.readouterr().out)
    assert plan["objective"] == "memory"
    assert plan["memory_bytes"] == 100
    assert not any(option["fits"] for option in plan["options"])
    assert plan["options"][0]["reason"].startswith("No layout fits. ")
    assert all("does not fit: " in option["reason"] for option in plan["options"][1:])
    totals = [option["memory_bytes"]["total"] for option in plan["options"]]
    assert totals == sorted(totals)


def test_a_sketched_transformer_needs_less(capsys):
    totals = []
    for extra in ([], ["--sketch", "32"]):
        args = ["advise", "transformer/125M", "--world-size", "1", "--sequence", "16", "--json", *extra]
        assert main(args) == 0
        totals.append(json.loads(capsys.readouterr().out)["options"][0]["memory_bytes"]["total"])
    assert totals[1] < 0.8 * totals[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "transformer/9b"],
            "--model transformer/9b is unknown: did you mean transformer/6.7b? Or use one of 125m, ",
        ),
        (["--model", "transformer/xl"], "--model transformer/xl is unknown: use one of 125m, "),
        (["--model", "net"], "--model net is not a folder, and neither transformer/SIZE nor module:function"),
        (["--model", "nowhere:net"], "there is no module nowhere"),
        (
            ["--model", "advised_models:model_only"],
            "advised_models:model_only returns a value of type Linear: it must return an nn.Module and a batch",
        ),
        (["--model", "advised_models:wrong_batch"], "the model does not run on its batch: "),
        (["--model", "advised_models:net", "--sketch", "4"], "--sketch is for transformer/SIZE"),
        (["--model", "advised_models:single", "--batch", "3"], "batch=3 cannot be divided over 2 ranks"),
        (["--model", "advised_models:net", "--efficiency", "2"], "efficiency=2 is a share and must be at most 1"),
        (["--model", "advised_models:net", "--world-size", "0"], "gpus=0 must be at least 1"),
        (["--model", "advised_models:net", "--objective", "money"], "objective='money' is unknown: use one of 'time'"),
    ],
)
def test_what_cannot_be_done_is_said(models, args, message, capsys):
    assert main(["advise", "--world-size", "2", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("panther: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world-size", "2", "--memory", "80 potatoes"], "'80 potatoes' is not a number of bytes: write it as 80GB"),
    ],
)
def test_bad_flags_exit_with_2(args, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["advise", "--model", "a:b", *args])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.extra
def test_a_folder_of_transformers(models, capsys):
    """Its config.json is enough, and a compressed model sends less."""
    transformers = pytest.importorskip("transformers")
    import panther as pr

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    model.config.save_pretrained("dense")
    pr.sketch_layers_(model, pr.SketchConfig(low_rank=2))
    pr.save_compressed(model, "small")
    (models / "small" / "model.safetensors").unlink()
    memory = {}
    for folder in ("dense", "small"):
        assert main(["advise", "--model", folder, "--world-size", "2", "--sequence", "16", "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["options"][0]
        memory[folder] = best["memory_bytes"]["total"]
    assert 0 < memory["small"] < memory["dense"]
    assert main(["advise", "--model", "dense", "--world-size", "2", "--sketch", "8"]) == 2
    assert "--sketch is for transformer/SIZE" in capsys.readouterr().err
    (models / "empty").mkdir()
    assert main(["advise", "--model", "empty", "--world-size", "2"]) == 2
    assert "empty holds no config.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_measure_and_plan_with_what_was_measured(models, capsys):
    assert main(["advise", "--measure", "cluster.json", "--world-size", "1"]) == 0
    assert "the speeds of 1 device are in cluster.json" in capsys.readouterr().err
    args = ["advise", "--model", "advised_models:net", "--cluster", "cluster.json"]
    assert main(args) == 0
    assert "uncalibrated" not in capsys.readouterr().out
    assert main([*args, "--world-size", "4", "--memory", "1GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["gpus"], plan["memory_bytes"], plan["calibrated"]) == (4, 1e9, True)
    assert main([*args, "--device", "cpu"]) == 2
    assert "--device cpu and cluster.json both give speeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world-size", "2"], "MODEL is missing"),
        (["--model", "advised_models:net"], "--world-size is missing"),
        (["--model", "advised_models:net", "--cluster", "none.json"], "none.json cannot be read"),
        (["--model", "advised_models:net", "--cluster", "advised_models.py"], "is not a file of ClusterSpec.save"),
        (["--measure", "advised_models.py/x.json"], "--measure advised_models.py cannot be written to"),
    ],
)
def test_missing_options_and_files_are_said(models, args, message, capsys):
    assert main(["advise", *args]) == 2
    assert message in capsys.readouterr().err
