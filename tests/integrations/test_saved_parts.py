"""Models of transformers that are saved or read with another config than the one of the compressed model.

People load towers of CLIP and encoders of T5 alone, join a compressed encoder and a decoder, train a student that has
the config of its teacher, and pass ``config=``. Layers were then filled with random numbers, without an error.
"""

import json
import os
import shutil
import sys
import threading

import pytest
import torch
import waits
from safetensors.torch import load_file, save_file

import panther as pr
from panther.errors import FormatError
from panther.files.records import record_checksum
from panther.nn.protocol import CompressedModule

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
FORMS = ("int8", "low_rank")


def bert(head="BertModel", **settings):
    torch.manual_seed(0)
    return getattr(transformers, head)(transformers.BertConfig(**(BERT | settings))).eval()


def llama(**settings):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | settings))).eval()


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()


def bart():
    sizes = {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartModel(transformers.BartConfig(**sizes)).eval()


def clip(kind="CLIP"):
    torch.manual_seed(0)
    text_config = BERT | {"max_position_embeddings": 16, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(text_config=text_config, vision_config=dict(VISION))
    return getattr(transformers, f"{kind}Model")(config).eval()


def llava():
    torch.manual_seed(0)
    parts = {"vision_config": transformers.CLIPVisionConfig(**VISION), "text_config": llama().config}
    config = transformers.LlavaConfig(**parts, image_token_index=63)
    return transformers.LlavaForConditionalGeneration(config).eval()


def compressed(model, form="int8"):
    pr.compress(model, 0.6, method="svd", forms=(form,), measure_speed=False, allow_slower=True, seed=0)
    return model


def tokens(rows=3):
    return torch.randint(2, 60, (rows, 8), generator=torch.Generator().manual_seed(0))


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def output(model, inputs):
    return model(inputs)[0]


def assert_saved_and_loaded(model, inputs, folder, load=None, **settings):
    expected = output(model, inputs)
    entries = entries_of(model)
    model.save_pretrained(folder, **settings)
    assert entries_of(model) == entries
    loaded = (load or type(model).from_pretrained)(folder).eval()
    assert torch.equal(output(loaded, inputs), expected)
    return loaded


def entries_of(model):
    parts = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    return [getattr(part.config, "quantization_config", None) for part in parts]


PARTS = {
    "T5 encoder": (t5, "encoder", tokens),
    "BART encoder, which shares its model's config": (bart, "encoder", tokens),
    "CLIP text tower": (clip, "text_model", tokens),
    "CLIP vision tower": (clip, "vision_model", images),
    "SigLIP vision tower": (lambda: clip("Siglip"), "vision_model", images),
    "LLaVA vision tower": (llava, "model.vision_tower", images),
    "LLaVA language model": (llava, "model.language_model", tokens),
    "BERT encoder's body": (lambda: bert("BertForMaskedLM"), "bert", tokens),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_saved_alone_and_the_whole_as_well(name, form, tmp_path):
    make, path, inputs = PARTS[name]
    model = compressed(make(), form)
    part = assert_saved_and_loaded(model.get_submodule(path), inputs(), tmp_path / "part")
    assert any(isinstance(module, CompressedModule) for module in part.modules())
    if hasattr(transformers, type(part).__name__):
        again = assert_saved_and_loaded(part, inputs(), tmp_path / "again", pr.from_pretrained)
        assert type(again) is type(part)
    else:
        with pytest.raises(FormatError, match=r"names the architecture .* by from_pretrained of the class itself"):
            pr.from_pretrained(tmp_path / "part")
    model.save_pretrained(tmp_path / "whole")
    whole = type(model).from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(output(whole.get_submodule(path), inputs()), output(part, inputs()))
    assert_saved_and_loaded(whole.get_submodule(path), inputs(), tmp_path / "part of the loaded")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", ["save_pretrained", "in shards", "save_compressed"])
@pytest.mark.parametrize("tower", ["Text", "Vision"])
def test_a_tower_is_loaded_from_the_folder_of_the_whole(tower, save, form, tmp_path):
    model, inputs = compressed(clip(), form), tokens() if tower == "Text" else images()
    if save == "save_compressed":
        pr.save_compressed(model, tmp_path)
    else:
        model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if save == "in shards" else {}))
    loaded = getattr(transformers, f"CLIP{tower}Model").from_pretrained(tmp_path).eval()
    part = model.text_model if tower == "Text" else model.vision_model
    assert torch.equal(output(loaded, inputs), output(part, inputs))
    message = r"hold '(text|visual)_projection' as a compressed layer of Panther.* does not name it"
    with pytest.raises(FormatError, match=message):  # the record of a tower does not have the layer beside it
        getattr(transformers, f"CLIP{tower}ModelWithProjection").from_pretrained(tmp_path)


@pytest.mark.parametrize("halves", [("encoder",), ("decoder",), ("encoder", "decoder")])
@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_made_of_compressed_models(halves, form, tmp_path):
    models = {"encoder": bert(), "decoder": bert("BertLMHeadModel", is_decoder=True, add_cross_attention=True)}
    for half, model in models.items():
        if half in halves:
            compressed(model, form)
        model.save_pretrained(tmp_path / half)
    make = transformers.EncoderDecoderModel
    model = make.from_encoder_decoder_pretrained(*(str(tmp_path / half) for half in models)).eval()
    model.save_pretrained(tmp_path / "both")
    pr.save_compressed(model, tmp_path / "ours")
    for load in (make.from_pretrained, transformers.AutoModelForSeq2SeqLM.from_pretrained, pr.from_pretrained):
        for folder in ("both", "ours"):
            loaded = load(tmp_path / folder).eval()
            with torch.no_grad():
                found = loaded(input_ids=tokens(), decoder_input_ids=tokens()).logits
                expected = model(input_ids=tokens(), decoder_input_ids=tokens()).logits
            assert torch.equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_part_whose_weights_have_other_names_is_refused(form, tmp_path):
    """transformers finds none of the weights under the names of the class, for dense folders too, and goes on."""
    save(compressed(llava(), form), tmp_path)
    with pytest.raises(FormatError, match=r"do not hold '(embed_tokens|layers\.0).*under the names of a LlamaModel"):
        transformers.LlamaModel.from_pretrained(tmp_path)


def test_an_image_encoder_is_compressed_in_a_pair(tmp_path):
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(**VISION)).eval()
    decoder = bert("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model = transformers.VisionEncoderDecoderModel(encoder=compressed(vit), decoder=decoder).eval()
    loaded = type(model).from_pretrained(save(model, tmp_path)).eval()
    assert torch.equal(output(loaded.encoder, images()), output(model.encoder, images()))


def save(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_another_config_is_refused(form, tmp_path):
    """The model's own config is taken; one of the base model, whatever weights it is given with, is not."""
    model = compressed(bert(), form)
    base, folder = save(bert(), tmp_path / "base"), save(model, tmp_path / "folder")
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.BertModel
    assert torch.equal(output(kind.from_pretrained(folder, config=config).eval(), tokens()), output(model, tokens()))
    dense = transformers.AutoConfig.from_pretrained(base)
    message = (
        r"hold 'e(ncoder|mbeddings)\..* as a compressed layer of Panther, and the config that was used does not name"
    )
    for load in (kind.from_pretrained, transformers.AutoModel.from_pretrained, pr.from_pretrained):
        with pytest.raises(FormatError, match=message):
            load(folder, config=dense)
    with pytest.raises(FormatError, match=message):
        kind.from_pretrained(None, config=dense, state_dict=model.state_dict())
    shutil.copy(base / "config.json", folder)  # as people do who repair a folder
    for load in (kind.from_pretrained, transformers.AutoModelForMaskedLM.from_pretrained, pr.from_pretrained):
        with pytest.raises(FormatError, match=message):
            load(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=message):
        kind.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import transformers, panther", "import panther, transformers"])
def test_another_config_is_refused_whatever_is_imported_first(imports, tmp_path):
    base, folder = save(bert(), tmp_path / "base"), save(compressed(bert()), tmp_path / "folder")
    code = f"import sys\n{imports.partition(',')[0]}\nfrom transformers import BertModel, BertConfig\n{imports}\n" + (
        "try: BertModel.from_pretrained(sys.argv[1], config=BertConfig.from_pretrained(sys.argv[2]))\n"
        "except panther.errors.FormatError as error: print('refused', error)"
    )
    assert "refused" in waits.run([sys.executable, "-c", code, str(folder), str(base)], check=True).stdout


def test_a_student_of_a_compressed_teacher_is_dense(tmp_path):
    loaded = transformers.BertModel.from_pretrained(save(compressed(bert()), tmp_path / "teacher"))
    for index, teacher in enumerate((compressed(bert()), loaded)):
        student = transformers.BertModel(teacher.config).eval()
        for folder in (save(student, tmp_path / f"{index}"), pr.save_compressed(student, tmp_path / f"{index} ours")):
            assert "quantization_config" not in json.loads((folder / "config.json").read_text())
            assert torch.equal(output(pr.from_pretrained(folder), tokens()), output(student, tokens()))
        again = type(teacher).from_pretrained(save(teacher, tmp_path / f"{index} teacher")).eval()
        assert torch.equal(output(again, tokens()), output(teacher.eval(), tokens()))
    whole = transformers.CLIPModel.from_pretrained(save(compressed(clip()), tmp_path / "clip"))
    tower = transformers.CLIPVisionModel(whole.config.vision_config).eval()
    assert_saved_and_loaded(tower, images(), tmp_path / "tower")


def test_compressing_leaves_the_config_alone():
    """Several models are often made of one config object."""
    config = transformers.BertConfig(**BERT)
    models = [transformers.BertModel(config) for _ in range(2)]
    first_config = dict(vars(config))
    pr.fuse_(compressed(models[0], "low_rank"))
    assert vars(config) == first_config
    assert models[0].config is models[1].config is models[0].encoder.config


def test_pairs_of_plain_layers_are_refused_with_a_way_that_works(tmp_path):
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(**(VISION | {"hidden_size": 64}))).eval()
    for model, inputs in ((bert("BertForMaskedLM"), tokens()), (vit, images())):
        compressed(model, "low_rank")
        folder = save(model, tmp_path / type(model).__name__)
        pr.to_linears_(model)
        for write in (model.save_pretrained, lambda target, model=model: pr.save_compressed(model, target)):
            target = tmp_path / "pairs"
            with pytest.raises(
                FormatError, match=r"are pairs of plain layers.* pr.from_pretrained\(folder, expand=True"
            ):
                write(target)
            assert not target.exists()
        assert torch.equal(output(pr.from_pretrained(folder, expand=True), inputs), output(model, inputs))


def test_tensors_that_the_caller_gathered_are_saved(tmp_path):
    """As the Trainer does for sharded models; they were ignored for models that from_pretrained had loaded."""
    model = compressed(bert())
    for folder in (tmp_path / "0", tmp_path / "1"):
        state = model.state_dict()
        state["pooler.dense.bias"] = torch.full_like(state["pooler.dense.bias"], 7.0)
        model.save_pretrained(folder, state_dict=state)
        assert load_file(folder / "model.safetensors")["pooler.dense.bias"].eq(7).all()
        model = type(model).from_pretrained(folder)


@pytest.mark.parametrize("save_newer", ["save_pretrained", "in shards"])
def test_a_manifest_of_an_older_save_is_not_applied(save_newer, tmp_path, caplog):
    """A tied model was saved there before: its manifest makes the head share the embedding's codes."""
    pr.save_compressed(compressed(llama(tie_word_embeddings=True)), tmp_path)
    model = compressed(llama(tie_word_embeddings=False))
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if save_newer == "in shards" else {}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(output(loaded, tokens()), output(model, tokens()))
    assert torch.equal(output(pr.from_pretrained(tmp_path), tokens()), output(model, tokens()))
    if save_newer == "save_pretrained":
        assert "is of an older save, whose weights were replaced: it is ignored" in caplog.text
    with pytest.raises(FormatError):
        pr.load_compressed(tmp_path, llama(tie_word_embeddings=False))


def test_shards_replace_the_weights_of_an_older_save(tmp_path):
    """transformers leaves weights in one file beside new shards, and reads them."""
    save(compressed(llama()), tmp_path)
    model = compressed(llama(hidden_size=64))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    for load in (transformers.AutoModelForCausalLM.from_pretrained, pr.from_pretrained):
        assert torch.equal(output(load(tmp_path).eval(), tokens()), output(model, tokens()))
    save(model, tmp_path)
    model.save_pretrained(tmp_path, variant="other", max_shard_size="20KB")  # beside the weights
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("replacement", [None, "folder", "FIFO", "link"])
def test_a_lost_manifest_is_noticed(replacement, tmp_path):
    """The weights were loaded without checksums, and a model lost the names of its shared tensors."""
    pr.save_compressed(compressed(llama()), tmp_path)
    path = tmp_path / "panther.json"
    path.unlink()
    if replacement == "folder":
        path.mkdir()
    elif replacement == "FIFO":
        os.mkfifo(path)
    elif replacement == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(FormatError, match=r"panther\.json"):
        pr.from_pretrained(tmp_path)


def test_generation_is_the_same_after_save_compressed(tmp_path):
    model = compressed(llama())
    prompt = torch.tensor([[5, 9, 17, 33]])
    for index, settings in enumerate(({"eos_token_id": list(range(3, 64, 2))}, {"num_beams": 4, "eos_token_id": 2})):
        model.generation_config.update(num_beams=1, max_new_tokens=12, pad_token_id=0)
        model.generation_config.update(**settings)
        loaded = pr.from_pretrained(pr.save_compressed(model, tmp_path / str(index)))
        assert torch.equal(loaded.generate(prompt), model.generate(prompt))
        assert loaded.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()


CODE = {
    "configuration_toy.py": """
from transformers import PreTrainedConfig
class ToyConfig(PreTrainedConfig):
    model_type = "toy_parts"
""",
    "layers_toy.py": """
from torch import nn
def pair():
    return nn.Linear(64, 128), nn.Linear(128, 64)
""",
    "modeling_toy.py": """
import torch
from transformers import PreTrainedModel
from .configuration_toy import ToyConfig
from .layers_toy import pair
class ToyModel(PreTrainedModel):
    config_class = ToyConfig
    def __init__(self, config):
        super().__init__(config)
        self.a, self.b = pair()
        self.post_init()
    def forward(self, x):
        return (self.b(torch.nn.functional.gelu(self.a(x))),)
""",
}


def test_code_of_the_folder_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "source"
    source.mkdir()
    for name, code in CODE.items():
        (source / name).write_text(code)
    names = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
    config = {"model_type": "toy_parts", "architectures": ["ToyModel"], "auto_map": names}
    (source / "config.json").write_text(json.dumps(config))
    made = transformers.AutoConfig.from_pretrained(source, trust_remote_code=True)
    torch.manual_seed(0)
    save(transformers.AutoModel.from_config(made, trust_remote_code=True), source)
    model = compressed(transformers.AutoModel.from_pretrained(source, trust_remote_code=True).eval())
    for folder in (pr.save_compressed(model, tmp_path / "ours"), save(model, tmp_path / "theirs")):
        assert CODE.keys() <= {path.name for path in folder.iterdir()}
        loaded = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
        x = torch.randn(4, 64)
        assert torch.equal(output(loaded, x), output(model, x))
        with pytest.raises(
            FormatError, match=r"its code is in the folder, .*from_pretrained\('.*', trust_remote_code=True"
        ):
            pr.from_pretrained(folder)


def scaled(folder, dtype, scale_name):
    """A folder whose projections are in 8 bits, with their scales in tensors that no config describes."""
    model = llama()
    save(model, folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "proj" in name]:
        largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
        scale = state[name].abs().amax(1, keepdim=True) / largest
        state[name] = (state[name] / scale).to(dtype)
        state[scale_name(name)] = scale.clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("dtype", "scale_name"),
    [
        (torch.float8_e4m3fn, lambda name: name + "_scale_inv"),  # DeepSeek
        (torch.float8_e4m3fn, lambda name: name.removesuffix("weight") + "scale_weight"),  # ComfyUI
        (torch.float8_e5m2, lambda name: name.removesuffix("weight") + "input.amax"),
        (torch.float8_e4m3fn, lambda name: "scaled_fp8." + name),
        (torch.float8_e4m3fn, lambda name: "quant." + name.removeprefix("model.").removesuffix("weight") + "s"),
        (torch.int8, lambda name: name + "_scale"),
        (torch.int8, lambda name: name.removesuffix("weight") + "SCB"),  # bitsandbytes
        (torch.int8, lambda name: "all.scales.of." + name),
    ],
)
def test_scales_that_nobody_would_apply_are_refused(dtype, scale_name, tmp_path):
    from panther.cli import main

    folder = scaled(tmp_path / "model", dtype, scale_name)
    batches = [{"input_ids": tokens()} for _ in range(5)]
    for use in (
        pr.from_pretrained,
        lambda folder: pr.compress_folder(folder, tmp_path / "out", bits=5, calibration=batches, forms=("int4",)),
    ):
        with pytest.raises(
            FormatError, match=r"_proj.weight' in .* is torch.* would not be applied: restore the entry"
        ):
            use(folder)
    assert main(["compress", str(folder), "--budget", "0.5", "--method", "svd", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_weights_of_8_bits_without_scales_are_loaded(tmp_path):
    """float8 without scales is a cast, which transformers undoes."""
    folder = save(llama(), tmp_path)
    state = load_file(folder / "model.safetensors")
    state = {name: each.to(torch.float8_e4m3fn) if "proj" in name else each for name, each in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    weight = pr.from_pretrained(folder).model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, state["model.layers.0.mlp.up_proj.weight"].to(weight.dtype))


STRANGERS = {
    "consolidated.safetensors": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\nsize 14\n"),
    "adapter_model.safetensors": lambda path: path.write_bytes(b"\0" * 7),
    "x.safetensors": lambda path: path.mkdir(),
    "extra.safetensors": os.mkfifo,
    "loop.safetensors": lambda path: path.symlink_to(path.name),
    "model.safetensors.index.json": lambda path: path.write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    ),
    "model.fp16.safetensors": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_files_that_transformers_does_not_read_are_not_read(name, tmp_path):
    model = llama()
    STRANGERS[name](save(model, tmp_path) / name)
    assert torch.equal(output(pr.from_pretrained(tmp_path), tokens()), output(model, tokens()))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("place", [None, "vision_config"])
def test_a_config_does_not_reach_the_hub(key, place, tmp_path, monkeypatch, caplog):
    """transformers asks the hub for the kernel that a config names, also with local_files_only=True."""
    model = clip() if place else llama()
    path = save(model, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    (config[place] if place else config)[key] = "someone/kernel"
    path.write_text(json.dumps(config))
    calls = []
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", lambda name, **kwargs: calls.append(name), raising=False)
    loaded = pr.from_pretrained(tmp_path)
    if place is None:
        assert torch.equal(output(loaded, tokens()), output(model, tokens()))
    assert not calls
    assert "may be code of the hub: the default is used" in caplog.text


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_wrappers_leave_no_trace(wrap, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    compressed(model)
    pr.save_compressed(wrap(model), tmp_path)
    x = torch.randn(2, 64)
    loaded = pr.load_compressed(tmp_path, wrap(plain))
    assert isinstance(loaded[0], CompressedModule)
    assert torch.equal(loaded(x), model(x))


def test_layers_that_a_model_shares_by_a_pattern_are_saved_once(tmp_path):
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_mem_blocks": 1, "use_shared_attention_adapter": True,
        "adapter_rank": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    model = compressed(transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**sizes)).eval())
    loaded = assert_saved_and_loaded(model, tokens(), tmp_path / "model")
    names = [name for name in load_file(tmp_path / "model/model.safetensors") if "shared_transformer" in name]
    assert {name.partition(".shared")[0] for name in names} == {"model.layers.1"}
    assert_saved_and_loaded(loaded, tokens(), tmp_path / "again", pr.from_pretrained)


@pytest.mark.parametrize("kind", ["two models of one config", "a model and its part"])
def test_threads_save_models_that_share_configs(kind, tmp_path):
    """People save checkpoints in the background. Each folder had the record of one of the models, at random."""
    if kind == "two models of one config":
        config = bert().config
        models = [compressed(transformers.BertModel(config).eval(), form) for form in ("int8", "low_rank")]
        inputs = tokens()
    else:
        whole = compressed(clip())
        models, inputs = [whole, whole.vision_model], images()
    second = threading.Thread(target=models[1].save_pretrained, args=(tmp_path / "second",))

    def save_the_second(*args):
        if not second.ident:
            second.start()
            second.join(0.2)

    models[0].register_state_dict_pre_hook(save_the_second)
    models[0].save_pretrained(tmp_path / "first")
    second.join()
    for name, model in zip(("first", "second"), models, strict=True):
        loaded, part = type(model).from_pretrained(tmp_path / name).eval(), model
        if kind == "a model and its part" and name == "first":
            loaded, part = loaded.vision_model, model.vision_model
        assert torch.equal(output(loaded, inputs), output(part, inputs))
        assert not any(entries_of(model))


def test_a_folder_in_a_folder_is_checked_itself(tmp_path):
    """As pipelines of diffusers are laid out. The files of the outer folder were checked in place of the inner ones."""
    outer, model = save(bert("BertForMaskedLM"), tmp_path), compressed(bert())
    pr.save_compressed(model, outer / "encoder")
    loaded = pr.from_pretrained(outer, subfolder="encoder")
    assert type(loaded) is transformers.BertModel
    assert torch.equal(output(loaded, tokens()), output(model, tokens()))
    state = load_file(outer / "encoder/model.safetensors")
    state["pooler.dense.bias"] += 1
    (outer / "encoder/panther.json").rename(outer / "panther.json")
    with pytest.raises(FormatError, match=r"encoder/panther\.json is lost"):
        pr.from_pretrained(outer, subfolder="encoder")
    scaled(outer / "decoder", torch.float8_e4m3fn, lambda name: name + "_scale")
    with pytest.raises(FormatError, match=r"decoder is torch\.float8_e4m3fn, and its scales .* would not be applied"):
        pr.from_pretrained(outer, subfolder="decoder")


@pytest.mark.parametrize("kind", ["inside of a PeftModel", "on a part", "deleted"])
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_in_a_model_are_not_saved_as_layers_of_it(kind, tmp_path):
    """The folder could not be opened. Dense models get random layers from such folders."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    make = clip if kind == "on a part" else llama
    models = [compressed(make()), compressed(make())]
    for model in models:
        if kind == "inside of a PeftModel":
            peft.get_peft_model(model, adapters)
        else:
            (model.vision_model if kind == "on a part" else model).add_adapter(adapters)
        if kind == "deleted":
            model.delete_adapter("default")
    with pytest.raises(
        FormatError, match=r"layers have adapters of PEFT \(first '.*self_attn\.q_proj'\), which from_p"
    ):
        models[0].save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    pr.save_compressed(models[0], tmp_path)
    with pytest.raises(FormatError, match=r"holds no config\.json, .* call pr\.load_compressed"):
        pr.from_pretrained(tmp_path)
    pr.load_compressed(tmp_path, models[1])
    inputs = (images(), tokens()) if kind == "on a part" else (tokens(),)
    parts = [model.vision_model if kind == "on a part" else model for model in models]
    assert torch.equal(output(parts[1], inputs[0]), output(parts[0], inputs[0]))


def with_trained_scales(model):
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "train_scales_"):
            module.train_scales_()
            torch.nn.init.normal_(module.scale_logs, std=0.05)
    return model


@pytest.mark.parametrize(("form", "is_tied"), [("int8", False), ("int8", True), ("int4+low_rank", False)])
def test_trained_scales_continue_from_a_checkpoint(form, is_tied, tmp_path):
    """A run of the Trainer that continued began with rounded scales, and learned less than one that did not stop."""
    model = with_trained_scales(compressed(llama(tie_word_embeddings=is_tied), form))
    logs = {name: value for name, value in model.named_parameters() if name.endswith("scale_logs")}
    loaded = type(model).from_pretrained(save(model, tmp_path))
    again = type(model).from_pretrained(save(loaded, tmp_path / "again"))  # by a model with a quantizer
    for each in (loaded, again):
        assert torch.equal(output(each.eval(), tokens()), output(model, tokens()))
    assert logs
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in logs.items())
    restored = with_trained_scales(compressed(llama(tie_word_embeddings=is_tied), form))
    restored.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # as the Trainer does
    assert all(torch.equal(restored.get_parameter(name), value) for name, value in logs.items())
    expected = output(model, tokens())
    torch.testing.assert_close(output(loaded.dequantize(), tokens()), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_gptq_are_not_called_layers_of_panther(tmp_path):
    """They have scales, too; a user was told to open the folder in a way that fails alike."""
    folder = save(llama(), tmp_path)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "proj" in name]:
        del state[name]
        layer = name.removesuffix("weight")
        state |= {layer + "qweight": torch.zeros(4, 32, dtype=torch.int32), layer + "scales": torch.ones(1, 32)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"does not fit the LlamaForCausalLM .* missing model\.layers\.0\.mlp"):
        pr.from_pretrained(folder)


def test_a_model_without_generation_config_is_saved(tmp_path):
    model = compressed(llama())
    model.generation_config = None
    loaded = pr.from_pretrained(pr.save_compressed(model, tmp_path))
    assert torch.equal(output(loaded, tokens()), output(model, tokens()))


@pytest.mark.parametrize("files", [5, True, "generation_config.json", {"a": 1}])
def test_further_files_of_a_manifest_are_a_list(files, tmp_path):
    manifest = json.loads((pr.save_compressed(compressed(bert()), tmp_path) / "panther.json").read_text())
    manifest = {key: value for key, value in manifest.items() if key != "checksum"} | {"files": files}
    (tmp_path / "panther.json").write_text(json.dumps(manifest | {"checksum": record_checksum(manifest)}))
    for load in (pr.from_pretrained, lambda folder: pr.load_compressed(folder, bert())):
        with pytest.raises(FormatError, match=r"panther\.json: 'files' must be a list of names"):
            load(tmp_path)


@pytest.mark.parametrize("parts", [5, "x", [5], [{"modules": {}}], [{"modules": {"layer": 5}}], {"modules": {}}])
def test_parts_of_a_damaged_config(parts, tmp_path):
    folder = save(compressed(bert()), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["parts"] = parts
    (folder / "config.json").write_text(json.dumps(config))
    for load in (transformers.AutoModel.from_pretrained, pr.from_pretrained):
        with pytest.raises(FormatError, match="is damaged, 'modules' must name each layer"):
            load(folder)
