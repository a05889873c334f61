"""One update of a matrix from sketches of its gradients, on a rank that may have a shard of it."""

__all__ = ["UPDATES", "PeriodSigns", "SketchedUpdate", "apply_sketched", "projection_seed"]

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panther._process_settings import full_precision
from panther.errors import TrainingError
from panther.kernels import pack_signs, unpack_signs
from panther.optim.adamw_step import copy_rounded, moment_dtype
from panther.optim.matrix_updates import batches_of, local_part, placed_like, placements_like
from panther.sketch import signs

if TYPE_CHECKING:
    from panther.optim.shards import ShardLayout

UPDATES = ("channel", "tensor", "projected")
_GROWTH = 1.01  # of the norm of an update, from one step to the next
_FREE_SIZE = 0.5  # root mean square of the entries of an update below which growth has no limit
_HEADROOM = 2.0**-24  # of sketches, which are sums of so many entries at most, in their dtype
_EXPONENT = 40  # of the largest entry of a gradient whose squares are summed
_EXPONENTS = (-450, 100)  # of powers of two whose squares, and whose reciprocals times the headroom, are normal numbers
_SAFE_SQUARES = (2.0**-60, 2.0**100)  # of rows whose squares are exact to rounding in float32
_BATCH_NUMBERS = 1 << 24  # of the entries of matrices that are computed together


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
    shape (rank, m). The state gets moments if it is empty. Ranks with other columns have the same rows of the sketch;
    the rank with the first columns counts them.
    """

    count = 1

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        layout: "ShardLayout | None",
        period_signs: PeriodSigns,
    ) -> None:
        self.name, self.group, self.state = name, group, state
        self.rank: int = group["rank"]
        self._period_signs = period_signs
        self._whole, self._parameter = parameter, local_part(parameter)
        self.dtype = moment_dtype(parameter)
        self.gradient = local_part(placed_like(parameter, parameter.grad))
        self.is_transposed = parameter.shape[0] < parameter.shape[1]
        self.layout = layout
        rows, columns = (range(size) for size in sorted(parameter.shape, reverse=True))
        self.shape, self.has_all_columns = (len(rows), len(columns)), True
        if layout is not None:
            rows, columns = layout.rectangle.rows, layout.rectangle.columns
            self.has_all_columns = layout.has_full_rows
        self.rows, self._columns = rows, columns
        self.counts_rows = len(columns) > 0 and columns.start == 0
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {key: self._new_moment(parameter) for key in ("sketch_avg", "sketch_avg_sq")}
            state["update_norm"] = torch.zeros((), dtype=self.dtype, device=self.gradient.device)
        for key in ("sketch_avg", "sketch_avg_sq"):
            state[key] = self._as_sharded(parameter, state[key])
        state["step"] += 1
        self.step = int(state["step"])
        self._seed = projection_seed(name, group["seed"], (self.step - 1) // group["period"])
        settings = *(group[key] for key in ("update", "rank", "eps")), *group["betas"], self.step
        dtypes = self.gradient.dtype, self.dtype
        self.batch_key = (*settings, layout, self.gradient.shape, *dtypes, self.gradient.device)

    def moment(self, key: str) -> Tensor:  # (rank, rows)
        """Return a view of a moment on this rank."""
        return self._oriented(self.state[key]).mT

    def apply(self, values: Tensor) -> None:
        """Change the parameter; half precision is rounded once, after the decay and the update.

        ``values`` are the factors of the gradient, or Adam's quotient ``(rank, rows)`` with ``"projected"``.
        """
        rate, decay = float(self.group["lr"]), self.group["weight_decay"]
        changed = self._parameter.to(self.dtype)
        matrix = changed.mT if self.is_transposed else changed
        if decay:
            matrix.mul_(1 - rate * decay)
        if self.group["update"] == "projected":
            matrix.addmm_(values.mT, self.signs(), alpha=-rate)
        else:
            G = self.gradient.to(self.dtype)
            matrix.addcmul_(G.mT if self.is_transposed else G, values[:, None], value=-rate)
        if changed is not self._parameter:
            copy_rounded(self._whole, changed, self.group, self.name, self.step)

    def signs(self) -> Tensor:  # (rank, columns of this rank)
        """Return the signs of the projection."""
        return self._period_signs.matrix(
            self.name, self._seed, self.rank, self._columns, dtype=self.dtype, device=self.gradient.device
        )

    def _oriented(self, moment: Any) -> Tensor:
        tensor = local_part(moment)
        return tensor.mT if self.is_transposed else tensor

    def _new_moment(self, parameter: Any) -> Any:
        shape = (self.rank, len(self.rows)) if self.is_transposed else (len(self.rows), self.rank)
        return self._placed(parameter, torch.zeros(shape, dtype=self.dtype, device=self.gradient.device))

    def _placed(self, parameter: Any, moment: Tensor) -> Any:
        """Return this rank's part of a moment as a tensor that is sharded as the parameter is along its longer side."""
        if not hasattr(parameter, "to_local"):
            return moment
        from torch.distributed.tensor import DTensor

        shape = (self.rank, parameter.shape[1]) if self.is_transposed else (parameter.shape[0], self.rank)
        placements = placements_like(parameter, int(self.is_transposed))
        return DTensor.from_local(
            moment, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )

    def _as_sharded(self, parameter: Any, moment: Any) -> Any:
        """Return a moment with the placements of a new one; a checkpoint of another layout leaves it complete."""
        longer = int(self.is_transposed)
        if hasattr(moment, "to_local") or not hasattr(parameter, "to_local"):
            return placed_like(parameter, moment, longer)
        return self._placed(parameter, moment.narrow(longer, self.rows.start, len(self.rows)).clone())


def projection_seed(name: str, seed: int, period: int) -> int:
    """Return the seed of the projection of a parameter in a period, equal on all ranks."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {period} {name}".encode(), digest_size=8).digest()) >> 1


class _Batch:
    """Updates of one shape, layout and settings, which are computed together.

    Attributes:
        sketches: ``(batch, rank, rows)``; after :meth:`project` times ``_HEADROOM``, and parts of sums over the ranks,
            if columns are sharded.
        squares: The squared norms of the rows of the gradients on this rank, ``(batch, rows)``, or with ``"tensor"``
            those of their shards, ``(batch, 1)``.
        sums: After :meth:`advance`, for each matrix the squared norms of Adam's quotient times its gain and of the
            gradient, of the parts that no other rank counts; with ``"channel"``, if columns are sharded, also the
            squared norms of all rows, with zeros for rows of other ranks.
    """

    def __init__(self, updates: Sequence[SketchedUpdate]) -> None:
        self.updates = updates
        self.first = updates[0]
        self._kind = self.first.group["update"]
        self.has_factors = self._kind != "projected"

    def project(self) -> None:
        """Compute this rank's parts of the sketches and of the squared norms; the sketches keep room for sums.

        If squares may overflow, or vanish beside larger ones, powers of two scale the rows, which changes no other bit.
        """
        # A CPU looks at the results. A GPU does not wait, and always scales.
        if self.first.gradient.device.type != "cpu" or not self._project_rows(is_scaled=False):
            self._project_rows(is_scaled=True)

    def _project_rows(self, is_scaled: bool) -> bool:
        """Set the sketches and the squared norms, and return whether they are exact to rounding without scales."""
        first = self.first
        short = 1 - first.is_transposed
        sketches, squares = [], []
        scales = torch.ones((), dtype=first.dtype, device=first.gradient.device)
        for update in self.updates:
            G = update.gradient.to(first.dtype)  # as the parameter is
            if is_scaled:
                largest = torch.maximum(G.amax(short), -G.amin(short)) if G.shape[short] else G.sum(short)
                exponents = (_EXPONENT - largest.frexp().exponent).clamp_(*_EXPONENTS)
                scales = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponents), 1.0)
                G = G * scales.unsqueeze(short)
            # A loop of products is three times as fast as a batched product on a CPU.
            sketches.append(update.signs() @ (G if first.is_transposed else G.mT))
            sketches[-1] *= first.rank**-0.5 * _HEADROOM / scales
            if self.has_factors:
                squares.append(G.square().sum(short).to(_wide(G)) / scales.to(_wide(G)).square())
        self.sketches = torch.stack(sketches)
        if not self.has_factors:
            return is_scaled or bool(self.sketches.isfinite().all())
        self.squares = torch.stack(squares)
        is_exact = is_scaled or bool((self.squares < _SAFE_SQUARES[1]).all())
        if is_exact and not is_scaled and bool((small := self.squares < _SAFE_SQUARES[0]).any()):
            is_exact = not bool((small & (self.sketches != 0).any(1)).any())
        if self._kind == "tensor":
            self.squares = self.squares.sum(1, keepdim=True)
        return is_exact

    def advance(self) -> None:
        """Advance the moments by the complete sketches, and compute the quotients and their norms."""
        first = self.first
        beta1, beta2 = first.group["betas"]
        bound = torch.finfo(first.dtype).max ** 0.45
        # Moments of squares stay finite. A sketch that is not finite stays so, because its gradient is not finite.
        sketches = (self.sketches / _HEADROOM).clamp_(-bound, bound).add_(self.sketches * 0)
        averages, squares = (self._moments(key) for key in ("sketch_avg", "sketch_avg_sq"))
        averages.lerp_(sketches, 1 - beta1)
        squares.mul_(beta2).addcmul_(sketches, sketches, value=1 - beta2)
        for update, average, square in zip(self.updates, averages, squares, strict=True):
            update.moment("sketch_avg").copy_(average)
            update.moment("sketch_avg_sq").copy_(square)
        root = (1 - beta2**first.step) ** 0.5
        quotients = averages.div_(squares.sqrt_().add_(first.group["eps"] * root))
        quotients *= first.rank**-0.5 * root / (1 - beta1**first.step)
        if not self.has_factors:
            self._quotients = quotients
            return
        quotients *= (sketches != 0).any(1, keepdim=True)  # rows without a gradient
        self._row_squares = quotients.square_().sum(1).to(self.squares.dtype).mul_(first.shape[1])
        totals = torch.stack([self._row_squares.sum(1) * first.counts_rows, self.squares.sum(1)], 1)
        self.sums = totals
        if self._kind == "channel" and not first.has_all_columns:
            self.sums = torch.cat([totals, self.placed(self.squares)], 1)

    def finish(self) -> None:
        """Compute the factors from the sums over all ranks."""
        if not self.has_factors:
            # Ranks do not know whether gradients of other ranks are finite.
            is_finite = self._quotients.isfinite() | ~self.sketches.isfinite()
            self.is_valid = is_finite.flatten(1).all(1) | (self.first.layout is not None)
            return
        first, squares = self.first, self.squares
        if self._kind == "tensor":
            squares = self.sums[:, 1:2]
        elif not first.has_all_columns:
            squares = self.sums[:, 2:][:, first.rows.start : first.rows.stop]
        norms = self.sums[:, 0].sqrt()
        last_norms = torch.stack([update.state["update_norm"] for update in self.updates]).to(norms)
        limits = (_GROWTH * last_norms).clamp_(min=_FREE_SIZE * math.prod(first.shape) ** 0.5)
        limited = torch.where(last_norms > 0, torch.minimum(norms, limits), norms)  # 0 before the first step
        row_norms = norms[:, None] if self._kind == "tensor" else self._row_squares.sqrt()
        factors = torch.where(norms == 0, 0.0, limited / norms)[:, None] * row_norms
        self._factors = torch.where(squares == 0, 0.0, factors / squares.sqrt()).to(first.dtype)
        for update, norm in zip(self.updates, limited, strict=True):
            update.state["update_norm"].copy_(norm)
        self.is_valid = norms.isfinite() | ~self.sums[:, 1].isfinite()

    def apply(self) -> None:
        """Change the parameters."""
        for update, values in zip(self.updates, self._factors if self.has_factors else self._quotients, strict=True):
            update.apply(values)

    def placed(self, part: Tensor) -> Tensor:  # (*, rows of this rank) -> (*, rows)
        """Return zeros with the numbers of this rank's rows in their places."""
        complete = part.new_zeros(*part.shape[:-1], self.first.shape[0])
        complete[..., self.first.rows.start : self.first.rows.stop] = part
        return complete

    def _moments(self, key: str) -> Tensor:  # (batch, rank, rows)
        return torch.stack([update.moment(key) for update in self.updates])


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of squared norms, which has room for the squares of float32; Apple's GPUs have no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def apply_sketched(updates: Sequence[SketchedUpdate]) -> None:
    """Update matrices; ranks that share some send one message of sketches, if they have to, and one of norms."""
    batches = [_Batch(batch) for batch in batches_of(updates, lambda update: _BATCH_NUMBERS // math.prod(update.shape))]
    with full_precision():
        for batch in batches:
            batch.project()
        partial = [batch for batch in batches if not batch.first.has_all_columns]
        for batch, sketches in _summed([(batch, batch.placed(batch.sketches)) for batch in partial]):
            batch.sketches = sketches[..., batch.first.rows.start : batch.first.rows.stop]
        for batch in batches:
            batch.advance()
        for batch, sums in _summed([(batch, batch.sums) for batch in batches if batch.has_factors]):
            batch.sums = sums
        for batch in batches:
            batch.finish()
        _check_finite(batches)
        for batch in batches:
            batch.apply()


def _check_finite(batches: Sequence[_Batch]) -> None:
    """Raise TrainingError if an update is not finite, although its gradient is."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for batch in batches:
        by_device.setdefault(batch.is_valid.device, []).append(batch.is_valid)
    # This waits once for a GPU.
    if all(device.type == "meta" or bool(torch.cat(valid).all()) for device, valid in by_device.items()):
        return
    names = [
        update.name
        for batch in batches
        for update, is_valid in zip(batch.updates, batch.is_valid.tolist(), strict=True)
        if not is_valid
    ]
    raise TrainingError(
        f"the update of {names[0]} ({len(names)} in all) is not finite, although its gradient is; the parameters are "
        "as before the step: its moments are not finite, so load an earlier state of the optimizer, or make a new one"
    )


def _summed(terms: Sequence[tuple[_Batch, Tensor]]) -> Iterator[tuple[_Batch, Tensor]]:
    """Yield each batch of sharded matrices with the sum of its term over the ranks that share them.

    Terms of the same ranks, dtype and device are sent in one message.
    """
    by_group: dict[Any, list[tuple[_Batch, Tensor]]] = {}
    for batch, term in terms:
        if batch.first.layout is not None:
            key = batch.first.layout.group, batch.sketches.dtype, batch.sketches.device
            by_group.setdefault(key, []).append((batch, term))
    for (group, *_), members in by_group.items():
        import torch.distributed as dist

        from panther.distributed.comm.diagnostics import watched
        from panther.optim.shards import sending_device

        message = torch.cat([term.flatten() for _, term in members])
        outgoing = message.to(sending_device(group, message))
        with watched("SketchedAdamW.step", group):
            dist.all_reduce(outgoing, group=group)
        sums = outgoing.to(message.device).split([term.numel() for _, term in members])
        yield from ((batch, total.view_as(term)) for (batch, term), total in zip(members, sums, strict=True))
