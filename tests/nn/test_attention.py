"""Random-feature attention against softmax attention and against its own weights, formed; and against known faults."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from covering import all_pairs
from tolerances import KERNEL_RMS, assert_close, rms_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.compat import PantherMLAttention
from panther.distributed.tensor._attention import HeadwiseRandAttention
from panther.errors import DTypeError, NumericalWarning, ShapeError, SketchMismatchError
from panther.nn import RandMultiHeadAttention, make_performer, sinSRPE
from panther.nn.attention import _features
from panther.nn.attention._features import (
    optimal_shift,
    orthogonal_gaussian,
    positive_features,
    products,
    relu_features,
    taylor_features,
)
from panther.nn.attention._hermite import balanced_directions, hermite_rank
from panther.nn.attention.linearized import LinearizedMultiheadAttention
from panther.nn.functional import linear_attention

KERNELS = ["hermite", "softmax", "oprf", "relu", "taylor"]
E, H = 32, 4


def attention_of(kernel="softmax", features=24, **kwargs):
    torch.manual_seed(0)
    return RandMultiHeadAttention(E, H, features, kernel_fn=kernel, **{"seed": 3, **kwargs})


def draw(*shape, seed=1, scale=1.0, dtype=torch.float32):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hermite_weights(layer, q, k, seen):
    """The polynomial of "hermite", from its formula: means over the keys seen, taken for each query alone."""
    mu, nu = layer.center[:, 0, None], layer.center[:, 1, None]
    q, k = q - mu, k - nu
    number = (seen > 0).sum(-1, keepdim=True)
    scale = (k @ mu.mT)[..., 0].exp()[..., None, :]
    share = seen * scale / (seen * scale).sum(-1, keepdim=True)
    to_q, to_k = layer.directions.chunk(2, 1)
    r, d = to_q.shape[1:]
    s, s_r = q @ k.mT, (q @ to_q.mT) @ (k @ to_k.mT).mT
    z, z_r = (x - (share * x).sum(-1, keepdim=True) for x in (s, s_r))
    v_r = (share * z_r**2).sum(-1, keepdim=True)
    spread = share @ k.square().sum(-1, keepdim=True) - (share @ k).square().sum(-1, keepdim=True)
    variance = v_r + q.square().sum(-1, keepdim=True) * spread * (1 - r / d) / d
    f = (1 + variance / number.clamp_min(2).log()).rsqrt()
    return (1 + f * z + f**2 / 2 * (z_r**2 - v_r)) * scale


def formed(layer, query, key, value, exponent=None, causal=False):
    """The layer in float64 with its (L, S) weights formed, the kernels' features written down anew."""
    layer, (query, key, value) = copy.deepcopy(layer).double(), (x.double() for x in (query, key, value))

    def heads(x, W, b):
        return nn.functional.linear(x, W, b).unflatten(-1, (H, E // H)).transpose(1, 2)

    q, k = heads(query, layer.Wq, layer.bq) * (E // H) ** -0.25, heads(key, layer.Wk, layer.bk) * (E // H) ** -0.25
    v = heads(value, layer.Wv, layer.bv)
    seen = torch.ones(L := q.shape[-2], S := k.shape[-2], dtype=torch.float64)
    if exponent is not None:
        seen = seen * exponent.double().exp()[:, None, None]
    if causal:
        seen = seen.tril()
    if layer.kernel_fn == "hermite":
        weights = hermite_weights(layer, q, k, seen.expand(len(q), H, L, S))
    elif layer.kernel_fn == "taylor":
        dots = q @ k.mT
        weights = 1 + dots + dots**2 / 2
    elif layer.kernel_fn == "relu":
        weights = (torch.relu(q @ layer.directions.mT) + 1e-3) @ (torch.relu(k @ layer.directions.mT) + 1e-3).mT
    else:
        A = optimal_shift(layer.feature_norm, E // H) if layer.kernel_fn == "oprf" else 0.0
        W = layer.directions

        def features(x):
            square = W.square().sum(-1)[:, None]
            return (A * square + math.sqrt(1 - 4 * A) * x @ W.mT - x.square().sum(-1, keepdim=True) / 2).exp()

        weights = features(q) @ features(k).mT
    weights = weights * seen
    out = weights @ v / weights.sum(-1, keepdim=True)
    return nn.functional.linear(out.transpose(1, 2).flatten(2), layer.W0, layer.b0)


@pytest.mark.parametrize(("kernel", "causal", "bias"), all_pairs(KERNELS, [False, True], [False, True]))
def test_values_and_gradients(kernel, causal, bias):
    layer = attention_of(kernel, bias=bias)
    if bias:
        for parameter in (layer.bq, layer.bk, layer.bv, layer.b0):
            nn.init.normal_(parameter)
    x = draw(2, 70, E).requires_grad_()
    upstream = draw(2, 70, E, seed=5)
    leaves = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x, x, x, is_causal=causal)[0], leaves, upstream)
    reference = copy.deepcopy(layer).double()
    doubled = x.detach().double().requires_grad_()
    out = reference(doubled, doubled, doubled, is_causal=causal)[0]
    assert_close(layer(x, x, x, is_causal=causal)[0], formed(layer, x, x, x, causal=causal))
    theirs = torch.autograd.grad(out, [doubled, *reference.parameters()], upstream.double())
    for mine, right in zip(ours, theirs, strict=True):
        if right.abs().max() > 1e-9:  # the key's bias cancels in a softmax
            assert rms_error(mine, right) < 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_double_backward(kernel, causal):
    layer = attention_of(kernel, features=5).double()
    x = draw(1, 4, E, scale=0.5, dtype=torch.float64).requires_grad_()

    def function(x):
        return layer(x, x, x, is_causal=causal)[0].sin()

    assert torch.autograd.gradcheck(function, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cross_attention_with_different_widths(kernel):
    layer = attention_of(kernel, kdim=20, vdim=28)
    query, key, value = draw(2, 7, E), draw(2, 11, 20, seed=2), draw(2, 11, 28, seed=3)
    assert_close(layer(query, key, value)[0], formed(layer, query, key, value))
    single = layer(query[1], key[1], value[1])[0]
    assert_close(single, formed(layer, query, key, value)[1].detach())
    layer.batch_first = False
    turned = layer(*(x.transpose(0, 1) for x in (query, key, value)))[0]
    assert_close(turned.transpose(0, 1), formed(layer, query, key, value))


@pytest.mark.parametrize(
    ("kernel", "causal", "fill", "side"),
    all_pairs(KERNELS, [False, True], [1e4, math.nan, math.inf], ["left", "right"]),
)
def test_a_masked_key_has_no_influence(kernel, causal, fill, side):
    layer = attention_of(kernel)
    x = draw(2, 90, E)
    mask = torch.zeros(2, 90, dtype=torch.bool)
    masked = slice(0, 20) if side == "left" else slice(65, 90)
    mask[1, masked] = True
    filled = x.masked_fill(mask[..., None], fill)
    output = layer(x, x, x, key_padding_mask=mask, is_causal=causal)[0]
    after = layer(x, filled, filled, key_padding_mask=mask, is_causal=causal)[0]
    assert torch.equal(output, after)
    exponent = torch.zeros(2, 90).masked_fill(mask, -math.inf)
    expected = formed(layer, x, x, x, exponent, causal)
    seen = torch.ones(2, 90, dtype=torch.bool)
    if causal and side == "left":
        seen[1, masked] = False  # nothing to attend to: zero, and in the formula 0 / 0
        assert torch.equal(output[~seen], layer.b0.expand_as(output[~seen]))
    assert_close(output[seen], expected[seen])
    numbers = layer(x, x, x, key_padding_mask=exponent, is_causal=causal)[0]
    assert torch.equal(numbers, output)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_what_a_masked_key_holds_reaches_no_gradient(kernel, batch_first):
    layer = attention_of(kernel, batch_first=batch_first)
    query, key, mask = draw(2, 9, E), draw(2, 7, E, seed=2), torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    gradients = []
    for fill in (0.0, math.nan):
        inputs = [query, *[key.masked_fill(mask[..., None], fill)] * 2]
        out = layer(*(x if batch_first else x.transpose(0, 1) for x in inputs), key_padding_mask=mask)[0]
        gradients.append(torch.autograd.grad(out.square().sum(), list(layer.parameters())))
    for clean, filled in zip(*gradients, strict=True):
        assert torch.equal(clean, filled)


def test_a_mask_of_numbers_is_added_to_logits():
    layer = attention_of()
    x, exponent = draw(2, 9, E), draw(2, 9, seed=7)
    assert_close(layer(x, x, x, key_padding_mask=exponent)[0], formed(layer, x, x, x, exponent))


def test_all_keys_masked_gives_the_bias():
    layer, x = attention_of(), draw(2, 9, E)
    nn.init.normal_(layer.b0)
    out = layer(x, x, x, key_padding_mask=torch.ones(2, 9, dtype=torch.bool))[0]
    assert torch.equal(out, layer.b0.expand_as(out))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [5, 64, 130])
def test_the_future_moves_no_bit(kernel, length):
    layer = attention_of(kernel, iscausal=True)
    x = draw(2, length, E)
    output = layer(x, x, x)[0]
    for cut in {1, length // 2, length - 1}:
        for change in (3.0, -1e3, 1e-3):
            other = x.clone()
            other[:, cut:] *= change
            assert torch.equal(layer(other, other, other)[0][:, :cut], output[:, :cut])
        for fill in (math.nan, math.inf, -1e38):
            other = x.clone()
            other[:, cut:] = fill
            assert torch.equal(layer(other, other, other)[0][:, :cut], output[:, :cut])
        assert_close(layer(*(x[:, :cut],) * 3)[0], output[:, :cut].double())  # a shorter run agrees


def test_causal_masks_and_the_constructors_value():
    layer, x = attention_of(), draw(2, 12, E)
    causal = layer(x, x, x, is_causal=True)[0]
    square = nn.Transformer.generate_square_subsequent_mask(12)
    for mask in (square, square == -math.inf, square.expand(2 * H, 12, 12)):
        assert torch.equal(layer(x, x, x, attn_mask=mask)[0], causal)
        assert torch.equal(layer(x, x, x, attn_mask=mask, is_causal=True)[0], causal)
    nothing = torch.zeros(12, 12, dtype=torch.bool)
    assert torch.equal(layer(x, x, x, attn_mask=nothing)[0], layer(x, x, x)[0])
    always = attention_of(iscausal=True)
    assert torch.equal(always(x, x, x)[0], causal)
    assert torch.equal(always(x, x, x, is_causal=False)[0], layer(x, x, x)[0])


SAME_ARGUMENTS = [
    RandMultiHeadAttention, PantherMLAttention, LinearizedMultiheadAttention, HeadwiseRandAttention,
]  # fmt: skip


@pytest.mark.parametrize("kind", SAME_ARGUMENTS)
def test_arguments_have_the_positions_of_torch(kind):
    """Expected: the seventh argument is average_attn_weights. It was is_causal, so that attention became causal."""
    expected = [*inspect.signature(nn.MultiheadAttention.forward).parameters]
    names = [*inspect.signature(kind.forward).parameters]
    assert names == ([*expected[:4], "args", "kwargs"] if kind is HeadwiseRandAttention else expected)
    assert names[:4] == expected[:4]


def test_positions_and_names_of_arguments_agree():
    layer, x = attention_of(), draw(2, 12, E)
    expected = layer(x, x, x)[0]
    for average in (False, True):
        assert torch.equal(layer(x, x, x, None, False, None, average)[0], expected)
        assert torch.equal(layer(x, x, x, average_attn_weights=average)[0], expected)
    assert torch.equal(layer(x, x, x, None, False, None, True, True)[0], layer(x, x, x, is_causal=True)[0])


def test_what_is_refused():
    layer, x = attention_of(), draw(2, 12, E)
    with pytest.raises(ValueError, match=r"need_weights=True is not supported.*pass need_weights=False"):
        layer(x, x, x, need_weights=True)
    band = torch.ones(12, 12, dtype=torch.bool).triu(2)
    for mask in (band, draw(12, 12), nn.Transformer.generate_square_subsequent_mask(12) * 1.0 + torch.eye(12)):
        with pytest.raises(ValueError, match="attn_mask must be causal or mask nothing"):
            layer(x, x, x, attn_mask=mask)
    with pytest.raises(ShapeError, match=r"attn_mask must end in \(queries, keys\) = \(12, 12\)"):
        layer(x, x, x, attn_mask=band[:5])
    with pytest.raises(ShapeError, match="needs at least as many keys as queries, and got 5 and 12"):
        layer(x, x[:, :5], x[:, :5], is_causal=True)
    with pytest.raises(ShapeError, match=r"must have shape \(batch, keys\) = \(2, 12\), not \(12, 2\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(12, 2, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"must have shape \(keys,\), as there is no batch, not \(1, 12\)"):
        layer(x[0], x[0], x[0], key_padding_mask=torch.zeros(1, 12, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"must have shape \(batch, keys\), not \(12,\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(12, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be boolean or floating, not torch.int64"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 12, dtype=torch.int64))
    with pytest.raises(ShapeError, match="must end in embed_dim=32, kdim=32 and vdim=32"):
        layer(x[..., :5], x, x)
    with pytest.raises(DTypeError, match=r"must be torch.float32, as the layer.*torch.float64.*: cast them"):
        layer(x.double(), x, x)
    with pytest.raises(ShapeError, match="must all have 2 dimensions or all 3"):
        layer(x[0], x, x)
    with pytest.raises(ShapeError, match="key and value must have one length, and all three one batch size"):
        layer(x, x[:, :5], x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((30, 4, 8), ShapeError, "num_heads=4 must divide embed_dim=30"),
        ((32, 0, 8), ShapeError, "num_heads"),
        ((32, 4, 0), ShapeError, "num_random_features"),
        ((32, 4, 8, {"dropout": 1.5}), ValueError, r"dropout=1.5 must be a probability"),
        (
            (32, 4, 8, {"kernel_fn": "cosine"}),
            ValueError,
            "'cosine' is unknown: use one of 'hermite', 'softmax', 'oprf'",
        ),
        ((32, 4, 8, {"dropout": None}), TypeError, "dropout must be a number, not NoneType: use 0.0"),
        ((32, 4, 8, {"iscausal": "no"}), TypeError, "iscausal must be True or False, not 'no'"),
        ((32, 4, 8, {"bias": "yes"}), TypeError, "bias must be True or False, not 'yes'"),
        ((32, 4, 8, {"batch_first": 1}), TypeError, "batch_first must be True or False, not 1"),
        ((32, 4, 8, {"SRPE": 3}), TypeError, "SRPE must be a module, such as sinSRPE, or None, not int"),
        ((32, 4, 8, {"dtype": torch.int64}), DTypeError, "dtype"),
        ((32, 4, 8, {"device": torch.ones(2)}), TypeError, "device must be a torch.device or its name, not Tensor"),
    ],
)
def test_bad_arguments(arguments, error, message):
    *sizes, last = arguments
    sizes, named = (sizes, last) if isinstance(last, dict) else (arguments, {})
    with pytest.raises(error, match=message):
        RandMultiHeadAttention(*sizes, **named)


@pytest.mark.parametrize(
    ("same", "bias", "batch_first", "dtype"),
    all_pairs([True, False], [True, False], [True, False], [torch.float32, torch.bfloat16]),
)
def test_from_mha_copies(same, bias, batch_first, dtype):
    sizes = {} if same else {"kdim": 20, "vdim": 28}
    mha = nn.MultiheadAttention(E, H, 0.1, bias, batch_first=batch_first, dtype=dtype, **sizes).eval()
    original = copy.deepcopy(mha.state_dict())
    layer = make_performer(mha, 24, kernel_fn="taylor")
    assert layer.batch_first == batch_first
    assert layer.dropout == 0.1
    assert not layer.training
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    theirs = {parameter.data_ptr() for parameter in mha.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in layer.parameters()}
    shape = (2, 9) if batch_first else (9, 2)
    query, key, value = (
        draw(*shape, n, seed=i, scale=0.3, dtype=dtype) for i, n in enumerate((E, layer.kdim, layer.vdim))
    )
    expected = mha(query, key, value, need_weights=False)[0]
    assert rms_error(layer(query, key, value)[0], expected) < (1e-3 if dtype is torch.float32 else 3e-2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(torch.equal(original[name], value) for name, value in mha.state_dict().items())


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_queries_than_keys_are_refused_in_causal_attention(kernel):
    """One key would be broadcast over all queries."""
    layer = attention_of(kernel, iscausal=True)
    for queries, keys in ((9, 3), (9, 1)):
        query, key = draw(2, queries, E), draw(2, keys, E)
        for padding in (None, torch.zeros(2, keys, dtype=torch.bool)):
            with pytest.raises(ShapeError, match=f"at least as many keys as queries, and got {keys} and {queries}"):
                layer(query, key, key, key_padding_mask=padding)
            assert layer(query, key, key, is_causal=False)[0].shape == query.shape
        with pytest.raises(ShapeError, match="at least as many keys as queries"):
            layer.approximation_error(query, key)


def test_what_is_not_a_tensor_is_named():
    layer, x = RandMultiHeadAttention(E, H, 40, seed=0), torch.randn(2, 5, E)
    for arguments, name in (
        ((3.5, x, x), "query"),
        ((x, [x], x), "key"),
        ((x, x, None), "value"),
        ((x, x, x, 1), "key_"),
    ):
        with pytest.raises(TypeError, match=f"{name}.* must be a tensor, not"):
            layer(*arguments)


def test_from_mha_refuses_what_it_cannot_keep():
    with pytest.raises(TypeError, match=r"takes an nn.MultiheadAttention, not Linear"):
        make_performer(nn.Linear(3, 3), 8)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="append keys, which this layer cannot do"):
            make_performer(nn.MultiheadAttention(E, H, **{option: True}), 8)


@pytest.mark.filterwarnings("ignore:.*worse than the mean:panther.errors.NumericalWarning")  # with 8 features
@pytest.mark.parametrize("kernel", ["softmax", "oprf"])
def test_it_approximates_softmax_attention_ever_better(kernel):
    torch.manual_seed(0)
    mha, x = nn.MultiheadAttention(E, H, batch_first=True), draw(4, 40, E, scale=0.5)
    exact = mha(x, x, x, need_weights=False)[0]
    errors = [
        sum(rms_error(make_performer(mha, m, kernel_fn=kernel, seed=s)(x, x, x)[0], exact) for s in range(5)) / 5
        for m in (8, 64, 512)
    ]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]
    assert errors[2] < 0.05


def peaked(scale, embed_dim=64, heads=4):
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
    with torch.no_grad():
        mha.in_proj_weight[: 2 * embed_dim] *= scale
    return mha


@pytest.mark.parametrize("causal", [False, True])
def test_hermite_is_never_worse_than_the_mean_of_the_values(causal):
    """From flat attention to attention that sees one key; and more features are better."""
    x = draw(1, 200, 64)
    for scale in (1, 2, 3, 5):
        errors = [
            make_performer(peaked(scale), features).approximation_error(x, is_causal=causal)
            for features in (1, 64, 1000)
        ]
        assert errors[2].layer < errors[1].layer < errors[0].layer < errors[0].mean_of_values
        if scale == 1:
            assert errors[0].layer < 0.4 * errors[0].mean_of_values
            assert errors[2].layer < 0.15 * errors[2].mean_of_values


@pytest.mark.parametrize(("causal", "masked", "grad"), all_pairs([False, True], [False, True], [False, True]))
def test_calibrated(causal, masked, grad):
    """With inputs far from 0 a calibrated layer is much better, and equal to its formula."""
    mha, x = peaked(1.0, E, H), draw(2, 150, E, scale=0.7) + 1.5 * draw(E, seed=8)
    layer = make_performer(mha, 24)
    first_error = layer.approximation_error(x, is_causal=causal)
    layer.calibrate_(x)
    error = layer.approximation_error(x, is_causal=causal)
    assert error.layer < 0.7 * first_error.layer
    mask = torch.zeros(2, 150, dtype=torch.bool)
    mask[0, 90:120] = masked
    exponent = torch.zeros(2, 150).masked_fill(mask, -math.inf) if masked else None
    with torch.set_grad_enabled(grad):
        out = layer(x, x, x, key_padding_mask=mask if masked else None, is_causal=causal)[0]
    assert rms_error(out, formed(layer, x, x, x, exponent, causal).detach()) < 1e-5
    if causal:
        other = x.clone()
        other[:, 100:] = math.nan
        with torch.set_grad_enabled(grad):
            error = layer(other, other, other, key_padding_mask=mask if masked else None, is_causal=True)[0]
        assert torch.equal(out[:, :100], error[:, :100])


def test_what_calibration_sets():
    x = draw(2, 60, E) + 1
    layer = make_performer(peaked(1.0, E, H), 24).calibrate_(x[0])
    unbatched = layer.center.clone()
    layer.batch_first = False
    assert_close(layer.calibrate_(x[:1].transpose(0, 1)).center, unbatched)
    q = nn.functional.linear(x[0], layer.Wq, layer.bq).unflatten(-1, (H, -1)).mean(0) * (E // H) ** -0.25
    assert_close(layer.center[:, 0], q.detach())
    oprf = attention_of("oprf").calibrate_(x)
    q, k = (
        nn.functional.linear(x, W, b).unflatten(-1, (H, -1)).flatten(0, 1) * (E // H) ** -0.25
        for W, b in ((oprf.Wq, oprf.bq), (oprf.Wk, oprf.bk))
    )
    assert oprf.feature_norm == pytest.approx((q[:, None] + k[None]).square().sum(-1).mean().item(), rel=1e-4)
    for kernel in ("softmax", "taylor"):
        with pytest.raises(ValueError, match=f"{kernel}.* has nothing to calibrate: use 'hermite' or 'oprf'"):
            attention_of(kernel).calibrate_(x)


def test_balanced_directions_keep_inner_products():
    of_q, of_k = (a @ a.mT for a in (draw(2, 6, 9, dtype=torch.float64), draw(2, 6, 9, seed=2, dtype=torch.float64)))
    to_q, to_k = balanced_directions(of_q, of_k, 6).chunk(2, 1)
    assert (to_q.mT @ to_k - torch.eye(6)).abs().max() < 1e-12
    moments = to_q @ of_q @ to_q.mT, to_k @ of_k @ to_k.mT
    scale = moments[0].diagonal(dim1=-2, dim2=-1).amax()
    assert (moments[0] - moments[1]).abs().max() < 0.02 * scale  # a ridge of a thousandth was added
    assert [hermite_rank(m, 8) for m in (1, 9, 10, 11, 12, 15, 45, 99)] == [0, 0, 1, 1, 2, 3, 8, 8]


def test_the_error_is_that_of_the_formula():
    layer, x = attention_of("relu"), draw(2, 30, E, scale=2.0)
    mask_free = copy.deepcopy(layer)
    with torch.no_grad():  # what the heads put out
        mask_free.W0.copy_(torch.eye(E))
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    with torch.no_grad():
        mha.in_proj_weight.copy_(torch.cat((layer.Wq, layer.Wk, layer.Wv)))
        mha.out_proj.weight.copy_(torch.eye(E))
    for causal in (False, True):
        mask = nn.Transformer.generate_square_subsequent_mask(30) if causal else None
        exact = mha(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0][0]
        v = x[0] @ layer.Wv.mT
        mean = v.cumsum(0) / torch.arange(1, 31)[:, None] if causal else v.mean(0).expand_as(v)
        error = layer.approximation_error(x, is_causal=causal)
        ours = mask_free(x[:1], x[:1], x[:1], is_causal=causal)[0][0]
        for found, output in ((error.layer, ours), (error.mean_of_values, mean)):
            assert found == pytest.approx(((output - exact).norm() / exact.norm()).item(), rel=1e-3)


def test_a_map_that_is_worse_than_the_mean_warns_once():
    x = draw(1, 100, 64)
    layer = make_performer(peaked(1.0), 16, kernel_fn="softmax", seed=0)
    layer(x[:, :10], x[:, :10], x[:, :10])  # too short to tell
    with pytest.warns(NumericalWarning, match=r"'softmax' features .* worse than the mean .*use kernel_fn='hermite'"):
        expected = layer(x, x, x)[0]
    assert torch.equal(layer(x, x, x)[0], expected)
    compiled = make_performer(peaked(1.0), 16, kernel_fn="softmax", seed=0)
    out = torch.compile(compiled, fullgraph=True, backend="eager")(x, x, x)[0]
    assert_close(out, expected.double())
    trained = RandMultiHeadAttention(64, 4, 16, kernel_fn="softmax", seed=0)
    trained(x, x, x)  # imitates nothing


def test_checkpoints_of_the_former_default():
    """A layer without kernel_fn takes the map of random features from a checkpoint, and keeps its own otherwise."""
    old, x = attention_of("softmax"), draw(2, 9, E)
    torch.manual_seed(1)
    layer = RandMultiHeadAttention(E, H, 24)
    assert layer.kernel_fn == "hermite"
    layer.load_state_dict(old.state_dict())
    assert layer.kernel_fn == "softmax"
    assert torch.equal(layer(x, x, x)[0], old(x, x, x)[0])
    layer.load_state_dict(old.state_dict())
    fitted = make_performer(peaked(1.0, E, H), 24).calibrate_(x + 1)
    again = RandMultiHeadAttention(E, H, 24)
    again.load_state_dict(fitted.state_dict())
    assert again.kernel_fn == "hermite"
    assert torch.equal(again(x, x, x)[0], fitted(x, x, x)[0])
    again.reset_parameters()
    assert not again.center.any()
    with pytest.raises(RuntimeError, match="saved with kernel_fn='softmax'"):
        attention_of("hermite").load_state_dict(old.state_dict())


def test_positive_features_are_unbiased():
    """The mean over 20 seeds of directions for 20 heads is the exponential kernel, up to one factor for all pairs."""
    x, y = draw(3, 6, scale=0.4, dtype=torch.float64), draw(4, 6, seed=2, scale=0.4, dtype=torch.float64)
    for shift in (0.0, optimal_shift(3.0, 6)):
        total = torch.zeros(3, 4, dtype=torch.float64)
        for seed in range(20):
            W = orthogonal_gaussian(12, 6, heads=20, seed=seed, stream=0)
            (fx, cx), (fy, cy) = positive_features(x[None], W, shift), positive_features(y[None], W, shift)
            total += ((fx * cx.exp()[..., None]) @ (fy * cy.exp()[..., None]).mT).sum(0)
        mean = total / 4_800 * (1 - 4 * shift) ** 3
        # With A = 0 a feature has the relative variance exp(|x + y|^2) - 1, and orthogonal ones no more together.
        deviation = ((x[:, None] + y).square().sum(-1).exp() / 4_800).sqrt()
        assert ((mean / (x @ y.mT).exp() - 1).abs() <= 4 * deviation).all()


def test_directions_are_orthogonal_and_normal():
    W = orthogonal_gaussian(40, 16, heads=50, seed=0, stream=0)
    assert W.shape == (50, 40, 16)
    block = W[:, :16]
    gram = block @ block.mT
    assert (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-12
    assert torch.equal(W, orthogonal_gaussian(40, 16, heads=50, seed=0, stream=0))
    # 32,000 entries of variance 1, those of a block correlated only through their lengths.
    assert abs(W.mean().item()) < 5 / math.sqrt(W.numel())
    assert abs(W.square().mean().item() - 1) < 0.05


@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 1), (0, 3), (3, 0)])
def test_products_of_pairs_are_the_same_on_a_gpu(shape, monkeypatch):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    sliced = products(x)
    (grad,) = torch.autograd.grad(sliced.sin().sum(), x)
    monkeypatch.setattr(_features, "runs_eagerly_on_gpu", lambda x: True)
    gathered = products(x)
    assert torch.equal(gathered, sliced)
    torch.testing.assert_close(torch.autograd.grad(gathered.sin().sum(), x)[0], grad)
    assert torch.autograd.gradcheck(products, x)
    assert torch.autograd.gradgradcheck(products, x)


def test_lengths_of_features():
    x = draw(5, 6, dtype=torch.float64)
    assert taylor_features(x).shape == (5, 1 + 6 + 21)
    assert (relu_features(x, draw(7, 6, dtype=torch.float64)) >= 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(dtype, kernel, causal):
    layer = attention_of(kernel).to(dtype)
    x = draw(2, 40, E, dtype=dtype)
    out = layer(x, x, x, is_causal=causal)[0]
    assert out.dtype is dtype
    assert rms_error(out, formed(layer, x, x, x, causal=causal)) < 3 * KERNEL_RMS[dtype]
    with torch.autocast("cpu", dtype):
        full = attention_of(kernel)
        assert full(x.float(), x.float(), x.float(), is_causal=causal)[0].dtype is dtype


def test_large_inputs_do_not_overflow():
    for kernel in ("softmax", "oprf"):
        layer, x = attention_of(kernel), draw(2, 20, E, scale=100.0)
        for causal in (False, True):
            assert layer(x, x, x, is_causal=causal)[0].isfinite().all()


def test_dropout_is_applied_to_what_is_projected():
    layer, x = attention_of(dropout=0.5), draw(2, 12, E)
    assert torch.equal(layer.eval()(x, x, x)[0], attention_of()(x, x, x)[0])
    torch.manual_seed(1)
    first, second = layer.train()(x, x, x)[0], layer(x, x, x)[0]
    assert not torch.equal(first, second)
    whole = attention_of(dropout=1.0).train()
    nn.init.normal_(whole.b0)
    assert torch.equal(whole(x, x, x)[0], whole.b0.expand(2, 12, E))


def test_random_state_is_left_alone_and_layers_differ():
    torch.manual_seed(5)
    a, b = RandMultiHeadAttention(E, H, 12), RandMultiHeadAttention(E, H, 12)
    assert not torch.equal(a.Wq, b.Wq)
    assert not torch.equal(a.directions, b.directions)
    assert a.seed != b.seed
    torch.manual_seed(5)
    again = RandMultiHeadAttention(E, H, 12)
    assert torch.equal(again.directions, a.directions)
    state = torch.get_rng_state()
    again.redraw_features_()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(again.directions, a.directions)


def test_redrawing_at_an_interval():
    layer, x = attention_of(redraw_interval=2), draw(2, 5, E)
    first = layer.directions.clone()
    layer(x, x, x)
    assert torch.equal(layer.directions, first)
    layer(x, x, x)
    assert not torch.equal(layer.directions, first)
    second = layer.directions.clone()
    for _ in range(4):
        layer.eval()(x, x, x)
    assert torch.equal(layer.directions, second)
    assert torch.equal(attention_of().redraw_features_().directions, second)
    drawn = orthogonal_gaussian(24, E // H, heads=H, seed=3, stream=2)  # the first took streams 0 and 1
    assert torch.equal(drawn.float(), second)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 96, "vdim": 160}])
def test_projections_are_drawn_as_those_of_torch(sizes):
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(128, 4, **sizes), RandMultiHeadAttention(128, 4, 8, **sizes)
    copied = make_performer(theirs, 8)
    for name in ("Wq", "Wk", "Wv", "W0"):
        largest = getattr(copied, name).abs().max()
        assert abs(getattr(ours, name).abs().max() / largest - 1) < 0.01  # both uniform, of 12,288 numbers and more
    assert not any(getattr(ours, name).any() for name in ("bq", "bk", "bv", "b0"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_repeated_by_checkpointing_draws_nothing(reentrant):
    layer, x = attention_of(redraw_interval=2), draw(2, 5, E).requires_grad_()
    expected = torch.autograd.grad(attention_of()(x, x, x)[0].square().sum(), x)[0]
    first = layer.directions.clone()
    out = checkpoint(lambda x: layer(x, x, x)[0], x, use_reentrant=reentrant)
    out.square().sum().backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(layer.directions, first)
    layer(x, x, x)
    assert not torch.equal(layer.directions, first)


def test_drawing_continues_after_loading():
    layer, x = attention_of("oprf", redraw_interval=2, SRPE=sinSRPE(H, E // H, 2, 16, seed=1)), draw(2, 5, E)
    layer.feature_norm = 0.7
    layer(x, x, x)
    layer.redraw_features_().SRPE.redraw_features_()
    other = attention_of("oprf", redraw_interval=2, SRPE=sinSRPE(H, E // H, 2, 16, seed=5), seed=6)
    other.load_state_dict(layer.state_dict())
    assert (other.seed, other.feature_norm) == (3, 0.7)
    assert torch.equal(layer.eval()(x, x, x)[0], other.eval()(x, x, x)[0])
    for module in (layer, other):
        module.train().SRPE.redraw_features_()
    assert torch.equal(layer(x, x, x)[0], other(x, x, x)[0])  # the second forward, which draws
    with torch.device("meta"):
        assert layer.get_extra_state().device.type == "cpu"
    for module in (layer, layer.SRPE):
        with pytest.raises(SketchMismatchError, match=r"is torch.float16 and must be torch.int64: cast and average"):
            module.load_state_dict({name: value.half() for name, value in module.state_dict().items()})


def test_state_dict_holds_the_directions():
    layer, names = attention_of(), {"Wq", "Wk", "Wv", "W0", "bq", "bk", "bv", "b0"}
    assert {name for name, _ in layer.named_parameters()} == names
    assert set(layer.state_dict()) == names | {"directions", "record_mark", "_extra_state"}
    with torch.device("meta"):
        empty = attention_of()
    empty.to_empty(device="cpu").reset_parameters()
    assert torch.equal(empty.directions, layer.directions)


def test_checkpoints_with_one_projection_matrix_for_all_heads():
    """As other libraries write them: no directions of each head, and no extra state."""
    layer, shared = attention_of(), draw(24, E // H, seed=9)
    state = {name: value.detach() for name, value in attention_of(seed=4).named_parameters()}
    layer.load_state_dict({**state, "projection_matrix": shared})
    assert torch.equal(layer.directions, shared.expand(H, -1, -1))
    assert torch.equal(layer.Wq, state["Wq"])
    assert layer.directions[0].data_ptr() != layer.directions[1].data_ptr()
    model = nn.Sequential(attention_of())
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"'0' cannot take .* \(5, 8\).*\(24, 8\), so build .*num_random_features=5"
        ):
            model.load_state_dict({"0.projection_matrix": shared[:5]}, strict=strict)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"projection_matrix"'):
        attention_of("taylor").load_state_dict({**state, "projection_matrix": shared})


@pytest.mark.parametrize(
    ("causal", "kernel", "backend"),
    [pytest.param(False, "taylor", "aot_eager", marks=pytest.mark.slow), (True, "softmax", "eager")],
)
def test_compile(causal, kernel, backend):
    layer = attention_of(kernel, iscausal=causal).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 70):
        x = draw(2, length, E)
        assert_close(compiled(x, x, x)[0], layer(x, x, x)[0].detach())


@pytest.mark.parametrize(("training", "padded", "masked"), all_pairs([True, False], [True, False], [True, False]))
def test_inside_a_transformer_encoder(training, padded, masked):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True)
    block.self_attn = make_performer(block.self_attn, 24, kernel_fn="taylor")
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).train(training)
    x = draw(2, 12, E)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = padded
    mask = nn.Transformer.generate_square_subsequent_mask(12) == -math.inf if masked else None
    called = []
    encoder.layers[0].self_attn.register_forward_hook(lambda *_: called.append(1))
    with torch.set_grad_enabled(training):
        out = encoder(x, mask=mask, src_key_padding_mask=padding if padded else None)
        changed = x.masked_fill(padding[..., None], 7.0)
        again = encoder(changed, mask=mask, src_key_padding_mask=padding if padded else None)
    assert called
    assert_close(again[~padding], out[~padding].detach())
    if masked:
        later = x.clone()
        later[:, 6:] += 1
        assert_close(encoder(later, mask=mask)[:, :6], encoder(x, mask=mask)[:, :6].detach())


@pytest.mark.parametrize("padded", [True, False])
def test_taking_the_place_in_an_encoder_that_is_built_already(padded):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 64, batch_first=True), 2).eval()
    x, padding = draw(2, 12, E, scale=0.3), torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = padded
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        for block in encoder.layers:
            block.self_attn = make_performer(block.self_attn, 24, kernel_fn="taylor")
        ours = encoder(x, src_key_padding_mask=padding)
    assert rms_error(ours[~padding], expected[~padding]) < 0.03  # the second layer's logits are up to 1


def test_inside_a_transformer_decoder():
    torch.manual_seed(0)
    block = nn.TransformerDecoderLayer(E, H, 64, dropout=0.0, batch_first=True)
    x, memory = draw(2, 12, E, scale=0.3), draw(2, 7, E, seed=2, scale=0.3)
    mask, padding = nn.Transformer.generate_square_subsequent_mask(12), torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    expected = block(x, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=padding)
    for name in ("self_attn", "multihead_attn"):
        setattr(block, name, make_performer(getattr(block, name), 24, kernel_fn="taylor", iscausal=True))
    ours = block(x, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=padding)
    assert rms_error(ours, expected) < 1e-3


def test_empty_sequences_and_batches():
    layer = attention_of()
    for shape in ((0, 5, E), (2, 0, E)):
        for causal in (False, True):
            x = torch.zeros(shape, requires_grad=True)
            out = layer(x, x, x, is_causal=causal)[0]
            assert out.shape == shape
            out.sum().backward()
    out = layer(draw(2, 3, E), torch.zeros(2, 0, E), torch.zeros(2, 0, E))[0]
    assert torch.equal(out, layer.b0.expand(2, 3, E))


def test_srpe_gives_relative_positions():
    """Inner products of what comes out are, over many realisations, the sum over features of q k P(m - n)."""
    encode = sinSRPE(2, 3, sines=2, num_realizations=40_000, dtype=torch.float64, seed=0)
    assert torch.allclose(encode.gains.square().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    nn.init.uniform_(encode.phases, 0, 2)
    q, k = draw(1, 2, 6, 3, dtype=torch.float64), draw(1, 2, 5, 3, seed=2, dtype=torch.float64)
    coded_q, coded_k = encode(q, k)
    lag = torch.arange(6)[:, None] - torch.arange(5)[None, :]
    angle = 2 * math.pi * encode.frequencies[..., None, None] * lag + encode.phases[..., None, None]
    P = (encode.gains[..., None, None] ** 2 * angle.cos()).sum(2)  # (heads, features, 6, 5)
    exact = torch.einsum("bhmd,bhnd,hdmn->bhmn", q, k, P)
    size = (q.square().sum(-1)[..., None] * k.square().sum(-1)[..., None, :]).sqrt()
    # A realisation has a standard deviation of at most twice the product of norms: 5 deviations of the mean.
    assert ((coded_q @ coded_k.mT - exact).abs() <= 10 / math.sqrt(40_000) * size).all()


def test_srpe_leaves_the_scale_of_logits():
    """Codes of the constant 1 are, over many realisations, no codes: the same attention as without them."""
    encode = sinSRPE(H, E // H, sines=1, num_realizations=400, seed=0)
    for parameter in (encode.frequencies, encode.phases):
        nn.init.zeros_(parameter)
    layer, x = attention_of("taylor", SRPE=encode), draw(2, 6, E)
    expected = formed(layer, x, x, x)
    uniform = nn.functional.linear(x.mean(1, keepdim=True), layer.W0 @ layer.Wv)
    # Inner products are off by a twentieth, so weights are by a twentieth of what they differ from equal ones.
    assert (layer(x, x, x)[0] - expected).norm() < 0.15 * (uniform - expected).norm()


def test_srpe_is_an_ordinary_module(capsys):
    layer = attention_of(SRPE=sinSRPE(H, E // H, sines=3, num_realizations=16, seed=0))
    assert {"SRPE.frequencies", "SRPE.phases", "SRPE.gains"} <= {name for name, _ in layer.named_parameters()}
    assert "SRPE.noise" in layer.state_dict()
    assert layer.directions.shape == (H, 24, 16)
    assert layer.feature_norm == (E // H) ** 0.5  # codes leave inner products what they are
    noise = layer.SRPE.noise.clone()
    assert not torch.equal(layer.SRPE.redraw_features_().noise, noise)
    layer.SRPE.reset_parameters()
    assert torch.equal(layer.SRPE.noise, noise)
    x = draw(2, 7, E)
    out = layer(x, x, x)[0]
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x, x, x)[0], out)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.SRPE.parameters())
    shifted = layer(x.roll(1, 1), x.roll(1, 1), x.roll(1, 1))[0]
    assert not torch.allclose(shifted.roll(-1, 1), out)  # positions matter
    with pytest.raises(ShapeError, match=r"queries must have shape \(batch, num_heads, n, perHead_in\)"):
        layer.SRPE(x, x)
    assert capsys.readouterr().out == ""


def test_functional_form_against_formed_weights():
    q, k, v, c = draw(3, 7, 4).abs(), draw(3, 9, 4, seed=2).abs(), draw(3, 9, 5, seed=3), draw(3, 9, seed=4)
    weights = (q @ k.mT).double() * c.double().exp()[:, None]
    assert_close(linear_attention(q, k, v, c), weights @ v.double() / weights.sum(-1, keepdim=True))
    with pytest.raises(ShapeError, match="as many keys as queries, and got 9 and 7"):
        linear_attention(q, k, v, is_causal=True)
    for wrong in ((q[..., :3], k, v), (q, k, v[:, :5]), (q, k, v, c[:, :5]), (q[0, 0], k, v)):
        with pytest.raises(ShapeError, match=r"takes q \(\*batch, L, m\), k \(\*batch, S, m\).*, not \("):
            linear_attention(*wrong)
    with pytest.raises(DTypeError, match=r"must be floating, and are torch.float32, torch.float32 and torch.int64"):
        linear_attention(q, k, v.long())


@pytest.mark.parametrize("causal", [False, True])
def test_float16_with_large_logits(causal):
    """Most features are below float16's range there, and a query may have no other."""
    layer = attention_of().to(torch.float16)
    with torch.no_grad():
        layer.Wq *= 5
        layer.Wk *= 5
    x = draw(2, 40, E, dtype=torch.float16)
    assert rms_error(layer(x, x, x, is_causal=causal)[0], formed(layer, x, x, x, causal=causal)) < 0.03


def test_causal_attention_on_the_meta_device():
    layer = attention_of().to("meta")
    x = torch.empty(2, 9, E, device="meta")
    assert layer(x, x, x, is_causal=True)[0].shape == x.shape
