"""Names that files hold, links, and texts that are too long: what a folder of somebody else can put before a reader."""

import os

import pytest

from panther.errors import FormatError
from panther.files.reader import check_inside, check_plain_name, is_plain_name, read_json, read_text


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0b", None, 3, ["a"], {}])
def test_paths_are_no_plain_names(name):
    assert not is_plain_name(name)
    with pytest.raises(FormatError, match=r"index\.json names .*, and may name only files and folders beside it"):
        check_plain_name(name, "index.json")


@pytest.mark.parametrize("name", ["model.safetensors", "...", "..x", "1_Pooling", "ü b"])
def test_plain_names(name):
    check_plain_name(name, "index.json")


def leaves(path, folder):
    try:
        check_inside(path, folder)
    except FormatError:
        return True
    return False


def test_links_that_leave_a_folder(tmp_path):
    hub = tmp_path / "hub/models--a--b"
    snapshot, blobs, private = hub / "snapshots/revision", hub / "blobs", tmp_path / "private"
    for folder in (snapshot, blobs, private):
        folder.mkdir(parents=True)
    (blobs / "blob").write_text("blob")
    (private / "key").write_text("key")
    (snapshot / "config.json").symlink_to("../../blobs/blob")
    (snapshot / "same").symlink_to("config.json")
    (snapshot / "key").symlink_to(private / "key")
    (snapshot / "ref").symlink_to("../../refs")
    (snapshot / "loop").symlink_to("loop")
    assert {name for name in os.listdir(snapshot) if leaves(snapshot / name, snapshot)} == {"key", "ref"}
    (tmp_path / "link").symlink_to(snapshot)  # the folder itself may be given as a link
    assert not leaves(tmp_path / "link/config.json", tmp_path / "link")
    with pytest.raises(FormatError, match=r"key is a link that leaves .*revision, .* put a copy of the file in place"):
        check_inside(snapshot / "key", snapshot)
    # blobs that are a link themselves are no cache of the hub
    (blobs / "blob").unlink()
    blobs.rmdir()
    blobs.symlink_to(private)
    (private / "blob").write_text("another key")
    assert leaves(snapshot / "config.json", snapshot)


def test_a_sparse_text_is_refused(tmp_path):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)
    for read in (read_text, read_json):
        with pytest.raises(ValueError, match=r"it has 1,099,511,627,776 bytes, and a text has at most"):
            read(tmp_path / "file")
