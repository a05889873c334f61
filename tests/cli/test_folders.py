"""Folders that people have: what the commands copy of them, and what they say where weights are missing."""

import json

import pytest
import torch
from safetensors.torch import save_file

import panther as pr
from panther.errors import FormatError, PantherError
from panther.files.weights import check_weight_files
from panther.integrations.folders.beside import copy_beside

KEPT = (
    "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "modules.json",
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin",
    "config_sentence_transformers.json", "preprocessor_config.json", "README.md", "sub/folder/of_the_tokenizer.txt",
)  # fmt: skip
LEFT_OUT = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5",
    "modeling_own.py", "trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt",
    "rng_state_0.pth", "events.out.tfevents.1", "checkpoint-500/config.json", "runs/now/events.out.tfevents.2",
    "latest", "global_step5/mp_rank_00", ".git/config", ".cache/huggingface/x.lock", "onnx/model.onnx",
    "onnx/config.json", "original/params.json", "optimizer.bin", "openvino/openvino_model.xml",
    "additional_chat_templates/weights.safetensors",
)  # fmt: skip


def test_everything_that_the_model_needs_is_copied(tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "folder" / "small"
    for name in (*KEPT, *LEFT_OUT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    out.mkdir()
    (out / "README.md").write_text("ours")
    copy_beside(folder, out)
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert copied == set(KEPT)
    assert (out / "README.md").read_text() == "ours"
    assert all((out / name).read_text() == name for name in KEPT if name not in ("README.md", "modules.json"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
FOLDERS = {
    "shards without an index": (
        {"model-00001-of-00002.safetensors": None, "model-00002-of-00002.safetensors": None},
        r"holds 2 shards and no model.safetensors.index.json",
    ),
    "a shard too few": ({"model-00001-of-00002.safetensors": None}, r"holds 1 of 2 shards, and model-00002-of-00002"),
    "an index that names more": (
        {"model.safetensors.index.json": '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'},
        r"names 1 files, and model-00001-of-00001.safetensors is missing",
    ),
    "an index of files elsewhere": (
        {"model.safetensors.index.json": '{"weight_map": {"a": "../x.safetensors"}}'},
        r"names '../x.safetensors', and may name only files and folders beside it",
    ),
    "an index of the folder above": (
        {"model.safetensors.index.json": '{"weight_map": {"a": ".."}}'},
        r"names '..', and may name only files and folders beside it",
    ),
    "a deep index": ({"model.safetensors.index.json": "[" * 200_000}, r"is not an index of safetensors files"),
    "a variant": ({"model.fp16.safetensors": None}, r"model.fp16.safetensors is a variant: give variant='fp16'"),
    "a pickle": ({"pytorch_model.bin": "x"}, r"holds pytorch_model.bin, a pickle, which can run code"),
    "a pointer": ({"model.safetensors": POINTER}, r"is a pointer of Git LFS and no weights: run git lfs pull"),
    "an adapter": ({"adapter_model.safetensors": None, "adapter_config.json": "{}"}, r"holds an adapter of PEFT"),
    "TensorFlow": ({"tf_model.h5": "x"}, r"tf_model.h5 holds weights of TensorFlow: load them in transformers 4"),
    "flax": ({"flax_model.msgpack": "x"}, r"flax_model.msgpack holds weights of flax: load them in transformers 4"),
    "llama.cpp": (
        {"q4.gguf": "x"},
        r"q4.gguf holds weights of llama.cpp: load them by from_pretrained\(\.\.\., gguf_file",
    ),
    "nothing": ({}, r"holds no model.safetensors: give a folder that save_pretrained"),
}


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertConfig(vocab_size=9, architectures=["BertModel"], **sizes).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.extra
@pytest.mark.parametrize("kind", FOLDERS)
def test_missing_weights_are_told_with_the_fix(kind, folder):
    from panther.cli._transformers import load_model

    files, words = FOLDERS[kind]
    for name, text in files.items():
        if text is None:
            save_file({"a": torch.ones(2)}, folder / name)
        else:
            (folder / name).write_text(text)
    for load in (pr.from_pretrained, load_model):
        with pytest.raises((FormatError, PantherError), match=words):
            load(folder)
    if kind == "a variant":
        check_weight_files(folder, "BertModel", "fp16")


@pytest.mark.extra
def test_a_config_without_a_class_is_not_said_to_name_one(folder):
    from panther.cli._transformers import load_model

    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PantherError, match=r"do not fill a BertModel, built as config.json names no architecture: "):
        load_model(folder)
