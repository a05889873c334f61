"""The bytes that a compression part by part keeps on disk, as it states them beforehand."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from panther.compression import fitting
from panther.compression.config import CompressConfig
from panther.compression.selection import allocation
from panther.compression.streaming import spool
from panther.compression.streaming.runner import compress_streamed
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError
from tests.support.part_models import Model, Skips, Tables, batches


def compressed(kind, folder, max_disk_bytes=None, **options):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = kind().double()
    defaults = {"calibration": batches(), "seed": 0, "measure_speed": False, "bits": 5, "forms": ["int4", "int8"]}
    config = CompressConfig(**{**defaults, **options})
    return model, compress_streamed(model, config, folder, max_disk_bytes=max_disk_bytes)


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


def test_a_limit_that_is_too_small_is_refused_with_the_bytes(tmp_path):
    options = {"calibration": batches(count=60)}
    with pytest.raises(
        CompressionError, match=r"max_disk_bytes=100,000 is too little.* takes ([0-9,]*) bytes"
    ) as error:
        compressed(Model, tmp_path / "first", 100_000, **options)
    minimum_bytes = int(re.search("takes ([0-9,]*) bytes", str(error.value))[1].replace(",", ""))
    _, report = compressed(Model, tmp_path / "second", minimum_bytes, **options)
    assert report.disk_bytes == minimum_bytes


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
