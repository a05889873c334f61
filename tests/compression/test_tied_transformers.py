"""Embeddings and tied heads of transformers models: compressed, saved, loaded, resized, adapted and converted back."""

import copy

import pytest
import torch

import panther as pr
from panther._torch import buffers_of
from panther.nn import QuantizedEmbedding, QuantizedLinear
from panther.nn.sketch_record import plain_state

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("panther.integrations.transformers")
pytestmark = pytest.mark.extra

ROWS = 90
SIZES = {"vocab_size": ROWS, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
GPT2 = {
    "vocab_size": ROWS,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 24,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
T5 = {
    "vocab_size": ROWS,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
# The class, its config, and the names of its embedding and of its head.
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "transformer.wte", "lm_head"),
    "bert": (
        "BertForMaskedLM", "BertConfig", SIZES | {"intermediate_size": 64, "max_position_embeddings": 24},
        "bert.embeddings.word_embeddings", "cls.predictions.decoder",
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "shared", "lm_head"),
}  # fmt: skip


def fresh(family):
    name, config, sizes, *_ = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


def batches(family, count=6):
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        ids = torch.randint(2, 60, (6, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 7:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if family == "t5":
            batch["decoder_input_ids"] = torch.randint(2, 60, (6, 8), generator=generator)
        result.append(batch)
    return result


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """Family, compressed model, its report, a batch and the logits for it."""
    model = fresh(request.param)
    report = pr.compress(model, bits=6, calibration=batches(request.param), seed=0, measure_speed=False)
    batch = batches(request.param)[0]
    with torch.no_grad():
        return request.param, model, report, batch, model(**batch).logits


def layers_of(family, model):
    return tuple(model.get_submodule(name) for name in FAMILIES[family][3:])


def assert_tied(family, model):
    embedding, head = map(buffers_of, layers_of(family, model))
    assert all(head[name] is tensor for name, tensor in embedding.items())


@torch.no_grad()
def assert_same_logits(model, batch, logits, atol=0.0):
    torch.testing.assert_close(model(**batch).logits, logits, atol=atol, rtol=0)


def test_the_tied_weight_is_one_target(case):
    family, model, report, *_ = case
    embedding, head = layers_of(family, model)
    assert type(embedding) is QuantizedEmbedding
    assert type(head) is QuantizedLinear
    assert_tied(family, model)
    tied = next(layer for layer in report.layers if FAMILIES[family][4] in layer.names)
    assert FAMILIES[family][3] in tied.names
    assert 0.5 < report.measured_error / report.predicted_error < 2.0
    assert_tied(family, copy.deepcopy(model))


@pytest.mark.parametrize("how", ["save_pretrained", "save_compressed", "quantizer"])
def test_saved_and_loaded(case, how, tmp_path):
    family, model, _, batch, logits = case
    model = copy.deepcopy(model)
    if how == "quantizer":
        integration.set_quantization_config_(model)
    if how == "save_compressed":
        pr.save_compressed(model, tmp_path)
        restored = pr.load_compressed(tmp_path, fresh(family))
        assert_same_logits(restored, batch, logits)
        assert_tied(family, restored)
    else:
        model.save_pretrained(tmp_path)
    once = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in plain_state(model).values()}.values())
    assert (tmp_path / "model.safetensors").stat().st_size < once + 12_000  # the names of the tensors
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_logits(loaded, batch, logits)
    assert_tied(family, loaded)
    loaded.tie_weights()
    loaded.save_pretrained(tmp_path / "again")
    again = pr.from_pretrained(tmp_path / "again")
    assert_same_logits(again, batch, logits)
    assert_tied(family, again)


def test_generation(case):
    family, model, *_ = case
    if family == "bert":
        pytest.skip("BERT does not generate")
    ids = torch.tensor([[5, 6, 7]])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] > 1


def test_back_to_dense(case):
    family, model, _, batch, logits = case
    plain = copy.deepcopy(model)
    pr.to_linears_(plain)
    dense = integration.set_quantization_config_(copy.deepcopy(model)).dequantize()
    resized = copy.deepcopy(model)
    integration.resize_token_embeddings_(resized, ROWS)
    for other in (plain, dense, resized):
        embedding, head = layers_of(family, other)
        assert embedding.weight is head.weight
        assert_same_logits(other, batch, logits, atol=1e-4)
        assert other.all_tied_weights_keys == fresh(family).all_tied_weights_keys


def test_a_larger_vocabulary(case):
    family, model, _, batch, logits = case
    resized = copy.deepcopy(model)
    integration.resize_token_embeddings_(resized, ROWS + 3)
    embedding, head = layers_of(family, resized)
    assert embedding.weight is head.weight
    with torch.no_grad():
        torch.testing.assert_close(resized(**batch).logits[..., :ROWS], logits, atol=1e-4, rtol=0)


def test_adapters_on_top(case, tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("panther.integrations.peft")
    family, model, _, batch, logits = case
    if family != "gpt2":
        pytest.skip("one family shows it")
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["c_attn"]))
    assert_same_logits(adapted, batch, logits)
    adapted(**batch).logits.sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name)
    adapted.save_pretrained(tmp_path)
    base = copy.deepcopy(model)
    assert_same_logits(peft.PeftModel.from_pretrained(base, tmp_path), batch, adapted(**batch).logits)


@pytest.mark.parametrize("how", ["save_pretrained", "save_compressed"])
def test_scales_that_are_trained_in_one_layer_of_a_pair(case, how, tmp_path):
    """The layers have different weights then, and both are saved."""
    family, model, _, batch, _ = case
    if family != "bert":
        pytest.skip("one family shows it")
    model = integration.set_quantization_config_(copy.deepcopy(model))
    torch.nn.init.normal_(layers_of(family, model)[1].train_scales_().scale_logs, std=0.1)
    with torch.no_grad():
        logits = model(**batch).logits
    if how == "save_pretrained":
        model.save_pretrained(tmp_path)
    else:
        pr.save_compressed(model, tmp_path)
    assert_same_logits(pr.from_pretrained(tmp_path), batch, logits)
