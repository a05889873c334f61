"""Metrics over ranks against the same over all samples."""

import math
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from panther.distributed import CommunicationCounter, DistributedMetricsCollector
from panther.errors import DistributedError

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("n", [1, 3])
def test_means_are_over_samples(n):
    """Rank r has r + 1 batches of other sizes; rank 0 has no sample of one metric."""

    def rank():
        r = dist.get_rank()
        collector = DistributedMetricsCollector(r, n)
        for batch in range(r + 1):
            collector.update_metric("loss", torch.tensor(10.0 * r + batch), weight=batch + 2)
            collector.update_metric("samples", batch + 2, reduce="sum")
            collector.update_metric("worst", -5.0 + r, reduce="max")
        collector.update_metric("rare", 7.0, weight=r)
        with CommunicationCounter() as traffic:
            result = collector.compute_global_metrics()
        return result, traffic.calls

    samples = [(10.0 * r + b, b + 2) for r in range(n) for b in range(r + 1)]
    weight = sum(count for _, count in samples)
    for result, calls in on_ranks(rank, n):
        assert result["loss"] == pytest.approx(sum(value * count for value, count in samples) / weight)
        assert result["samples"] == weight
        assert result["worst"] == -5 + n - 1
        assert result["rare"] == 7.0 or (n == 1 and math.isnan(result["rare"]))
        assert calls == (3 if n > 1 else 0)


def test_metrics_that_differ_are_named_on_every_rank():
    def rank():
        collector = DistributedMetricsCollector(dist.get_rank(), 3)
        collector.update_metric("loss", 1.0)
        if dist.get_rank() == 1:
            collector.update_metric("extra", 1.0)
        with pytest.raises(DistributedError) as caught:
            collector.compute_global_metrics()
        return str(caught.value)

    for message in on_ranks(rank, 3):
        assert "metrics differ between ranks: metric 'extra' is missing on ranks 0, 2 and mean on rank 1" in message


def test_printing_takes_every_rank_and_shows_once():
    def rank():
        collector = DistributedMetricsCollector(dist.get_rank(), 2)
        collector.update_metric("loss", float(dist.get_rank()))
        with redirect_stdout(StringIO()) as out:
            return collector.print_metrics(), out.getvalue()

    assert on_ranks(rank) == [({"loss": 0.5}, "\nGlobal Metrics:\n  loss: 0.500000\n"), ({"loss": 0.5}, "")]


def test_nan_reset_and_bad_input():
    collector = DistributedMetricsCollector(0, 1)
    collector.update_metric("a", math.nan, reduce="max")
    collector.update_metric("a", 1.0, reduce="max")
    assert math.isnan(collector.compute_global_metrics()["a"])
    with pytest.raises(ValueError, match="'a' has reduce='max' and now 'mean': use two names"):
        collector.update_metric("a", 1.0)
    with pytest.raises(ValueError, match="reduce='min' is unknown"):
        collector.update_metric("b", 1.0, reduce="min")
    with pytest.raises(ValueError, match="weight=-1 must be at least 0"):
        collector.update_metric("b", 1.0, -1)
    collector.reset()
    assert collector.compute_global_metrics() == {}
    with pytest.raises(DistributedError, match="must be those of the process group, 0 and 1"):
        DistributedMetricsCollector(1, 4)


def test_a_mean_of_nothing_spoils_nothing():
    collector = DistributedMetricsCollector(0, 1)
    collector.update_metric("loss", 2.0, 3)
    collector.update_metric("loss", float("nan"), 0)
    assert collector.compute_global_metrics() == {"loss": 2.0}
