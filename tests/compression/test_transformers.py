"""pr.compress on transformers' models, built from small configs with random weights; nothing is downloaded."""

import pytest
import torch
from torch import nn

import panther as pr
from panther.nn import LowRankConv2d, LowRankLinear, QuantizedLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

VOCABULARY, WIDTH, LENGTH = 61, 32, 12
KINDS = (nn.Linear, nn.Conv2d, transformers.pytorch_utils.Conv1D)


def bert(**more):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        **more,
    )
    return config, transformers.BertModel


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return config, transformers.GPT2LMHeadModel


def vit():
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * WIDTH,
    )
    return config, transformers.ViTModel


FAMILIES = {"bert": bert, "gpt2": gpt2, "vit": vit}


def fresh(family, seed=0, layers=2):
    config, make = FAMILIES[family]()
    config.num_hidden_layers = layers
    torch.manual_seed(seed)
    return make(config).eval()


def batches(family, count=10):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        if family == "vit":
            coarse = torch.randn(4, 3, 4, 4, generator=generator)  # images are smooth, which noise is not
            found.append({"pixel_values": nn.functional.interpolate(coarse, size=16, mode="bilinear")})
            continue
        ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (4, 1), generator=generator)
        found.append({"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()})
    return found


def output(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def compressed(family, **more):
    model = fresh(family, layers=more.pop("layers", 2))
    options = {
        "budget": 0.5,
        "calibration": batches(family),
        "forms": ("dense", "low_rank"),
        "seed": 0,
        "measure_speed": False,
    }
    options |= more
    return model, pr.compress(model, **options)


def counted(x, batch):
    return x[batch["attention_mask"].bool()] if "attention_mask" in batch else x


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """Family, compressed model and report."""
    return request.param, *compressed(request.param)


def test_the_output_is_kept(case):
    family, model, report = case
    original, batch = fresh(family), batches(family)[4]  # one that is held out
    wanted = counted(output(original, batch), batch)
    error = (counted(output(model, batch), batch) - wanted).norm() / wanted.norm()
    assert error < 0.25
    assert 0.3 * report.measured_error < error < 3 * report.measured_error
    assert 0.45 < report.eligible_ratio <= 0.5


def test_what_was_left_is_named(case):
    family, model, report = case
    left = {entry.name: entry.reason for entry in report.skipped}
    converted = {name for layer in report.layers for name in layer.names}
    dense = {name for name, module in fresh(family).named_modules() if type(module) in KINDS}
    assert converted | left.keys() >= dense
    assert not converted & left.keys()
    if family == "gpt2":
        assert left["lm_head"] == "shares its weight with 'transformer.wte' (Embedding)"
        assert model.lm_head.weight is model.transformer.wte.weight
        assert {layer.kind for layer in report.layers} == {"Conv1D"}
        assert len(report.layers) == 8
    else:
        assert left["pooler.dense"].startswith(
            "has no gradient: output['last_hidden_state'], which is compared, does not"
        )
    if family == "vit":
        assert "embeddings.patch_embeddings.projection" in converted


def test_saved_and_loaded_to_the_bit(case, tmp_path):
    family, model, _ = case
    pr.save_compressed(model, tmp_path)
    other = pr.load_compressed(tmp_path, fresh(family, seed=9))
    batch = batches(family)[0]
    assert torch.equal(output(other, batch), output(model, batch))
    state, again = model.state_dict(), other.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    if family == "gpt2":
        assert other.lm_head.weight is other.transformer.wte.weight
    written = sum(value.numel() * value.element_size() for value in {v.data_ptr(): v for v in state.values()}.values())
    assert abs((tmp_path / "model.safetensors").stat().st_size - written) < 0.2 * written  # names, and nothing twice


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_compile(family):
    model, _ = compressed(family, layers=1)
    batch = batches(family)[0]
    torch.compiler.reset()
    whole = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(output(whole, batch), output(model, batch))


def test_the_patches_of_a_vit():
    model, report = compressed("vit", include="*.projection")
    assert type(model.embeddings.patch_embeddings.projection) is LowRankConv2d
    assert [layer.kind for layer in report.layers] == ["Conv2d"]
    original, batch = fresh("vit"), batches("vit")[4]
    assert (output(model, batch) - output(original, batch)).norm() < 0.5 * output(original, batch).norm()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"method": "activation", "heal": pr.HealConfig(max_steps=3)}])
def test_what_stands_in_the_padding_does_not_matter(family, options):
    """Two calibrations that differ in padded tokens only give one model."""
    model, report = compressed(family, **options)
    others = []
    for batch in batches(family):
        padding = batch["attention_mask"] == 0
        others.append(batch | {"input_ids": batch["input_ids"].masked_fill(padding, 0)})
    again, second = compressed(family, calibration=others, **options)
    assert [layer.rank for layer in report.layers] == [layer.rank for layer in second.layers]
    assert report.measured_error == pytest.approx(second.measured_error)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, msg=name)
    unmasked = [{"input_ids": batch["input_ids"]} for batch in batches(family)]
    _, third = compressed(family, calibration=unmasked, **options)
    assert third.measured_error != pytest.approx(report.measured_error)


def test_generation_is_that_of_the_forward():
    """With a cache of keys and values, and in the compressed model."""
    model, _ = compressed("gpt2")
    assert type(model.transformer.h[0].attn.c_attn) is LowRankLinear
    start = torch.tensor([[3, 1, 4]])
    found = model.generate(start, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(start))
    wanted = start
    for _ in range(found.shape[1] - 3):
        wanted = torch.cat((wanted, output(model, {"input_ids": wanted})[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, wanted)


def test_quantized_conv1d(tmp_path):
    """GPT-2's layers hold the transposed weight."""
    model = fresh("gpt2", layers=1)
    exact = [output(model, batch) for batch in batches("gpt2", 3)]
    forms = ("int8", "int4", "int4+low_rank", "int8_low_rank", "interpolative")
    report = pr.compress(model, bits=9, calibration=batches("gpt2"), forms=forms, seed=0, measure_speed=False)
    assert {layer.kind for layer in report.layers} == {"Conv1D", "Embedding"}
    assert type(model.transformer.h[0].attn.c_attn) is QuantizedLinear
    assert report.measured_error < 0.05
    for batch, wanted in zip(batches("gpt2", 3), exact, strict=True):
        found = counted(output(model, batch), batch)
        assert (found - counted(wanted, batch)).norm() < 0.1 * counted(wanted, batch).norm()
    pr.save_compressed(model, tmp_path)
    again = pr.load_compressed(tmp_path, fresh("gpt2", layers=1, seed=9))
    assert torch.equal(output(again, batches("gpt2")[0]), output(model, batches("gpt2")[0]))


def hidden_state(model, batch):
    """Return the output of the last layer but one, by a number from the end, which extra entries would move."""
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == 3
    return states[-2]


def llava():
    vision_class, text_class = (transformers.CLIPVisionConfig, transformers.LlamaConfig)
    width = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=vision_class(**width, image_size=16, patch_size=8),
        text_config=text_class(**width, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32),
        image_token_id=VOCABULARY - 1,
        vision_feature_layer=-2,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(3, VOCABULARY - 1, (2, 12))
    ids[:, 2:6] = VOCABULARY - 1
    return model, [{"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)} for _ in range(3)], None


@pytest.mark.filterwarnings("ignore::panther.errors.NumericalWarning")
@pytest.mark.parametrize(
    "make", [lambda: (fresh("bert"), batches("bert", 3), hidden_state), llava], ids=["bert", "llava"]
)
def test_a_model_that_never_ran(make):
    """transformers registers hooks at the first forward that asks for hidden states, and notes that in an attribute."""
    options = {"bits": 5, "forms": ("int4", "int8"), "seed": 0, "measure_speed": False, "allow_slower": True}
    states = []
    for ran in (False, True):
        model, samples, forward_fn = make()
        hooks = [len(module._forward_hooks) for module in model.modules()]
        if ran:
            (forward_fn or output)(model, samples[0])
        pr.compress(model, calibration=samples, forward_fn=forward_fn, **options)
        if not ran:
            assert [len(module._forward_hooks) for module in model.modules()] == hooks
            assert not hasattr(model, "_output_capturing_hooks_installed")
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
