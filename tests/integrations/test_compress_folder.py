"""A folder of transformers that is compressed part by part: the same folder as from memory, within its memory."""

import copy
import errno
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import panther as pr
from panther.compression.streaming import spool
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError, FormatError
from panther.files.writer import hold_lock
from panther.nn.io import save_compressed

transformers = pytest.importorskip("transformers")
compress_module = importlib.import_module("panther.integrations.folders.compress")

SIZES = {
    "vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip
T5 = {"vocab_size": 120, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
GEMMA = {
    **SIZES, "num_hidden_layers": 4, "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8,
    "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "bert": ("BertModel", "BertConfig", SIZES),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SIZES, "num_local_experts": 3, "num_key_value_heads": 2},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    # Its last blocks use the keys and values of earlier ones, which the model passes to them in a dictionary.
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA),
    "albert": ("AlbertModel", "AlbertConfig", {**SIZES, "embedding_size": 24}),
}


def saved_model(kind, folder, **options):
    name, config, sizes = KINDS[kind]
    torch.manual_seed(0)
    with_ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **with_ends))
    model = model if kind == "mixtral" else model.double()  # its grouped products know no float64
    model.save_pretrained(folder, **options)
    (folder / "vocab.txt").write_text("word")
    return model.eval()


def token_batches(kind, count=6):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, 120, (4, 15), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][0, 11:] = 0
        if kind == "t5":
            batch["decoder_input_ids"] = torch.randint(3, 120, (4, 9), generator=generator)
        batches.append(batch)
    return batches


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_that_of_compression_in_memory(kind, tmp_path):
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    model = saved_model(kind, source, max_shard_size="100KB")
    options = {"bits": 5, "calibration": token_batches(kind), "forms": ["int4", "int8", "low_rank"], "seed": 0}
    report = pr.compress_folder(source, target, **options)
    expected = pr.compress(model, measure_speed=False, allow_slower=True, **options)
    loaded = pr.from_pretrained(target)
    assert [layer.form for layer in report.layers] == [layer.form for layer in expected.layers]
    assert report.measured_error == pytest.approx(expected.measured_error, rel=1e-6 if kind != "mixtral" else 1e-3)
    assert report.bytes_after == expected.bytes_after
    layers = {layer.names: layer for layer in report.layers}
    for other in expected.layers:
        layer = layers[other.names]
        assert layer.predicted_error == pytest.approx(other.predicted_error, rel=1e-3)
        assert layer.measured_error == pytest.approx(other.measured_error, rel=1e-3)
    state = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        if kind == "mixtral":
            close = torch.isclose(tensor.double(), state[name].double(), rtol=1e-2, atol=1e-3)
            assert close.double().mean() >= 0.99
        else:
            torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)
    assert {path.name for path in target.iterdir()} >= {"vocab.txt", "README.md", "config.json", "panther.json"}
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    auto = getattr(transformers, KINDS[kind][0]).from_pretrained(target).eval()
    batch = {name: tensor.clone() for name, tensor in options["calibration"][0].items()}
    with torch.no_grad():
        first, second = (each(**copy.deepcopy(batch))[0] for each in (auto, model))
    size = second.abs().max()
    torch.testing.assert_close(first, second, rtol=0, atol=size * {"mixtral": 1e-2, "gemma4": 1e-4}.get(kind, 1e-7))


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    source, target, full = tmp_path / "source", tmp_path / "target", tmp_path / "full"
    saved_model("bert", source, max_shard_size="100KB")
    full.mkdir()
    (full / "model.safetensors").write_text("another model")
    options = {"calibration": token_batches("bert"), "bits": 5}
    with pytest.raises(CompressionError, match="full is not empty, and might hold another model"):
        pr.compress_folder(source, full, **options)
    with pytest.raises(CompressionError, match=r"there is no folder .*missing for what is kept on disk"):
        pr.compress_folder(source, target, scratch_dir=tmp_path / "missing", **options)
    with pytest.raises(ValueError, match="heal needs the whole model in memory"):
        pr.compress_folder(source, target, heal=pr.HealConfig(), **options)
    with pytest.raises(ValueError, match="method='svd' needs no batches"):
        pr.compress_folder(source, target, budget=0.5, calibration=None, method="svd")
    with pytest.raises(FormatError, match="there is no folder"):
        pr.compress_folder(tmp_path / "nothing", target, **options)
    with pytest.raises(CompressionError, match="smallest feasible bits"):
        pr.compress_folder(source, target, calibration=options["calibration"], bits=1.5)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / sorted(set(index["weight_map"].values()))[1]).unlink()
    with pytest.raises(FormatError, match="missing"):
        pr.compress_folder(source, target, **options)
    assert not target.exists()
    assert (full / "model.safetensors").read_text() == "another model"


class Killed(BaseException):
    """The end of a process; what it has written stays as it is."""


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_that_ended_in_the_middle_continues(tmp_path, monkeypatch):
    source, target, expected = tmp_path / "source", tmp_path / "target", tmp_path / "expected"
    saved_model("bert", source)
    options = {"bits": 5, "calibration": token_batches("bert"), "forms": "int4", "seed": 0}
    first = pr.compress_folder(source, expected, **options)
    write, errors = Spool.write, [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), Killed()]
    for error in errors:

        def failing(self, name, value, error=error):
            if name.startswith("fit-") and name.endswith("-3"):
                if not isinstance(error, OSError):
                    raise error
                with monkeypatch.context() as patch:
                    patch.setattr(spool, "bytes_of", lambda tensor: raising(error))
                    write(self, name, value)
            write(self, name, value)

        monkeypatch.setattr(Spool, "write", failing)
        with pytest.raises((CompressionError, KeyboardInterrupt, Killed)):
            pr.compress_folder(source, target, **options)
        assert [path.name[:9] for path in target.iterdir()] == [".panther-"]
    monkeypatch.setattr(Spool, "write", write)
    (scratch,) = target.iterdir()
    with (scratch / "lock").open("wb") as lock:
        hold_lock(lock.fileno())
        with pytest.raises(CompressionError, match=f"another process compresses a model to {target}"):
            pr.compress_folder(source, target, **options)
    with pytest.raises(CompressionError, match=r"with bits 5, and now it is 6: give what that run had, or remove"):
        pr.compress_folder(source, target, **{**options, "bits": 6})
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "save_compressed", lambda *args: (save_compressed(*args), raising(Killed())))
        with pytest.raises(Killed):  # at the end, when the target has its files
            pr.compress_folder(source, target, **options)
    assert (target / "config.json").exists()
    config = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(config.replace(b"gelu", b"relu"))
    with pytest.raises(CompressionError, match=rf"with source {source} with files .*, and now it is {source} with"):
        pr.compress_folder(source, target, **options)
    (source / "config.json").write_bytes(config)  # of new times, and the old contents
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "_remove", lambda folder: raising(Killed()))
        with pytest.raises(Killed):  # when the target is complete
            pr.compress_folder(source, target, **options)
        patch.setattr(compress_module, "mapped_from_pretrained", None)  # nothing is compressed again
        with pytest.raises(Killed):
            pr.compress_folder(source, target, **options)
    next(scratch.glob("journal-*")).unlink()  # as if the process had been killed while it removed the files
    assert pr.compress_folder(source, target, **options).layers == first.layers
    assert contents(target) == contents(expected)
    with pytest.raises(CompressionError, match="is not empty, and might hold another model"):
        pr.compress_folder(source, target, **options)


def test_an_error_of_the_call_leaves_nothing(tmp_path, monkeypatch):
    source, target, scratch = tmp_path / "source", tmp_path / "target", tmp_path / "scratch"
    saved_model("bert", source)
    scratch.mkdir()
    options = {"bits": 5, "calibration": token_batches("bert"), "forms": "int4", "seed": 0, "scratch_dir": scratch}
    with pytest.raises(CompressionError, match="ValueError: no"):
        pr.compress_folder(source, target, forward_fn=lambda model, batch: raising(ValueError("no")), **options)
    assert not target.exists()
    assert not list(scratch.iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no owners of files")
def test_a_folder_that_others_can_write_to_is_not_read(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    saved_model("bert", source)
    options = {"bits": 5, "calibration": token_batches("bert"), "forms": "int4", "seed": 0}
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "mapped_from_pretrained", lambda source, folder: raising(Killed()))
        with pytest.raises(Killed):
            pr.compress_folder(source, target, **options)
    (scratch,) = target.iterdir()
    scratch.chmod(0o777)
    with pytest.raises(CompressionError, match="a folder of yours that nobody else can write to"):
        pr.compress_folder(source, target, **options)
    scratch.chmod(0o700)
    pr.compress_folder(source, target, **options)


@pytest.mark.parametrize(
    "count", [pytest.param(4, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.torture)]
)
def test_runs_that_are_killed_at_random_moments(count, tmp_path):
    script = Path(__file__).parents[1] / "support" / "folder_kills.py"
    command = [sys.executable, str(script), str(tmp_path), str(count), "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["kills"] >= count


def raising(error):
    raise error


MEMORY = """
import sys, threading, time, warnings
import torch, transformers
import panther as pr, panther.integrations.transformers, panther.compression.streaming.runner

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
warnings.simplefilter("ignore")
before = peak = anonymous()
ended = threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous())

threading.Thread(target=watch).start()
generator = torch.Generator().manual_seed(0)
batches = [{"input_ids": torch.randint(36000, (2, 32), generator=generator)} for _ in range(5)]
options = {"calibration": batches, "forms": "int8", "bits": 8.3, "seed": 0}
report = pr.compress_folder(sys.argv[1], sys.argv[2], progress=False, **options)
ended.set()
print(peak - before, report.bytes_before, report.bytes_after)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_a_model_of_half_a_gigabyte_takes_300_megabytes(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 36000, "hidden_size": 768, "num_hidden_layers": 10, "num_attention_heads": 12}
    config = transformers.LlamaConfig(**sizes, intermediate_size=1536)
    model = transformers.LlamaForCausalLM(config)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 0.45e9
    model.save_pretrained(tmp_path / "source")
    del model
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "source"), str(tmp_path / "target")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr
    peak, dense_bytes, compressed_bytes = map(float, result.stdout.split())
    assert peak < 300
    assert compressed_bytes < dense_bytes / 3.8
