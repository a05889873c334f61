"""A folder of several files, replaced by one rename: a reader finds all of one commit, whenever a writer was killed."""

import json
import os
from pathlib import Path

import pytest

from panther.files.folder import commit_files, committed_path, finish_commit
from panther.files.writer import Draft, sync_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")
NAMES = ("weights", "config")


def save(folder, commit, *, contents=NAMES):
    """Write the files, whose contents are the commit, as a writer of a format does."""
    drafts = {name: Draft(folder / name) for name in contents}
    manifest = Draft(folder / "manifest")
    try:
        for draft in drafts.values():
            draft.file.write(commit.encode())
        manifest.file.write(json.dumps({"commit": commit, "names": list(contents)}).encode())
        commit_files(folder, drafts, manifest, commit, NAMES)
    finally:
        for draft in (*drafts.values(), manifest):
            draft.close()


def manifest_of(folder):
    return json.loads((folder / "manifest").read_text())


def read(folder):
    manifest = manifest_of(folder)
    found = {committed_path(folder, name, manifest["commit"]).read_text() for name in manifest["names"]}
    assert found == {manifest["commit"]}
    return manifest["commit"]


def killed_at(call_number, folder, commit):
    """Save in a process that dies before its call of that number that changes the disk; return whether it died."""
    child = os.fork()
    if not child:
        calls = 0

        def dying(function):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == call_number:
                    os._exit(9)
                return function(*args, **kwargs)

            return run

        for name in ("replace", "fsync", "open"):
            setattr(os, name, dying(getattr(os, name)))
        Path.unlink = dying(Path.unlink)
        try:
            save(folder, commit)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_killed_at_any_call_the_folder_is_the_old_or_the_new_one_and_the_next_save_cleans_up(tmp_path):
    save(tmp_path, "00000000")
    outcomes, last, call_number = [], "00000000", 0
    while True:
        call_number += 1
        commit = f"{call_number:08x}"
        died = killed_at(call_number, tmp_path, commit)
        outcomes.append(read(tmp_path) == commit)
        assert read(tmp_path) in (last, commit)
        last = read(tmp_path)
        if not died:
            break
    assert outcomes == sorted(outcomes)  # from one call on the new one is there
    assert 10 < call_number < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "manifest", "weights"]


def test_a_commit_that_was_cut_off_is_finished(tmp_path):
    save(tmp_path, "00000000")
    (tmp_path / ".weights.00000001.new").write_text("00000001")
    (tmp_path / ".config.00000001.new").write_text("00000001")
    finish_commit(tmp_path, NAMES, lambda: manifest_of(tmp_path)["commit"])  # which that commit is not
    assert (tmp_path / "weights").read_text() == "00000000"
    (tmp_path / "manifest").write_text(json.dumps({"commit": "00000001", "names": NAMES}))
    assert read(tmp_path) == "00000001"
    finish_commit(tmp_path, NAMES, lambda: manifest_of(tmp_path)["commit"])
    assert read(tmp_path) == (tmp_path / "weights").read_text() == "00000001"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failing_commit_leaves_the_old_files(tmp_path, monkeypatch):
    save(tmp_path, "00000000")

    def fail(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("panther.files.folder.sync_folder", fail)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, "00000001")
    assert read(tmp_path) == "00000000"
    monkeypatch.setattr("panther.files.folder.sync_folder", sync_folder)
    save(tmp_path, "00000002", contents=("weights",))
    assert read(tmp_path) == "00000002"
    assert len(list(tmp_path.iterdir())) == 3


def test_without_locks_a_commit_is_still_one_rename(tmp_path, monkeypatch):
    monkeypatch.setattr("panther.files.writer.fcntl", None)
    save(tmp_path, "00000000")
    save(tmp_path, "00000001")
    assert read(tmp_path) == "00000001"
    assert len(list(tmp_path.iterdir())) == 3
