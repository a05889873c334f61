"""What sketched convolutions add to the life cycle that they share with SKLinear, and that they really share it."""

import copy
import json
import pickle

import pytest
import torch
from covering import all_pairs
from torch import nn
from torch.optim.swa_utils import AveragedModel

import panther as pr
from panther.errors import FormatError, SketchMismatchError
from panther.nn import SKConv1d, SKConv2d, SKConv3d
from panther.nn.io import record_checksum

X = torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(0))


def seeded(seed=3, **kwargs):
    return SKConv2d(32, 48, 3, **{"padding": 1, "groups": 2, "num_terms": 2, "low_rank": 4, **kwargs}, seed=seed)


def fitted():
    return SKConv2d.from_conv(nn.Conv2d(32, 48, 3, padding=1, groups=2), 2, 4)


def snapshot(layer):
    return {name: tensor.clone() for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}


def assert_same(layer, before):
    after = snapshot(layer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_state_dict_holds_the_sketch_exactly_when_fitted():
    assert list(seeded().state_dict()) == ["S", "bias", "sketch_seed"]
    assert set(fitted().state_dict()) == {"S", "U", "bias", "sketch_seed"}
    assert seeded().sketch_seed[:3].tolist() == [3, 2, 1]
    assert fitted().sketch_seed[:3].tolist() == [-1, 2, 1]


@pytest.mark.parametrize(
    ("make_source", "make_target", "assign"),
    all_pairs([seeded, fitted], [seeded, fitted, lambda: seeded(seed=99)], [False, True]),
)
def test_loading_switches_to_the_checkpoints_mode(make_source, make_target, assign):
    source, target = make_source(), make_target()
    target.load_state_dict(source.state_dict(), assign=assign)
    assert target.seed == source.seed
    assert torch.equal(target(X), source(X))
    assert list(target.state_dict()) == list(source.state_dict())


@pytest.mark.parametrize("make", [seeded, fitted])
def test_a_bad_checkpoint_changes_nothing(make):
    source = seeded(seed=8).state_dict()
    for spoil in (
        lambda s: s.pop("S"),
        lambda s: s.pop("bias"),
        lambda s: s.update(S=torch.zeros(15, 16, 3, 3)),
        lambda s: s.update(U=torch.zeros(16, 24), weight=torch.zeros(3)),
    ):
        layer, state = make(), dict(source)
        before, seed = snapshot(layer), layer.seed
        spoil(state)
        strict = "weight" not in state
        if strict:
            with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for SKConv2d"):
                layer.load_state_dict(state)
            assert_same(layer, before)
            assert layer.seed == seed
        else:
            with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "U", "weight"'):
                layer.load_state_dict(state)
    layer = make()
    before = snapshot(layer)
    with pytest.raises(SketchMismatchError, match=r"num_terms=1 and the layer has num_terms=2"):
        layer.load_state_dict({**source, "sketch_seed": seeded(num_terms=1).sketch_seed})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key\(s\).*S.*Unexpected key\(s\).*weight"):
        layer.load_state_dict(nn.Conv2d(32, 48, 3, groups=2).state_dict())
    assert_same(layer, before)


@pytest.mark.parametrize("groups", [1, 2])
def test_stacked_keys_load_as_seeded_if_the_sketch_is_the_layers_own(groups):
    layer = seeded(groups=groups)
    stacked = {"S1s": layer.S1s.clone(), "U1s": layer.U1s.clone(), "bias": layer.bias.detach()}
    own = seeded(groups=groups)
    own.load_state_dict(stacked)
    assert own.seed == 3
    assert torch.equal(own(X), layer(X))
    for other in (seeded(seed=4, groups=groups), SKConv2d.from_conv(seeded(groups=groups).to_conv(), 2, 4)):
        other.load_state_dict(stacked)
        assert other.is_fitted
        assert torch.allclose(other(X), layer(X), atol=1e-6)
    wrong = seeded(groups=groups)
    before = snapshot(wrong)
    spoilt = [{**stacked, "U1s": torch.zeros(4, 3, 48)}]
    if groups > 1:
        spoilt.append({**stacked, "U1s": torch.ones(4, 4, 48)})  # mixes groups
    for state in spoilt:
        with pytest.raises(RuntimeError, match=r"SKConv2d .*cannot take .*U1s"):
            wrong.load_state_dict(state, strict=False)
        assert_same(wrong, before)


@pytest.mark.parametrize("make", [seeded, fitted])
def test_meta_to_empty_and_assignment(make):
    source = make()
    with torch.device("meta"):
        layer = seeded()
        assert layer(X.to("meta")).shape == (2, 48, 6, 6)
    emptied = copy.deepcopy(layer).to_empty(device="cpu")
    emptied.reset_parameters()
    assert torch.equal(emptied.U, seeded().U)
    assert emptied(X).isfinite().all()
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(X), source(X))


@pytest.mark.parametrize("make", [seeded, fitted])
def test_copies_and_dtype_round_trips(make):
    layer = make()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(X), layer(X))
        assert twin.seed == layer.seed
        nn.init.zeros_(twin.S)
        assert not torch.equal(twin(X), layer(X))
    before = layer.U.clone()
    layer.to(torch.bfloat16).to(torch.float32)
    assert layer.is_fitted or torch.equal(layer.U, before)


def test_averages_of_one_seed_keep_the_sketch():
    layer = seeded(seed=2**62 + 12345)
    mean = AveragedModel(layer, use_buffers=True)
    for _ in range(3):
        nn.init.normal_(layer.S)
        mean.update_parameters(layer)
    fresh = seeded(seed=1)
    fresh.load_state_dict(mean.module.state_dict())
    assert torch.equal(fresh(X), mean.module(X))


def test_freezing_a_fitted_layer():
    layer = fitted().freeze_sketches_()
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["S", "bias"]


class Net(nn.Sequential):
    """All three kinds, with everything that a constructor takes."""

    def __init__(self, sketched):
        torch.manual_seed(0)
        flat = {"kernel_size": 4, "padding": "same", "dilation": 2, "bias": False}
        last = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "groups": 2, "padding_mode": "circular"}
        if sketched:
            fit = SKConv2d.from_conv(nn.Conv2d(32, 48, **last), 2, 4)
            layers = SKConv1d(32, 48, **flat), fit, SKConv3d(4, 32, 2, low_rank=2)
        else:
            layers = nn.Conv1d(32, 48, **flat), nn.Conv2d(32, 48, **last), nn.Conv3d(4, 32, 2)
        super().__init__(*layers)

    def forward(self, x):
        return [self[0](x[:, :, 0]), self[1](x), self[2](x[:, :4, None].expand(-1, -1, 3, -1, -1))]


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inference_format_round_trip_is_exact(tmp_path, target, dtype):
    model = Net(True).to(dtype).eval()
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, Net(target).eval())
    x = X.to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(restored(x), model(x), strict=True))
    assert [type(layer) for layer in restored] == [SKConv1d, SKConv2d, SKConv3d]
    assert [repr(layer) for layer in restored] == [repr(layer) for layer in model]


def test_the_inference_format_refuses_what_does_not_fit(tmp_path):
    pr.save_compressed(nn.Sequential(seeded()), tmp_path)
    for wrong in (
        nn.Conv2d(32, 48, 3, padding=1),
        nn.Conv2d(32, 48, 3, padding=2, groups=2),
        nn.Conv2d(32, 48, 3, padding=1, groups=2, padding_mode="reflect"),
        nn.Conv2d(32, 48, 3, padding=1, groups=2, bias=False),
        nn.Linear(32, 48),
    ):
        with pytest.raises(FormatError, match="module '0' was saved for"):
            pr.load_compressed(tmp_path, nn.Sequential(wrong))
    path = tmp_path / "panther.json"
    sound = json.loads(path.read_text())
    for name, value in [
        ("kernel_size", [3]),
        ("padding", [1, "1"]),
        ("stride", 1),
        ("groups", True),
        ("seed", 1),
        ("groups", 1 << 50),
    ]:
        manifest = copy.deepcopy(sound)
        manifest["modules"]["0"]["args"][name] = value
        del manifest["checksum"]
        path.write_text(json.dumps(manifest | {"checksum": record_checksum(manifest)}))
        with pytest.raises(FormatError, match=r"module '0' (has arguments|was saved for)"):
            pr.load_compressed(tmp_path, nn.Sequential(seeded()))
