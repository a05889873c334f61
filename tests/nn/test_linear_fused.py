"""A fused SKLinear takes two products on joined factors, and stays the same layer in every part of its life."""

import copy
import io
import pickle

import pytest
import torch
from covering import all_pairs
from tolerances import KERNEL_RMS, rms_error
from torch import nn
from torch.overrides import TorchFunctionMode

import panther as pr
from panther.nn import SKLinear

NAMES = ("S1", "U1", "S2", "U2")


def layer_of(n_in=96, n_out=160, R=6, *, fitted=False, dtype=torch.float32, **kwargs):
    torch.manual_seed(n_in)
    if fitted:
        return SKLinear.from_linear(nn.Linear(n_in, n_out, dtype=dtype), R)
    return SKLinear(n_in, n_out, R, seed=7, dtype=dtype, **kwargs)


def is_joined(layer):
    """Whether the next forward without gradients takes two products."""
    return layer._joined is not None and layer._joined.are_views(*(getattr(layer, name) for name in NAMES))


class _Products(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in ("mm", "matmul", "addmm", "addmm_")
        return function(*args, **(kwargs or {}))


def products(layer, x):
    """The number of matrix products that a forward takes."""
    with _Products() as mode:
        layer(x)
    return mode.count


@pytest.fixture(autouse=True)
def _small_layers_are_no_gain(recwarn):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pr.errors.PerformanceWarning)
        yield


@pytest.mark.parametrize(
    ("sizes", "dtype", "shape", "fitted"),
    all_pairs(
        [(64, 48, 3), (33, 65, 1), (1, 1, 1), (300, 130, 40)],
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
        [(1,), (5,), (200,), (), (0,), (2, 3), (2, 0, 4)],
        [False, True],
    ),
)
def test_the_function_stays(sizes, dtype, shape, fitted):
    layer = layer_of(*sizes, dtype=dtype, fitted=fitted)
    fused = copy.deepcopy(layer).fuse_()
    x = torch.randn(*shape, sizes[0], dtype=dtype)
    exact = x.double() @ layer.weight.double().mT + layer.bias.double()
    with torch.no_grad():
        out = fused(x)
    assert is_joined(fused)
    assert out.shape == exact.shape
    assert out.dtype is dtype
    assert rms_error(out, exact) < KERNEL_RMS[dtype] or not x.numel()
    for name in NAMES:
        assert torch.equal(getattr(fused, name), getattr(layer, name))
    apart = fused.unfuse_()
    assert not apart.fused
    assert all(getattr(apart, name).is_contiguous() for name in NAMES)
    assert apart.S1.untyped_storage().nbytes() == layer.S1.nbytes


def test_two_products_in_place_of_four():
    layer, x = layer_of(), torch.randn(2, 96)
    with torch.no_grad():
        assert products(layer, x) == 4
        assert products(layer.fuse_(), x) == 2
    assert products(layer.requires_grad_(False), x) == 2
    assert products(layer, x.requires_grad_()) == 4


def test_no_number_is_stored_twice():
    layer = layer_of()
    before = sum(getattr(layer, name).nbytes for name in NAMES)
    layer.fuse_()
    assert len({getattr(layer, name).untyped_storage().data_ptr() for name in NAMES}) == 2
    assert layer.S1.untyped_storage().nbytes() + layer.S2.untyped_storage().nbytes() == before


def test_without_bias():
    layer = layer_of(bias=False)
    x = torch.randn(3, 96)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.fuse_()(x), expected)


def test_float16_does_not_overflow_inside():
    layer = SKLinear(4096, 8, 1, seed=0, dtype=torch.float16, bias=False)
    x = 20 * layer.U2.mT.clone()  # x U2 = 81,920
    with torch.no_grad():
        expected = layer(x)
        assert expected.isfinite().all()
        torch.testing.assert_close(layer.fuse_()(x), expected)


@pytest.mark.parametrize("fitted", [False, True])
def test_training_is_the_same_and_reaches_the_joined_arrays(fitted):
    layer = layer_of(fitted=fitted)
    fused = copy.deepcopy(layer).fuse_()
    x = torch.randn(8, 96)
    for model in (layer, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(layer.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert is_joined(fused)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), layer(x))


@pytest.mark.parametrize("fitted", [False, True])
def test_copies_are_fused_and_independent(fitted):
    fused, x = layer_of(fitted=fitted).fuse_(), torch.randn(3, 96)
    expected = fused(x)
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(file, weights_only=False)):
        assert is_joined(other)
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected)
            other.S1.zero_()
            other.S2.zero_()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), expected)


@pytest.mark.parametrize("fitted", [False, True])
def test_moves_and_casts(fitted):
    layer = layer_of(fitted=fitted).fuse_().double()
    assert is_joined(layer)
    assert layer._joined.inner.dtype is torch.float64
    x = torch.randn(3, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.to_linear()(x))
    place = layer.S1.data_ptr()
    assert layer.to("cpu").S1.data_ptr() == place
    assert is_joined(layer)
    layer = layer.to("meta")
    assert layer(x.to("meta")).shape == (3, 160)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert is_joined(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.to_linear()(x))


def test_shared_memory_stays_shared():
    layer, x = layer_of().fuse_(), torch.randn(3, 96)
    layer.share_memory()
    assert layer.S1.is_shared()
    assert is_joined(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.to_linear()(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_loading(assign, fitted, loaded):
    layer, source = layer_of(fitted=fitted).fuse_(), layer_of(fitted=loaded)
    layer.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    x = torch.randn(3, 96)
    assert is_joined(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), source(x))


@pytest.mark.parametrize("fitted", [False, True])
def test_saving(fitted, tmp_path):
    from safetensors.torch import load_model, save_model

    fused, x = layer_of(fitted=fitted).fuse_(), torch.randn(3, 96)
    expected = fused(x)
    pr.save_compressed(nn.Sequential(fused), tmp_path / "panther")
    apart = nn.Sequential(copy.deepcopy(fused).unfuse_())
    pr.save_compressed(apart, tmp_path / "apart")
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("panther", "apart")]
    assert sizes[0] == sizes[1]
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    assert file.tell() < sum(tensor.nbytes for tensor in fused.state_dict().values()) + 4096
    loaded = pr.load_compressed(tmp_path / "panther", nn.Sequential(nn.Linear(96, 160)))
    torch.testing.assert_close(loaded(x), expected)
    save_model(fused, str(tmp_path / "model.safetensors"))
    other = layer_of(fitted=fitted).fuse_()
    with torch.no_grad():
        other.S1.zero_()
    load_model(other, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(other(x), expected)


def test_other_tensors_in_the_place_of_the_views_are_seen():
    layer, x = layer_of().fuse_(), torch.randn(3, 96)
    with torch.no_grad():
        out = torch.func.functional_call(layer, {"S1": torch.zeros_like(layer.S1)}, (x,))
        torch.testing.assert_close(out, (x @ layer.U2 @ layer.S2) * layer.scale + layer.bias)
        layer.S2.data = torch.zeros(6, 160)
        torch.testing.assert_close(layer(x), (x @ layer.S1 @ layer.U1) * layer.scale + layer.bias)
        layer.S1 = nn.Parameter(torch.zeros(96, 6))
        torch.testing.assert_close(layer(x), layer.bias.expand(3, 160))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    layer, x = layer_of().fuse_(), torch.randn(3, 96)
    expected = layer(x)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected)

    @torch.compile(backend=backend, fullgraph=True)
    def call(factors, x):
        return torch.func.functional_call(layer, factors, (x,))

    with torch.no_grad():
        torch.testing.assert_close(
            call({"S1": torch.zeros_like(layer.S1)}, x), (x @ layer.U2 @ layer.S2) * layer.scale + layer.bias
        )


def test_in_inference_mode():
    with torch.inference_mode():
        layer, x = layer_of().fuse_(), torch.randn(3, 96)
        torch.testing.assert_close(layer(x), layer.to_linear()(x))
    layer, x = layer_of().fuse_(), torch.randn(3, 96)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), layer.to_linear()(x))


def test_packed_layers_are_refused_and_those_of_a_model_named():
    with pytest.raises(ValueError, match=r"unpack_\(\)"):
        layer_of(packed=True).fuse_()
    model = nn.Sequential(layer_of(), layer_of(packed=True), nn.ReLU())
    with pytest.warns(pr.errors.PerformanceWarning, match=r"did not fuse 1 of 2 SKLinear layers.*'1'.*unpack_"):
        assert pr.fuse_(model) is model
    assert is_joined(model[0])
    assert not model[1].fused
    with pytest.warns(pr.errors.PerformanceWarning, match="found no SKLinear in this ReLU"):
        pr.fuse_(model[2])
    with pytest.raises(TypeError, match="takes a model, not str"):
        pr.fuse_("model")
    parametrized = nn.utils.parametrizations.weight_norm(layer_of(), "S1")
    with pytest.raises(ValueError, match="remove_parametrizations"):
        parametrized.fuse_()


def test_packing_ends_the_fused_form_and_unpacking_restores_it():
    layer, x = layer_of().fuse_(), torch.randn(3, 96)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.pack_()(x), expected)
        assert not is_joined(layer)
        torch.testing.assert_close(layer.unpack_()(x), expected)
    assert is_joined(layer)


def test_a_shared_layer_and_tied_factors():
    layer, x = layer_of(96, 96), torch.randn(3, 96)
    tied = copy.deepcopy(layer)
    tied.S1 = layer.S1
    model = nn.Sequential(layer, tied, layer)
    expected = model(x)
    with pytest.warns(pr.errors.PerformanceWarning, match=r"did not fuse 2 of 2 .*'0'.*share"):
        pr.fuse_(model)
    assert layer.S1 is tied.S1
    layer.fuse_()
    tied.fuse_()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
