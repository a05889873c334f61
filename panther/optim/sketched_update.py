"""One update of a matrix from sketches of its gradients, on a rank that may have a shard of it."""

__all__ = ["UPDATES", "PeriodSigns", "SketchedUpdate", "apply_sketched", "projection_seed"]

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panther.kernels import pack_signs, unpack_signs
from panther.linalg.operand import full_precision
from panther.optim.matrix_updates import local_part, placed_like
from panther.sketch import signs

if TYPE_CHECKING:
    from panther.optim.shards import ShardLayout

UPDATES = ("channel", "tensor", "projected")
_GROWTH = 1.01  # of the norm of an update, from one step to the next


class PeriodSigns:
    """Signs by the name of a parameter, one bit each: for most matrices less than a 64th of the moments.

    They are functions of their seeds, so no checkpoint has them. Drawing them takes ten times as long as unpacking.
    """

    def __init__(self) -> None:
        self._words: dict[str, tuple[tuple[object, ...], Tensor]] = {}

    def matrix(
        self, name: str, seed: int, rank: int, columns: range, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # (rank, len(columns))
        """Return columns of the signs of a seed, which replaces the seed before it of this name."""
        drawn_with, words = self._words.get(name, (None, None))
        key = (seed, rank, columns, device)
        if words is None or drawn_with != key:
            words = pack_signs(signs(seed, 0, range(rank), columns, dtype=dtype, device=device))
            self._words[name] = key, words
        return unpack_signs(words, len(columns), dtype)


class SketchedUpdate:
    """The next update of a matrix on this rank, which has all of it or a shard.

    The matrix is taken as a tall one (m, n): transposed, if its shorter side comes first. A sketch of its rows has the
    shape (m, rank).

    Args:
        name: The name of the parameter, which selects the projections.
        parameter: The parameter; its gradient exists.
        group: The settings of its group.
        state: The state of the optimizer for this parameter, which gets moments if it is empty.
        layout: The layout of a sharded matrix; None if this rank has all of it.
        period_signs: Draws the signs of the projection.

    Attributes:
        layout: The argument.
        sketch: After :meth:`project`, the sketch of the gradient's rows on this rank; a part of a sum, if columns are
            sharded.
        sums: After :meth:`advance`, the squared norms of Adam's quotient times its gain, of the sketch, and of the
            update before the last factor, each of the part that no other rank counts. The first two are 1 if each
            channel has its own ratio.
        factor: The last factor, which :func:`apply_sketched` sets.
    """

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        layout: "ShardLayout | None",
        period_signs: PeriodSigns,
    ) -> None:
        gradient: Any = parameter.grad
        self.layout = layout
        self._name, self._group, self._state = name, group, state
        self._period_signs = period_signs
        self._parameter = local_part(parameter)
        self._is_transposed, self._rows, self._columns = _columns_of(parameter, layout)
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        G = local_part(placed_like(parameter, gradient)).to(self._dtype)
        self._gradient = G.mT if self._is_transposed else G  # (rows, columns) of this rank
        if not state:
            state |= self._new_state(parameter)
        for key in ("sketch_avg", "sketch_avg_sq"):
            state[key] = self._as_sharded(parameter, state[key])
        state["step"] += 1
        self._seed = projection_seed(name, group["seed"], (int(state["step"]) - 1) // group["period"])
        self.sketch = self._gradient.new_empty(0)
        self.sums = self.factor = self._gradient.new_empty(0)
        self._ratios: Tensor | None = None  # (rows, 1)

    @property
    def rank(self) -> int:
        """Return the number of columns of the sketch."""
        rank: int = self._group["rank"]
        return rank

    @property
    def has_factor(self) -> bool:
        """Return whether the update has a last factor, which depends on the norms of all ranks."""
        return self._group["update"] != "projected"

    @property
    def norm_before(self) -> Tensor:
        """Return the norm of the update of the last step, which the next one replaces; 0 before the first step."""
        norm: Tensor = self._state["update_norm"]
        return norm

    @property
    def rows(self) -> range:
        """Return the rows of the tall matrix on this rank."""
        return self._rows

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the tall matrix on all ranks."""
        return len(self._rows) if self.layout is None else self.layout.shape[0]

    @property
    def has_all_columns(self) -> bool:
        """Return whether the sketch of this rank is complete."""
        if self.layout is None:
            return True
        return all(
            len(r.columns if self.layout.is_transposed is self._is_transposed else r.rows) == self.layout.shape[1]
            for r in self.layout.rectangles
            if r.size
        )

    def project(self) -> None:
        """Compute this rank's part of the sketch."""
        self.sketch = self._gradient @ self._signs().mT
        self.sketch *= self.rank**-0.5

    def advance(self) -> None:
        """Advance the moments by the complete sketch, and compute the update up to a factor."""
        beta1, beta2 = self._group["betas"]
        first, second = (self._oriented(self._state[key]) for key in ("sketch_avg", "sketch_avg_sq"))
        first.lerp_(self.sketch, 1 - beta1)
        second.mul_(beta2).addcmul_(self.sketch, self.sketch, value=1 - beta2)
        step = int(self._state["step"])
        root = (1 - beta2**step) ** 0.5
        kind = self._group["update"]
        num_columns = len(self._columns) if self.layout is None else self.layout.shape[1]
        gain = self.rank**-0.5 * (1 if kind == "projected" else num_columns**0.5)
        quotient = first / second.sqrt().add_(self._group["eps"] * root)
        quotient *= gain * root / (1 - beta1**step)
        if kind == "projected":
            self._update = quotient @ self._signs()
            return
        if kind == "channel":
            norms = torch.linalg.vector_norm(self.sketch, dim=1, keepdim=True)
            ratios = torch.linalg.vector_norm(quotient, dim=1, keepdim=True) / norms
            self._ratios = torch.where(norms == 0, 0.0, ratios)
            lengths = torch.linalg.vector_norm(self._gradient, dim=1, keepdim=True)
            update = torch.linalg.vector_norm(lengths * self._ratios)
            norms_squared = [torch.ones_like(update)] * 2  # each channel has its own ratio
        else:
            update = torch.linalg.vector_norm(self._gradient)
            norms_squared = [torch.linalg.vector_norm(x).square() for x in (quotient, self.sketch)]
        counts = not self._columns or self._columns.start == 0  # ranks with the same rows have the same sketch
        self.sums = torch.stack([*(counts * x for x in norms_squared), update.square()])

    def apply(self) -> None:
        """Change the parameter."""
        rate, decay = float(self._group["lr"]), self._group["weight_decay"]
        parameter = self._parameter.mT if self._is_transposed else self._parameter
        if decay:
            parameter.mul_(1 - rate * decay)
        if self._group["update"] == "projected":
            parameter.add_(self._update, alpha=-rate)
        else:
            factors = self.factor if self._ratios is None else self.factor * self._ratios
            parameter.addcmul_(self._gradient, factors, value=-rate)

    def _signs(self) -> Tensor:  # (rank, columns of this rank)
        return self._period_signs.matrix(
            self._name, self._seed, self.rank, self._columns, dtype=self._dtype, device=self._gradient.device
        )

    def _oriented(self, moment: Any) -> Tensor:
        tensor = local_part(moment)
        return tensor.mT if self._is_transposed else tensor

    def _new_state(self, parameter: Any) -> dict[str, Any]:
        device = self._gradient.device
        shape = (self.rank, len(self._rows)) if self._is_transposed else (len(self._rows), self.rank)
        moments = [self._placed(parameter, torch.zeros(shape, dtype=self._dtype, device=device)) for _ in range(2)]
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "sketch_avg": moments[0],
            "sketch_avg_sq": moments[1],
            "update_norm": torch.zeros((), dtype=self._dtype, device=device),
        }

    def _placed(self, parameter: Any, moment: Tensor) -> Any:
        """Return this rank's part of a moment as a tensor with the placements of :meth:`_placements`."""
        if not hasattr(parameter, "to_local"):
            return moment
        from torch.distributed.tensor import DTensor

        shape = (self.rank, parameter.shape[1]) if self._is_transposed else (parameter.shape[0], self.rank)
        placements = self._placements(parameter)
        return DTensor.from_local(
            moment, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )

    def _as_sharded(self, parameter: Any, moment: Any) -> Any:
        """Return a moment with the placements of a new one; a checkpoint of another layout leaves it complete."""
        if not hasattr(parameter, "to_local"):
            return moment
        if not hasattr(moment, "to_local"):
            part = moment.narrow(int(self._is_transposed), self._rows.start, len(self._rows))
            return self._placed(parameter, part.clone())
        placements = self._placements(parameter)
        return moment if tuple(moment.placements) == placements else moment.redistribute(placements=placements)

    def _placements(self, parameter: Any) -> tuple[Any, ...]:
        """Return placements that shard a moment as the longer side of the parameter is, and replicate it elsewhere."""
        from torch.distributed.tensor import Replicate

        longer = int(self._is_transposed)
        return tuple(
            placement if getattr(placement, "dim", None) == longer else Replicate()
            for placement in parameter.placements
        )


def projection_seed(name: str, seed: int, period: int) -> int:
    """Return the seed of the projection of a parameter in a period, equal on all ranks."""
    text = f"{seed} {period} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _columns_of(parameter: Tensor, layout: "ShardLayout | None") -> tuple[bool, range, range]:
    """Return whether the tall matrix is the transposed parameter, and its rows and columns on this rank."""
    is_transposed = parameter.shape[0] < parameter.shape[1]
    if layout is None:
        rows, columns = (range(size) for size in sorted(parameter.shape, reverse=True))
        return is_transposed, rows, columns
    # The layout takes square matrices as tall ones after a transposition too.
    rectangle = layout.rectangle
    if layout.is_transposed is not is_transposed:
        rectangle = rectangle.transposed
    return is_transposed, rectangle.rows, rectangle.columns


def apply_sketched(updates: Sequence[SketchedUpdate]) -> None:
    """Update matrices; ranks that share some send one message of sketches, if they have to, and one of norms."""
    with full_precision():
        for update in updates:
            update.project()
        _reduce_sketches([update for update in updates if not update.has_all_columns])
        for update in updates:
            update.advance()
    scaled = [update for update in updates if update.has_factor]
    for group_updates in _by_group(scaled):
        summed = torch.stack([update.sums for update in group_updates])
        _sum(summed, group_updates[0])
        for update, sums in zip(group_updates, summed, strict=True):
            update.sums = sums
    _set_factors(scaled)
    for update in updates:
        update.apply()


def _set_factors(updates: Sequence[SketchedUpdate]) -> None:
    """Set the last factors of updates from the norms of all ranks, all matrices of a device at once."""
    batches: dict[Any, list[SketchedUpdate]] = {}
    for update in updates:
        batches.setdefault((update.sums.dtype, update.sums.device), []).append(update)
    for batch in batches.values():
        quotients, sketches, norms = torch.stack([update.sums for update in batch]).sqrt().unbind(1)
        ratios = torch.where(sketches == 0, 0.0, quotients / sketches)
        norms = ratios * norms
        before = torch.stack([update.norm_before.to(norms) for update in batch])
        limited = torch.where(before > 0, norms.clamp(max=_GROWTH * before), norms)
        factors = ratios * torch.where(norms == 0, 0.0, limited / norms)
        for update, factor, norm in zip(batch, factors.unbind(), limited.unbind(), strict=True):
            update.factor = factor
            update.norm_before.copy_(norm)


def _reduce_sketches(updates: Sequence[SketchedUpdate]) -> None:
    """Replace the parts of sketches by their sums over the ranks that have other columns."""
    for group_updates in _by_group(updates):
        complete = [update.sketch.new_zeros(update.num_rows, update.rank) for update in group_updates]
        for sketch, update in zip(complete, group_updates, strict=True):
            sketch[update.rows.start : update.rows.stop] = update.sketch
        message = torch.cat([sketch.flatten() for sketch in complete])
        _sum(message, group_updates[0])
        parts = message.split([sketch.numel() for sketch in complete])
        for sketch, part, update in zip(complete, parts, group_updates, strict=True):
            update.sketch = part.view_as(sketch)[update.rows.start : update.rows.stop]


def _by_group(updates: Sequence[SketchedUpdate]) -> list[list[SketchedUpdate]]:
    """Return the updates of sharded matrices by the ranks that share them, by dtype and by device."""
    groups: dict[Any, list[SketchedUpdate]] = {}
    for update in updates:
        if update.layout is not None:
            groups.setdefault((update.layout.group, update.sketch.dtype, update.sketch.device), []).append(update)
    return list(groups.values())


def _sum(message: Tensor, update: SketchedUpdate) -> None:
    import torch.distributed as dist

    from panther.distributed.comm.diagnostics import watched
    from panther.optim.shards import sending_device

    assert update.layout is not None
    group = update.layout.group
    outgoing = message.to(sending_device(group, message))
    with watched("SketchedAdamW.step", group):
        dist.all_reduce(outgoing, group=group)
    if outgoing is not message:
        message.copy_(outgoing)
