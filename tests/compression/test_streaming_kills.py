"""A compression part by part that is killed and started again ends with the same model, bit for bit."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from panther.compression.config import CompressConfig
from panther.compression.selection import allocation
from panther.compression.streaming import spool
from panther.compression.streaming.runner import compress_streamed
from panther.compression.streaming.source import SourceFiles
from panther.errors import CompressionError


class Killed(BaseException):
    """The end of a process; what it has written stays as it is."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x, memory):
        return x + self.down(torch.tanh(self.up(self.norm(x)) + memory.mean(-1, keepdim=True)))


class Model(nn.Module):
    """Blocks that all read the output of the first one, a shared block, and a head that shares the table's weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList([Block(16), Block(16), Block(16)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        memory = x
        for number, block in enumerate([*self.blocks, self.blocks[1]]):
            x = block(x, memory)
            memory = x if number == 0 else memory
        return self.head(x)


def a_model():
    torch.manual_seed(3)
    return Model().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(30, (4, 9), generator=generator) for _ in range(4)]


def compressed(folder, source=None, **options):
    model = a_model()
    defaults = {"bits": 7, "forms": ["dense", "int4", "int8", "low_rank"], "seed": 0, "calibration": batches()}
    config = CompressConfig(measure_speed=False, allow_slower=True, **{**defaults, **options})
    report = compress_streamed(model, config, folder, source)
    return model, report


@pytest.fixture
def killing(monkeypatch):
    """Return a function that lets the process end at an operation, or never, and returns the counter of operations.

    Operations are the writes of files, which leave the temporary file, and the commits.
    """
    rename, commit = spool.os.replace, spool.Spool.commit

    def kill_at(operation=-1):
        counter = itertools.count()

        def count():
            if next(counter) == operation:
                raise Killed

        monkeypatch.setattr(spool.os, "replace", lambda *paths: (count(), rename(*paths)))
        monkeypatch.setattr(spool.Spool, "commit", lambda self: (count(), commit(self)))
        return counter

    return kill_at


@pytest.fixture
def expected(tmp_path):
    (tmp_path / "expected").mkdir()
    return compressed(tmp_path / "expected")


def assert_same(results, expected):
    (model, report), (expected_model, expected_report) = results, expected
    assert report.layers == expected_report.layers
    assert report.measured_error == expected_report.measured_error
    assert report.notes == expected_report.notes
    state, expected_state = model.state_dict(), expected_model.state_dict()
    assert list(state) == list(expected_state)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())
    assert model.head.codes.data_ptr() == model.table.codes.data_ptr()


@pytest.mark.parametrize("step", [83, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_once(step, tmp_path, expected, killing):
    counter = killing()
    compressed(tmp_path)
    num_operations = next(counter)
    assert num_operations > 200
    for operation in range(step // 2, num_operations, step):
        folder = tmp_path / str(operation)
        folder.mkdir()
        killing(operation)
        with pytest.raises(Killed):
            compressed(folder)
        counter = killing()
        assert_same(compressed(folder), expected)
        # What was safe is not done again: at most the largest part, the forward and backward of the head.
        assert next(counter) < num_operations - operation + 60


def test_a_run_that_is_killed_again_and_again(tmp_path, expected, killing):
    for attempt in range(20):
        killing(70)
        try:
            results = compressed(tmp_path)
        except Killed:
            continue
        assert attempt >= 3
        assert_same(results, expected)
        return
    pytest.fail("the run does not get further than what a process does before it is killed")


@pytest.mark.parametrize("method", [pytest.param("two_sided", marks=pytest.mark.slow), "activation"])
def test_the_second_fit_with_a_larger_ridge(method, tmp_path, monkeypatch, killing):
    monkeypatch.setattr(allocation, "_is_misleading", lambda fits, allocation: fits.ridge < 0.1)
    (tmp_path / "expected").mkdir()
    expected = compressed(tmp_path / "expected", method=method)
    counter = killing()
    (tmp_path / "counted").mkdir()
    compressed(tmp_path / "counted", method=method)
    killing(next(counter) * 3 // 4)
    with pytest.raises(Killed):
        compressed(tmp_path, method=method)
    killing()
    assert_same(compressed(tmp_path, method=method), expected)


CHANGES = {
    "bits 7": {"bits": 6},
    "source None": {"source": SourceFiles(Path(__file__).parent)},
    "calibration 4 batches": {"calibration": batches()[::-1]},
    "forms": {"forms": ["dense", "int4", "int8"]},
    "include": {"include": "blocks.*"},
    "mask_fn None": {"mask_fn": lambda batch: None},
    "seed 0": {"seed": 1},
}


def test_a_change_is_refused_by_name(tmp_path, expected, killing):
    killing(150)
    with pytest.raises(Killed):
        compressed(tmp_path)
    killing()
    for name, change in CHANGES.items():
        with pytest.raises(CompressionError, match=f"has the work of a run that was killed, with {name}.*, and now"):
            compressed(tmp_path, **change)
    assert_same(compressed(tmp_path, seed=None), expected)  # the seed is that of the run


def test_a_file_that_is_damaged_is_refused(tmp_path, killing):
    killing(150)
    with pytest.raises(Killed):
        compressed(tmp_path)
    killing()
    path = next(tmp_path.glob("fit-*"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CompressionError, match=f"{path.name} is damaged: it should have .* bytes, and has .*: remove"):
        compressed(tmp_path)
