"""What the state of sketched layers adds to the contract of layers: a seed for the sketches, two modes, a record."""

import copy
import io

import pytest
import torch
from compressed_layers import assert_unchanged, snapshot, with_stored_sketches
from covering import all_pairs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from panther.errors import SketchMismatchError
from panther.nn import SKConv2d, SKLinear, sketch_record


def linear(seed=3, num_terms=2, **options):
    return SKLinear(64, 48, num_terms=num_terms, low_rank=2, sketch="signs", seed=seed, **options)


def sparse(seed=3, num_terms=2, **options):
    return SKLinear(64, 48, num_terms=num_terms, low_rank=2, seed=seed, **options)


def conv(seed=3, num_terms=2, groups=2, **options):
    return SKConv2d(32, 48, 3, padding=1, groups=groups, num_terms=num_terms, low_rank=4, seed=seed, **options)


def fitted(make):
    """Return a fitted layer of the sizes of a seeded one."""
    return with_stored_sketches(make())


def x_of(make):
    shape = (5, 64) if make is not conv else (2, 32, 6, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


both = pytest.mark.parametrize("make", [linear, sparse, conv])
MODES = [lambda make: make(), lambda make: make(seed=99), fitted]


@both
def test_state_dict_holds_the_sketches_exactly_when_fitted(make):
    factors, sketches = ({"S1", "S2"}, {"U1", "U2"}) if make is not conv else ({"S"}, {"U"})
    assert set(make().state_dict()) == factors | {"bias", "sketch_seed", "record_mark"}
    assert set(fitted(make).state_dict()) == factors | sketches | {"bias", "sketch_seed", "record_mark"}
    assert make().sketch_seed.dtype == torch.int64
    assert make().sketch_seed[:3].tolist() == [3, 2, 2 if make is sparse else 1]
    assert fitted(make).sketch_seed[:3].tolist() == [-1, 2, 1]


def test_golden_record():
    """Checkpoints hold this; changing it makes them unreadable."""
    assert linear(seed=12345).sketch_seed.tolist() == [12345, 2, 1, 969522647]
    assert sparse(seed=12345).sketch_seed.tolist() == [12345, 2, 2, 3074865716]


def test_bytes_at_rest():
    layer = SKLinear(8192, 8192, num_terms=1, low_rank=16)
    sizes = {name: tensor.nbytes for name, tensor in layer.state_dict().items()}
    assert (sizes.pop("sketch_seed"), sizes.pop("record_mark")) == (32, 16)
    assert sum(sizes.values()) == 1_081_344
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert file.tell() < 1_081_344 + 4096


@pytest.mark.parametrize(
    ("make", "source", "target", "assign"), all_pairs([linear, sparse, conv], MODES[1:], MODES, [False, True])
)
def test_loading_switches_to_the_checkpoints_mode(make, source, target, assign):
    source, target = source(make), target(make)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert target.seed == source.seed
    assert torch.equal(target(x_of(make)), source(x_of(make)))
    assert list(target.state_dict()) == list(source.state_dict())
    assert [name for name, _ in target.named_buffers()] == [name for name, _ in source.named_buffers()]
    assert all(parameter.requires_grad for parameter in target.parameters())


@both
def test_sketches_beside_a_seed_are_unexpected(make):
    layer, name = make(), next(iter(make().sketch_shapes()))
    state = make(seed=8).state_dict() | {name: getattr(fitted(make), name)}
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{name}"'):
        layer.load_state_dict(state)
    assert layer.load_state_dict(state, strict=False).unexpected_keys == [name]
    assert layer.seed == 8


@both
def test_loading_redraws_a_sketch_that_was_overwritten(make):
    layer = make()
    expected = layer(x_of(make))
    for name in layer.sketch_names:
        getattr(layer, name).zero_()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x_of(make)), expected)


@both
def test_a_wrong_record_raises_and_changes_nothing(make, monkeypatch):
    layer = make()
    original, state = snapshot(layer), layer.state_dict()
    damaged = state["sketch_seed"].clone()
    damaged[0] += 1
    with pytest.raises(SketchMismatchError, match="does not match its checksum"):
        layer.load_state_dict({**state, "sketch_seed": damaged})
    with pytest.raises(SketchMismatchError, match=r"num_terms=1 and the layer has num_terms=2.*build the layer with"):
        layer.load_state_dict({**state, "sketch_seed": make(num_terms=1).sketch_seed})
    with pytest.raises(SketchMismatchError, match=r"is torch\.float16 and must be torch\.int64: cast only"):
        layer.load_state_dict({name: tensor.half() for name, tensor in state.items()})
    monkeypatch.setitem(sketch_record.SKETCH_VERSIONS, "sparse" if make is sparse else "signs", 3)
    later = make().state_dict()
    monkeypatch.undo()
    with pytest.raises(SketchMismatchError, match=r"version 3 and this Panther knows \[1, 2\]"):
        layer.load_state_dict(later)
    assert_unchanged(layer, original)


def stacked_state(layer):
    """Return the layer's state under the keys that other libraries write."""
    names = ("S1s", "U1s", "S2s", "U2s") if isinstance(layer, SKLinear) else ("S1s", "U1s")
    return {name: getattr(layer, name).clone() for name in names} | {"bias": layer.bias.detach()}


@pytest.mark.parametrize("make", [linear, sparse, conv, lambda seed=3, **options: conv(seed, groups=1, **options)])
def test_stacked_keys_load_as_seeded_if_the_sketches_are_the_layers_own(make):
    layer = make()
    x, stacked = x_of(linear if isinstance(layer, SKLinear) else conv), stacked_state(layer)
    own = make()
    own.load_state_dict(stacked)
    assert own.seed == 3
    assert torch.equal(own(x), layer(x))
    other_mode = make()
    other_mode.set_fitted_({name: torch.zeros(shape) for name, shape in layer.sketch_shapes().items()})
    for other in (make(seed=4), other_mode):
        other.load_state_dict(stacked)
        assert other.is_fitted
        assert torch.allclose(other(x), layer(x), atol=1e-6)
    scaled = make()
    scaled.load_state_dict(stacked | {"U1s": 1.25 * stacked["U1s"]})
    assert scaled.is_fitted
    assert not torch.allclose(scaled(x), layer(x))


def test_stacked_keys_that_do_not_fit_change_nothing():
    for make, spoilt, message in (
        (linear, stacked_state(SKLinear(64, 48, 2, 3)), r"S1s \(2, 64, 3\) for \(2, 64, 2\).*build"),
        (linear, {**stacked_state(linear()), "U1s": None}, r"U1s missing for \(2, 2, 48\)"),
        (conv, {**stacked_state(conv()), "U1s": torch.zeros(4, 3, 48)}, "U1s"),
        (conv, {**stacked_state(conv()), "U1s": torch.ones(4, 4, 48)}, "U1s"),  # which mixes groups
    ):
        model = nn.Sequential(make())
        original = snapshot(model)
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=rf"{type(model[0]).__name__} '0' cannot take .*{message}"):
                model.load_state_dict({f"0.{name}": value for name, value in spoilt.items()}, strict=strict)
        assert_unchanged(model, original)


@both
def test_a_layer_that_leaves_the_meta_device_has_its_sketches(make):
    """As for nn.Linear, initialising the parameters is then enough."""
    with torch.device("meta"):
        model = nn.Sequential(make())
    model.to_empty(device="cpu")
    sizes = (64, 48, 2, 2) if make is not conv else (32, 48, 3, 1, 1, 1, 2)
    form = {"num_terms": 2, "low_rank": 4} if make is conv else {"sketch": make().sketch}
    reset = copy.deepcopy(model[0])
    reset.reset_parameters()
    for layer in (model[0], reset, nn.utils.skip_init(type(model[0]), *sizes, **form, seed=3)):
        assert layer.seed == 3
        for name in (*layer.sketch_names, "sketch_seed"):
            assert torch.equal(getattr(layer, name), getattr(make(), name))


@both
def test_a_seed_under_meta_and_fake_tensors_is_the_generators(make):
    seeds = []
    for context in (torch.device("cpu"), torch.device("meta"), FakeTensorMode()):
        torch.manual_seed(0)
        with context:
            seeds.append(make(seed=None).seed)
    assert len(set(seeds)) == 1


@both
def test_a_fitted_layer_that_leaves_meta_or_is_emptied_can_be_saved(make):
    emptied = fitted(make)
    emptied.sketch_seed.fill_(7)  # as to_empty may leave it
    for layer in (fitted(make).to("meta").to_empty(device="cpu"), emptied):
        layer.reset_parameters()
        assert layer.sketch_seed[:3].tolist() == [-1, 2, 1]
        fresh = make()
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(fresh(x_of(make)), layer(x_of(make)))


@both
def test_a_fitted_checkpoint_without_values_makes_a_fitted_layer(make):
    layer = make(device="meta")
    layer.load_state_dict(fitted(make).to("meta").state_dict(), assign=True)
    assert layer.is_fitted


@both
def test_frozen_layers(make):
    layer = make().requires_grad_(False)
    layer.load_state_dict(fitted(make).state_dict())
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_seeded_layer_made_in_inference_mode_can_train():
    with torch.inference_mode():
        layer = linear()
    layer(x_of(linear)).sum().backward()
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


@pytest.mark.parametrize(
    ("extend", "strict", "make"), all_pairs(EXTENSIONS, [False, True], [linear, lambda: fitted(linear)])
)
def test_layers_that_users_extend_load_their_own_state(extend, strict, make):
    source, target = extend(make()), extend(make())
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            if tensor.is_floating_point() and tensor is not source.U1 and tensor is not source.U2:
                tensor.mul_(0.5)
    state = source.state_dict()
    target.load_state_dict(state, strict=strict)
    assert all(torch.equal(tensor, state[name]) for name, tensor in target.state_dict().items())
    assert torch.equal(target(x_of(linear)), source(x_of(linear)))


@both
def test_averages_keep_one_seed_and_refuse_two(make):
    seed = 2**62 + 12345  # which float arithmetic would round
    mean = AveragedModel(make(seed=seed), use_buffers=True)
    for _ in range(3):
        mean.update_parameters(make(seed=seed))
    fresh = make()
    fresh.load_state_dict(mean.module.state_dict())
    assert fresh.seed == seed
    mean.update_parameters(make(seed=2**61))
    with pytest.raises(SketchMismatchError, match="does not match its checksum, as when seeds are averaged"):
        make().load_state_dict(mean.module.state_dict())


@both
def test_reset_parameters_keeps_the_seed_and_redraws_the_rest(make):
    layer = make()
    original = snapshot(layer)
    drawn = "S" if make is conv else "S1"
    for name in layer.sketch_names:
        getattr(layer, name).zero_()
    layer.reset_parameters()
    assert layer.seed == 3
    assert all(torch.equal(getattr(layer, name), original[name]) for name in layer.sketch_names)
    assert not torch.equal(getattr(layer, drawn), original[drawn])


@both
def test_a_broadcast_record_is_adopted(make):
    layer, other = make(seed=3), make(seed=4)
    layer.sketch_seed.copy_(other.sketch_seed)
    layer.check_record()
    assert layer.seed == 4
    assert all(torch.equal(getattr(layer, name), getattr(other, name)) for name in layer.sketch_names)
    other.sketch_seed.copy_(fitted(make).sketch_seed)
    for use in (other.check_record, other.state_dict, lambda: other(x_of(make))):
        with pytest.raises(SketchMismatchError, match="has trained sketches, and this layer has seed 4: call"):
            use()
