"""RandMultiHeadAttention token by token: against the whole sequence, for every feature map."""

import copy
import math
import pickle

import pytest
import torch
from tolerances import KERNEL_RMS, rms_error
from torch import nn

from panther.errors import DTypeError, ShapeError, SketchMismatchError
from panther.nn import RandMultiHeadAttention, sinSRPE
from panther.nn.attention.random_features import RandomFeatureAttention

KERNELS = ["hermite", "softmax", "oprf", "relu", "taylor"]
E, H = 32, 4


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention_of(kernel, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    layer = RandMultiHeadAttention(E, H, 24, kernel_fn=kernel, **{"seed": 3, "dtype": dtype, **settings})
    for name in ("bq", "bk", "bv", "b0"):
        nn.init.normal_(getattr(layer, name))
    if kernel in ("hermite", "oprf"):
        layer.calibrate_(draw(2, 100, E, seed=9, dtype=dtype) + 0.3)
    return layer


def read(layer, x, chunks, masks=None):
    """Return the outputs of a sequence that is read in chunks, and the last state."""
    state, outputs, start = layer.init_state(x.shape[0 if layer.batch_first else 1]), [], 0
    dim = 1 if layer.batch_first else 0
    for chunk in x.split(chunks, dim):
        count = chunk.shape[dim]
        mask = None if masks is None else masks[:, start : start + count]
        output, state = layer.step(chunk, state, mask)
        outputs.append(output)
        start += count
    return torch.cat(outputs, dim), state


@pytest.mark.parametrize("chunks", [1, 7, [1, 0, 2, 64, 33]])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_chunks_give_the_outputs_of_the_whole(kernel, chunks):
    layer, x = attention_of(kernel), draw(2, 100, E)
    with torch.no_grad():
        output, state = read(layer, x, chunks)
        assert rms_error(output, layer(x, x, x, is_causal=True)[0]) < KERNEL_RMS[torch.float64]
    assert state.length == 100
    assert state.sums.shape == layer.init_state(2).sums.shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thousand_steps_lose_no_digits(kernel):
    layer, x = attention_of(kernel, torch.float32), draw(1, 1000, E, dtype=torch.float32)
    with torch.no_grad():
        output, _ = read(layer, x, 1)
        whole = layer(x, x, x, is_causal=True)[0]
    assert ((output - whole).norm() / whole.norm()).item() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_is_summed_in_float32(kernel, dtype):
    layer, x = attention_of(kernel, dtype), draw(2, 90, E, dtype=dtype)
    with torch.no_grad():
        output, state = read(layer, x, [40, *[1] * 50])
        whole = layer(x, x, x, is_causal=True)[0]
    assert output.dtype is dtype
    assert state.sums.dtype is torch.float32
    assert rms_error(output, whole) < KERNEL_RMS[dtype]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("queries", [0, 1, 3, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_of_a_cache(kernel, queries, masked):
    """Expected, as of every attention with a cache: one query and ten keys return one row."""
    layer, x = attention_of(kernel, iscausal=True), draw(2, 10, E)
    mask = torch.arange(10) < torch.tensor([[3], [0]]) if masked else None
    whole = layer(x, x, x, mask)[0][:, 10 - queries :]
    last = layer(x[:, 10 - queries :], x, x, mask)[0]
    assert last.shape == (2, queries, E)
    assert rms_error(last, whole) < KERNEL_RMS[torch.float64]
    lower_right = torch.ones(queries, 10, dtype=torch.bool).triu(11 - queries)
    if queries > 1:
        given = layer(x[:, 10 - queries :], x, x, mask, attn_mask=lower_right, is_causal=False)[0]
        assert torch.equal(given, last)
        upper_left = torch.ones(queries, 10, dtype=torch.bool).triu(1)
        with pytest.raises(ValueError, match="attn_mask must be causal or mask nothing"):
            layer(x[:, 10 - queries :], x, x, attn_mask=upper_left, is_causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["padding", "numbers"])
def test_masked_tokens_have_no_influence(kernel, kind):
    layer, x = attention_of(kernel), draw(2, 40, E)
    masks = torch.arange(40) < torch.tensor([[0], [11]])
    x[1, :11] = math.nan
    masks[0, 20:24] = True
    if kind == "numbers":
        masks = torch.zeros(2, 40).masked_fill(masks, -math.inf)
        masks[:, 30] = -700.0  # a key that counts almost nothing
    with torch.no_grad():
        whole = layer(x, x, x, masks, is_causal=True)[0]
        for chunks in (1, 9):
            output, _ = read(layer, x, chunks, masks)
            assert rms_error(output[1, 11:], whole[1, 11:]) < KERNEL_RMS[torch.float64]
            assert rms_error(output[0], whole[0]) < KERNEL_RMS[torch.float64]
    alone, _ = read(layer, x[1:, 11:], 5, masks[1:, 11:])
    assert rms_error(output[1:, 11:], alone) < KERNEL_RMS[torch.float64]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_that_begins_later(kernel):
    """Numbers give exponents to keys whose map has none, and the state so far has none."""
    layer, x = attention_of(kernel), draw(2, 12, E)
    masks = torch.zeros(2, 12, dtype=torch.float64)
    masks[:, 5:9] = draw(2, 4)
    state, outputs = layer.init_state(2), []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 9), (9, 10), (10, 12)):
            mask = masks[:, start:stop] if start == 5 else None
            output, state = layer.step(x[:, start:stop], state, mask)
            outputs.append(output)
        whole = layer(x, x, x, masks, is_causal=True)[0]
    assert rms_error(torch.cat(outputs, 1), whole) < KERNEL_RMS[torch.float64]


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_through_states(kernel):
    layer, x = attention_of(kernel), draw(2, 30, E).requires_grad_()
    upstream = draw(2, 30, E, seed=4)
    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x, x, x, is_causal=True)[0], leaves, upstream)
    for chunks in (1, [20, 10]):
        gradients = torch.autograd.grad(read(layer, x, chunks)[0], leaves, upstream)
        for gradient, right in zip(gradients, wanted, strict=True):
            assert (gradient - right).norm() < 1e-9 * (1 + right.norm())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_state_is_not_changed_and_can_be_selected(kernel):
    layer, x = attention_of(kernel), draw(3, 20, E)
    with torch.no_grad():
        _, state = layer.step(x[:, :10], layer.init_state(3))
        copies = [part.clone() for part in state if isinstance(part, torch.Tensor)]
        expected, _ = layer.step(x[:, 10:], state)
        assert all(torch.equal(a, b) for a, b in zip(copies, [p for p in state if torch.is_tensor(p)], strict=True))
        chosen = torch.tensor([2, 0, 2])
        output, _ = layer.step(x[chosen, 10:], state.select(chosen))
    assert rms_error(output, expected[chosen]) < KERNEL_RMS[torch.float64]


def test_positions_continue_and_sequences_may_come_first():
    encode = sinSRPE(H, E // H, sines=3, num_realizations=16, seed=0, dtype=torch.float64)
    layer = attention_of("softmax", SRPE=encode, batch_first=False)
    x = draw(25, 2, E)
    with torch.no_grad():
        output, _ = read(layer, x, [10, 1, 14])
        assert rms_error(output, layer(x, x, x, is_causal=True)[0]) < KERNEL_RMS[torch.float64]
    with pytest.raises(ShapeError, match="SRPE counts positions from 0"):
        layer(x[-1:], x, x, is_causal=True)
    layer.SRPE = Turned()
    with pytest.raises(ValueError, match="Turned counts from 0"):
        layer.step(x, layer.init_state(2))


class Turned(nn.Module):
    def forward(self, q, k):
        return q, k


def test_states_that_do_not_fit_are_refused():
    layer, x = attention_of("hermite", torch.float32), draw(2, 5, E, dtype=torch.float32)
    state = layer.init_state(2)
    with pytest.raises(TypeError, match="must be the result of init_state"):
        layer.step(x, None)
    with pytest.raises(ShapeError, match="a batch of 2 and the input one of 1"):
        layer.step(x[:1], state)
    with pytest.raises(ShapeError, match="three dimensions"):
        layer.step(x[0], state)
    with pytest.raises(DTypeError, match=r"needs torch\.float64"):
        layer.double().step(x.double(), state)


def encoded(kernel):
    """Return a layer whose map also has trained tensors."""
    encode = sinSRPE(H, E // H, sines=3, num_realizations=16, seed=0)
    return attention_of(kernel, torch.float32, SRPE=encode)


def swap_data_(layer):
    layer.directions.data = layer.directions + 1


def train_(layer):
    x = draw(2, 9, E, dtype=torch.float32)
    layer(x, x, x, is_causal=True)[0].sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


CHANGES = {
    "redraw": ("softmax", lambda layer: layer.redraw_features_()),
    "calibrate": ("hermite", lambda layer: layer.calibrate_(3 * draw(2, 60, E, dtype=torch.float32) + 1)),
    "calibrated norm": ("oprf", lambda layer: layer.calibrate_(3 * draw(2, 60, E, dtype=torch.float32))),
    "load": ("relu", lambda layer: layer.load_state_dict(attention_of("relu", torch.float32, seed=4).state_dict())),
    "copy in place": ("relu", lambda layer: layer.directions.copy_(layer.directions.roll(1, 0))),
    "another tensor": ("softmax", lambda layer: setattr(layer, "directions", layer.directions.roll(1, 0))),
    "another memory": ("softmax", swap_data_),
    "rounding": ("hermite", lambda layer: layer.bfloat16().float()),
    "number": ("oprf", lambda layer: setattr(layer, "feature_norm", 9.0)),
    "noise": ("encoded taylor", lambda layer: layer.SRPE.redraw_features_()),
    "training": ("encoded softmax", train_),
    "reset": ("relu", lambda layer: (setattr(layer, "seed", 8), layer.reset_parameters())),
}


@pytest.mark.parametrize(("kernel", "change"), CHANGES.values(), ids=CHANGES)
def test_a_state_belongs_to_the_map_that_made_it(kernel, change):
    """Only redrawn directions were noticed; a state from before calibrate_ gave outputs that were off by 0.75."""
    layer = encoded(kernel[8:]) if kernel.startswith("encoded") else attention_of(kernel, torch.float32)
    x = draw(2, 5, E, dtype=torch.float32)
    _, state = layer.step(x, layer.init_state(2))
    layer.step(x, state)
    with torch.no_grad() if change is not train_ else torch.enable_grad():
        change(layer)
    with pytest.raises(ValueError, match="make a new state by init_state"):
        layer.step(x, state)
    layer.step(x, layer.init_state(2))


@pytest.mark.parametrize("name", ["redraw", "calibrate", "calibrated norm", "load"])
def test_compiled_code_sees_what_the_methods_of_a_layer_change(name):
    kernel, change = CHANGES[name]
    layer, x = attention_of(kernel, torch.float32), draw(2, 1, E, dtype=torch.float32)
    torch.compiler.reset()
    step = torch.compile(layer.step, backend="eager")
    _, state = step(x, layer.init_state(2))
    change(layer)
    with pytest.raises(ValueError, match="make a new state by init_state"):
        step(x, state)
    torch.compiler.reset()


def test_the_same_map_elsewhere_takes_the_state():
    layer, x = attention_of("hermite", torch.float32), draw(2, 5, E, dtype=torch.float32)
    _, state = layer.step(x, layer.init_state(2))
    expected, _ = layer.step(x, state)
    weights_only = copy.deepcopy(layer)
    weights_only.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), weights_only, layer.train()):
        assert torch.equal(same.step(x, pickle.loads(pickle.dumps(state)))[0], expected)
    wide = state._replace(**{name: getattr(state, name).double() for name in ("sums", "norms", "num_keys")})
    assert rms_error(layer.double().step(x.double(), wide)[0], expected) < KERNEL_RMS[torch.float32]
    with pytest.raises(ValueError, match="has the map"):
        attention_of("hermite", seed=4).calibrate_(x.double()).step(x.double(), wide)
    # Transforms of torch.func and fake tensors have no values to read.
    pushed = torch.func.vmap(lambda x: layer.step(x[None], state_of_one)[0])
    state_of_one = wide.select(torch.tensor([0]))
    assert pushed(x.double()).shape == (2, 1, 5, E)


@pytest.mark.parametrize("kernel", ["hermite", "softmax"])
def test_autocast_and_compilation(kernel):
    layer, x = attention_of(kernel, torch.float32), draw(2, 20, E, dtype=torch.float32)
    compiled = torch.compile(layer.step, fullgraph=True, backend="eager")
    with torch.no_grad():
        _, state = layer.step(x[:, :10], layer.init_state(2))
        expected, _ = layer.step(x[:, 10:11], state)
        output, _ = compiled(x[:, 10:11], state)
        assert rms_error(output, expected) < KERNEL_RMS[torch.float32]
        with torch.autocast("cpu", torch.bfloat16):
            output, state = layer.step(x[:, 10:11], state)
    assert state.sums.dtype is torch.float32
    assert rms_error(output, expected) < KERNEL_RMS[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS)
def test_projected_attention_reads_a_cache(kernel):
    torch.manual_seed(0)
    attention = RandomFeatureAttention(H, 8, 20, kernel_fn=kernel, seed=1, dtype=torch.float64)
    q, k, v = draw(2, H, 15, 8), draw(2, 2, 15, 8, seed=2), draw(2, 2, 15, 8, seed=3)
    key_mask = torch.arange(15) >= torch.tensor([[0], [4]])
    whole = attention(q, k, v, key_mask, is_causal=True)
    last = attention(q[:, :, -2:], k, v, key_mask, is_causal=True)
    assert rms_error(last, whole[:, :, -2:]) < KERNEL_RMS[torch.float64]


@pytest.mark.parametrize("weight", [0.1, 0.5])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda seed, kernel=kernel: attention_of(kernel, seed=seed) for kernel in KERNELS if kernel != "taylor"),
        lambda seed: RandomFeatureAttention(H, E // H, 24, seed=seed),
        lambda seed: sinSRPE(H, E // H, sines=2, num_realizations=8, seed=seed),
    ],
    ids=[*KERNELS[:-1], "module", "SRPE"],
)
def test_soups_of_two_seeds_are_refused(make, weight):
    """People average the floating tensors of two runs and keep the integers of one of them."""
    model, (one, two) = nn.Sequential(make(2)), [nn.Sequential(make(seed)).state_dict() for seed in (0, 1)]
    soup = {k: (1 - weight) * v + weight * two[k] if v.is_floating_point() else v for k, v in one.items()}
    first_state = copy.deepcopy(model.state_dict())
    with pytest.raises(SketchMismatchError, match="layer '0': the floating tensors do not belong to the seed"):
        model.load_state_dict(soup)
    assert all(torch.equal(v, first_state[k]) for k, v in model.state_dict().items())
    model.load_state_dict({k: v.bfloat16() if v.is_floating_point() else v for k, v in one.items()})
    del one["0.record_mark"]
    model.load_state_dict(one)  # as earlier versions saved it
    assert all(torch.equal(v, one[k]) for k, v in model.state_dict().items() if k in one)


def test_a_soup_of_one_seed_and_two_numbers_of_draws_is_refused():
    layers = [attention_of("softmax"), attention_of("softmax").redraw_features_()]
    one, two = (layer.state_dict() for layer in layers)
    soup = {k: (v + two[k]) / 2 if v.is_floating_point() else v for k, v in one.items()}
    with pytest.raises(SketchMismatchError, match="the floating tensors do not belong to the seed"):
        layers[0].load_state_dict(soup)
    assert "record_mark" not in attention_of("taylor").state_dict()
