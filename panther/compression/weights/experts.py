r"""Stacked weights of experts, as modules of transformers have them, fitted to the tokens of each expert.

A module of experts of transformers multiplies by its parameters in a function, where no hook sees the input of the
second product. Within :meth:`ExpertsKind.routed` it computes the same expert by expert, and calls the layers that stand
for its weights.

A router sends some experts thousands of tokens and some none. The moments of an expert with :math:`t_e` tokens are
therefore mixed with the mean over all tokens of all experts, which counts as k tokens: with :math:`S_e` the sum of the
products of the expert's inputs and :math:`\bar A` the mean,

.. math:: A_e = \frac{S_e + k \bar A}{t_e + k}

and likewise for the gradients. An expert without a token has the mean. The error of the stack is the sum of the errors
of the experts, each as often as the expert is used.

If the moments of all experts together would take gigabytes, one moment of the tokens of all experts takes their place.
It is much better than the diagonals of the experts' own moments. A small Mixtral (8 experts of 48 x 112, trained on
source code), with one weight of its last block in 3 bits, had these relative errors of the logits on other files, in
units of 1e-4:

============  ===  ========  ==========  ========  ==========
weight        own  shared G  diagonal G  shared A  diagonal A
============  ===  ========  ==========  ========  ==========
gate_up_proj    4         6          16         4          12
down_proj       3         3           7         8          31
============  ===  ========  ==========  ========  ==========

Only if a single moment is too large, as that of the 28,672 outputs of ``gate_up_proj`` in Mixtral-8x7B, diagonals are
kept, of each expert, and rows are rounded independently.

Weights are fitted a few experts at a time. The factors and products of all experts of a large model would take tens of
gigabytes: of a weight of Mixtral-8x7B, one copy in float64 takes 7.5 GB.
"""

__all__ = ["ExpertSums", "ExpertsKind"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import children_of, is_transformed
from panther.compression.calibration.batches import Masks
from panther.compression.calibration.steps import forward_replaced
from panther.compression.calibration.targets import Further, Target, register_kind
from panther.compression.forms.base import FormSettings, TargetFit
from panther.compression.forms.codes import JOINT_ENTRIES, RoundingTask, fit_quantized, join_weights, sensitivity
from panther.compression.forms.metric import Fit, QuantizedFit, factor, metric_of, wide_dtype
from panther.compression.moments import (
    Call,
    Moments,
    RootsOf,
    ShiftedSum,
    add_squares,
    is_finite,
    mirror_,
    square_zeros,
)
from panther.compression.weights.linear import DOUBLE, MatrixKind
from panther.compression.weights.table import TABLES, TableMoments, Use
from panther.errors import CompressionError
from panther.nn import QuantizedExperts
from panther.nn.quantized.stacked import StackedExperts, is_experts, stacked_names

# The mean of all experts counts as this many tokens for each dimension of a moment. In 3 bits and 64 dimensions, the
# output's error of experts with similar inputs falls by 37, 10 and 1 % with 8, 32 and 128 tokens, and the error of
# experts with unrelated inputs rises by 14, 4 and 3 %. With 0.5 in its place the changes are -40, -13 and +1 %, and
# +18, +22 and +14 %.
_SHRINKAGE = 0.05
# Experts count in the loss as if each had this share of the mean number of tokens more, as calibration misses some.
_SMOOTHING = 0.25
# The output of a module's own forward and the output here differ by less than this share, in 16 bits too.
_SAME = 0.02


class ExpertSums:
    """Sums over the tokens of each expert of a stack."""

    def __init__(self, target: Target, gradients: bool, device: torch.device) -> None:
        self.leader, count, n = target, target.groups, target.inner

        def zeros(size: int, is_diagonal: bool) -> Tensor:
            if is_diagonal:
                return torch.zeros(count, size, dtype=torch.float64, device=device)
            return square_zeros(1 if target.shares_moment(size) else count, size, device)

        self.A = zeros(n, target.is_wide)
        self.G = zeros(target.outer, target.is_large) if gradients else None
        # Each expert has its own shift, because its inputs can have their own mean.
        self.inputs = [ShiftedSum(1, n, device) for _ in range(count)]
        self.tokens = torch.zeros(count, dtype=torch.float64, device=device)

    def add(self, target: Target, call: Call, slope: Tensor | None, roots_of: RootsOf) -> bool:
        """Add a call with one expert's weight, and the gradients at its output; return whether these are finite."""
        rows = call.x.to(torch.promote_types(call.x.dtype, torch.float32))[None]
        roots = roots_of(slope)
        if not isinstance(roots, Tensor):
            roots = rows.new_full(rows.shape[:2], 1.0 if roots is None else roots)
        self.tokens[call.group] += rows.shape[1]
        shifted = self.inputs[call.group].add(rows, roots)
        _add(self.A, call.group, shifted if self.A.dim() > 2 else rows * roots[..., None])
        return slope is None or self.G is None or _add(self.G, call.group, slope)

    def moments(self, sum_: Callable[[Sequence[Tensor]], Any]) -> Moments:
        """Return the moments, as :meth:`~panther.compression.moments.Sums.moments` does."""
        if self.A.dim() > 2:
            for expert, inputs in enumerate(self.inputs):
                inputs.undo_shift_(_of_expert(self.A, expert))
        matrices = [self.A] if self.G is None else [self.A, self.G]
        for matrix in matrices:
            if matrix.dim() > 2:
                mirror_(matrix)
        means = torch.cat([inputs.total() for inputs in self.inputs])
        weights = torch.cat([inputs.weight for inputs in self.inputs])[:, 0]
        sum_([*matrices, means, weights, self.tokens])
        total = self.tokens.sum().clamp_min(1.0)
        # The weight of a token differs from 1; the mean weight turns tokens into weights.
        token_weight = weights.sum() / total if weights.any() else torch.ones_like(total)
        prior = token_weight * _prior_tokens(self.A)
        means = _shrunk(means, weights, prior)
        A = _shrunk(self.A, weights, prior)
        G = None if self.G is None else _shrunk(self.G, self.tokens, _prior_tokens(self.G))
        shares = self.tokens / total + _SMOOTHING / len(self.tokens)
        tokens = tuple(self.tokens.tolist())
        return Moments(A, means, G, max(sum(tokens), 1.0), tokens=tokens, shares=shares / shares.sum())


def _add(total: Tensor, expert: int, rows: Tensor) -> bool:  # (1, rows, n)
    """Add the products of rows to the moment of an expert, or their squares; return whether the rows are finite."""
    if total.dim() > 2:
        return add_squares(_of_expert(total, expert), rows)
    total[expert] += rows.square().sum((0, 1), dtype=torch.float64)
    return is_finite(rows)


def _of_expert(moments: Tensor, expert: int) -> Tensor:  # (1, n, n)
    return moments if len(moments) == 1 else moments[expert : expert + 1]


def _prior_tokens(moments: Tensor) -> float:
    """Return the number of tokens that the mean of all experts counts as; a diagonal needs few tokens."""
    return _SHRINKAGE * moments.shape[-1] if moments.dim() > 2 else 1.0


def _shrunk(sums: Tensor, weights: Tensor, prior: Tensor | float) -> Tensor:
    """Return the means of sums over experts, in place, mixed with the mean over all, which counts as ``prior``."""
    if len(sums) < len(weights):  # the sum over all experts
        return sums.div_(weights.sum().clamp_min(1e-300))
    pooled = sums.sum(0) / weights.sum().clamp_min(1e-300)
    sizes = (weights + prior).view(-1, *[1] * (sums.dim() - 1))
    return sums.add_(pooled, alpha=float(prior)).div_(sizes)


@dataclass
class _Route:
    """The forward of a module of experts that calls the layers of its stacked weights, by the names of the parameters.

    ``unreadable`` takes targets that cannot be followed, with the reason.
    """

    experts: Any
    layers: dict[str, StackedExperts]
    targets: dict[str, Target]
    masks_of: Callable[[], Masks | None] | None
    unreadable: dict[Target, str] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for tokens, (tokens, hidden), the experts of each token and their weights."""
        values = (*args, *kwargs.values())
        if reason := self._reason_against(values):
            return self._refused(reason, args, kwargs)
        output = self._routed(*values)
        if self.unreadable is not None:
            with torch.no_grad():
                expected = self._own_forward(args, kwargs)
                is_same = isinstance(expected, Tensor) and expected.shape == output.shape
                if is_same:
                    difference, size = (torch.linalg.vector_norm(x) for x in (expected - output, expected))
                    is_same = bool(difference <= _SAME * size)
            if not is_same:
                return self._refused("computes something else than experts of transformers do", args, kwargs)
        return output

    def _own_forward(self, args: Any, kwargs: Any) -> Any:
        return type(self.experts).forward(self.experts, *args, **kwargs)

    def _reason_against(self, values: Sequence[Any]) -> str:
        """Return why a call cannot be followed; nothing where it can."""
        if len(values) != 3 or not all(isinstance(value, Tensor) and value.dim() == 2 for value in values):
            return "is called with something else than tokens, their experts and the experts' weights"
        if is_transformed(values[0]):
            return "is called within vmap or grad of torch.func, where its input has no values to read"
        if not all(layer.is_in_place for layer in self.layers.values()):
            return "is called with a weight that is not its own, as by torch.func.functional_call"
        if getattr(self.experts, "_is_expert_parallel", False):
            return "holds a part of the experts, and other ranks hold the remaining ones"
        return ""

    def _refused(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Return the output of the module's own forward, whose products no hook can read."""
        for target in self.targets.values():
            if self.unreadable is None:
                raise CompressionError(f"layer {target.name!r} {reason}: exclude the layer")
            self.unreadable.setdefault(target, reason)
        return self._own_forward(args, kwargs)

    def _routed(self, hidden: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
        masks = None if self.masks_of is None else self.masks_of()
        counted = None if masks is None else masks.rows(hidden, self.experts)
        total = torch.zeros_like(hidden)
        for expert in torch.unique(experts_of_token).tolist():
            tokens, places = torch.where(experts_of_token == expert)
            does_count = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted[tokens]
            for is_counted in (True, False):
                group = does_count == is_counted
                if len(rows := tokens[group]):
                    output = self._output(hidden[rows], expert, (rows, len(hidden)), is_counted)
                    output = output * weights[rows, places[group], None]
                    total = total.index_add(0, rows, output.to(total.dtype))
        return total

    def _output(self, x: Tensor, expert: int, tokens: tuple[Tensor, int], is_counted: bool) -> Tensor:
        """Return the output of one expert; layers are called, so that hooks see it, if the rows count."""
        experts = self.experts
        x = self._product("gate_up_proj" if experts.has_gate else "up_proj", x, expert, tokens, is_counted)
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = self._product("down_proj", x, expert, tokens, is_counted)
        return experts.post_expert_norm(x) if getattr(experts, "has_post_expert_norm", False) else x

    def _product(self, name: str, x: Tensor, expert: int, tokens: tuple[Tensor, int], is_counted: bool) -> Tensor:
        layer = self.layers.get(name) or children_of(self.experts).get(name)
        if layer is not None:
            y: Tensor = layer(x, expert, tokens) if is_counted else layer.forward(x, expert)
        else:
            weight = getattr(self.experts, name)[expert]
            y = x @ (weight if self.experts.is_transposed else weight.mT)
        return y + getattr(self.experts, f"{name}_bias")[expert] if self.experts.has_bias else y


def _parts(
    target: Target, moments: Moments | None, count: int
) -> Iterator[tuple[Target, Moments | TableMoments | None]]:
    """Yield a target of ``count`` experts, and their moments, until all experts have been yielded."""
    for start in range(0, target.groups, count):
        part = _experts(target, start, start + count)
        if moments is None:
            yield part, None
            continue
        experts = slice(start, start + part.groups)
        A, G = (_of_experts(x, experts) for x in (moments.A, moments.G))
        assert A is not None
        if G is not None and moments.shares is not None:
            G = G * moments.shares[experts].view(-1, *[1] * (G.dim() - 1))
        if target.is_large:
            rows = None if G is None else G[0]
            yield part, TableMoments((Use(1.0, rows, A[0], None, A[0]),), 1.0)
        else:
            yield part, Moments(A, moments.mean[experts], G, moments.positions)


def _experts(target: Target, start: int, stop: int) -> Target:
    """Return the target of the experts from ``start`` to before ``stop`` of a stacked weight."""
    layer: Any = target.modules[0]
    part = layer.part(start, stop)
    return replace(target, modules=(part,), groups=part.num_experts)


def _of_experts(moments: Tensor | None, experts: slice) -> Tensor | None:
    """Return the moments of some experts; all experts may share one matrix."""
    if moments is None or moments.dim() == 2 or len(moments) > 1:
        return None if moments is None else moments[experts]
    return moments.expand(experts.stop - experts.start, -1, -1)


def _joined(fits: Sequence[Fit]) -> Fit:
    """Return the fit of all experts, whose losses are sums over the experts."""
    if len(fits) == 1:
        return fits[0]

    def total(losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).sum(0)

    return Fit(
        torch.cat([fit.left for fit in fits]),
        torch.cat([fit.right for fit in fits]),
        total([fit.tails for fit in fits]),
        total([fit.local_tails for fit in fits]),
        total([fit.rounding for fit in fits]),
        None,  # the layers that stand for stacked weights have no bias
    )


class ExpertsKind(MatrixKind):
    """One matrix for each expert, in a parameter of three dimensions."""

    classes = (StackedExperts,)
    without_codes = (
        "holds the weights of experts, which only codes can store, as forms 'int8' and 'int4' of pr.compress do"
    )
    has_metric = False

    def stacked_layers(self, module: nn.Module) -> Mapping[str, nn.Module] | None:
        """Return the layers of the weights of a module of experts that are not compressed."""
        if not is_experts(module):
            return None
        return {name: StackedExperts.at(module, name) for name in stacked_names(module)}

    def shape(self, module: Any) -> tuple[int, int, int]:
        """Return the number of experts, and the features of an expert's input and output."""
        return module.num_experts, module.in_features, module.out_features

    def matrices(self, target: Target) -> Tensor:  # (experts, outer, inner), float64
        """Return the weights of the experts, (out, in) each."""
        weight = target.weight.detach().to(torch.float64)
        return weight.mT.contiguous() if _is_transposed(target) else weight

    def rows(self, target: Target) -> Tensor:  # (outer, inner)
        """Return the weight of a single expert."""
        weight = target.weight.detach()[0]
        return weight.mT if _is_transposed(target) else weight

    @contextmanager
    def routed(
        self,
        targets: Sequence[Target],
        masks_of: Callable[[], Masks | None] | None,
        unreadable: dict[Target, str] | None,
    ) -> Iterator[None]:
        """Let the modules of experts call the targets' layers, within the block.

        Targets whose weight is replaced already are left alone. Tokens that do not count are multiplied without calling
        the layers. A module that cannot be followed runs its own forward. With ``unreadable``, outputs are compared
        with the outputs of the module's own forward.
        """
        routes: dict[nn.Module, _Route] = {}
        for target in targets:
            layer: Any = target.modules[0]
            if layer.is_in_place:
                experts, name = layer.place
                route = routes.setdefault(experts, _Route(experts, {}, {}, masks_of, unreadable))
                route.layers[name], route.targets[name] = layer, target
        with ExitStack() as restored:
            for experts, route in routes.items():
                restored.enter_context(forward_replaced(experts, route))
            yield

    def group_of(self, further: Further) -> int:
        """Return the expert of a call."""
        expert: int = further[0][0]
        return expert

    def tokens_of(self, further: Further) -> tuple[Tensor, int] | None:
        """Return the indices of the tokens, and the number of all tokens of the batch."""
        tokens: tuple[Tensor, int] = further[0][1]
        return tokens

    def sums(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> Any:
        """Return the sums over the tokens of each expert."""
        return ExpertSums(targets[0], gradients, device)

    def moments_bytes(self, targets: Sequence[Target], gradients: bool) -> int:
        """Return the bytes of the moments of each expert, of one moment for all, or of diagonals."""

        def entries(target: Target, size: int, is_diagonal: bool) -> int:
            if is_diagonal:
                return target.groups * size
            return size**2 * (1 if target.shares_moment(size) else target.groups)

        return DOUBLE * sum(
            entries(target, target.inner, target.is_wide) + gradients * entries(target, target.outer, target.is_large)
            for target in targets
        )

    def needs_positions(self, target: Target) -> bool:
        """Return whether the experts are not large, so that their moments are not diagonals."""
        return not target.is_large

    def fit(
        self, target: Target, moments: Moments | None, widths: Sequence[int], settings: FormSettings, ridge: float
    ) -> TargetFit:
        """Round the weight of each expert to each of the widths, in bits, in its own moments.

        Where moments are diagonals (``target.is_large``), the rows of a weight are rounded independently, as in a
        table.
        """
        fits = []
        for part, part_moments in _parts(target, moments, self.num_joint_groups(target, len(widths))):
            if isinstance(part_moments, TableMoments):
                fits.append(TABLES.fit(part, part_moments, widths, settings, ridge))
                continue
            metric, dtype = metric_of(part, part_moments, ridge=ridge), wide_dtype(target)
            components = factor(metric.source, metric, most=0, seed=0, dtype=dtype)
            part_codes: Mapping[int, QuantizedFit] = {}
            if widths:
                (part_codes,) = fit_quantized(
                    [RoundingTask(metric, widths, 0, 0, dtype)],
                    settings.group_size,
                    symmetric_widths=settings.symmetric_widths,
                )
            fits.append(TargetFit(components, part_codes))
        codes = {
            bits: QuantizedFit(
                join_weights([fit.codes[bits].weight for fit in fits]),
                _joined([fit.codes[bits].residual for fit in fits]),
            )
            for bits in widths
        }
        return TargetFit(_joined([fit.components for fit in fits]), codes)

    def sensitivity(self, target: Target, moments: Moments | None, ridge: float) -> float:
        """Return the sum of the losses of the experts' codes."""
        return sum(
            TABLES.sensitivity(part, part_moments, ridge)
            if isinstance(part_moments, TableMoments)
            else sensitivity(metric_of(part, part_moments, ridge=ridge))
            for part, part_moments in _parts(target, moments, self.num_joint_groups(target, 1))
        )

    def num_joint_groups(self, target: Target, num_widths: int) -> int:
        """Return how many experts are fitted at once: as many as are rounded jointly, and one where rows are."""
        count = JOINT_ENTRIES // (max(num_widths, 1) * target.inner * target.outer)
        return 1 if target.is_large else min(max(count, 1), target.groups)

    def quantized_layer(
        self, target: Target, module: nn.Module, bits: int | None, rank: int, settings: FormSettings
    ) -> QuantizedExperts:
        """Return QuantizedExperts."""
        return QuantizedExperts.in_place_of(module, bits=bits, group_size=settings.group_size)


def _is_transposed(target: Target) -> bool:
    layer: Any = target.modules[0]
    return bool(layer.transposed)


register_kind(ExpertsKind())
