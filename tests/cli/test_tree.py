"""panther tree: the sizes and forms of a model, a compressed folder, a checkpoint, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import panther as pr
from panther.cli import main
from panther.compression.selection.allocation import model_bytes
from panther.distributed import checkpoint
from panther.inspect import tree

MODELS = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 4)))

def number():
    return 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS)
    names: dict = {}
    exec(MODELS, names)
    return name, names["net"]()


def rows(capsys, *argv):
    assert main(["tree", *argv, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_a_function(net, capsys):
    name, model = net
    found = rows(capsys, f"{name}:net")
    assert list(found) == ["", "0", "1", "2", "2.0", "2.1"]
    assert found[""]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["2"]["bytes"] == found["2.0"]["bytes"] + found["2.1"]["bytes"] == model_bytes(model[2])
    assert list(rows(capsys, f"{name}:net", "--depth", "1")) == ["", "0", "1", "2"]
    assert main(["tree", f"{name}:net"]) == 0
    assert "\n    1        Linear" in capsys.readouterr().out


def test_compressed_folders_and_checkpoints(net, capsys, tmp_path):
    _, model = net
    x = torch.randn(64, 40)
    forms = ("int4", "low_rank", "interpolative")
    pr.compress(model, 0.4, list(x.split(8)), forms=forms[1], include=["0"], seed=0, measure_speed=False)
    pr.compress(model, 0.9, list(x.split(8)), forms=forms[2], include=["2.0"], seed=0, measure_speed=False)
    pr.compress(model, 0.9, list(x.split(8)), forms=forms[0], include=["2.1"], seed=0, measure_speed=False)
    expected = {row.name: (row.bytes, row.form) for row in tree(model).rows}
    assert {form.split(",")[0] for _, form in expected.values()} == {"", "low rank 6", "interpolative", "int4"}
    pr.save_compressed(model, tmp_path / "small")
    checkpoint.save(tmp_path / "run", model, step=3)
    for folder in ("small", "run"):
        found = rows(capsys, folder)
        assert {name: (row["bytes"], row["form"]) for name, row in found.items()} == {
            name: entry
            for name, entry in expected.items()
            if name != "1"  # which has no tensors
        }


def test_transformers_folders(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=11, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "bert")
    found = rows(capsys, str(tmp_path / "bert"))
    assert found[""]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    layers = [name for name in found if name.startswith("encoder.layer.") and name.count(".") == 2]
    assert layers == [f"encoder.layer.{i}" for i in range(11)]


def test_shapes_and_what_is_trained(net, capsys, tmp_path):
    name, model = net
    found = rows(capsys, f"{name}:net")
    assert found["2.0"]["shapes"] == "weight 40x30, bias 40"
    assert found["2.0"]["trainable"] == found["2.0"]["parameters"]
    model[0].requires_grad_(False)
    by_name = {row.name: row for row in tree(model).rows}
    assert by_name["0"].trainable == 0
    assert by_name[""].trainable == by_name["2"].parameters
    assert [line.split() for line in str(tree(model)).splitlines()[2:3]] == [
        ["0", "Linear", "weight", "30x40,", "bias", "30", "1,230", "no", "4.92", "kB"]
    ]
    pr.sketch_layers_(model, pr.compression.SketchConfig(low_rank=2, init="svd"), include=["2.0"])
    pr.save_compressed(model, tmp_path / "small")
    assert "down 30x4" in rows(capsys, "small")["2.0"]["shapes"]


def test_two_models_are_compared(net, capsys, tmp_path):
    name, model = net
    dense = tree(model)
    pr.compress(
        model, 0.4, list(torch.randn(64, 40).split(8)), forms="int4", include=["0"], seed=0, measure_speed=False
    )
    after = tree(model)
    assert dense.compare(dense).pairs == [(dense.rows[0], dense.rows[0])]
    assert dense.compare(after).pairs == list(zip(dense.rows, after.rows, strict=True))[:2]
    pr.save_compressed(model, tmp_path / "small")
    assert main(["tree", f"{name}:net", "--compare", "small"]) == 0
    out = capsys.readouterr().out
    table = {line.split()[0]: line for line in out.splitlines()}
    assert "Linear -> QuantizedLinear" in table["0"]
    assert table["0"].endswith("- -> int4")
    assert list(table) == ["module", "(the", "0", "2"]
    assert table["2"].startswith("2 of 6 modules are different, and the model has ")
    assert f"{after.rows[0].bytes / dense.rows[0].bytes:.1%}".replace("%", " %") in table["2"]
    assert main(["tree", f"{name}:net", "--compare", "small", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [pair[1]["name"] for pair in found] == ["", "0"]


def test_shared_weights_are_counted_once_and_attention_is_named():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    found = tree(nn.ModuleDict({"a": first, "b": second, "c": pr.nn.RandMultiHeadAttention(8, 2, 16, seed=0)})).rows
    by_name = {row.name: row for row in found}
    assert by_name["b"].form == "shares a.weight"
    assert by_name["c"].form == "linear attention, 16 features, hermite"
    assert by_name[""].parameters == by_name["a"].parameters + by_name["c"].parameters
    with torch.device("meta"):
        assert tree(nn.Linear(3, 4)).rows[0].bytes == 64


def test_a_sharded_folder_is_counted_as_its_index_says(capsys, tmp_path):
    """People have folders with shards that were not downloaded, and with the weights a second time in another form."""
    shards = {f"model-0000{i}-of-00003.safetensors": {f"layers.{i}.weight": torch.ones(4, i)} for i in (1, 2, 3)}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    command = ["tree", str(tmp_path), "--json"]
    assert main(command) == 0  # without an index all shards count, if all are there
    assert json.loads(capsys.readouterr().out)["rows"][0]["parameters"] == 24
    places = {key: name for name, tensors in shards.items() for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"all": torch.ones(24)}, tmp_path / "consolidated.safetensors")
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["parameters"] == 24
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert main(command) == 2
    expected = "names 3 files, and model-00002-of-00003.safetensors is missing: copy them too"
    assert expected in capsys.readouterr().err
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    assert main(command) == 2
    assert "holds 2 of 3 shards, and model-00002-of-00003.safetensors is missing" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert main(command) == 2
    assert "is a pointer of Git LFS and no weights: run git lfs pull" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert main(command) == 2
    assert "is not an index of safetensors files" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [None, 0, 1, 3])
def test_all_modules_are_counted_at_every_depth(depth, tmp_path, capsys):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64))
    pr.sketch_layers_(model, pr.SketchConfig(low_rank=2))
    last = "3 modules sketched, quantized or with linear attention"
    assert str(tree(model, depth)).splitlines()[-1] == last
    pr.save_compressed(model, tmp_path)
    assert main(["tree", str(tmp_path), *([] if depth is None else ["--depth", str(depth)])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_linear_attention_is_named_in_a_folder(tmp_path, capsys):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)})
    pr.linearize_(model, num_features=4, window=3)
    pr.save_compressed(model, tmp_path)
    assert main(["tree", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("linear_attention")]
    assert line.endswith("linear attention, 4 features, window 3")
    assert "linear attention, 4 features, window 3" in str(tree(model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "nowhere is not a folder, and not module:function"),
        ("{name}:number", "returns a value of type int: it must return an nn.Module"),
        ("empty", "empty holds no .safetensors file and no checkpoint"),
        ("damaged", "model.safetensors is not a valid safetensors file"),
    ],
)
def test_what_it_refuses(net, capsys, tmp_path, model, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert main(["tree", model.format(name=net[0])]) == 2
    assert message in capsys.readouterr().err
