"""Compare what was measured with what ``kernels/ops/_crossover.py`` predicts."""

__all__ = ["contradictions"]

import re
from collections.abc import Iterator, Mapping, Sequence

from panther.kernels.ops._crossover import HOST_US, PATHS, choose_path

# A path has to be faster than the predicted one by this factor, so that noise contradicts nothing.
_FACTOR = 1.05
_HOST_FACTOR = 1.5
_SKETCHED_CASE = re.compile(r"(\d+)x(\d+) R (\d+) batch (\d+)")
_HOST_CASE = re.compile(r"SKLinear, 256 x 256, R = 16(?:, path (\w+))?")

Row = Mapping[str, str]


def contradictions(rows: Sequence[Row], *, triton: bool) -> list[str]:
    """Return a sentence for each prediction that the measured rows contradict.

    Args:
        rows: Rows of the table, see ``report.COLUMNS``.
        triton: Whether the Triton kernels ran, as for ``choose_path``.
    """
    return [*_path_contradictions(rows, triton), *_host_contradictions(rows)]


def _path_contradictions(rows: Sequence[Row], triton: bool) -> Iterator[str]:
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


def _host_contradictions(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        match = _HOST_CASE.fullmatch(row["case"]) if row["section"] == "host" else None
        if match is None or (row["status"], row["dtype"], row["direction"]) != ("measured", "float32", "no gradients"):
            continue
        path = match[1] or choose_path(1, 16, triton=True)
        measured_us, predicted_us = float(row["time_us"]), HOST_US[path]
        if not predicted_us / _HOST_FACTOR <= measured_us <= predicted_us * _HOST_FACTOR:
            yield f"HOST_US[{path!r}] is {predicted_us:g}, and the host takes {measured_us:g} us"
