"""A sketched dense layer for Keras 3, in ``keras.ops``: the same code on its backends torch, TensorFlow and JAX.

Importing this module registers the layer, so that ``keras.saving.load_model`` finds it.
"""

__all__ = ["SKDense"]

import math
import random
from typing import Any, Self

import numpy as np
import torch

from panther.errors import MissingExtraError, SketchMismatchError, check_flag, check_size, check_version, require_extra
from panther.nn.protocol import CompressedModule, allowed_layers
from panther.nn.sketch_record import make_record, read_record, recorded_sketch
from panther.nn.sketch_sizes import default_low_rank, terms_and_rank, warn_unless_smaller
from panther.sketch import check_seed, signs

try:
    keras: Any = require_extra("keras", "keras")
except ModuleNotFoundError as error:  # Keras imports its backend, which by default is TensorFlow
    if (_backend := (error.name or "").partition(".")[0]) not in ("tensorflow", "jax", "openvino"):
        raise  # a requirement of Keras itself is missing
    raise MissingExtraError(
        f"Keras is set to a backend that needs {_backend}, which is not installed: install it, or set the "
        "environment variable KERAS_BACKEND to torch, tensorflow or jax, whichever is installed"
    ) from error
check_version("keras", keras.__version__, 3)

_FACTORS, _SKETCHES = ("S1", "S2"), ("U1", "U2")


@keras.saving.register_keras_serializable("panther")
class SKDense(keras.layers.Layer):
    r"""A ``keras.layers.Dense`` with a sketched kernel: :class:`panther.nn.SKLinear` in Keras.

    .. math:: y = f(x W + b), \qquad W = \frac{1}{2L} \sum_{i=1}^{L} (S_{1,i} U_{1,i} + U_{2,i} S_{2,i})

    The sketches of a seed equal those of :class:`~panther.nn.SKLinear` with ``sketch="signs"`` bit for bit, and
    :meth:`from_torch` and :meth:`to_torch` convert between the layers. ``.keras`` and ``.weights.h5`` files hold the
    seed instead of the sketches; loading a file of weights into a layer with a different seed also sets the seed.

    Args:
        units: Size of each output sample.
        *sizes: ``sketch_size``, or ``num_terms`` and ``low_rank``, by position; the largest sketch that costs at most
            half of the dense layer if no size is given.
        num_terms: Number of terms L.
        low_rank: Rank k of each of a term's two halves; R = L k.
        sketch_size: Short for ``num_terms=1, low_rank=sketch_size``.
        activation: As in ``keras.layers.Dense``.
        use_bias: As in ``keras.layers.Dense``.
        bias_initializer: As in ``keras.layers.Dense``.
        fitted: Whether the sketches are trained and saved, too. The weight then has rank 2R, as of two dense layers.
        seed: Seed of the sketches, in ``[0, 2^63)``; None draws one from Python's generator, which
            ``keras.utils.set_random_seed`` seeds.
        **options: Arguments of ``keras.layers.Layer``: ``name``, ``dtype``, ``trainable``.

    Shape:
        Input ``(batch, *, in)``, output ``(batch, *, units)``.

    Attributes:
        S1: Trained factor (in, R), drawn so that W has the variance of Keras' default, ``2 / (in + units)``.
        S2: Trained factor (R, units), drawn with the same variance as S1.
        U1: Sketch (R, units), entries +-1; not trained unless fitted.
        U2: Sketch (in, R), entries +-1; not trained unless fitted.
        bias: Weight (units,), or None.

    Raises:
        ShapeError: If a size is not positive, or both size forms are mixed.
        ValueError: If a seed is given for a fitted layer, or is out of range.

    Warns:
        PerformanceWarning: When built, if the dense layer would not be larger.

    Cost: ``4 R (in + units)`` flops for each row forward; dense, ``2 in units``.

    Example:
        >>> import keras, numpy as np
        >>> layer = SKDense(256, 1, 16, activation="relu", seed=0)
        >>> layer(np.ones((8, 512), "float32")).shape == (8, 256)
        True
        >>> sum(
        ...     int(np.prod(weight.shape)) for weight in layer.trainable_weights
        ... )
        12544
    """

    def __init__(
        self,
        units: int,
        *sizes: int,  # sketch_size alone, or num_terms and low_rank
        num_terms: int | None = None,
        low_rank: int | None = None,
        sketch_size: int | None = None,
        activation: Any = None,
        use_bias: bool = True,
        bias_initializer: Any = "zeros",
        fitted: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._size = terms_and_rank(sizes, num_terms, low_rank, sketch_size)
        check_flag("use_bias", use_bias)
        check_flag("fitted", fitted)
        if fitted and seed is not None:
            raise ValueError(f"fitted=True trains the sketches, and seed={seed} would fix them: leave one out")
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.fitted = fitted
        # Drawn from Python's generator, as Keras draws its seeds, so that keras.utils.set_random_seed seeds it.
        self.seed = None if fitted else check_seed(random.randrange(1 << 63) if seed is None else seed)
        self.supports_masking = True
        self.units = check_size("units", units, least=1)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    @property
    def scale(self) -> float:
        """The number that multiplies the product of factors and sketches."""
        return 1.0 if self.fitted else 1.0 / (2 * self.num_terms * math.sqrt(self.low_rank))

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Make factors, bias and sketches for the last size of an input, with the variance of Keras' default (Glorot).

        The i-th sketch is drawn from stream i of the seed.
        """
        inputs = check_size("the last size of the input", input_shape[-1], least=1)
        self.num_terms = self._size.get("num_terms", 1)
        self.low_rank = self._size.get("low_rank", default_low_rank(inputs, self.units))
        R = self.num_terms * self.low_rank
        factors, sketches = {"S1": (inputs, R), "S2": (R, self.units)}, {"U1": (R, self.units), "U2": (inputs, R)}
        warn_unless_smaller(
            "SKDense", "keras.layers.Dense", f"num_terms={self.num_terms} and low_rank={self.low_rank}",
            sum(math.prod(shape) for shape in (*factors.values(), *sketches.values())), inputs, self.units,
        )  # fmt: skip
        # As in SketchedModule.reset_parameters: the level of both factors and sketches gives U S the same scale.
        level = (2 * self.num_terms) ** -0.5 * self.low_rank**-0.25 if self.fitted else 1.0
        bound = level * math.sqrt(12 * self.num_terms / (inputs + self.units))
        for name, shape in factors.items():
            # A separate initializer for each factor, because an initializer returns the same numbers at every call.
            setattr(self, name, self.add_weight(shape, keras.initializers.RandomUniform(-bound, bound), name=name))
        self.bias = self.add_weight((self.units,), self.bias_initializer, name="bias") if self.use_bias else None
        seed = random.randrange(1 << 63) if self.seed is None else self.seed
        for stream, (name, shape) in enumerate(sketches.items()):
            values = level * draw_signs(seed, stream, *shape)

            def initializer(shape: tuple[int, ...], dtype: str, values: np.ndarray = values) -> Any:
                return keras.ops.convert_to_tensor(values, dtype)

            setattr(self, name, self.add_weight(shape, initializer, trainable=self.fitted, name=name))
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Map ``(batch, *, in)`` to ``(batch, *, units)``."""
        ops = keras.ops
        left, right = ops.matmul(inputs, self.S1), ops.matmul(inputs, self.U2)
        outputs = ops.matmul(left * self.scale, self.U1) + ops.matmul(right * self.scale, self.S2)
        return self.activation(outputs if self.bias is None else outputs + self.bias)

    @property
    def kernel(self) -> Any:  # (in, units)
        """The dense effective kernel, for inspection, computed at each access."""
        return self.scale * (keras.ops.matmul(self.S1, self.U1) + keras.ops.matmul(self.U2, self.S2))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the output for an input of this shape."""
        return (*input_shape[:-1], self.units)

    @classmethod
    def from_torch(cls, layer: Any, **options: Any) -> Self:
        """Return a layer with the weights of a :class:`~panther.nn.SKLinear`, copied, in its mode.

        Args:
            layer: A layer with ``sketch="signs"``, packed or not, or fitted, on any device.
            **options: Arguments of the constructor besides the sizes, such as ``activation`` and ``name``.

        Raises:
            TypeError: If ``layer`` is not exactly an :class:`~panther.nn.SKLinear`; a sharded layer is not.
            ValueError: If its sketches are sparse, or the backend does not support its dtype. JAX does not support
                float64 by default.

        Example:
            >>> import torch, numpy as np, panther as pr
            >>> linear = pr.nn.SKLinear(64, 48, 4, sketch="signs")
            >>> layer = SKDense.from_torch(linear, activation="relu")
            >>> torch.equal(layer.to_torch().S1, linear.S1)
            True
        """
        if type(layer) is not _torch_class():
            raise TypeError(
                f"SKDense.from_torch takes a SKLinear, not {type(layer).__name__}: give a layer that is neither "
                "sharded nor parametrized"
            )
        if layer.sketch != "signs":
            raise ValueError(
                "the layer has sparse sketches, and layers of Keras have dense signs: build and train it with "
                'SKLinear(..., sketch="signs")'
            )
        layer_options = {
            "num_terms": layer.num_terms,
            "low_rank": layer.low_rank,
            "use_bias": layer.bias is not None,
            "fitted": layer.is_fitted,
            "seed": layer.seed,
            "dtype": str(layer.dtype).removeprefix("torch."),
        }
        keras_layer = cls(layer.out_features, **layer_options | options)
        keras_layer.build((None, layer.in_features))
        for name in keras_layer._saved_names():
            variable, tensor = getattr(keras_layer, name), getattr(layer, name).detach().cpu()
            holds = keras.backend.standardize_dtype(variable.value.dtype)
            if holds != variable.dtype:  # JAX makes 32 bits of 64, with a warning at most
                raise ValueError(
                    f"{name} is of dtype {variable.dtype}, and the backend holds {holds}: set JAX_ENABLE_X64=1"
                )
            variable.assign((tensor if tensor.dtype == torch.float64 else tensor.float()).numpy())
        return keras_layer

    def to_torch(self) -> CompressedModule:
        """Return the :class:`~panther.nn.SKLinear` with these weights, copied, on the CPU; it has no activation.

        Raises:
            ValueError: If the layer is not built yet.
        """
        if not self.built:
            raise ValueError(f"{self.name} has no weights yet: call it on an input, or build it, before to_torch")
        layer: CompressedModule = _torch_class()(
            self.S1.shape[0], self.units, num_terms=self.num_terms, low_rank=self.low_rank, bias=self.use_bias,
            sketch="signs", seed=self.seed, dtype=getattr(torch, self.variable_dtype),
        )  # fmt: skip
        tensors = {name: torch.tensor(_numpy(getattr(self, name)), dtype=layer.dtype) for name in self._saved_names()}
        if self.fitted:
            layer.set_fitted_({name: tensors[name] for name in _SKETCHES})  # type: ignore[operator]
        with torch.no_grad():
            for name, tensor in tensors.items():
                getattr(layer, name).copy_(tensor)
        return layer

    def save_own_variables(self, store: Any) -> None:
        """Write the weights by name, and the record of the seed in place of seeded sketches."""
        if not self.built:
            return
        for name, values in self._seeded_sketches().items():
            if not np.array_equal(_numpy(getattr(self, name)), values):
                raise SketchMismatchError(
                    f"{name} of {self.path} is not the sketch of seed={self.seed}; it may come from a layer with a "
                    "different seed: build both layers with the same seed"
                )
        store["sketch_seed"] = np.array(make_record(self.seed, self.num_terms), dtype=np.int64)
        for name in self._saved_names():
            store[name] = getattr(self, name)

    def load_own_variables(self, store: Any) -> None:
        """Load all weights, or none if an error is raised; a seeded layer also gets the seed of the file.

        Raises:
            SketchMismatchError: If the record is damaged, or its mode or num_terms differs from the layer's.
            ValueError: If weights are missing or have different shapes, or the layer is not built yet.
        """
        if not self.built:
            raise ValueError(f"{self.name} has no weights yet: call it on an input, or build it, before loading")
        shapes = {name: tuple(getattr(self, name).shape) for name in self._saved_names()}
        saved_shapes = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118  (not always a mapping)
        if saved_shapes != shapes | {"sketch_seed": (4,)}:
            raise ValueError(f"{self.path} has weights of shapes {shapes}, and the file has {saved_shapes}")
        record = torch.tensor(np.asarray(store["sketch_seed"]))
        seed = read_record(record, self.num_terms, f"{self.path}/sketch_seed")
        if recorded_sketch(record) != "signs":
            raise SketchMismatchError(f"{self.path}/sketch_seed is of sparse sketches, and Keras layers have signs")
        # Only a file that was changed can differ here, because files of fitted layers have more weights.
        if (seed is None) is not self.fitted:
            raise SketchMismatchError(
                f"{self.path}/sketch_seed is of a layer with fitted={seed is None}: build this layer so"
            )
        for name in shapes:
            getattr(self, name).assign(store[name])
        if seed != self.seed:
            self.seed = seed
            for name, values in self._seeded_sketches().items():
                getattr(self, name).assign(values)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, including the seed."""
        return super().get_config() | {
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "fitted": self.fitted,
            "seed": self.seed,
            **self._size,
        }

    def _saved_names(self) -> tuple[str, ...]:
        """Return the names of the weights that files hold."""
        return _FACTORS + ("bias",) * self.use_bias + _SKETCHES * self.fitted

    def _seeded_sketches(self) -> dict[str, np.ndarray]:
        """Return the sketches of the seed by name, or an empty dictionary for a fitted layer."""
        if self.seed is None:
            return {}
        shapes = {name: tuple(getattr(self, name).shape) for name in _SKETCHES}
        return {name: draw_signs(self.seed, stream, *shape) for stream, (name, shape) in enumerate(shapes.items())}


def _torch_class() -> Any:
    return allowed_layers()["SKLinear"]


def _numpy(variable: Any) -> np.ndarray:
    """Return the values of a weight, with half precision converted to float32, which torch can read from NumPy."""
    values = np.asarray(keras.ops.convert_to_numpy(variable))
    return values if values.dtype == np.float64 else values.astype(np.float32)


def draw_signs(seed: int, stream: int, rows: int, cols: int) -> np.ndarray:  # (rows, cols), int8
    """Return the first rows and columns of :func:`panther.sketch.signs`.

    Keras also builds layers on torch's meta device, where tensors have no values, so that the CPU is named.
    """
    return signs(seed, stream, range(rows), range(cols), device="cpu").to(torch.int8).numpy()
