r"""Second moments of the layers' inputs and of the output's gradients at the layers, from unlabelled batches.

For a layer :math:`y = x W^T + b`, the error that a change :math:`\Delta` of W makes in the model's output is, to first
order and with inputs and sensitivities taken as independent,

.. math:: n \operatorname{tr}(G \Delta A \Delta^T), \qquad A = \frac1n \sum x x^T, \quad G = \frac1n \sum g g^T

over the n positions where the layer is applied, g being the gradient at y of the output times a normal vector, so that
:math:`E\, g g^T = J^T J` (the Kronecker factorisation of J. Martens and R. Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015, arXiv:1503.05671).

Inputs and sensitivities are not independent: some positions matter more. With gradients, A is therefore a weighted mean
over the positions, with the weights :math:`|g|^2 + c \operatorname{E} |g|^2`. Without c, this mean is the first step
from the identity towards the product nearest to :math:`\operatorname{E} x x^T \otimes g g^T` (C. Van Loan and N.
Pitsianis, "Approximation with Kronecker products", 1993); c prevents that few positions dominate the mean.

A step runs forward and backward, and each layer's input is kept until the gradient at the layer's output is known. Each
gradient is used as soon as backward computes it, and then freed together with the input. Nearly all memory is therefore
used by the model's own forward and by one copy of each input.

Rows are multiplied in blocks, in float32 (in float64 for float64 models), and the blocks are summed in float64. The
mean of the first rows is subtracted from the inputs, because a large mean would cancel the covariance in float32.
"""

__all__ = [
    "Call", "Gathered", "Moments", "RootsOf", "ShiftedSum", "Summary", "Sums", "add_squares", "check_calibration",
    "gather_moments", "is_finite", "mirror_", "moments_bytes", "split_passes", "square_zeros",
]  # fmt: skip

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import frexp, inf, isfinite, ldexp
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther._process_settings import exact_products
from panther.compression.calibration.batches import Masks, ScoreFill, counted
from panther.compression.calibration.runner import Runner, row_blocks, squares
from panther.compression.calibration.steps import Receive, Step, input_key, watched
from panther.compression.calibration.targets import Further, Target
from panther.errors import CompressionError

_CONSTANT = 1e-11  # an input is constant, up to rounding, if its variance is at most this share of its mean square
# Rows of a block. In float32, the rounding error of a sum of this many squares is below the one of the products.
_ROWS = 2048
# Rows of a strip. Each strip is computed from the diagonal to the right only, which takes 0.61 of the time of the full
# matrix at 1536 columns.
_STRIP = 256
_OWN_PAGES = 2**18  # a moment of at least this many bytes has a memory map of its own
# If the largest entry is between two to the negative and to the positive of this power, squares in float32 neither
# overflow nor vanish.
_SAFE_POWER = 40


class ShiftedSum:
    """The weighted sum of rows minus a shift, the mean of the first rows, so that products are accurate in float32."""

    def __init__(self, groups: int, n: int, device: torch.device) -> None:
        self.sum = torch.zeros(groups, n, dtype=torch.float64, device=device)
        self.weight = torch.zeros(groups, 1, dtype=torch.float64, device=device)  # sum over all rows
        # Allocated now, because long-lived memory between activations would keep malloc from joining freed blocks. The
        # values are rounded to the rows' dtype.
        self.shift = torch.zeros(groups, 1, n, dtype=torch.float64, device=device)
        self._shifted = False

    def add(self, rows: Tensor, roots: Tensor | None) -> Tensor:  # (groups, rows, n), (groups, rows)
        """Add rows, and return them without the shift, times the roots of their weights."""
        if not self._shifted:
            if not rows.shape[1]:
                return rows
            self._shifted = True
            self.shift.copy_(rows.mean(1, keepdim=True, dtype=torch.float64).to(rows.dtype))
        rows = rows - self.shift.to(rows.dtype)
        if roots is None:
            self.sum += rows.sum(1, dtype=torch.float64)
            self.weight += rows.shape[1]
            return rows
        roots = roots.to(rows.dtype)[..., None]
        rows = rows * roots
        self.sum += (rows * roots).sum(1, dtype=torch.float64)
        self.weight += roots.double().square().sum(1)
        return rows

    def total(self) -> Tensor:  # (groups, n)
        """Return the weighted sum of the original rows."""
        return self.sum + self.weight * self.shift[:, 0]

    def undo_shift_(self, products: Tensor) -> None:
        """Undo the shift: convert X^T X of the shifted rows into X^T X of the original rows, in place."""
        # (x + s)(x + s)^T = x x^T + x s^T + s (x + s)^T
        products.baddbmm_(self.sum[:, :, None], self.shift)
        products.baddbmm_(self.shift.mT, self.total()[:, None, :])


@dataclass(frozen=True)
class Moments:
    """Moments of one target, in float64.

    Attributes:
        A: Second moment of its inputs, (groups, inner, inner), weighted where there are gradients. Large stacks of
            experts have one for all experts, (1, inner, inner), or the diagonals alone, (groups, inner).
        mean: Mean of its inputs, (groups, inner), with the same weights.
        G: Second moment of the gradients at its outputs, (groups, outer, outer), or None; for experts as A.
        positions: How often the layer was applied, over all batches.
        tokens: Number of tokens of each expert; empty for layers without experts.
        shares: Share with which the error of each expert counts, (experts,); None for layers without experts.
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    positions: float
    tokens: tuple[float, ...] = ()
    shares: Tensor | None = None

    @property
    def constant(self) -> bool:
        """Return whether every row of the inputs was the same, to rounding."""
        squares = self.A.diagonal(dim1=-2, dim2=-1) if self.A.dim() > 2 else self.A
        return bool((squares - self.mean.square() <= _CONSTANT * squares).all())


class Call(NamedTuple):
    """One call of a layer in a batch.

    Attributes:
        batch: The number of the batch.
        module: The layer.
        x: What the moments need of the input, see :meth:`WeightKind.counted_input`.
        group: The group whose matrix multiplies the input, where each call multiplies by one.
    """

    batch: int
    module: nn.Module
    x: Tensor
    group: int = 0


RootsOf = Callable[[Tensor | None], Tensor | float | None]
"""Returns the roots of the weights of a call's rows from the gradients there, (groups, rows, outer).

They are (groups, rows), one number for all rows if the call has no gradients, or None if all weights are 1.
"""


class Sums:
    """Sums over the rows of an input, and over the gradients of the targets that read it."""

    def __init__(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> None:
        self.leader = targets[0]
        groups, n = self.leader.groups, self.leader.inner
        self.A, self.inputs = square_zeros(groups, n, device), ShiftedSum(groups, n, device)
        self.G = {target: square_zeros(groups, target.outer, device) for target in targets if gradients}
        self.positions = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, target: Target, call: Call, slope: Tensor | None, roots_of: RootsOf) -> bool:
        """Add a call of a target, with the gradients at its output; return whether the gradients are finite."""
        if slope is not None and not add_squares(self.G[target], slope):
            return False
        if target is self.leader:
            self._add_input(call, roots_of(slope))
        return True

    def _add_input(self, call: Call, roots: Tensor | float | None) -> None:
        """Add the finite input of a call."""
        start = 0
        for rows in self.leader.kind.input_rows(call.module, call.x, self.leader.groups):
            end = start + rows.shape[1]
            chunk_roots = roots[:, start:end] if isinstance(roots, Tensor) else roots
            if isinstance(chunk_roots, float):
                chunk_roots = torch.full(rows.shape[:2], chunk_roots, dtype=rows.dtype, device=rows.device)
            add_squares(self.A, self.inputs.add(rows, chunk_roots))
            start = end
        self.positions += start

    def finish_(self) -> None:
        """Undo the shift of the moments, and mirror the triangles that were summed, in place."""
        self.inputs.undo_shift_(self.A)
        for moment in (self.A, *self.G.values()):
            mirror_(moment)

    def moments(self, sum_: Callable[[Sequence[Tensor]], Any]) -> Moments:
        """Return the moments of the leader; ``sum_`` adds tensors over the ranks of a group, in place."""
        self.finish_()
        weight, mean = self.inputs.weight, self.inputs.total()
        sum_([self.A, mean, *self.G.values(), weight, self.positions])
        positions = max(self.positions.item(), 1.0)
        weight = torch.where(weight > 0, weight, 1.0)
        self.A /= weight[..., None]
        mean /= weight
        for G in self.G.values():
            G /= positions
        return Moments(self.A, mean, self.G.get(self.leader), positions)


def mirror_(moment: Tensor) -> None:  # (groups, n, n)
    """Mirror the triangle that :func:`add_squares` has summed, in place."""
    for start in range(0, moment.shape[-1], _STRIP):
        end = start + _STRIP
        moment[:, end:, start:end] = moment[:, start:end, end:].mT


def square_zeros(groups: int, n: int, device: torch.device) -> Tensor:  # (groups, n, n), float64
    """Return zeros in memory that is returned to the system when freed.

    After a block of up to 32 MB was freed, glibc allocates blocks of this size on the heap, which shrinks only at its
    end: moments that live longer than the activations around them would keep the memory of all of them.
    """
    size = torch.float64.itemsize * groups * n * n
    if device.type != "cpu" or size < _OWN_PAGES:
        return torch.zeros(groups, n, n, dtype=torch.float64, device=device)
    pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)  # zeros, and private to this process
    return torch.frombuffer(pages, dtype=torch.float64).view(groups, n, n)


@exact_products()
def add_squares(total: Tensor, rows: Tensor) -> bool:  # (groups, n, n) in float64, (groups, rows, n)
    """Add rows^T rows in the upper triangle (and in the strips on the diagonal); return whether the rows are finite."""
    if not rows.numel():
        return True
    low, high = _range(rows)
    if not (isfinite(low) and isfinite(high)):
        return False
    rows, power = _scaled(rows, max(-low, high))
    for block in rows.split(_ROWS, 1):
        for start in range(0, total.shape[-1], _STRIP):
            end = start + _STRIP
            total[:, start:end, start:].add_(block[..., start:end].mT @ block[..., start:], alpha=ldexp(1.0, 2 * power))
    return True


def _range(x: Tensor) -> tuple[float, float]:
    low, high = torch.stack(torch.aminmax(x)).tolist()  # five times as fast as isfinite; aminmax returns NaN if any is
    return low, high


def is_finite(x: Tensor) -> bool:
    """Return whether all entries are finite."""
    return not x.numel() or all(map(isfinite, _range(x)))


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, int]:
    """Return rows divided by a power of two, so that their squares neither overflow nor vanish, and the exponent."""
    power = min(max(frexp(largest)[1], -126), 126)  # clamped, so that float32 can represent the inverse
    if abs(power) <= _SAFE_POWER or rows.dtype is torch.float64:
        return rows, 0
    return rows * ldexp(1.0, -power), power


def run_step(
    runner: Runner,
    step: Step,
    compared: Collection[Target],
    add: Callable[[Target, Call, Tensor | None], None],
    *,
    gradients: bool,
) -> tuple[float, dict[Target, list[Any]]]:
    """Call ``add`` with each call of the targets and the rows of the gradient at its output (None without a gradient).

    Return the sum of squares of the output (zero if the step does not reach it), and the keys of the inputs of each
    target in ``compared``.
    """
    masks, number = runner.mask(step.batch), step.number
    input_keys: dict[Target, list[Any]] = {}
    alive: list[Tensor] = []  # inputs, kept so that no address is used twice within a forward
    copies: dict[Any, Tensor] = {}  # copies of inputs that more than one target reads, by key
    waiting: dict[int, tuple[Target, Call]] = {}
    indices = count()

    def kept_input(target: Target, module: nn.Module, x: Tensor) -> Tensor:
        rows = target.kind.counted_input(module, x, masks)
        if rows.is_floating_point() and not is_finite(rows):
            raise CompressionError(
                f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: check the "
                "batch and the model, or exclude the layer"
            )
        # The model may write to its input before the gradients are known. Selected rows are a copy already.
        return rows.clone() if gradients and rows.data_ptr() == x.data_ptr() else rows

    def note(target: Target, module: nn.Module, x: Tensor, further: Further) -> Receive | None:
        index = next(indices)
        rows = None
        if target in compared:
            alive.append(x)
            input_keys.setdefault(target, []).append(key := input_key(target, module, x))
            rows = copies.get(key)
        if rows is None:
            rows = kept_input(target, module, x)
            if gradients and target in compared:
                copies[key] = rows
        call = Call(number, module, rows, target.kind.group_of(further))
        if not gradients:
            add(target, call, None)
            return None
        waiting[index] = target, call

        def receive(gradient: Tensor) -> None:
            # The input is in `waiting` and not in the closure, because the closure lives as long as the graph.
            add(*waiting.pop(index), gradient_rows(module, gradient, masks, target))

        return receive

    size = 0.0
    with watched(step.targets, note, runner.model, masks_of=lambda: masks) as watch, torch.set_grad_enabled(gradients):
        output = step.forward()
        alive.clear()
        copies.clear()
        if output is not None:
            rows = counted(output.detach(), masks)
            size = squares(ScoreFill.of(rows).scores(rows))
            if not isfinite(size):
                raise CompressionError(
                    f"the model's output is NaN or infinite in calibration batch {number}: check the batch and the "
                    "model, or return a finite part of the output in forward_fn"
                )
        step.backward(output, watch)
    # Calls without a gradient, such as those under no_grad.
    for target, call in waiting.values():
        add(target, call, None)
    return size, input_keys


def gradient_rows(module: nn.Module, gradient: Tensor, masks: Masks, target: Target) -> Tensor:
    """Return the gradients at a layer's output, (groups, rows, outer) in float32 or wider."""
    rows = target.kind.gradient_rows(target, module, gradient, masks)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


_EVEN = 0.25  # the constant c above
_MAX_WEIGHT = 2.0**40  # largest weight of a position over the mean; its root is far within the range of float32


def check_calibration(
    positions: Mapping[Target, float],
    constant: Collection[Target],
    tokens: Mapping[Target, Sequence[float]] | None = None,
) -> tuple[str, ...]:
    """Return reasons why the batches do not suffice for some layers; raise if the inputs of all layers never varied.

    ``positions`` is the number of positions at which each layer was applied, and ``tokens`` are those of the experts of
    each stacked weight.
    """
    positions = {target: count for target, count in positions.items() if target.kind.needs_positions(target)}
    if positions and len(constant) == len(positions):
        raise CompressionError(
            f"every layer reads the same input at all {max(positions.values()):.0f} positions of the calibration "
            "batches (a single sample, constants or zeros), which do not represent different inputs: give batches like "
            "the data that the model will read"
        )
    notes = []
    if constant:
        names = ", ".join(repr(target.name) for target in list(constant)[:3])
        notes.append(
            f"layers that read the same input at all positions of the calibration batches (constants or zeros): "
            f"{len(constant)} of {len(positions)} ({names}): exclude them, or give batches like the data that the "
            "model will read"
        )
    unread = {
        target: sum(not count for count in counts) for target, counts in (tokens or {}).items() if not all(counts)
    }
    if unread:
        worst = max(unread, key=unread.__getitem__)
        notes.append(
            f"stacked weights with experts that no token of the calibration batches reaches: {len(unread)}, the most "
            f"in {worst.name!r}, {unread[worst]} of {worst.groups} experts; they are fitted to the mean of the tokens "
            "of all experts: give more varied batches"
        )
    few = [target for target, count in positions.items() if count < target.inner and target not in constant]
    if few:
        widest = max(few, key=lambda target: target.inner)
        notes.append(
            f"layers with more inputs than calibration positions: {len(few)} of {len(positions)} ({widest.name!r} has "
            f"{widest.inner} and was applied {positions[widest]:.0f} times): give batches with at least "
            f"{widest.inner} positions, better ten times as many"
        )
    return tuple(notes)


def moments_bytes(targets: Sequence[Target], gradients: bool) -> int:
    """Return the bytes of the moments of targets that share one input; with gradients, they do not share A."""
    return targets[0].kind.moments_bytes(targets, gradients)


def split_passes(inputs: Sequence[Sequence[Target]], gradients: bool, limit: int) -> list[list[Sequence[Target]]]:
    """Divide sets of targets into passes over the batches, such that the moments of a pass fit into ``limit`` bytes.

    A set whose moments alone exceed the limit has a pass of its own.
    """
    split: list[list[Sequence[Target]]] = []
    sizes: list[int] = []
    for targets in inputs:
        size = moments_bytes(targets, gradients)
        if split and sizes[-1] + size <= limit:
            split[-1].append(targets)
            sizes[-1] += size
        else:
            split.append([targets])
            sizes.append(size)
    return split


class Summary(NamedTuple):
    """What is left of the moments of a weight after the fit; ``tokens`` has a number for each expert."""

    positions: float
    is_constant: bool
    tokens: Sequence[float]


@dataclass(frozen=True)
class Gathered:
    """The moments of some targets, as their kinds have them, as soon as they are complete.

    ``energy`` is the sum of the output's squares over all batches, and ``state`` what :func:`gather_moments` needs to
    continue after this in another process.
    """

    summaries: Mapping[Target, Summary]
    moments: dict[Target, Any]
    energy: float
    state: Mapping[str, Any]


def gather_moments(
    runner: Runner,
    inputs: Sequence[Sequence[Target]],
    *,
    gradients: bool,
    seed: int,
    description: str,
    state: Mapping[str, Any] | None = None,
) -> Iterator[Gathered]:
    """Pass over the batches once, and yield moments.

    The moments of targets are yielded as soon as they are complete: all at the end, or those of one part of the model
    after another, if the runner's steps are parts. Without gradients, targets that share an input share its moments.
    If the model branches, targets that shared an input
    in the survey may not share it in every batch: the batches are then read again, with separate moments for these
    targets. With the ``state`` of a yielded part of the moments, the pass continues after this part.
    """
    while inputs:
        gathering = _Gathering(runner, inputs, gradients=gradients, seed=seed, state=state or {})
        state = None
        yield from gathering.run(description)
        inputs = [group for targets in gathering.separate for group in [[target] for target in targets]]


class _Gathering:
    """The sums of one pass over the batches.

    ``state`` has the attributes of the pass that this one continues.

    Attributes:
        separate: The sets of targets that did not share their input in some batch, and have no moments therefore.
    """

    def __init__(
        self,
        runner: Runner,
        inputs: Sequence[Sequence[Target]],
        *,
        gradients: bool,
        seed: int,
        state: Mapping[str, Any],
    ) -> None:
        self.runner, self.inputs, self.gradients, self.seed = runner, inputs, gradients, seed
        self.separate: list[Sequence[Target]] = []
        self._sums: dict[Target, Any] = state.get("sums", {})  # as the kinds of the weights have them
        self._levels: dict[Target, float] = state.get("levels", {})
        self._energy = state.get("energy", torch.zeros(1, dtype=torch.float64))
        self._part: int | None = state.get("part")

    def _state(self) -> dict[str, Any]:
        return {"sums": self._sums, "levels": self._levels, "energy": self._energy, "part": self._part}

    def run(self, description: str) -> Iterator[Gathered]:
        """Yield the moments of the sets of targets whose input is the same in each batch."""
        runner = self.runner
        targets = [target for group in self.inputs for target in group]
        # The survey compared the inputs on one batch only.
        compared = {target for group in self.inputs if len(group) > 1 for target in group}
        is_separate = torch.zeros(len(self.inputs), dtype=torch.float64)
        if not self._levels:
            leveled = [target for target in targets if target.is_multiplied]
            self._levels = _gradient_levels(runner, leveled, self.seed, self.gradients)
        passes = [(batch, self.seed + number) for number, batch in enumerate(runner.batches, runner.first_number)]
        for step in runner.steps(passes, targets, gradients=self.gradients, description=description, after=self._part):
            self._allocate(step.targets)
            size, input_keys = run_step(runner, step, compared, self._add, gradients=self.gradients)
            self._energy += size
            for index, group in enumerate(self.inputs):
                is_separate[index] += any(input_keys.get(group[0]) != input_keys.get(other) for other in group[1:])
            if step.completed:
                complete = set(step.completed)
                numbers = [index for index, group in enumerate(self.inputs) if complete.issuperset(group)]
                flags = is_separate[numbers]
                runner.sum_([flags])
                groups = [self.inputs[index] for index, flag in zip(numbers, flags.tolist(), strict=True) if not flag]
                self.separate += [self.inputs[i] for i, flag in zip(numbers, flags.tolist(), strict=True) if flag]
                energy, self._part = self._energy.clone(), step.part
                runner.sum_([energy])
                yield self._gathered(groups, energy.item())

    def _allocate(self, targets: Sequence[Target]) -> None:
        """Allocate the sums of targets: before the forward, because they are kept for long."""
        runner, new = self.runner, set(targets) - self._sums.keys()
        for group in self.inputs if new else ():
            if new.isdisjoint(group):
                continue
            # Without gradients, targets that share an input share its moments.
            for shared in [[target] for target in group] if self.gradients else [group]:
                sums = group[0].kind.sums(shared, self.gradients, runner.device)
                self._sums |= dict.fromkeys(shared, sums)

    def _add(self, target: Target, call: Call, slope: Tensor | None) -> None:
        if not self._sums[target].add(target, call, slope, self._roots_of(target)):
            raise CompressionError(
                f"the gradient at layer {target.name!r} is NaN or infinite in calibration batch {call.batch}: "
                "use method='activation', or a model in float32"
            )

    def _roots_of(self, target: Target) -> RootsOf:
        """Return the function that returns the roots of the weights of positions, from the gradients there."""
        level = self._levels.get(target, 1.0)

        def roots_of(slope: Tensor | None) -> Tensor | float | None:
            if slope is None:
                return _EVEN**0.5 if self.gradients else None
            return _roots(slope, level)

        return roots_of

    def _gathered(self, groups: Sequence[Sequence[Target]], energy: float) -> Gathered:
        """Return the moments of sets of targets, and forget their sums."""
        moments: dict[Target, Any] = {}
        for target in (target for group in groups for target in group):
            sums = self._sums.pop(target)
            if sums.leader is target:
                moments[target] = sums.moments(self.runner.sum_)
            else:
                moments[target] = moments[sums.leader]
        moments = self.runner.kept(moments)  # the weights are fitted one after another, and their moments wait
        summaries = {t: Summary(each.positions, each.constant, each.tokens) for t, each in moments.items()}
        return Gathered(summaries, moments, energy, self._state())


def _gradient_levels(runner: Runner, targets: Sequence[Target], seed: int, gradients: bool) -> dict[Target, float]:
    """Return the mean square of the gradients at each target's output in the first batch that calls the target.

    The level of a target without gradients is 1; without ``gradients`` every level is. Levels take a separate run,
    because the weights of positions are relative to them, and gradients are not kept until all gradients are known.
    With several ranks, the first batch is that of the first rank that calls the target.
    """
    sums = torch.zeros(len(targets), 2, dtype=torch.float64)
    sums_of = dict(zip(targets, sums, strict=True))
    for batch in runner.batches if gradients else ():
        pending = [target for target in targets if not sums_of[target][1]]
        if not pending:
            break
        _add_gradient_levels(runner, batch, pending, sums_of, seed)
    levels = {}
    for target, *pairs in zip(targets, *runner.gathered(sums.tolist()), strict=True):
        total, number = next(((total, number) for total, number in pairs if number), (0.0, 0.0))
        mean = total / max(number, 1.0)
        levels[target] = mean if 0 < mean < inf else 1.0
    return levels


def _add_gradient_levels(
    runner: Runner, batch: Any, targets: Sequence[Target], sums_of: Mapping[Target, Tensor], seed: int
) -> None:
    masks = runner.mask(batch)

    def note(target: Target, module: nn.Module, x: Tensor, _: Further) -> Receive | None:
        if not target.kind.multiplies(module):
            return None

        def receive(gradient: Tensor) -> None:
            rows = gradient_rows(module, gradient, masks, target)
            sums_of[target].add_(torch.tensor([squares(rows), rows.shape[0] * rows.shape[1]], dtype=torch.float64))

        return receive

    for step in runner.steps([(batch, seed)], targets, gradients=True):
        with watched(step.targets, note, runner.model, masks_of=lambda: masks) as watch:
            step.backward(step.forward(), watch)


def _roots(gradients: Tensor, level: float) -> Tensor:  # (groups, rows, outer) -> (groups, rows)
    """Return the roots of the positions' weights, from the gradients at the positions and their mean square."""
    blocks = [torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64) for rows in row_blocks(gradients)]
    sizes = torch.cat(blocks, dim=1)
    return (sizes.square() / level + _EVEN).clamp_max(_MAX_WEIGHT).sqrt().to(gradients.dtype)
