"""What the state of quantized layers adds to the contract of layers: codes, bfloat16 scales, a record of the form."""

import copy

import pytest
import torch
from compressed_layers import LAYERS
from torch import nn

import panther as pr
from panther.errors import FormatError
from panther.nn import QuantizedConv2d, QuantizedLinear, protocol
from panther.nn.quantized.state import form_in, train_scales_

both_kinds = pytest.mark.parametrize(
    "kind", [LAYERS["int3+low_rank"], LAYERS["conv2d int3+low_rank"]], ids=["linear", "conv"]
)


def test_golden_codes():
    """Checkpoints hold this; changing it makes them unreadable."""
    layer = QuantizedLinear(5, 1, 3, group_size=3)
    codes = torch.tensor([[1, 6, 3, 4, 7]], dtype=torch.uint8)
    layer.set_codes_(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[2, 5]], dtype=torch.uint8))
    assert layer.codes.tolist() == [[0b11_11_01, 0b00_10, 0b11010]]
    assert torch.equal(layer.weight, torch.tensor([[-0.5, 2.0, 0.5, -2.0, 4.0]]))


@both_kinds
def test_scales_that_a_file_would_change_are_not_saved(kind, tmp_path):
    layer = kind.layer().hold_scales_(torch.float32)
    expected = layer.weight
    path = pr.save_compressed(layer, tmp_path)  # wider, as casts of other libraries make them, and equal
    assert torch.equal(pr.load_compressed(path, kind.plain()).weight, expected)
    layer.scales *= 1.001
    with pytest.raises(FormatError, match=r"has scales in torch\.float32, and a file would change them"):
        pr.save_compressed(layer, tmp_path)
    pr.save_compressed(layer.hold_scales_(torch.bfloat16), tmp_path)
    layer.register_buffer("steps", torch.zeros(()))
    with pytest.raises(FormatError, match="state_dict differs by steps"):
        pr.save_compressed(layer, tmp_path)


@both_kinds
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"bits": 4, "group_size": 30, "low_rank": 2},
        {"bits": 3, "group_size": 31, "low_rank": 2},
        {"bits": 4},
        {"bits": None, "low_rank": 4, "bias": False},
    ],
)
def test_checkpoints_of_another_form_are_refused_in_one_line(kind, form, assign):
    layer, state = kind.layer(), kind.make(*kind.sizes, **form).state_dict()
    first_state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"was saved with bits=.*here has .*build the layer with those") as error:
            layer.load_state_dict(state, strict=strict, assign=assign)
        assert str(error.value).count("\n\t") == 1
    assert all(torch.equal(tensor, first_state[name]) for name, tensor in layer.state_dict().items())


@both_kinds
def test_a_layer_that_leaves_the_meta_device_has_its_record(kind):
    emptied = kind.new(device="meta").to_empty(device="cpu")
    assert form_in(emptied.record) == form_in(kind.layer().record)
    emptied(kind.x(3))  # There are no values yet that writes could have damaged.


@both_kinds
def test_casts_change_the_bias_and_its_gradient_alone(kind):
    layer = kind.layer()
    first_state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.train_scales_()(kind.x(3)).sum().backward()
    layer.double()
    assert layer.dtype is layer.bias.dtype is layer.bias.grad.dtype is torch.float64
    assert layer.scale_logs.dtype is layer.scale_logs.grad.dtype is torch.float32
    layer.train_scales_(False).bias = None
    assert all(torch.equal(tensor, first_state[name]) for name, tensor in layer.state_dict().items())


def trained(kind):
    """A layer whose scales have been changed by 10 %."""
    layer = kind.layer().train_scales_()
    for logs in (layer.scale_logs, layer.factor_scale_logs):
        nn.init.normal_(logs, std=0.1, generator=torch.Generator().manual_seed(3))
    return layer


@both_kinds
def test_no_parameter_is_in_another_dtype_than_the_layer(kind):
    """Foreign code takes the dtype of the first floating parameter for that of the model."""
    for dtype in (torch.float32, torch.float16):
        layer = kind.layer().to(dtype)
        assert {parameter.dtype for parameter in layer.parameters()} == {layer.dtype} == {dtype}


@both_kinds
def test_casts_of_parameters_by_other_libraries_lose_nothing(kind):
    """As PEFT's prepare_model_for_kbit_training and transformers' _keep_in_fp32_modules cast them."""
    layer = kind.layer().half()
    buffers = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    for parameter in layer.parameters():
        parameter.data = parameter.data.float()
    layer.bfloat16().float().half().double()
    assert {name: tensor.dtype for name, tensor in layer.named_buffers()} == {n: t.dtype for n, t in buffers.items()}
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in layer.named_buffers())


@both_kinds
def test_trained_scales_are_saved_as_they_compute(kind, tmp_path):
    layer = trained(kind)
    expected = layer.weight
    restored = pr.load_compressed(pr.save_compressed(layer, tmp_path), kind.plain())
    assert torch.equal(restored.weight, expected)
    assert [name for name, _ in restored.named_parameters()] == ["bias"]
    assert layer.trains_scales


@both_kinds
@pytest.mark.parametrize("assign", [False, True])
def test_states_of_training_and_inference_load_into_each_other(kind, assign):
    layer = trained(kind)
    again = kind.new().train_scales_()
    again.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(again.scale_logs, layer.scale_logs)
    plain = kind.new()
    plain.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(plain.weight, layer.weight)
    again.load_state_dict(plain.state_dict(), assign=assign)
    assert torch.equal(again.weight, layer.weight)
    assert not again.scale_logs.any()


def test_new_values_of_scales_end_the_training_of_the_old_ones():
    layer = trained(LAYERS["int3+low_rank"])
    layer.set_factors_(layer.left, layer.right, layer.factor_scales)
    assert layer.scale_logs.any()
    assert not layer.factor_scale_logs.any()
    layer.reset_parameters()
    assert not layer.scale_logs.any()


def test_layers_that_share_scales_share_their_training():
    first = LAYERS["int3+low_rank"].layer()
    second = copy.deepcopy(first)
    second.scales, second.factor_scales = first.scales, first.factor_scales
    train_scales_([first, second])
    assert first.scale_logs is second.scale_logs
    nn.init.constant_(first.scale_logs, 0.1)
    weight = first.weight
    train_scales_([first, second], train=False)
    assert first.scales is second.scales
    assert torch.equal(second.weight, weight)


def test_kernels_of_other_shapes_are_refused():
    """Their tensors have the same shapes."""
    state = QuantizedConv2d(8, 48, (4, 2)).state_dict()
    for other in (QuantizedConv2d(8, 48, (2, 4)), QuantizedConv2d(16, 48, 2), QuantizedConv2d(16, 48, (4, 1))):
        with pytest.raises(
            RuntimeError, match=r"was saved with bits=4.*8 channels in a group, kernel_size=\(4, 2\) and"
        ):
            other.load_state_dict(state)
    QuantizedConv2d(16, 48, (4, 2), groups=2).load_state_dict(state)  # as torch's convolution does


def test_a_class_that_an_older_version_does_not_know_is_refused_by_name(tmp_path, monkeypatch):
    pr.save_compressed(QuantizedConv2d(16, 48, 3), tmp_path)
    monkeypatch.delitem(protocol._ALLOWED, "QuantizedConv2d")
    with pytest.raises(FormatError, match=r"class 'QuantizedConv2d', which is not allowed: only .*SKLinear"):
        pr.load_compressed(tmp_path, nn.Conv2d(16, 48, 3))


def test_extra_repr():
    assert repr(LAYERS["conv2d int3+low_rank"].layer()) == (
        "QuantizedConv2d(16, 48, kernel_size=(4, 2), stride=(2, 1), padding=(1, 0), groups=2, bits=3, group_size=30, "
        "low_rank=2)"
    )
    assert repr(LAYERS["int3+low_rank"].layer()) == (
        "QuantizedLinear(in_features=64, out_features=48, bits=3, group_size=30, low_rank=2, bias=True)"
    )
