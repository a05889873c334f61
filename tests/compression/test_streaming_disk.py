"""The bytes that a compression part by part keeps on disk, as it states them beforehand."""

import logging
from types import SimpleNamespace

import pytest
import torch

from panther.compression.config import CompressConfig
from panther.compression.folder import compress_streamed
from panther.compression.streaming import spool
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError
from tests.support.part_models import Model, Skips, Tables, batches


def compressed(kind, folder, **options):
    torch.manual_seed(0)
    model = kind().double()
    defaults = {"calibration": batches(), "seed": 0, "measure_speed": False, "bits": 5, "forms": ["int4", "int8"]}
    return model, compress_streamed(model, CompressConfig(**{**defaults, **options}), folder)


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


def test_long_batches_take_more_than_short_ones(tmp_path, sizes):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(5, length, 16, generator=generator).double() for length in (4, 40, 9, 60, 5)]
    _, report = compressed(Model, tmp_path, calibration=inputs)
    assert 0.8 < report.disk_bytes / max(sizes) < 1.25


def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path, monkeypatch, sizes):
    _, report = compressed(Model, tmp_path)
    (tmp_path / "next").mkdir()
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda path: SimpleNamespace(free=report.disk_bytes // 2))
    sizes.clear()
    with pytest.raises(CompressionError, match=f"needs {report.disk_bytes:,} bytes in .*disk has .* free: free some"):
        compressed(Model, tmp_path / "next")
    assert max(sizes) < report.disk_bytes / 4


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
    assert files.num_bytes == size
    del mapped
    assert files.num_bytes == 0
