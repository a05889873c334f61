"""GGUF files, read back by the package gguf, number by number, and run by llama.cpp."""

import json
import operator
from itertools import pairwise

import pytest
import torch
from llama_engine import LlamaCpp
from torch import nn

import panther as pr
from panther.cli import main
from panther.compression.readers import block_bytes
from panther.errors import PantherError, SketchMismatchError
from panther.integrations.gguf import write_gguf
from panther.integrations.gguf.blocks import pack_blocks
from tests.support.compressing import quick

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.extra

WORDS = 300
SIZES = {
    "vocab_size": WORDS, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 32, "intermediate_size": 160, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 48},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"query_pre_attn_scalar": 32},
    "Gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "num_attention_heads": 1},
}
TYPES = {
    ("int4", True): "Q4_0", ("int4", False): "Q4_1", ("int5", True): "Q5_0", ("int5", False): "Q5_1",
    ("int8", True): "Q8_0", ("int8", False): "Q8_0",
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEXT = ["It's 123 words, DON'T\n\nsplit  them", "déjà vu 你好 two words and some more words"] * 4


def make(kind="Llama", **options):
    """Return a model whose norms and biases are not at their initial values."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**(SIZES | MODELS[kind] | options))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compressed(kind="Llama", form="int4", symmetric=True, sizes=(), **options):
    model = make(kind, **dict(sizes))
    defaults = {"target": "gguf", "method": "svd", "budget": 0.4, "forms": form, "symmetric": symmetric}
    pr.compress(model, **(quick | defaults | options))
    return model


def read(path):
    """Return the tensors of a file as float32 arrays, their types, and the fields that are not about tokens."""
    reader = gguf.GGUFReader(path)
    values = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    return values, types, {name: field.contents() for name, field in reader.fields.items()}


def numbers(layer):
    """Return the weight that a file holds of a layer: scale and minimum in fp16, and the products in float32."""
    if not isinstance(layer, pr.nn.QuantizedLinear | pr.nn.QuantizedEmbedding):
        return layer.weight.detach().float()
    codes, scales, zeros = (each.double() for each in layer.grid_numbers())
    scales, zeros = (each.repeat_interleave(32, 1) for each in (scales, zeros))
    if layer.is_symmetric:
        return (scales * (codes - zeros)).float()
    return scales.float() * codes.float() - (scales * zeros).half().float()


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_of_every_architecture(kind, tmp_path):
    model = compressed(kind)
    types = write_gguf(model, tmp_path / "model.gguf")
    values, stored_types, fields = read(tmp_path / "model.gguf")
    architecture = {"Mistral": "llama"}.get(kind, kind.lower())
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.context_length"] == (48 if kind == "Mistral" else 64)
    heads = model.config.num_attention_heads
    for number, layer in enumerate(model.model.layers):
        names = {
            "attn_q": layer.self_attn.q_proj, "attn_k": layer.self_attn.k_proj, "attn_v": layer.self_attn.v_proj,
            "attn_output": layer.self_attn.o_proj, "ffn_gate": layer.mlp.gate_proj, "ffn_up": layer.mlp.up_proj,
            "ffn_down": layer.mlp.down_proj,
        }  # fmt: skip
        for name, projection in names.items():
            parts = {"weight": numbers(projection), "bias": projection.bias}
            for suffix, expected in parts.items():
                if expected is None:
                    continue
                if architecture == "llama" and name in ("attn_q", "attn_k"):
                    rows = [
                        head * 32 + half * 16 + pair
                        for head in range(heads if name == "attn_q" else 1)
                        for pair in range(16)
                        for half in (0, 1)
                    ]
                    expected = expected[rows]
                assert torch.equal(values.pop(f"blk.{number}.{name}.{suffix}"), expected.detach())
            assert stored_types[f"blk.{number}.{name}.weight"] == "Q4_0"
    offset = 1.0 if kind.startswith("Gemma") else 0.0
    assert torch.equal(values.pop("output_norm.weight"), model.model.norm.weight.detach() + offset)
    assert torch.equal(values.pop("token_embd.weight"), numbers(model.model.embed_tokens))
    is_tied = kind.startswith("Gemma") or kind == "Qwen2"
    assert ("output.weight" in values) != is_tied
    if not is_tied:
        assert torch.equal(values.pop("output.weight"), numbers(model.lm_head))
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    if kind in ("Gemma2", "Gemma3"):
        norms |= {
            "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }  # fmt: skip
    if kind in ("Qwen3", "Gemma3"):
        norms |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    for number, layer in enumerate(model.model.layers):
        for name, stored in norms.items():
            expected = layer.get_submodule(name).weight.detach() + offset
            assert torch.equal(values.pop(f"blk.{number}.{stored}.weight"), expected)
    assert not values
    assert len(types) == sum(
        isinstance(m, pr.nn.QuantizedLinear | pr.nn.QuantizedEmbedding) for m in model.modules()
    ) - (
        kind == "Qwen2"  # the head has the codes of the embedding
    )


@pytest.mark.parametrize(
    ("form", "symmetric", "dtype"),
    [*((*each, torch.float32) for each in TYPES), ("int4", True, torch.bfloat16), ("int5", False, torch.float16)],
)
def test_every_type_of_blocks(form, symmetric, dtype, tmp_path):
    model = compressed(form=form, symmetric=symmetric, exclude="*.down_proj").to(dtype)
    model.model.embed_tokens.scales.mul_(1e-3)  # below the smallest normal number of fp16
    types = write_gguf(model, tmp_path / "model.gguf")
    assert set(types.values()) == {TYPES[form, symmetric]}
    values, stored_types, fields = read(tmp_path / "model.gguf")
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{TYPES[form, symmetric]}"]
    assert stored_types["blk.0.ffn_down.weight"] == {4: "F32"}.get(
        dtype.itemsize, "F16" if dtype is torch.float16 else "BF16"
    )
    assert stored_types["blk.0.attn_norm.weight"] == stored_types["blk.0.ffn_up.bias"] == "F32"
    layer = model.model.layers[1].mlp
    assert torch.equal(values["blk.1.ffn_up.weight"], numbers(layer.up_proj))
    assert torch.equal(values["blk.1.ffn_down.weight"], layer.down_proj.weight.detach().float())
    exact = layer.up_proj.to(torch.float64).weight
    step = layer.up_proj.scales.double().repeat_interleave(32, 1)
    # The error of a minimum is half a unit in the last of 11 bits.
    assert ((values["blk.1.ffn_up.weight"].double() - exact).abs() <= step * (0 if symmetric else 2**-6)).all()


@pytest.mark.parametrize("columns", [32, 96])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", sorted(set(TYPES.values())))
def test_blocks_of_all_codes(name, rows, columns):
    generator = torch.Generator().manual_seed(0)
    bits = int(name[1])
    codes = torch.randint(2**bits, (columns, rows), generator=generator, dtype=torch.uint8).T.contiguous()
    codes[0, :2] = torch.tensor([0, 2**bits - 1], dtype=torch.uint8)
    groups = columns // 32
    scales = torch.rand(rows, groups, generator=generator).bfloat16()
    scales[0, 0] = 2.0**-24
    zeros = torch.randint(2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    if name.endswith("0"):
        zeros.fill_(2 ** (bits - 1))
    packed = pack_blocks(codes, scales, zeros, name)
    assert packed.shape == (rows, groups * block_bytes(bits, is_symmetric=name.endswith("0")))
    stored = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[name]))
    steps, minima = (x.float().repeat_interleave(32, 1) for x in (scales, (scales.float() * zeros).half()))
    expected = steps * (codes.float() - 2 ** (bits - 1)) if name.endswith("0") else steps * codes - minima
    assert torch.equal(stored, expected)


def test_what_the_target_allows():
    uneven = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64), nn.Conv2d(64, 64, 3))
    report = pr.compress(uneven, bits=8.5, method="svd", target="gguf", **quick)
    assert [layer.names for layer in report.layers] == [("0",)]
    assert {entry.reason for entry in report.skipped} >= {
        "has rows of 40 columns, which groups of 32 do not divide",
        "is of class Conv2d, and reader='llama.cpp' holds codes of nn.Linear and nn.Embedding only",
    }
    assert report.layers[0].form == "int8"
    assert uneven[0].is_symmetric
    for form, num_bytes in (("int8", 34), ("int5", 24), ("int4", 20)):
        model = nn.Sequential(nn.Linear(64, 64))
        report = pr.compress(model, budget=0.5, method="svd", target="gguf", forms=form, **quick)
        assert model[0].is_symmetric == (form == "int8")
        assert report.layers[0].bytes_after == 64 * 2 * num_bytes
    refused = {
        "form 'int3' is not held by reader='llama.cpp': use some of 'dense', 'int8', 'int5', 'int4'": {"forms": "int3"},
        r"form 'int4\+low_rank' is not held": {"forms": "int4+low_rank"},
        "group_size=64 is not held by reader='llama.cpp': use 32": {"group_size": 64},
        "group_size=None is not held by reader='llama.cpp': use 32": {"group_size": None},
        "reader='vllm' does not read target='gguf'": {"reader": "vllm"},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            pr.compress(model, bits=5.0, method="svd", target="gguf", **options)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"bits": 3}, "which has 3 bits, and GGUF holds 4, 5, 8"),
        ({"bits": 8}, "has 8 bits with zero points"),
        ({"group_size": 48}, "has groups of 48 columns, and llama.cpp holds groups of 32"),
        ({"group_size": None}, "has groups of 96 columns"),
        ({"low_rank": 2}, "has a correction of rank 2"),
        ({"bits": None, "low_rank": 2}, "is of low rank without codes"),
        ({"activations": "int8"}, "rounds its inputs"),
    ],
)
def test_layers_that_are_refused(form, message, tmp_path):
    model = make()
    layer = pr.nn.QuantizedLinear(96, 160, **({"group_size": 32} | form))
    if layer.bits is not None:
        codes, scales, zeros = layer.grid_numbers()
        layer.set_codes_(codes, scales, zeros - 1)
    model.model.layers[1].mlp.up_proj = layer
    with pytest.raises(
        PantherError, match=f"'model.layers.1.mlp.up_proj', which {message}".replace("which has", ".*has")
    ):
        write_gguf(model, tmp_path / "model.gguf")
    model.model.layers[1].mlp.up_proj = pr.nn.LowRankLinear(96, 160, 4)
    with pytest.raises(PantherError, match="is a LowRankLinear, and GGUF holds"):
        write_gguf(model, tmp_path / "model.gguf")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Llama", {"hidden_act": "relu"}, "this LlamaForCausalLM has the activation 'relu'"),
        ("Llama", {"rope_parameters": DYNAMIC}, "rope_type 'dynamic'"),
        ("Qwen2", {"rope_parameters": DYNAMIC}, "rope_type 'dynamic'"),
        ("Gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16"),
        ("Gemma2", {"layer_types": ["full_attention"] * 2}, "another order of layers"),
        ("Gemma", {"tie_word_embeddings": False}, "one weight for both"),
        ("Qwen3", {"attention_bias": True}, "q_proj.bias' has no counterpart in llama.cpp's qwen3"),
    ],
)
def test_models_that_are_refused(kind, options, message, tmp_path):
    with pytest.raises(PantherError, match=message):
        write_gguf(make(kind, **options), tmp_path / "model.gguf")
    assert not any(tmp_path.iterdir())


def test_other_models_and_damaged_codes_are_refused(tmp_path):
    with pytest.raises(PantherError, match="BertModel cannot be written in GGUF: use one of LlamaForCausalLM, "):
        write_gguf(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "model.gguf")
    model = make()
    model.lm_head = pr.nn.QuantizedLinear(96, WORDS, group_size=32, bias=False)
    codes, scales, zeros = model.lm_head.grid_numbers()
    model.lm_head.set_codes_(codes, scales.fill_(1e6), zeros)
    with pytest.raises(PantherError, match="beyond the range of fp16"):
        write_gguf(model, tmp_path / "model.gguf")
    model.lm_head.codes[0, 0] ^= 1
    with pytest.raises(SketchMismatchError):
        write_gguf(model, tmp_path / "model.gguf")
    assert not any(tmp_path.iterdir())


def test_divisors_of_frequencies(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = make(rope_parameters=rope)
    assert write_gguf(model, tmp_path / "model.gguf") == {}
    values, types, fields = read(tmp_path / "model.gguf")
    assert types["rope_freqs.weight"] == "F32"
    divisors = values["rope_freqs.weight"]
    assert divisors.shape == (16,)
    assert divisors.min() >= 1 - 1e-6
    assert divisors.max() == pytest.approx(8.0)
    exponents = torch.arange(16) / 16
    torch.testing.assert_close(rope["rope_theta"] ** -exponents / divisors, model.model.rotary_emb.inv_freq)
    model = make(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    write_gguf(model, tmp_path / "linear.gguf")
    fields = read(tmp_path / "linear.gguf")[2]
    assert fields["llama.rope.scaling.type"] == "linear"
    assert fields["llama.rope.scaling.factor"] == 4.0
    assert fields["general.file_type"] == gguf.LlamaFileType.ALL_F32


def byte_level():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=WORDS - 3, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)


def with_byte_fallback():
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    special = [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS, special_tokens=special, show_progress=False)
    model.train_from_iterator(["aaab ab"], trainer)
    state = json.loads(model.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(state)), **SPECIAL
    )


def test_byte_level_tokenizer_and_chat_template(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.chat_template = "{{ messages }}"
    write_gguf(make(), tmp_path / "model.gguf", tokenizer=tokenizer)
    fields = read(tmp_path / "model.gguf")[2]
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == WORDS
    assert tokenizer.convert_tokens_to_ids(tokens[: len(tokenizer)]) == list(range(len(tokenizer)))
    assert tokens[-1] == f"[PAD{WORDS - 1}]"
    expected = {0: "CONTROL", 4: "NORMAL", len(tokenizer) - 1: "USER_DEFINED", WORDS - 1: "UNUSED"}
    assert {number: gguf.TokenType(kinds[number]).name for number in expected} == expected
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    assert merges == [tuple(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.eos_token_id"] == 1
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


def test_tokenizer_of_sentencepiece_gets_scores(tmp_path):
    tokenizer = with_byte_fallback()
    write_gguf(make(), tmp_path / "model.gguf", tokenizer=tokenizer)
    fields = read(tmp_path / "model.gguf")[2]
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"] is False
    kinds = [gguf.TokenType(kind).name for kind in fields["tokenizer.ggml.token_type"]]
    assert kinds[:5] == ["CONTROL", "CONTROL", "UNKNOWN", "CONTROL", "BYTE"]
    assert kinds.count("BYTE") == 256
    scores = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True))
    merges = ["".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    assert len(merges) >= 2
    assert all(scores[first] > scores[second] for first, second in pairwise(merges))


def test_tokenizers_that_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    chinese = byte_level()
    chinese.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), chinese.backend_tokenizer.pre_tokenizer]
    )
    large = byte_level()
    large.add_tokens(["one", "two", "three", "four"])
    without_merges = byte_level()
    without_merges.backend_tokenizer.model = tokenizers.models.BPE({"a": 0}, [])
    refused = {
        "is of type WordLevel, and only BPE": transformers.PreTrainedTokenizerFast(tokenizer_object=words),
        "is of type BPE, and only BPE with merges": without_merges,
        "which is none of the rules llama-bpe, qwen2, smollm, gpt-2": chinese,
        f"has {len(large)} tokens, and the model {WORDS} embeddings": large,
    }
    for message, tokenizer in refused.items():
        with pytest.raises(PantherError, match=message):
            write_gguf(make(), tmp_path / "model.gguf", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"attention_bias": False, "mlp_bias": False}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 128}),
        ("Gemma2", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    ],
)
def test_logits_by_the_reader_of_transformers(kind, options, tmp_path):
    """It reads the files that llama.cpp's own converter writes, and of Qwen3 and Gemma the default sizes of heads."""
    model = compressed(kind, sizes=options)
    write_gguf(model, tmp_path / "model.gguf", tokenizer=byte_level())
    read_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    ids = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(read_model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    if kind == "Llama":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        assert tokenizer(TEXT[0])["input_ids"] == byte_level()(TEXT[0])["input_ids"]


def test_command(tmp_path, capsys):
    folder, out = tmp_path / "small", tmp_path / "model.gguf"
    model = compressed("Qwen2", form="int5")
    pr.save_compressed(model, folder)
    command = ["export", str(folder), "--to", "gguf", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "holds no tokenizer, so the file has no vocabulary" in printed
    assert "15 layers in blocks of Q5_0, with the codes of the model" in printed
    assert f"{out}  {out.stat().st_size:,} bytes" in printed
    assert torch.equal(read(out)[0]["token_embd.weight"], numbers(model.model.embed_tokens))
    assert main(command) == 2
    assert "exists, and might hold another model" in capsys.readouterr().err
    out.unlink()
    byte_level().save_pretrained(folder)
    assert main(command) == 0
    assert read(out)[2]["tokenizer.ggml.model"] == "gpt2"
    assert main([*command[:-1], str(tmp_path / "none" / "model.gguf")]) == 2
    assert "name a file in an existing folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"small", "model.gguf"}


def ascii_pairs():
    """Return a tokenizer of printable characters and pairs of letters: a server waits for the rest of a character."""
    characters = [chr(number) for number in range(33, 127)]
    pairs = [(first, second) for first in characters[32:58] for second in characters[64:90]][: WORDS - 95]
    numbers = {token: number for number, token in enumerate([*characters, *map("".join, pairs)])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, pairs))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def decoded(model, prompt, count):
    """Return the tokens of greedy decoding, and the logarithms of the probabilities before each of them."""
    tokens, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            rows.append(model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1))
            tokens.append(int(rows[-1][:-1].argmax()))  # The last token would end the text.
    return tokens[len(prompt) :], torch.stack(rows)


@pytest.mark.engine_slow
@pytest.mark.parametrize("form", ["dense", *sorted({form for form, _ in TYPES})])
@pytest.mark.parametrize("kind", MODELS)
def test_llama_cpp_decodes(kind, form, tmp_path, record_property):
    """llama.cpp rounds the inputs of quantized layers to 8 bits, and the activations of Gemma to fp16."""
    pytest.importorskip("xllamacpp")
    model = make(kind) if form == "dense" else compressed(kind, form, symmetric=form != "int5")
    write_gguf(model, tmp_path / "model.gguf", tokenizer=ascii_pairs())
    prompt = list(range(5, 45))
    expected_tokens, expected = decoded(model, prompt, 7)
    tokens, found = LlamaCpp(tmp_path / "model.gguf", positions=48).decode(prompt, 7, WORDS)
    error = float((found[0] - expected[0]).norm() / (expected[0] - expected[0].mean()).norm())
    record_property("error", f"{error:.1e}")
    record_property("equal_tokens", sum(map(operator.eq, tokens, expected_tokens)))
    if form == "dense":
        assert tokens == expected_tokens
        assert error < (1e-3 if kind.startswith("Gemma") else 1e-5)
    else:
        assert error < 0.1


@pytest.mark.engine_slow
@pytest.mark.parametrize("make_tokenizer", [byte_level, with_byte_fallback])
def test_llama_cpp_splits_text_alike(make_tokenizer, tmp_path):
    pytest.importorskip("xllamacpp")
    tokenizer = make_tokenizer()
    write_gguf(make(), tmp_path / "model.gguf", tokenizer=tokenizer)
    engine = LlamaCpp(tmp_path / "model.gguf", positions=48)
    for text in {*TEXT, "aaab ab", "a  b\n\n\tc", "<s>ab</s>"}:
        assert engine.tokens(text) == tokenizer(text)["input_ids"], text
