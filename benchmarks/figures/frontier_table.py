"""Write the tables of the page on compression, after its trials: ``python -m benchmarks.figures.frontier_table``.

They go to docs/benchmarks/frontier.inc, which the page includes: what was reached of aims that were set before, rows by
method, and times of whole models. A row is of the CPU that computed the table last, if it has it; its name is in the
row. Times have a table for each CPU.
"""

__all__ = ["aims_table", "cpu_name", "quality_table", "short", "speed_table"]

import csv
import io

from benchmarks.figures.layout import by_cpu, merged
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks" / "frontier.inc"
TITLES = {
    "encoder": "all-MiniLM-L6-v2",
    "encoder-3": "paraphrase-MiniLM-L3-v2",
    "smollm2": "SmolLM2-135M, whose weights come rounded to 4 bits: loss in nats a token",
    "images": "EfficientNet-lite0 on photographs: correlation of the logits",
}

Rows = list[dict[str, str]]
AIMS = (  # row, column, least, what it is called
    ("panther, 6 bits", 0.9985, "6 bits a weight"),
    ("panther, 4.75 bits", 0.995, "4.75 bits a weight"),
    ("panther, 4.25 bits", 0.990, "4.25 bits a weight"),
    ("panther, 3.75 bits", 0.977, "3.75 bits a weight"),
    ("panther, 3.25 bits", 0.957, "3.25 bits a weight"),
    ("panther + healing, 3.25 bits", 0.985, "3.25 bits a weight, healed"),
    ("low rank, 75% of the numbers", 0.975, "low rank, 75 % of the numbers"),
    ("low rank, 50% of the numbers", 0.93, "low rank, 50 %"),
    ("pivot rows, 50% of the numbers", 0.93, "low rank by pivot rows, 50 %"),
    ("pivot rows + healing, 50% of the numbers", 0.975, "low rank by pivot rows, 50 %, healed"),
    ("pivot rows + healing, 25% of the numbers", 0.90, "low rank by pivot rows, 25 %, healed"),
)
FASTER = (  # form, beside which, least ratio at batch 32, what it is called
    ("low rank, 50% of the numbers", "float32", 1.5, "low rank, 50 %, times as fast as float32 at batch 32"),
    ("low rank, int8, 4.25 bits", "GPTQ, int8", 1.0, "low rank in int8, times as fast as its int8 weights"),
    (
        "low rank, int8, 4.25 bits",
        "int8, torch dynamic",
        1.0,
        "low rank in int8, times as fast as torch's dynamic int8",
    ),
)


def quality_table(model: str, rows: Rows) -> str:
    """Return what each row of a model keeps, and what compressing took."""
    kinds = [name for name in ("correlation", "agreement", "loss") if name in rows[0]]
    titles = {"correlation": "Correlation", "agreement": "Same class", "loss": "Loss"}
    head = ["Method", "Asked for", "Bits a weight", *(titles[kind] for kind in kinds), "CPU s", "Peak MB"]
    head.append("CPU")
    body = [
        [
            *(row["method"], row["size"], f"{float(row['bits']):.2f}"),
            *(f"{float(row[kind]):.4f}" for kind in kinds),
            *(short(row[column]) for column in ("cpu_s", "peak_mb")),
            cpu_name(row["device"]),
        ]
        for row in rows
    ]
    return _table(f"{TITLES[model]}: what is kept, and what compressing took", head, body)


def speed_table(model: str, device: str, rows: Rows) -> str:
    """Return the latency of each form of a model on a CPU relative to float32, by size of the input, and its memory."""
    sizes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    head = ["Form", "Stored MB", "Memory MB", *(f"{batch} x {tokens}" for batch, tokens in sizes)]
    body = []
    for form in dict.fromkeys(row["form"] for row in rows):
        own = {(row["batch"], row["tokens"]): row for row in rows if row["form"] == form}
        times = [
            f"{short(row['time_ms'])} ms" if form == "float32" else row["x float32"] for row in (own[s] for s in sizes)
        ]
        body.append([form, short(own[sizes[-1]]["stored_mb"]), short(own[sizes[-1]]["memory_mb"]), *times])
    title = f"{TITLES[model].partition(':')[0]}, {cpu_name(device)}: times as fast as float32, by batch x tokens"
    return _table(title, head, body)


def aims_table(rows: Rows, speeds: dict[str, Rows]) -> str:
    """Return which aims were reached by the first encoder; ``speeds`` are the rows of each CPU."""
    found = {f"{row['method']}, {row['size']}": row for row in rows}
    body = []
    for name, minimum, title in AIMS:
        if name in found:
            reached = float(found[name]["correlation"])
            body.append([title, f"{minimum:g}", f"{reached:.4f}", "yes" if reached >= minimum else "no"])
    for form, beside, minimum, title in FASTER:
        for device, own in speeds.items():
            # Medians over the rounds of each round's ratio, as in the tables of times; a ratio of two medians differs.
            speed = {(row["form"], row["batch"], row["tokens"]): float(row["x float32"]) for row in own}
            for tokens in sorted({int(row["tokens"]) for row in own if row["batch"] == "32"}):
                at = ("32", str(tokens))
                if (form, *at) in speed:
                    ratio = speed[form, *at] / speed[beside, *at]
                    verdict = "yes" if ratio >= minimum else "no"
                    body.append(
                        [f"{title}, {tokens} tokens, {cpu_name(device)}", f"{minimum:g}", f"{ratio:.2f}", verdict]
                    )
    return _table("all-MiniLM-L6-v2: what was reached", ["", "Aim", "Measured", "Reached"], body)


def short(value: str) -> str:
    """Return a number with three significant digits, and with all digits before the point."""
    return "" if not value else f"{float(value):.3g}" if float(value) < 1000 else f"{float(value):,.0f}"


def cpu_name(device: str) -> str:
    """Return the name of a CPU without trademarks."""
    return device.replace("(R)", "").removesuffix(" Processor")


def _table(title: str, head: list[str], body: list[list[str]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([head, *body])
    lines = [".. csv-table::", "   :header-rows: 1", "", *(f"   {line}" for line in table.getvalue().splitlines())]
    folded = [f"   {line}".rstrip() for line in lines]  # what is drawn can be unfolded
    return "\n".join([f".. dropdown:: {title}", "", *folded]) + "\n\n"


if __name__ == "__main__":
    names = sorted({path.name.partition("-cpu-")[0] for path in RESULTS.glob("frontier-*-cpu-*.csv")})
    speeds, rows = ([name for name in names if ("-speed" in name) is speed] for speed in (True, False))
    times = {name.removeprefix("frontier-speed-"): by_cpu(name, 1) for name in speeds}
    tables = {name.removeprefix("frontier-"): merged(name, 1, ("method", "size"))[1] for name in rows}
    parts = [".. Written by python -m benchmarks.figures.frontier_table.\n\n"]
    if "encoder" in tables:
        parts.append(aims_table(tables["encoder"], times.get("encoder", {})))
    for model in TITLES:
        if model in tables:
            parts.append(quality_table(model, tables[model]))
        parts += [speed_table(model, device, own) for device, own in times.get(model, {}).items()]
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(PAGE)
