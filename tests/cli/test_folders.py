"""Folders that people have: what the commands copy of them, and what they say where weights are missing."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

import panther as pr
from panther.cli import main
from panther.errors import FormatError, PantherError
from panther.files.weights import check_weight_files
from panther.integrations.folders.beside import check_beside, copy_beside
from panther.integrations.folders.sentence_transformers import loader_of, model_folder, module_folders

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

    files, message = FOLDERS[kind]
    for name, content in files.items():
        if content is None:
            save_file({"a": torch.ones(2)}, folder / name)
        else:
            (folder / name).write_text(content)
    for load in (pr.from_pretrained, load_model):
        with pytest.raises((FormatError, PantherError), match=message):
            load(folder)
    if kind == "a variant":
        check_weight_files(folder, "BertModel", "fp16")
        (folder / "model.safetensors.index.fp16.json").write_text('{"weight_map": {"a": "/x.safetensors"}}')
        with pytest.raises(FormatError, match=r"names '/x\.safetensors', and may name only files"):
            pr.from_pretrained(folder, variant="fp16")


@pytest.mark.extra
def test_a_config_without_a_class_is_not_said_to_name_one(folder):
    from panther.cli._transformers import load_model

    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PantherError, match=r"does not fit the BertModel, built because its config.json names no class"):
        load_model(folder)


def module_folder(folder, path="1_Pooling"):
    """A folder of sentence-transformers with a private folder beside it."""
    for name in ("private/key", "source/config.json", "source/tokenizer.json", "source/1_Pooling/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "source/modules.json").write_text(json.dumps([{"path": ""}, {"path": path}]))
    return folder / "source"


@pytest.mark.parametrize("path", ["..", "../private", "1_Pooling/../..", "/etc", "C:\\x", "1_Pooling/..\\.."])
@pytest.mark.parametrize("place", [0, 1])
def test_modules_are_in_their_folder(path, place, tmp_path):
    """People expect that a model of somebody else is written into the target, and not over what is beside it."""
    source = module_folder(tmp_path)
    (source / "config.json").unlink()
    paths = [{"path": "1_Pooling"}, {"path": "1_Pooling"}]
    paths[place] = {"path": path}
    (source / "modules.json").write_text(json.dumps(paths))
    (tmp_path / "config.json").write_text("{}")
    for read in (model_folder, module_folders, loader_of, lambda folder: copy_beside(folder, tmp_path / "out")):
        with pytest.raises(FormatError, match=r"modules\.json names the folder '.*', and may name only folders inside"):
            read(source)
    assert not (tmp_path / "out").exists()


def test_modules_in_nested_folders(tmp_path):
    source = module_folder(tmp_path, "./1_Pooling/inner/")
    assert model_folder(source) == source
    assert module_folders(source) == {"1_Pooling"}
    assert loader_of(source) == "SentenceTransformer"


@pytest.mark.parametrize("kind", ["deep", "damaged", "FIFO", "folder"])
def test_a_list_of_modules_that_cannot_be_read(kind, tmp_path):
    source = module_folder(tmp_path)
    (source / "modules.json").unlink()
    if kind == "FIFO":
        os.mkfifo(source / "modules.json")
    elif kind == "folder":
        (source / "modules.json").mkdir()
    else:
        (source / "modules.json").write_text("[" * (200_000 if kind == "deep" else 1))
    with pytest.raises(FormatError, match=r"modules\.json cannot be read as JSON \("):
        copy_beside(source, tmp_path / "out")


LEAVES = "is a link that leaves .*, and might lead to a private file: put a copy"
ONLY_FILES = "of a module only files are copied, and links to files"
LINKS = {
    "a file of a module": ("1_Pooling/data", "../../private/key", LEAVES),
    "a file beside the weights": ("notes.txt", "../private/key", LEAVES),
    "a file of a sub-folder": ("templates/notes.txt", "../../private/key", LEAVES),
    "a chain of links": ("notes.txt", "1_Pooling/out", LEAVES),
    "a folder in a module": ("1_Pooling/data", "../../private", ONLY_FILES),
    "a folder of the source in a module": ("1_Pooling/data", "..", ONLY_FILES),
    "a loop": ("1_Pooling/data", "data", ONLY_FILES),
    "a folder as a module": ("1_Pooling", "../private", r"1_Pooling is a link that leaves"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_that_leave_a_folder_are_not_copied(kind, tmp_path):
    """People publish the result, which must not have their keys."""
    source, (name, target, message) = module_folder(tmp_path), LINKS[kind]
    if kind == "a chain of links":
        (source / "1_Pooling/out").symlink_to("../../private/key")
    if kind == "a folder as a module":
        (source / "1_Pooling").rename(tmp_path / "elsewhere")
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).symlink_to(target)
    for copy in (check_beside, copy_beside):
        with pytest.raises(FormatError, match=message):
            copy(source, tmp_path / "out")
    assert not list(tmp_path.rglob("out/**/*key*"))


def test_linked_folders_and_special_files_beside_the_weights(tmp_path):
    source = module_folder(tmp_path)
    (source / "data").symlink_to("../private")
    (source / "loop").symlink_to(".")
    (source / "dangling.txt").symlink_to("nothing")
    (source / "same.json").symlink_to("tokenizer.json")
    os.mkfifo(source / "pipe")
    copy_beside(source, tmp_path / "out")
    copied = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert copied == {"tokenizer.json", "same.json", "modules.json", "1_Pooling/config.json"}
    os.mkfifo(source / "1_Pooling/pipe")
    with pytest.raises(FormatError, match=f"pipe is a FIFO, and {ONLY_FILES}"):
        copy_beside(source, tmp_path / "out")


def test_a_snapshot_of_the_hub_is_copied(tmp_path):
    """There, every file is a link to a blob."""
    source, repository = module_folder(tmp_path), tmp_path / "hub/models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    source.rename(snapshot := repository / "snapshots/0123")
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        path.rename(repository / f"blobs/{number}")
        path.symlink_to(os.path.relpath(repository / f"blobs/{number}", path.parent))
    copy_beside(snapshot, tmp_path / "out")
    assert (tmp_path / "out/1_Pooling/config.json").read_text() == "source/1_Pooling/config.json"
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]


@pytest.mark.extra
@pytest.mark.parametrize(
    "command",
    [
        ["compress", "{folder}", "--out", "{out}", "--method", "svd", "--budget", "0.5"],
        ["export", "{folder}", "--to", "onnx", "--out", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_commands_refuse_links_before_they_write(command, folder, tmp_path, capsys):
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    (folder / "notes.txt").symlink_to("/etc/hostname")
    out = tmp_path / "out"
    assert main([part.format(folder=folder, out=out) for part in command]) == 2
    assert "notes.txt is a link that leaves" in capsys.readouterr().err
    assert not out.exists()
