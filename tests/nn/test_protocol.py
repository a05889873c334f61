"""What every compressed layer answers when files, adapters and parallelism ask it: one contract suite."""

import pytest
import torch
from compressed_layers import every_layer
from tolerances import assert_close
from torch import nn

from panther.nn import MonarchLinear, QuantizedExperts, QuantizedLinear, SKLinear
from panther.nn.protocol import CompressedModule, allow_saving, allowed_layers, compressed_layers, recorded_class

# A warning of torch about its own convolution, which the plain layer of conv1d is.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@every_layer("record")
def test_a_record_and_the_tensors_are_the_layer(kind):
    layer = kind.layer()
    record = layer.to_record()
    assert allowed_layers()[record["class"]] is type(layer)
    new = type(layer).from_record(record, dtype=layer.dtype, device="cpu")
    new.follow_record_(record)
    assert (new.record_mode, new.activations, new.packed) == (layer.record_mode, layer.activations, layer.packed)
    new.load_state_dict(layer.state_dict())
    assert torch.equal(new(kind.x(3)), layer(kind.x(3)))
    assert new.to_record() == record


@every_layer("record")
def test_factors_and_plain_layers_compute_what_the_layer_does(kind):
    layer = kind.layer().double()
    x, plain = kind.x(3).double(), layer.plain()
    assert not any(isinstance(module, CompressedModule) for module in plain.modules())
    if layer.activations is None:
        assert_close(plain(x), layer(x))
    factors = layer.factors()
    assert (factors is None) == (layer.inner_rank is None) or layer.dense_class is not nn.Linear
    if factors is not None:
        left, right = factors
        assert left.shape[1] == len(right) == layer.inner_rank
        assert_close(left @ right, layer.weight.flatten(1))


@every_layer("record")
def test_shards_are_tensors_of_the_layer(kind):
    layer = kind.layer()
    if layer.packed:
        layer.unpack_()  # as tensor parallelism does
    for dim, dims in layer.sharded_dims.items():
        sizes = {(layer.out_features, layer.in_features)[dim]}
        if isinstance(layer, MonarchLinear):  # whole blocks of inputs, each of some ranks, or an output of each block
            inputs, outputs = layer.num_blocks
            sizes |= {inputs, inputs * layer.rank} if dim else {-(-layer.out_features // outputs)}
        assert all(tensor.shape[dims[name]] in sizes for name, tensor in layer.stored().items() if name in dims)


def test_a_product_is_added_by_a_larger_rank_where_that_is_smaller():
    torch.manual_seed(0)
    layer, left, right = SKLinear(64, 48, 4), torch.randn(48, 3), torch.randn(3, 64)
    larger = layer.plus_product(left, right)
    assert larger.rank == layer.inner_rank + 3
    torch.testing.assert_close(larger.weight, layer.weight + left @ right)
    assert torch.equal(larger.bias, layer.bias)
    assert larger.plus_product(torch.randn(48, 40), torch.randn(40, 64)) is None
    assert QuantizedLinear(64, 48).plus_product(left, right) is None


def test_traits_of_codes():
    torch.manual_seed(0)
    layer = QuantizedLinear(64, 48)
    assert not any((layer.packed, layer.trains_scales, layer.replaces_parameter))
    assert layer.is_symmetric
    assert torch.equal(layer.implied_tensors("cpu")["zeros"], layer.zeros)
    assert layer.train_scales_().trains_scales
    assert layer.to_record(in_training=True)["trained_scales"]
    assert QuantizedExperts(2, 8, 8).replaces_parameter


class Halves(CompressedModule):
    """A layer that defines no more than it has to."""

    dense_class = nn.Linear
    dense_arguments = ("in_features", "out_features", "bias")
    size_arguments = ()
    saved_buffer_names = ()

    def __init__(self, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype or torch.get_default_dtype()
        self.doubled = nn.Parameter(torch.randn(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @property
    def weight(self):
        return self.doubled / 2

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def stored_names(self):
        return ("doubled",)

    def check_record(self):
        pass


def test_the_defaults_suffice_for_plain_parameters():
    layer = Halves(8, 6)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert [name for name, _ in compressed_layers(model)] == ["0"]
    assert [name for name, _ in compressed_layers(model, remove_duplicate=False)] == ["0", "2"]
    assert layer.dtype is torch.float32
    assert layer.describe_form({}) == "Halves"
    assert recorded_class(layer) is None
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer.plain()(x), layer(x))
    assert type(layer.plain()) is nn.Linear
    with pytest.raises(NotImplementedError):
        CompressedModule().stored_names()
    assert "Halves" not in allowed_layers()
    assert allow_saving() is None
