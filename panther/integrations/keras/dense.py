"""SKDense, a dense layer whose kernel is a sum of sketched low-rank terms."""

__all__ = ["SKDense"]

from typing import Any, ClassVar, Self

from panther.errors import check_size, require_extra
from panther.integrations.keras.layer import SketchedLayer
from panther.nn.protocol import CompressedModule, allowed_layers
from panther.nn.sketch_sizes import default_low_rank

keras: Any = require_extra("keras", "keras")


@keras.saving.register_keras_serializable("panther")
class SKDense(SketchedLayer):
    r"""A ``keras.layers.Dense`` with a sketched kernel: :class:`panther.nn.SKLinear` in Keras.

    .. math:: y = f(x W + b), \qquad W = \frac{1}{2L} \sum_{i=1}^{L} (S_{1,i} U_{1,i} + U_{2,i} S_{2,i})

    The sketches of a seed equal the sketches of :class:`~panther.nn.SKLinear` bit for bit, and :meth:`from_torch` and
    :meth:`to_torch` convert between the layers. ``.keras`` and ``.weights.h5`` files hold the seed instead of the
    sketches; loading a file of weights into a layer with a different seed also sets the seed.

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

    torch_class: ClassVar[Any] = allowed_layers()["SKLinear"]
    dense_name = "keras.layers.Dense"

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
        super().__init__(
            sizes, num_terms, low_rank, sketch_size, activation=activation, use_bias=use_bias,
            bias_initializer=bias_initializer, fitted=fitted, seed=seed, **options,
        )  # fmt: skip
        self.units = check_size("units", units, least=1)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Make the weights for the last size of an input."""
        inputs = check_size("the last size of the input", input_shape[-1], least=1)
        R = self._set_size(default_low_rank(inputs, self.units))
        factors, sketches = {"S1": (inputs, R), "S2": (R, self.units)}, {"U1": (R, self.units), "U2": (inputs, R)}
        self._add_weights(factors, sketches, fan_in=inputs, fan_out=self.units, outputs=self.units)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})

    def call(self, inputs: Any) -> Any:
        """Map ``(batch, *, in)`` to ``(batch, *, units)``."""
        ops = keras.ops
        left, right = ops.matmul(inputs, self.S1), ops.matmul(inputs, self.U2)
        outputs = ops.matmul(left * self.scale, self.U1) + ops.matmul(right * self.scale, self.S2)
        return self._activate(outputs, (self.units,))

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
            layer: A layer on any device, seeded (packed too) or fitted.
            **options: Arguments of the constructor besides the sizes, such as ``activation`` and ``name``.

        Raises:
            TypeError: If ``layer`` is not exactly an :class:`~panther.nn.SKLinear`; a sharded layer is not.
            ValueError: If the backend does not support its dtype. JAX does not support float64 by default.

        Example:
            >>> import torch, numpy as np, panther as pr
            >>> linear = pr.nn.SKLinear(64, 48, 4)
            >>> layer = SKDense.from_torch(linear, activation="relu")
            >>> torch.equal(layer.to_torch().S1, linear.S1)
            True
        """
        keras_layer = cls._from_sizes_of(layer, layer.out_features, **options)
        keras_layer.build((None, layer.in_features))
        return keras_layer._copy_from_torch(layer)

    def to_torch(self) -> CompressedModule:
        """Return the :class:`~panther.nn.SKLinear` with these weights, copied, on the CPU; it has no activation.

        Raises:
            ValueError: If the layer is not built yet.
        """
        options = self._torch_options()  # raises an error if there are no weights yet
        layer: CompressedModule = self.torch_class(self.S1.shape[0], self.units, **options)
        return self._copy_to_torch(layer)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return super().get_config() | {"units": self.units}
