"""A compression part by part on several ranks: the result of one process, and after kills the same result."""

import itertools
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from panther.compression.config import CompressConfig
from panther.compression.streaming import spool
from panther.compression.streaming.runner import compress_streamed
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError, PantherError

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, and a head that shares the table's weight; a dropout that draws numbers in each forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        x = nn.functional.dropout(x, 0.1, training=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def end_at(event, number):
    """Let this process end at an event of the spool: a write, or a commit before or after its journal is written."""
    counter = itertools.count()
    write, write_signed = Spool._write, spool.write_signed

    def count(*events):
        if event in events and next(counter) == number:
            os._exit(7)

    Spool._write = lambda *args: (count("write"), write(*args))
    spool.write_signed = lambda *args: (count("before"), write_signed(*args), count("after"))


def compressed(folder, num_ranks=1, ends=None, shape=(20, 4, 9), max_disk_bytes=None, **options):
    """Compress with the batches of this rank; ``ends`` has the event and its number at which each rank ends."""
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(60, shape, generator=generator).unbind()
    rank, group = (dist.get_rank(), dist.group.WORLD) if num_ranks > 1 else (0, None)
    own = batches[rank * shape[0] // num_ranks : (rank + 1) * shape[0] // num_ranks]
    torch.manual_seed(3)
    model = Model().double()
    defaults = {"bits": 6, "forms": ["dense", "int4", "int6", "int8", "low_rank"], "seed": 0}
    config = CompressConfig(
        calibration=own, measure_speed=False, allow_slower=True, group=group, **{**defaults, **options}
    )
    scratch = folder / f"rank-{rank}"
    scratch.mkdir(exist_ok=True, parents=True)
    if ends is not None:
        end_at(*ends[rank])
    report = compress_streamed(model, config, scratch, None, max_disk_bytes=max_disk_bytes)
    forms = [(layer.names, layer.form, layer.rank) for layer in report.layers]
    return model.state_dict(), forms, report.measured_error


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_result_is_that_of_one_process(num_ranks, tmp_path):
    state, forms, error = compressed(tmp_path / "one")
    results = on_ranks(compressed, num_ranks, tmp_path / "ranks", num_ranks)
    for rank_state, rank_forms, rank_error in results:
        assert [form for form in rank_forms] == [form for form in forms]
        assert rank_error == pytest.approx(error, rel=1e-9)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(rank_state[name], tensor, rtol=1e-9, atol=1e-12)
            else:
                assert torch.equal(rank_state[name], tensor)
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in state)


@pytest.mark.parametrize(
    "ends",
    [
        [("after", 6), ("before", 6)],  # the first rank has a commit that the second one lacks
        pytest.param([("write", 40), ("write", 10**9)], marks=pytest.mark.slow),
        pytest.param([("write", 10**9), ("write", 70)], marks=pytest.mark.slow),
        pytest.param([("before", 9), ("after", 9)], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_killed_end_with_the_same_model(ends, tmp_path):
    expected = on_ranks(compressed, 2, tmp_path / "expected", 2)
    with pytest.raises(PantherError):
        on_ranks(compressed, 2, tmp_path, 2, ends, fresh=True)
    counts = {len(list((tmp_path / f"rank-{rank}").glob("journal-*"))) for rank in range(2)}
    assert counts >= {1}
    results = on_ranks(compressed, 2, tmp_path, 2)
    for (state, forms, error), (expected_state, expected_forms, expected_error) in zip(results, expected, strict=True):
        assert (forms, error) == (expected_forms, expected_error)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


def test_ranks_keep_fewer_moments_where_the_disk_is_small(tmp_path):
    def both():
        state, forms, _ = compressed(tmp_path / "whole", 2, shape=(40, 4, 60))
        with pytest.raises(CompressionError, match="is too little") as caught:
            compressed(tmp_path / "refused", 2, shape=(40, 4, 60), max_disk_bytes=1)
        minimum = int(re.search("takes ([0-9,]*) bytes", str(caught.value))[1].replace(",", ""))
        limited_state, limited_forms, _ = compressed(tmp_path / "limited", 2, shape=(40, 4, 60), max_disk_bytes=minimum)
        assert forms == limited_forms
        assert all(torch.equal(limited_state[name], tensor) for name, tensor in state.items())

    on_ranks(both)


def test_the_rank_with_the_longest_batches_decides_what_a_limit_has_to_be(tmp_path):
    def both():
        shape = (40, 4, 60 if dist.get_rank() else 20)
        with pytest.raises(CompressionError, match="is too little") as caught:
            compressed(tmp_path / "refused", 2, shape=shape, max_disk_bytes=1)
        minimum = int(re.search("takes ([0-9,]*) bytes", str(caught.value))[1].replace(",", ""))
        with pytest.raises(CompressionError, match="is too little"):
            compressed(tmp_path / "less", 2, shape=shape, max_disk_bytes=minimum - 1)
        write, sizes = Spool._write, []
        with mock.patch.object(Spool, "_write", lambda self, *args: (write(self, *args), sizes.append(self.num_bytes))):
            compressed(tmp_path / "limited", 2, shape=shape, max_disk_bytes=minimum)
        return minimum, max(sizes)

    (minimum, short_peak), (same_least, long_peak) = on_ranks(both)
    assert minimum == same_least
    assert 1.5 * short_peak < long_peak < 1.2 * minimum


def test_all_ranks_refuse_what_has_changed_for_one(tmp_path):
    with pytest.raises(PantherError):
        on_ranks(compressed, 2, tmp_path, 2, [("write", 60), ("write", 60)], fresh=True)

    def refused():
        with pytest.raises(CompressionError) as caught:
            compressed(tmp_path, 2, seed=dist.get_rank())
        return str(caught.value)

    first, second = on_ranks(refused)
    assert first == second
    assert "with seed 0, and now it is 1" in first
