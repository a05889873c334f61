"""Compressed models of transformers, saved and loaded by transformers itself, in another process too."""

import subprocess
import sys

import pytest
import torch

import panther as pr
from panther.errors import ConfigError, FormatError
from panther.nn._sketched import CompressedModule

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

from panther.integrations.transformers import PantherConfig, set_quantization_config_  # noqa: E402

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
import sys, torch, transformers, panther.integrations.transformers
inputs, expected, make = torch.load(sys.argv[1] + "/case.pt")
model, info = getattr(transformers, make).from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    assert torch.equal(model(**inputs).logits, expected)
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
    assert loaded.config.quantization_config.modules == model.config.quantization_config.modules
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert any(isinstance(module, CompressedModule) for module in body.modules())


def test_a_body_gets_a_new_head(tmp_path):
    model, _ = compressed(bert, ("low_rank",))
    set_quantization_config_(model.bert).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.bert.encoder.layer[0].output.dense, pr.nn.SKLinear)


def test_another_process_needs_only_the_import(tmp_path):
    model, inputs = compressed(llama, ("int4", "low_rank", "dense"))
    model.save_pretrained(tmp_path)
    torch.save((inputs, logits(model, inputs), type(model).__name__), tmp_path / "case.pt")
    subprocess.run([sys.executable, "-P", "-c", FRESH, tmp_path], check=True, timeout=120, capture_output=True)


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


def test_dequantized_model_is_dense_and_saves_as_such(tmp_path):
    model, inputs = compressed(gpt2, ("int8", "low_rank"))
    expected = logits(model, inputs)
    dense = model.dequantize()
    assert not any(isinstance(module, CompressedModule) for module in dense.modules())
    torch.testing.assert_close(logits(dense, inputs), expected, rtol=1e-4, atol=1e-5)
    assert not hasattr(dense.config, "quantization_config")


def test_training_goes_on_after_loading(tmp_path):
    model, inputs = compressed(bert, ("low_rank",))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    loaded(**inputs, labels=inputs["input_ids"]).loss.backward()
    factors = [module for module in loaded.modules() if isinstance(module, pr.nn.SKLinear)]
    assert factors
    assert all(factor.S1.grad is not None for factor in factors)


def test_shared_weights_are_stored_for_each_layer(tmp_path):
    torch.manual_seed(0)
    model, names = bert()
    attention = model.eval().bert.encoder.layer[0].attention.self
    attention.key.weight = attention.query.weight
    pr.compress(model, 0.5, [batch(names, 8) for _ in range(10)], forms=("low_rank", "int8"), measure_speed=False)
    attention = model.bert.encoder.layer[0].attention.self
    first = attention.query.stored_names()[0]
    assert getattr(attention.key, first) is getattr(attention.query, first)
    set_quantization_config_(model).save_pretrained(tmp_path)
    inputs = batch(names)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), inputs), logits(model, inputs))


def test_plain_linears_of_a_model_that_reads_weights():
    model, inputs = compressed(t5, ("low_rank",))
    expected = logits(model, inputs)
    pr.to_linears_(model)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_bad_input_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="needs a size"):
        PantherConfig()
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
