"""The bytes that a compression part by part keeps on disk, as it states them beforehand."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from panther.compression import fitting
from panther.compression.config import CompressConfig
from panther.compression.folder import compress_streamed
from panther.compression.selection import allocation
from panther.compression.streaming import spool
from panther.compression.streaming.disk import Sections
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError
from tests.support.part_models import Block, Model, Skips, Tables, batches


def compressed(kind, folder, max_disk_bytes=None, **options):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = kind().double()
    defaults = {"calibration": batches(), "seed": 0, "measure_speed": False, "bits": 5, "forms": ["int4", "int8"]}
    config = CompressConfig(**{**defaults, **options})
    return model, compress_streamed(model, config, folder, max_disk_bytes=max_disk_bytes)


class Deep(Model):
    """Blocks in a row. The last block also reads the result of the first one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        x = self.start(x)
        first = None
        for block in self.blocks[:-1]:
            x = block(x)
            first = x if first is None else first
        return self.end(self.blocks[-1](x + first))


class Adding(Deep):
    """The forward writes to results of its blocks, and draws random numbers."""

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
            x += 0.1 * torch.rand(x.shape).to(x)
        return self.end(x)


class Detaching(Deep):
    """The last block reads the result of the first one without gradients."""

    def forward(self, x):
        x = self.start(x)
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x)
        return self.end(x * first.detach().mean())


@pytest.fixture
def sizes(monkeypatch):
    """Return a list that gets the bytes of the files after each write."""
    sizes, write = [], Spool.write

    def watched(self, name, value):
        write(self, name, value)
        sizes.append(self.num_bytes)

    monkeypatch.setattr(Spool, "write", watched)
    return sizes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Model, {"forms": None}),
        (Skips, {"budget": 0.6, "bits": None, "forms": "low_rank"}),
        (Tables, {"method": "activation"}),
    ],
)
def test_the_peak_of_the_files_is_stated_beforehand(kind, options, tmp_path, sizes, caplog):
    with caplog.at_level(logging.INFO, "panther.compression"):
        _, report = compressed(kind, tmp_path, **options)
    assert 0.8 < report.disk_bytes / max(sizes) < 1.25
    assert "predicted peak of the files that are kept on disk" in caplog.text
    assert "peak of the files kept meanwhile, as predicted" in str(report)
    assert report.to_dict()["disk_bytes"] == report.disk_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"forms": None, "bits": 4.5},
        pytest.param({"method": "activation"}, marks=pytest.mark.slow),
        pytest.param({"budget": 0.6, "bits": None, "forms": "low_rank"}, marks=pytest.mark.slow),
    ],
    ids=["codes", "all forms", "inputs alone", "low rank"],
)
def test_moments_that_do_not_stay_change_no_bit(options, tmp_path, sizes, caplog):
    options = {"forms": ["dense", "int3", "int4", "int5", "int6", "int8"]} | options
    expected = compressed(Model, tmp_path / "expected", **options)
    assert 0.8 < expected[1].disk_bytes / max(sizes) < 1.25
    sizes.clear()
    with caplog.at_level(logging.INFO, "panther.compression"):
        results = compressed(Model, tmp_path / "limited", expected[1].disk_bytes - 1, **options)
    assert "no room for the moments" in caplog.text
    assert "sections" not in caplog.text
    assert 0.8 < results[1].disk_bytes / max(sizes) < 1.25
    assert_same(results, expected)


def test_moments_that_stay_serve_a_second_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "_is_misleading", lambda fits, allocation: fits.ridge < 0.1)
    gather, descriptions = fitting.gather_moments, []

    def counted(*args, description, **kwargs):
        descriptions.append(description)
        return gather(*args, description=description, **kwargs)

    monkeypatch.setattr(fitting, "gather_moments", counted)
    expected = compressed(Tables, tmp_path / "expected")
    assert len(descriptions) == 1
    results = compressed(Tables, tmp_path / "limited", expected[1].disk_bytes - 1)
    assert len(descriptions) == 3
    assert_same(results, expected)


def test_long_batches_take_more_than_short_ones(tmp_path, sizes):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(5, length, 16, generator=generator).double() for length in (4, 40, 9, 60, 5)]
    _, report = compressed(Model, tmp_path, calibration=inputs)
    assert 0.8 < report.disk_bytes / max(sizes) < 1.25


def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path, monkeypatch, sizes):
    _, report = compressed(Model, tmp_path)
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda path: SimpleNamespace(free=report.disk_bytes // 4))
    sizes.clear()
    with pytest.raises(CompressionError, match=r"needs [0-9,]* bytes in .*disk has .* free: free some"):
        compressed(Model, tmp_path / "next")
    assert max(sizes) < report.disk_bytes / 4


def assert_same(results, expected):
    (model, report), (expected_model, expected_report) = results, expected
    assert report.layers == expected_report.layers
    assert report.measured_error == expected_report.measured_error
    state, expected_state = model.state_dict(), expected_model.state_dict()
    assert list(state) == list(expected_state)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


@pytest.mark.parametrize("kind", [Deep, pytest.param(Adding, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"method": "activation", "allocate": "uniform"},
        pytest.param({"budget": 0.6, "bits": None, "forms": "low_rank"}, marks=pytest.mark.slow),
    ],
    ids=["codes", "inputs alone", "low rank"],
)
def test_a_limit_of_the_disk_changes_no_bit(kind, options, tmp_path, sizes, caplog):
    options = options | {"calibration": batches(count=60)}
    expected = compressed(kind, tmp_path / "expected", **options)
    sizes.clear()
    limit = int(0.9 * expected[1].disk_bytes)
    with caplog.at_level(logging.INFO, "panther.compression"):
        results = compressed(kind, tmp_path / "limited", limit, **options)
    assert "sections" in caplog.text
    assert 0.8 < results[1].disk_bytes / max(sizes) < 1.25
    assert results[1].disk_bytes <= limit
    assert_same(results, expected)


def test_sections_take_the_place_of_space_that_the_disk_does_not_have(tmp_path, monkeypatch, sizes):
    options = {"calibration": batches(count=60)}
    expected = compressed(Deep, tmp_path / "expected", **options)
    free = int(0.95 * expected[1].disk_bytes)
    sizes.clear()
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda path: usage)
    results = compressed(Deep, tmp_path / "limited", **options)
    assert max(sizes) < free
    assert_same(results, expected)


@pytest.mark.slow
def test_a_run_in_sections_that_is_killed_continues(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    options = {"calibration": batches(count=60)}
    expected = compressed(Deep, tmp_path / "expected", **options)
    limit = int(0.9 * expected[1].disk_bytes)
    commit, num_commits = Spool.commit, 0
    until = [10]

    def counted(self):
        nonlocal num_commits
        num_commits += 1
        if num_commits > until[0]:
            raise Killed
        commit(self)

    monkeypatch.setattr(Spool, "commit", counted)
    for _ in range(30):
        num_commits = 0
        try:
            results = compressed(Deep, tmp_path / "killed", limit, **options)
        except Killed:
            continue
        break
    assert_same(results, expected)
    num_commits, until[0] = 0, 3
    with pytest.raises(Killed):
        compressed(Deep, tmp_path / "another", limit, **options)
    num_commits = 0
    with pytest.raises(CompressionError, match="max_disk_bytes"):
        compressed(Deep, tmp_path / "another", limit + 1, **options)


def test_a_limit_that_is_too_small_is_refused_with_the_bytes(tmp_path):
    options = {"calibration": batches(count=60)}
    with pytest.raises(
        CompressionError, match=r"max_disk_bytes=100,000 is too little.* takes ([0-9,]*) bytes"
    ) as error:
        compressed(Deep, tmp_path / "first", 100_000, **options)
    minimum_bytes = int(re.search("takes ([0-9,]*) bytes", str(error.value))[1].replace(",", ""))
    _, report = compressed(Deep, tmp_path / "second", minimum_bytes, **options)
    assert report.disk_bytes == minimum_bytes


def test_a_model_that_reads_dropped_results_without_gradients_is_refused(tmp_path):
    options = {"calibration": batches(count=60)}
    _, report = compressed(Detaching, tmp_path / "whole", **options)
    with pytest.raises(CompressionError, match="reads some of them without gradients"):
        compressed(Detaching, tmp_path / "limited", int(0.8 * report.disk_bytes), **options)


def test_sections_keep_what_later_sections_read():
    sections = Sections([1, 5, 3, 4, 5], 3)  # of parts 0, 1 / 2, 3 / 4, 5; part 5 reads the result of part 1
    assert [sections.start(place) for place in range(6)] == [0, 0, 2, 2, 4, 4]
    assert [sections.read_from(start) for start in (0, 2, 4)] == [[], [1], [1, 3]]
    assert [sections.droppable(place, 4) for place in range(4)] == [[], [0], [0], [0, 2]]
    assert sections.read_last(3) == [0, 2]
    # Backward, from the last part: results of parts 1, 3 and 4; then 1, 3, 4, 3 alone with what has been dropped, ...
    assert sections.held_bytes([1, 10, 100, 1000, 10000], set(range(6)), gradients=True) == (
        11010, [11010, 11010, 11110, 1110, 111, 11],
    )  # fmt: skip
    whole = Sections([1, 2, 3])
    assert whole.held_bytes([1, 2, 3], {0}, gradients=True) == (6, [6, 6, 6, 6])
    assert not whole.drops
    assert whole.droppable(2, 0) == []


def test_bytes_of_removed_files_count_until_they_are_free(tmp_path):
    files, value = Spool(tmp_path), torch.zeros(1000)
    files.write("a", value)
    size = files.num_bytes
    assert size > value.nbytes
    files.commit()
    files.remove("a")
    assert files.num_bytes == size
    files.commit()
    assert files.num_bytes == 0
    mapped = files.kept(value)
    assert value.nbytes <= files.num_bytes <= size  # without the description of the value
    del mapped
    assert files.num_bytes == 0
