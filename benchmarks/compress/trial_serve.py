"""A sentence encoder from its package to 1,000 clients: the figures of the gallery's first tutorial.

The script docs/gallery/compress/serve_an_encoder.py is run whole, and its figures are written: for the original and the
compressed model, with torch and with onnxruntime, the size of the file, the memory of a server after loading and at its
peak, its CPU time for a request, and percentiles of the latency of requests that come at once. *first* and *ten* are
the shares of queries whose text is found first, or among the first ten, with torch. *cosine* is the mean cosine of the
vectors that the server answers with those of the original. Latencies are wall time, for an idle machine only.
"""

__all__ = ["run"]

import argparse
import os
import runpy
from typing import Any

from benchmarks.harness import ROOT, figure, print_table, write_csv

_SCRIPT = ROOT / "docs" / "gallery" / "compress" / "serve_an_encoder.py"


def run(quick: bool) -> list[dict[str, Any]]:
    """Run the tutorial, and return a row for each server."""
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ.pop("PANTHER_DOCS_QUICK", None)
    if quick:
        os.environ["PANTHER_DOCS_QUICK"] = "1"
    try:
        values = runpy.run_path(str(_SCRIPT))
    finally:
        os.environ.pop("PANTHER_DOCS_QUICK", None)
    rows = []
    for name, measured in values["rows"].items():
        model, _, engine = name.partition(", ")
        quality = {} if engine else dict(zip(("first", "ten"), values["quality"][model], strict=True))
        cosine = (values["vectors"][name] * values["vectors"]["original"]).sum(1).mean()
        is_compressed = model == "compressed"
        rows.append(
            {
                "model": model,
                "engine": engine or "torch",
                "file_mb": figure(values["files"][name] / 1e6),
                **{key: round(float(quality[key]), 4) if quality else "" for key in ("first", "ten")},
                "cosine": round(float(cosine), 4),
                "compress_cpu_s": figure(values["seconds"]) if is_compressed and not engine else "",
                "rel_error": figure(values["report"].measured_error) if is_compressed and not engine else "",
                **{key: figure(value) for key, value in measured.items()},
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random encoder, nothing written")
    arguments = parser.parse_args()
    servers = run(arguments.quick)
    print_table(servers)
    if not arguments.quick:
        write_csv("serve", servers, device="cpu")
