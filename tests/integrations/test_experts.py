"""Stacked experts of transformers models: compressed, run by every implementation, saved under transformers' names."""

import copy

import pytest
import torch
from safetensors import safe_open
from torch import nn

import panther as pr
from panther.nn import QuantizedExperts
from panther.nn.sketch_record import plain_state

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}
# The class, its config, and the place of experts in a block. Mixtral and OLMoE are saved with a tensor for each expert,
# and gpt-oss in transposed layout, with biases, under the names in memory.
FAMILIES = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | {"num_local_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", SIZES | {"num_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", SIZES | {"num_local_experts": 4, "head_dim": 16}),
}


def fresh(family, seed=0):
    model_name, config, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(getattr(transformers, config)(**sizes)).eval()


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(2, 64, (4, 16), generator=generator)} for _ in range(count)]


def logits(model):
    with torch.no_grad():
        return model(**batches(1)[0]).logits


def compress(model, **options):
    return pr.compress(model, bits=4.5, group_size=32, calibration=batches(), seed=0, measure_speed=False, **options)


def expert_tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sorted(name for name in file.keys() if "experts" in name)  # noqa: SIM118 (not a dictionary)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_survive_every_way_to_save_and_load(family, tmp_path):
    model = fresh(family)
    dense_bytes = sum(tensor.nbytes for tensor in plain_state(model).values())
    exact = logits(model)
    report = compress(model)
    y = logits(model)
    stacks = [layer for layer in report.layers if "experts" in layer.names[0]]
    assert len(stacks) == 4
    assert {layer.kind for layer in stacks} == {type(model.model.layers[0].mlp.experts).__name__}
    assert not any("experts" in entry.name for entry in report.skipped)
    # The factor that 4.5 of 32 bits predict, up to what is not compressed: norms, routers and biases.
    rest = report.bytes_before - report.eligible_bytes_before
    assert report.bytes_before == dense_bytes
    assert report.bytes_after - rest <= 4.5 / 32 * report.eligible_bytes_before
    assert report.bytes_after < 0.2 * report.bytes_before
    error = ((y - exact).norm() / exact.norm()).item()
    assert 0.5 * report.measured_error < error < 2 * report.measured_error < 0.4

    model.save_pretrained(tmp_path / "saved")
    names = expert_tensors(tmp_path / "saved")
    assert sum(name.endswith(("gate_up_proj.codes", "down_proj.codes")) for name in names) == 4
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), y)
    loaded.save_pretrained(tmp_path / "again")
    assert expert_tensors(tmp_path / "again") == names
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")), y)

    pr.save_compressed(model, tmp_path / "compressed")
    assert torch.equal(logits(pr.load_compressed(tmp_path / "compressed", fresh(family, 1))), y)
    assert torch.equal(logits(pr.from_pretrained(tmp_path / "compressed")), y)
    expanded = pr.load_compressed(tmp_path / "compressed", fresh(family, 1), expand=True)
    torch.testing.assert_close(logits(expanded), y)
    assert not any(isinstance(module, QuantizedExperts) for module in expanded.modules())

    # Dense again, experts have the names that they have in the file of a model that was never compressed.
    expanded.save_pretrained(tmp_path / "dense")
    fresh(family).save_pretrained(tmp_path / "original")
    assert expert_tensors(tmp_path / "dense") == expert_tensors(tmp_path / "original")
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(dense), y)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_every_implementation_computes_the_same(family):
    model = fresh(family)
    implementation = model.config._experts_implementation
    compress(model)
    assert model.config._experts_implementation == implementation
    outputs = {}
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        outputs[name] = logits(model)
    torch.testing.assert_close(outputs["grouped_mm"], outputs["eager"])
    torch.testing.assert_close(outputs["batched_mm"], outputs["eager"])


def test_a_model_whose_experts_are_compressed_in_one_block_only(tmp_path):
    """The experts of the other block are saved under their names in memory, and load."""
    model = fresh("mixtral")
    compress(model, exclude="model.layers.1.*")
    y = logits(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), y)
    assert isinstance(loaded.model.layers[0].mlp.experts.down_proj, QuantizedExperts)
    assert isinstance(loaded.model.layers[1].mlp.experts.down_proj, nn.Parameter)


def test_a_body_that_is_compressed_alone(tmp_path):
    model = fresh("mixtral")
    pr.compress(model.model, bits=5.0, group_size=32, calibration=batches(), seed=0, measure_speed=False)
    y = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), y)


def test_a_dense_folder_compresses_on_loading_and_becomes_dense_again(tmp_path):
    """A model from a file has the conversions that loaded it, which compressed experts must not go through."""
    from panther.integrations.transformers import PantherConfig

    fresh("mixtral").save_pretrained(tmp_path / "dense")
    config = PantherConfig(bits=4.5, group_size=32, calibration=batches(), seed=0, measure_speed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    y = logits(model)
    model.save_pretrained(tmp_path / "small")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert loaded.model.layers[0].mlp.experts.gate_up_proj.dtype is torch.bfloat16
    rounded = logits(loaded)
    assert (rounded - y).norm() < 0.05 * y.norm()
    loaded.dequantize()
    loaded.save_pretrained(tmp_path / "again")
    assert expert_tensors(tmp_path / "again") == expert_tensors(tmp_path / "dense")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert (logits(again) - rounded).norm() < 0.02 * y.norm()


def test_padding_does_not_count():
    model = fresh("mixtral")
    padded = []
    for batch in batches():
        mask = torch.ones_like(batch["input_ids"])
        mask[:2, 10:] = 0
        padded.append(batch | {"attention_mask": mask})
    options = {"bits": 6.0, "group_size": 32, "seed": 0, "measure_speed": False, "forms": ["int5"]}
    codes = []
    for filler in (3, 60):
        twin = copy.deepcopy(model)
        changed = [
            batch | {"input_ids": torch.where(batch["attention_mask"] == 0, filler, batch["input_ids"])}
            for batch in padded
        ]
        pr.compress(twin, calibration=changed, **options)
        codes.append(twin.model.layers[0].mlp.experts.down_proj.codes)
    assert (codes[0] != codes[1]).float().mean() < 1e-3
