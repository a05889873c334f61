"""Folders in the format compressed-tensors, which transformers reads in a process without Panther."""

import json
import sys

import pytest
import torch
import waits
from safetensors.torch import load_file, save_file

import panther as pr
from panther.cli import main
from panther.compression import readers
from panther.errors import CompressionError, FormatError, PantherError
from panther.integrations.compressed_tensors import Scheme, write_compressed_tensors, writer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

WORDS, GROUP = 61, 32
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}

READ = """
import sys
import torch, transformers
from safetensors.torch import load_file
folder, kind, how = sys.argv[1:]
inputs = load_file(f"{folder}/../inputs.safetensors")
expected = inputs.pop("output")
options = {}
if how == "dequantized":
    options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
assert not any(info[name] for name in ("missing_keys", "mismatched_keys")), info

@torch.no_grad()
def print_error(model):
    error = (model.eval()(**inputs)[0] - expected).norm() / expected.norm()
    print(f"{error.item():.3e}")

print_error(model)
if how == "adapted":
    import peft
    print_error(peft.PeftModel.from_pretrained(model, f"{folder}/adapter"))
assert "panther" not in sys.modules
"""


def llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, **(SIZES | options)
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert():
    return transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **SIZES)).eval()


def compressed(make, **options):
    """Return a model with biases and norms that are not at their initial values, compressed in two widths."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    defaults = {"forms": ("int8", "int4"), "target": "compressed-tensors", "group_size": GROUP}
    if "calibration" in options:
        report = pr.compress(model, measure_speed=False, seed=0, **(defaults | {"bits": 6.0} | options))
    else:
        report = pr.compress(
            model, method="svd", measure_speed=False, seed=0, **(defaults | {"budget": 0.25, "forms": "int4"} | options)
        )
    assert report.layers
    return model


def batches():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, WORDS, (8, 12), generator=generator)} for _ in range(8)]


def read(folder, kind, model, how="as it is"):
    """Let a fresh process without Panther load a folder, and print the error of its output beside the model's."""
    sample = {"input_ids": torch.arange(1, 25).view(2, 12)}
    if model.main_input_name == "pixel_values":
        sample = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)}
    with torch.no_grad():
        save_file(sample | {"output": model(**sample)[0].contiguous()}, folder.parent / "inputs.safetensors")
    return waits.run([sys.executable, "-P", "-c", READ, folder, kind, how])


def errors_of(*args):
    """Return the errors that :func:`read` prints: two, with an adapter."""
    result = read(*args)
    assert result.returncode == 0, result.stderr
    return [float(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModel"])
def test_a_fresh_process_reads_the_model(kind, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    model = compressed(llama if kind == "AutoModelForCausalLM" else bert, calibration=batches())
    widths = {layer.bits for layer in model.modules() if isinstance(layer, pr.nn.QuantizedLinear)}
    assert widths == {4, 8}
    pr.save_compressed(model, tmp_path / "small")
    (tmp_path / "small/tokenizer_config.json").write_text("{}")
    command = ["export", str(tmp_path / "small"), "--to", "compressed-tensors", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"of 8 bits in groups of {GROUP}, equal to the model's number by number" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer_config.json"}
    assert "panther.json" not in names
    assert errors_of(tmp_path / "out", kind, model)[0] < 1e-3
    # All layers are decoded by the first scheme here, which has to be noticed.
    result = read(tmp_path / "out", kind, model, "dequantized")
    assert result.returncode != 0
    assert "issues during automatic conversion of the weights" in result.stderr


@pytest.mark.slow
def test_one_width_is_read_with_dequantize_too(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = compressed(bert)
    write_compressed_tensors(model, tmp_path / "out")
    assert errors_of(tmp_path / "out", "AutoModel", model, "dequantized")[0] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModel"])
def test_corrections_are_an_adapter(kind, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("peft")
    make = llama if kind == "AutoModelForCausalLM" else bert
    options = {"forms": ("int3", "int3+low_rank"), "bits": 5.5, "target": None, "symmetric": True}
    model = compressed(make, calibration=batches(), exclude="*embed*", **options)
    ranks = {layer.low_rank for layer in model.modules() if isinstance(layer, pr.nn.QuantizedLinear)}
    assert len(ranks - {0}) > 1  # padded to the largest
    pr.save_compressed(model, tmp_path / "small")
    command = ["export", str(tmp_path / "small"), "--to", "compressed-tensors", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    sizes = [
        (tmp_path / "out" / name).stat().st_size for name in ("model.safetensors", "adapter/adapter_model.safetensors")
    ]
    assert f"base {sizes[0]:,} bytes, adapter {sizes[1]:,} bytes, together {sum(sizes):,}" in capsys.readouterr().out
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == max(ranks)
    base, error = errors_of(tmp_path / "out", kind, model, "adapted")
    assert error < 1e-3 < base


@pytest.mark.slow
def test_the_budget_counts_the_adapter_as_it_is_written(tmp_path):
    """Its factors have the dtype of the model and one rank, where Panther's own have 8 bits and ranks of their own."""
    model = compressed(llama, calibration=batches(), forms=("int3", "int3+low_rank"), bits=7.0)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, pr.nn.QuantizedLinear)}
    rank = max(layer.low_rank for layer in layers.values())
    assert rank > 0
    write_compressed_tensors(model, tmp_path / "out")
    adapter = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    factor_bytes = sum(tensor.nbytes for tensor in adapter.values())
    assert factor_bytes == sum(4 * rank * sum(layer.weight.shape) for layer in layers.values() if layer.low_rank)
    base = load_file(tmp_path / "out/model.safetensors")
    codes = sum(tensor.nbytes for name, tensor in base.items() if name.endswith("weight_packed"))
    weights = sum(layer.weight.numel() for layer in layers.values())
    assert factor_bytes + codes <= 7.0 * weights / 8


def test_the_files_hold_packed_codes(tmp_path):
    model = compressed(llama)
    schemes = write_compressed_tensors(model, tmp_path / "out")
    assert set(schemes.values()) == {Scheme(4, GROUP)}
    state = load_file(tmp_path / "out/model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    assert state[f"{layer}.weight_packed"].shape == (128, 96 * 4 // 32)
    assert state[f"{layer}.weight_shape"].tolist() == [128, 96]
    assert state[f"{layer}.weight_scale"].shape == (128, 3)
    assert f"{layer}.weight" not in state
    assert not any(name.endswith(("zeros", "weight_zero_point", "codes")) for name in state)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert not hasattr(model.config, "quantization_config")  # the model itself is unchanged


def test_half_precision_needs_scales_that_it_can_hold(tmp_path):
    model = compressed(llama).half()
    write_compressed_tensors(model, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["lm_head.weight_scale"].dtype is torch.float16
    model.lm_head.scales[0, 0] = 3e-8
    with pytest.raises(PantherError, match=r"'lm_head' has scales that float16 cannot hold: export with --dtype"):
        write_compressed_tensors(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


FREE = {"target": None, "exclude": "*embed*"}
SYMMETRIC = {**FREE, "symmetric": True}
REFUSED = [
    (FREE, "transformers", r"which has zero points \(symmetric=False\)"),
    (SYMMETRIC | {"exclude": None}, "transformers", "'model.embed_tokens', which is a QuantizedEmbedding"),
    (FREE | {"forms": "low_rank"}, "transformers", "which is a LowRankLinear"),
    (FREE | {"forms": "int8_low_rank"}, "transformers", "which is of low rank without codes"),
    (SYMMETRIC | {"forms": "int4+low_rank"}, "vllm", r"which has a correction of rank \d+, and adapters on codes"),
    (SYMMETRIC | {"activations": "int8"}, "transformers", r"which rounds its inputs \(activations='int8'\)"),
    (SYMMETRIC | {"group_size": 20}, "transformers", "which has rows of 128 columns, which groups of 20 do not divide"),
    ({"forms": "int3"}, "vllm", "which has 3 bits, and vllm holds 4, 8"),
    ({"group_size": 16}, "vllm", "which has groups of 16 columns, and vllm holds groups of 32, 64, 128"),
    ({}, "vllm", "'lm_head', which computes the logits"),
    ({"exclude": ["*.k_proj", "lm_head"]}, "vllm", "have different widths or groups, and reader 'vllm' fuses them"),
]


@pytest.mark.parametrize(("options", "reader", "message"), REFUSED)
def test_what_a_reader_lacks_is_refused(options, reader, message, tmp_path):
    model = compressed(llama, budget=0.6, **options)
    with pytest.raises(PantherError, match=message):
        write_compressed_tensors(model, tmp_path / "out", reader=reader)
    assert not (tmp_path / "out").exists()


def test_a_model_for_vllm_is_written(tmp_path):
    """The shapes and dtypes are those that vLLM allocates; vLLM itself cannot be installed here."""
    model = compressed(llama, target=None, reader="vllm", forms="int8", budget=0.4)
    names = [name for name, module in llama().named_modules() if isinstance(module, torch.nn.Linear)]
    schemes = write_compressed_tensors(model, tmp_path / "out", reader="vllm")
    assert schemes == {name: Scheme(8, GROUP) for name in names if name != "lm_head"}
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["ignore"] == [r"re:^(?:model\.)?(?:lm_head)$"]  # every nn.Linear has a scheme or is ignored
    state = load_file(tmp_path / "out/model.safetensors")
    for name in schemes:
        rows, columns = state[f"{name}.weight_shape"].tolist()
        assert state[f"{name}.weight_shape"].dtype is torch.int64
        assert state[f"{name}.weight_packed"].dtype is torch.int32
        assert state[f"{name}.weight_packed"].shape == (rows, columns // 4)
        assert state[f"{name}.weight_scale"].shape == (rows, columns // GROUP)


def test_layers_of_other_classes_are_refused(tmp_path):
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, n_positions=32, **ids)
    model = transformers.GPT2Model(config).eval()
    pr.compress(model, budget=0.4, method="svd", forms="int4", symmetric=True, exclude="w?e", measure_speed=False)
    with pytest.raises(PantherError, match="is a Conv1D in transformers, and readers hold"):
        write_compressed_tensors(model, tmp_path / "out")
    with pytest.raises(PantherError, match="Sequential is not a model of transformers"):
        write_compressed_tensors(torch.nn.Sequential(), tmp_path / "out")
    with pytest.raises(PantherError, match="the model has no quantized layer"):
        write_compressed_tensors(bert(), tmp_path / "out")
    with pytest.raises(ValueError, match="reader 'sglang' is unknown"):
        write_compressed_tensors(bert(), tmp_path / "out", reader="sglang")


def test_small_layers_that_would_be_misread_are_refused(tmp_path):
    model = llama(hidden_size=256, num_hidden_layers=1)
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"]
    for bits, name in zip((8, 4), names, strict=True):
        pr.compress(
            model, budget=0.4, method="svd", forms=f"int{bits}", symmetric=True, include=name, measure_speed=False
        )
    with pytest.raises(PantherError, match="with dequantize=True would read it as 8 bits without an error"):
        write_compressed_tensors(model, tmp_path / "out")


TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 16, "patch_size": 8}
T5_SIZES = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
MOE = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2}
# Models whose tensors transformers renames or stacks when it loads files of the original model.
RENAMED = {
    "vit": ("ViTForImageClassification", WIDTHS | IMAGE | {"num_labels": 3}),
    "mixtral": ("MixtralForCausalLM", WIDTHS | TOKENS | MOE),
    "gpt_neox": ("GPTNeoXForCausalLM", WIDTHS | TOKENS),
}


def renamed(name):
    kind, sizes = RENAMED[name]
    config = transformers.AutoConfig.for_model(name, **sizes)
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize("name", RENAMED)
def test_names_in_files_are_those_of_the_model(name, tmp_path):
    """ViT, GPT-NeoX and experts were written under the names of original files, and then refused."""
    model = compressed(lambda: renamed(name), exclude=["*expert*", "*embed*"])
    schemes = write_compressed_tensors(model, tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    plain_names = {key.removesuffix(".weight") for key in renamed(name).state_dict()}
    assert {key.removesuffix(".weight_packed") for key in state if key.endswith("_packed")} == schemes.keys()
    assert schemes.keys() <= plain_names
    assert not any(".experts.0." in key for key in state)
    with pytest.raises(PantherError, match=r"in files of the original model, .* use reader='transformers'|the logits"):
        write_compressed_tensors(model, tmp_path / "other", reader="vllm")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RENAMED)
def test_a_fresh_process_reads_models_with_other_names_in_files(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = compressed(lambda: renamed(name), exclude=["*expert*", "*embed*"])
    write_compressed_tensors(model, tmp_path / "out")
    assert errors_of(tmp_path / "out", RENAMED[name][0], model)[0] < 1e-3


def test_models_that_transformers_cannot_load_in_the_format_are_refused(tmp_path):
    make = transformers.Dinov2Model
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = compressed(lambda: make(transformers.Dinov2Config(**sizes, **IMAGE)).eval())
    with pytest.raises(PantherError, match=r"transformers cannot load a Dinov2Model in this format, because it splits"):
        write_compressed_tensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_whose_weight_is_read_before_their_forward_stay_dense(tmp_path):
    """T5 was written, and reading it failed: its code reads the dtype of one weight, and its loading all."""
    make = transformers.T5EncoderModel
    with pytest.raises(CompressionError, match="has a weight that T5EncoderModel reads on loading"):
        compressed(lambda: make(transformers.T5Config(**T5_SIZES)).eval())
    model = compressed(lambda: make(transformers.T5Config(**T5_SIZES)).eval(), **SYMMETRIC, include="*.wo")
    with pytest.raises(
        PantherError, match=r"'.*\.wo' cannot be written, which has a weight that T5DenseActDense reads"
    ):
        write_compressed_tensors(model, tmp_path / "out")
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, state_size=8, **TOKENS)
    mamba = compressed(lambda: transformers.MambaForCausalLM(config).eval(), budget=0.4)
    assert isinstance(mamba.lm_head, torch.nn.Linear)
    assert "in_proj" in next(iter(write_compressed_tensors(mamba, tmp_path / "mamba")))


def test_weights_that_methods_read_are_those_in_their_source():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
            torch.nn.init.zeros_(self.third.weight)

        def forward(self, x):
            return self.third(self.second(x.to(self.first.weight.dtype)))

    model = torch.nn.Sequential(Reads())
    reasons = [readers.why_weight_is_read(model, f"0.{name}") for name in ("first", "second", "third")]
    assert reasons[0].startswith("has a weight that Reads reads itself")
    assert reasons[1:] == [None, None]
    assert readers.why_weight_is_read(model[0], "second") is None


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    """A second model was written over the first one, whose adapter stayed."""
    model = compressed(llama)
    write_compressed_tensors(model, tmp_path / "out")
    (tmp_path / "out/adapter").mkdir()
    content = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(PantherError, match="is not empty, and might hold another model"):
        write_compressed_tensors(model, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == content


@pytest.mark.parametrize(("kind", "task_type"), [("llama", "CAUSAL_LM"), ("bart", "SEQ_2_SEQ_LM"), ("bert", None)])
def test_the_task_of_an_adapter_is_that_of_its_model(kind, task_type, tmp_path):
    """PEFT's class for causal models passes input_ids to an encoder and decoder of other inputs, which fails."""
    bart_sizes = {
        f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 1), ("ffn_dim", 96))
    }
    make = {
        "llama": llama,
        "bert": bert,
        "bart": lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(d_model=64, decoder_start_token_id=2, **TOKENS, **bart_sizes)
        ).eval(),
    }[kind]
    model = compressed(make, **SYMMETRIC | {"forms": "int3+low_rank", "budget": 0.6, "exclude": ["*embed*", "shared"]})
    write_compressed_tensors(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert config["task_type"] == task_type


def test_files_that_differ_are_removed(tmp_path, monkeypatch):
    model, pack = compressed(llama), writer.pack_weight
    monkeypatch.setattr(writer, "pack_weight", lambda codes, bits: pack(codes ^ 1, bits))
    (tmp_path / "out").mkdir()
    with pytest.raises(FormatError, match="the files do not hold the model under its own names and with its numbers"):
        write_compressed_tensors(model, tmp_path / "out")
    assert [*(tmp_path / "out").iterdir()] == []
