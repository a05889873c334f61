from contextlib import redirect_stdout
from io import StringIO

import pytest
from ranks import on_ranks

from panther.distributed import profile_communication_overhead
from panther.errors import ShapeError

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
    assert len(report.splitlines()) == 10


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
