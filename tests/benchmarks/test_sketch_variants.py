"""The comparisons of kinds of sketches, and of steps in the backward pass, run with small sizes."""

import pytest

pytestmark = pytest.mark.tool


def test_kinds_of_sketches_and_rules_for_moments_are_compared():
    from benchmarks.train import sketch_variants

    rows = list(sketch_variants.run(sketch_variants.UPDATES[:1], (0,), quick=True))
    assert len({(row["kind"], row["moments"]) for row in rows}) == len(rows) == 7
    assert all(3 < row["loss"] < 5 for row in rows)  # four steps from log(98) on
    assert len({row["state_numbers"] for row in rows}) == 1


def test_the_memory_of_steps_in_the_backward_pass_is_measured():
    from benchmarks.train import step_in_backward

    rows = list(step_in_backward.run(64, 2))
    assert [row["steps"] for row in rows] == ["ordinary", "ordinary", "in the backward pass", "in the backward pass"]
    assert all(row["state_mb"] < rows[0]["state_mb"] for row in rows[1:])
    assert all(row["peak_mb"] > 0 for row in rows)
