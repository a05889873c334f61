"""The base of the sketched Keras layers: the seed, the two modes, files, and the exchange of weights with torch.

*Seeded*: the sketches are weights that are not trained, and files hold the seed instead of the sketches. *Fitted*: the
sketches are trained and saved like other weights. Files contain the same record ``sketch_seed`` as in
:mod:`panther.nn`.
"""

__all__ = ["SketchedLayer"]

import math
import random
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch

from panther.errors import SketchMismatchError, check_flag, require_extra
from panther.integrations.keras.philox import draw_signs
from panther.nn.sketch_record import make_record, read_record
from panther.nn.sketch_sizes import terms_and_rank, warn_unless_smaller
from panther.sketch import check_seed

keras: Any = require_extra("keras", "keras")

Shape = tuple[int, ...]


class SketchedLayer(keras.layers.Layer):
    """Base of sketched layers: a subclass names its torch class, factors and sketches, and defines ``call``."""

    torch_class: ClassVar[Any]
    """The sketched layer of torch, whose weights this layer takes and gives."""

    dense_name: ClassVar[str]
    """Name of the Keras layer that this one replaces."""

    torch_axes: ClassVar[dict[str, Shape]] = {}
    """Axes of the torch layer's factor in the order of this layer, for factors whose order of axes differs."""

    seed: int | None
    """The seed of a seeded layer, None for a fitted one."""

    num_terms: int
    low_rank: int
    groups: int = 1

    def __init__(
        self,
        sizes: tuple[int, ...],
        num_terms: int | None,
        low_rank: int | None,
        sketch_size: int | None,
        *,
        activation: Any,
        use_bias: bool,
        bias_initializer: Any,
        fitted: bool,
        seed: int | None,
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

    @property
    def scale(self) -> float:
        """The number that multiplies the product of factors and sketches."""
        return 1.0 if self.fitted else 1.0 / (2 * self.num_terms * math.sqrt(self.low_rank))

    def _add_weights(
        self, factors: Mapping[str, Shape], sketches: Mapping[str, Shape], fan_in: int, fan_out: int, outputs: int
    ) -> None:
        """Make factors, bias and sketches; the weight has the variance of Keras' default initializer (Glorot).

        Args:
            factors: Shapes of the factors by name.
            sketches: Shapes of the sketches by name; the i-th sketch is drawn from stream i of the seed.
            fan_in: Number of inputs that an output is a sum over.
            fan_out: Number of outputs that an input contributes to.
            outputs: Number of outputs.
        """
        warn_unless_smaller(
            type(self).__name__, self.dense_name, f"num_terms={self.num_terms} and low_rank={self.low_rank}",
            sum(math.prod(shape) for shape in (*factors.values(), *sketches.values())), fan_in, outputs,
        )  # fmt: skip
        self._factors, self._sketches = tuple(factors), tuple(sketches)
        # As in SketchedModule.reset_parameters: the level of both factors and sketches gives U S the same scale.
        level = (2 * self.num_terms) ** -0.5 * self.low_rank**-0.25 if self.fitted else 1.0
        bound = level * math.sqrt(12 * self.num_terms * self.groups / (fan_in + fan_out))
        for name, shape in factors.items():
            # A separate initializer for each factor, because an initializer returns the same numbers at every call.
            setattr(self, name, self.add_weight(shape, keras.initializers.RandomUniform(-bound, bound), name=name))
        self.bias = self.add_weight((outputs,), self.bias_initializer, name="bias") if self.use_bias else None
        seed = random.randrange(1 << 63) if self.seed is None else self.seed
        for stream, (name, shape) in enumerate(sketches.items()):
            values = level * draw_signs(seed, stream, *shape)

            def initializer(shape: Shape, dtype: str, values: np.ndarray = values) -> Any:
                return keras.ops.convert_to_tensor(values, dtype)

            setattr(self, name, self.add_weight(shape, initializer, trainable=self.fitted, name=name))
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Write the weights by name, and the record of the seed in place of seeded sketches."""
        if not self.built:
            return
        for name, signs in self._seeded_sketches().items():
            if not np.array_equal(_numpy(getattr(self, name)), signs):
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
        seed = read_record(torch.tensor(np.asarray(store["sketch_seed"])), self.num_terms, f"{self.path}/sketch_seed")
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

    @classmethod
    def _from_sizes_of(cls, layer: Any, *sizes: Any, **options: Any) -> Self:
        """Return a layer with the sizes, the mode and the dtype of a torch layer, not built yet."""
        if type(layer) is not cls.torch_class:
            raise TypeError(
                f"{cls.__name__}.from_torch takes a {cls.torch_class.__name__}, not {type(layer).__name__}: give a "
                "layer that is neither sharded nor parametrized"
            )
        layer_options = {
            "num_terms": layer.num_terms,
            "low_rank": layer.low_rank,
            "use_bias": layer.bias is not None,
            "fitted": layer.is_fitted,
            "seed": layer.seed,
            "dtype": str(layer.dtype).removeprefix("torch."),
        }
        return cls(*sizes, **layer_options | options)

    def _copy_from_torch(self, layer: Any) -> Self:
        """Copy the weights of a torch layer of the same sizes."""
        for name in self._saved_names():
            variable, tensor = getattr(self, name), getattr(layer, name).detach().cpu()
            holds = keras.backend.standardize_dtype(variable.value.dtype)
            if holds != variable.dtype:  # JAX makes 32 bits of 64, with a warning at most
                raise ValueError(
                    f"{name} is of dtype {variable.dtype}, and the backend holds {holds}: set JAX_ENABLE_X64=1"
                )
            values = (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()
            variable.assign(values.transpose(self.torch_axes.get(name, tuple(range(values.ndim)))))
        return self

    def _copy_to_torch(self, layer: Any) -> Any:
        """Copy the weights to a torch layer of the same sizes, and make it fitted if this layer is."""
        tensors = {}
        for name in self._saved_names():
            values = _numpy(getattr(self, name))
            axes = self.torch_axes.get(name, tuple(range(values.ndim)))
            tensors[name] = torch.tensor(values.transpose(np.argsort(axes)), dtype=layer.dtype)
        if self.fitted:
            layer.set_fitted_({name: tensors[name] for name in self._sketches})
        with torch.no_grad():
            for name, tensor in tensors.items():
                getattr(layer, name).copy_(tensor)
        return layer

    def _torch_options(self) -> dict[str, Any]:
        """Return the arguments that the torch layers share."""
        if not self.built:
            raise ValueError(f"{self.name} has no weights yet: call it on an input, or build it, before to_torch")
        return {
            "num_terms": self.num_terms,
            "low_rank": self.low_rank,
            "bias": self.use_bias,
            "seed": self.seed,
            "dtype": getattr(torch, self.variable_dtype),
        }

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, including the seed."""
        return super().get_config() | {
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "fitted": self.fitted,
            "seed": self.seed,
            **self._size,
        }

    def _set_size(self, default_rank: int) -> int:
        """Set the number of terms and the low rank, whose default depends on the inputs, and return their product R."""
        self.num_terms = self._size.get("num_terms", 1)
        self.low_rank = self._size.get("low_rank", default_rank)
        return self.num_terms * self.low_rank

    def _saved_names(self) -> tuple[str, ...]:
        """Return the names of the weights that files hold."""
        return self._factors + ("bias",) * self.use_bias + self._sketches * self.fitted

    def _seeded_sketches(self) -> dict[str, np.ndarray]:
        """Return the sketches of the seed by name, or an empty dictionary for a fitted layer."""
        if self.seed is None:
            return {}
        shapes = {name: tuple(getattr(self, name).shape) for name in self._sketches}
        return {name: draw_signs(self.seed, stream, *shape) for stream, (name, shape) in enumerate(shapes.items())}

    def _activate(self, outputs: Any, bias_shape: Shape) -> Any:
        """Add the bias and apply the activation."""
        if self.bias is not None:
            # keras.ops.add cannot be used: with TensorFlow, Keras 3.15 adds a bias of shape (n, 1, 1) along the last
            # axis if this axis has n entries too.
            outputs = outputs + keras.ops.reshape(self.bias, bias_shape)
        return self.activation(outputs)


def _numpy(variable: Any) -> np.ndarray:
    """Return the values of a weight, with half precision converted to float32, which torch can read from NumPy."""
    values = np.asarray(keras.ops.convert_to_numpy(variable))
    return values if values.dtype == np.float64 else values.astype(np.float32)
