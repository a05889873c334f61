"""One file: replaced at once, through a draft that nobody can plant; only regular files are read and replaced."""

import json
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from panther.errors import PantherError
from panther.files import (
    Draft,
    UnsafeFileError,
    copy_file,
    new_file,
    open_file,
    read_json,
    read_text,
    write_json,
    write_text,
)
from panther.files.writer import remove_abandoned

pytestmark = pytest.mark.skipif(os.name == "nt", reason="locks and FIFOs of POSIX")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def interrupt_after(_):
    raise KeyboardInterrupt


def special_files(folder):
    """Make one path of each kind that is not a regular file."""
    victim = folder / "victim"
    victim.write_text("untouched")
    (folder / "link").symlink_to(victim)
    (folder / "dangling").symlink_to(folder / "nothing")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    return {"link": "a link", "dangling": "a link", "fifo": "a FIFO", "folder": "a folder"}


def test_a_file_is_written_and_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "settings.json"
    write_json(path, {"a": [1, 2.5, None, "é"]})
    assert read_json(path) == {"a": [1, 2.5, None, "é"]}
    os.chmod(path, 0o640)
    write_text(path, "é\n")
    assert read_text(path) == "é\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt), new_file(path) as file:
        interrupt_after(file.write(b"half"))
    assert read_text(path) == "é\n"
    assert names(tmp_path) == ["settings.json"]


def test_new_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    previous_umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_what_is_not_a_regular_file_is_neither_replaced_nor_written_through(tmp_path):
    kinds = special_files(tmp_path)
    for name, kind in kinds.items():
        with pytest.raises(UnsafeFileError, match=f"{name} is {kind}, and only regular files are replaced") as caught:
            write_text(tmp_path / name, "new")
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, PantherError)
    assert names(tmp_path) == sorted([*kinds, "victim"])
    assert (tmp_path / "victim").read_text() == "untouched"


def test_only_regular_files_are_read_also_through_links(tmp_path):
    special_files(tmp_path)
    assert read_text(tmp_path / "link") == "untouched"
    for path, kind in {
        tmp_path / "fifo": "a FIFO",
        tmp_path / "folder": "a folder",
        Path("/dev/zero"): "a device",
    }.items():
        with pytest.raises(UnsafeFileError, match=f"is {kind}, and only regular files are read"):
            open_file(path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "dangling")


def test_errors_name_the_file_and_not_its_draft(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "missing" / "file", "x")
    assert caught.value.filename == str(tmp_path / "missing" / "file")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": 1, "a": 2}', "{", "", '{"a": 1} more'])
def test_json_that_is_damaged_or_ambiguous_is_a_value_error(tmp_path, content):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=r"nested too deeply|'a' is there twice|Expecting|Extra data"):
        read_json(tmp_path / "file")


def test_drafts_of_the_killed_go_and_those_of_the_living_stay(tmp_path):
    path = tmp_path / "weights"
    child = os.fork()
    if not child:
        Draft(path).file.write(b"abandoned")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    living = Draft(path)
    assert len(names(tmp_path)) == 2
    (tmp_path / ".weights.0123456789abcdef.tmp.backup").write_text("of somebody else")
    remove_abandoned(tmp_path, ["weights"])
    assert names(tmp_path) == sorted([living.path.name, ".weights.0123456789abcdef.tmp.backup"])
    living.file.write(b"whole")
    living.finish()
    living.rename("weights")
    living.close()
    assert path.read_bytes() == b"whole"


def test_of_many_writers_the_last_one_wins_and_none_fails(tmp_path):
    path, errors = tmp_path / "file", []

    def write(number):
        try:
            for _ in range(10):
                write_json(path, [number] * 1000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            values = json.loads(path.read_text())
            assert values == [values[0]] * 1000
    assert errors == []
    assert names(tmp_path) == ["file"]


def test_a_copy_is_whole_or_not_there(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 1000)
    copy_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    target.symlink_to(source)
    with pytest.raises(UnsafeFileError, match="target is a link"):
        copy_file(source, target)
    with pytest.raises(UnsafeFileError, match="is a folder"):
        copy_file(tmp_path, tmp_path / "more")
    assert names(tmp_path) == ["source", "target"]


def test_a_long_name_has_a_draft_too(tmp_path):
    path = tmp_path / ("n" * 250)
    write_text(path, "x")
    assert names(tmp_path) == ["n" * 250]
