"""LearnedLinearAttention: against the weights of all pairs, masks, grouped heads and queries behind a cache."""

import copy

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


def read(module, q, k, v, chunks, key_mask=None):
    """Return the outputs of a sequence that is read in chunks, and the last state."""
    state, outputs, start = module.init_state(2, num_key_heads=k.shape[1]), [], 0
    for parts in zip(*(x.split(chunks, 2) for x in (q, k, v)), strict=True):
        count = parts[0].shape[2]
        mask = None if key_mask is None else key_mask[:, start : start + count]
        output, state = module.step(*parts, state, mask)
        outputs.append(output)
        start += count
    return torch.cat(outputs, 2), state


@pytest.mark.parametrize("chunks", [1, 7, [1, 0, 2, 20, 14], [LENGTH]])
@pytest.mark.parametrize(("window", "features"), [(5, 6), (1, 3), (3, 7), (LENGTH, 4)])
@pytest.mark.parametrize("pads", [None, (0, 4), (11, 3), (LENGTH, 1)])
def test_any_chunks_give_the_outputs_of_the_whole(pads, window, features, chunks):
    module, (q, k, v) = attention(window=window, num_features=features), operands(2)
    key_mask = None
    if pads is not None:
        place = torch.arange(LENGTH)
        key_mask = (place >= torch.tensor(pads)[:, None]) & ((place % 9 != 5) | (place < 12))
        k = k.masked_fill(~key_mask[:, None, :, None], torch.nan)
    with torch.no_grad():
        whole = module(q, k.nan_to_num(0), v, key_mask, is_causal=True)
        output, state = read(module, q, k, v, chunks, key_mask)
    torch.testing.assert_close(output, whole)
    assert state.length == LENGTH
    empty = module.init_state(2, num_key_heads=2)
    assert [x.shape for x in state if torch.is_tensor(x)] == [x.shape for x in empty if torch.is_tensor(x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_thousand_steps_lose_no_digits(dtype):
    module, (q, k, v) = attention(dtype, window=32), operands(length=1000, dtype=dtype)
    with torch.no_grad():
        whole = module(q, k, v, is_causal=True)
        output, state = read(module, q, k, v, 1)
    assert output.dtype is dtype
    assert state.sums.dtype is torch.float32
    assert state.keys.dtype is dtype
    assert ((output - whole).norm() / whole.norm()).item() < (1e-5 if dtype is torch.float32 else 6e-3)


def test_gradients_pass_through_states():
    module, (q, k, v) = attention(), operands(2)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *module.parameters()]
    upstream = torch.randn(2, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = torch.autograd.grad(module(q, k, v, is_causal=True), leaves, upstream)
    for chunks in (1, [20, 3, 14]):
        gradients = torch.autograd.grad(read(module, q, k, v, chunks)[0], leaves, upstream)
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("pads", [(0, 0), (2, 6)])
def test_states_are_not_changed_and_can_be_selected(pads):
    module, (q, k, v) = attention(), operands(2)
    key_mask = torch.arange(LENGTH) >= torch.tensor(pads)[:, None]
    whole = module(q, k, v, key_mask, is_causal=True)
    with torch.no_grad():
        _, state = module.step(
            *(x[:, :, :20] for x in (q, k, v)), module.init_state(2, num_key_heads=2), key_mask[:, :20]
        )
        chosen = torch.tensor([1, 0, 1])
        for _ in range(2):
            selected, outputs = state.select(chosen), []
            for t in range(20, LENGTH):
                y, selected = module.step(*(x[chosen, :, t : t + 1] for x in (q, k, v)), selected)
                outputs.append(y)
            torch.testing.assert_close(torch.cat(outputs, 2), whole[chosen, :, 20:])


def test_steps_that_do_not_fit_are_refused():
    module, (q, k, v) = attention(), operands(2)
    state = module.init_state(2, num_key_heads=2)
    with pytest.raises(TypeError, match="must be the result of init_state"):
        module.step(q, k, v, None)
    with pytest.raises(ShapeError, match="a batch of 2 and the input one of 1"):
        module.step(q[:1], k[:1], v[:1], state)
    with pytest.raises(ShapeError, match="as many queries as keys"):
        module.step(q[:, :, :3], k, v, state)
    with pytest.raises(ShapeError, match="with the heads and widths of the state"):
        module.step(q, k, v, module.init_state(2))
    module.load_state_dict(copy.deepcopy(module.state_dict()))  # a write of the same numbers
    module.step(q, k, v, state)
    torch.nn.init.constant_(module.key_offset, 1)
    with pytest.raises(ValueError, match="make a new state by init_state"):
        module.step(q, k, v, state)


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
    ("mask", "more", "message"),
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
def test_calls_that_features_cannot_answer_are_refused(mask, more, message):
    q, k, v = operands()
    with pytest.raises(UnsupportedCallError, match=message):
        attend(_Caller(), q, k, v, mask, **more)
