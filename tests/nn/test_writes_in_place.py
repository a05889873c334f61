"""Codes and seeds that other code writes in place: copies of all tensors are followed, and arithmetic is refused."""

import copy
import itertools
import pickle

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from compressed_layers import LAYERS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import panther as pr
from panther.errors import SketchMismatchError
from panther.nn import (
    InterpolativeLinear,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedExperts,
    QuantizedLinear,
    SKConv2d,
    SKLinear,
)

TOKENS = torch.tensor([[1, 5, 7], [0, 2, 9]])


def maker(kind, *sizes, **options):
    """Return a function that makes the layer of a seed, which is drawn from torch's generator."""

    def make(seed=0):
        torch.manual_seed(seed)
        return kind(*sizes, **options)

    return make


QUANTIZED = {
    name: (LAYERS[name].layer, LAYERS[name].x(3))
    for name in ("int4", "int3+low_rank", "int8_low_rank", "conv2d int3+low_rank", "interpolative rows")
} | {
    "embedding": (maker(QuantizedEmbedding, 10, 24), TOKENS),
    "bag": (maker(QuantizedEmbeddingBag, 10, 24), TOKENS),
}
SKETCHED = {
    "sparse": (maker(SKLinear, 64, 48, 2, 2), torch.ones(3, 64)),
    "signs": (maker(SKLinear, 64, 48, 2, 2, sketch="signs"), torch.ones(3, 64)),
    "packed": (maker(SKLinear, 64, 48, 2, 2, sketch="signs", packed=True), torch.ones(3, 64)),
    "conv": (maker(SKConv2d, 16, 24, 3, low_rank=2), torch.ones(2, 16, 6, 6)),
}


def every(table):
    return pytest.mark.parametrize(("make", "x"), table.values(), ids=table.keys())


def tensors_of(layer):
    return [*layer.parameters(), *layer.buffers()]


def copy_all(tensors, sources):
    with torch.no_grad():
        for tensor, source in zip(tensors, sources, strict=True):
            tensor.copy_(source)


MOVES = {
    "parameters and buffers": lambda a, b: copy_all(tensors_of(a), tensors_of(b)),
    "values of the state_dict": lambda a, b: copy_all(a.state_dict().values(), b.state_dict().values()),
    "saved values": lambda a, b: copy_all(a.state_dict().values(), [v.clone() for v in b.state_dict().values()]),
    "load_state_dict": lambda a, b: a.load_state_dict(b.state_dict()),
    "assigned": lambda a, b: a.load_state_dict(copy.deepcopy(b.state_dict()), assign=True),
}


@every(QUANTIZED | SKETCHED)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("inference", [False, True])
def test_copies_of_all_tensors_are_followed_at_once(make, x, move, inference):
    """As a target network, a broadcast or timm's ModelEmaV2.set copies them."""
    layer, other = make(0), make(1)
    layer(x)
    with torch.inference_mode(inference):
        move(layer, other)
        assert torch.equal(layer(x), other(x))
    with torch.no_grad():
        expected = layer(x)
        layer.state_dict()
        assert torch.equal(layer(x), expected)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).share_memory()):
            assert torch.equal(twin(x), expected)


@every(QUANTIZED)
def test_other_tensors_for_one_call_change_nothing(make, x):
    layer, other = make(0), make(1)
    expected = layer(x)
    given = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(layer, given, (x,)), other(x))
    assert torch.equal(layer(x), expected)


def mean_of(layer, decay, steps=3):
    mean = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(steps):
        mean.update_parameters(layer)
    return mean.module


def mixed(tensors, others, weight):
    return [weight * a + (1 - weight) * b for a, b in zip(tensors, others, strict=True)]


def average(layer, other, decay):
    state = layer.state_dict()
    copy_all(state.values(), mixed(state.values(), other.state_dict().values(), decay))
    return layer


def with_copies(layer, other, is_copied):
    for name, tensor in layer.state_dict().items():
        if is_copied(name, tensor):
            tensor.copy_(other.state_dict()[name])
    return layer


def written(layer, change):
    names = ("codes", "left", "order")
    change(next(tensor for name, tensor in layer.state_dict().items() if name in names))
    return layer


DAMAGES = {
    "average of buffers": lambda make: mean_of(make(), 0.9995),
    "average with itself": lambda make: average(make(), make(), 0.9999),
    "average of two": lambda make: average(make(), make(1), 0.5),
    "codes without their record": lambda make: with_copies(make(), make(1), lambda n, t: n not in ("record", "order")),
    "a record without its codes": lambda make: with_copies(make(), make(1), lambda n, t: n == "record"),
    "half of the integers": lambda make: with_copies(make(), make(1), lambda n, t: n in ("codes", "left", "record")),
    "a sum": lambda make: written(make(), lambda codes: codes.add_(1)),
    "an order": lambda make: written(make(), lambda codes: codes.copy_(codes.flip(0))),
    "inference mode": lambda make: written(make(), torch.inference_mode()(lambda codes: codes.zero_())),
    "a layer of inference mode": lambda make: written(torch.inference_mode()(make)(), lambda codes: codes.add_(1)),
    "a foreach kernel": lambda make: written(make(), lambda codes: torch._foreach_mul_([codes], 2)),
}
_ORDER_CANNOT_TELL = ("codes without their record", "a record without its codes", "half of the integers", "an order")


@pytest.mark.parametrize(
    ("make", "x", "damage"),
    [
        pytest.param(*QUANTIZED[name], DAMAGES[damage], id=f"{name}-{damage}")
        for name, damage in itertools.product(QUANTIZED, DAMAGES)
        if not (name.startswith("interpolative") and damage in _ORDER_CANNOT_TELL)
        if damage != "half of the integers" or "low_rank" in name  # The zero points of all new layers are equal.
    ],
)
def test_arithmetic_on_codes_is_refused_before_the_layer_computes_or_is_saved(make, x, damage, tmp_path):
    """Reports: pytorch#84053, #65495, ultralytics#19992, timm#341."""
    try:
        model = nn.Sequential(damage(make))
    except SketchMismatchError:  # by the next average, which asks for the state_dict
        return
    reason = "do not match the checksum|order (must|is)"
    for use in (lambda: model(x), lambda: model[0].weight):
        with pytest.raises(SketchMismatchError, match=reason):
            use()
    for save in (model.state_dict, lambda: pr.save_compressed(model, tmp_path / "saved")):
        with pytest.raises(SketchMismatchError, match=f"layer '0': .*({reason})"):
            save()
    assert not (tmp_path / "saved/panther.json").exists()
    model.load_state_dict(nn.Sequential(make(1)).state_dict(), assign=True)
    assert torch.equal(model(x), make(1)(x))


@every(SKETCHED)
@pytest.mark.parametrize("weight", [1e-2, 0.5])
def test_averages_of_two_seeds_are_refused(make, x, weight, tmp_path):
    """Over the state_dict, where packed signs are not, and over buffers, where the sketches are."""
    by_state, by_buffers = make(0), make(0)
    by_state(x), by_buffers(x)
    average(by_state, make(1), 1 - weight)
    copy_all(tensors_of(by_buffers), mixed(tensors_of(by_buffers), tensors_of(make(1)), 1 - weight))
    for layer in (by_state, by_buffers):
        for use in (layer, lambda x, layer=layer: layer.weight, lambda x, layer=layer: layer.state_dict()):
            with pytest.raises(
                SketchMismatchError, match=r"sketch_seed=.* does not match its checksum, as when seeds are"
            ):
                use(x)
        with pytest.raises(SketchMismatchError, match="layer '0': sketch_seed"):
            pr.save_compressed(nn.Sequential(layer), tmp_path / "saved")


@every(SKETCHED)
@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_averages_of_one_seed_are_right(make, x, decay):
    layer, expected = make(0), make(0)(x)
    for _ in range(20):
        average(layer, make(0), decay)
    assert torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(mean_of(make(0), decay)(x), expected, rtol=1e-4, atol=1e-5)
    assert layer.sketch_seed.tolist() == make(0).sketch_seed.tolist()


@pytest.mark.parametrize(("make", "x"), [SKETCHED["sparse"], SKETCHED["signs"], SKETCHED["conv"]])
def test_sketches_that_are_copied_without_their_seed_are_refused(make, x):
    layer, other = make(0), make(1)
    expected = layer(x)
    floats = [[t for t in each.buffers() if t.is_floating_point()] for each in (layer, other)]
    copy_all(floats[0], [0.999 * tensor for tensor in floats[0]])
    assert torch.equal(layer(x), expected)
    copy_all([t for t in layer.buffers() if t.is_floating_point()], floats[1])
    with pytest.raises(SketchMismatchError, match=f"is not the sketch of seed {layer.seed}: copy parameters and all"):
        layer(x)


def test_states_with_damaged_codes_are_refused_by_name():
    """A soup of two models whose integers were rounded again."""
    layers = [QuantizedLinear.from_linear(nn.Linear(64, 48), 4) for _ in range(2)]
    states = [nn.Sequential(layer).state_dict() for layer in layers]
    soup = {key: ((value + states[1][key]) / 2).to(value.dtype) for key, value in states[0].items()}
    part = states[0] | {"0.codes": states[1]["0.codes"]}
    for state in (soup, part):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"QuantizedLinear '0' has integers .* do not match the checksum"):
                nn.Sequential(QuantizedLinear(64, 48)).load_state_dict(state, strict=strict)


INTEGERS = QUANTIZED | SKETCHED | {"interpolative": (maker(InterpolativeLinear, 64, 48, 5), torch.ones(3, 64))}


def cast_floats(state, dtype):
    return {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in state.items()}


@every(INTEGERS)
@pytest.mark.parametrize("weight", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_soups_of_floating_tensors_are_refused(make, x, weight, dtype):
    """People average the floating tensors of two runs and keep the integers of one of them."""
    model, (one, two) = nn.Sequential(make(2)), [nn.Sequential(make(seed)).state_dict() for seed in (0, 1)]
    expected = model(x)
    soup = {k: (1 - weight) * v + weight * two[k] if v.is_floating_point() else v for k, v in one.items()}
    for strict in (True, False):
        with pytest.raises(SketchMismatchError, match="layer '0': the floating tensors do not belong to the seed or"):
            model.load_state_dict(cast_floats(soup, dtype), strict=strict)
        assert torch.equal(model(x), expected)
    model.load_state_dict(cast_floats(one, dtype))


@every(INTEGERS)
def test_averages_of_one_run_have_its_mark(make, x):
    model = nn.Sequential(make(0))
    state = mean = copy.deepcopy(model.state_dict())
    for _ in range(1000):
        mean = {k: 0.99 * v + 0.01 * state[k] if v.is_floating_point() else v for k, v in mean.items()}
    expected = model(x)
    model.load_state_dict(mean)
    assert torch.allclose(model(x), expected, rtol=0.1, atol=0.1)
    del state["0.record_mark"]
    model.load_state_dict(state)  # as earlier versions saved it
    assert torch.equal(model(x), expected)


def by_names(model, state, tmp_path):
    """Set each tensor of a state in the module that it names, as accelerate's set_module_tensor_to_device does."""
    for name, value in state.items():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        tensors = module._parameters if key in module._parameters else module._buffers
        assert key in tensors
        tensors[key] = nn.Parameter(value) if key in module._parameters else value


@every(INTEGERS)
def test_soups_that_are_set_by_name_are_refused(make, x, tmp_path):
    model, (one, two) = nn.Sequential(make(2)), [nn.Sequential(make(seed)).state_dict() for seed in (0, 1)]
    by_names(model, {k: (v + two[k]) / 2 if v.is_floating_point() else v for k, v in one.items()}, tmp_path)
    for use in (model, lambda x: torch.func.functional_call(model, model.state_dict(), (x,))):
        with pytest.raises(SketchMismatchError, match="the floating tensors do not belong to the seed or"):
            use(x)


def by_torch_checkpoint(model, state, tmp_path):
    set_model_state_dict(model, get_model_state_dict(model))
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    target = model.state_dict()
    dcp.load(target, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(target)


def by_safetensors(model, state, tmp_path):
    source = copy.deepcopy(model)
    source.load_state_dict(state)
    safetensors.torch.save_model(source, tmp_path / "model.safetensors")
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")


@every(INTEGERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("load", [by_names, by_torch_checkpoint, by_safetensors])
def test_other_loaders_find_the_mark(make, x, load, tmp_path):
    model, source = nn.Sequential(make(1)), nn.Sequential(make(0))
    model(x)
    load(model, source.state_dict(), tmp_path)
    assert torch.equal(model(x), source(x))
    assert torch.allclose(torch.func.functional_call(model, source.state_dict(), (x,)), source(x), rtol=1e-4, atol=1e-5)
    assert model.state_dict().keys() == source.state_dict().keys()


def test_states_of_earlier_versions_have_no_checksum():
    source, layer = LAYERS["int3+low_rank"].layer(0), LAYERS["int3+low_rank"].layer(1)
    x, state = LAYERS["int3+low_rank"].x(3), source.state_dict()
    state["record"] = torch.tensor([3, 30, 2], dtype=torch.int32)
    del state["record_mark"]
    layer.load_state_dict(state)
    assert torch.equal(layer(x), source(x))
    assert torch.equal(layer.record, source.record)
    layer = LAYERS["int3+low_rank"].layer(1)
    copy_all(layer.state_dict().values(), [state.get(name, torch.zeros(())) for name in layer.state_dict()])
    assert torch.equal(layer(x), source(x))


def test_codes_that_are_assigned_are_shared():
    """As a head shares the codes of a table."""
    torch.manual_seed(0)
    table, head = QuantizedEmbedding(10, 24, bits=4), QuantizedLinear(24, 10, 4, bias=False)
    for key in ("codes", "zeros", "scales"):
        setattr(head, key, getattr(table, key))
    assert torch.equal(head.weight, table.weight)
    head.codes.add_(1)
    for layer in (head, table):
        with pytest.raises(SketchMismatchError, match="do not match the checksum"):
            layer.state_dict()


def test_experts_are_checked():
    torch.manual_seed(0)
    layer, x = QuantizedExperts(4, 24, 16, bits=4), torch.randn(3, 24)
    layer(x, 2)
    layer.state_dict()["codes"].sub_(1)
    for use in (lambda: layer(x, 2), lambda: layer[1], lambda: layer.transpose(-2, -1)[0]):
        with pytest.raises(SketchMismatchError, match="do not match the checksum"):
            use()


def test_a_record_of_linear_attention_is_saved_as_it_computes():
    """An average rounds the window, and the file could not be loaded."""
    kind = LAYERS["attention learned"]
    layer, other = kind.layer(), kind.make(*kind.sizes, num_features=6, window=9)
    layer.record.sub_(1)
    kind.layer(1).load_state_dict(layer.state_dict())
    layer.record.copy_(other.record)
    with pytest.raises(SketchMismatchError, match="'1': its record was written in place and was saved with window=9"):
        nn.Sequential(nn.Identity(), layer).state_dict()
