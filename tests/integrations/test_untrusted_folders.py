"""Folders that somebody else, or a disk, has changed: what compress_folder refuses before anything is written."""

import errno
import importlib
import json
import os
import pickle
import re
import shutil

import pytest
import torch

import panther as pr
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError, FormatError
from panther.files import signed

transformers = pytest.importorskip("transformers")
compress_module = importlib.import_module("panther.integrations.folders.compress")

pytestmark = pytest.mark.extra


@pytest.fixture(autouse=True)
def key_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    signed._key.cache_clear()
    yield tmp_path / "cache"
    signed._key.cache_clear()


@pytest.fixture
def source(tmp_path):
    return saved_model(tmp_path / "source")


def saved_model(folder, scale=1.0):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48))
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    model.save_pretrained(folder)
    return folder


def compress(source, target, **options):
    generator = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(3, 40, (4, 9), generator=generator)} for _ in range(3)]
    return pr.compress_folder(source, target, calibration=batches, bits=5, forms="int4", seed=0, **options)


class Killed(BaseException):
    """The end of a process; what it has written stays as it is."""


def killed_run(source, target, monkeypatch, commit=4):
    """Return the scratch folder of a run that was killed at a commit."""
    commits, real = [], Spool.commit

    def counted(self):
        commits.append(self)
        if len(commits) > commit:
            raise Killed
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "commit", counted)
        with pytest.raises(Killed):
            compress(source, target)
    (scratch,) = target.glob(".panther-*")
    return scratch


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


REFUSED = r"remove .*\.panther-run"


class Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["report", "saving", "journal-1.json", "a link", "a folder", "the folder is a link"])
def test_a_planted_scratch_folder_is_refused(name, source, tmp_path):
    """People clone a repository, and compress into the folder, which looks empty."""
    target, private = tmp_path / "target", tmp_path / "private"
    run = target / ".panther-run"
    run.mkdir(parents=True)
    private.write_text("private")
    if name == "a link":
        (run / "lock").symlink_to(private)
    elif name == "a folder":
        (run / "x.value").mkdir()
    elif name == "the folder is a link":
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
    else:
        (run / name).write_bytes(pickle.dumps(Planted(tmp_path / "code-ran")))
    planted = contents(target)
    with pytest.raises(CompressionError, match=REFUSED):
        compress(source, target)
    assert not (tmp_path / "code-ran").exists()
    assert contents(target) == planted
    assert private.read_text() == "private"


@pytest.mark.parametrize("change", ["copied", "moved", "another user", "an older Panther"])
def test_a_scratch_folder_of_another_place_or_user_is_refused(change, source, tmp_path, monkeypatch, key_folder):
    target = tmp_path / "target"
    scratch = killed_run(source, target, monkeypatch)
    if change in ("copied", "moved"):
        target = tmp_path / "another"
        (shutil.copytree if change == "copied" else shutil.move)(scratch.parent, target)
    elif change == "another user":
        signed._key.cache_clear()
        shutil.rmtree(key_folder)
    else:
        (journal,) = scratch.glob("journal-*")
        journal.write_text(json.dumps({"sizes": {}, "notes": {}}))
    with pytest.raises(CompressionError, match=f"not written by this user on this machine in this folder: {REFUSED}"):
        compress(source, target)
    shutil.rmtree(target)
    compress(source, target)


def test_no_file_of_a_run_is_a_pickle(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "_remove", lambda folder: None)
        report = compress(source, tmp_path / "target")
        patch.setattr(compress_module, "mapped_from_pretrained", None)
        assert compress(source, tmp_path / "target") == report  # which the file has
    scratch = killed_run(source, tmp_path / "killed", monkeypatch)
    for path in (*scratch.iterdir(), tmp_path / "target/.panther-run/report"):
        data = path.read_bytes()
        if path.suffix == ".value":
            json.loads(data[int.from_bytes(data[-8:], "little") : -8])
        elif data:
            json.loads(data.partition(b"\n")[2])


def test_every_damage_of_a_killed_run_is_one_sentence(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    scratch = killed_run(source, target, monkeypatch, 7)
    Spool(scratch)  # removes what no commit has named
    undamaged = contents(scratch)
    assert {re.split("[-.]", name)[0] for name in undamaged} >= {"survey", "parts", "results", "journal"}
    for name, data in undamaged.items():
        for damage in ("flipped", "cut", "empty", "missing", "swapped") if data else ():
            changed = bytearray(data)
            changed[len(data) // 3] ^= 64
            other = next(each for each in undamaged if undamaged[each] not in (b"", data) and each != "lock")
            new = {"flipped": changed, "cut": data[:-9], "empty": b"", "missing": None, "swapped": undamaged[other]}
            if new[damage] is None:
                if name.startswith("journal"):
                    continue  # the run begins anew
                (scratch / name).unlink()
            else:
                (scratch / name).write_bytes(new[damage])
            with pytest.raises(CompressionError, match=rf"(damaged|missing).*: {REFUSED}"):
                compress(source, target)
            for path in scratch.iterdir():
                path.unlink()
            for each, undamaged_data in undamaged.items():
                (scratch / each).write_bytes(undamaged_data)
    compress(source, target)
    compress(source, tmp_path / "expected")
    assert contents(target) == contents(tmp_path / "expected")


@pytest.mark.parametrize("commit", [2, 8])
@pytest.mark.parametrize("how", ["in place", "replaced", "with the old times"])
def test_a_source_that_changes_during_a_run(commit, how, source, tmp_path, monkeypatch):
    """People save the next model over the one that is being compressed."""
    other, target, commits, real = saved_model(tmp_path / "other", 1.5), tmp_path / "target", [], Spool.commit

    def change(self):
        commits.append(self)
        if len(commits) == commit:
            weights, status = source / "model.safetensors", (source / "model.safetensors").stat()
            if how == "replaced":
                weights.unlink()
            weights.write_bytes((other / "model.safetensors").read_bytes())
            if how == "with the old times":
                os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "commit", change)
        with pytest.raises(
            CompressionError, match=r"source/model\.safetensors has changed while .* nothing was written"
        ):
            compress(source, target)
    assert len(commits) == commit, "the next commit notices it"
    assert not target.exists()


def test_a_source_that_changes_between_runs(source, tmp_path, monkeypatch):
    other, target = saved_model(tmp_path / "other", 1.5), tmp_path / "target"
    weights = source / "model.safetensors"
    first, status = weights.read_bytes(), weights.stat()
    scratch = killed_run(source, target, monkeypatch)
    weights.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # equal sizes and times
    with pytest.raises(CompressionError, match=r"has the work of a run that was killed, with source .* or remove"):
        compress(source, target)
    assert scratch.exists()
    weights.write_bytes(first)
    (source / "README.md").write_text("new")
    compress(source, target)
    compress(source, tmp_path / "expected")
    assert contents(target) == contents(tmp_path / "expected")


@pytest.mark.skipif(not hasattr(os, "getuid") or not os.getuid(), reason="root can write to every folder")
def test_a_target_that_cannot_be_written_to_as_a_user(source, tmp_path):
    (tmp_path / "full").mkdir(mode=0o500)
    with pytest.raises(CompressionError, match="Permission denied: the result cannot be written to"):
        compress(source, tmp_path / "full/target")


@pytest.mark.parametrize(
    ("name", "message"),
    [("x" * 300, "File name too long"), ("source/config.json/x", "Not a directory"),
     ("source/config.json", "is not empty"), ("loop/x", "Too many levels of symbolic links"),
     ("bad\0name", "embedded null")],
)  # fmt: skip
@pytest.mark.parametrize("has_scratch", [False, True])
def test_a_target_that_cannot_be_made(name, message, has_scratch, source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "scratch").mkdir()
    options = {"scratch_dir": tmp_path / "scratch"} if has_scratch else {}
    with pytest.raises(CompressionError, match=message):
        compress(source, tmp_path / name, **options)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_disk_that_fails_at_the_end_is_one_sentence_and_the_run_continues(source, tmp_path, monkeypatch):
    def full(model, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "save_compressed", full)
        with pytest.raises(CompressionError, match=r"^No space left on device: .*target/model\.safetensors cannot be"):
            compress(source, target)
    compress(source, target)
    compress(source, tmp_path / "expected")
    assert contents(target) == contents(tmp_path / "expected")


def test_links_are_refused_before_the_long_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr(compress_module, "mapped_from_pretrained", None)
    (source / "notes.txt").symlink_to("/etc/hostname")
    with pytest.raises(FormatError, match="is a link that leaves"):
        compress(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
