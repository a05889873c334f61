"""The statistics of a model that planning needs: tensors, flops, saved activations, and traffic when it is sharded."""

__all__ = ["ModelStats"]

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from panther.distributed.advisor.layer_stats import LayerStats, Measured, TensorStats
from panther.distributed.advisor.measured import measure, measure_transformer
from panther.errors import ShapeError, check_size


@dataclass(frozen=True)
class ModelStats:
    """The statistics of a model on one rank, for :func:`plan_parallelism`. Use :meth:`of` or :meth:`transformer`.

    Activations are the tensors that torch's CPU operations save. For example, attention with dropout saves its matrix
    of weights on the CPU, and a fused kernel on a GPU does not.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from panther.nn import SKLinear
        >>> model = nn.Sequential(
        ...     SKLinear(256, 256, 4), nn.ReLU(), nn.Linear(256, 2)
        ... )
        >>> stats = ModelStats.of(model, torch.ones(8, 256))
        >>> stats.num_parameters
        2818
        >>> [int(layer.activations.at(8)) for layer in stats.layers]
        [8320, 8192, 0]
    """

    tensors: tuple[TensorStats, ...]
    """Parameters, buffers and sketches."""
    layers: tuple[LayerStats, ...]
    """Flops, bytes and activations of each layer, in the order of the forward."""
    is_sequential: bool
    """Whether the model is an nn.Sequential of modules that return one tensor, which a pipeline can split."""
    tp: int = 1
    """Number of ranks that share each layer. The figures are for the rank with the largest shards."""
    mixed_precision: str | None = None
    """Dtype of the computation; None is the dtype of the parameters."""
    autocast: bool = False
    """Whether parameters are cast where they are used, as under DDP, instead of gathered in half precision (FSDP2)."""
    activation_checkpointing: str = "none"
    """The tensors that the backward pass recomputes, as in :class:`panther.train.TrainConfig`."""
    has_values: bool = False
    """Whether the model has values, so that every rank holds the entire model before it is sharded."""
    _variant: Callable[[int, bool], "ModelStats"] | None = field(default=None, repr=False, compare=False)
    """A function of the size of the tp axis and of ``autocast`` that returns the statistics of a rank."""

    @property
    def num_parameters(self) -> int:
        """Number of entries of all parameters."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "parameter")

    def shard(self, tp: int) -> "ModelStats":
        """Return the statistics of one of ``tp`` ranks after :func:`tensor_parallel`.

        Raises:
            ShapeError: If these are the statistics of a sharded model.
        """
        if tp == self.tp:
            return self
        if self._variant is None:
            raise ShapeError(
                f"these are the statistics of one of {self.tp} ranks: shard the statistics of the entire model"
            )
        return self._variant(tp, False)

    def under_autocast(self) -> "ModelStats":
        """Return the statistics under autocast, which DDP uses in mixed precision; otherwise return self."""
        if self.mixed_precision is None or self.autocast or self._variant is None:
            return self
        return self._variant(self.tp, True)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample_input: Any,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        mixed_precision: str | None = None,
        activation_checkpointing: str = "none",
    ) -> "ModelStats":
        """Measure a model by running it on fake tensors, which have no values and need no memory.

        Args:
            model: The model, on any device including meta. It is not changed. A model with values starts in full on
                every rank, and a model on the meta device is filled shard by shard.
            sample_input: Input of its forward: a tensor, a tuple of arguments or a mapping of keywords. The batch size
                is the first size of the first tensor, and every tensor with that first size is a batch.
            loss_fn: Computes a scalar from the output, so that the tensors that it saves for backward are counted. None
                sums the output, which saves nothing.
            mixed_precision: ``"bf16"``, ``"fp16"`` or None, as for :func:`data_parallel`; under DDP by autocast.
            activation_checkpointing: The tensors of the model's blocks (the modules of ModuleLists and Sequentials)
                that the backward pass recomputes: ``"none"``, ``"selective"`` or ``"full"``, as in
                :class:`panther.train.TrainConfig`.

        Raises:
            ShapeError: If the sample input has no batch, or the output depends on no trainable parameter.
            ValueError: If ``mixed_precision`` or ``activation_checkpointing`` is unknown.
            ConfigError: If there are no blocks to recompute.

        Cost: two forward and backward passes without arithmetic, at one and two times the batch size, and two more for
        every size of the tp axis, and for DDP in mixed precision.
        """
        _check(mixed_precision, activation_checkpointing)

        def measured(tp: int, autocast: bool) -> Measured:
            return measure(model, sample_input, loss_fn, mixed_precision, tp, autocast, activation_checkpointing)

        has_values = not all(parameter.is_meta for parameter in model.parameters())
        stats = _stats(measured, mixed_precision, activation_checkpointing)
        return replace(stats, has_values=has_values)

    @classmethod
    def transformer(
        cls,
        *,
        hidden: int,
        layers: int,
        heads: int,
        ffn: int | None = None,
        vocab: int,
        sequence: int,
        sketch: int | None = None,
        mixed_precision: str | None = None,
        activation_checkpointing: str = "none",
    ) -> "ModelStats":
        """Return the statistics of a plain pre-norm transformer: embedding, torch's encoder layers, linear head.

        A sample is a sequence of tokens, and the loss is cross-entropy. The model starts on the meta device.

        Args:
            hidden: Width of the hidden states.
            layers: Number of layers, each with attention and a feed-forward block.
            heads: Number of attention heads.
            ffn: Inner width of feed-forward blocks; None is four times ``hidden``.
            vocab: Size of the vocabulary.
            sequence: Number of tokens of a sample.
            sketch: Sketch size R of the layers in feed-forward blocks; None keeps them dense. Attention stays dense.
            mixed_precision: ``"bf16"``, ``"fp16"`` or None, as for :meth:`of`.
            activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``, as for :meth:`of`.

        Raises:
            ShapeError: If a size is not positive, or ``heads`` does not divide ``hidden``.

        Example:
            >>> sizes = dict(hidden=512, layers=2, heads=8, vocab=1000, sequence=16)
            >>> ModelStats.transformer(**sizes).num_parameters
            7329792
            >>> ModelStats.transformer(**sizes, sketch=16).num_parameters
            3299328
        """
        positive = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": vocab, "sequence": sequence}
        for name, value in positive.items():
            check_size(name, value, least=1)
        ffn = check_size("ffn", 4 * hidden if ffn is None else ffn, least=1)
        if hidden % heads:
            raise ShapeError(f"heads={heads} must divide hidden={hidden}")
        _check(mixed_precision, activation_checkpointing)
        sizes: dict[str, Any] = {**positive, "ffn": ffn, "sketch": sketch}
        del sizes["layers"]

        def measured(tp: int, autocast: bool) -> Measured:
            return measure_transformer(
                **sizes,
                mixed_precision=mixed_precision,
                tp=tp,
                autocast=autocast,
                activation_checkpointing=activation_checkpointing,
            )

        # All layers have the same figures, so that a model of one layer is measured.
        return _lengthened(_stats(measured, mixed_precision, activation_checkpointing), layers)


def _stats(
    measured: Callable[[int, bool], Measured], mixed_precision: str | None, activation_checkpointing: str
) -> ModelStats:
    """Return the statistics of the entire model, given what is measured for a size of the tp axis and ``autocast``."""

    @cache
    def variant(tp: int, autocast: bool) -> ModelStats:
        tensors, layers, is_sequential = measured(tp, autocast)
        settings = (mixed_precision, autocast, activation_checkpointing)
        return ModelStats(tensors, layers, is_sequential, tp, *settings, _variant=variant)

    return variant(1, False)


def _check(mixed_precision: str | None, activation_checkpointing: str) -> None:
    if mixed_precision not in (None, "bf16", "fp16"):
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown: use 'bf16', 'fp16' or None")
    if activation_checkpointing not in ("none", "selective", "full"):
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r} is unknown: use 'none', 'selective' or 'full'"
        )


def _lengthened(stats: ModelStats, layers: int) -> ModelStats:
    """Return the statistics of a transformer of ``layers`` layers, given those for a single layer."""
    variant = cast("Callable[[int, bool], ModelStats]", stats._variant)
    # For each module: its index in the model of one layer, and the difference to its index in the long model.
    modules = [(0, 0), *((1, shift) for shift in range(layers)), (2, layers - 1), (3, layers - 1)]

    def place(name: str, shift: int) -> str:
        number, dot, rest = name.partition(".")
        return f"{int(number) + shift}{dot}{rest}"

    return replace(
        stats,
        tensors=tuple(
            replace(t, name=place(t.name, shift), block=place(t.block, shift), layer=number + shift)
            for number, shift in modules
            for t in stats.tensors
            if t.layer == number
        ),
        layers=tuple(replace(stats.layers[number], name=str(number + shift)) for number, shift in modules),
        _variant=cache(lambda tp, autocast: _lengthened(variant(tp, autocast), layers)),
    )
