"""Write a model as a program of torch.export, for ``panther export --to torch``."""

__all__ = ["write_program"]

import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from panther.files import new_file


def write_program(model: Any, sample: dict[str, Any], path: Path) -> None:
    """Export the model with a batch size that may change; the second size of an integer matrix may change as well.

    Args:
        model: The model, in eval mode.
        sample: Inputs by the names of the forward's arguments.
        path: The file, whose folder is made.

    Raises:
        OSError: If the file cannot be written.
    """
    model.state_dict()  # This refuses codes that other code damaged, which a traced forward does not check.
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic} | ({1: dynamic} if tensor.dim() == 2 and not tensor.is_floating_point() else {})
        for name, tensor in sample.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own modules warn
        program = torch.export.export(model, (), sample, dynamic_shapes=shapes)
        with new_file(path) as file:
            deferring: Any = _DeferredErrors(file)
            torch.export.save(program, deferring)
            if deferring.error is not None:
                raise deferring.error


class _DeferredErrors(io.RawIOBase):
    """A file whose first error is kept, instead of being raised by ``write``.

    torch writes archives in C++, whose destructor writes once more after an error. An exception there, for example of a
    full disk, aborts the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                return self._file.write(data)
            except BaseException as error:  # Ctrl-C as well
                self.error = error
        return len(data)

    def flush(self) -> None:
        if self.error is None and not self.closed:
            try:
                self._file.flush()
            except BaseException as error:
                self.error = error

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
