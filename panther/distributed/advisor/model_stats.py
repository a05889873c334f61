"""The statistics of a model that planning needs: tensors, flops, saved activations, and traffic when it is sharded."""

__all__ = ["LayerStats", "Line", "ModelStats", "TensorStats"]

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from panther.distributed.advisor._fake_run import Run, fake_inputs, fake_mesh, make_fake_, meta_copy, run
from panther.distributed.data.blocks import fsdp_blocks
from panther.distributed.data.strategies import compute_dtype
from panther.distributed.tensor.parallelize import tensor_parallel
from panther.errors import PerformanceWarning, ShapeError, check_size
from panther.nn import SKLinear
from panther.nn._sketched import SketchedModule


class Line(NamedTuple):
    """A quantity that is linear in the number of samples: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return its value for a number of samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class TensorStats:
    """A parameter or buffer of one rank, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    """``"parameter"``, ``"sketch"`` (of a seeded layer; those of a fitted layer are parameters) or ``"buffer"``."""
    trained: bool
    layer: int
    """Index of the layer that holds it, in ``ModelStats.layers``."""
    block: str
    """Name of the block that FSDP gathers it with; ``""`` for parameters outside of all blocks."""
    on_mesh: bool = False
    """Whether tensor parallelism made it a DTensor."""
    global_numel: int = 0
    """Number of entries over all ranks of the tp axis."""

    @property
    def numel(self) -> int:
        """Number of entries on this rank."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes on this rank."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class LayerStats:
    """A layer that a pipeline does not split, with flops and bytes as functions of the number of samples."""

    name: str
    flops: Line
    """Flops of the forward and backward pass."""
    activations: Line
    """Bytes that autograd saves for the backward pass."""
    output: Line
    tp_bytes: Line
    """Bytes that its sharded layers reduce over the tp axis, forward and backward."""
    tp_calls: int
    """Number of these reductions."""
    saves_input: bool
    """Whether ``activations`` include its input; otherwise those of the layer before do."""


@dataclass(frozen=True)
class ModelStats:
    """What a model costs one rank, for :func:`plan_parallelism`. Made by :meth:`of` or :meth:`transformer`.

    Activations are counted as torch's CPU operations save them. For example, attention with dropout saves its matrix of
    weights there, which a fused kernel on a GPU does not.

    Example:
        >>> model = nn.Sequential(SKLinear(256, 256, 4), nn.ReLU(), nn.Linear(256, 2))
        >>> stats = ModelStats.of(model, torch.ones(8, 256))
        >>> stats.num_parameters, stats.num_sketch_entries
        (2818, 2048)
        >>> [int(layer.activations.at(8)) for layer in stats.layers]
        [8320, 8192, 0]
    """

    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    is_sequential: bool
    """Whether the model is an nn.Sequential, which a pipeline can split."""
    tp: int = 1
    """Number of ranks that share each layer. The figures are those of the rank with the largest shards."""
    mixed_precision: str | None = None
    """Dtype of the computation; None is that of the parameters."""
    tokens_per_sample: int | None = None
    """Number of tokens of a sample; None if the input is not a batch of rows of integers."""
    _shard: Callable[[int], "ModelStats"] | None = field(default=None, repr=False, compare=False)

    @property
    def num_parameters(self) -> int:
        """Number of entries of all parameters."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "parameter")

    @property
    def num_sketch_entries(self) -> int:
        """Number of entries of the seeded sketches, which every rank draws itself."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "sketch")

    def shard(self, tp: int) -> "ModelStats":
        """Return the statistics of one of ``tp`` ranks after :func:`tensor_parallel`.

        Raises:
            ShapeError: If these are the statistics of a sharded model.
        """
        if tp == self.tp:
            return self
        if self._shard is None:
            raise ShapeError(f"these are the statistics of one of {self.tp} ranks: shard those of the whole model")
        return self._shard(tp)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample_input: Any,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        mixed_precision: str | None = None,
    ) -> "ModelStats":
        """Measure a model by running it on fake tensors, which have no values and need no memory.

        Args:
            model: The model, on any device including meta. It is not changed.
            sample_input: Input of its forward: a tensor, a tuple of arguments or a mapping of keywords. The batch size
                is the first size of the first tensor, and every tensor with that first size is a batch.
            loss_fn: Computes a scalar from the output, so that what it saves for backward is counted. None sums the
                output, which saves nothing.
            mixed_precision: ``"bf16"``, ``"fp16"`` or None, as for :func:`data_parallel`.

        Raises:
            ShapeError: If the sample input has no batch, or the output depends on no trainable parameter.
            ValueError: If ``mixed_precision`` is unknown.

        Cost: two forward and backward passes without arithmetic, at one and two times the batch size, and two more for
        every size of the tp axis.
        """
        compute_dtype(mixed_precision)
        measure = cache(partial(_measure, model, sample_input, loss_fn, mixed_precision))
        return replace(measure(1), _shard=measure)

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
    ) -> "ModelStats":
        """Return the statistics of a plain pre-norm transformer: embedding, torch's encoder layers, linear head.

        A sample is a sequence of tokens, and the loss is cross-entropy.

        Args:
            hidden: Width of the hidden states.
            layers: Number of layers, each with attention and a feed-forward block.
            heads: Number of attention heads.
            ffn: Inner width of feed-forward blocks; None is four times ``hidden``.
            vocab: Size of the vocabulary.
            sequence: Number of tokens of a sample.
            sketch: Sketch size R of the layers in feed-forward blocks; None keeps them dense. Attention stays dense.
            mixed_precision: ``"bf16"``, ``"fp16"`` or None, as for :func:`data_parallel`.

        Raises:
            ShapeError: If a size is not positive, or ``heads`` does not divide ``hidden``.

        Example:
            >>> sizes = dict(hidden=512, layers=2, heads=8, vocab=1000, sequence=16)
            >>> ModelStats.transformer(**sizes).num_parameters
            7329792
            >>> ModelStats.transformer(**sizes, sketch=16).num_parameters
            3299328
        """
        given = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": vocab, "sequence": sequence}
        for name, value in given.items():
            check_size(name, value, least=1)
        ffn = check_size("ffn", 4 * hidden if ffn is None else ffn, least=1)
        if hidden % heads:
            raise ShapeError(f"heads={heads} must divide hidden={hidden}")
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)
            model = _transformer(hidden, min(layers, 2), heads, ffn, vocab, sketch)

        def loss_fn(logits: Tensor) -> Tensor:
            # Any target will do: only shapes matter.
            target = torch.zeros(logits.shape[:2].numel(), dtype=torch.int64, device="cpu")
            return F.cross_entropy(logits.flatten(0, 1), target)

        tokens = torch.empty(1, sequence, dtype=torch.int64, device="meta")
        # A sample of integers, (1, tokens), says how many tokens a sample has.
        short = cls.of(model, tokens, loss_fn=loss_fn, mixed_precision=mixed_precision)
        # All layers after the second have its figures, so two are measured whatever the number of layers.
        return _lengthened(short, layers) if layers > 2 else short


def _lengthened(stats: ModelStats, layers: int) -> ModelStats:
    """Return the statistics of a longer transformer, from one of two layers: the second one is repeated."""
    # The modules in order: each one's number in the short model, and by how much its own number is larger.
    modules = [(0, 0), (1, 0), *((2, shift) for shift in range(layers - 1)), (3, layers - 2), (4, layers - 2)]

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
        _shard=cache(lambda tp: _lengthened(stats.shard(tp), layers)),
    )


def _transformer(hidden: int, layers: int, heads: int, ffn: int, vocab: int, sketch: int | None) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(vocab, hidden))
    for _ in range(layers):
        layer = nn.TransformerEncoderLayer(
            hidden, heads, ffn, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        if sketch is not None:
            layer.linear1 = SKLinear(hidden, ffn, sketch)  # type: ignore[assignment]
            layer.linear2 = SKLinear(ffn, hidden, sketch)  # type: ignore[assignment]
        model.append(layer)
    return model.append(nn.LayerNorm(hidden)).append(nn.Linear(hidden, vocab, bias=False))


def _measure(
    model: nn.Module,
    sample_input: Any,
    loss_fn: Callable[[Any], Tensor] | None,
    mixed_precision: str | None,
    tp: int,
) -> ModelStats:
    # On the meta device and then fake: sharding needs a module with shapes, running one with fake values.
    mode, made, dtype = FakeTensorMode(), meta_copy(model), compute_dtype(mixed_precision)
    with fake_mesh(tp) if tp > 1 else nullcontext() as mesh:
        if mesh is not None:
            tensor_parallel(made, mesh)
        tensors = _tensors(made)
        make_fake_(made, mode, dtype)
        runs = []
        # Two batch sizes determine the line fixed + per_sample * samples.
        for times in (1, 2):
            inputs, batch = fake_inputs(sample_input, times, mode, dtype)
            runs.append(run(made, _layers_of(made), inputs, batch, loss_fn, mode))
    return ModelStats(
        tensors,
        tuple(_layer(i, name, *runs) for i, (name, _) in enumerate(_layers_of(made))),
        isinstance(model, nn.Sequential),
        tp,
        mixed_precision,
        _tokens_of(sample_input),
    )


def _tokens_of(sample_input: Any) -> int | None:
    """Return the row length of the first tensor if it is a matrix of integers."""
    first = next(leaf for leaf in tree_leaves(sample_input) if isinstance(leaf, Tensor))
    return len(first[0]) if first.dim() == 2 and not (first.is_floating_point() or first.is_complex()) else None


def _layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a Sequential in which none occurs twice; of any other model the model as one layer."""
    children = list(model._modules.items())
    # A module that occurs twice would be counted in both places.
    different = len({id(child) for _, child in children}) == len(children)
    if isinstance(model, nn.Sequential) and children and different:
        return children  # type: ignore[return-value]
    return [("", model)]


def _tensors(model: nn.Module) -> tuple[TensorStats, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {id(inner): names[id(block)] for block in fsdp_blocks(model) for inner in block.modules()}
    layers = {id(m): i for i, (_, layer) in enumerate(_layers_of(model)) for m in layer.modules()}
    found, seen = [], set()
    for prefix, module in model.named_modules():
        sketches = module.sketch_names if isinstance(module, SketchedModule) else ()
        held = [(name, p, "parameter") for name, p in module._parameters.items()]
        held += [(name, b, "sketch" if name in sketches else "buffer") for name, b in module._buffers.items()]
        # Packed signs are plain attributes of the module, not buffers.
        held += [(name, vars(module)[name], "sketch") for name in sketches if name in vars(module)]
        for name, tensor, role in held:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            # Private, but to_local() is differentiable and records what is only looked at here.
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            found.append(
                TensorStats(
                    name=f"{prefix}.{name}" if prefix else name,
                    shape=tuple(local.shape),
                    itemsize=tensor.itemsize,
                    role=role,
                    trained=role == "parameter" and tensor.requires_grad,
                    layer=layers.get(id(module), 0),
                    block=blocks.get(id(module), ""),
                    on_mesh=isinstance(tensor, DTensor),
                    global_numel=tensor.numel(),
                )
            )
    return tuple(found)


def _layer(i: int, name: str, first: Run, second: Run) -> LayerStats:
    def line(count: str) -> Line:
        at_first, at_second = float(getattr(first, count)[i]), float(getattr(second, count)[i])
        slope = (at_second - at_first) / (second.batch - first.batch)
        return Line(at_first - slope * first.batch, slope)

    return LayerStats(
        name=name,
        flops=line("flops"),
        activations=line("activations"),
        output=line("output"),
        tp_bytes=line("tp_bytes"),
        tp_calls=int(first.tp_calls[i]),
        saves_input=first.saves_input[i],
    )
