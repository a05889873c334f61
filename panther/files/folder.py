"""A folder of several files that are replaced all at once: the rename of one of them, the manifest, is the commit.

First, all other files are written to the disk under *pending* names, which begin with a dot and contain the identifier
of the commit. Then the manifest with this identifier is renamed into place, and from this moment on a reader uses the
pending files. Finally, the pending files get their final names. If the process is killed before the commit, the folder
has the old files. If it is killed after the commit, a reader finds the new files under the pending names.

So a file such as ``model.safetensors`` has the name that other programs expect, and the contents under this name always
match the manifest, except in the microseconds between two renames.
"""

__all__ = ["commit_files", "committed_path", "finish_commit", "removed_after_an_error"]

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from panther.files.writer import Draft, release_lock, remove_abandoned, sync_folder, take_lock

_LONGEST_WAIT_S = 60.0  # other processes rename their files in milliseconds
_PAUSE_S = 0.005


def committed_path(folder: Path, name: str, commit: str) -> Path:
    """Return the path of a file of a commit, which has its pending name as long as the commit is not finished."""
    pending = folder / _pending_name(name, commit)
    return pending if pending.exists() else folder / name


def commit_files(folder: Path, drafts: Mapping[str, Draft], manifest: Draft, commit: str, names: Iterable[str]) -> None:
    """Replace the files of a folder all at once: ``drafts`` by name, and the manifest.

    ``commit`` is eight hexadecimal digits that follow from the contents of the manifest. ``names`` are all names that a
    file of such a folder can have, for removing the files of unfinished commits. After an OSError the old files stay;
    TimeoutError says that another process holds the folder for a minute.
    """
    for draft in (*drafts.values(), manifest):
        draft.finish()
    with _locked(folder):
        for name, draft in drafts.items():
            draft.rename(_pending_name(name, commit))
        sync_folder(folder)  # the names of the files must not be lost where the manifest is kept
        manifest.rename(manifest.target.name)
        sync_folder(folder)
        _rename_pending(folder, drafts, commit)
        _remove_pending(folder, names, commit)
        sync_folder(folder)
    remove_abandoned(folder, [*names, manifest.target.name])


def finish_commit(folder: Path, names: Iterable[str], read_commit: Callable[[], str]) -> None:
    """Give the files of a commit their own names, if the process that wrote it was killed before it could.

    ``read_commit`` returns the identifier of the manifest, which another process may replace meanwhile.
    """
    names = list(names)
    if not _pending(folder, names, read_commit()):
        return
    with _locked(folder):
        _rename_pending(folder, names, read_commit())
        sync_folder(folder)


def _pending(folder: Path, names: Iterable[str], commit: str) -> list[str]:
    return [name for name in names if (folder / _pending_name(name, commit)).exists()]


def _rename_pending(folder: Path, names: Iterable[str], commit: str) -> None:
    for name in names:
        with suppress(FileNotFoundError):  # it has its name, or a writer of the same contents was here without a lock
            os.replace(folder / _pending_name(name, commit), folder / name)


def _remove_pending(folder: Path, names: Iterable[str], commit: str) -> None:
    """Remove the pending files of all commits except one."""
    pending = re.compile(f"\\.(?:{'|'.join(map(re.escape, names))})\\.([0-9a-f]{{8}})\\.new")
    for name in os.listdir(folder):
        if (match := pending.fullmatch(name)) and match[1] != commit:
            with suppress(OSError):
                (folder / name).unlink()


def _pending_name(name: str, commit: str) -> str:
    return f".{name}.{commit}.new"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where there are locks; without them a commit is still one rename."""
    if os.name == "nt":  # Windows cannot open folders, and has no such locks
        yield
        return
    descriptor, end = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), time.monotonic() + _LONGEST_WAIT_S
    try:
        while not take_lock(descriptor):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"another process has been replacing the files of {folder} for {_LONGEST_WAIT_S:g} s: end it if it "
                    "is stopped, or give another folder"
                )
            time.sleep(_PAUSE_S)
        yield
    finally:
        release_lock(descriptor)
        os.close(descriptor)


@contextmanager
def removed_after_an_error(folder: Path) -> Iterator[None]:
    """Remove what was written into a folder if an error follows, because it is incomplete."""
    present = set(folder.iterdir()) if folder.is_dir() else None
    try:
        yield
    except BaseException:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path in (present or ()):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if present is None and folder.is_dir():
            folder.rmdir()
        raise
