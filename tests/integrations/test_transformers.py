"""Compressed models of transformers, saved and loaded by transformers itself, in another process too."""

import json
import sys
from functools import partial

import pytest
import torch
import waits
from ranks import on_ranks
from safetensors.torch import load_file, save_file

import panther as pr
from panther.errors import CompressionError, ConfigError, FormatError
from panther.nn.protocol import CompressedModule
from panther.nn.specs import module_specs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

from transformers.distributed import DistributedConfig  # noqa: E402

from panther.integrations.transformers import (  # noqa: E402
    CompressCallback,
    PantherConfig,
    resize_token_embeddings_,
    set_quantization_config_,
    write_model_card,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = 61
TOKENS = ("input_ids",)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **SIZES)), TOKENS


def gpt2():
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, **ids)
    return transformers.GPT2LMHeadModel(config), TOKENS


def llama():
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, pad_token_id=0, **SIZES)
    return transformers.LlamaForCausalLM(config), TOKENS


def qwen():
    config = transformers.Qwen2Config(vocab_size=WORDS, num_key_value_heads=2, **SIZES)
    return transformers.Qwen2ForCausalLM(config), TOKENS


def t5():
    config = transformers.T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config), ("input_ids", "decoder_input_ids")


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)
    return transformers.ViTForImageClassification(config), ("pixel_values",)


MODELS = (bert, gpt2, llama, qwen, t5, vit)


def batch(names, rows=4):
    images = {"pixel_values": torch.randn(rows, 3, 16, 16)}
    return {name: images.get(name, torch.randint(1, WORDS, (rows, 10))) for name in names}


def compressed(make, forms):
    torch.manual_seed(0)
    model, names = make()
    model.eval()
    if forms is None:
        pr.sketch_layers_(model, pr.SketchConfig(low_rank=3, init="random"), seed=1)
    else:
        pr.compress(model, 0.5, [batch(names, 8) for _ in range(10)], forms=forms, measure_speed=False, seed=0)
    return set_quantization_config_(model), batch(names)


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


FRESH = """
import pathlib, sys, torch, transformers, panther.integrations.transformers
folders = sorted(pathlib.Path(sys.argv[1]).iterdir())
assert len(folders) == 12
for folder in folders:
    inputs, expected, make = torch.load(folder / "case.pt")
    model, info = getattr(transformers, make).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), (folder, info)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected), folder
"""


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("forms", [("low_rank",), ("int8", "int4", "dense"), None], ids=["low rank", "int", "seeded"])
def test_saved_in_shards_and_loaded_by_the_class_and_as_a_body(make, forms, tmp_path):
    model, inputs = compressed(make, forms)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert forms is None or len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(loaded, inputs), expected)
    assert loaded.config.quantization_config.modules == module_specs(model)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert any(isinstance(module, CompressedModule) for module in body.modules())


def test_a_body_gets_a_new_head(tmp_path):
    model, _ = compressed(bert, ("low_rank",))
    set_quantization_config_(model.bert).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.bert.encoder.layer[0].output.dense, pr.nn.LowRankLinear)


def test_a_compressed_head_is_left_out_under_another_one(tmp_path):
    """As dense folders, which the class of another task loads; a body that does not fit is refused all the same."""
    model, inputs = compressed(bert, ("int8",))
    assert isinstance(model.cls.predictions.transform.dense, CompressedModule)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    with torch.no_grad():
        assert torch.equal(loaded.bert(**inputs).last_hidden_state, model.bert(**inputs).last_hidden_state)
    assert loaded.config.quantization_config.modules.keys() == {
        name for name, module in loaded.named_modules() if isinstance(module, CompressedModule)
    }
    with pytest.raises(FormatError, match=r"'bert.encoder.layer.1.*no module of this name"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_hidden_layers=1)


def test_plain_layers_are_saved_as_such_or_refused(tmp_path):
    """from_pretrained builds no pairs: it would draw the layers at random."""
    model, inputs = compressed(llama, ("int8",))
    model.save_pretrained(tmp_path / "first")
    loaded = pr.from_pretrained(tmp_path / "first")
    pr.to_linears_(loaded)
    expected = logits(loaded, inputs)
    loaded.save_pretrained(tmp_path / "dense")
    assert not hasattr(loaded.config, "quantization_config")
    assert torch.equal(logits(pr.from_pretrained(tmp_path / "dense"), inputs), expected)
    model, _ = compressed(llama, ("low_rank",))
    pr.to_linears_(model)
    with pytest.raises(FormatError, match=r"of the layers are pairs of plain layers, .*\(first 'model.layers.0"):
        model.save_pretrained(tmp_path / "pairs")


@pytest.mark.slow
def test_another_process_needs_only_the_import(tmp_path):
    for make in MODELS:
        for forms in (("low_rank", "int4", "int8", "dense"), None):
            model, inputs = compressed(make, forms)
            folder = tmp_path / f"{make.__name__}-{'seeded' if forms is None else 'fitted'}"
            model.save_pretrained(folder)
            torch.save((inputs, logits(model, inputs), type(model).__name__), folder / "case.pt")
    waits.run([sys.executable, "-P", "-c", FRESH, tmp_path], check=True)


def test_from_pretrained_compresses_a_dense_folder(tmp_path):
    torch.manual_seed(0)
    dense, names = llama()
    dense.save_pretrained(tmp_path / "dense")
    config = PantherConfig(
        bits=5, calibration=[batch(names) for _ in range(8)], forms=("int8", "int4"), measure_speed=False, seed=0
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    assert model.hf_quantizer.report.measured_error < 0.2
    model.save_pretrained(tmp_path / "small")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    inputs = batch(names)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    tokens = loaded.generate(**inputs, attention_mask=torch.ones(4, 10), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (4, 13)


def test_dtype_is_that_which_from_pretrained_is_given(tmp_path):
    model, inputs = compressed(bert, ("int4", "low_rank"))
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert (logits(loaded, inputs) - expected).abs().max() < 0.05


def convolutional():
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_labels=5)
    return transformers.ResNetForImageClassification(config), ("pixel_values",)


def test_a_quantized_first_layer_does_not_change_the_dtype_of_the_model(tmp_path):
    """Its bfloat16 scales were the first floating parameter, so config.json named bfloat16, and images were refused."""
    model, inputs = compressed(convolutional, ("int8",))
    assert isinstance(model.resnet.embedder.embedder.convolution, pr.nn.QuantizedConv2d)
    assert model.dtype is next(model.parameters()).dtype is torch.float32
    expected = logits(model, inputs)
    pr.save_compressed(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded = pr.from_pretrained(tmp_path / folder)
        assert loaded.config.dtype is loaded.dtype is torch.float32
        assert torch.equal(logits(loaded, inputs), expected)


@pytest.mark.parametrize("form", ["int8", "int4+low_rank"])
def test_layers_that_a_class_keeps_in_float32_load_in_float16(form, tmp_path):
    """T5 names "wo", so that transformers casts the scales of those layers as well."""
    model, inputs = compressed(t5, (form,))
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    for name, buffer in loaded.named_buffers():
        if name in state:
            assert torch.equal(buffer, state[name])
            assert buffer.dtype is state[name].dtype
    pr.save_compressed(loaded, tmp_path / "again")
    assert loaded.encoder.block[0].layer[-1].DenseReluDense.wo.dtype is torch.float32
    exact = logits(model, inputs)
    for dtype in (torch.float16, torch.float32):
        again = logits(pr.from_pretrained(tmp_path / "again", dtype=dtype), inputs)
        assert (again - exact).abs().max() < 0.01 * exact.abs().max()


def test_dequantized_model_is_dense_and_saves_as_such(tmp_path):
    model, inputs = compressed(gpt2, ("int8", "low_rank"))
    expected = logits(model, inputs)
    dense = model.dequantize()
    assert not any(isinstance(module, CompressedModule) for module in dense.modules())
    torch.testing.assert_close(logits(dense, inputs), expected, rtol=1e-4, atol=1e-5)
    assert not hasattr(dense.config, "quantization_config")


def test_layers_of_a_folder_are_expanded_on_demand(tmp_path):
    model, inputs = compressed(gpt2, ("int8", "low_rank"))
    expected = logits(model, inputs)
    pr.save_compressed(model, tmp_path)
    expanded = pr.from_pretrained(tmp_path, expand=True)
    assert not any(isinstance(module, CompressedModule) for module in expanded.modules())
    torch.testing.assert_close(logits(expanded, inputs), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="expand must be True or False, not 'yes'"):
        pr.from_pretrained(tmp_path, expand="yes")


def test_training_goes_on_after_loading(tmp_path):
    model, inputs = compressed(bert, ("low_rank",))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    loaded(**inputs, labels=inputs["input_ids"]).loss.backward()
    factors = [module for module in loaded.modules() if isinstance(module, pr.nn.LowRankLinear)]
    assert factors
    assert all(factor.down.grad is not None for factor in factors)


def test_plain_linears_of_a_model_that_reads_weights():
    model, inputs = compressed(t5, ("low_rank",))
    expected = logits(model, inputs)
    pr.to_linears_(model)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_bad_input_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="needs a size"):
        PantherConfig()
    with pytest.raises(ConfigError, match="needs a size"):
        PantherConfig(calibration=[])
    with pytest.raises(ConfigError, match=r"PantherConfig has no argument calibratoin \(did you mean calibration\?\)"):
        PantherConfig(bits=4, calibratoin=[])
    with pytest.raises(ConfigError, match="CompressCallback has no argument folder"):
        CompressCallback(bits=4, folder="x")
    options = {"calibration": [], "forms": ("int8", "int4")}
    for owner in (PantherConfig, CompressCallback):  # now, and not once a model is loaded or trained
        with pytest.raises(ValueError, match="needs calibration=, a list of batches"):
            owner(bits=4)
        with pytest.raises(ValueError, match="not budget and bits"):
            owner(bits=4, budget=0.5, **options)
        with pytest.raises(TypeError, match="bits must be a number, not str"):
            owner(bits="4", **options)
        with pytest.raises(ValueError, match="form 'int44' is unknown"):
            owner(bits=4, calibration=[], forms=("int44",))
        with pytest.raises(CompressionError, match="not a Tensor: for one tensor use"):
            owner(bits=4, calibration=torch.zeros(2, 3))
    with pytest.raises(FormatError, match="'modules' must name each layer"):
        PantherConfig(modules={"head": 3})
    with pytest.raises(TypeError, match="resize_token_embeddings_ takes a PreTrainedModel"):
        resize_token_embeddings_(torch.nn.Linear(2, 2), 5)
    with pytest.raises(FormatError, match="there is no folder nowhere"):
        pr.from_pretrained("nowhere")
    with pytest.raises(FormatError, match="version 9 and this Panther reads 1"):
        PantherConfig(modules={}, version=9)
    with pytest.raises(ConfigError, match="for 'panther' only"):
        PantherConfig(quant_method="gptq", bits=4)
    model, _ = bert()
    with pytest.raises(FormatError, match="has no compressed layer"):
        set_quantization_config_(model)
    with pytest.raises(TypeError, match="PreTrainedModel of transformers"):
        set_quantization_config_(torch.nn.Linear(2, 2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not compressed"):
        type(model).from_pretrained(tmp_path, quantization_config=PantherConfig(modules={}))


def test_config_follows_the_layers_without_a_call(tmp_path):
    """What save_pretrained writes names the layers, whatever made them, and no layer is drawn at random."""
    torch.manual_seed(0)
    model, names = llama()
    inputs = batch(names)
    pr.sketch_layers_(model.eval(), pr.SketchConfig(low_rank=3), seed=1)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path / "own")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own"), inputs), expected)
    pr.save_compressed(model, tmp_path / "ours")
    plain, _ = llama()
    pr.load_compressed(tmp_path / "ours", plain)
    plain.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(pr.from_pretrained(tmp_path / "again"), inputs), expected)
    assert not hasattr(plain.config, "quantization_config")
    assert not hasattr(model.config, "quantization_config")


def test_a_folder_of_ours_is_one_of_transformers(tmp_path):
    model, inputs = compressed(qwen, ("int8", "int4", "low_rank"))
    expected = logits(model, inputs)
    pr.save_compressed(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "panther.json",
    }  # fmt: skip
    for loaded in (pr.from_pretrained(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, inputs), expected)
    half = pr.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        inputs["input_ids"][:1], max_new_tokens=3, do_sample=False
    )
    assert tokens.shape == (1, 13)


def test_our_folder_is_checked(tmp_path):
    model, _ = compressed(bert, ("low_rank",))
    pr.save_compressed(model, tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(FormatError, match="does not match its checksum"):
        pr.from_pretrained(tmp_path)
    data[-1] ^= 1
    weights.write_bytes(data)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json is missing: copy or write the folder again"):
        pr.from_pretrained(tmp_path)


def test_a_folder_of_transformers_is_checked(tmp_path):
    model, inputs = compressed(bert, ("low_rank",))
    model.save_pretrained(tmp_path)
    loaded = pr.from_pretrained(tmp_path, local_files_only=True)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    with pytest.raises(FormatError, match=r"panther.json is missing, .* pr.from_pretrained\(folder\) loads"):
        pr.load_compressed(tmp_path, bert()[0])
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"model.safetensors is not a valid safetensors file"):
        pr.from_pretrained(tmp_path)


def damaged_configs(config):
    """Contents of config.json that are damaged, each with what was done."""
    raw = json.dumps(config, indent=1).encode()
    yield "the entry is removed", {key: value for key, value in config.items() if key != "quantization_config"}
    entry = config["quantization_config"]
    yield "of an unknown method", config | {"quantization_config": entry | {"quant_method": "panthes"}}
    yield (
        "a layer is removed",
        config | {"quantization_config": entry | {"modules": dict(list(entry["modules"].items())[1:])}},
    )
    for wrong in (5, [5], ["AutoTokenizer"], ["NoSuchModel"], "BertForMaskedLM"):
        yield f"architectures {wrong}", config | {"architectures": wrong}
    for key in ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        yield f"no {key}", {name: value for name, value in config.items() if name != key}
        yield f"{key} of a wrong type", config | {key: [3]}
    yield "more layers", config | {"num_hidden_layers": 3}
    yield "fewer layers", config | {"num_hidden_layers": 1}
    for cut in (0, 1, 40, len(raw) // 2, len(raw) - 2):
        yield f"cut at {cut}", raw[:cut]
    yield "not text", b"\xff\xfe" + raw
    yield "an array", []


@pytest.mark.parametrize("save", ["save_compressed", "save_pretrained"])
def test_a_damaged_config_is_refused(save, tmp_path):
    """A folder whose config had lost an entry loaded as a model with random layers, without a word."""
    model, inputs = compressed(bert, ("int8", "low_rank"))
    pr.save_compressed(model, tmp_path) if save == "save_compressed" else model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    good, expected = path.read_bytes(), logits(model, inputs)
    cases, refused = [*damaged_configs(json.loads(good))], []
    for name, damaged in cases:
        path.write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
        try:
            assert torch.equal(logits(pr.from_pretrained(tmp_path), inputs), expected), name
        except FormatError:
            refused.append(name)
    # The class that config.json names knows the type of its model; a folder of ours has a checksum.
    assert len(refused) == len(cases) - (save == "save_pretrained")
    path.write_bytes(good)
    assert torch.equal(logits(pr.from_pretrained(tmp_path), inputs), expected)


class ValueHead(torch.nn.Module):
    """As TRL and sentence-transformers wrap a model: with its config, and with a save_pretrained of its own."""

    def __init__(self):
        super().__init__()
        config = transformers.BertConfig(vocab_size=WORDS, **SIZES)
        self.pretrained_model = transformers.BertModel(config)
        self.value, self.config = torch.nn.Linear(32, 1), config

    def forward(self, input_ids):
        return self.value(self.pretrained_model(input_ids).last_hidden_state)

    def save_pretrained(self, folder):
        self.pretrained_model.save_pretrained(folder)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_wrapper_does_not_own_the_config_of_the_model_in_it(depth, tmp_path):
    """The config of the inner model got the wrapper's names, and no folder that was saved could be loaded."""
    torch.manual_seed(0)
    wrapper = ValueHead().eval()
    outer = torch.nn.Sequential(wrapper) if depth else wrapper
    pr.compress(
        outer, 0.5, [batch(TOKENS)["input_ids"] for _ in range(6)], forms=("int8",), measure_speed=False, seed=0
    )
    wrapper.save_pretrained(tmp_path)
    ids = batch(TOKENS)["input_ids"]
    expected = wrapper.pretrained_model(ids).last_hidden_state
    for load in (pr.from_pretrained, transformers.AutoModel.from_pretrained):
        assert torch.equal(load(tmp_path)(ids).last_hidden_state, expected)
    pr.save_compressed(outer, tmp_path / "whole")
    assert not (tmp_path / "whole" / "config.json").exists()


@pytest.mark.parametrize("save", ["save_compressed", "save_pretrained", "quantizer"])
@pytest.mark.parametrize("parts", [("bert.encoder",), ("bert.encoder.layer.1", "bert.encoder.layer.0", "bert.pooler")])
def test_parts_of_a_model_are_compressed_and_the_whole_is_saved(parts, save, tmp_path):
    """The config named none of the layers, which were random numbers after loading."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=WORDS, **SIZES)
    model = transformers.BertForSequenceClassification(config).eval()
    for name in parts:
        part = model.get_submodule(name)
        part.config = getattr(part, "config", config)
        pr.sketch_layers_(part, pr.SketchConfig(low_rank=3, init="random"), seed=0)
    if save == "quantizer":
        set_quantization_config_(model)
    pr.save_compressed(model, tmp_path) if save == "save_compressed" else model.save_pretrained(tmp_path)
    inputs = batch(TOKENS)
    for load in (pr.from_pretrained, transformers.AutoModelForSequenceClassification.from_pretrained):
        loaded = load(tmp_path)
        assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(pr.from_pretrained(tmp_path / "again"), inputs), logits(model, inputs))
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(**inputs).last_hidden_state, model.bert(**inputs).last_hidden_state)


def test_a_config_that_names_some_of_the_layers_is_refused(tmp_path):
    torch.manual_seed(0)
    model, _ = bert()
    pr.sketch_layers_(model.eval(), pr.SketchConfig(low_rank=3, init="random"), seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules"].pop("bert.encoder.layer.0.output.dense")
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"hold 'bert\.encoder\.layer\.0\.output\.dense' as a compressed layer of Panther, and the config"
    for load in (pr.from_pretrained, transformers.AutoModelForMaskedLM.from_pretrained):
        with pytest.raises(FormatError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("shard", ["30KB", "1GB"])
def test_a_variant_is_found_by_us_and_refused_by_transformers(shard, tmp_path):
    model, inputs = compressed(bert, ("int8",))
    model.save_pretrained(tmp_path, variant="panther", max_shard_size=shard)
    loads = (pr.from_pretrained, partial(transformers.AutoModelForMaskedLM.from_pretrained, variant="panther"))
    for load in loads:
        assert torch.equal(logits(load(tmp_path), inputs), logits(model, inputs))
    with pytest.raises(OSError, match="no file named"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_errors_of_arguments_are_not_blamed_on_the_folder(tmp_path):
    model, _ = compressed(bert, ("low_rank",))
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="no_such_argument"):
        pr.from_pretrained(tmp_path, no_such_argument=1)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path):
    model, _ = compressed(bert, ("int8",))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".codes"))
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (pr.from_pretrained, transformers.AutoModelForMaskedLM.from_pretrained):
        with pytest.raises(
            FormatError,
            match=r"names \d+ compressed layers with 'codes', and the weights files hold \d+: the folder is damaged",
        ):
            load(tmp_path)
    save_file(tensors | {"more": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"missing none; unexpected more; of a different size none"):
        pr.from_pretrained(tmp_path)


def test_a_dense_folder_may_hold_more_heads_than_its_class_has(tmp_path):
    model, names = bert()
    inputs = batch(names)
    model.eval().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"cls.seq_relationship.weight": torch.ones(2, 32)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    assert torch.equal(logits(pr.from_pretrained(tmp_path), inputs), logits(model, inputs))
    del tensors["bert.encoder.layer.0.output.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"missing bert\.encoder\.layer\.0\.output\.dense\.weight; unexpected none"):
        pr.from_pretrained(tmp_path)


@pytest.mark.parametrize("save", ["save_compressed", "save_pretrained"])
@pytest.mark.parametrize("forms", [("low_rank",), ("int8",)])
def test_layers_that_share_a_weight_have_its_values_in_every_folder(forms, save, tmp_path):
    """transformers left the second layer without values, which gave NaN."""
    torch.manual_seed(0)
    model, names = bert()
    attention = model.eval().bert.encoder.layer[0].attention.self
    attention.key.weight = attention.query.weight
    pr.compress(model, 0.5, [batch(names, 8) for _ in range(10)], forms=forms, measure_speed=False)
    inputs, name = batch(names), attention.query.stored_names()[0]
    assert getattr(attention.key, name) is getattr(attention.query, name)
    pr.save_compressed(model, tmp_path) if save == "save_compressed" else model.save_pretrained(tmp_path)
    for load in (pr.from_pretrained, transformers.AutoModelForMaskedLM.from_pretrained):
        loaded = load(tmp_path)
        assert torch.equal(logits(loaded, inputs), logits(model, inputs))
        if save == "save_compressed":  # save_pretrained writes a copy for each layer
            attention = loaded.bert.encoder.layer[0].attention.self
            assert getattr(attention.key, name) is getattr(attention.query, name)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    expected = model.bert(**inputs).last_hidden_state
    assert torch.equal(body(**inputs).last_hidden_state, expected)


def test_the_vocabulary_grows_with_a_compressed_head(tmp_path):
    model, inputs = compressed(llama, ("low_rank",))
    assert isinstance(model.lm_head, CompressedModule)
    expected = logits(model, inputs)
    resize_token_embeddings_(model, WORDS + 5)
    found = logits(model, inputs)
    torch.testing.assert_close(found[..., :WORDS], expected)
    assert found.shape[-1] == WORDS + 5
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(pr.from_pretrained(tmp_path), inputs), found)


def test_a_pipeline_runs_on_a_compressed_folder(tmp_path):
    model, _ = compressed(vit, ("int8", "low_rank"))
    model.save_pretrained(tmp_path)
    loaded = pr.from_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    classify = transformers.pipeline("image-classification", model=loaded, image_processor=processor)
    pil = pytest.importorskip("PIL.Image")
    (found,) = [classify(pil.new("RGB", (20, 20), (200, 30, 90)))]
    assert {"label", "score"} <= found[0].keys()


def classifier():
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=3, **SIZES)
    return transformers.BertForSequenceClassification(config), TOKENS


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]")


@pytest.mark.parametrize(
    ("task", "make"), [("fill-mask", bert), ("text-classification", classifier), ("text-generation", llama)]
)
def test_a_pipeline_runs_on_the_name_of_a_compressed_folder(task, make, tmp_path):
    model, _ = compressed(make, ("int8", "low_rank"))
    model.save_pretrained(tmp_path)
    fast_tokenizer = tokenizer()
    fast_tokenizer.add_special_tokens({"mask_token": "w7"})
    fast_tokenizer.save_pretrained(tmp_path)
    run = transformers.pipeline(task, model=str(tmp_path))
    assert any(isinstance(module, CompressedModule) for module in run.model.modules())
    if task == "fill-mask":
        with torch.no_grad():
            wanted = model(**fast_tokenizer("w3 w4 w7 w5", return_tensors="pt")).logits[0, 2].softmax(0).topk(2)
        found = run("w3 w4 w7 w5", top_k=2)
        assert [each["token"] for each in found] == wanted.indices.tolist()
        assert [each["score"] for each in found] == pytest.approx(wanted.values.tolist())
    elif task == "text-classification":
        with torch.no_grad():
            wanted = model(**fast_tokenizer("w3 w4 w9", return_tensors="pt")).logits[0].softmax(0)
        (found,) = run("w3 w4 w9")
        assert (found["label"], found["score"]) == (f"LABEL_{wanted.argmax()}", pytest.approx(wanted.max().item()))
    else:
        inputs = fast_tokenizer("w3 w4 w9", return_tensors="pt", return_token_type_ids=False)
        wanted = fast_tokenizer.decode(model.generate(**inputs, max_new_tokens=4, do_sample=False)[0])
        config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
        (found,) = run("w3 w4 w9", generation_config=config)
        assert found["generated_text"].replace(" ", "") == wanted.replace(" ", "")  # the prompt is put before it


def test_a_folder_is_ready_for_a_hub(tmp_path):
    torch.manual_seed(0)
    model, names = bert()
    batches = [batch(names, 8) for _ in range(10)]
    report = pr.compress(model.eval(), 0.5, batches, forms=("low_rank", "int8"), measure_speed=False, seed=0)
    model.save_pretrained(tmp_path)
    card = write_model_card(model, report, tmp_path).read_text()
    assert card.startswith("---\nlibrary_name: panther-sketch\ntags: [compressed, panther]\n---\n\n# BertForMaskedLM, ")
    assert f"measured {report.measured_error:.3g}" in card
    assert "base_model" not in card
    model.config._name_or_path = "somebody/some-bert"
    card = write_model_card(model, report, tmp_path, settings="budget=0.5").read_text()
    assert "base_model: somebody/some-bert\n---\n\n# some-bert, compressed" in card
    assert "- Asked for: budget=0.5.\n" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_an_encoder_is_loaded_from_the_folder_of_the_whole(tmp_path):
    model, inputs = compressed(t5, ("int8", "low_rank"))
    model.save_pretrained(tmp_path)
    encoder = transformers.T5EncoderModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.encoder(input_ids=inputs["input_ids"])[0]
        assert torch.equal(encoder(input_ids=inputs["input_ids"])[0], expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "forms", [("low_rank", "dense"), ("int8", "low_rank"), None], ids=["low rank", "int8", "seeded"]
)
def test_the_model_s_own_plan_shards_compressed_layers(forms, tmp_path):
    model, inputs = compressed(llama, forms)
    model.save_pretrained(tmp_path)
    tokens = {"max_new_tokens": 5, "do_sample": False}
    expected = logits(model, inputs), model.generate(**inputs, **tokens)

    def run():
        plan = DistributedConfig(tp_plan="auto", tp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=plan)
        blocks = [entry for entry in model.hf_quantizer.placements.placements if entry.name.endswith("_proj")]
        actions = {entry.action for entry in blocks if entry.kind in ("LowRankLinear", "SKLinear")}
        found = logits(model, inputs), model.generate(**inputs, **tokens)
        model.save_pretrained(tmp_path / "again", is_main_process=torch.distributed.get_rank() == 0)
        torch.distributed.barrier()
        return found, actions, logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), inputs)

    for found, actions, again in on_ranks(run, 2):
        assert actions == (set() if forms and "int8" in forms else {"outputs sharded", "inputs sharded"})
        torch.testing.assert_close(found, expected)
        assert torch.equal(again, expected[0])


@pytest.mark.parametrize(
    "plan", [{"tp_size": 2, "pp_size": 2}, {"dp_size": 2}, {"tp_size": 2, "tp_plan": {"lm_head": "colwise"}}]
)
def test_other_plans_of_transformers_are_refused(plan, tmp_path):
    model, _ = compressed(llama, ("int8", "low_rank"))
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.distributed_config = plan  # as from_pretrained(distributed_config=) sets it
    with pytest.raises(ConfigError, match=r"compressed layers know tp_plan='auto'.*tensor_parallel\(model"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_a_plan_for_a_dense_folder_that_is_to_be_compressed_is_refused(tmp_path):
    dense, names = llama()
    dense.save_pretrained(tmp_path / "dense")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "dense")
    config.distributed_config = {"tp_size": 2}
    wanted = PantherConfig(bits=5, calibration=[batch(names)])
    with pytest.raises(ConfigError, match="compressed layers know tp_plan='auto'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", config=config, quantization_config=wanted)


def test_a_save_that_was_cut_off_loads_as_the_new_model_with_its_config(tmp_path):
    """A process was killed after the rename of panther.json, before weights and config.json had their names."""
    from panther.nn.io import inference_manifest

    models = []
    for rank in (2, 4):
        torch.manual_seed(rank)
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
        models.append(transformers.BertModel(config).eval())
        pr.sketch_layers_(models[-1], pr.SketchConfig(low_rank=rank))
    pr.save_compressed(models[0], tmp_path / "old")
    new = pr.save_compressed(models[1], tmp_path / "new")
    commit = inference_manifest(new)["commit"]
    for name in ("model.safetensors", "config.json"):
        (new / name).rename(tmp_path / "old" / f".{name}.{commit}.new")
    (new / "panther.json").rename(tmp_path / "old" / "panther.json")
    loaded = pr.from_pretrained(tmp_path / "old")
    assert all(torch.equal(value, models[1].state_dict()[name]) for name, value in loaded.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [
        "config.json",
        "model.safetensors",
        "panther.json",
    ]
    changed = json.loads((tmp_path / "old" / "config.json").read_text()) | {"hidden_act": "relu"}
    (tmp_path / "old" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(FormatError, match=r"config.json does not match its checksum in panther.json"):
        pr.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize("quantizer", [False, True])
def test_models_of_one_config_object_have_records_of_their_own(quantizer, tmp_path):
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, pad_token_id=0, **SIZES)
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(3)]
    for model, low_rank in zip(models[:2], (2, 3), strict=True):
        pr.sketch_layers_(model, pr.SketchConfig(low_rank=low_rank, init="random"), seed=1, exclude="lm_head")
        if quantizer:
            set_quantization_config_(model)
    assert not hasattr(config, "quantization_config")
    inputs = batch(TOKENS)
    for index, model in enumerate(models):
        model.save_pretrained(tmp_path / str(index))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(index)).eval()
        assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    assert not hasattr(config, "quantization_config")


@pytest.mark.parametrize("load", [pr.from_pretrained, transformers.AutoModelForMaskedLM.from_pretrained])
def test_zero_points_that_a_folder_does_not_hold_are_filled_in(load, tmp_path):
    torch.manual_seed(0)
    model = bert()[0].eval()
    pr.compress(model, budget=0.3, method="svd", forms="int4", symmetric=True, group_size=16, measure_speed=False)
    pr.save_compressed(model, tmp_path / "small")
    assert not [name for name in load_file(tmp_path / "small/model.safetensors") if name.endswith("zeros")]
    loaded = load(tmp_path / "small").eval()
    loaded.save_pretrained(tmp_path / "again")
    for each in (loaded, load(tmp_path / "again").eval()):
        state = each.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
