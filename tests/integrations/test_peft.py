"""LoRA by PEFT on compressed models: training, saving and merging."""

import copy
import re
import sys

import pytest
import torch
import waits
from torch import nn

import panther as pr
from panther.errors import CompressionError, ConfigError, MissingExtraError, install_command

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.extra

from panther.integrations.peft import LoraCompressedLinear  # noqa: E402
from panther.nn import InterpolativeLinear, LowRankLinear, QuantizedLinear, SKConv2d, SKLinear  # noqa: E402
from panther.nn.linears import LinearPair  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def compressed(kind, dtype=torch.float32, inner=40, outer=56):
    dense = nn.Linear(inner, outer, dtype=dtype)
    match kind:
        case "seeded":
            return SKLinear(inner, outer, 1, 3, seed=5, dtype=dtype)
        case "packed":
            return SKLinear(inner, outer, 1, 3, sketch="signs", seed=5, dtype=dtype).pack_()
        case "low rank":
            return LowRankLinear.from_linear(dense, 6)
        case "columns":
            return InterpolativeLinear.from_linear(dense, 7)
        case "int4":
            return QuantizedLinear.from_linear(dense, 4, group_size=8, low_rank=2)
        case "int8 factors":
            return QuantizedLinear.from_linear(dense, None, low_rank=5)
    return dense


KINDS = ("low rank", "seeded", "packed", "columns", "int4", "int8 factors", "dense")
MERGED = KINDS[:4]


class Net(nn.Module):
    def __init__(self, kind, dtype=torch.float32):
        super().__init__()
        self.first, self.second = compressed(kind, dtype), compressed(kind, dtype, 56, 24)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def adapted(kind, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    options = {"r": 5, "target_modules": ["first", "second"], "init_lora_weights": False} | options
    return peft.get_peft_model(Net(kind, dtype), peft.LoraConfig(**options))


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def reference(layer, x, adapters):
    """The sum of the layer's effective weight and adapters, in float64."""
    weight = layer.base_layer.weight.double()
    for name in adapters:
        weight = weight + layer.scaling[name] * layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double()
    return x.double() @ weight.mT + layer.base_layer.bias.double()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_add_to_the_output_and_alone_are_trained(kind):
    model = adapted(kind)
    x = torch.randn(9, 40, requires_grad=True)
    layer = model.base_model.model.first
    torch.testing.assert_close(layer(x).double(), reference(layer, x, ["default"]), **CLOSE)
    model(x).square().sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained
    (first, second) = lora_layers(model)
    expected = torch.autograd.grad(
        reference(second, torch.tanh(reference(first, x, ["default"])), ["default"]).square().sum(), x
    )
    torch.testing.assert_close(x.grad, expected[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["low rank", "int4"])
def test_several_adapters_one_at_a_time_together_mixed_and_none(kind):
    model = adapted(kind).eval()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False, use_rslora=True))
    first, x = model.base_model.model.first, torch.randn(4, 40)
    for active in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(active)
        torch.testing.assert_close(first(x).double(), reference(first, x, active), **CLOSE)
    with model.disable_adapter():
        torch.testing.assert_close(first(x).double(), reference(first, x, []), **CLOSE)
    mixed = model(x, adapter_names=["default", "other", "__base__", "default"])
    model.set_adapter("other")
    torch.testing.assert_close(mixed[1], model(x)[1], **CLOSE)
    model.set_adapter("default")
    model.delete_adapter("other")
    torch.testing.assert_close(mixed[::3], model(x)[::3], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["low rank", "columns", "int4"])
def test_dtypes(kind, dtype):
    model = adapted(kind, dtype)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {
        torch.float32 if dtype is torch.bfloat16 else dtype
    }
    layer, x = model.base_model.model.first, torch.randn(6, 40, dtype=dtype)
    output = layer(x)
    assert output.dtype is dtype
    near = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(output.double(), reference(layer, x, ["default"]), **near)
    if kind != "int4":
        model.merge_adapter()
        torch.testing.assert_close(layer(x).double(), output.double(), **near)


@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("kind", MERGED)
def test_merging_is_exact_in_a_layer_of_a_larger_rank(kind, lora_bias):
    model = adapted(kind, lora_bias=lora_bias).eval()
    x = torch.randn(9, 40)
    with torch.no_grad():
        for layer in lora_layers(model):
            for B in layer.lora_B.values():
                if lora_bias:
                    B.bias.normal_()
        expected = model(x)
        unmerged = model.base_model.model.first.base_layer
        model.merge_adapter(safe_merge=True)
        merged = model.base_model.model.first.base_layer
        torch.testing.assert_close(model(x), expected, **CLOSE)
        model.unmerge_adapter()
        assert model.base_model.model.first.base_layer is unmerged
        assert torch.equal(model(x), expected)
    if kind == "columns":
        assert type(merged) is InterpolativeLinear
        assert merged.low_rank == 7 + 5
    else:
        assert type(merged) is LowRankLinear
        assert merged.rank == 6 + 5
    done = model.merge_and_unload()
    assert not lora_layers(done)
    assert not any(parameter.requires_grad for parameter in done.parameters())
    torch.testing.assert_close(done(x), expected, **CLOSE)


def test_a_layer_that_would_be_no_smaller_becomes_dense():
    for kind, r in (("low rank", 16), ("columns", 17)):
        model = adapted(kind, r=r).eval()
        x = torch.randn(3, 40)
        expected = model(x)
        done = model.merge_and_unload()
        assert type(done.second) is nn.Linear
        torch.testing.assert_close(done(x), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["low rank", "columns", "int4", "int8 factors"])
@pytest.mark.parametrize("r", [2, 40])
def test_merging_into_plain_layers_that_took_the_place(kind, r):
    model = adapted(kind, r=r, lora_bias=True)
    x = torch.randn(9, 40)
    expected = model(x)
    assert len(pr.to_linears_(model).replaced) == 2
    torch.testing.assert_close(model(x), expected, **CLOSE)
    base = model.base_model.model.first.base_layer
    model.merge_adapter()
    torch.testing.assert_close(model(x), expected, **CLOSE)
    model.unmerge_adapter()
    assert model.base_model.model.first.base_layer is base
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), expected, **CLOSE)
    assert type(merged.first) is (nn.Linear if r == 40 or kind == "int4" else LinearPair)
    assert not any(parameter.requires_grad for parameter in merged.parameters())


def test_compressing_below_adapters_is_refused():
    model = adapted("dense")
    x = torch.randn(9, 40)
    expected = model(x)
    calls = (
        lambda: pr.compress(model, 0.5, [torch.randn(9, 40) for _ in range(4)], measure_speed=False),
        lambda: pr.sketch_layers_(model.base_model.model, pr.SketchConfig(low_rank=2)),
    )
    for call in calls:
        with pytest.raises(
            CompressionError, match=r"2 of the layers have adapters of PEFT \(first '.*first'\).*unload"
        ):
            call()
    assert torch.equal(model(x), expected)
    pr.sketch_layers_(model.unload(), pr.SketchConfig(low_rank=2))


def test_merging_in_turns():
    model = adapted("low rank").eval()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    x = torch.randn(3, 40)
    expected = model(x)
    first = model.base_model.model.first
    base = first.base_layer
    first.merge(adapter_names=["other"])
    with pytest.warns(UserWarning, match="merged other"):
        model.merge_adapter()
    torch.testing.assert_close(model(x), expected, **CLOSE)
    model.unmerge_adapter()
    assert first.base_layer is base
    with pytest.warns(UserWarning, match="nothing was unmerged"):
        first.unmerge()


def test_quantized_layers_are_not_merged_into_and_nothing_is_changed():
    torch.manual_seed(0)
    net = Net("low rank")
    net.second = compressed("int4", inner=56, outer=24)
    config = peft.LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
    model = peft.get_peft_model(net, config).eval()
    base_layers = [layer.base_layer for layer in lora_layers(model)]
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ConfigError, match=r"1 of the layers .* \(first 'second'\).*dequantize"):
            merge()
    assert [layer.base_layer for layer in lora_layers(model)] == base_layers
    with pytest.raises(ConfigError, match="QuantizedLinear cannot hold an adapter"):
        model.base_model.model.second.merge()
    assert type(model.unload().second) is QuantizedLinear


def test_a_broken_adapter_is_not_merged_safely():
    model = adapted("low rank")
    with torch.no_grad():
        model.base_model.model.first.lora_A["default"].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite: adapter 'default'"):
        model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"use_dora": True}, ConfigError, r"plain LoRA only .*use_dora"),
        ({"init_lora_weights": "pissa"}, ConfigError, "put dense layers back first"),
        ({"init_lora_weights": "olora"}, ConfigError, "put dense layers back first"),
        ({"r": 0}, ValueError, "positive integer"),
        ({"target_modules": ["third"]}, ValueError, "not found"),
        ({"target_modules": ["conv"]}, ConfigError, "'conv' is a SKConv2d: leave it out"),
    ],
)
def test_what_compressed_layers_do_not_take(options, error, match):
    net = Net("low rank")
    net.conv = SKConv2d(16, 16, 3, low_rank=2)
    with pytest.raises(error, match=match):
        peft.get_peft_model(net, peft.LoraConfig(**{"r": 2, "target_modules": ["first"]} | options))


def test_other_versions_and_a_missing_package(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("panther.integrations.peft")]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patch:
        patch.setattr(peft, "__version__", "1.0.0")
        with pytest.raises(ConfigError, match=r"peft 1\.0\.0 is installed, and .* is made for 0\.x"):
            import panther.integrations.peft
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("peft"))):
        import panther.integrations.peft  # noqa: F401


FRESH = """
import sys, torch, transformers, peft, panther
inputs, expected = torch.load(sys.argv[1] + "/case.pt")
base = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1] + "/base")
model = peft.PeftModel.from_pretrained(base, sys.argv[1] + "/adapter")
with torch.no_grad():
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)
"""


def bert(tmp_path, forms, **options):
    """A compressed BERT, saved, with an adapter on all linear layers; and a batch."""
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("panther.integrations.transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=61, **sizes)).eval()
    batches = [{"input_ids": torch.randint(1, 61, (8, 10))} for _ in range(10)]
    pr.compress(model, 0.6, batches, forms=forms, exclude="classifier", measure_speed=False, seed=0)
    integration.set_quantization_config_(model).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="SEQ_CLS", **options)
    return peft.get_peft_model(model, config), batches[0]


def tuned(model, inputs):
    """A model after two steps, and its output then."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    model.train()
    for _ in range(2):
        model(**inputs, labels=torch.arange(8) % 2).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("forms", [("int4", "low_rank"), ("interpolative", "dense")], ids=["mixed", "columns"])
def test_a_compressed_transformer_is_tuned_saved_and_loaded(forms, tmp_path):
    model, inputs = bert(tmp_path, forms)
    names = {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert len(names) == 2 * 6 + 1  # the pooler's too, and the classifier is trained as a whole
    assert any(isinstance(module, LoraCompressedLinear) for module in model.modules())
    untuned = model(**inputs).logits.detach()
    tuned_logits = tuned(model, inputs)
    assert (tuned_logits - untuned).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    import transformers

    for options in ({}, {"low_cpu_mem_usage": True}):
        base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", **options)
        with torch.no_grad():
            torch.testing.assert_close(loaded(**inputs).logits, tuned_logits, **CLOSE)


@pytest.mark.slow
def test_another_process_needs_only_the_import_of_panther(tmp_path):
    model, inputs = bert(tmp_path, ("int4", "low_rank"))
    after = tuned(model, inputs)
    model.save_pretrained(tmp_path / "adapter")
    torch.save((inputs, after), tmp_path / "case.pt")
    waits.run([sys.executable, "-P", "-W", "ignore", "-c", FRESH, tmp_path], check=True)


def test_a_merged_transformer_is_saved_at_its_new_ranks(tmp_path):
    import transformers

    model, inputs = bert(tmp_path, ("low_rank", "dense"), init_lora_weights=False)
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(loaded(**inputs).logits, expected, **CLOSE)


def test_a_quantized_transformer_is_merged_where_it_is_dense(tmp_path):
    import transformers

    model, inputs = bert(tmp_path, ("int8",), init_lora_weights=False)
    model.eval().save_pretrained(tmp_path / "adapter")
    dense = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").dequantize()
    merged = peft.PeftModel.from_pretrained(dense, tmp_path / "adapter").merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, model(**inputs).logits, **CLOSE)


def test_gradients_with_checkpointing_are_those_without(tmp_path):
    model, inputs = bert(tmp_path, ("int4", "low_rank"), init_lora_weights=False)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(1)
        model(**inputs, labels=torch.arange(8) % 2).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert gradients[0]
    torch.testing.assert_close(gradients[1], gradients[0], **CLOSE)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    adapted("low rank").save_pretrained(tmp_path)
    torch.manual_seed(1)
    net = Net("low rank")
    net.first = compressed("low rank", inner=40, outer=72)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(net, tmp_path)
    with pytest.raises(ValueError, match="not found"):
        peft.PeftModel.from_pretrained(nn.Sequential(nn.Linear(3, 3)), tmp_path)


METHODS = {  # arguments besides the targets that a method needs before it looks at layers
    **{
        name: {}
        for name in ("VERA", "RANDLORA", "LOHA", "LOKR", "OFT", "LN_TUNING", "OSF", "TRAINABLE_TOKENS", "SHADOW")
    },
    "ADALORA": {"total_step": 10},
}


@pytest.mark.parametrize("targets", [["first"], "all-linear"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_for_dense_layers_are_refused_on_compressed_ones(method, targets):
    """LN tuning and OSF trained no parameter, and "all-linear" left compressed layers out without a word."""
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    model = Net("int4")
    model.second = nn.Linear(model.second.in_features, model.second.out_features)
    message = (
        r"Model adapts dense layers, and 1 of the .* are compressed \(first 'first'\): use PeftModel with LoraConfig"
    )
    with pytest.raises(ConfigError, match=message):
        peft.get_peft_model(model, kind(target_modules=targets, **METHODS[method]))
    assert type(model.first) is QuantizedLinear
    if method == "VERA":
        adapted = peft.get_peft_model(model, kind(target_modules=["second"]))
        assert any(parameter.requires_grad for parameter in adapted.base_model.model.second.parameters())
        with pytest.raises(ConfigError, match=message):
            adapted.add_adapter("later", kind(target_modules=["first"]))


class Kinds(nn.Module):
    """Every kind of compressed layer, in modules that PEFT is told to train as a whole."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.adapted = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.conv, self.head = nn.Conv2d(3, 4, 2), compressed(kind, inner=12, outer=10)
        self.block = nn.Sequential(compressed(kind, inner=12, outer=12), nn.ReLU())
        if kind == "int4":
            self.table = pr.nn.QuantizedEmbedding.from_embedding(self.table)
            self.conv = pr.nn.QuantizedConv2d.from_conv(self.conv)

    def forward(self, indices):
        x = self.block(self.adapted(self.table(indices)))  # (N, 12)
        return self.head(x) + self.conv(x.view(-1, 3, 2, 2)).flatten(1).sum(1, keepdim=True)


SAVED = ("table", "conv", "head", "block")


@pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_modules_to_save_are_trained_saved_and_merged(kind, tmp_path):
    """Expected: what PEFT is told to train is trained. Codes cannot be, and 0 tensors were, without a warning."""
    model, indices = Kinds(kind), torch.arange(8)
    untuned = model(indices)
    config = peft.LoraConfig(r=2, target_modules=["adapted"], modules_to_save=list(SAVED), bias="lora_only")
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(tuned(indices), untuned)
    tuned(indices).square().sum().backward()
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    for module in SAVED:
        assert any(f"{module}.modules_to_save.default" in name for name in trained), module
    torch.optim.SGD(trained.values(), 0.01).step()
    after = tuned(indices)
    assert (after - untuned).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path)
    for options in ({}, {"low_cpu_mem_usage": True}):
        loaded = peft.PeftModel.from_pretrained(Kinds(kind), tmp_path, **options)
        torch.testing.assert_close(loaded(indices), after)
    tuned.add_adapter("other", peft.LoraConfig(r=2, target_modules=["adapted"], modules_to_save=["head"]))
    tuned.set_adapter("other")
    tuned.set_adapter("default")
    torch.testing.assert_close(tuned(indices), after)
    tuned.delete_adapter("other")
    torch.testing.assert_close(tuned.merge_and_unload()(indices), after)


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging")
@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_embeddings_of_transformers_are_trained(tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, tie_word_embeddings=tied, **sizes)
    model, x = transformers.LlamaForCausalLM(config).eval(), torch.arange(12).view(2, 6)
    pr.compress(model, 0.6, method="svd", forms=("int8",), exclude="*q_proj", measure_speed=False)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    with pytest.raises(
        ConfigError, match=r"rows of a dense weight, and this layer is a QuantizedEmbedding: name it in"
    ):
        copy.deepcopy(model).add_adapter(peft.LoraConfig(**lora, trainable_token_indices=[4]))
    alone = copy.deepcopy(model)
    alone.add_adapter(peft.LoraConfig(**lora, modules_to_save=["lm_head"]))
    assert [name for name, p in alone.named_parameters() if p.requires_grad and "save" in name]
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(**lora, modules_to_save=["lm_head", "embed_tokens"]))
    for _ in range(2):
        tuned(input_ids=x, labels=x).loss.backward()
        torch.optim.SGD((p for p in tuned.parameters() if p.requires_grad), 0.5).step()
    after = tuned.eval()(x).logits
    tuned.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(x).logits, after, **CLOSE)
    whole = loaded.merge_and_unload()
    assert type(whole.lm_head) is nn.Linear
    whole.save_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(x).logits, after, **CLOSE)


def test_parameters_of_compressed_layers_are_refused_by_name():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(vocab_size=64, num_local_experts=4, num_key_value_heads=2, **sizes)
    model = transformers.MixtralForCausalLM(config).eval()
    pr.compress(model, 0.6, method="svd", forms=("int8",), measure_speed=False)
    for target, kind in (("experts.gate_up_proj", "QuantizedExperts"), ("q_proj.weight", "QuantizedLinear")):
        lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=[target])
        with pytest.raises(ConfigError, match=rf"target_parameters='{target}' names a weight of .* {kind}"):
            peft.get_peft_model(copy.deepcopy(model), lora)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match="name the module that holds the experts"):
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**lora, modules_to_save=["gate_up_proj"]))
    tuned = peft.get_peft_model(model, peft.LoraConfig(**lora, modules_to_save=["experts"]))
    assert sum(p.requires_grad and "gate_up_proj" in name for name, p in tuned.named_parameters()) == 1


@pytest.mark.parametrize("imports", ["import panther, peft", "import peft, panther"])
def test_importing_panther_suffices(imports):
    waits.run([sys.executable, "-P", "-W", "ignore", "-c", imports + WITHOUT_ADAPTER], check=True)


WITHOUT_ADAPTER = """
import sys, torch
assert "panther.integrations.peft" not in sys.modules
def adapted(layer, **options):
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
adapted(torch.nn.Linear(16, 16), target_modules=["0"])
assert "panther.integrations.peft" not in sys.modules and "panther.nn" not in sys.modules
model = adapted(panther.nn.QuantizedLinear(16, 16), target_modules=["0", "1"])
assert type(model.base_model).__name__ == "CompressedLoraModel"
model = adapted(panther.nn.QuantizedLinear(16, 16), target_modules=["1"], modules_to_save=["0"])
assert any(p.requires_grad and ".0." in name for name, p in model.named_parameters())
"""
