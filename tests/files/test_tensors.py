"""Files of safetensors, written tensor by tensor and read slice by slice, against the library of that name."""

import json
import math
import os
import struct
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from panther.errors import FormatError
from panther.files.tensors import (
    _DTYPES,
    bytes_of,
    contents_checksum,
    open_tensors,
    read_slice,
    stored_checksum,
    stored_tensors,
    write_file,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def some_tensors():
    numbers = torch.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    tensors = {f"a {dtype}": numbers.float().to(dtype) for dtype in _DTYPES.values() if dtype not in FLOAT8}
    tensors |= {f"b {dtype}": torch.tensor([1.0, 0.5, 2.0]).to(dtype) for dtype in FLOAT8}
    return tensors | {"number": torch.tensor(3.5), "none": torch.empty(3, 0, 2), "view": numbers.mT[:, 1:]}


def test_the_library_reads_what_is_written(tmp_path):
    tensors, names = some_tensors(), []

    def value_of(name):
        names.append(name)
        return tensors[name]

    write_file(tmp_path / "file", {name: tensor.to("meta") for name, tensor in tensors.items()}, value_of)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert contents_checksum(found[name]) == contents_checksum(tensor), name
    assert sorted(names) == sorted(tensors)
    stored = stored_tensors(tmp_path / "file")
    assert all(one.start % one.dtype.itemsize == 0 for one in stored.values())
    assert all(stored_checksum(stored[name]) == contents_checksum(tensors[name]) for name in tensors)
    assert contents_checksum(torch.tensor([1, 2], dtype=torch.uint8)) == zlib.crc32(b"\1\2")


@pytest.mark.parametrize("writer", ["panther", "library"])
def test_tensors_are_read_into_memory_of_their_own(tmp_path, writer):
    tensors = some_tensors()
    if writer == "panther":
        write_file(tmp_path / "file", tensors, tensors.__getitem__)
    else:  # which begins tensors at addresses that their dtype does not allow
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "file")
    with torch.device("meta"), open_tensors(tmp_path / "file") as readers:
        (tmp_path / "file").rename(tmp_path / "other name")
        results = {name: reader.read() for name, reader in readers.items()}
        checksums = {name: reader.checksum(zlib.crc32(b"begin")) for name, reader in readers.items()}
    assert results.keys() == tensors.keys()
    for name, tensor in results.items():
        assert tensor.dtype is tensors[name].dtype
        assert tensor.shape == tensors[name].shape
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert contents_checksum(tensor) == contents_checksum(tensors[name]), name
        assert checksums[name] == zlib.crc32(b"begin" + bytes_of(tensor)), name


def test_a_file_that_is_truncated_while_it_is_read_is_refused(tmp_path):
    tensors = {"x": torch.ones(100_000), "y": torch.ones(100_000)}
    write_file(tmp_path / "file", tensors, tensors.__getitem__)
    with open_tensors(tmp_path / "file") as readers:
        first = readers["x"].read()
        assert torch.equal(first, tensors["x"])
        os.truncate(tmp_path / "file", 500_000)
        with pytest.raises(FormatError, match=r"file is not a valid safetensors file \(it ends before its tensors\)"):
            readers["y"].read()
        with pytest.raises(FormatError, match=r"file is not a valid safetensors file \(it ends before its tensors\)"):
            readers["y"].checksum()


@pytest.mark.parametrize("shape", [(), (0,), (11,), (1, 9), (6, 5), (7, 1, 4), (2, 3, 5, 7), (3, 40000)])
def test_slices_are_those_of_the_tensor(shape, tmp_path):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"x": tensor, "first": torch.ones(3, dtype=torch.uint8)}, tmp_path / "file")
    stored = stored_tensors(tmp_path / "file")["x"]
    generator = torch.Generator().manual_seed(1)

    def between(lowest, highest):
        return int(torch.randint(lowest, highest + 1, (), generator=generator))

    for _ in range(20):
        offsets = [between(0, size) for size in shape]
        sizes = [between(0, size - offset) for size, offset in zip(shape, offsets, strict=True)]
        expected = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert torch.equal(read_slice(stored, offsets, sizes), expected)
        plain, other = torch.empty(sizes), torch.empty([2 * size for size in sizes], dtype=torch.float64)
        assert read_slice(stored, offsets, sizes, plain) is plain
        assert torch.equal(plain, expected)
        strided = other[tuple(slice(None, None, 2) for _ in sizes)]
        assert torch.equal(read_slice(stored, offsets, sizes, strided), expected.double())
    assert torch.equal(read_slice(stored, [0] * len(shape), shape), tensor)


def test_what_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"'x' is torch.complex128, which a safetensors file cannot hold: cast it"):
        write_file(tmp_path / "file", {"x": torch.ones(1, dtype=torch.complex128)}, {}.__getitem__)
    with pytest.raises(FormatError, match="other is missing"):
        stored_tensors(tmp_path / "other")
    save_file({"x": torch.ones(100)}, tmp_path / "file")
    stored = stored_tensors(tmp_path / "file")["x"]
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-4])
    with pytest.raises(FormatError, match="file is not a valid safetensors file"):
        stored_tensors(tmp_path / "file")
    with pytest.raises(FormatError, match="it ends before its tensors"):
        read_slice(stored, [0], [100])
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    with pytest.raises(FormatError, match=r"'x' in .* has the dtype F6_E2M3, which torch does not have"):
        stored_tensors(tmp_path / "file")


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "a FIFO": "is a FIFO, and only regular files are read",
        "a folder": "is a folder, and only regular files are read",
        "a device": "is a device, and only regular files are read",
        "a pointer": "is a pointer of Git LFS and no weights: run git lfs pull",
        "truncated": "its tensors have 16 bytes and it has 8",
        "deep": "it is nested too deeply",
    }.items(),
)
def test_what_is_no_file_of_tensors_is_refused(tmp_path, kind, message):
    path = tmp_path / "file"
    write_file(path, tensors := {"a": torch.ones(4)}, tensors.__getitem__)
    contents = path.read_bytes()
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        deep = b"[" * 200_000
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        new = {"a pointer": pointer, "truncated": contents[:-8], "deep": struct.pack("<Q", len(deep)) + deep}
        path.write_bytes(new[kind])
    with pytest.raises(FormatError, match=message):
        stored_tensors(path)
    with pytest.raises(FormatError, match=message), open_tensors(path):
        pass


@pytest.mark.parametrize("shape", [[2**38], [0, 2**62, 2**62]], ids=["a sparse file", "sizes that overflow"])
def test_tensors_larger_than_the_memory_are_refused(tmp_path, shape):
    num_bytes = 4 * math.prod(shape)
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + num_bytes)
    with open_tensors(path) as tensors, pytest.raises(FormatError, match="which the memory does not hold"):
        tensors["a"].read()
    stored = stored_tensors(path)["a"]
    with pytest.raises(FormatError, match="which the memory does not hold"):
        read_slice(stored, [0] * len(shape), shape)
