"""Speeds of a cluster: measured over ranks, kept in a file, and used by the cost model."""

import json
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from torch import nn

from panther.distributed import ClusterSpec, ModelStats, plan_parallelism
from panther.distributed.advisor.cost import Layout, estimate
from panther.distributed.advisor.fake_run import WorkCounter
from panther.errors import ShapeError
from panther.nn import SKLinear

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def measure():
    return ClusterSpec.measure(repetitions=1)


@pytest.mark.distributed
def test_ranks_measure_the_same_speeds(monkeypatch):
    first, second = on_ranks(measure, 2)
    assert first == second
    assert (first.gpus, first.nodes, first.measured_gpus) == (2, 1, 2)
    assert [name for name, *_ in first.collectives] == [f"intra {name}" for name in OPERATIONS]
    assert all(latency >= 0 and bandwidth > 0 for _, latency, bandwidth in first.collectives)
    assert first.speed(2, "all_gather") == first.collectives[1][1:]
    assert 0 <= first.overlap <= 1


def measure_as_two_nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        return ClusterSpec.measure(repetitions=1)


@pytest.mark.distributed
@pytest.mark.slow
def test_links_within_and_between_nodes_are_measured_apart():
    specs = on_ranks(measure_as_two_nodes, 4)
    assert all(spec == specs[0] for spec in specs)
    assert (specs[0].gpus_per_node, specs[0].nodes) == (2, 2)
    names = [name for name, *_ in specs[0].collectives]
    assert names == [f"{link} {name}" for link in ("intra", "inter") for name in OPERATIONS]


def test_tensor_parallelism_takes_the_time_of_its_own_collectives():
    # A pair of sharded layers sums 2 x 3 numbers a row in forward and in backward. The output of 4,096 is gathered, and
    # the gradient of its 64 inputs is summed.
    model = nn.Sequential(SKLinear(64, 128, 3), nn.ReLU(), SKLinear(128, 64, 3), nn.Linear(64, 4096))
    stats, layout, batch = ModelStats.of(model, torch.ones(2, 64)), Layout(tp=2), 10
    layers = stats.shard(2).layers
    gathered, gathers = sum(layer.tp_gathered.at(batch) for layer in layers), sum(layer.tp_gathers for layer in layers)
    summed = sum(layer.tp_bytes.at(batch) for layer in layers) - gathered
    sums = sum(layer.tp_calls for layer in layers) - gathers
    assert (gathered, gathers) == (batch * 4096 / 2 * 4, 1)
    assert (summed, sums) == (batch * (2 * 2 * 3 + 64) * 4, 3)
    speeds = {"all_reduce": (1e-3, 1e6), "all_gather": (2e-3, 2e6)}

    def seconds(**named):
        collectives = tuple((f"intra {name}", *speed) for name, speed in named.items())
        cluster = ClusterSpec.preset("cpu", 2, collectives=collectives, intra_latency=4e-3, intra_bandwidth=1e7)
        return estimate(stats, cluster, layout, batch).seconds["tp"]

    def expected(reduce, gather):
        return sums * 2 * reduce[0] + summed / reduce[1] + gathers * gather[0] + gathered / gather[1]

    assert seconds(**speeds) == pytest.approx(expected(*speeds.values()))
    # Data sheets have one speed for all.
    assert seconds() == pytest.approx(expected((4e-3, 1e7), (4e-3, 1e7)))


def test_a_file_keeps_the_figures(tmp_path):
    measured = ClusterSpec.measure(repetitions=1, collectives=(("intra all_gather", 1e-4, 3.0),))
    assert measured.calibrated
    measured.save(tmp_path / "cluster.json")
    assert ClusterSpec.load(tmp_path / "cluster.json") == measured
    larger = ClusterSpec.load(tmp_path / "cluster.json", gpus=64, memory_bytes=8e9)
    assert larger == replace(measured, gpus=64, memory_bytes=8e9)
    # Earlier versions measured more figures.
    earlier = json.loads((tmp_path / "cluster.json").read_text())
    earlier |= {"memory_bandwidth": 1.0, "operation_bandwidth": 3.0, "narrow_products": [[4, 3.0]]}
    (tmp_path / "cluster.json").write_text(json.dumps(earlier))
    assert ClusterSpec.load(tmp_path / "cluster.json") == replace(measured, memory_bandwidth=3.0)


def test_a_plan_says_where_its_times_are_from():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def plan(measured):
        cluster = ClusterSpec.preset("cpu", 4, measured_gpus=measured)
        return str(plan_parallelism(model, cluster, batch=4, sample_input=torch.ones(1, 8), schedules=()))

    assert "uncalibrated" in plan(0)
    assert "Times are extrapolated from speeds that were measured on 2 devices." in plan(2)
    assert "uncalibrated" not in plan(4)
    assert "extrapolated" not in plan(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not a file of ClusterSpec.save: it is not JSON"),
        ("[]", "is not a file of ClusterSpec.save: it has no"),
        ('{"gpus": 1}', "is not a file of ClusterSpec.save: it has no"),
        ('{"format": "panther-cluster-1", "cores": 3}', "has fields that ClusterSpec does not have: cores"),
        ('{"format": "panther-cluster-1", "gpus": 3}', "must have gpus and memory_bytes"),
        ('{"format": "panther-cluster-1", "gpus": 3, "memory_bytes": -1}', "memory_bytes=-1 must be positive"),
        (
            '{"format": "panther-cluster-1", "gpus": 3, "memory_bytes": 1, "collectives": [["intra x", 1]]}',
            "collectives has the entry",
        ),
        ('{"format": "panther-cluster-1", "gpus": "3", "memory_bytes": 1}', "has a figure that is not valid"),
        (
            '{"format": "panther-cluster-1", "gpus": 3, "memory_bytes": 1, "collectives": 5}',
            "has a figure that is not valid",
        ),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, content, message):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ClusterSpec.load(tmp_path / "file.json")


def test_bad_repetitions_and_missing_files():
    with pytest.raises(ShapeError, match="repetitions=0 must be at least 1"):
        ClusterSpec.measure(repetitions=0)
    with pytest.raises(FileNotFoundError):
        ClusterSpec.load("nowhere.json")


def test_work_is_counted_by_operation():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with WorkCounter() as work:
        c = a @ b
        c.t().reshape(7, 3)
        c + 1
        c.add_(1)
    assert (work.flops, work.calls, work.made) == (2 * 3 * 5 * 7, 3, [4 * 21] * 3)  # the transposed view is no work
    assert work.moved == 4 * (15 + 35 + 21) + 4 * 21 * (2 + 2)


def test_time_follows_from_flops_bytes_and_operations():
    stats = ModelStats.of(nn.Sequential(nn.Linear(64, 32), nn.ReLU()), torch.ones(2, 64))
    figures = {"memory_bytes": 1e9, "efficiency": 1.0, "peak_flops_fp32": 1e30, "memory_bandwidth": 1e30}
    layout = Layout()

    def compute(**changes):
        cluster = ClusterSpec(gpus=1, **{**figures, **changes})
        return estimate(stats, cluster, layout, 2).seconds["compute"]

    flops = 2 * 2 * 64 * 32 * 2  # forward, and the gradient of the weight: the input needs none
    assert compute(peak_flops_fp32=1e3) == pytest.approx(flops / 1e3)
    calls = sum(layer.calls for layer in stats.layers)
    assert compute(operation_seconds=1.0) == pytest.approx(calls)
    assert compute(host_seconds=1.0) == pytest.approx(calls)
    assert compute(host_seconds=1.0, operation_seconds=2.0) == pytest.approx(2 * calls)  # The longer time counts.
    assert compute(memory_bandwidth=1e3) > 4 * (2 * 64 + 64 * 32) / 1e3


def test_peak_memory_is_below_the_sum_and_above_its_parts():
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    stats = ModelStats.of(nn.Sequential(*layers), torch.ones(2, 64))
    cluster = ClusterSpec.preset("cpu", 1)
    for samples in (1, 100):
        memory = estimate(stats, cluster, Layout(), samples).memory
        fixed = memory.parameters + memory.optimizer
        assert memory.total < sum(memory.parts().values())
        assert memory.total >= fixed + max(memory.activations, memory.gradients)
    whole = ModelStats.of(nn.ModuleList(layers)[0], torch.ones(2, 64))
    assert estimate(whole, cluster, Layout(), 2).memory.overlap == 0


def test_a_saved_file_is_plain_json(tmp_path):
    ClusterSpec.preset("cpu", 2).save(tmp_path / "c.json")
    kept = json.loads((tmp_path / "c.json").read_text())
    assert kept["format"] == "panther-cluster-1"
    assert kept["measured_gpus"] == 0
