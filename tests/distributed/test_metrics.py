"""Metrics over ranks against the same over all samples."""

import dataclasses
import math
import re
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from panther.distributed import CommunicationCounter, DeviceUtilization, DistributedMetricsCollector
from panther.distributed.comm import bandwidth
from panther.errors import DistributedError, MissingExtraError, install_command

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("n", [1, 3])
def test_means_are_over_samples(n):
    """Rank r has r + 1 batches of other sizes; rank 0 has no sample of one metric."""

    def rank():
        r = dist.get_rank()
        collector = DistributedMetricsCollector(r, n)
        for batch in range(r + 1):
            collector.update_metric("loss", torch.tensor(10.0 * r + batch), weight=batch + 2)
        collector.update_metric("rare", 7.0, weight=r)
        with CommunicationCounter() as traffic:
            result = collector.compute_global_metrics()
        return result, traffic.calls

    samples = [(10.0 * r + b, b + 2) for r in range(n) for b in range(r + 1)]
    weight = sum(count for _, count in samples)
    for result, calls in on_ranks(rank, n):
        assert result["loss"] == pytest.approx(sum(value * count for value, count in samples) / weight)
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
    collector.update_metric("a", math.nan, reduce="each")
    assert math.isnan(collector.compute_global_metrics()["a, rank 0"])
    with pytest.raises(ValueError, match="'a' has reduce='each' and now 'mean': use two names"):
        collector.update_metric("a", 1.0)
    with pytest.raises(ValueError, match="reduce='min' is unknown"):
        collector.update_metric("b", 1.0, reduce="min")
    with pytest.raises(TypeError, match="the value of 'b' must be a number or a tensor of one, not str"):
        collector.update_metric("b", "high")
    with pytest.raises(TypeError, match="the weight of 'b' must be a number or a tensor of one, not NoneType"):
        collector.update_metric("b", 1.0, None)
    with pytest.raises(ValueError, match=r"the value of 'b' has shape \(3,\) and must be one number"):
        collector.update_metric("b", torch.ones(3))
    with pytest.raises(ValueError, match="weight=-1 must be at least 0"):
        collector.update_metric("b", 1.0, -1)
    collector.reset()
    assert collector.compute_global_metrics() == {}
    with pytest.raises(DistributedError, match="must be those of the process group, 0 and 1"):
        DistributedMetricsCollector(1, 4)
    with pytest.raises(DistributedError, match="rank='0' and world_size=1 must be"):
        DistributedMetricsCollector("0", 1)


def test_the_values_are_lists_as_in_the_guide():
    collector = DistributedMetricsCollector(0, 1)
    for value, weight in ((1.0, 3), (5.0, 1)):
        collector.update_metric("loss", value, weight)
    values = collector.metrics["loss"]
    assert values == [1.0, 5.0]
    assert (values[-1], len(values), sum(values) / len(values), min(values)) == (5.0, 2, 3.0, 1.0)
    assert collector.metrics == {"loss": [1.0, 5.0]}
    values.append(2.0)  # as the guide's own update_metric does, with weight 1
    collector.update_metric("loss", 8.0, 5)
    collector.metrics["accuracy"] = [0.5, 1.0]
    assert collector.compute_global_metrics() == {"loss": (3 + 5 + 2 + 40) / 10, "accuracy": 0.75}
    values.clear()
    collector.update_metric("loss", 4.0, 2)
    collector.metrics["accuracy"] = []
    result = collector.compute_global_metrics()
    assert result["loss"] == 4.0
    assert math.isnan(result["accuracy"])
    collector.reset()
    assert collector.metrics == {}


def test_a_mean_of_nothing_spoils_nothing():
    collector = DistributedMetricsCollector(0, 1)
    collector.update_metric("loss", 2.0, 3)
    collector.update_metric("loss", float("nan"), 0)
    assert collector.compute_global_metrics() == {"loss": 2.0}


def test_each_device_has_a_utilization_of_its_own():
    def rank():
        collector = DistributedMetricsCollector(dist.get_rank(), 2)
        collector.update_metric("utilization", 0.5 + 0.25 * dist.get_rank(), reduce="each")
        collector.update_metric("batches", 3.0 + dist.get_rank(), weight=2, reduce="each")
        collector.update_metric("batches", 0.0, weight=1, reduce="each")
        with redirect_stdout(StringIO()) as out:
            return collector.print_metrics(), out.getvalue()

    (first, shown), (second, _) = on_ranks(rank)
    assert first == second
    assert (first["utilization, rank 0"], first["utilization, rank 1"]) == (0.5, 0.75)
    assert (first["batches, rank 0"], first["batches, rank 1"]) == (2.0, pytest.approx(8 / 3))
    assert shown.splitlines()[2:4] == [
        f"  utilization, rank {r}: {first[f'utilization, rank {r}']:.6f}" for r in (0, 1)
    ]


def test_the_utilization_of_a_cpu_and_of_a_gpu(monkeypatch):
    clock = {"elapsed": 0.0, "computed": 0.0}
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: clock["elapsed"])
    monkeypatch.setattr(bandwidth.time, "process_time", lambda: clock["computed"])
    with DeviceUtilization() as measured:
        clock.update(elapsed=8.0, computed=2.0 * torch.get_num_threads())
    assert measured.value == 0.25
    with measured:
        clock.update(elapsed=9.0, computed=100.0)  # by threads that are not torch's
    assert measured.value == 1.0
    with measured:
        clock.update(elapsed=11.0, computed=100.0 + torch.get_num_threads())
        assert measured.restart() == 0.5
        clock.update(elapsed=12.0)
    assert measured.value == 0.0  # since it was restarted

    info = bandwidth.get_distributed_info()
    fake = dataclasses.replace(info, device=torch.device("cuda", 1))
    monkeypatch.setattr(bandwidth, "get_distributed_info", lambda: fake)
    samples = iter([90, 40])

    def sample(device):
        assert device == torch.device("cuda", 1)
        return next(samples)

    monkeypatch.setattr(torch.cuda, "utilization", sample)
    with DeviceUtilization() as measured:
        pass
    assert measured.value == pytest.approx(0.4)  # at the end of the block

    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    with pytest.raises(MissingExtraError, match=re.escape(f"run {install_command('gpu')}")), DeviceUtilization():
        pass

    def refused(device):
        raise RuntimeError("Not Supported")  # as nvidia-ml-py's own errors, for a part of a GPU

    monkeypatch.setattr(torch.cuda, "utilization", refused)
    with (
        pytest.raises(DistributedError, match="the driver does not report the utilization of cuda:1: Not Supported"),
        DeviceUtilization(),
    ):
        pass
    with pytest.raises(ValueError, match="device='gpu' is not a device of torch"):
        DeviceUtilization("gpu")


@pytest.mark.extra
def test_the_driver_is_asked_by_the_package_for_gpus(monkeypatch):
    pynvml = pytest.importorskip("pynvml", reason="extra gpu")
    asked = []

    def rates(handle):
        asked.append(handle)
        return SimpleNamespace(gpu=37)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"GPU {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    with DeviceUtilization("cuda:0") as utilization:
        pass
    assert utilization.value == 0.37
    assert asked == ["GPU 0"] * 2
