"""LearnedLinearAttention: against the weights of all pairs, masks, grouped heads and queries behind a cache."""

import pytest
import torch
from torch import nn

from panther.errors import ShapeError
from panther.nn import LearnedLinearAttention
from panther.nn.attention.interface import UnsupportedCallError, attend

HEADS, WIDTH, LENGTH = 4, 8, 37


def attention(dtype=torch.float64, **sizes):
    torch.manual_seed(0)
    module = LearnedLinearAttention(HEADS, WIDTH, **({"num_features": 6, "window": 5} | sizes), dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def operands(groups=1, length=LENGTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, HEADS // groups, HEADS // groups)
    return [torch.randn(2, h, length, WIDTH, generator=generator, dtype=dtype) for h in heads]


def dense(module, q, k, v, is_causal, key_mask=None):
    """The definition, by weights of all pairs."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    q = q / WIDTH**0.5
    logits = module.scores(q, k, torch.arange(q.shape[-2]), is_causal, key_mask)
    return logits.softmax(-1).nan_to_num(0) @ v


@pytest.mark.parametrize("length", [1, 5, 11, LENGTH])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_form_equals_the_definition(is_causal, groups, length):
    module, (q, k, v) = attention(), operands(groups, length)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > 0.3
    for key_mask in (None, mask):
        y = module(q, k, v, key_mask, is_causal=is_causal)
        torch.testing.assert_close(y, dense(module, q, k, v, is_causal, key_mask))


def test_a_window_over_everything_is_softmax_attention():
    module, (q, k, v) = attention(window=LENGTH), operands()
    exact = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(module(q, k, v, is_causal=True), exact)


def test_features_at_the_keys_are_softmax_attention():
    """As many sharp centres as there are keys make each key its own feature."""
    q, k, v = operands(length=24)
    q, k, v = q[:1], k[:1], v[:1]
    module = attention(num_features=24, window=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.query_weight.copy_(k[0])
        module.key_weight.copy_(200 * k[0])
        module.key_bias.copy_(-100 * k[0].square().sum(-1))
    for is_causal in (False, True):
        exact = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(module(q, k, v, is_causal=is_causal), exact)


def test_queries_behind_a_cache_are_those_of_the_whole():
    module, (q, k, v) = attention(), operands(2)
    whole = module(q, k, v, is_causal=True)
    for count in (1, 4):
        last = module(q[..., -count:, :], k, v, is_causal=True)
        torch.testing.assert_close(last, whole[..., -count:, :])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pads", [(0, 1), (3, 7), (5, 0), (LENGTH, 2)])
def test_padding_before_a_sequence_changes_nothing(pads, is_causal):
    """Expected of every model: the answer to a prompt does not depend on the prompts beside it in the batch."""
    module, (q, k, v) = attention(), operands(2)
    key_mask = torch.arange(LENGTH) >= torch.tensor(pads)[:, None]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y = module(q, k, v, key_mask, is_causal=is_causal)
    real = key_mask[:, None, :, None].expand(y.shape)
    wanted = dense(module, q, k, v, is_causal, key_mask)
    torch.testing.assert_close(y[real], wanted[real])
    expected = torch.zeros_like(y)
    for row, pad in enumerate(pads):
        alone = [x[row : row + 1, :, pad:] for x in (q, k, v)]
        expected[row, :, pad:] = module(*alone, is_causal=is_causal)[0]
    torch.testing.assert_close(y[real], expected[real])
    assert not is_causal or not y[~real].any()
    (expected * real).square().sum().backward()
    gradient = k.grad.clone()
    k.grad = None
    (y * real).square().sum().backward()
    torch.testing.assert_close(k.grad, gradient)


def test_padding_before_a_sequence_changes_nothing_behind_a_cache():
    module, (q, k, v) = attention(), operands(2)
    key_mask = torch.arange(LENGTH) >= torch.tensor([[3], [11]])
    whole = module(q, k, v, key_mask, is_causal=True)
    last = module(q[..., -4:, :], k, v, key_mask, is_causal=True)
    torch.testing.assert_close(last, whole[..., -4:, :])
    # A static cache tells the positions of its queries.
    positions = torch.tensor([[20, 21], [30, 31]])
    some = module(torch.stack((q[0, :, 20:22], q[1, :, 30:32])), k, v, key_mask, is_causal=True, positions=positions)
    torch.testing.assert_close(some, torch.stack((whole[0, :, 20:22], whole[1, :, 30:32])))


def test_padding_is_known_in_a_graph_without_breaks():
    module, (q, k, v) = attention(), operands()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    key_mask = torch.arange(LENGTH) >= torch.tensor([[0], [9]])
    wanted = module(q, k, v, key_mask, is_causal=True)
    torch.testing.assert_close(compiled(q, k, v, key_mask, is_causal=True), wanted)


def test_large_logits_stay_finite_in_half_precision():
    module, (q, k, v) = attention(torch.bfloat16), operands(dtype=torch.bfloat16)
    y = module(30 * q, 30 * k, v, is_causal=True)
    assert y.dtype is torch.bfloat16
    assert y.isfinite().all()


def test_gradients_reach_all_parameters():
    module, (q, k, v) = attention(), operands()
    module(q, k, v, is_causal=False).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for name, p in module.named_parameters())


def test_sizes_are_checked():
    q, k, v = operands()
    with pytest.raises(ShapeError, match="has 4 heads of width 8"):
        attention()(q[:, :2], k, v, is_causal=True)
    with pytest.raises(ShapeError, match="no common positions"):
        attention()(q[..., :5, :], k, v, is_causal=False)
    with pytest.raises(ShapeError, match="window"):
        LearnedLinearAttention(2, 4, window=0)


class _Caller(nn.Module):
    """As much of a transformers module as an attention function reads."""

    is_causal = True

    def __init__(self):
        super().__init__()
        self.linear_attention = attention()


def causal_mask(key_mask):
    length = key_mask.shape[1]
    return (torch.ones(length, length, dtype=torch.bool).tril() & key_mask[:, None])[:, None]


def test_masks_of_transformers_are_read():
    caller, (q, k, v) = _Caller(), operands()
    key_mask = torch.ones(2, LENGTH, dtype=torch.bool)
    key_mask[0, 30:] = key_mask[1, :4] = False
    mask = causal_mask(key_mask)
    wanted = caller.linear_attention(q, k, v, key_mask, is_causal=True).transpose(1, 2)
    additive = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    for given in (mask, additive, mask):
        torch.testing.assert_close(attend(caller, q, k, v, given)[0], wanted)
    last = attend(caller, q[1:, :, -1:], k[1:], v[1:], mask[1:, :, -1:])[0]
    torch.testing.assert_close(last, attend(caller, q, k, v, mask)[0][1:, -1:])
    both = key_mask[:, None, None].expand(-1, -1, LENGTH, -1)
    wanted = caller.linear_attention(q, k, v, key_mask, is_causal=False).transpose(1, 2)
    torch.testing.assert_close(attend(caller, q, k, v, both)[0], wanted)


def test_a_static_cache_is_read_up_to_its_queries():
    caller, (q, k, v) = _Caller(), operands()
    whole = caller.linear_attention(q, k, v, is_causal=True).transpose(1, 2)
    longer = [nn.functional.pad(x, (0, 0, 0, 9), value=7.0) for x in (k, v)]
    torch.testing.assert_close(attend(caller, q, *longer, None)[0], whole)
    allowed = torch.arange(LENGTH + 9) < LENGTH
    torch.testing.assert_close(attend(caller, q[..., -1:, :], *longer, allowed.expand(2, 1, 1, -1))[0], whole[:, -1:])


@pytest.mark.parametrize(
    ("mask", "more", "words"),
    [
        (causal_mask(torch.ones(2, LENGTH, dtype=torch.bool)).roll(1, -1), {}, "neither causal nor"),
        (torch.randn(2, 1, LENGTH, LENGTH), {}, "adds numbers"),
        (torch.ones(2, HEADS, LENGTH, LENGTH, dtype=torch.bool), {}, "one for all heads"),
        (None, {"dropout": 0.1}, "drops attention weights"),
        (None, {"softcap": 30.0}, "caps"),
        (None, {"position_bias": torch.zeros(1)}, "position bias"),
        (None, {"sliding_window": 8}, "sliding window"),
    ],
)
def test_calls_that_features_cannot_answer_are_refused(mask, more, words):
    q, k, v = operands()
    with pytest.raises(UnsupportedCallError, match=words):
        attend(_Caller(), q, k, v, mask, **more)
