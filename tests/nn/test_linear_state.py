"""SKLinear's life cycle: state_dict, modes, devices that hold nothing, averaging, copies."""

import copy
import io
import pickle

import pytest
import torch
from covering import all_pairs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from panther.errors import SketchMismatchError
from panther.nn import SKLinear

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def seeded(seed=3, **kwargs):
    return SKLinear(64, 48, 2, 2, seed=seed, **kwargs)


def fitted():
    return SKLinear.from_linear(nn.Linear(64, 48), 2, 2)


def snapshot(layer):
    return {name: tensor.clone() for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}


def assert_same(layer, before):
    after = snapshot(layer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_state_dict_holds_the_sketches_exactly_when_fitted():
    assert list(seeded().state_dict()) == ["S1", "S2", "bias", "sketch_seed"]
    assert set(fitted().state_dict()) == {"S1", "S2", "U1", "U2", "bias", "sketch_seed"}
    assert seeded().sketch_seed.dtype == torch.int64
    assert seeded().sketch_seed[:3].tolist() == [3, 2, 1]
    assert fitted().sketch_seed[:3].tolist() == [-1, 2, 1]


def test_golden_record():
    """Checkpoints hold this; changing it makes them unreadable."""
    assert seeded(seed=12345).sketch_seed.tolist() == [12345, 2, 1, 969522647]


def test_bytes_at_rest():
    layer = SKLinear(8192, 8192, num_terms=1, low_rank=16)
    sizes = {name: tensor.nbytes for name, tensor in layer.state_dict().items()}
    assert sizes.pop("sketch_seed") == 32
    assert sum(sizes.values()) == 1_081_344
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert file.tell() < 1_081_344 + 4096


@pytest.mark.parametrize(
    ("make_source", "make_target", "assign"),
    all_pairs([seeded, fitted], [seeded, fitted, lambda: seeded(seed=99)], [False, True]),
)
def test_loading_switches_to_the_checkpoints_mode(make_source, make_target, assign):
    source, target = make_source(), make_target()
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert target.seed == source.seed
    assert torch.equal(target(X), source(X))
    assert {name: p.requires_grad for name, p in target.named_parameters()} == {
        name: True for name, _ in source.named_parameters()
    }
    assert list(target.state_dict()) == list(source.state_dict())


def test_loading_redraws_a_sketch_that_was_overwritten():
    layer = seeded()
    expected = layer(X)
    layer.U1.zero_()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer(X), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [seeded, fitted])
def test_missing_and_misshapen_keys_are_torchs_errors_and_change_nothing(make, assign):
    source = seeded(seed=8).state_dict()
    for spoil in (
        lambda s: s.pop("S1"),
        lambda s: s.pop("bias"),
        lambda s: s.pop("sketch_seed"),
        lambda s: s.update(S2=torch.zeros(3, 48)),
        lambda s: s.update(bias=torch.zeros(47)),
        lambda s: s.update(sketch_seed=torch.zeros(3, dtype=torch.int64)),
    ):
        layer, state = make(), dict(source)
        before, seed = snapshot(layer), layer.seed
        spoil(state)
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for SKLinear"):
            layer.load_state_dict(state, assign=assign)
        assert_same(layer, before)
        assert layer.seed == seed


def test_a_dense_checkpoint_is_refused_by_torch():
    layer = seeded()
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key\(s\).*S1.*Unexpected key\(s\).*weight"):
        layer.load_state_dict(nn.Linear(64, 48).state_dict())
    assert_same(layer, before)


def test_unexpected_keys_are_torchs_affair():
    layer, state = seeded(), {**seeded(seed=8).state_dict(), "U1": torch.zeros(4, 48)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "U1"'):
        layer.load_state_dict(state)
    layer = seeded()
    assert layer.load_state_dict(state, strict=False).unexpected_keys == ["U1"]
    assert layer.seed == 8


def test_without_strict_a_layer_is_loaded_whole_or_reported():
    model = nn.Sequential(seeded(), nn.Linear(48, 2))
    before = snapshot(model[0])
    dense = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 2)).state_dict()
    result = model.load_state_dict(dense, strict=False)
    assert set(result.missing_keys) == {"0.S1", "0.S2", "0.bias", "0.sketch_seed"}
    assert_same(model[0], before)
    assert torch.equal(model[1].weight, dense["1.weight"])

    state = nn.Sequential(seeded(seed=8), nn.Linear(48, 2)).state_dict()
    del state["0.bias"]
    with pytest.raises(RuntimeError, match="SKLinear '0' loads all or nothing, and S1, S2, sketch_seed came alone"):
        model.load_state_dict(state, strict=False)
    assert_same(model[0], before)


def test_a_wrong_record_raises_and_changes_nothing():
    layer = seeded()
    before = snapshot(layer)
    state = layer.state_dict()
    record = state["sketch_seed"]
    damaged = record.clone()
    damaged[0] += 1
    with pytest.raises(SketchMismatchError, match="does not match its checksum"):
        layer.load_state_dict({**state, "sketch_seed": damaged})
    with pytest.raises(SketchMismatchError, match=r"num_terms=1 and the layer has num_terms=2.*build the layer with"):
        layer.load_state_dict({**state, "sketch_seed": SKLinear(64, 48, 1, 4).sketch_seed})
    with pytest.raises(SketchMismatchError, match=r"is torch\.float16 and must be torch\.int64: cast only"):
        layer.load_state_dict({name: tensor.half() for name, tensor in state.items()})
    assert_same(layer, before)


def test_an_unknown_stream_version_raises(monkeypatch):
    monkeypatch.setattr("panther.nn._sketch_record.STREAM_VERSION", 2)
    state = seeded().state_dict()
    monkeypatch.undo()
    with pytest.raises(SketchMismatchError, match="stream version 2 and this Panther knows 1"):
        seeded().load_state_dict(state)


def test_stacked_keys_load_as_seeded_if_the_sketches_are_the_layers_own():
    layer = seeded()
    stacked = {name: getattr(layer, name).clone() for name in ("S1s", "U1s", "S2s", "U2s")} | {
        "bias": layer.bias.detach()
    }
    own = seeded()
    own.load_state_dict(stacked)
    assert own.seed == 3
    assert torch.equal(own(X), layer(X))
    for other in (seeded(seed=4), fitted()):
        other.load_state_dict(stacked)
        assert other.is_fitted
        assert torch.allclose(other(X), layer(X), atol=1e-6)
    wrong = nn.Sequential(seeded())
    before = snapshot(wrong)
    of_another_rank = {f"0.{name}": getattr(SKLinear(64, 48, 2, 3), name) for name in ("S1s", "U1s", "S2s", "U2s")}
    without = {f"0.{name}": value for name, value in stacked.items() if name != "U1s"}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"SKLinear '0' cannot take .*S1s \(2, 64, 3\) for \(2, 64, 2\).*build"):
            wrong.load_state_dict(of_another_rank, strict=strict)
        with pytest.raises(RuntimeError, match=r"U1s missing for \(2, 2, 48\)"):
            wrong.load_state_dict(without, strict=strict)
    assert_same(wrong, before)


def test_meta_then_to_empty_then_reset():
    with torch.device("meta"):
        layer = seeded()
    assert all(t.is_meta for t in snapshot(layer).values())
    assert layer(X.to("meta")).shape == (5, 48)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.seed == 3
    assert torch.equal(layer.U1, seeded().U1)
    assert torch.equal(layer.sketch_seed, seeded().sketch_seed)
    assert layer(X).isfinite().all()


@pytest.mark.parametrize("make", [seeded, fitted])
def test_meta_then_load_by_assignment(make):
    source = make()
    with torch.device("meta"):
        layer = SKLinear(64, 48, 2, 2)
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(X), source(X))
    assert not any(t.is_meta for t in snapshot(layer).values())


def test_leaving_meta_draws_the_sketches():
    """As for nn.Linear, initialising the parameters is then enough."""
    with torch.device("meta"):
        model = nn.Sequential(seeded())
    model.to_empty(device="cpu")
    for layer in (model[0], nn.utils.skip_init(SKLinear, 64, 48, 2, 2, seed=3)):
        assert torch.equal(layer.U1, seeded().U1)
        assert torch.equal(layer.U2, seeded().U2)
        assert torch.equal(layer.sketch_seed, seeded().sketch_seed)


def test_a_seed_under_meta_and_fake_tensors_is_the_generators():
    torch.manual_seed(0)
    expected = SKLinear(64, 48, 2).seed
    torch.manual_seed(0)
    with torch.device("meta"):
        assert SKLinear(64, 48, 2).seed == expected
    torch.manual_seed(0)
    with FakeTensorMode():
        layer = SKLinear(64, 48, 2)
        assert layer.seed == expected
        assert layer(torch.randn(3, 64)).shape == (3, 48)
        layer.load_state_dict(layer.state_dict())
        assert layer.seed == expected


def test_a_fitted_layer_that_leaves_meta_or_is_emptied_can_be_saved():
    emptied = fitted()
    emptied.sketch_seed.fill_(7)  # as to_empty may leave it
    for layer in (fitted().to("meta").to_empty(device="cpu"), emptied):
        layer.reset_parameters()
        assert layer.sketch_seed[:3].tolist() == [-1, 2, 1]
        fresh = seeded()
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(fresh(X), layer(X))


def test_a_fitted_checkpoint_without_values_makes_a_fitted_layer():
    with torch.device("meta"):
        layer = SKLinear(64, 48, 2, 2)
    layer.load_state_dict(fitted().to("meta").state_dict(), assign=True)
    assert layer.is_fitted


def test_buffers_keep_their_order_through_changes_of_mode():
    layer = fitted()
    layer.load_state_dict(seeded().state_dict())
    assert [name for name, _ in layer.named_buffers()] == [name for name, _ in seeded().named_buffers()]


def test_stacked_sketches_of_another_scale_are_not_the_layers_own():
    layer = seeded()
    stacked = {name: getattr(layer, name).clone() for name in ("S1s", "U1s", "S2s", "U2s")} | {"bias": layer.bias.data}
    stacked["U1s"] *= 1.25
    other = seeded()
    other.load_state_dict(stacked)
    assert other.is_fitted
    assert not torch.allclose(other(X), layer(X))


def test_a_wrong_type_is_torchs_error():
    layer = seeded()
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading .*(?s:.)*S1 must be a tensor, not list"):
        layer.load_state_dict({**layer.state_dict(), "S1": [1, 2]})


def test_the_sketches_of_a_frozen_layer_are_loaded_frozen():
    layer = seeded().requires_grad_(False)
    layer.load_state_dict(fitted().state_dict())
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_layer_made_in_inference_mode_can_train():
    with torch.inference_mode():
        layer = seeded()
    layer(X).sum().backward()
    assert layer.S1.grad is not None


class Extended(SKLinear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))


EXTENSIONS = [
    lambda layer: nn.utils.parametrizations.weight_norm(layer, "S1"),
    lambda layer: nn.utils.parametrizations.orthogonal(layer, "S2"),
    lambda layer: prune.l1_unstructured(layer, "S1", 0.5),
    lambda layer: Extended(64, 48, 2, 2),
]


@pytest.mark.parametrize(("extend", "strict", "make"), all_pairs(EXTENSIONS, [False, True], [seeded, fitted]))
def test_layers_that_users_extend_load_their_own_state(extend, strict, make):
    source, target = extend(make()), extend(make())
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            if tensor.is_floating_point() and tensor is not source.U1 and tensor is not source.U2:
                tensor.mul_(0.5)
    state = source.state_dict()
    target.load_state_dict(state, strict=strict)
    assert all(torch.equal(tensor, state[name]) for name, tensor in target.state_dict().items())
    assert torch.equal(target(X), source(X))


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("average", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_one_seed_keep_the_sketch(use_buffers, average):
    layer = seeded(seed=2**62 + 12345)  # a seed that float arithmetic would round
    mean = AveragedModel(layer, use_buffers=use_buffers, **average)
    for _ in range(3):
        nn.init.normal_(layer.S1)
        mean.update_parameters(layer)
    fresh = seeded(seed=1)
    fresh.load_state_dict(mean.module.state_dict())
    assert fresh.seed == layer.seed
    assert torch.equal(fresh(X), mean.module(X))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_fitted_layers(use_buffers):
    layer = fitted()
    mean = AveragedModel(layer, use_buffers=use_buffers)
    for _ in range(3):
        nn.init.normal_(layer.U1)
        mean.update_parameters(layer)
    fresh = seeded()
    fresh.load_state_dict(mean.module.state_dict())
    assert torch.equal(fresh(X), mean.module(X))


def test_averages_of_different_seeds_are_refused_on_loading():
    mean = AveragedModel(seeded(seed=2**61), use_buffers=True)
    mean.update_parameters(seeded(seed=2**61))
    mean.update_parameters(seeded(seed=2**62))
    with pytest.raises(SketchMismatchError, match="does not match its checksum, as when seeds are averaged"):
        seeded().load_state_dict(mean.module.state_dict())


def test_a_broadcast_record_is_adopted():
    layer, other = seeded(seed=3), seeded(seed=4)
    layer.sketch_seed.copy_(other.sketch_seed)
    layer.check_record()
    assert layer.seed == 4
    assert torch.equal(layer.U1, other.U1)
    other.sketch_seed.copy_(fitted().sketch_seed)  # of the other mode, beside sketches that are sound
    other.check_record()
    assert torch.equal(other.sketch_seed, seeded(seed=4).sketch_seed)


@pytest.mark.parametrize("make", [seeded, fitted])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_round_trips(make, dtype):
    layer = make()
    before = snapshot(layer)
    layer.to(dtype)
    assert layer(X.to(dtype)).dtype == dtype
    if layer.seed is not None:
        assert set(layer.U1.unique().tolist()) == {-1.0, 1.0}
        layer.to(torch.float32)
        assert torch.equal(layer.U1, before["U1"])
        assert torch.equal(layer.sketch_seed, before["sketch_seed"])


@pytest.mark.parametrize("make", [seeded, fitted])
def test_copies(make):
    layer = make()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(X), layer(X))
        assert twin.seed == layer.seed
        nn.init.zeros_(twin.S1)
        assert not torch.equal(twin(X), layer(X))


@pytest.mark.gpu
def test_moving_to_cuda_and_back():
    layer = seeded()
    before = snapshot(layer)
    expected = layer(X)
    assert torch.allclose(layer.cuda()(X.cuda()).cpu(), expected, atol=1e-4)
    assert_same(layer.cpu(), before)
    assert torch.equal(seeded(device="cuda").U1.cpu(), before["U1"])
