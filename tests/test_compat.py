"""Checkpoints of panther-ml: its formulas, written out in float64 from its tensors, against the loaded layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther as pr
from panther.errors import ShapeError

LOAD = pr.compat.load_panther_ml


def linear_state(inputs, outputs, terms, rank, bias=True, dtype=torch.float64):
    """The tensors of its SKLinear."""
    state = {
        "S1s": torch.randn(terms, inputs, rank, dtype=dtype),
        "S2s": torch.randn(terms, rank, outputs, dtype=dtype),
        "U1s": torch.randn(terms, rank, outputs, dtype=dtype).sign() / rank**0.5,
        "U2s": torch.randn(terms, inputs, rank, dtype=dtype).sign() / rank**0.5,
    }
    return state | ({"bias": torch.randn(outputs, dtype=dtype)} if bias else {})


def attention_state(width, heads, features, bias=True, dtype=torch.float64):
    """The tensors of its RandMultiHeadAttention."""
    state = {name: torch.randn(width, width, dtype=dtype) / width**0.5 for name in ("Wq", "Wk", "Wv", "W0")}
    if bias:
        state |= {name: torch.randn(width, dtype=dtype) for name in ("bq", "bk", "bv", "b0")}
    return state | {"projection_matrix": torch.randn(features, width // heads, dtype=dtype)}


def attention_output(state, x, heads, kernel, causal):
    """Its attention, with every weight formed."""
    W = state["projection_matrix"]
    features, width = W.shape
    q, k, v = (
        F.linear(x, state[f"W{name}"], state.get(f"b{name}")).unflatten(-1, (heads, width)).transpose(1, 2)
        for name in "qkv"
    )
    if kernel == "softmax":
        q, k = q * width**-0.25, k * width**-0.25
        logits = [y @ W.T for y in (q, k)]
        tops = logits[0].amax(-1, keepdim=True), logits[1].amax((-2, -1), keepdim=True)
        phi_q, phi_k = (
            (y - x.square().sum(-1, keepdim=True) / 2 - top).exp() + 1e-5
            for x, y, top in zip((q, k), logits, tops, strict=True)
        )
    else:
        phi_q, phi_k = (torch.relu(y @ W.T / features**0.5) + 1e-5 for y in (q, k))
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if causal else weights
    y = (weights / weights.sum(-1, keepdim=True)) @ v
    return F.linear(y.transpose(1, 2).flatten(2), state["W0"], state.get("b0"))


@pytest.mark.parametrize(("terms", "rank", "bias"), [(1, 1, True), (3, 4, False), (2, 5, True)])
def test_linear_layers(terms, rank, bias):
    state = linear_state(60, 47, terms, rank, bias)
    x = torch.randn(7, 60, dtype=torch.float64)
    expected = sum(x @ state["S1s"][i] @ state["U1s"][i] + x @ state["U2s"][i] @ state["S2s"][i] for i in range(terms))
    expected = expected / (2 * terms) + state.get("bias", 0)
    layer = pr.nn.SKLinear(60, 47, num_terms=terms, low_rank=rank, bias=bias, dtype=torch.float64)
    layer.load_state_dict(LOAD(state))
    torch.testing.assert_close(layer(x), expected)


def test_convolutions():
    terms, rank = 2, 3
    state = {
        "S1s": torch.randn(2 * terms * rank, 9, 3, 2, dtype=torch.float64),
        "U1s": torch.randn(2 * terms, rank, 25, dtype=torch.float64),
        "bias": torch.randn(25, dtype=torch.float64),
    }
    x = torch.randn(2, 9, 8, 7, dtype=torch.float64)
    inner = F.conv2d(x, state["S1s"], stride=(2, 1), padding=(1, 0)).unflatten(1, (2 * terms, rank))
    expected = torch.einsum("nlkhw,lko->nohw", inner, state["U1s"]) / (2 * terms) + state["bias"][:, None, None]
    sizes = {"num_terms": terms, "low_rank": rank, "dtype": torch.float64}
    layer = pr.nn.SKConv2d(9, 25, (3, 2), stride=(2, 1), padding=(1, 0), **sizes)
    layer.load_state_dict(LOAD(state))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_attention(kernel, causal, bias):
    state = attention_state(24, 3, 40, bias)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    expected = attention_output(state, x, 3, kernel, causal)
    sizes = {"bias": bias, "kernel_fn": kernel, "iscausal": causal, "dtype": torch.float64}
    layer = pr.compat.PantherMLAttention(24, 3, 40, **sizes)
    layer.load_state_dict(LOAD(state))
    torch.testing.assert_close(layer(x, x, x)[0], expected)
    padded, mask = torch.cat((x, torch.full_like(x, 9.0)), 1), torch.arange(22).expand(2, 22) >= 11
    if not causal and kernel == "relu":  # of the exponentials, what is masked may hold the largest
        torch.testing.assert_close(layer(x, padded, padded, key_padding_mask=mask)[0], expected)
    half = layer.bfloat16()
    assert (half(*[x.bfloat16()] * 3)[0] - expected).norm() < 0.05 * expected.norm()
    pr.nn.RandMultiHeadAttention(24, 3, 40, **sizes).load_state_dict(LOAD(state))  # another formula, the same tensors


def test_attention_has_the_kernels_of_panther_ml():
    with pytest.raises(ValueError, match="kernel_fn='hermite' is not of panther-ml: use 'softmax' or 'relu'"):
        pr.compat.PantherMLAttention(24, 3, 40, kernel_fn="hermite")


def test_a_model_with_other_layers():
    """Entries of other layers pass unchanged, a layer that is the whole model has no prefix, the generator rests."""
    linear, norm = linear_state(16, 16, 1, 2, dtype=torch.float32), nn.LayerNorm(16)
    state = {f"blocks.0.fc.{name}": tensor for name, tensor in linear.items()}
    state |= {f"blocks.0.norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    random_state = torch.get_rng_state()
    converted = LOAD(state)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert converted["blocks.0.norm.weight"] is state["blocks.0.norm.weight"]
    block = nn.ModuleDict({"fc": pr.nn.SKLinear(16, 16, num_terms=1, low_rank=2), "norm": nn.LayerNorm(16)})
    nn.ModuleDict({"blocks": nn.ModuleList([block])}).load_state_dict(converted)
    assert block["fc"].is_fitted
    half = LOAD({name: tensor.half() for name, tensor in linear.items()})
    assert half["S1"].dtype is torch.float16


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        (nn.Linear(2, 2), TypeError, "takes a state_dict, not Linear"),
        ({}, ValueError, "no layer of panther-ml"),
        ({"weight": torch.zeros(3)}, ValueError, "no layer of panther-ml"),
        (
            {"epoch": 3, "model": linear_state(8, 9, 1, 2)},
            ValueError,
            r"a checkpoint .*: pass checkpoint\['model'\], or",
        ),
        (linear_state(8, 9, 1, 2) | {"S1s": 3}, TypeError, "S1s must be a tensor, not int"),
        (linear_state(8, 9, 1, 2) | {"S1s": torch.zeros(1, 7, 2)}, ShapeError, r"the layer .* S1s \(1, 7, 2\)"),
        ({"c.S1s": torch.zeros(9, 5, 3, 2), "c.U1s": torch.zeros(3, 3, 4)}, ShapeError, "tensors of c do not fit"),
        (
            attention_state(24, 3, 40) | {"projection_matrix": torch.zeros(40, 7)},  # as with sinSRPE(3, 8, 5, 7)
            ShapeError,
            "has 7 columns, which must divide the 24 rows of Wq into heads.*: train the model again with",
        ),
    ],
)
def test_bad_input(state, error, match):
    with pytest.raises(error, match=match):
        LOAD(state)


def test_calls_of_panther_ml_in_the_words_of_the_guide():
    """The middle columns of the page for those who come from it, with the shapes and scales that it promises."""
    dense, conv = nn.Linear(96, 64), nn.Conv2d(16, 64, 3, groups=2)
    assert pr.nn.LowRankLinear.from_linear(dense, 16).rank == 16
    assert not pr.nn.SKLinear.from_linear(dense, 1, 8, init="random").is_fitted
    layer = pr.nn.SKConv2d(64, 128, padding=1, num_terms=6, low_rank=8)
    assert layer.S1s.shape == (96, 64, 3, 3)
    assert layer.U1s.shape == (12, 8, 128)
    assert pr.nn.SKConv2d.from_conv(conv, 1, 4).groups == 2
    layer = pr.nn.SKLinear(96, 64, 2, 4)
    layer.S1s[1].fill_(2.0)
    assert (layer.S1.detach()[:, 4:] == 2).all()
    mha = nn.MultiheadAttention(64, 4, batch_first=True)
    attention = pr.nn.make_performer(mha, 16, kernel_fn="softmax", iscausal=True)
    assert attention.iscausal
    x = torch.randn(20, 12, dtype=torch.float64)
    Q, R, P = pr.linalg.cqrrpt(x, 1.25)
    torch.testing.assert_close(Q @ R, x[:, P])
    U, S, V = pr.linalg.randomized_svd(x, 5)
    assert U.shape == (20, 5)
    assert V.shape == (12, 5)
    assert S.dtype is torch.float64
    family = pr.sketch.DistributionFamily
    for matrix in (
        pr.sketch.dense_sketch_operator(200, 300, family.Gaussian, scale=False),
        pr.sketch.sketch_tensor(torch.randn(300, 2), 0, 200, family.Uniform, scale=False)[1],
        pr.sketch.gaussian_skop(200, 300) * 200**0.5,
        pr.sketch.scaled_sign_sketch(200, 300) * 200**0.5,
    ):
        assert abs(matrix.var() - 1) < 0.05
    y = torch.randn(1024)
    assert abs(pr.sketch.srht(y, 256, scale=False).norm() / y.norm() - 0.5) < 0.2
    assert pr.sketch.srht(y.double(), 256).dtype is torch.float64
    with pytest.raises(TypeError):
        pr.nn.RandMultiHeadAttention(64, 4, 16, 0.1)
