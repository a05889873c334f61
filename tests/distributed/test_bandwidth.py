import math
from contextlib import redirect_stdout
from io import StringIO

import pytest
from ranks import on_ranks

from panther.distributed import CommunicationProfile, DeviceUtilization, profile_communication_overhead
from panther.errors import MissingExtraError, ShapeError, install_command

pytestmark = pytest.mark.distributed


def test_every_operation_at_every_size():
    def rank():
        with redirect_stdout(StringIO()) as out:
            profile = profile_communication_overhead([1000, 4096], repetitions=2)
        return profile, str(profile), out.getvalue()

    (first, report, shown), (second, _, silent), (third, _, silent_too) = on_ranks(rank, 3)
    assert (shown, silent, silent_too) == (f"Communication Profiling Results:\n{report}\n", "", "")
    assert first == second == third  # the slowest rank's times, everywhere
    assert [(row.operation, row.message_bytes) for row in first.timings] == [
        (name, size)
        for name in ("all_gather", "all_reduce", "broadcast", "reduce_scatter")
        for size in (1008, 4104)  # multiples of 4 bytes for each of 3 ranks
    ]
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3}
    for row in first.timings:
        assert row.time_ms > 0
        assert row.algorithm_bandwidth_gb_s == pytest.approx(row.message_bytes / row.time_ms / 1e6)
        ratio = row.bus_bandwidth_gb_s / row.algorithm_bandwidth_gb_s
        assert ratio == pytest.approx(factors.get(row.operation, 1.0))
    assert report.splitlines()[0] == "3 ranks, gloo"
    assert len(first.utilization) == 3
    assert all(0 <= share <= 1 for share in first.utilization)
    shares = ", ".join(f"{share:.0%} on rank {rank}" for rank, share in enumerate(first.utilization))
    assert report.splitlines()[10:] == [f"utilization: {shares}"]


def test_the_utilization_in_words():
    def words(*shares):
        return str(CommunicationProfile(len(shares), "nccl", (), shares)).splitlines()[-1]

    assert words(0.5, 0.25) == "utilization: 50% on rank 0, 25% on rank 1"
    assert words(0.5, math.nan) == "utilization: 50% on rank 0, nan% on rank 1"
    assert words(*[0.5] * 16, 0.1, 0.9).endswith("50% on rank 15, 10% to 90% on all")
    assert words(math.nan).endswith(f"nvidia-ml-py is missing: run {install_command('gpu')}")


def test_without_the_package_for_gpus_the_times_remain(monkeypatch):
    def rank():
        def missing(self):
            raise MissingExtraError("nvidia-ml-py is not installed")

        monkeypatch.setattr(DeviceUtilization, "__enter__", missing)
        profile = profile_communication_overhead([64], repetitions=1, show=False)
        return len(profile.timings), [math.isnan(share) for share in profile.utilization]

    assert on_ranks(rank, 2, fresh=True) == [(4, [True, True])] * 2


def test_one_rank_and_bad_input(capsys):
    def rank():
        with pytest.raises(ShapeError, match="message_sizes=0 must be at least 1"):
            profile_communication_overhead([0])
        for sizes in (1024, "1024", []):
            with pytest.raises(TypeError, match="must be a list of sizes in bytes, such as"):
                profile_communication_overhead(sizes)
        return {row.operation for row in profile_communication_overhead([64], repetitions=1, show=False).timings}

    assert on_ranks(rank, 1) == [{"all_gather", "all_reduce", "broadcast", "reduce_scatter"}]
    assert profile_communication_overhead().timings == ()
    assert capsys.readouterr().out == (
        "There is no process group, so there is no communication to profile: call panther.distributed.init() first.\n"
    )
