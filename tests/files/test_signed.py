"""Files that only this user can have written, and only at their place."""

import logging
import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import waits

from panther.errors import FormatError
from panther.files import signed
from panther.files.signed import read_signed, write_signed


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    signed._key.cache_clear()
    yield tmp_path / "cache"
    signed._key.cache_clear()


def test_values_come_back_in_their_place_only(tmp_path, cache_folder):
    path, value = tmp_path / "file", {"a": [1, 2.5, None, "ü"], "b": {}}
    write_signed(path, value)
    assert read_signed(path) == value
    signed._key.cache_clear()  # as in another process
    assert read_signed(path) == value
    assert stat.S_IMODE((cache_folder / "panther/signing-key").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert read_signed(tmp_path / "link/file") == value  # the same place by another name
    (tmp_path / "copy").write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match="copy is damaged, or was not written by this user on this machine in this"):
        read_signed(tmp_path / "copy")
    with pytest.raises(FileNotFoundError):
        read_signed(tmp_path / "missing")


@pytest.mark.parametrize("position", [0, 20, 65, -1])
def test_a_changed_byte_is_refused(tmp_path, position):
    write_signed(tmp_path / "file", {"a": 1})
    data = bytearray((tmp_path / "file").read_bytes())
    for bit in range(8):
        changed = data.copy()
        changed[position] ^= 1 << bit
        (tmp_path / "file").write_bytes(changed)
        with pytest.raises(FormatError, match="file is damaged"):
            read_signed(tmp_path / "file")


def test_processes_that_make_the_key_at_once_have_the_same(tmp_path):
    code = "import sys; from panther.files.signed import _key; print(_key().hex())"
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda _: waits.run([sys.executable, "-c", code], check=True), range(4))
        assert {result.stdout.strip() for result in results} == {signed._key().hex()}


def test_without_a_home_the_process_has_a_key_of_its_own(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        write_signed(tmp_path / "signed", 1)
    assert "no key of this user can be kept" in caplog.text
    assert read_signed(tmp_path / "signed") == 1


def test_a_key_that_is_cut_is_named(tmp_path, cache_folder):
    (cache_folder / "panther").mkdir(parents=True)
    (cache_folder / "panther/signing-key").write_bytes(b"short")
    with pytest.raises(FormatError, match="signing-key has 5 bytes and should have 32: remove it"):
        write_signed(tmp_path / "file", 1)
