"""SKConv2D, a convolution whose kernel is a sum of sketched low-rank terms."""

__all__ = ["SKConv2D"]

import math
from typing import Any, ClassVar, Self

from panther.errors import check_size, require_extra
from panther.integrations.keras.layer import SketchedLayer
from panther.nn.conv.padding import padding_sides
from panther.nn.protocol import CompressedModule, allowed_layers
from panther.nn.sketch_sizes import check_padding, default_low_rank, divisible, per_dim

keras: Any = require_extra("keras", "keras")


@keras.saving.register_keras_serializable("panther")
class SKConv2D(SketchedLayer):
    r"""A ``keras.layers.Conv2D`` with a sketched kernel: :class:`panther.nn.SKConv2d` in Keras.

    .. math:: y = f\left(\frac{1}{2L} \sum_{i=1}^{2L} U_i^T (x * S_i) + b\right)

    The layer is a convolution with the kernel ``S`` to ``2 num_terms low_rank`` channels, followed by a product of
    these channels with ``U``. Seeds, modes, files and the exchange with torch are as for :class:`SKDense`.

    Args:
        filters: Channels of the output.
        kernel_size: One integer, or two.
        *sizes: As in :class:`SKDense`.
        strides: As ``kernel_size``.
        padding: ``"valid"`` or ``"same"`` as in ``keras.layers.Conv2D``, or, as in torch, one integer or two: the
            number of zeros on each side.
        data_format: ``"channels_last"`` or ``"channels_first"``; None is Keras' default.
        dilation_rate: As ``kernel_size``; not together with strides, as in Keras.
        groups: Number of groups; U is then block-diagonal.
        num_terms: Number L; there are 2 L terms.
        low_rank: Rank K of a term, divisible by ``groups``.
        sketch_size: Short for ``num_terms=1, low_rank=sketch_size``.
        activation: As in ``keras.layers.Conv2D``.
        use_bias: As in ``keras.layers.Conv2D``.
        bias_initializer: As in ``keras.layers.Conv2D``.
        fitted: As in :class:`SKDense`.
        seed: As in :class:`SKDense`.
        **options: Arguments of ``keras.layers.Layer``.

    Shape:
        Input ``(batch, height, width, in)``, or ``(batch, in, height, width)`` with channels first; output likewise.

    Attributes:
        S: Trained kernel ``(*kernel_size, in / groups, 2 L K)``; the ``S`` of the torch layer, with axes in Keras'
            order.
        U: Sketch ``(2 L K, filters / groups)``, entries +-1; not trained unless fitted.
        bias: Weight (filters,), or None.

    Raises:
        ShapeError: If a size is out of range, or channels or ``low_rank`` are not divisible by ``groups``.
        ValueError: If ``padding`` or ``data_format`` is unknown, or strides come with a dilation.

    Warns:
        PerformanceWarning: When built, if the dense layer would not be larger.

    Cost: ``4 L K (in / groups * kernel + filters / groups)`` flops for each output position, against ``2 in / groups *
    kernel * filters`` dense. The products are always made in these two steps.

    Example:
        >>> import keras, numpy as np
        >>> layer = SKConv2D(
        ...     64, 3, 1, 4, padding="same", data_format="channels_last", seed=0
        ... )
        >>> layer(np.ones((2, 16, 16, 32), "float32")).shape == (2, 16, 16, 64)
        True
    """

    torch_class: ClassVar[Any] = allowed_layers()["SKConv2d"]
    dense_name = "keras.layers.Conv2D"
    torch_axes: ClassVar = {"S": (2, 3, 1, 0)}

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        *sizes: int,  # sketch_size alone, or num_terms and low_rank
        strides: Any = 1,
        padding: Any = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
        groups: int = 1,
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
        self.groups = check_size("groups", groups, least=1)
        self.filters = divisible("filters", filters, self.groups)
        self.kernel_size = per_dim("kernel_size", kernel_size, 2, least=1)
        self.strides = per_dim("strides", strides, 2, least=1)
        self.dilation_rate = per_dim("dilation_rate", dilation_rate, 2, least=1)
        # The "same" of Keras gives outputs of ceil(input / stride), which is the "same_upper" of torch's layers here.
        self.padding = "same" if padding == "same_upper" else check_padding(padding, (1, 1), 2)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ValueError(
                f"strides={self.strides} and dilation_rate={self.dilation_rate}: not all backends of Keras take both, "
                "so one must be 1"
            )
        if "low_rank" in self._size:
            divisible("low_rank", self._size["low_rank"], self.groups)
        self.data_format = keras.config.image_data_format() if data_format is None else data_format
        if self.data_format not in ("channels_last", "channels_first"):
            raise ValueError(f"data_format={data_format!r} is unknown: use 'channels_last' or 'channels_first'")
        self._channels_last = self.data_format == "channels_last"
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Make the weights for the channels of an input."""
        axis = -1 if self._channels_last else 1
        inputs = divisible("the channels of the input", input_shape[axis], self.groups) // self.groups
        positions = math.prod(self.kernel_size)
        fan_in = inputs * positions
        rows = 2 * self._set_size(default_low_rank(fan_in, self.filters, self.groups))
        self._add_weights(
            {"S": (*self.kernel_size, inputs, rows)}, {"U": (rows, self.filters // self.groups)},
            fan_in=fan_in, fan_out=self.filters * positions, outputs=self.filters,
        )  # fmt: skip
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: input_shape[axis]})

    def call(self, inputs: Any) -> Any:
        """Map a batch of images to one with ``filters`` channels."""
        ops, padding, last = keras.ops, self.padding, self._channels_last
        transposed = not last and _needs_channels_last()
        if transposed:
            inputs, last = ops.transpose(inputs, (0, 2, 3, 1)), True
        data_format = "channels_last" if last else "channels_first"
        if not isinstance(padding, str):
            sides = padding_sides(padding, inputs.shape, self.kernel_size, self.strides, self.dilation_rate)
            inputs = ops.pad(inputs, [(0, 0), *sides, (0, 0)] if last else [(0, 0), (0, 0), *sides])
            padding = "valid"
        z = ops.conv(inputs, self.S * self.scale, self.strides, padding, data_format, dilation_rate=self.dilation_rate)
        rows, out = self.U.shape
        mix = ops.reshape(self.U, (self.groups, rows // self.groups, out))
        mix = ops.reshape(ops.transpose(mix, (1, 0, 2)), (1, 1, rows // self.groups, self.filters))
        outputs = ops.conv(z, mix, 1, "valid", data_format)
        if transposed:
            outputs = ops.transpose(outputs, (0, 3, 1, 2))
        return self._activate(outputs, (self.filters,) if self._channels_last else (self.filters, 1, 1))

    @property
    def kernel(self) -> Any:  # (*kernel_size, in / groups, filters)
        """The dense effective kernel, for inspection, computed at each access."""
        ops, (*front, rows), out = keras.ops, self.S.shape, self.U.shape[1]
        S = ops.reshape(self.S, (*front, self.groups, rows // self.groups))
        U = ops.reshape(self.U, (self.groups, rows // self.groups, out))
        return ops.reshape(self.scale * ops.einsum("hwigr,gro->hwigo", S, U), (*front, self.filters))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the output for an input of this shape."""
        batch, *sizes = input_shape
        sizes = sizes[:2] if self._channels_last else sizes[1:]
        output_sizes = [self._output_size(i, size) for i, size in enumerate(sizes)]
        return (batch, *output_sizes, self.filters) if self._channels_last else (batch, self.filters, *output_sizes)

    def _output_size(self, i: int, size: int | None) -> int | None:
        if size is None:
            return None
        span = self.dilation_rate[i] * (self.kernel_size[i] - 1)
        if self.padding == "same":
            span = 0
        elif not isinstance(self.padding, str):
            span -= sum(padding_sides(self.padding, (), self.kernel_size, self.strides, self.dilation_rate)[i])
        return (size - span - 1) // self.strides[i] + 1

    @classmethod
    def from_torch(cls, layer: Any, **options: Any) -> Self:
        """Return a layer with the weights of a :class:`~panther.nn.SKConv2d`, copied, in its mode.

        Args:
            layer: A layer on any device, seeded or fitted, whose ``padding_mode`` is ``"zeros"``.
            **options: Arguments of the constructor besides the sizes, such as ``data_format`` and ``activation``.

        Raises:
            TypeError: If ``layer`` is not exactly a :class:`~panther.nn.SKConv2d`.
            ValueError: If the layer's padding is not zeros, it has both strides and a dilation, or its dtype is not
                supported by the backend.
        """
        if type(layer) is cls.torch_class and layer.padding_mode != "zeros":
            raise ValueError(
                f"padding_mode={layer.padding_mode!r}: SKConv2D pads with zeros, so use padding_mode='zeros'"
            )
        keras_layer = cls._from_sizes_of(
            layer, layer.out_channels, layer.kernel_size, strides=layer.stride, padding=layer.padding,
            dilation_rate=layer.dilation, groups=layer.groups, **options,
        )  # fmt: skip
        keras_layer.build(
            (None, None, None, layer.in_channels)
            if keras_layer._channels_last
            else (None, layer.in_channels, None, None)
        )
        return keras_layer._copy_from_torch(layer)

    def to_torch(self) -> CompressedModule:
        """Return the :class:`~panther.nn.SKConv2d` with these weights, copied, on the CPU; it has no activation.

        Raises:
            ValueError: If the layer is not built yet.
        """
        options = self._torch_options()
        padding = "same_upper" if self.padding == "same" and max(self.strides) > 1 else self.padding
        layer: CompressedModule = self.torch_class(
            self.S.shape[2] * self.groups, self.filters, self.kernel_size, stride=self.strides, padding=padding,
            dilation=self.dilation_rate, groups=self.groups, **options,
        )  # fmt: skip
        return self._copy_to_torch(layer)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        names = ("filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate", "groups")
        return super().get_config() | {name: getattr(self, name) for name in names}


def _needs_channels_last() -> bool:
    # TensorFlow supports channels first on GPUs. On a CPU, it supports them only through oneDNN, which it does not use
    # by default on processors without AVX-512.
    return keras.backend.backend() == "tensorflow" and not keras.distribution.list_devices("gpu")
