"""Statistics of plain transformers: one layer stands for all, and files keep what was measured."""

import gzip
import json
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import shipped_stats
import torch
import waits
from covering import half_of

from panther.distributed import ModelStats
from panther.distributed.advisor.statistics import model_stats as stats_cache
from panther.distributed.advisor.statistics.measured import _loss_of_tokens, plain_transformer
from panther.errors import ShapeError

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PINNED_TORCH = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)[1]
of_pinned_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED_TORCH,
    reason=f"the statistics are shipped for torch {PINNED_TORCH}, and other versions measure for themselves",
)

SIZES = {"hidden": 12, "heads": 6, "ffn": 20, "vocab": 31, "sequence": 5}

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")


@pytest.mark.parametrize(
    ("layers", "sketch", "tp"),
    [
        *half_of([3], [None, 2], [1, 2, 3]),
        *(pytest.param(1, *case, marks=pytest.mark.slow) for case in product([None, 2], [1, 2, 3])),
    ],
)
def test_layers_have_the_figures_of_the_first(layers, sketch, tp):
    found = ModelStats.transformer(**SIZES, layers=layers, sketch=sketch).shard(tp)
    with torch.device("meta"):
        model = plain_transformer(12, layers, 6, 20, 31, sketch)
    tokens = torch.empty(1, 5, dtype=torch.int64, device="meta")
    assert found == ModelStats.of(model, tokens, loss_fn=_loss_of_tokens).shard(tp)


def test_files_keep_what_was_measured(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    measured = [ModelStats.transformer(**SIZES, layers=3, cache_dir=folder).shard(tp) for tp in (1, 2)]
    monkeypatch.setattr(stats_cache, "measured_values", lambda sizes: pytest.fail("measured again"))
    assert [ModelStats.transformer(**SIZES, layers=3, cache_dir=folder).shard(tp) for tp in (1, 2)] == measured
    # Another number of layers has the same layer.
    assert len(ModelStats.transformer(**SIZES, layers=7, cache_dir=folder).layers) == 10


def shipped():
    return json.loads(gzip.decompress(stats_cache.SHIPPED.read_bytes()))


@of_pinned_torch
def test_the_named_sizes_come_with_the_package(monkeypatch):
    monkeypatch.setattr(stats_cache, "measured_values", lambda sizes: pytest.fail("measured"))
    sizes = {"hidden": 2048, "layers": 24, "heads": 16, "vocab": 50257, "sequence": 2048}
    for sketch, precision in product(shipped_stats.SKETCHES, shipped_stats.PRECISIONS):
        stats = ModelStats.transformer(**sizes, sketch=sketch, mixed_precision=precision)
        assert [stats.shard(tp).tp for tp in (1, 2, 4, 8)] == [1, 2, 4, 8]


def test_another_version_of_torch_measures_for_itself(monkeypatch):
    monkeypatch.setattr(stats_cache, "version", lambda name: "2.12.1+cu130")
    stats_cache._shipped.cache_clear()
    assert stats_cache._shipped() == {}
    stats_cache._shipped.cache_clear()


@of_pinned_torch
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_shipped_statistics_are_those_of_the_code(part):
    entries = shipped()
    assert entries["torch"] == PINNED_TORCH
    every = list(shipped_stats.entries())
    assert entries["measured"].keys() == {stats_cache.shipped_name(sizes) for sizes in every}
    few = every[:: len(every) // 3]
    outdated = [
        sizes
        for sizes in (every if part else few)
        if entries["measured"][stats_cache.shipped_name(sizes)] != shipped_stats.measured(sizes)
    ]
    assert not outdated, "run python tests/support/shipped_stats.py"


def test_a_refusal_is_kept(tmp_path, monkeypatch):
    stats = ModelStats.transformer(**SIZES, layers=1, cache_dir=tmp_path)
    monkeypatch.setattr(stats_cache, "measured_values", lambda sizes: {"refused": "five ranks cannot share it"})
    with pytest.raises(ShapeError, match="five ranks cannot share it"):
        stats.shard(5)
    monkeypatch.undo()
    with pytest.raises(ShapeError, match="five ranks cannot share it"):
        ModelStats.transformer(**SIZES, layers=1, cache_dir=tmp_path).shard(5)


def test_a_damaged_file_is_measured_again(tmp_path):
    stats = ModelStats.transformer(**SIZES, layers=1, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    for damaged in (whole[:-20], "[]", "{}"):
        file.write_text(damaged)
        assert ModelStats.transformer(**SIZES, layers=1, cache_dir=tmp_path) == stats
        assert file.read_text() == whole


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    stats = ModelStats.transformer(**SIZES, layers=1, cache_dir=tmp_path / "file" / "inside")
    assert stats == ModelStats.transformer(**SIZES, layers=1)


@pytest.mark.slow
def test_planning_with_kept_statistics_does_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = (
        "import sys; from panther.cli import main; "
        "main(['advise', '--model', 'transformer/125m', '--gpus', '4', '--sequence', '8', '--batch', '64']); "
        "print('torch' in sys.modules)"
    )
    for loaded in ("True", "False"):
        done = waits.run([sys.executable, "-c", command], check=True)
        assert done.stdout.split()[-1] == loaded
