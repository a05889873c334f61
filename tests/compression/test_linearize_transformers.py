"""pr.linearize_ on transformers' models, built from small configs with random weights; nothing is downloaded."""

import copy
import json
import pickle

import pytest
import torch

import panther as pr
from panther.errors import CompressionError, FormatError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

VOCABULARY, WIDTH, LENGTH = 61, 32, 40
OPTIONS = {"num_features": 8, "window": 4, "steps": 10, "seed": 0, "measure_speed": False, "progress": False}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 64, "pad_token_id": 0}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, **MORE))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **MORE, num_key_value_heads=2))


def qwen():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, **MORE, num_key_value_heads=2))


def vit():
    config = transformers.ViTConfig(
        image_size=28, patch_size=4, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return transformers.ViTModel(config)


FAMILIES = {"bert": bert, "gpt2": gpt2, "llama": llama, "qwen": qwen, "vit": vit}


def fresh(family, implementation="sdpa"):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.set_attn_implementation(implementation)
    return model


def batches(family, padded=False):
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return [{"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)} for _ in range(4)]
    found = []
    for _ in range(4):
        batch = {"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)}
        if padded:
            batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]])).long()
        found.append(batch)
    return found


def output(model, batch):
    with torch.no_grad():
        found = model(**batch)
    return found["logits"] if "logits" in found else found["last_hidden_state"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_converted(family):
    model, data = fresh(family), batches(family)
    original = copy.deepcopy(model)
    report = pr.linearize_(model, data, **OPTIONS)
    assert len(report.layers) == 2
    assert report.skipped == ()
    assert {layer.is_causal for layer in report.layers} == {family in ("gpt2", "llama", "qwen")}
    exact, now = output(original, data[-1]), output(model, data[-1])
    assert ((now - exact).norm() / exact.norm()).item() == pytest.approx(report.measured_error, rel=1e-3)
    assert 0 < report.measured_error < 0.2
    assert original.config._attn_implementation == model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(output(copy.deepcopy(model), data[-1]), now)
    torch.testing.assert_close(output(pickle.loads(pickle.dumps(model)), data[-1]), now)
    other = fresh(family)
    pr.linearize_(other, num_features=8, window=4)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(output(other, data[-1]), now)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_padding_has_no_influence(family, implementation):
    model, data = fresh(family, implementation), batches(family, padded=True)
    pr.linearize_(model, data, **OPTIONS)
    padded = output(model, data[-1])[1, : LENGTH - 9]
    alone = {name: value[1:, : LENGTH - 9] for name, value in data[-1].items()}
    torch.testing.assert_close(padded, output(model, alone)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generation_with_a_cache_equals_the_whole_forward(family):
    model, data = fresh(family), batches(family)
    pr.linearize_(model, data, **OPTIONS)
    prompt = data[0]["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    cached = model.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(cached, model.generate(prompt, attention_mask=mask, use_cache=False, **options))
    with torch.no_grad():
        whole = model(cached).logits
        first = model(cached[:, :-1], use_cache=True)
        last = model(cached[:, -1:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last[:, 0], whole[:, -1], rtol=1e-4, atol=1e-5)


def padded_before(prompt, pads):
    """Return the prompts of a batch with other numbers of padding tokens before each, and their mask."""
    longest = prompt.shape[1] + max(pads)
    tokens = torch.zeros(len(prompt), longest, dtype=torch.long)
    mask = torch.arange(longest) >= longest - prompt.shape[1] + torch.zeros(len(prompt), 1)
    for row, tokens_of_row in enumerate(prompt):
        tokens[row, longest - prompt.shape[1] :] = tokens_of_row
    return tokens, mask.long()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_padding_before_a_text_has_no_influence(family, implementation):
    model, data = fresh(family, implementation), batches(family)
    pr.linearize_(model, data, **OPTIONS)
    tokens, mask = padded_before(data[-1]["input_ids"], (5,))
    batch = {"input_ids": tokens, "attention_mask": mask}
    batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = output(model, batch)[:, 5:]
    torch.testing.assert_close(padded, output(model, data[-1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_is_continued_alike_with_any_padding(family, cache):
    model, data = fresh(family), batches(family)
    pr.linearize_(model, data, **OPTIONS)
    prompt = data[0]["input_ids"][:, :21]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    tokens, mask = padded_before(prompt, (3,))
    padded = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(padded.sequences[:, 3:], alone.sequences)
    torch.testing.assert_close(padded.logits, alone.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_maps_are_learned_from_texts_that_are_padded_before(family):
    """Learning and its figures count blocks as the forward does."""
    errors = []
    for pads_left in (False, True):
        model, data = fresh(family), batches(family, padded=True)
        if pads_left:
            for batch in data:
                batch["position_ids"] = torch.arange(LENGTH) - torch.tensor([[0], [9]])
                batch["position_ids"].clamp_(min=0)
                for name in ("input_ids", "attention_mask"):
                    batch[name][1] = batch[name][1].roll(9)
        report = pr.linearize_(model, data, **OPTIONS)
        errors.append([report.measured_error, *(layer.far_mass for layer in report.layers)])
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_a_model_that_returned_its_hidden_states_is_converted_like_one_that_never_ran():
    """transformers leaves hooks on attention modules, which were refused as hooks of the user."""
    models = [fresh("llama"), fresh("llama")]
    models[1](**batches("llama")[0], output_hidden_states=True)
    reports = [pr.linearize_(model, calibration=batches("llama"), **OPTIONS | {"steps": 1}) for model in models]
    assert len(reports[0].layers) == len(reports[1].layers) == 2
    assert torch.equal(*(output(model, batches("llama")[1]) for model in models))


def test_some_layers_stay_exact():
    model, data = fresh("llama"), batches("llama")
    report = pr.linearize_(model, data, exclude="*layers.0*", **OPTIONS)
    assert [layer.name for layer in report.layers] == ["model.layers.1.self_attn"]
    assert output(model, data[0]).isfinite().all()


def test_relative_biases_and_sliding_windows_are_kept():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    t5 = transformers.T5EncoderModel(transformers.T5Config(**sizes)).eval()
    with pytest.raises(CompressionError, match="no attention of the model can be converted"):
        pr.linearize_(t5, batches("t5"), **OPTIONS)
    config = transformers.MistralConfig(**SMALL, **MORE, num_key_value_heads=2, sliding_window=8)
    with pytest.raises(CompressionError, match="sliding window of 8"):
        pr.linearize_(transformers.MistralForCausalLM(config).eval(), batches("mistral"), **OPTIONS)


def folders(model, path):
    """Yield folders that the two ways of saving write."""
    pr.save_compressed(model, path / "ours")
    model.save_pretrained(path / "theirs")
    return path / "ours", path / "theirs"


@pytest.mark.parametrize(("family", "compress"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_a_saved_model_comes_back_linear(family, compress, tmp_path):
    """The folder names the converted modules, so that nothing builds the softmax model in silence."""
    from panther.integrations.transformers import set_quantization_config_

    model, data = fresh(family), batches(family)
    if compress:
        pr.compress(model, 0.6, data, forms=["int8"], measure_speed=False, progress=False, seed=0)
    pr.linearize_(model, data, **OPTIONS)
    expected = output(model, data[-1])
    for folder in folders(model, tmp_path):
        restored = pr.from_pretrained(folder)
        torch.testing.assert_close(output(restored, data[-1]), expected, rtol=0, atol=0)
        restored.save_pretrained(tmp_path / "again")
        torch.testing.assert_close(output(pr.from_pretrained(tmp_path / "again"), data[-1]), expected, rtol=0, atol=0)
    body = transformers.AutoModel.from_pretrained(folder).eval()
    assert sum("linear_attention.window" in name or hasattr(m, "window") for name, m in body.named_modules()) == 2
    plain = fresh(family)
    torch.testing.assert_close(output(pr.load_compressed(tmp_path / "ours", plain), data[-1]), expected, rtol=0, atol=0)
    if compress:
        dense = set_quantization_config_(model).dequantize()
        dense.save_pretrained(tmp_path / "dense")
        restored = pr.from_pretrained(tmp_path / "dense")
        torch.testing.assert_close(output(restored, data[-1]), output(dense, data[-1]), rtol=0, atol=0)


def test_a_folder_that_contradicts_its_config_is_refused(tmp_path):
    model, data = fresh("llama"), batches("llama")
    pr.linearize_(model, data, **OPTIONS)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    name = "model.layers.1.self_attn"
    config["quantization_config"]["modules"][name]["args"]["window"] = 7
    path.write_text(json.dumps(config))
    for load in (pr.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(FormatError, match="saved with window=4 and this module has window=7"):
            load(tmp_path)
    del config["quantization_config"]  # as an earlier version wrote it
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError, match="has no record of how it was made"):
        pr.from_pretrained(tmp_path)


def test_attention_by_random_features_comes_back_from_a_folder(tmp_path):
    """A search puts it in the place of softmax attention too."""
    from panther.tuning.attention import replacement_of

    model, data = fresh("bert"), batches("bert")
    names = [f"encoder.layer.{i}.attention.self" for i in (0, 1)]
    for name, kernel in zip(names, ("oprf", "hermite"), strict=True):
        settings = {name: {"kernel_fn": kernel, "num_random_features": 16}}
        (new,) = replacement_of(dict(model.named_modules()), settings, 3).values()
        new.linear_attention.calibrate_(*torch.randn(2, 1, 4, 20, 8).unbind())
        model.set_submodule(name, new.eval())
    expected = output(model, data[-1])
    for folder in folders(model, tmp_path):
        torch.testing.assert_close(output(pr.from_pretrained(folder), data[-1]), expected, rtol=0, atol=0)
    plain = fresh("bert")
    torch.testing.assert_close(output(pr.load_compressed(tmp_path / "ours", plain), data[-1]), expected, rtol=0, atol=0)
