"""The folder where torch compiles extensions of other libraries, and locks left in it."""

import os

import pytest

from panther.errors import ConfigError
from panther.integrations._extensions import check_locks, private_folder


def test_the_folder_is_of_this_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    folder = private_folder()
    assert folder.parent == tmp_path / "panther/torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder) == str(private_folder())
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("sys.prefix", "/another/environment")
    assert private_folder() != folder


def test_a_folder_that_is_set_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert private_folder() == tmp_path


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_lock_is_left_over_if_no_process_has_it_open(tmp_path):
    lock = tmp_path / "cpu_adam" / "lock"
    check_locks(tmp_path)
    lock.parent.mkdir()
    with open(lock, "w"):  # as torch holds it while it builds
        check_locks(tmp_path)
    with pytest.raises(ConfigError, match=r"cpu_adam/lock was left by an interrupted build, .* with rm '"):
        check_locks(tmp_path)
    lock.unlink()
    check_locks(tmp_path)
