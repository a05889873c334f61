"""Makers of layers from dense layers: what they refuse, and what users set on a layer that they keep."""

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations, prune

import panther as pr
from panther.nn import (
    InterpolativeLinear,
    LowRankConv2d,
    LowRankLinear,
    MonarchLinear,
    QuantizedConv2d,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedLinear,
    RandMultiHeadAttention,
    SKConv1d,
    SKConv2d,
    SKConv3d,
    SKLinear,
)

MAKERS = {
    "SKLinear": (nn.Linear, (48, 40), lambda layer: SKLinear.from_linear(layer, 1, 3, seed=0)),
    "LowRankLinear": (nn.Linear, (48, 40), lambda layer: LowRankLinear.from_linear(layer, 4)),
    "MonarchLinear": (nn.Linear, (48, 40), lambda layer: MonarchLinear.from_linear(layer, 2)),
    "InterpolativeLinear": (nn.Linear, (48, 40), lambda layer: InterpolativeLinear.from_linear(layer, 4)),
    "QuantizedLinear": (nn.Linear, (48, 40), lambda layer: QuantizedLinear.from_linear(layer, 4, low_rank=2)),
    "SKConv1d": (nn.Conv1d, (8, 16, 3), lambda layer: SKConv1d.from_conv(layer, 1, 3)),
    "SKConv2d": (nn.Conv2d, (8, 16, 3), lambda layer: SKConv2d.from_conv(layer, 1, 3)),
    "SKConv3d": (nn.Conv3d, (8, 16, 3), lambda layer: SKConv3d.from_conv(layer, 1, 3)),
    "LowRankConv2d": (nn.Conv2d, (8, 16, 3), lambda layer: LowRankConv2d.from_conv(layer, 4)),
    "QuantizedConv2d": (nn.Conv2d, (8, 16, 3), lambda layer: QuantizedConv2d.from_conv(layer, 4)),
    "QuantizedEmbedding": (nn.Embedding, (20, 16), lambda layer: QuantizedEmbedding.from_embedding(layer, 8)),
    "QuantizedEmbeddingBag": (nn.EmbeddingBag, (20, 16), lambda layer: QuantizedEmbeddingBag.from_embedding(layer, 8)),
    "attention": (nn.MultiheadAttention, (32, 4), lambda layer: RandMultiHeadAttention.from_mha(layer, 16)),
}
pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
each_maker = pytest.mark.parametrize(("kind", "sizes", "make"), MAKERS.values(), ids=MAKERS)


def weighted(layer):
    return layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer


@each_maker
def test_subclasses_with_a_forward_of_their_own_are_refused(kind, sizes, make):
    """Scaled embeddings of transformers, fp8 layers and others became layers that lack what their forward adds."""

    class Twice(kind):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    class Called(kind):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    class Named(kind):
        pass

    for subclass in (Twice, Called):
        with pytest.raises(TypeError, match=f"{subclass.__name__} is a subclass whose forward may do more"):
            make(subclass(*sizes))
    make(Named(*sizes))
    with pytest.raises(TypeError, match=f"takes an nn.{kind.__name__}, not ReLU"):
        make(nn.ReLU())


def set_forward_(layer):
    layer.forward = lambda *args: args


LOSSES = {
    "has a forward that was set on it": set_forward_,
    "hooks, which would be lost": lambda layer: layer.register_forward_hook(lambda *_: None),
    "has hooks, which": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "is parametrized": lambda layer: parametrizations.weight_norm(weighted(layer)),
    "computed": lambda layer: prune.l1_unstructured(weighted(layer), "weight", 0.5),
    "also has scale, which would be lost": lambda layer: weighted(layer).register_buffer("scale", torch.ones(())),
}


@each_maker
@pytest.mark.parametrize(("message", "change"), LOSSES.items(), ids=LOSSES)
def test_what_a_new_layer_would_lose_is_refused(kind, sizes, make, message, change):
    layer = kind(*sizes)
    change(layer)
    with pytest.raises(ValueError, match=message):
        make(layer)


@each_maker
def test_hooks_on_gradients_and_convolutions_that_were_replaced_are_refused(kind, sizes, make):
    layer = kind(*sizes)
    parameter = next(layer.parameters())
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="has hooks on gradients"):
        make(layer)
    if hasattr(kind, "_conv_forward"):
        layer = kind(*sizes)
        layer._conv_forward = lambda x, weight, bias: x
        with pytest.raises(ValueError, match="has a _conv_forward that was set on it"):
            make(layer)


@each_maker
@pytest.mark.parametrize("trained", [(True, True), (False, True), (False, False), (True, False)])
def test_what_users_set_is_kept(kind, sizes, make, trained):
    layer = kind(*sizes, dtype=torch.float64).eval()
    layer.learning_rate_factor = 3.0
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained["bias" in name])
        parameter.tag = "bias" if "bias" in name else "weight"
    new = make(layer)
    assert not new.training
    assert new.learning_rate_factor == 3.0
    parameters = {name: p for name, p in new.named_parameters() if not name.startswith("U")}
    for name, parameter in parameters.items():
        is_bias = name in ("bias", "bq", "bk", "bv", "b0")
        assert (parameter.requires_grad, parameter.tag) == (trained[is_bias], "bias" if is_bias else "weight"), name
        assert parameter.dtype is torch.float64 or "scale" in name or "factor" in name
    assert layer.learning_rate_factor == 3.0


LAZY = {nn.Linear: nn.LazyLinear, nn.Conv1d: nn.LazyConv1d, nn.Conv2d: nn.LazyConv2d, nn.Conv3d: nn.LazyConv3d}
RANDOM = {
    "SKLinear, random": (nn.Linear, (48, 40), lambda layer: SKLinear.from_linear(layer, 1, 3, init="random")),
    "SKConv2d, random": (nn.Conv2d, (8, 16, 3), lambda layer: SKConv2d.from_conv(layer, 1, 3, init="random")),
}


@pytest.mark.parametrize("name", [name for name in MAKERS | RANDOM if name != "attention"])
def test_a_weight_without_sound_values_is_named(name):
    kind, sizes, make = (MAKERS | RANDOM)[name]
    layer = kind(*sizes)
    for value in (torch.nan, torch.inf):
        layer.weight.data[3, 3] = value
        with pytest.raises(ValueError, match="the weight has entries that are NaN or infinite"):
            make(layer)
    with pytest.raises(ValueError, match="the weight is on the meta device and has no values to fit"):
        make(layer.to("meta"))
    if kind in LAZY:
        with pytest.raises(ValueError, match=f"{LAZY[kind].__name__}: it has no weight yet: run the model once first"):
            make(LAZY[kind](*sizes[1:]))


def test_layers_of_torch_that_are_subclasses_are_taken():
    layer = NonDynamicallyQuantizableLinear(48, 40)
    assert (LowRankLinear.from_linear(layer, 40).weight - layer.weight).norm() < 1e-4
    eighth = nn.Linear(48, 40)
    eighth.weight = nn.Parameter(eighth.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"has a weight of type Tensor, torch\.float8_e4m3fn: compress a plain"):
        LowRankLinear.from_linear(eighth, 4)


def test_a_compressed_layer_with_a_forward_of_its_own_stays():
    class Twice(LowRankLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = nn.Sequential(Twice(16, 16, 4)), torch.randn(2, 16)
    expected = model(x)
    report = pr.to_linears_(model)
    assert "a subclass of LowRankLinear with a forward of its own" in str(report)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("kind", "sizes"), [(nn.Linear, (64, 64)), (nn.Conv2d, (32, 64, 3))])
def test_compress_takes_a_subclass_whose_type_is_named(kind, sizes):
    class Logged(kind):
        def forward(self, x):
            return super().forward(x).add(0)

    for options in ({"method": "svd", "forms": "low_rank"}, {"method": "random", "forms": "low_rank"}):
        model = nn.Sequential(Logged(*sizes))
        model[0].weight.tag = 1
        report = pr.compress(model, 0.5, include=Logged, measure_speed=False, seed=0, **options)
        assert len(report.layers) == 1
        assert next(model.parameters()).tag == 1
