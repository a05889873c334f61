"""What planning needs to know of a model: its tensors, flops, what autograd keeps, and what is sent where it is cut."""

__all__ = ["ElementStats", "Line", "ModelStats", "TensorStats"]

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from panther.distributed.advisor._fake_run import Run, fake_inputs, make_fake_, meta_copy, pretended_mesh, run
from panther.distributed.comm._precision import compute_dtype
from panther.distributed.data.blocks import fsdp_blocks
from panther.distributed.tensor.parallelize import tensor_parallel
from panther.errors import PerformanceWarning, ShapeError, check_size
from panther.nn import SKLinear
from panther.nn._sketched import SketchedModule


class Line(NamedTuple):
    """A quantity that grows with the samples of a batch: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Its value for so many samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class TensorStats:
    """A parameter or buffer that one rank holds, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    """``"parameter"``, ``"sketch"`` (of a seeded layer; a fitted one's are parameters) or ``"buffer"``."""
    trained: bool
    element: int
    """Of the model's elements, the one that holds it."""
    block: str
    """What FSDP gathers it with: the name of an element of a ModuleList or Sequential, ``""`` the rest."""
    on_mesh: bool = False
    """Whether tensor parallelism made it a DTensor."""
    whole: int = 0
    """Entries of all ranks' parts together."""

    @property
    def numel(self) -> int:
        """Entries."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ElementStats:
    """A part of the model that a pipeline leaves whole. Flops, and bytes, by samples."""

    name: str
    forward_flops: Line
    backward_flops: Line
    activations: Line
    """What autograd keeps from forward to backward."""
    output: Line
    tp_forward: Line
    """What its cut layers hand to the tp axis, forward."""
    tp_backward: Line
    tp_calls: int
    """All-reduces over the tp axis, forward and backward."""
    keeps_input: bool
    """Whether its input is among ``activations``, rather than among those of the element before."""


@dataclass(frozen=True)
class ModelStats:
    """What a model costs one rank, for :func:`plan_parallelism`. Made by :meth:`of` or :meth:`transformer`.

    Activations are counted as torch's CPU operations keep them: attention with dropout keeps its matrix there, and a
    fused kernel on a GPU does not.

    Example:
        >>> model = nn.Sequential(SKLinear(256, 256, 4), nn.ReLU(), nn.Linear(256, 2))
        >>> stats = ModelStats.of(model, torch.ones(8, 256))
        >>> stats.num_parameters, stats.sketch_elements
        (2818, 2048)
        >>> [int(element.activations.at(8)) for element in stats.elements]
        [8320, 8192, 0]
    """

    tensors: tuple[TensorStats, ...]
    elements: tuple[ElementStats, ...]
    in_sequence: bool
    """Whether a pipeline can cut it: the model is an nn.Sequential."""
    tp: int = 1
    """Ranks that share the layers; the figures are those of one of them, with the largest part."""
    whole: tuple[tuple[str, str], ...] = ()
    """Modules that tensor parallelism leaves whole, and why."""
    mixed_precision: str | None = None
    """What it computes in, if not in the dtype of its parameters."""
    _cut: Callable[[int], "ModelStats"] | None = field(default=None, repr=False, compare=False)

    @property
    def num_parameters(self) -> int:
        """Entries of all parameters."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "parameter")

    @property
    def sketch_elements(self) -> int:
        """Entries of the fixed sketches, which every rank draws."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "sketch")

    @property
    def activation_bytes(self) -> float:
        """What autograd keeps of one more sample."""
        return sum(element.activations.per_sample for element in self.elements)

    def cut(self, tp: int) -> "ModelStats":
        """The figures of one of ``tp`` ranks that share the layers by :func:`tensor_parallel`.

        Raises:
            ShapeError: If the model was cut already.
        """
        if tp == self.tp:
            return self
        if self._cut is None or self.tp != 1:
            raise ShapeError(f"these are the figures of one of {self.tp} ranks: cut those of the whole model")
        return self._cut(tp)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample_input: Any,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        mixed_precision: str | None = None,
    ) -> "ModelStats":
        """Measure a model by running it on tensors without values, which takes neither its weights nor memory.

        Args:
            model: On any device, meta too; it is left as it is.
            sample_input: What forward takes: a tensor, a tuple of arguments or a mapping of keywords. Tensors whose
                first size is that of the first one are taken to be of samples.
            loss_fn: Computes a scalar from the output, so that what it saves for backward is counted. None sums the
                output, which saves nothing.
            mixed_precision: What to compute in, as :func:`data_parallel`'s.

        Raises:
            ShapeError: If the sample input has no batch, or the output depends on no trained parameter.
            ValueError: If ``mixed_precision`` is unknown.

        Cost: two passes without arithmetic, of one and two times the batch, and two more for every size of the tp axis
        that is asked for.
        """
        compute_dtype(mixed_precision)
        known: dict[int, ModelStats] = {}

        def cut(tp: int) -> ModelStats:
            if tp not in known:
                known[tp] = _measure(model, sample_input, loss_fn, mixed_precision, tp, cut)
            return known[tp]

        return cut(1)

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
        """The figures of a plain transformer: an embedding, layers of torch's, normed first, and a linear head.

        A sample is a sequence of tokens, and the loss cross-entropy.

        Args:
            hidden: Width.
            layers: Number of layers, each attention and a feed-forward block.
            heads: Of attention.
            ffn: Width inside feed-forward blocks; None is four times the hidden one.
            vocab: Number of tokens.
            sequence: Tokens of a sample.
            sketch: Sketch size R of the feed-forward blocks' layers; None leaves them dense. Attention stays dense.
            mixed_precision: What to compute in, as :func:`data_parallel`'s.

        Raises:
            ShapeError: If a size is not positive, or the heads do not divide the width.

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
            target = torch.zeros(logits.shape[:2].numel(), dtype=torch.int64, device="cpu")
            return F.cross_entropy(logits.flatten(0, 1), target)

        tokens = torch.empty(1, sequence, dtype=torch.int64, device="meta")
        short = cls.of(model, tokens, loss_fn=loss_fn, mixed_precision=mixed_precision)
        return _lengthened(short, layers) if layers > 2 else short


def _lengthened(stats: ModelStats, layers: int) -> ModelStats:
    """Of a transformer of two layers that of more: all are like the second."""

    def place(name: str, shift: int) -> str:
        head, dot, tail = name.partition(".")
        return f"{int(head) + shift}{dot}{tail}"

    def repeated(items: tuple[Any, ...], of: Callable[[Any], int], moved: Callable[[Any, int], Any]) -> tuple[Any, ...]:
        before = [item for item in items if of(item) < 2]
        after = [moved(item, layers - 2) for item in items if of(item) > 2]
        middle = [moved(item, k) for k in range(layers - 1) for item in items if of(item) == 2]
        return (*before, *middle, *after)

    tensors = repeated(
        stats.tensors,
        lambda t: t.element,
        lambda t, k: replace(t, name=place(t.name, k), block=place(t.block, k), element=t.element + k),
    )
    return replace(
        stats,
        tensors=tensors,
        elements=repeated(stats.elements, lambda e: int(e.name), lambda e, k: replace(e, name=place(e.name, k))),
        whole=repeated(stats.whole, lambda w: int(w[0].partition(".")[0]), lambda w, k: (place(w[0], k), w[1])),
        _cut=lambda tp: _lengthened(stats.cut(tp), layers),
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
    cut: Callable[[int], ModelStats],
) -> ModelStats:
    mode, made, dtype = FakeTensorMode(), meta_copy(model), compute_dtype(mixed_precision)
    with pretended_mesh(tp) if tp > 1 else nullcontext() as mesh:
        placed = tensor_parallel(made, mesh).placements if mesh is not None else ()
        tensors = _tensors(made)
        make_fake_(made, mode, dtype)
        runs = []
        for times in (1, 2):
            inputs, batch = fake_inputs(sample_input, times, mode, dtype)
            runs.append(run(made, _elements(made), inputs, batch, loss_fn, mode))
    return ModelStats(
        tensors,
        tuple(_element(i, name, runs) for i, (name, _) in enumerate(_elements(made))),
        isinstance(model, nn.Sequential),
        tp,
        tuple((entry.name, entry.reason) for entry in placed if entry.action == "replicated"),
        mixed_precision,
        cut,
    )


def _elements(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A Sequential's, as far as no module stands twice, else the model as one."""
    children = list(model._modules.items())
    different = len({id(child) for _, child in children}) == len(children)
    if isinstance(model, nn.Sequential) and children and different:
        return children  # type: ignore[return-value]
    return [("", model)]


def _tensors(model: nn.Module) -> tuple[TensorStats, ...]:
    blocks = {id(inner): name for name, module in _named_blocks(model) for inner in module.modules()}
    elements = {id(m): i for i, (_, element) in enumerate(_elements(model)) for m in element.modules()}
    found, seen = [], set()
    for prefix, module in model.named_modules():
        sketches = module.sketch_names if isinstance(module, SketchedModule) else ()
        held = [(name, p, "parameter") for name, p in module._parameters.items()]
        held += [(name, b, "sketch" if name in sketches else "buffer") for name, b in module._buffers.items()]
        held += [(name, vars(module)[name], "sketch") for name in sketches if name in vars(module)]  # packed
        for name, tensor, role in held:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            found.append(
                TensorStats(
                    name=f"{prefix}.{name}" if prefix else name,
                    shape=tuple(local.shape),
                    itemsize=tensor.itemsize,
                    role=role,
                    trained=role == "parameter" and tensor.requires_grad,
                    element=elements.get(id(module), 0),
                    block=blocks.get(id(module), ""),
                    on_mesh=isinstance(tensor, DTensor),
                    whole=tensor.numel(),
                )
            )
    return tuple(found)


def _named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(block)], block) for block in fsdp_blocks(model)]


def _element(i: int, name: str, runs: list[Run]) -> ElementStats:
    def line(of: Callable[[Run], float]) -> Line:
        first, second = runs
        slope = (of(second) - of(first)) / (second.batch - first.batch)
        return Line(of(first) - slope * first.batch, slope)

    return ElementStats(
        name=name,
        forward_flops=line(lambda done: done.flops[i]),
        backward_flops=line(lambda done: done.backward_flops[i]),
        activations=line(lambda done: done.kept[i]),
        output=line(lambda done: done.output[i]),
        tp_forward=line(lambda done: done.sent[i]),
        tp_backward=line(lambda done: done.backward_sent[i]),
        tp_calls=runs[0].calls[i] + runs[0].backward_calls[i],
        keeps_input=runs[0].keeps_input[i],
    )
