"""panther export: what other programs get of a compressed folder."""

import errno
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import waits
from safetensors.torch import load_file

import panther as pr
from panther.cli import main
from panther.files import new_file

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))

def inputs():
    return {"input": torch.randn(3, 40)}

def others():
    return {"x": torch.randn(3, 40)}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS)
    names: dict = {}
    exec(MODELS, names)
    model = names["net"]()
    pr.sketch_layers_(model, pr.SketchConfig(low_rank=2), include=["0"])
    pr.save_compressed(model, tmp_path / "small")
    return model, ["export", "small", "--model", f"{name}:net", "--out", "out"], f"{name}:inputs"


def test_to_torch(folder, capsys):
    model, command, inputs = folder
    assert main([*command, "--to", "torch", "--sample", inputs]) == 0
    assert "model.pt2" in capsys.readouterr().out
    x = torch.randn(5, 40)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load("out/model.pt2").module()(input=x), model(x))


def test_to_linears(folder):
    model, command, _ = folder
    assert main([*command, "--to", "linears"]) == 0
    state, x = load_file("out/model.safetensors"), torch.randn(5, 40)
    assert list(json.loads(Path("out/layers.json").read_text())) == ["0"]
    hidden = x @ state["0.0.weight"].mT @ state["0.1.weight"].mT + state["0.1.bias"]
    with torch.no_grad():
        torch.testing.assert_close(hidden.relu() @ state["2.weight"].mT + state["2.bias"], model(x))


def test_what_cannot_be_exported_is_one_sentence(folder, capsys):
    _, command, sample = folder
    assert main([*command, "--to", "torch"]) == 2
    assert "give --sample" in capsys.readouterr().err
    sample = sample.replace("inputs", "others")
    assert main([*command, "--to", "torch", "--sample", sample]) == 2
    assert (
        f"Sequential does not run on its inputs, which --sample {sample} returns: TypeError" in capsys.readouterr().err
    )
    assert main(["export", "small", "--to", "torch", "--out", "out"]) == 2
    assert "give --model" in capsys.readouterr().err
    assert main([*command, "--to", "linears", "--reader", "vllm"]) == 2
    assert "--reader is for --to compressed-tensors, not for --to linears" in capsys.readouterr().err
    for target in ("linears", "compressed-tensors"):
        assert main([*command, "--to", target, "--sample", sample]) == 2
        assert f"--sample is for --to onnx and torch, not for --to {target}: leave it out" in capsys.readouterr().err
    assert main(["export", "nowhere", "--to", "torch", "--out", "out"]) == 2
    assert "not a folder" in capsys.readouterr().err


FOREIGN = {
    "adapter_config.json": "an adapter of PEFT: load it with its base, call merge_and_unload()",
    "model_index.json": "a pipeline of diffusers: give one of its models",
    "saved_model.pb": "a model of TensorFlow: build it in torch first",
    "words.gguf": "a model of llama.cpp: load it by transformers' from_pretrained",
    "model.onnx": "a model in ONNX already: export the folder that it was made of",
    "model.pt2": "a program of torch.export already",
    "model.safetensors": "holds no config.json: give --model module:function",
}


@pytest.mark.parametrize("target", ["linears", "torch", "compressed-tensors"])
@pytest.mark.parametrize("name", FOREIGN)
def test_folders_of_other_programs_are_named(name, target, tmp_path, capsys):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / name).write_bytes(b"0")
    command = ["export", str(tmp_path / "foreign"), "--to", target, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert FOREIGN[name] in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["linears", "torch", "compressed-tensors"])
def test_a_target_that_exists_is_kept(target, folder, capsys):
    _, command, inputs = folder
    Path("out").mkdir()
    Path("out/model.safetensors").write_bytes(b"mine")
    assert main([*command, "--to", target, "--sample", inputs]) == 2
    assert "--out out is not empty, and might hold another model: give a new folder, or clear it" in (
        capsys.readouterr().err
    )
    assert [(path.name, path.read_bytes()) for path in Path("out").iterdir()] == [("model.safetensors", b"mine")]


@pytest.mark.parametrize("attention", ["RandMultiHeadAttention", "LearnedLinearAttention"])
def test_linear_attention_is_no_plain_layer(attention, tmp_path, monkeypatch, capsys):
    """Its tensors were written, and no program without Panther could use them."""
    monkeypatch.chdir(tmp_path)
    name = f"attention_{tmp_path.name}".replace("-", "_")
    arguments = "16, 2, 8" if attention == "RandMultiHeadAttention" else "2, 8, 8"
    layer = f"pr.nn.{attention}({arguments})"
    script = f"from torch import nn\nimport panther as pr\n\ndef net():\n    return nn.Sequential({layer})\n"
    (tmp_path / f"{name}.py").write_text(script)
    names: dict = {}
    exec(script, names)
    pr.save_compressed(names["net"](), tmp_path / "small")
    assert main(["export", "small", "--model", f"{name}:net", "--to", "linears", "--out", "out"]) == 2
    assert "layer '0' is linear attention, which no plain layer computes: use --to torch" in capsys.readouterr().err
    assert not Path("out").exists()


WORDS, IMAGE = {"vocab_size": 61}, {"image_size": 16, "patch_size": 8}
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TRANSFORMERS = {
    "Bert": ("BertModel", WORDS | SIZES),
    "Llama": ("LlamaModel", WORDS | SIZES | {"num_key_value_heads": 2}),
    "Qwen2": ("Qwen2ForCausalLM", WORDS | SIZES | {"num_key_value_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", WORDS | {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}),
    "T5": ("T5EncoderModel", WORDS | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}),
    "T5 with a decoder": (
        "T5ForConditionalGeneration",
        WORDS
        | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        | {"tie_word_embeddings": False, "decoder_start_token_id": 0},
    ),
    "ViT": ("ViTForImageClassification", SIZES | IMAGE),
}


OUTPUTS = {
    "Bert": ["last_hidden_state", "pooler_output"],
    "Llama": ["last_hidden_state"],
    "Qwen2": ["logits"],
    "GPT2": ["logits"],
    "T5": ["last_hidden_state"],
    "T5 with a decoder": ["logits", "encoder_last_hidden_state"],
    "ViT": ["logits"],
}


def made(transformers, name):
    make, sizes = TRANSFORMERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.split()[0]}Config")(**sizes)
    return getattr(transformers, make)(config).eval()


def sizes_of(values):
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("form", ["low_rank", "int8", "int4"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_to_onnx(name, form, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = made(transformers, name)
    if form == "low_rank":
        pr.sketch_layers_(model, pr.SketchConfig(low_rank=3))
    else:
        pr.compress(model, bits=9, method="svd", forms=form, measure_speed=False, seed=0)
        assert any(isinstance(module, pr.nn.QuantizedLinear) for module in model.modules())
    small, out = tmp_path / "small", tmp_path / "out"
    if name in ("Llama", "GPT2"):
        model.save_pretrained(small)
    else:
        pr.save_compressed(model, small)
    assert main(["export", str(small), "--to", "onnx", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "onnxruntime gives the model's output, with a relative difference of" in printed.out
    assert (name == "ViT") or "holds no tokenizer, so the inputs are input_ids and attention_mask" in printed.out
    assert "Loading weights" not in printed.err
    assert "not installed" not in printed.err
    graph = onnx.load(out / "model.onnx").graph
    assert {"low_rank": 0, "int8": "DequantizeLinear", "int4": "MatMulNBits"}[form] in {
        0, *(node.op_type for node in graph.node)
    }  # fmt: skip
    assert [value.name for value in graph.output] == OUTPUTS[name]
    symbols = {"batch", "decoder_length", "length"} if "decoder" in name else {"batch", "length"}
    sizes = sizes_of((*graph.input, *graph.output))
    assert {size for shape in sizes.values() for size in shape if isinstance(size, str)} == (
        {"batch"} if name == "ViT" else symbols
    )
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch, length in ((2, 7), (3, 12), (1, 1)):
        tokens = torch.randint(1, 61, (batch, length))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if name == "ViT":
            inputs = {"pixel_values": torch.randn(batch, 3, 16, 16)}
        if "decoder" in name:
            inputs["decoder_input_ids"] = torch.randint(1, 61, (batch, length + 2))
        assert [value.name for value in graph.input] == list(inputs)
        with torch.no_grad():
            expected = model(**inputs)
        outputs = session.run(None, {entry.name: inputs[entry.name].numpy() for entry in session.get_inputs()})
        for key, output in zip(OUTPUTS[name], outputs, strict=True):
            assert (torch.as_tensor(output) - expected[key]).norm() < 1e-5 * expected[key].norm()


READER = """
import sys
import numpy as np, onnxruntime, transformers
folder, file = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
for number, texts in enumerate((["a b"], ["c", "a b c d", "d d d"])):
    encoded = tokenizer(texts, padding=True, return_tensors="np")
    (states, pooled) = session.run(["last_hidden_state", "pooler_output"], dict(encoded))
    np.savez(f"{file}-{number}.npz", states=states, pooled=pooled, **encoded)
assert not [name for name in sys.modules if name.split(".")[0] == "panther"]
print([value.name for value in session.get_inputs()])
"""


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("activations", [None, "int8"])
def test_the_tokenizer_beside_the_file_makes_its_inputs_in_a_process_without_panther(activations, tmp_path, capsys):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pytest.importorskip("onnxruntime")
    model = made(transformers, "Bert")
    pr.compress(model, bits=9, method="svd", forms=["int4", "int8"], measure_speed=False, seed=0)
    pr.save_compressed(model, tmp_path / "small")
    save_tokenizer(transformers, tokenizers, tmp_path / "small")
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "small"), "--to", "onnx", "--out", str(out)]
    assert main(command if activations is None else [*command, "--activations", activations]) == 0
    printed = capsys.readouterr().out
    assert "at batch sizes 2 and 1" in printed
    assert ("with the inputs of layers not rounded" in printed) == (activations is not None)
    assert {path.name for path in out.iterdir()} == {"model.onnx", "tokenizer.json", "tokenizer_config.json"}
    result = waits.run([sys.executable, "-c", READER, str(out), str(tmp_path / "outputs")], check=True)
    assert result.stdout.strip() == "['input_ids', 'token_type_ids', 'attention_mask']"
    tolerance = 1e-5 if activations is None else 0.05
    for number in range(2):
        saved = {name: torch.as_tensor(x) for name, x in np.load(tmp_path / f"outputs-{number}.npz").items()}
        states, pooled = saved.pop("states"), saved.pop("pooled")
        with torch.no_grad():
            expected = model(**saved)
        for output, reference in ((states, expected.last_hidden_state), (pooled, expected.pooler_output)):
            assert (output - reference).norm() < tolerance * reference.norm()


def save_tokenizer(transformers, tokenizers, folder):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4, "d": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_input_names=names
    ).save_pretrained(folder)


@pytest.mark.extra
def test_inputs_are_those_that_the_model_takes(tmp_path, monkeypatch):
    """A tokenizer of BERT also makes token_type_ids for models that do not take them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from panther.cli import export

    save_tokenizer(transformers, tokenizers, tmp_path)
    for name, expected in (
        ("Bert", ["input_ids", "token_type_ids", "attention_mask"]),
        ("T5", ["input_ids", "attention_mask"]),
        ("T5 with a decoder", ["input_ids", "attention_mask", "decoder_input_ids"]),
        ("ViT", ["pixel_values"]),
    ):
        model = made(transformers, name)
        assert list(export._sample(model, None, export._input_names(tmp_path, model, "onnx"))) == expected


@pytest.mark.extra
def test_nothing_is_left_after_a_full_disk_or_an_interruption(tmp_path, monkeypatch, capsys):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pytest.importorskip("onnxscript")
    made(transformers, "Bert").save_pretrained(tmp_path / "model")
    save_tokenizer(transformers, tokenizers, tmp_path / "model")
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "model"), "--to", "onnx", "--out", str(out)]
    capsys.readouterr()  # the progress of save_pretrained

    def written(model, path, sample):
        path.parent.mkdir()
        path.write_bytes(b"half")

    monkeypatch.setattr("panther.integrations.onnx.write_onnx", written)
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr("panther.integrations.onnx.compare_onnx", fail)
        if isinstance(error, OSError):
            assert main(command) == 2
            message = capsys.readouterr().err
            assert "No space left on device" in message
            assert message.count("\n") == 1
        else:
            assert main(command) == 130
        assert not out.exists()


class FullDisk:
    """A file on a disk that has room for some bytes."""

    def __init__(self, file, num_bytes):
        self.file, self.num_bytes = file, num_bytes

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.num_bytes -= len(data)
        if self.num_bytes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)


@pytest.mark.parametrize("num_bytes", [0, 100, 5000])
def test_a_full_disk_does_not_abort_a_program(num_bytes, folder, monkeypatch, capsys):
    """torch writes archives in C++, and aborted the process where its file raised."""
    from panther.cli import export

    @contextmanager
    def full(path):
        with new_file(path) as file:
            yield FullDisk(file, num_bytes)

    monkeypatch.setattr(export, "new_file", full)
    _, command, inputs = folder
    assert main([*command, "--to", "torch", "--sample", inputs]) == 2
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert message.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.extra
def test_what_onnx_cannot_take_is_one_sentence(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    made(transformers, "Bert").save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--to"]
    capsys.readouterr()  # the progress of save_pretrained

    def message(*options):
        assert main([*command, *options]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        return printed

    refused = message("onnx", "--activations", "int8")
    assert "holds no quantized linear layer: leave --activations out" in refused
    assert "--activations is for --to onnx, not for --to torch: leave it out" in message(
        "torch", "--activations", "int8"
    )
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert f"the tokenizer in {tmp_path / 'model'} cannot be loaded" in message("onnx")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_bytes(b"mine")
    assert "is not empty, and might hold another model: give a new folder, or clear it" in message("onnx")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == b"mine"


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_half_precision_to_onnx(dtype, tmp_path, capsys):
    """A file of float16 is as good as the model in float16, and was refused for its rounding."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TRANSFORMERS["Bert"][1])).eval()
    model.to(torch.bfloat16 if dtype == "float32" else getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--to", "onnx", "--out", str(tmp_path / "out")]
    assert main(command if dtype != "float32" else [*command, "--dtype", dtype]) == 0
    sentences = {
        "float16": "gives the output of the model in float32, with",
        "bfloat16": "not compared: onnxruntime has no kernels for bfloat16",
        "float32": "gives the model's output",
    }
    assert sentences[dtype] in capsys.readouterr().out


@pytest.mark.extra
def test_operators_that_onnx_does_not_have_are_named(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**TRANSFORMERS["Bert"][1])).eval()
    pr.linearize_(model, num_features=4, window=3)
    pr.save_compressed(model, tmp_path / "small")
    assert main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "out"), "--to", "onnx"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("panther: error: BertModel contains panther.windowed_linear_attention.default, of linear")
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.extra
@pytest.mark.slow
def test_an_encoder_and_a_decoder_without_their_caches(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(**TRANSFORMERS["T5"][1], decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).eval().save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", "torch", "--out", str(tmp_path / "out")]) == 0


@pytest.mark.extra
def test_a_file_with_other_outputs_is_named(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    model = transformers.BertModel(transformers.BertConfig(**TRANSFORMERS["Bert"][1])).eval()
    pr.save_compressed(model, tmp_path / "small")
    monkeypatch.setattr("panther.integrations.onnx.writer._MAX_ERROR", -1.0)
    assert main(["export", str(tmp_path / "small"), "--to", "onnx", "--out", str(tmp_path / "out")]) == 2
    assert "gives different outputs than the model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # so that the next try is not refused for what is left


def test_a_function_returns_the_model(folder, capsys):
    _, command, _ = folder
    function = command[3]
    assert main(["export", function, "--to", "linears", "--out", "out"]) == 0
    assert json.loads(Path("out/layers.json").read_text()) == {}
    assert load_file("out/model.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert main([*command[:1], function, *command[2:4], "--to", "linears", "--out", "other"]) == 2
    assert "both return a model: give one of them" in capsys.readouterr().err
