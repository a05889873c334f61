"""``panther.compress_folder``: a folder of transformers is compressed part by part. The call imports transformers."""

__all__ = ["compress_folder", "mapped_from_pretrained"]

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from panther._process_settings import ProcessSetting
from panther.compression import CompressionReport
from panther.compression.config import CompressConfig
from panther.compression.streaming.runner import compress_streamed
from panther.compression.streaming.source import SourceFiles
from panther.compression.streaming.spool import freed_blocks_returned
from panther.compression.streaming.values import Decoder, Encoder
from panther.errors import CompressionError, FormatError, PantherError, require_extra
from panther.files.signed import read_signed, write_signed
from panther.files.tensors import MAPPED, mapped_copy
from panther.files.writer import take_lock
from panther.integrations.folders.beside import check_beside, copy_beside
from panther.integrations.folders.sentence_transformers import model_folder
from panther.integrations.pretrained import from_pretrained
from panther.nn.io import save_compressed

_SMALLEST_BYTES = 1 << 16  # vectors are smaller, and a process may hold 65,530 mappings
# With this variable transformers converts in this thread, and each weight when the one before is in the model. By
# default threads convert weights before they are needed, in memory and outside of this thread's modes. A version of
# transformers that does not know the variable still does so: the values are equal, and more memory is taken.
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_ONE_WEIGHT_AT_A_TIME = ProcessSetting(
    lambda: os.environ.get(_SEQUENTIAL),
    lambda value: os.environ.pop(_SEQUENTIAL, None) if value is None else os.environ.update({_SEQUENTIAL: value}),
    "1",
)


def mapped_from_pretrained(source: str | os.PathLike[str], folder: Path, **kwargs: Any) -> Any:
    """Load a folder as :func:`panther.from_pretrained` does, with the weights in files.

    transformers maps the weights from their files, except for those that it converts: experts that the files hold one
    by one and the model stacked, weights that are transposed, split or fused, and weights of a different dtype. The
    result of each step of a conversion is moved to a file of ``folder``, which is for this process alone, before the
    next step, so that the process holds one result at a time. The files are removed as soon as they are mapped. Memory
    that a conversion allocates and then writes to, and results that are not contiguous, stay in memory.
    """
    for path in folder.glob(f"{MAPPED}*"):  # of a process that was killed
        path.unlink()
    try:
        with freed_blocks_returned(), _ONE_WEIGHT_AT_A_TIME.held(), _ResultsInFiles(folder):
            return from_pretrained(source, **kwargs)
    except _WriteError as error:
        raise CompressionError(
            f"{folder} cannot take the weights that transformers converts as it loads {source} ({error}): free "
            "some of the disk and start again, or name a folder of a larger disk"
        ) from error.__cause__


class _WriteError(BaseException):
    """No Exception, because transformers collects the exceptions of conversions and continues with the next weight."""


class _ResultsInFiles(TorchFunctionMode):
    """Moves the result of every function of tensors on the CPU to a file, if the result is large and in new memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_movable(result):
            return result
        addresses = {tensor.untyped_storage().data_ptr() for tensor in _cpu_tensors([args, kwargs])}
        # What is made of no tensor is mapped already, as the weights of safetensors are, or is about to be filled.
        if not addresses or result.untyped_storage().data_ptr() in addresses:
            return result
        try:
            return mapped_copy(result, self._folder)
        except OSError as error:
            raise _WriteError(error.strerror or error) from error


def _is_movable(result: Any) -> bool:
    return (
        type(result) is Tensor
        and result.is_cpu
        and result.layout is torch.strided
        and result.nbytes >= _SMALLEST_BYTES
        and result.is_contiguous()
        and not result.requires_grad
    )


def _cpu_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_cpu and value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        yield from _cpu_tensors([*value.values()])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _cpu_tensors(entry)


# Settings of pr.compress that need the whole model in memory, or its speed there.
_IN_MEMORY = (
    "max_error", "speedup", "max_latency_ms", "heal", "statistics_memory_bytes", "measure_speed",
    "allow_slower", "group",
)  # fmt: skip

_PREFIX = ".panther-"  # of the names of folders that are there during a run
_LOCK = "lock"
_REPORT = "report"  # a file that is there when the target is complete
_SAVING = "saving"  # a file that is there from the moment on at which the target is written
_LOCK_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def compress_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    calibration: Any,
    budget: float | None = None,
    bits: float | None = None,
    max_bytes: int | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> CompressionReport:
    """Compress the model of a folder into another folder, with one part of the model in memory at a time.

    The result is that of :func:`panther.compress` with the same arguments: in float64 equal codes, in shorter dtypes
    equal up to rounding. All batches run through one block of the model before they run through the next one. Their
    hidden states at the boundaries of the blocks are kept on disk; backward, each block is run again from there, and
    the moments of its weights are kept on disk too, then the fits of all weights, until one choice is made for the
    whole model. The weights of the folder are mapped into memory and not copied.

    Blocks are the elements of the model's lists of layers, and layers outside of them. Each is run by the model's own
    forward, in which all blocks before it return what they returned when they ran; so masks, rotary tables, an
    encoder's output and shared layers need nothing of yours. What a block puts into a dictionary or a list among its
    arguments is passed on as its results are, such as the keys and values that the blocks of Gemma 4 share. A model
    whose blocks pass each other something else, such as attributes, is refused.

    A run that was killed, interrupted or stopped by a full disk is continued by the same call, from the block that it
    was at, and ends with the same files, bit for bit. Only the user who began it can continue it, on the same machine
    or with the same cache folder, where a key is kept with which a run recognises its files: what somebody else has
    put into the target is refused.

    Args:
        source: A folder that ``save_pretrained`` of transformers wrote, of one file of safetensors or several, or a
            folder of sentence-transformers.
        target: The folder for the result, new or empty. The tokenizer and other files are copied there.
        calibration: Batches, as for :func:`panther.compress`; they are held in memory.
        budget: Bytes of the eligible layers' weights to keep, as a fraction. Exactly one of ``budget``, ``bits`` and
            ``max_bytes`` must be given.
        bits: The size as an average number of bits for each eligible weight.
        max_bytes: Bytes that all tensors of the model may take when saved.
        scratch_dir: An existing folder for what is kept on disk meanwhile; None is the target's.
        **options: Further arguments of :func:`panther.compress`, except for those that need the whole model in memory:
            ``max_error``, ``speedup``, ``max_latency_ms``, ``heal``, ``statistics_memory_bytes``,
            ``measure_speed``, ``allow_slower`` and ``group``; ``reader`` implies the ``target`` of
            :func:`panther.compress`.

    Returns:
        The report of :func:`panther.compress`.

    Raises:
        CompressionError: As for :func:`panther.compress`; and if the model cannot be run part by part, the disk is
            full, the target is not empty or cannot be written, the source changes meanwhile, or a run that was killed
            had other arguments or another source, or left damaged files.
        FormatError: If the source has no model of transformers, or a file of it is damaged or missing, or a link leads
            out of it.
        MissingExtraError: Without transformers.

    Cost: the time of :func:`panther.compress`, of one more forward, and of reading the files of the source twice, for
    checksums of their contents. Memory: the moments of one block, 8 (in^2 + out^2) bytes for each of its layers, a
    forward and backward of one block for one batch, and a few matrices of the size of the largest weight in float64.
    Disk: the hidden states of all batches at all boundaries, the moments of all weights, and for each entry of a weight
    at most seven bytes and the factors of low rank; and the weights that transformers converts as it loads them (of
    experts that the file holds one by one, or in another ``dtype``).

    Example:
        >>> import tempfile, torch, transformers, panther as pr
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=100,
        ...     hidden_size=64,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=4,
        ...     intermediate_size=128,
        ... )
        >>> source, target = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> transformers.LlamaForCausalLM(config).save_pretrained(source)
        >>> batches = [
        ...     {"input_ids": torch.randint(100, (4, 32))} for _ in range(5)
        ... ]
        >>> report = pr.compress_folder(
        ...     source,
        ...     target,
        ...     bits=4.5,
        ...     calibration=batches,
        ...     forms="int4",
        ...     seed=0,
        ... )
        >>> type(
        ...     pr.from_pretrained(target).model.layers[0].mlp.up_proj
        ... ).__name__
        'QuantizedLinear'
    """
    transformers_adapter: Any = require_extra("panther.integrations.transformers", "transformers")
    if refused := [name for name in _IN_MEMORY if name in options]:
        raise ValueError(f"{refused[0]} needs the whole model in memory: leave it out, or use pr.compress")
    config = CompressConfig(
        budget, calibration, bits=bits, max_bytes=max_bytes, measure_speed=False, allow_slower=True, **options
    )
    if not config.is_calibrated:
        raise ValueError(f"method={config.method!r} needs no batches, and so no blocks: use pr.compress")
    folder, source = Path(target), Path(source)
    inner = model_folder(source)
    with _scratch(folder, None if scratch_dir is None else Path(scratch_dir)) as scratch:
        if (report := _report_of_ended_run(scratch)) is not None:
            return report
        if inner.is_dir():  # otherwise loading it says what is wrong
            check_beside(source, folder)
        files = SourceFiles(inner)
        model = mapped_from_pretrained(inner, scratch)
        report = compress_streamed(model, config, scratch, files)
        write_signed(scratch / _SAVING, None)  # from now on the target is not empty
        copy_beside(source, folder)
        model_target = folder / inner.relative_to(source)
        transformers_adapter.write_model_card(model, report, model_target, settings=_size(config))
        save_compressed(model, model_target)  # last, so that a folder with a model also has its tokenizer
        write_signed(scratch / _REPORT, Encoder({}, _refuse_tensor).encode(report))
        return report


def _refuse_tensor(*place: Any) -> Any:
    raise TypeError("a report has no tensors")


def _report_of_ended_run(scratch: Path) -> CompressionReport | None:
    """Return the report of a run that was killed after the target was complete; None if there was no such run."""
    with suppress(FileNotFoundError):
        report: CompressionReport = Decoder({}, _refuse_tensor).decode(read_signed(scratch / _REPORT))
        return report
    return None


def _size(config: CompressConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.sizes.items() if value is not None)


@contextmanager
def _scratch(target: Path, scratch_dir: Path | None) -> Iterator[Path]:
    """Make the target and a folder for files of the run, or find that of a run that was killed.

    At the end the folder is removed. After an error it stays if the same call can continue, as after Ctrl-C or on a
    full disk, and if it was there before; otherwise it is removed, with the target if that is new.
    """
    parent = target if scratch_dir is None else scratch_dir
    try:
        if scratch_dir is not None and not scratch_dir.is_dir():
            raise CompressionError(
                f"there is no folder {scratch_dir} for what is kept on disk: make it, or name another"
            )
        name = f"{_PREFIX}run"
        if scratch_dir is not None:  # which other targets may share
            place = os.fsencode(os.path.realpath(target))
            name = f"{_PREFIX}{hashlib.blake2b(place, digest_size=8).hexdigest()}"
        scratch = parent / name
        is_continued, is_new = os.path.lexists(scratch), not os.path.lexists(target)
        is_saved = is_continued and _check_scratch(scratch)
        is_empty = is_new or (target.is_dir() and all(map(_is_scratch, target.iterdir())))
        if not (is_empty or is_saved):
            raise CompressionError(
                f"{target} is not empty, and might hold another model: give a new folder, or clear it"
            )
        target.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(mode=0o700, exist_ok=True)
        if scratch_dir is not None:
            tempfile.TemporaryFile(dir=target).close()  # the target is written hours later
        descriptor = os.open(scratch / _LOCK, _LOCK_FLAGS, 0o600)
    except CompressionError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CompressionError(
            f"{reason}: the result cannot be written to {target}: give a folder that can be made and written to"
        ) from None
    with os.fdopen(descriptor, "wb"):
        if not take_lock(descriptor):
            raise CompressionError(f"another process compresses a model to {target}: wait for it, or give a new folder")
        is_kept = True
        try:
            yield scratch
            is_kept = False
        except (CompressionError, FormatError, ValueError, TypeError) as error:
            is_kept = is_continued or isinstance(error.__cause__, OSError)
            raise
        except OSError as error:
            if isinstance(error, PantherError):
                raise
            raise CompressionError(
                f"{error.strerror or error}: {error.filename or target} cannot be read or written: mend it, and start "
                "again, which continues"
            ) from error
        finally:
            if not is_kept:
                _remove(scratch)
                if is_new:
                    with suppress(OSError):  # it holds a model now
                        target.rmdir()


def _remove(scratch: Path) -> None:
    """Remove the folder of a run, such that a process that is killed meanwhile leaves what the next one understands."""
    journals, report = [*scratch.glob("journal-*")], scratch / _REPORT
    values = [path for path in scratch.iterdir() if path not in (*journals, report)]
    for path in (*journals, *values, report):  # without journals nothing is continued; with a report, the run has ended
        path.unlink(missing_ok=True)
    with suppress(OSError):
        scratch.rmdir()


def _check_scratch(folder: Path) -> bool:
    """Return whether the run of a folder was writing its target, or raise CompressionError if it is not this user's.

    A target can be a copy of a folder of somebody else, with anything in it. Journals are checked where they are read.
    """
    mode, owner = folder.lstat().st_mode, folder.lstat().st_uid
    if hasattr(os, "getuid") and (owner != os.getuid() or mode & 0o022 or not stat.S_ISDIR(mode)):
        raise CompressionError(
            f"{folder} has to be a folder of yours that nobody else can write to, because a run trusts its files: "
            f"remove {folder}, or name another folder for what is kept on disk"
        )
    with os.scandir(folder) as entries:
        kinds = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    if other := [name for name, is_file in kinds.items() if not is_file]:
        raise CompressionError(f"{folder / other[0]} is not a file, as all files of a run are: remove {folder}")
    for name in kinds:
        if name in (_SAVING, _REPORT) or name.startswith("journal-"):
            try:
                with suppress(FileNotFoundError):  # another process may continue the run
                    read_signed(folder / name)
            except FormatError as error:
                raise CompressionError(f"{error}: remove {folder}, and start again from the beginning") from None
    return not kinds.keys().isdisjoint((_SAVING, _REPORT))


def _is_scratch(path: Path) -> bool:
    return path.name.startswith(_PREFIX) and path.is_dir()
