"""The life cycle that every compressed layer has in common with a layer of torch: state, files, devices, copies."""

import copy
import io
import json
import pickle

import pytest
import torch
from compressed_layers import assert_unchanged, every_layer, kinds_with, snapshot
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import panther as pr
from panther.errors import FormatError, SketchMismatchError
from panther.nn.io import record_checksum
from panther.nn.sketch_record import plain_state


def integers(layer):
    """Return what the layer saves beside floating numbers; sketched layers settle their record at saving."""
    return {name: tensor for name, tensor in layer.state_dict().items() if not tensor.is_floating_point()}


@every_layer()
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trips(kind, assign):
    source, target, file = kind.layer(), kind.new(), io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert list(target.state_dict()) == list(source.state_dict())
    assert all(torch.equal(target.state_dict()[name], value) for name, value in source.state_dict().items())
    assert torch.equal(target(kind.x(3)), source(kind.x(3)))
    assert all(parameter.requires_grad for parameter in target.parameters())
    frozen = kind.new().requires_grad_(False)
    frozen.load_state_dict(source.state_dict(), assign=assign)
    assert assign or not any(parameter.requires_grad for parameter in frozen.parameters())


@every_layer("record")
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_that_does_not_fit_changes_nothing(kind, assign):
    layer, sound = kind.layer(), plain_state(kind.layer(seed=1))
    original, expected = snapshot(layer), layer(kind.x(3))
    spoilt = []
    for name, tensor in sound.items():
        rest = {other: value for other, value in sound.items() if other != name}
        spoilt += [
            (rest, "needs all of its tensors"),
            (rest | {name: tensor.new_zeros(tensor.numel() + 1)}, rf"size mismatch for {name}"),
            (rest | {name: [1, 2]}, rf"{name} must be a tensor, not list"),
        ]
        if not tensor.is_floating_point():
            spoilt.append((rest | {name: tensor.float()}, rf"{name} is torch\.float32 and must be {tensor.dtype}"))
    for state, message in spoilt:
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=message):
                layer.load_state_dict(state, strict=strict, assign=assign)
    with pytest.raises(
        RuntimeError, match=rf"(?s){type(layer).__name__}.*Missing key\(s\).*Unexpected key\(s\).*weight"
    ):
        layer.load_state_dict(kind.plain().state_dict(), assign=assign)
    assert_unchanged(layer, original)
    assert torch.equal(layer(kind.x(3)), expected)


@every_layer("record")
def test_a_layer_that_a_checkpoint_does_not_have_is_reported(kind):
    layer = kind.layer()
    original, dense = snapshot(layer), nn.ModuleDict({"layer": kind.plain(), "head": nn.Linear(4, 2)})
    model = nn.ModuleDict({"layer": layer, "head": nn.Linear(4, 2)})
    result = model.load_state_dict(dense.state_dict(), strict=False)
    assert set(result.missing_keys) == {f"layer.{name}" for name in plain_state(kind.new())}
    assert "layer.weight" in result.unexpected_keys
    assert torch.equal(model["head"].weight, dense["head"].weight)
    assert_unchanged(layer, original)


@every_layer()
def test_keys_that_the_layer_does_not_know_are_reported(kind):
    layer, source = kind.layer(), kind.layer(seed=1)
    state = source.state_dict() | {"more": torch.zeros(4)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        layer.load_state_dict(state)
    layer = kind.layer()
    assert set(layer.load_state_dict(state, strict=False).unexpected_keys) == {"more"}
    assert torch.equal(layer(kind.x(3)), source(kind.x(3)))


@every_layer()
def test_the_meta_device(kind):
    source, x = kind.layer(), kind.x(3)
    with torch.device("meta"):
        layer = kind.new()
    for empty in (layer, kind.new(device="meta")):
        assert all(tensor.is_meta for tensor in snapshot(empty).values())
        assert empty(x.to("meta")).shape == source(x).shape
    emptied = copy.deepcopy(layer).to_empty(device="cpu")
    emptied.reset_parameters()
    assert emptied(x).isfinite().all()
    kind.new().load_state_dict(emptied.state_dict())
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(x), source(x))
    assert not any(tensor.is_meta for tensor in snapshot(layer).values())
    skipped = nn.utils.skip_init(kind.make, *kind.sizes, **kind.shared, **kind.form)
    skipped.load_state_dict(source.state_dict())
    assert torch.equal(skipped(x), source(x))


@every_layer("fake")
def test_fake_tensors(kind):
    shape = kind.layer()(kind.x(3)).shape
    with FakeTensorMode():
        layer = kind.new()
        assert layer(torch.randn(3, *kind.sample)).shape == shape
        layer.load_state_dict(layer.state_dict())


@every_layer()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts(kind, dtype):
    layer = kind.layer()
    original = integers(layer)
    for cast in (lambda module: module.to(dtype), lambda module: module.type(dtype)):
        moved = cast(copy.deepcopy(layer))
        assert moved(kind.x(3, dtype=dtype)).dtype is dtype
        assert list(moved.parameters())[-1].dtype is dtype
        after = integers(moved)
        assert after.keys() == original.keys()
        assert all(after[name].dtype is original[name].dtype for name in original)
        assert all(torch.equal(after[name], original[name]) for name in original)
        fresh = kind.new(dtype=dtype)
        fresh.load_state_dict(moved.state_dict())
        assert torch.equal(fresh(kind.x(3, dtype=dtype)), moved(kind.x(3, dtype=dtype)))
        layer(kind.x(3)).sum().backward()
        assert all(p.grad is None or p.grad.dtype is p.dtype for p in cast(copy.deepcopy(layer)).parameters())
        if dtype is torch.float64:
            assert torch.equal(moved.float()(kind.x(3)), layer(kind.x(3)))


@every_layer()
def test_copies(kind):
    layer, x = kind.layer(), kind.x(3)
    expected = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected)
        assert repr(twin) == repr(layer)
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        assert not torch.equal(twin(x), expected)
    assert torch.equal(layer(x), expected)


AVERAGES = {
    "mean": {"use_buffers": False},
    "mean of buffers": {"use_buffers": True},
    "exponential": {"use_buffers": False, "multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "exponential of buffers": {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.9)},
}


@pytest.mark.parametrize(
    ("kind", "average"),
    [pytest.param(kind, name, id=f"{kind.name}-{name}") for name in AVERAGES for kind in kinds_with(name)],
)
def test_averages_keep_the_integers(kind, average):
    layer = kind.layer()
    mean = AveragedModel(layer, **AVERAGES[average])
    for _ in range(3):
        with torch.no_grad():
            next(layer.parameters()).mul_(1.5)
        mean.update_parameters(layer)
    fresh = kind.new()
    fresh.load_state_dict(mean.module.state_dict())
    assert torch.equal(fresh(kind.x(3)), mean.module(kind.x(3)))
    assert all(torch.equal(value, integers(layer)[name]) for name, value in integers(fresh).items())


@every_layer("file")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_inference_format_round_trip_is_exact(kind, dtype, bias, tmp_path):
    model, x = (
        nn.Sequential(kind.layer(bias=bias, dtype=dtype), nn.PReLU(init=0.5, dtype=dtype)),
        kind.x(3, dtype=dtype),
    )
    pr.save_compressed(model, tmp_path)
    for target in (kind.plain(bias=bias), kind.new(bias=bias)):
        restored = pr.load_compressed(tmp_path, nn.Sequential(target, nn.PReLU()))
        assert type(restored[0]) is type(model[0])
        assert repr(restored) == repr(model)
        assert all(torch.equal(restored.state_dict()[name], value) for name, value in model.state_dict().items())
        assert torch.equal(restored(x), model(x))


@every_layer("file")
def test_the_inference_format_of_shared_layers_on_the_meta_device(kind, tmp_path):
    layer = kind.layer().bfloat16()
    pr.save_compressed(nn.ModuleDict({"a": layer, "b": layer}), tmp_path)
    with torch.device("meta"):
        plain = nn.ModuleDict({"a": kind.plain(), "b": kind.plain()})
    restored = pr.load_compressed(tmp_path, plain)
    assert restored["a"] is restored["b"]
    x = kind.x(3, dtype=torch.bfloat16)
    assert torch.equal(restored["a"](x), layer(x))


DIFFERENT = {
    "in_features": 65, "out_features": 47, "in_channels": 8, "out_channels": 16, "kernel_size": 5, "stride": 3,
    "padding": 3, "dilation": 2, "groups": 1, "bias": False, "padding_mode": "replicate",
}  # fmt: skip


@every_layer("file")
def test_the_inference_format_refuses_what_does_not_fit(kind, tmp_path):
    layer = kind.layer()
    pr.save_compressed(nn.Sequential(layer), tmp_path)
    path = tmp_path / "panther.json"
    sound = json.loads(path.read_text())
    arguments = sound["modules"]["0"]["args"]
    dense_arguments = {name: arguments[name] for name in layer.dense_arguments}
    for name in dense_arguments:
        if name == "stride" and isinstance(arguments["padding"], str):
            continue  # torch has no such convolution
        value = 2 if (name, arguments[name]) == ("groups", 1) else DIFFERENT[name]
        wrong = type(kind.plain())(**dense_arguments | {name: value})
        with pytest.raises(FormatError, match="module '0' was saved for"):
            pr.load_compressed(tmp_path, nn.Sequential(wrong))
    with pytest.raises(FormatError, match="module '0' was saved for"):
        pr.load_compressed(tmp_path, nn.Sequential(nn.Bilinear(2, 3, 4)))
    for name, value in arguments.items():
        for wrong in (0, True, "4", None, [1, "1"], 37, 1 << 50):
            is_ignored = name == "group_size" and (None in (value, wrong) or wrong == 1 << 50)
            if wrong == value or is_ignored:  # Groups larger than a row are rows, and low rank alone has no groups.
                continue
            changed = {key: value for key, value in sound.items() if key != "checksum"}
            changed["modules"] = {"0": sound["modules"]["0"] | {"args": arguments | {name: wrong}}}
            path.write_text(json.dumps(changed | {"checksum": record_checksum(changed)}))
            with pytest.raises((FormatError, SketchMismatchError)):
                pr.load_compressed(tmp_path, nn.Sequential(kind.plain()))


@pytest.mark.gpu
@every_layer()
def test_moving_to_cuda_and_back(kind):
    layer = kind.layer()
    original, expected = snapshot(layer), layer(kind.x(3))
    assert torch.allclose(layer.cuda()(kind.x(3).cuda()).cpu(), expected, atol=1e-4)
    assert_unchanged(layer.cpu(), original)
