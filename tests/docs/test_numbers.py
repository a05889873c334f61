"""Numbers on the first pages are those of the committed results."""

import csv
import math
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENCODER = "frontier-encoder-cpu-intel-xeon-threads-1"
FILES = "files-encoder-cpu-intel-xeon-2.50ghz-threads-1"
PEERS = "files-peers-encoder-cpu-intel-xeon-2.50ghz-threads-1"
WITH_EMBEDDINGS = "files-peers-encoder-cpu-amd-epyc-threads-1"
ONNX = "onnx-cpu-amd-epyc-threads-1"
SPEED = "frontier-speed-encoder-cpu-amd-epyc-threads-1"
TEXT = "scratch-text-transformer-cpu-amd-epyc-threads-1"
PACKED = "frontier-speed-encoder-packed-cpu-intel-xeon-threads-1"
DECODER = "quantized-decoder-cpu-amd-epyc-threads-1"
ON_AMD = "frontier-encoder-cpu-amd-epyc-threads-1"


@cache
def rows(name):
    with (ROOT / f"benchmarks/results/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def values(name, column, **wanted):
    """The column's values in rows that have these values, at least one."""
    found = [float(row[column]) for row in rows(name) if all(row[key] == value for key, value in wanted.items())]
    assert found, (name, column, wanted)
    return found


def one(name, column, **wanted):
    (found,) = values(name, column, **wanted)
    return found


def mean_loss(form):
    """Mean over seeds at the rate that was chosen, by the first seed and the half of the data that chooses."""
    runs = [r for r in rows(TEXT) if (r["optimizer"], r["form"], r["equal"]) == ("Muon", form, "steps")]
    rate = min((float(r["chosen_by"]), r["lr"]) for r in runs if r["seed"] == "0")[1]
    losses = [float(r["loss"]) for r in runs if r["lr"] == rate]
    assert len(losses) == 3
    return sum(losses) / 3


LAYERS = [f"layers-{task}-{width}" for task in ("characters", "images", "words") for width in (192, 512)]


def loss_of_layers(method, equal="steps", trial=LAYERS[0]):
    """Mean over three seeds of a kind of layers; of a sweep, one rate has all seeds."""
    losses = {}
    for row in rows(f"{trial}-cpu-amd-epyc-threads-1"):
        if (row["method"], row["equal"]) == (method, equal):
            losses.setdefault(row["lr"], []).append(float(row["loss"]))
    (seeds,) = [values for values in losses.values() if len(values) == 3]
    return sum(seeds) / 3


def loss_under_muon(kind):
    """The loss of the first seed at the rate that is chosen."""
    wanted = {"method": f"{kind}, a quarter, Muon", "equal": "steps", "seed": "0"}
    runs = [row for row in rows(f"{LAYERS[0]}-cpu-amd-epyc-threads-1") if wanted.items() <= row.items()]
    return float(min(runs, key=lambda row: float(row["chosen_by"]))["loss"])


def time_beside_monarch():
    """Time of a step with SKLinear and with pairs, beside Monarch layers: their mean."""
    name = f"{LAYERS[0]}-speed-cpu-amd-epyc-threads-1"
    times = [one(name, "x_adamw", method=f"{kind}, a quarter, Muon") for kind in ("sparse", "pair", "Monarch")]
    assert abs(times[0] - times[1]) < 0.1 * times[0]
    return (times[0] + times[1]) / 2 / times[2]


def lines_of_layers(first, second, equal):
    """In how many of twelve lines, three tasks, two widths and two sizes, the first kinds are ahead of the others."""
    lines = [(trial, size) for trial in LAYERS for size in ("a quarter", "a tenth")]
    assert len(lines) == 12
    return sum(
        max(loss_of_layers(f"{kind}, {size}", equal, trial) for kind in first)
        < min(loss_of_layers(f"{kind}, {size}", equal, trial) for kind in second)
        for trial, size in lines
    )


def fewer_bytes(case):
    dense, sketched = (
        sum(values("distributed-bytes-cpu-amd-epyc-threads-1", "bytes", case=case, layer=layer))
        for layer in ("nn.Linear", "SKLinear")
    )
    return dense / sketched


def speeds(form):
    """How many times as fast as float32 the encoder is, on both processors."""
    names = [SPEED, "frontier-speed-encoder-cpu-intel-xeon-threads-1"]
    return [value for name in names for value in values(name, "x float32", form=form)]


def packed_beside_dense():
    """Times of the encoder at 4.5 bits, relative to dense ones, both in bfloat16, by sentences in a batch."""
    dense, packed = (values(PACKED, "x float32", form=form) for form in ("bfloat16", "4.5 bits, bfloat16"))
    return [theirs / ours for ours, theirs in zip(packed, dense, strict=True)]


def attention(length):
    name = "attention-cpu-amd-epyc-threads-1"
    return values(name, "x better of both", length=length, causal="False", attention="hermite", memory="default")


def slow_link(run, column, link="100 Mbit/s"):
    return one("link-runs-cpu-amd-epyc-threads-1", column, link=link, run=run) / 1e3


def predicted(name, column, within=0.3, **place):
    """How many predicted steps are within 30 % of the measured ones."""
    return sum(abs(ratio - 1) <= within for ratio in values(name, column, **place))


def correlation(method, size):
    """The correlation of a compressed encoder with the original."""
    return one(ENCODER, "correlation", method=method, size=size)


def pairs(name, method):
    """One pair of texts in how many is ranked differently from the original encoder."""
    return math.pi / math.acos(one(name, "correlation", method=method))  # see docs/benchmarks/compress.rst


def retrieval_mb(method):
    return one("tune-retrieval-cpu-amd-epyc-threads-1", "size_mb", method=method)


def by_time():
    return values(SPEED, "x float32", form="panther, by time, 1.5 times as fast")


def smollm2(column):
    return one("linearize-smollm2-cpu-amd-epyc-threads-1", column, length="4096", window="128")


def convolution():
    place = {"in": "64", "out": "128", "kernel": "3", "size": "64", "low_rank": "8", "mode": "forward"}
    return one("conv-cpu-amd-epyc-threads-1", "x Conv2d", layer="SKConv2d NCHW", **place)


def pivoted_qr():
    place = {"m": "16384", "n": "512", "dtype": "float64", "condition": "1e10", "method": "panther gamma=1.25"}
    return one("cqrrpt-cpu-amd-epyc-threads-2", "x scipy pivoted", **place)


def svd():
    place = {"spectrum": "i^-0.3", "method": "panther n_iter=auto"}
    return one("randomized-svd-cpu-amd-epyc-threads-1", "x svd_lowrank niter=2", **place)


def pair_of_convolutions():
    place = {"in": "64", "out": "128", "kernel": "3", "size": "64", "low_rank": "8", "mode": "forward"}
    return one("conv-pair-cpu-amd-epyc-threads-1", "x pair of nn.Conv2d", layer="SKConv2d", **place)


def least_squares():
    place = {"case": "200000 x 1000 float64, condition 1e+08", "method": "panther"}
    return one("lstsq-cpu-amd-epyc-threads-2", "x torch gels", **place)


def sparse_sketch():
    theirs, ours = (
        one("sketch-simple-cpu-amd-epyc-threads-1", "time_ms", d="1024", sketch=sketch)
        for sketch in ("scikit-learn, SparseRandomProjection", "SJLT, vec_nnz 4")
    )
    return theirs / ours


def bytes_beside_the_pair(case):
    ours, pair = (
        sum(values("distributed-bytes-cpu-amd-epyc-threads-1", "bytes", case=case, layer=layer))
        for layer in ("SKLinear", "pair of nn.Linear")
    )
    return ours / pair


STEPS, STEPS_BETWEEN = "advisor-cpu-amd-epyc-threads-1", "advisor-link-cpu-amd-epyc-threads-1"
# Words with the number in braces, the number, and digits behind the point, by page. Where another way is compared, the
# words name it, and the number is from a column or a row of its name.
WHICH_TOOL = [
    ("keeps 99 % of its metric takes {} MB", lambda: retrieval_mb("tuned"), 2),
    ("of three calls of ``pr.compress`` takes {} MB", lambda: retrieval_mb("compress, 12.5% of the bytes"), 2),
    ("keeps a correlation of {} with the original", lambda: correlation("panther", "4.25 bits"), 3),
    ("one width for all layers keeps {}", lambda: correlation("GPTQ", "int4"), 3),
    ("Rounded to 8 bits it keeps {}", lambda: correlation("nearest", "int8"), 4),
    ("to 4 bits only {}", lambda: correlation("nearest", "int4"), 3),
    ("The encoder is {} to 3.7 times", lambda: min(speeds("bfloat16")), 1),
    ("to {} times as fast.", lambda: max(speeds("bfloat16")), 1),
    ("The encoder is {} to 2.8 times", lambda: min(speeds("int8, torch dynamic")), 1),
    ("to {} times as fast and keeps 0.941", lambda: max(speeds("int8, torch dynamic")), 1),
    ("The encoder is {} to 1.59", lambda: min(by_time()), 2),
    ("to {} times as fast and keeps 0.940", lambda: max(by_time()), 2),
    ("times as fast and keeps {}.", lambda: one(ON_AMD, "correlation", method="panther, by time"), 3),
    ("at 4,096 positions is {} times as fast", lambda: smollm2("x original"), 2),
    ("its loss is {} % higher", lambda: 100 * smollm2("loss_ratio") - 100, 0),
    ("transformer of text has a loss of {}, and", lambda: mean_loss("dense, narrower"), 3),
    ("a sketched one of as many bytes {}", lambda: mean_loss("sketched"), 3),
    ("of characters has a loss of {}, SKLinear", lambda: loss_under_muon("Monarch"), 3),
    ("SKLinear {} and plain", lambda: loss_under_muon("sparse"), 3),
    ("low-rank layers {}. The last two", lambda: loss_under_muon("pair"), 3),
    ("The last two take {} of the time", time_beside_monarch, 2),
    ("A step sends {} times fewer bytes than dense", lambda: fewer_bytes("data parallel, ddp"), 1),
    ("pair sends {} times fewer bytes than of a dense", lambda: fewer_bytes("tensor parallel, a pair of layers"), 0),
    ("it is {} times as fast as a pair of nn.Conv2d", pair_of_convolutions, 2),
    ("and {} times as fast as nn.Conv2d", convolution, 1),
    ("{} times as fast as softmax attention at 4,096", lambda: attention("4096")[0], 1),
    ("it is slower, {} times", lambda: attention("256")[0], 2),
    ("k = 100: {} times as fast", svd, 2),
    ("16384 x 512: {} times", pivoted_qr, 2),
    ("1e8: {} times as fast as torch's gels", least_squares, 1),
    ("to 1024 rows: {} times as fast as scikit-learn's", sparse_sketch, 1),
]
ADVISOR = [
    ("the two cores, {} of 12", lambda: predicted(STEPS, "fastest_ratio", processes="4"), 0),
    ("Over a slow link {} of 36", lambda: predicted(STEPS_BETWEEN, "fastest_ratio"), 0),
]
FIRST_PAGES = [
    ("A sentence encoder of {} MB becomes", lambda: one(FILES, "file_mb", method="float32"), 1),
    ("becomes a file of {} MB", lambda: one(FILES, "file_mb", method="panther, 4.5 bits"), 1),
    ("a correlation of {} with those of the", lambda: one(FILES, "correlation", method="panther, 4.5 bits"), 3),
    ("its layers keeps {} in", lambda: one(WITH_EMBEDDINGS, "correlation", method="GPTQ+embeddings, 4 bits"), 3),
    ("in {} MB and", lambda: one(WITH_EMBEDDINGS, "file_mb", method="GPTQ+embeddings, 4 bits"), 1),
    ("MB and {} in", lambda: one(WITH_EMBEDDINGS, "correlation", method="GPTQ+embeddings, 5 bits"), 3),
    ("{} nats", lambda: loss_of_layers("dense"), 3),
    ("MonarchLinear reaches {}", lambda: loss_of_layers("Monarch, a quarter"), 3),
    ("SKLinear {}, pairs", lambda: loss_of_layers("sparse, a quarter"), 3),
    ("pairs of nn.Linear {} and", lambda: loss_of_layers("pair, a quarter"), 3),
    ("narrower dense network {}.", lambda: loss_of_layers("narrower, a quarter"), 3),
    ("network is ahead with {};", lambda: loss_of_layers("narrower, a quarter", "time"), 3),
    ("SKLinear has {} and", lambda: loss_of_layers("sparse, a quarter", "time"), 3),
    ("and the pairs {}", lambda: loss_of_layers("pair, a quarter", "time"), 3),
    ("behind both in {} of 12 lines", lambda: lines_of_layers(("Monarch", "sparse"), ("narrower",), "steps"), 0),
    ("ahead of both in {} after", lambda: lines_of_layers(("narrower",), ("Monarch", "sparse"), "time"), 0),
    ("takes {} s with dense layers", lambda: slow_link("dense, ddp", "step_ms"), 2),
    ("layers and {} s with sketched ones", lambda: slow_link("sketched, ddp", "step_ms"), 2),
    ("shorten both to {} s: the bf16", lambda: slow_link("sketched, ddp, bf16 hook", "step_ms"), 2),
    ("are {} times as fast as torch's gels", least_squares, 1),
    ("is {} times as fast as in bfloat16)", lambda: one(DECODER, "x bfloat16", decoder="4 bits, bfloat16"), 1),
]
README = [
    ("encoder at 4.5 bits takes {} to", lambda: min(packed_beside_dense()), 2),
    ("to {} of the dense time", lambda: max(packed_beside_dense()), 2),
]
LANDING = [
    ("ranks 1 pair in {} differently", lambda: pairs(FILES, "panther, 3.7 bits"), 0),
    ("differently in {} MB", lambda: one(FILES, "file_mb", method="panther, 3.7 bits"), 1),
    ("1 in {} in 13.4 and", lambda: pairs(FILES, "panther, 4.5 bits"), 0),
    ("1 in {} in 23.8", lambda: pairs(FILES, "panther, 8.3 bits"), 0),
    ("bfloat16 1 in {} in 45.4", lambda: pairs(FILES, "bfloat16"), 0),
    ("GPTQ of all layers 1 in {} in 12.0", lambda: pairs(WITH_EMBEDDINGS, "GPTQ+embeddings, 4 bits"), 0),
    ("1 in {} in 14.8", lambda: pairs(WITH_EMBEDDINGS, "GPTQ+embeddings, 5 bits"), 0),
    ("hqq 1 in {} in 30.2", lambda: pairs(PEERS, "hqq, 4 bits"), 0),
    ("hqq 1 in 14 in {},", lambda: one(PEERS, "file_mb", method="hqq, 4 bits"), 1),
    ("torchao int8 1 in {} in 34.8", lambda: pairs(PEERS, "torchao, int8"), 0),
    ("onnxruntime 1 in {} in 15.2", lambda: pairs(ONNX, "MatMulNBits, 4 bits"), 0),
]
QUOTED = [
    *(("docs/start/which-tool.rst", *quoted) for quoted in WHICH_TOOL),
    *(("docs/benchmarks/advisor.rst", *quoted) for quoted in ADVISOR),
    *((page, *quoted) for page in ("docs/index.rst", "README.md") for quoted in FIRST_PAGES),
    *(("README.md", *quoted) for quoted in README),
    *(("docs/index.rst", *quoted) for quoted in LANDING),
]


@pytest.mark.parametrize(
    ("page", "sentence", "number", "digits"), QUOTED, ids=[f"{page}: {sentence}" for page, sentence, _, _ in QUOTED]
)
def test_a_number_is_measured(page, sentence, number, digits):
    content = re.sub(r"\s+", " ", (ROOT / page).read_text())
    assert sentence.format(f"{number():.{digits}f}") in content


@pytest.mark.parametrize(("case", "ratio"), [("data parallel, ddp", 1), ("tensor parallel, a pair of layers", 2)])
def test_messages_beside_those_of_a_pair(case, ratio):
    assert bytes_beside_the_pair(case) == ratio  # "as many as", "twice as many as", "half the bytes"
