"""A linear layer that keeps a sketch of its input for the gradient of its weight, a prototype for trial_activations.

The gradient of the weight of a linear layer is :math:`G^T X` for inputs X of N rows and gradients G of the outputs. The
layer keeps the k rows of :math:`S X` in place of X, and computes :math:`(S G)^T (S X)`, whose mean is the gradient
because the mean of :math:`S^T S` is the identity. The gradient of the input does not need X and stays exact. (CompAct,
arXiv:2410.15352, projects the features of the input; here its rows are sketched.)
"""

__all__ = ["ACTIVATIONS", "KINDS", "RowSketch", "SketchedInputLinear", "checkpoint_blocks_", "sketch_activations_"]

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.train.optimizer_methods import BASELINE, METHODS, Method
from benchmarks.train.optimizer_tasks import OptimizerTask

_NNZ = 4  # buckets of a row in an SJLT
_PART = 256  # rows that are added at a time
FRACTIONS = {"a half": 0.5, "a quarter": 0.25, "a tenth": 0.1}


@dataclass(frozen=True)
class RowSketch:
    """A sketch of rows, as the rows and factors that its sums take.

    Attributes:
        size: Number of rows of the sketch.
        buckets: Row of the sketch to which each row is added, ``(nnz, N)``; None if rows are sampled.
        factors: Factors of the rows, ``(nnz, N)``, or of the sampled rows, ``(size, 1)``.
        samples: Sampled rows, ``(size,)``; None if rows are added.
    """

    size: int
    buckets: Tensor | None
    factors: Tensor
    samples: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:  # (N, d) -> (size, d)
        """Return the sketch of rows."""
        if self.samples is not None:
            return rows[self.samples] * self.factors
        assert self.buckets is not None
        sketch = rows.new_zeros(self.size, rows.shape[1])
        # A product of all rows and factors would need as much memory as the rows, at the peak of a forward pass.
        for start in range(0, len(rows), _PART):
            part = slice(start, start + _PART)
            for buckets, factors in zip(self.buckets, self.factors, strict=True):
                sketch.index_add_(0, buckets[part], rows[part] * factors[part, None])
        return sketch


def _hashed(rows: Tensor, size: int, nnz: int) -> RowSketch:
    """Return a sketch that adds each row, with a random sign, to one random row of each of ``nnz`` blocks."""
    nnz = min(nnz, size)
    starts = [size * i // nnz for i in range(nnz + 1)]
    blocks = [torch.randint(low, high, rows.shape[:1]) for low, high in itertools.pairwise(starts)]
    signs = torch.randint(2, (nnz, len(rows)), dtype=rows.dtype).mul_(2).sub_(1) * nnz**-0.5
    return RowSketch(size, torch.stack(blocks), signs)


def _sampled(rows: Tensor, size: int) -> RowSketch:
    """Return a sketch of rows that are drawn with replacement, with probabilities in proportion to their norms."""
    norms = torch.linalg.vector_norm(rows, dim=1)
    weights = norms if norms.sum() > 0 else torch.ones_like(norms)
    samples = torch.multinomial(weights, size, replacement=True)
    probabilities = weights[samples] / weights.sum()
    return RowSketch(size, None, (size * probabilities).rsqrt()[:, None], samples)


KINDS: dict[str, Callable[[Tensor, int], RowSketch]] = {
    "count sketch": lambda rows, size: _hashed(rows, size, 1),
    "SJLT": lambda rows, size: _hashed(rows, size, _NNZ),
    "rows by norm": _sampled,
}
"""Functions of rows and of the size of the sketch, which draw a sketch from torch's default generator."""


class _Sketcher:
    """Sketches of inputs; layers that read the same tensor, such as queries, keys and values, share one."""

    def __init__(self, kind: str, fraction: float) -> None:
        self._draw, self._fraction = KINDS[kind], fraction
        self._last: tuple[weakref.ref[Tensor], int, RowSketch, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[RowSketch, Tensor]:
        if self._last is not None:
            reference, version, sketch, sketched = self._last
            if reference() is x and version == x._version:
                return sketch, sketched
        rows = x.detach().flatten(0, -2)
        sketch = self._draw(rows, max(1, round(self._fraction * len(rows))))
        sketched = sketch(rows)
        self._last = weakref.ref(x), x._version, sketch, sketched
        return sketch, sketched


class _SketchedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sketch: RowSketch, sketched: Tensor
    ) -> Tensor:
        ctx.sketch = sketch
        ctx.save_for_backward(weight, sketched)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, sketched = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if needs_x else None,
            ctx.sketch(rows).mT @ sketched if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )


class SketchedInputLinear(nn.Module):
    """``nn.Linear`` that keeps a sketch of the rows of its input for the gradient of its weight.

    Args:
        layer: The layer, whose weight and bias it takes.
        sketcher: Draws sketches of inputs, and keeps the last one for layers that read the same input.
    """

    def __init__(self, layer: nn.Linear, sketcher: Callable[[Tensor], tuple[RowSketch, Tensor]]) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._sketcher = sketcher

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in)`` to ``(*, out)``."""
        if not torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        product: Tensor = _SketchedProduct.apply(x, self.weight, self.bias, *self._sketcher(x))
        return product


def sketch_activations_(
    model: nn.Module,
    fraction: float,
    kind: str = "count sketch",
    is_included: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """Let the linear layers of a model keep sketches of their inputs.

    Args:
        model: The model, which is changed.
        fraction: Rows of a sketch, as a fraction of the rows of an input.
        kind: A name of ``KINDS``.
        is_included: Whether a layer, by its name, is changed.

    Returns:
        The model.
    """
    sketcher = _Sketcher(kind, fraction)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and is_included(name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, SketchedInputLinear(layer, sketcher))
    return model


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        return output


def checkpoint_blocks_(model: Any, count: int) -> nn.Module:
    """Let the first ``count`` blocks of a model compute their activations again in the backward pass.

    The activations of the later blocks are free by then, so that these blocks lower the peak of the memory.
    """
    for i in range(count):
        model.blocks[i] = _Checkpointed(model.blocks[i])
    changed: nn.Module = model
    return changed


def _with_sketches(task: OptimizerTask, *, fraction: float, kind: str) -> nn.Module:
    return sketch_activations_(task.build(1.0), fraction, kind, task.is_hidden)


def _with_checkpoints(task: OptimizerTask, *, count: int) -> nn.Module:
    return checkpoint_blocks_(task.build(1.0), count)


def _method(name: str, build: Callable[[OptimizerTask], nn.Module]) -> Method:
    return replace(METHODS[BASELINE], name=name, build=build, first_rates=(1.5e-3, 3e-3), most_rates=2, seeds=(0, 1))


ACTIVATIONS = {
    method.name: method
    for method in (
        _method(BASELINE, METHODS[BASELINE].build),
        *(_method(f"checkpointing, {n} of 2 blocks", functools.partial(_with_checkpoints, count=n)) for n in (1, 2)),
        *(
            _method(f"{kind}, {name}", functools.partial(_with_sketches, fraction=fraction, kind=kind))
            for kind in KINDS
            for name, fraction in FRACTIONS.items()
        ),
    )
}
"""Training by AdamW that keeps all activations, computes them again, or keeps sketches, by name."""
