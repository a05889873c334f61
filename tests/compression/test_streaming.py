"""Compression part by part: the same result as in memory, whatever the parts pass to each other."""

import copy
import gc
import os
import sys
from collections import UserDict

import pytest
import torch
from torch import nn

import panther as pr
from panther.compression.config import CompressConfig
from panther.compression.streaming import spool
from panther.compression.streaming.runner import compress_streamed
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError
from panther.files.tensors import bytes_of
from tests.support.part_models import Block, Model, Skips, Tables, batches


class Shared(Model):
    """A block and a layer that are called more than once."""

    def forward(self, x):
        x = self.start(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]):
            x = block(x)
        return self.end(self.blocks[0](self.blocks[0](x)))


class Writing(Model):
    """A block that writes to its input, and glue that writes to a block's output."""

    def forward(self, x):
        x = self.start(x)
        first = x
        for block in self.blocks:
            y = self.write(block, x)
            y += 0.1
            x = y * 1.5
        return self.end(x + first)

    def write(self, block, x):
        return block(x)


class Adding(Block):
    def forward(self, x):
        x += self.down(torch.relu(self.up(x)))
        return {"hidden": x, "name": "block", "none": None}


class WritingInput(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x):
        x = self.start(x) * 1.0
        for block in self.blocks:
            block(x)  # the result is the input, which the block has changed
        return self.end(x)


class Noisy(Block):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn(x.shape).to(x))


class Drawing(Model):
    """Blocks that draw random numbers, and a forward that draws between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x) + 0.1 * torch.randn(x.shape).to(x)
        return self.end(x)


class Sharing(Block):
    """A block that reads what earlier blocks put into its arguments, and puts something there."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x, shared, features, caches):
        if self.place == 2:
            x = x + 0.5 * shared["first"][0].tanh() + sum(features) * caches["inner"]["mean"]
            del shared["first"]
            features.pop()
        y = super().forward(x)
        if self.place == 0:
            shared["first"] = y.sigmoid(), "a name"
            caches["inner"] = {"mean": y.mean()}
        shared["last"] = y - x
        caches["inner"]["mean"] = caches["inner"]["mean"] * 2
        features.append(y.relu())
        return y


class SharedItems(Model):
    """Blocks that share tensors in a dictionary, a list and a dictionary within a dictionary, as Gemma 4 does."""

    kind = dict

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Sharing(place) for place in range(3))

    def forward(self, x):
        shared, features, caches = self.kind(), [], self.kind()
        x = self.start(x)
        for block in self.blocks:
            x = block(x, shared, features, caches=caches)
        assert list(shared) == ["last"]
        assert len(features) == 2
        return self.end(x + shared["last"] + sum(features))


class SharedUserDict(SharedItems):
    kind = UserDict


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x.view(-1, 3, 9, 9))


def compress_both(model, folder, **options):
    """Return the model compressed in memory and part by part, with both reports."""
    options = {"calibration": batches(), "seed": 0, "measure_speed": False} | options
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    report = pr.compress(whole, **options)
    return whole, parts, report, compress_streamed(parts, CompressConfig(**options), folder)


OPTIONS = {
    "bits": {"bits": 4.5},
    "low rank": {"budget": 0.6, "forms": "low_rank"},
    "inputs alone": {"bits": 5, "method": "activation", "allocate": "uniform"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [Model, Skips, Shared, Writing, WritingInput, Drawing, Tables, SharedItems])
def test_the_result_is_that_in_memory(kind, options, tmp_path):
    torch.manual_seed(0)
    model = kind().double()
    original = copy.deepcopy(model.state_dict())
    whole, parts, report, streamed = compress_both(model, tmp_path, **options)
    assert [(layer.names, layer.form, layer.rank) for layer in streamed.layers] == [
        (layer.names, layer.form, layer.rank) for layer in report.layers
    ]
    assert streamed.measured_error == pytest.approx(report.measured_error, rel=1e-9)
    assert streamed.skipped == report.skipped
    expected, state = whole.state_dict(), parts.state_dict()
    assert expected.keys() == state.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)
        else:
            assert torch.equal(state[name], tensor), name
    x = batches()[0]
    torch.manual_seed(1)
    y = parts(x)
    torch.manual_seed(1)
    torch.testing.assert_close(y, whole(x), rtol=1e-7, atol=1e-9)
    assert all(torch.equal(original[name], tensor) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.glob("kept-*"))


def test_items_shared_in_a_dictionary_that_is_not_pythons(tmp_path):
    torch.manual_seed(0)
    whole, parts, _, _ = compress_both(SharedUserDict().double(), tmp_path, bits=5)
    for tensor, expected in zip(parts.state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-11)


def test_convolutions_and_a_target_in_a_sequential(tmp_path):
    torch.manual_seed(0)
    inputs = [torch.randn(8, 243).double() for _ in range(6)]
    whole, parts, _, _ = compress_both(Convolutions().double(), tmp_path, bits=5, calibration=inputs)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True))


class Telling(Block):
    def forward(self, x):
        y = super().forward(x)
        self.notes.append(y.mean())
        return y


class Listening(Model):
    """Blocks that write to a list that is an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Telling() for _ in range(3))

    def forward(self, x):
        x, outputs = self.start(x), []
        for block in self.blocks:
            block.notes = outputs
            x = block(x)
        return self.end(x) * (1 + sum(outputs))


class Branching(Model):
    def forward(self, x):
        x = self.start(x)
        for block in self.blocks if len(x) == 5 else reversed(self.blocks):
            x = block(x)
        return self.end(x)


class Stopping(Model):
    def forward(self, x):
        x = self.start(x)
        for block in self.blocks[: 3 if len(x) == 5 else 2]:
            x = block(x)
        return self.end(x)


class Opaque:
    def __init__(self, x):
        self.x = x


class Keeping(Block):
    """A block that keeps something for a later one, where no argument leads to it."""

    memory = {}  # noqa: RUF012

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        if self.place == 0:
            self.memory["x"] = x
        return super().forward(x + self.memory.pop("x") if self.place == 2 else x)


class Remembering(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(place) for place in range(3))


class Wrapping(Block):
    def forward(self, x):
        return Opaque(super().forward(x))


class Unwrapping(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(3))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x).x
        return self.end(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Listening, "changes by .* if its 5 parts, from 'start' to 'end', run one by one"),
        (Branching, "in a different order for batch 1, where 'blocks.0' was expected: .* with pr.compress"),
        (Stopping, "in a different order for batch 1, where 'blocks.2' was expected"),
        (
            Remembering,
            "KeyError: 'x': the model raises this if its blocks before 'blocks.2' do not run, .* such as attri",
        ),
        (Unwrapping, "'blocks.0' passes on a Opaque, which cannot be kept on disk: .* with pr.compress"),
    ],
)
def test_a_model_without_such_parts_is_refused_and_unchanged(kind, message, tmp_path):
    torch.manual_seed(0)
    model = kind().double()
    original = copy.deepcopy(model.state_dict())
    config = CompressConfig(calibration=batches(), bits=5, seed=0, measure_speed=False)
    with pytest.raises(CompressionError, match=message):
        compress_streamed(model, config, tmp_path)
    assert all(torch.equal(original[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_full_disk_is_an_error_and_the_model_is_unchanged(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Model().double()
    original = copy.deepcopy(model.state_dict())
    number = iter(range(100))

    def limited(tensor):
        if next(number) >= 7:
            raise OSError(28, "No space left on device")
        return bytes_of(tensor)

    monkeypatch.setattr(spool, "bytes_of", limited)
    config = CompressConfig(calibration=batches(), bits=5, seed=0, measure_speed=False)
    with pytest.raises(CompressionError, match=r"cannot take what is kept on disk \(No space left on device; .* GB"):
        compress_streamed(model, config, tmp_path)
    assert all(torch.equal(original[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_tensors_of_a_spool(dtype, tmp_path):
    kept = Spool(tmp_path)
    values = [
        (torch.arange(n) % 5).to(dtype).view(shape) for n, shape in ((6, (2, 3)), (0, (0, 4)), (1, ()), (1, (1,)))
    ]
    kept.write("a", values)
    tensors = kept.read("a")
    for value, tensor in zip(values, tensors, strict=True):
        assert tensor.dtype is value.dtype
        assert tensor.shape == value.shape
        assert torch.equal(tensor, value)
    tensors[0].zero_()  # not in the file
    assert torch.equal(kept.read("a")[0], values[0])
    kept.remove("a")
    gc.collect()
    assert torch.equal(tensors[2], values[2])  # still mapped
    assert "a" not in kept
    assert not list(tmp_path.iterdir())


def test_values_that_are_kept(tmp_path):
    layer = nn.Linear(3, 2)
    layer.register_buffer("shared", torch.arange(4.0))
    other = torch.arange(4.0).view(2, 2).mT  # not contiguous
    value = {"layer": layer, 3: (other, None, "text"), "list": [layer.shared, other]}
    weight = layer.weight
    kept = Spool(tmp_path).kept(value)
    layer = kept["layer"]
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(kept[3][0], other)
    assert kept[3][1:] == (None, "text")
    assert kept["list"][0].data_ptr() == layer.shared.data_ptr()
    assert kept["list"][1].data_ptr() == kept[3][0].data_ptr()


def test_a_changed_byte_is_refused_by_the_next_process(tmp_path):
    first = Spool(tmp_path)
    first.write("a", [torch.ones(3)])
    first.commit()
    path = tmp_path / "a.value"
    contents = bytearray(path.read_bytes())
    contents[0] ^= 1  # of the tensor
    path.write_bytes(contents)
    with pytest.raises(CompressionError, match=r"a\.value is damaged: it does not match its checksum"):
        Spool(tmp_path).read("a")


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no such limit")
def test_values_hold_no_descriptors(tmp_path):
    import resource

    kept, limits = Spool(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, limits[1]))
    try:
        values = [kept.kept(torch.full((3,), float(number))) for number in range(100)]
        for number in range(100):
            kept.write(str(number), [values[number]])
        again = [kept.read(str(number)) for number in range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(torch.equal(value, torch.full((3,), float(number))) for number, value in enumerate(values))
    assert all(torch.equal(value, values[number]) for number, (value,) in enumerate(again))
