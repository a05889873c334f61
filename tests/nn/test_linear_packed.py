"""A packed SKLinear holds bits for its signs and is the same function, in every part of a layer's life."""

import copy

import pytest
import torch
from compressed_layers import with_stored_sketches
from covering import all_pairs
from panther.kernels import pack_signs
from tolerances import KERNEL_RMS, assert_close, rms_error
from torch import nn

import panther as pr
from panther.nn import SKLinear

SIZES = [(64, 48, 3), (33, 65, 1), (1, 1, 1), (300, 130, 40)]


def layer_of(n_in, n_out, R, **kwargs):
    torch.manual_seed(n_in)
    return SKLinear(n_in, n_out, R, **{"seed": 7, "sketch": "signs", **kwargs})


@pytest.fixture(autouse=True)
def _small_layers_are_no_gain(recwarn):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pr.errors.PerformanceWarning)
        yield


@pytest.mark.parametrize(
    ("sizes", "dtype", "rows"),
    all_pairs(SIZES, [torch.float64, torch.float32, torch.float16, torch.bfloat16], [1, 5, 200]),
)
def test_the_function_stays(sizes, dtype, rows):
    layer = layer_of(*sizes, dtype=dtype)
    x = torch.randn(rows, sizes[0], dtype=dtype)
    exact = x.double() @ layer.weight.double().mT + layer.bias.double()
    packed = copy.deepcopy(layer).pack_()
    assert packed.packed
    assert packed.U1.dtype is packed.U2.dtype is torch.int32
    with torch.no_grad():
        assert rms_error(packed(x), exact) < KERNEL_RMS[dtype]
    # Not to the bit: U2 is unpacked in another memory order, in which a product may add in another order.
    torch.testing.assert_close(packed.weight, layer.weight)
    for name in ("S1s", "U1s", "S2s", "U2s"):
        assert torch.equal(getattr(packed, name), getattr(layer, name))
    torch.testing.assert_close(packed.to_linear().weight, layer.to_linear().weight)
    unpacked = packed.unpack_()
    assert torch.equal(unpacked.U1, layer.U1)
    assert torch.equal(unpacked.U2, layer.U2)


def test_constructor_and_pack_agree():
    a, b = layer_of(64, 48, 3, packed=True), layer_of(64, 48, 3).pack_()
    assert a.packed
    assert torch.equal(a.U1, b.U1)
    assert torch.equal(a.U2, b.U2)
    assert torch.equal(a.S1, b.S1)
    assert "packed=True" in repr(a)
    assert "packed" not in repr(layer_of(64, 48, 3))
    dense = layer_of(64, 48, 3)
    assert torch.equal(a.U1, pack_signs(dense.U1))
    assert torch.equal(a.U2, pack_signs(dense.U2.mT))


def test_bytes():
    """2 R (in + out) numbers become half as many and as many bits: 17/32 of the bytes in bfloat16."""
    layer = SKLinear(4096, 2048, 1, 16, bias=False, sketch="signs", dtype=torch.bfloat16)

    def held(layer):
        return sum(t.nbytes for t in (layer.S1, layer.S2, layer.U1, layer.U2))

    unpacked_bytes = held(layer)
    assert held(layer.pack_()) / unpacked_bytes == 17 / 32


@pytest.mark.parametrize("n_rows", [3, 200])
def test_gradients_and_double_backward(n_rows):
    layer = layer_of(40, 70, 5, dtype=torch.float64)
    packed = copy.deepcopy(layer).pack_()
    x = torch.randn(n_rows, 40, dtype=torch.float64, requires_grad=True)

    def derivatives(module):
        leaves = [x, module.S1, module.S2, module.bias]
        first = torch.autograd.grad(module(x).sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        return [*first, *second]

    for ours, theirs in zip(derivatives(packed), derivatives(layer), strict=True):
        assert_close(ours, theirs.detach())


def test_life_cycle():
    layer = layer_of(40, 70, 5).pack_()
    x = torch.randn(3, 40)
    expected = layer(x).detach()
    other = layer_of(40, 70, 5, seed=8, packed=True)
    other.load_state_dict(layer.state_dict())
    assert other.packed
    assert torch.equal(other(x), expected)
    plain = layer_of(40, 70, 5, seed=9)
    plain.load_state_dict(layer.state_dict())
    assert not plain.packed
    assert_close(plain(x), expected)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.U1.dtype is torch.int32
    assert rms_error(half(x.bfloat16()), expected) < KERNEL_RMS[torch.bfloat16]
    seed = layer.seed
    layer.reset_parameters()
    assert layer.packed
    assert layer.seed == seed
    with torch.device("meta"):
        empty = SKLinear(40, 70, 5, sketch="signs", seed=7, packed=True)
    empty = empty.to_empty(device="cpu")
    assert torch.equal(empty.U1, layer.U1)
    assert torch.equal(empty.U2, layer.U2)


def test_stacked_keys_load_into_a_packed_layer():
    source = layer_of(40, 70, 5)
    stacked = {name: getattr(source, name).clone() for name in ("S1s", "S2s", "U1s", "U2s")}
    layer = layer_of(40, 70, 5, packed=True)
    with torch.no_grad():
        layer.S1.zero_()
    layer.load_state_dict({**stacked, "bias": source.bias})
    assert layer.packed
    assert torch.equal(layer.S1, source.S1)


def test_a_sparse_layer_has_nothing_to_pack_and_packs_signs_that_it_loads():
    x, signs = torch.randn(3, 40), layer_of(40, 70, 5)
    for sparse in (SKLinear(40, 70, 5, packed=True), SKLinear(40, 70, 5).pack_()):
        assert not sparse.packed
        assert sparse.sketch == "sparse"
        assert "packed" not in repr(sparse)
        state = copy.deepcopy(sparse.state_dict())
        expected = sparse(x).detach()
        sparse.load_state_dict(signs.state_dict())
        assert sparse.packed
        assert torch.equal(sparse.U1, pack_signs(signs.U1))
        assert_close(sparse(x), signs(x).detach())
        sparse.load_state_dict(state)
        assert not sparse.packed
        assert torch.equal(sparse(x), expected)
        sparse.unpack_().load_state_dict(signs.state_dict())
        assert not sparse.packed
        assert torch.equal(sparse.U1, signs.U1)


def test_a_changed_seed_is_adopted_in_bits():
    layer, other = layer_of(40, 70, 5, packed=True), layer_of(40, 70, 5, seed=8, packed=True)
    layer.sketch_seed.copy_(other.sketch_seed)
    layer.check_record()
    assert torch.equal(layer.U1, other.U1)


def test_fitted_layers_are_never_packed():
    fitted = with_stored_sketches(layer_of(40, 70, 4))
    with pytest.raises(ValueError, match=r"sketches of this fitted layer are trained numbers.*SKLinear.from_linear"):
        fitted.pack_()
    assert not fitted.packed
    layer = layer_of(40, 70, 4, packed=True)
    layer.load_state_dict(fitted.state_dict())
    assert layer.is_fitted
    assert not layer.packed
    x = torch.randn(3, 40)
    assert_close(layer(x), fitted(x).detach())
    assert fitted.unpack_() is fitted


def test_a_saved_model_comes_back_packed(tmp_path):
    model = nn.Sequential(layer_of(40, 70, 5).pack_(), nn.ReLU(), layer_of(70, 10, 2))
    x = torch.randn(3, 40)
    pr.save_compressed(model, tmp_path)
    loaded = pr.load_compressed(tmp_path, nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 10)))
    assert loaded[0].packed
    assert not loaded[2].packed
    assert torch.equal(loaded(x), model(x))


def test_casts_and_moves_leave_bits_alone():
    layer = layer_of(40, 70, 5, packed=True)
    U1 = layer.U1.clone()
    for cast in (lambda: layer.type(torch.float64), layer.float, layer.half, lambda: layer.to(torch.bfloat16)):
        cast()
        assert torch.equal(layer.U1, U1)
    assert layer.U1.dtype is torch.int32
    layer.to("meta")
    assert layer.U1.is_meta
    layer.to_empty(device="cpu")
    assert torch.equal(layer.U1, U1)
    assert "U1" not in dict(layer.named_buffers())
    left_behind = layer_of(40, 70, 5, packed=True)
    for name, parameter in left_behind._parameters.items():  # as by FSDP, which knows parameters and buffers alone
        left_behind._parameters[name] = nn.Parameter(parameter.to("meta"))
    assert left_behind(torch.randn(2, 40, device="meta")).shape == (2, 70)
    assert left_behind.U1.is_meta
    fitted = with_stored_sketches(layer_of(40, 70, 5))
    layer.float().load_state_dict(fitted.state_dict())
    assert isinstance(layer.U1, nn.Parameter)
    layer.load_state_dict(layer_of(40, 70, 5).state_dict())
    assert not layer.packed
    assert torch.equal(layer.pack_().U1, U1)
    assert torch.equal(layer.unpack_().pack_().U1, U1)
