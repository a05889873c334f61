"""Compare what was measured with what ``kernels/ops/_crossover.py`` predicts."""

__all__ = ["contradictions"]

import re
from collections.abc import Iterator, Mapping, Sequence

from panther.kernels.ops._crossover import PATHS, choose_path

# A path has to be faster than the predicted one by this factor, so that noise contradicts nothing.
_FACTOR = 1.05
_SKETCHED_CASE = re.compile(r"(\d+)x(\d+) R (\d+) batch (\d+)")

Row = Mapping[str, str]


def contradictions(rows: Sequence[Row], *, triton: bool) -> Iterator[str]:
    """Yield a sentence for each prediction that the measured rows contradict.

    Args:
        rows: Rows of the table, see ``report.COLUMNS``.
        triton: Whether the Triton kernels ran, as for ``choose_path``.
    """
    keys = ("case", "dtype", "precision", "direction", "mode")
    problems: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row["section"] == "sklinear" and row["status"] == "measured":
            problems.setdefault(tuple(row[key] for key in keys), {})[row["alternative"]] = float(row["time_us"])
    for facts, times_us in problems.items():
        match = _SKETCHED_CASE.fullmatch(facts[0])
        if match is None:
            continue
        rank, batch = int(match[3]), int(match[4])
        chosen = choose_path(batch, rank, triton=triton)
        for suffix in ("", ", packed"):
            paths_us = {path: times_us[path + suffix] for path in PATHS if path + suffix in times_us}
            if chosen not in paths_us:
                continue
            fastest = min(paths_us, key=paths_us.__getitem__)
            if paths_us[chosen] > _FACTOR * paths_us[fastest]:
                call = ", ".join(word for word in facts if word) + suffix
                yield (
                    f"{call}: choose_path takes {chosen}, {paths_us[chosen]:.4g} us, and {fastest} takes "
                    f"{paths_us[fastest]:.4g} us"
                )
