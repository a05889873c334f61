"""The one writer and the one reader of Panther's files: drafts, one rename, checksums, regular files only."""

from .reader import UnsafeFileError, open_file, parse_json, read_json, read_text
from .writer import Draft, copy_file, new_file, sync_folder, write_json, write_text

__all__ = [
    "Draft", "UnsafeFileError", "copy_file", "new_file", "open_file", "parse_json", "read_json", "read_text",
    "sync_folder", "write_json", "write_text",
]  # fmt: skip
