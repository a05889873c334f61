"""Tests of the Keras layers that ``test_keras.py`` runs once for each of Keras' backends, in a process of its own."""

import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from compressed_layers import with_stored_sketches
from tolerances import assert_close
from torch import nn

import panther as pr
from panther.errors import PerformanceWarning, ShapeError, SketchMismatchError
from panther.integrations.keras import SKDense, draw_signs

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":  # before TensorFlow uses its devices
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORED = Path(__file__).parent / "keras_file"


def tensor(output):
    return torch.from_numpy(np.array(keras.ops.convert_to_numpy(keras.ops.cast(output, "float32"))))


def equal_states(layer, other):
    a, b = layer.state_dict(), other.state_dict()
    return list(a) == list(b) and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def test_the_signs_have_the_golden_values():
    """Those of tests/sketch/test_streams.py."""
    rows = ["".join("+" if value > 0 else "-" for value in row[120:152]) for row in draw_signs(0, 0, 2, 152)]
    assert rows == ["++++++++++--+++-+---------++--++", "--+-+--+--++++---+++-+++-+-+-+++"]
    rows = ["".join("+" if value > 0 else "-" for value in row[120:152]) for row in draw_signs(2**63 - 1, 1, 2, 152)]
    assert rows == ["-+++++-+-+++----+-+-++--+-+-+-++", "+-+-+-+--+++--+---+---+--+-+-+-+"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (3, 128), (2, 129), (300, 5), (0, 4), (4, 0)])
@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (2**32, 1), (2**63 - 1, 5)])
def test_the_signs_are_those_of_torch(shape, seed, stream):
    expected = pr.sketch.signs(seed, stream, range(shape[0]), range(shape[1]))
    found = draw_signs(seed, stream, *shape)
    assert found.shape == shape
    assert np.array_equal(found, expected.numpy())


def linears():
    torch.manual_seed(0)
    return {
        "seeded": pr.nn.SKLinear(300, 130, 2, 5, sketch="signs", seed=2**63 - 1),
        "without bias": pr.nn.SKLinear(40, 33, 3, bias=False, sketch="signs", seed=2),
        "packed": pr.nn.SKLinear(64, 96, 8, sketch="signs", packed=True, seed=3),
        "fitted": with_stored_sketches(pr.nn.SKLinear(257, 64, 3, 4)),
        "of one": pr.nn.SKLinear(30, 20, 1, sketch="signs"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", linears())
def test_weights_go_to_sklinear_and_back_exactly(kind, dtype):
    linear = linears()[kind].to(dtype)
    layer = SKDense.from_torch(linear)
    assert layer.seed == linear.seed
    assert layer.fitted == linear.is_fitted
    back = layer.to_torch()
    assert back.packed is False
    assert equal_states(linear, back)
    sketches = linear.draw_sketch if not (linear.is_fitted or linear.packed) else lambda name: getattr(back, name)
    for name in ("U1", "U2"):
        assert torch.equal(tensor(getattr(layer, name)), sketches(name).float())
    assert len(layer.trainable_weights) == len(list(linear.parameters()))
    x = torch.randn(7, 3, linear.in_features).to(dtype)
    exact = back.double()(x.double())
    assert_close(tensor(layer(x.float().numpy())), exact, dtype)
    assert_close(tensor(layer.kernel), back.weight.mT, dtype)


def test_training_has_the_losses_of_torch_and_keeps_the_sketches():
    torch.manual_seed(0)
    first, second = (pr.nn.SKLinear(*sizes, sketch="signs", seed=sizes[-1]) for sizes in ((96, 64, 3), (64, 4, 1)))
    x, y = torch.randn(32, 96), torch.arange(32) % 4
    model = keras.Sequential(
        [keras.layers.Input((96,)), SKDense.from_torch(first, activation="relu"), SKDense.from_torch(second)]
    )
    model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x.numpy(), y.numpy(), batch_size=32, epochs=6, shuffle=False, verbose=0)
    reference = nn.Sequential(first, nn.ReLU(), second).double()
    optimizer = torch.optim.SGD(reference.parameters(), 0.5)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(reference(x.double()), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert np.allclose(history.history["loss"], losses, rtol=1e-5)
    for layer, module in zip(model.layers, (first, second), strict=True):
        trained = layer.to_torch()
        assert trained.seed == module.seed
        for name, parameter in trained.named_parameters():
            assert_close(parameter, module.get_parameter(name), torch.float32)
        assert np.array_equal(tensor(layer.U2), draw_signs(layer.seed, 1, *layer.U2.shape))


def small_model(seed=None):
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 4)),
            keras.layers.Flatten(),
            SKDense(24, 3, activation="gelu", seed=seed),
            SKDense(16, num_terms=2, low_rank=1, fitted=True, use_bias=False),
        ]
    )


INPUTS = np.random.default_rng(0).standard_normal((5, 8, 8, 4), dtype=np.float32)


def test_a_file_holds_the_seed_and_no_sketches(tmp_path):
    model = small_model()
    expected = model.predict(INPUTS, verbose=0)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        layers = json.loads(archive.read("config.json"))["config"]["layers"]
    seeds = [layer["config"]["seed"] for layer in layers if "seed" in layer["config"]]
    assert seeds == [model.layers[1].seed, None]
    store = {}
    model.layers[1].save_own_variables(store)
    assert sorted(store) == ["S1", "S2", "bias", "sketch_seed"]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(INPUTS, verbose=0), expected)
    configs = [[layer.get_config() for layer in each.layers] for each in (loaded, model)]
    assert configs[0] == configs[1]


def test_a_file_of_weights_brings_its_seed(tmp_path):
    model, other = small_model(1), small_model(2)
    expected = model.predict(INPUTS, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert other.layers[1].seed == 1
    assert np.array_equal(other.predict(INPUTS, verbose=0), expected)


def test_a_file_that_torch_wrote_on_its_backend_loads_on_all():
    """The file and its outputs are kept: what is saved today is loaded by later versions."""
    model = keras.saving.load_model(STORED / "model.keras")
    expected = torch.from_numpy(np.load(STORED / "expected.npy"))
    assert_close(tensor(model(INPUTS)), expected, torch.float32)


def test_seeds_are_drawn_from_the_generator_that_keras_seeds():
    keras.utils.set_random_seed(3)
    seeds = [SKDense(4).seed for _ in range(3)]
    keras.utils.set_random_seed(3)
    assert [SKDense(4).seed for _ in range(3)] == seeds
    assert len(set(seeds)) == 3
    model = small_model()
    clone = keras.models.clone_model(model)
    assert clone.layers[1].seed == model.layers[1].seed
    assert np.array_equal(tensor(clone.layers[1].U2), tensor(model.layers[1].U2))


@pytest.mark.parametrize("fitted", [False, True])
def test_a_new_weight_has_the_variance_of_glorot(fitted):
    """The mean square of the 30,720 entries of ten weights of rank 16 deviates by a few percent."""
    squares = []
    for seed in range(10):
        keras.utils.set_random_seed(seed)
        dense = SKDense(192, 2, 4, fitted=fitted)
        dense.build((None, 160))
        squares.append(tensor(dense.kernel).square().mean().item())
    assert np.mean(squares) * (160 + 192) / 2 == pytest.approx(1, abs=0.05)


def test_mixed_precision_computes_in_half_and_keeps_single():
    layer = SKDense(48, 2, 2, dtype="mixed_bfloat16", seed=0)
    output = layer(np.ones((3, 64), np.float32))
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert layer.to_torch().S1.dtype is torch.float32


def test_inputs_of_any_rank_and_shapes_known_before_values():
    layer = SKDense(7, 1)
    symbolic = layer(keras.Input((None, 33)))
    assert symbolic.shape == (None, None, 7) == layer.compute_output_shape((None, None, 33))
    for shape in ((1, 33), (2, 3, 4, 33), (0, 33)):
        assert tuple(layer(np.zeros(shape, np.float32)).shape) == (*shape[:-1], 7)
    default = SKDense(64)
    default.build((None, 64))
    assert default.low_rank == pr.nn.SKLinear(64, 64, sketch="signs").low_rank
    assert "low_rank" not in default.get_config()


def test_records_that_do_not_fit_are_refused(tmp_path):
    layer, other = SKDense(16, 2, seed=1), SKDense(16, 2, seed=2)
    for each in (layer, other):
        each.build((None, 24))
    store = {}
    layer.save_own_variables(store)
    store = {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in store.items()}
    first_weights = [tensor(weight) for weight in other.weights]
    changes = [
        ({"sketch_seed": store["sketch_seed"] + [1, 0, 0, 0]}, SketchMismatchError, "does not match its checksum"),
        ({"S1": store["S1"][1:]}, ValueError, r"has weights of shapes .*'S1': \(24, 2\).* file has .*\(23, 2\)"),
        ({"U1": store["S2"]}, ValueError, "and the file has .*'U1'"),
    ]
    for change, error, match in changes:
        with pytest.raises(error, match=match):
            other.load_own_variables(store | change)
    with pytest.raises(ValueError, match="has no weights yet: call it on an input"):
        SKDense(16, 2).load_own_variables(store)
    assert other.seed == 2
    assert all(torch.equal(tensor(weight), old) for weight, old in zip(other.weights, first_weights, strict=True))
    other.set_weights(layer.get_weights())
    with pytest.raises(SketchMismatchError, match=r"U1 of .* is not the sketch of seed=2"):
        other.save_own_variables({})


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: SKDense(0), ShapeError, "units=0 must be at least 1"),
        (lambda: SKDense(4, num_terms=2), ShapeError, "num_terms=2: give either sketch_size"),
        (lambda: SKDense(4, 2, fitted=True, seed=3), ValueError, "fitted=True trains the sketches.*seed=3"),
        (lambda: SKDense(4, 2, seed=-1), ValueError, r"seed=-1 must be in \[0, 2\^63\)"),
        (lambda: SKDense(4, 2, use_bias="no"), TypeError, "use_bias must be True or False"),
        (lambda: SKDense(4, 2).to_torch(), ValueError, "has no weights yet: call it on an input"),
        (lambda: SKDense.from_torch(nn.Linear(4, 4)), TypeError, "takes a SKLinear, not Linear"),
        (lambda: SKDense(4, 2).build((2, None)), TypeError, "last size of the input must be an integer, not NoneType"),
    ],
)
def test_bad_input_is_one_sentence(make, error, match):
    with pytest.raises(error, match=match) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_layer_that_saves_nothing_warns():
    with pytest.warns(PerformanceWarning, match=r"SKDense with num_terms=1 .* or keras\.layers\.Dense"):
        SKDense(4, 4).build((None, 4))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64:UserWarning")
@pytest.mark.skipif(BACKEND != "jax", reason="others hold float64")
def test_jax_says_how_to_hold_float64():
    with pytest.raises(ValueError, match="S1 is of dtype float64, and the backend holds float32: set JAX_ENABLE_X64=1"):
        SKDense.from_torch(pr.nn.SKLinear(30, 20, 2, sketch="signs", dtype=torch.float64))


@pytest.mark.skipif(BACKEND == "jax", reason="JAX holds float32 by default")
def test_float64_is_exchanged_exactly():
    linear = pr.nn.SKLinear(30, 20, 2, sketch="signs", dtype=torch.float64)
    assert equal_states(linear, SKDense.from_torch(linear).to_torch())


def trained(batch=16):
    """A model, and its losses."""
    keras.utils.set_random_seed(0)
    model = small_model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(1).standard_normal((64, 8, 8, 4), dtype=np.float32)
    y = np.random.default_rng(2).standard_normal((64, 16), dtype=np.float32)
    return model, model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0).history["loss"]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a strategy of TensorFlow")
def test_two_devices_of_mirrored_strategy_have_the_losses_of_one(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        model, found = trained()
    _, expected = trained()
    assert expected[-1] < 0.9 * expected[0]
    assert np.allclose(found, expected, rtol=1e-5)
    layer = model.layers[1]
    replicas = layer.U1.value.values
    assert len(replicas) == 2
    for replica in replicas:
        assert np.array_equal(replica.numpy(), draw_signs(layer.seed, 0, *layer.U1.shape))
    model.save(tmp_path / "model.keras")  # in one process, without the strategy
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert np.allclose(again.predict(INPUTS, verbose=0), model.predict(INPUTS, verbose=0), atol=1e-6)


@pytest.mark.skipif(BACKEND != "jax", reason="a distribution of JAX")
def test_two_devices_of_jax_have_the_losses_of_one():
    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        _, found = trained()
    finally:
        keras.distribution.set_distribution(None)
    _, expected = trained()
    assert np.allclose(found, expected, rtol=1e-5)
