"""Models of transformers in many architectures: the report's error is true, batches stay, and a saved model is equal.

Their forwards sample, mask, crop, keep caches, return losses first, and share weights in ways of their own. The models
are small and random.
"""

import copy
import warnings

import pytest
import torch

import panther as pr
from panther.errors import NumericalWarning

transformers = pytest.importorskip("transformers", reason="transformers is in the extra transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# FalconLinear is a subclass, which has to be named.
KINDS = (torch.nn.Linear, torch.nn.Conv2d)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def text(seed, length=20, rows=16, padded=True):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padded:
        mask[::2, length // 2 :] = 0
    return {"input_ids": torch.randint(5, 200, (rows, length), generator=generator), "attention_mask": mask}


def labelled(seed, **options):
    batch = text(seed, **options)
    return batch | {"labels": batch["input_ids"].clone()}


def tagged(seed):
    batch = text(seed)
    return batch | {"labels": batch["input_ids"] % 2}


def sentences(seed):
    source = text(seed)
    target = text(seed + 100)
    return source | {f"decoder_{name}": value for name, value in target.items()}


def translated(seed):
    return text(seed) | {"labels": text(seed + 100)["input_ids"]}


def image(seed, size=32, rows=8):
    return {"pixel_values": torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))}


def sound(seed, rows=4):
    return {"input_values": torch.randn(rows, 2000, generator=torch.Generator().manual_seed(seed))}


def build(name, config_name=None, **options):
    def make():
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        config = (getattr(transformers, config_name) if config_name else model_class.config_class)(**options)
        return model_class(config).eval()

    return make


CASES = {
    "opt": (build("OPTForCausalLM", hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                  word_embed_proj_dim=64, max_position_embeddings=64, **TEXT), labelled),
    "bloom": (build("BloomForCausalLM", hidden_size=64, n_layer=2, n_head=4, **TEXT), text),
    "falcon": (build("FalconForCausalLM", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **TEXT), text),
    "phi": (build("PhiForCausalLM", **SMALL, **TEXT), text),
    "gemma": (build("GemmaForCausalLM", head_dim=16, num_key_value_heads=2, **SMALL, **TEXT), labelled),
    "mamba": (build("MambaForCausalLM", hidden_size=64, state_size=8, num_hidden_layers=2, **TEXT), text),
    "deberta": (build("DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["p2c", "c2p"],
                      max_position_embeddings=64, **SMALL, **TEXT), text),
    "electra": (build("ElectraForTokenClassification", embedding_size=32, **SMALL, **TEXT), tagged),
    "xlnet": (build("XLNetModel", d_model=64, n_layer=2, n_head=4, d_inner=128, **TEXT), text),
    "longformer": (build("LongformerModel", attention_window=8, max_position_embeddings=64, **SMALL, **TEXT), text),
    "albert": (build("AlbertForMaskedLM", embedding_size=32, **SMALL, **TEXT), text),
    "bart": (build("BartForConditionalGeneration", d_model=64, encoder_layers=2, decoder_layers=2,
                   encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                   max_position_embeddings=64, decoder_start_token_id=2, **TEXT), sentences),
    "pegasus": (build("PegasusForConditionalGeneration", d_model=64, encoder_layers=1, decoder_layers=1,
                      encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                      max_position_embeddings=64, decoder_start_token_id=0, **TEXT), translated),
    "wav2vec2": (build("Wav2Vec2Model", conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3),
                       num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=32, **SMALL), sound),
    "vit mae": (build("ViTMAEForPreTraining", image_size=32, patch_size=8, decoder_hidden_size=32,
                      decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=64,
                      **SMALL), image),
    "convnext": (build("ConvNextForImageClassification", hidden_sizes=[32, 64], depths=[1, 2], num_stages=2,
                       image_size=32), image),
    "clip": (build("CLIPVisionModelWithProjection", image_size=32, patch_size=8, projection_dim=32, **SMALL), image),
    "perceiver": (build("PerceiverModel", num_latents=8, d_latents=32, d_model=64, num_blocks=1,
                        num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2),
                  lambda seed: {"inputs": torch.randn(8, 20, 64, generator=torch.Generator().manual_seed(seed))}),
}  # fmt: skip


@pytest.mark.parametrize("forms", ["low_rank", ("int8", "int4")], ids=["low rank", "quantized"])
@pytest.mark.parametrize("case", CASES)
def test_an_architecture(case, forms, tmp_path):
    make, batch_of = CASES[case]
    model, batches = make(), [batch_of(seed) for seed in range(8)]
    exact, given_batches = copy.deepcopy(model), copy.deepcopy(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # a classifier is applied fewer times than it has inputs
        report = pr.compress(model, 0.5, batches, forms=forms, include=KINDS, seed=0, measure_speed=False)
    for ours, theirs in zip(batches, given_batches, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not model.training
    index = 7  # the held-out batch
    output, expected = (_output(each, batches[index], report.output) for each in (model, exact))
    mask = _mask(case, batches[index], output)
    difference, whole = (output - expected)[mask], expected[mask]
    assert report.measured_error == pytest.approx(
        (difference.norm() / whole.norm()).item(), rel=0.3 if case in SAMPLING else 1e-3, abs=1e-7
    )
    assert model.dtype == exact.dtype
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, make())
    assert torch.equal(_output(restored, batches[index], report.output), output)


TRANSLATORS = ("bart", "pegasus")
# Models whose forward draws random numbers: the report's are others than those of this test.
SAMPLING = ("vit mae",)


@torch.no_grad()
def _output(model, batch, name):
    torch.manual_seed(5)
    output = model(**copy.deepcopy(batch))  # `name` is an expression of it
    return eval(name, {"output": output})


def _mask(case, batch, output):
    """Return the positions that count: of a decoder those of its own mask, or all."""
    name = "attention_mask"
    if case in TRANSLATORS:
        name = "decoder_attention_mask"
    mask = batch.get(name)
    has_positions = mask is not None and output.dim() > 2 and output.shape[:2] == mask.shape
    return mask.bool() if has_positions else slice(None)
