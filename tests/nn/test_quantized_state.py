"""The life cycle of quantized layers: files, state_dict, dtypes, devices that hold nothing, averages, copies."""

import copy
import io
import json
import pickle

import pytest
import torch
from quantized_kinds import CONV, LINEAR, both_kinds
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel

import panther as pr
from panther.errors import FormatError
from panther.nn import QuantizedConv2d, QuantizedLinear

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
FORMS = [{"bits": 4}, {"bits": 3, "group_size": 30, "low_rank": 2}, {"bits": None, "low_rank": 4, "bias": False}]


def quantized(form, **kwargs):
    return LINEAR.quantized(form, **kwargs)


def snapshot(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def assert_same(layer, before):
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_golden_codes():
    """Checkpoints hold this; changing it makes them unreadable."""
    layer = QuantizedLinear(5, 1, 3, group_size=3)
    codes = torch.tensor([[1, 6, 3, 4, 7]], dtype=torch.uint8)
    layer.set_codes_(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[2, 5]], dtype=torch.uint8))
    assert layer.codes.tolist() == [[0b11_11_01, 0b00_10, 0b11010]]
    assert torch.equal(layer.weight, torch.tensor([[-0.5, 2.0, 0.5, -2.0, 4.0]]))


@both_kinds
@pytest.mark.parametrize("form", FORMS)
def test_inference_format(kind, form, tmp_path):
    model = nn.Sequential(kind.quantized(form), nn.PReLU(init=0.5))
    pr.save_compressed(model, tmp_path)
    plain = nn.Sequential(kind.plain(bias=form.get("bias", True)), nn.PReLU())
    restored = pr.load_compressed(tmp_path, plain)
    assert isinstance(restored[0], kind.make)
    assert_same(restored, snapshot(model))
    assert torch.equal(restored(kind.x()), model(kind.x()))
    again = pr.load_compressed(
        tmp_path, nn.Sequential(kind.quantized({"bits": 2}, bias=form.get("bias", True)), *model[1:])
    )
    assert torch.equal(again(kind.x()), model(kind.x()))


@both_kinds
def test_inference_format_of_shared_half_and_meta_layers(kind, tmp_path):
    layer = kind.quantized(FORMS[1]).bfloat16()
    model = nn.ModuleDict({"a": layer, "b": layer})
    pr.save_compressed(model, tmp_path)
    with torch.device("meta"):
        plain = nn.ModuleDict({"a": kind.plain(), "b": kind.plain()})
    restored = pr.load_compressed(tmp_path, plain)
    assert restored["a"] is restored["b"]
    assert restored["a"].dtype is torch.bfloat16
    assert_same(restored["a"], snapshot(layer))


def test_files_that_do_not_fit_are_refused(tmp_path):
    layer = quantized(FORMS[0])
    pr.save_compressed(layer, tmp_path)
    with pytest.raises(FormatError, match=r"saved for a Linear with .*and the model has a Linear there"):
        pr.load_compressed(tmp_path, nn.Linear(64, 47))
    path = tmp_path / "panther.json"
    manifest = json.loads(path.read_text())
    for args in ({"bits": 3}, {"bits": 9}, {"bits": "4"}, {"group_size": 16}, {"low_rank": 1}, {"low_rank": None}):
        spec = manifest["modules"][""]
        changed = manifest | {"modules": {"": spec | {"args": spec["args"] | args}}}
        changed = {key: value for key, value in changed.items() if key != "checksum"}
        path.write_text(json.dumps(changed | {"checksum": pr.nn.io.record_checksum(changed)}))
        with pytest.raises(FormatError):
            pr.load_compressed(tmp_path, nn.Linear(64, 48))


@both_kinds
def test_scales_that_are_held_for_training_are_not_saved(kind, tmp_path):
    layer = kind.quantized(FORMS[1]).hold_scales_(torch.float32)
    with pytest.raises(FormatError, match=r"holds its scales in torch\.float32: call hold_scales_"):
        pr.save_compressed(layer, tmp_path)
    pr.save_compressed(layer.hold_scales_(torch.bfloat16), tmp_path)
    layer.register_buffer("steps", torch.zeros(()))
    with pytest.raises(FormatError, match="state_dict differs by steps"):
        pr.save_compressed(layer, tmp_path)


@both_kinds
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_state_dict_round_trips(kind, form, assign):
    source, target = kind.quantized(form), kind.new(form)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert_same(target, snapshot(source))
    assert torch.equal(target(kind.x()), source(kind.x()))
    assert all(parameter.requires_grad for parameter in target.parameters())


@both_kinds
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_that_do_not_fit_change_nothing(kind, assign):
    layer = kind.quantized(FORMS[1])
    before = snapshot(layer)
    others = [{"bits": 4, "group_size": 30, "low_rank": 2}, {"bits": 3, "group_size": 31, "low_rank": 2}]
    for form in (*others, *FORMS[::2]):
        state = kind.new(form).state_dict()
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"was saved with bits=.*here has .*build the layer with those") as e:
                layer.load_state_dict(state, strict=strict, assign=assign)
            assert str(e.value).count("\n\t") == 1
    for spoil in (
        lambda s: s.pop("scales"),
        lambda s: s.pop("record"),
        lambda s: s.update(bias=torch.zeros(47)),
        lambda s: s.update(codes=s["codes"].float()),
        lambda s: s.update(left=[1]),
    ):
        state = kind.quantized(FORMS[1]).state_dict()
        spoil(state)
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Quantized"):
            layer.load_state_dict(state, assign=assign)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key\(s\).*codes.*Unexpected key\(s\).*weight"):
        layer.load_state_dict(kind.plain().state_dict(), assign=assign)
    assert_same(layer, before)


@both_kinds
@pytest.mark.parametrize("form", FORMS)
def test_meta(kind, form):
    with torch.device("meta"):
        layer = kind.new(form)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    assert layer(kind.x().to("meta")).shape[:2] == (5, 48)
    assert kind.new(form, device="meta").record.is_meta
    emptied = copy.deepcopy(layer).to_empty(device="cpu")
    assert torch.equal(emptied.record, kind.quantized(form).record)
    emptied.reset_parameters()
    assert emptied(kind.x()).isfinite().all()
    source = kind.quantized(form)
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(kind.x()), source(kind.x()))
    skipped = nn.utils.skip_init(kind.make, *kind.sizes, **form)
    skipped.load_state_dict(source.state_dict())
    assert torch.equal(skipped(kind.x()), source(kind.x()))


@both_kinds
def test_fake_tensors(kind):
    with FakeTensorMode():
        layer = kind.quantized(FORMS[1])
        assert layer(torch.randn(3, *kind.sample)).shape[:2] == (3, 48)
        layer.load_state_dict(layer.state_dict())


@both_kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_change_the_computation_and_the_bias_alone(kind, form, dtype):
    layer = kind.quantized(form)
    before = snapshot(layer)
    for cast in (lambda m: m.to(dtype), lambda m: m.type(dtype)):
        moved = cast(copy.deepcopy(layer))
        assert moved.dtype is dtype
        assert moved(kind.x().to(dtype)).dtype is dtype
        assert all(
            tensor.dtype is (dtype if name == "bias" else before[name].dtype)
            for name, tensor in moved.state_dict().items()
        )
        moved.float()
        stored = {name: tensor for name, tensor in before.items() if name != "bias"}
        assert all(torch.equal(moved.state_dict()[name], tensor) for name, tensor in stored.items())
        assert moved.dtype is torch.float32


@both_kinds
def test_casts_move_gradients_too(kind):
    layer = kind.quantized(FORMS[1])
    layer(kind.x()).sum().backward()
    layer.double()
    assert layer.bias.grad.dtype is torch.float64
    assert layer.scales.grad.dtype is torch.bfloat16


@both_kinds
@pytest.mark.parametrize("form", FORMS)
def test_copies(kind, form):
    layer = kind.quantized(form)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(kind.x()), layer(kind.x()))
        assert twin.extra_repr() == layer.extra_repr()
        (twin.left if form["bits"] is None else twin.codes).zero_()
        assert not torch.equal(twin(kind.x()), layer(kind.x()))


@both_kinds
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_keep_the_codes(kind, use_buffers):
    layer = kind.quantized(FORMS[1])
    mean = AveragedModel(layer, use_buffers=use_buffers)
    for _ in range(3):
        with torch.no_grad():
            layer.bias += 1
        mean.update_parameters(layer)
    fresh = kind.new(FORMS[1])
    fresh.load_state_dict(mean.module.state_dict())
    assert torch.equal(fresh(kind.x()), mean.module(kind.x()))
    assert torch.equal(fresh.codes, layer.codes)
    assert torch.equal(fresh.left, layer.left)


def test_kernels_of_other_shapes_are_refused():
    """Their tensors have the same shapes."""
    state = QuantizedConv2d(8, 48, (4, 2)).state_dict()
    for other in (QuantizedConv2d(8, 48, (2, 4)), QuantizedConv2d(16, 48, 2), QuantizedConv2d(16, 48, (4, 1))):
        with pytest.raises(
            RuntimeError, match=r"was saved with bits=4.*8 channels in a group, kernel_size=\(4, 2\) and"
        ):
            other.load_state_dict(state)
    QuantizedConv2d(16, 48, (4, 2), groups=2).load_state_dict(state)  # as torch's convolution does


def test_geometry_of_files_is_checked(tmp_path):
    pr.save_compressed(CONV.quantized(FORMS[1]), tmp_path)
    for name, value in (("stride", (1, 1)), ("padding", 1), ("padding_mode", "reflect"), ("groups", 1)):
        changed = dict(zip(CONV.make.dense_arguments, (*CONV.sizes, True), strict=False)) | {name: value}
        with pytest.raises(FormatError, match=r"saved for a Conv2d with .*and the model has a Conv2d there"):
            pr.load_compressed(tmp_path, nn.Conv2d(**changed))


def test_a_class_that_an_older_version_does_not_know_is_refused_by_name(tmp_path, monkeypatch):
    from panther.nn import _specs

    pr.save_compressed(CONV.quantized(FORMS[0]), tmp_path)
    monkeypatch.delitem(_specs._CLASSES, "QuantizedConv2d")
    with pytest.raises(FormatError, match=r"class 'QuantizedConv2d', which is not allowed: only SKLinear"):
        pr.load_compressed(tmp_path, CONV.plain())


def test_extra_repr():
    assert repr(CONV.quantized(FORMS[1])) == (
        "QuantizedConv2d(16, 48, kernel_size=(4, 2), stride=(2, 1), padding='valid', groups=2, bits=3, group_size=30, "
        "low_rank=2)"
    )
    assert repr(quantized(FORMS[1])) == (
        "QuantizedLinear(in_features=64, out_features=48, bits=3, group_size=30, low_rank=2, bias=True)"
    )
