"""AdamW whose moments are sketches of the gradients, the same in every layout."""

__all__ = ["SketchedAdamW"]

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from panther.errors import ShapeError, check_size
from panther.optim.adamw_step import CheckedGroups, step_adamw
from panther.optim.sent_projections import register_projections
from panther.optim.sketched_update import UPDATES, SketchedUpdate, apply_sketched
from panther.sketch import check_seed

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_CALL = "SketchedAdamW.step"
_SKETCHED_STATES = ("sketch_avg", "sketch_avg_sq", "update_norm")


class SketchedAdamW(CheckedGroups):
    r"""AdamW with the moments of :math:`P G` in place of those of the gradient G, for matrices.

    P has ``rank`` rows of random signs over the root of ``rank``, and acts on the shorter side of G, so that the two
    moments of an (m, n) matrix take :math:`2\,\mathrm{rank} \max(m, n)` numbers in place of :math:`2 m n`. P is a
    function of the seed, of the parameter's name and of the number of its period: it is not stored, and each rank draws
    the columns that its shard needs. With R the quotient of Adam for :math:`P G`, the update is

    - ``"channel"``: G with each row or column along the longer side scaled by the ratio of the norms of this part of R
      and of :math:`P G` (APOLLO, arXiv:2412.05270),
    - ``"tensor"``: G scaled by the ratio of the norms of R and :math:`P G` (APOLLO-Mini),
    - ``"projected"``: :math:`P^T R` (Flora, arXiv:2402.03293; GaLore, arXiv:2403.03507, with random projections).

    All have the size of Adam's updates, whatever the rank: the first two are multiplied by the root of
    :math:`\min(m, n) / \mathrm{rank}`. Their norm may grow by 1 % from step to step. With fewer than four rows, take
    ``"tensor"``: the norm of one column of :math:`P G` may be near zero. Weight decay is decoupled.
    Tensors that are not matrices, and groups with ``rank=None``, get AdamW; leave embeddings and heads to it, as
    :func:`sketched_param_groups` does.

    Args:
        params: Named parameters, parameters, or groups of them. With names (``model.named_parameters()``), the
            projections do not depend on the order of the parameters, which pipelines change.
        lr: Learning rate.
        rank: Rows of P, at most the shorter side of each matrix; None for AdamW.
        update: ``"channel"``, ``"tensor"`` or ``"projected"``.
        period: Steps after which P changes. The moments stay.
        betas: Decay rates of the moments.
        eps: Term of the denominator.
        weight_decay: Weight decay.
        seed: Seed of the projections, equal on all ranks; None draws one from torch's default generator.

    Raises:
        ValueError: If a setting is out of range.
        TypeError: If ``rank`` or ``period`` is not an integer.
        ShapeError: If one of them is below 1, or a matrix has a side shorter than ``rank``.

    Cost: a step takes ``2 rank m n`` flops for an (m, n) matrix, twice as many with ``"projected"``, and draws
    ``rank min(m, n)`` signs. Ranks that shard a matrix send one number, and ``rank max(m, n)`` numbers if the shorter
    side is sharded. Moments of half-precision parameters are float32.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> optimizer = pr.optim.SketchedAdamW(model.named_parameters(), rank=4, seed=0)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model[0].weight]["sketch_avg"].shape
        torch.Size([256, 4])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None,
        update: str = "channel",
        period: int = 200,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int | None = None,
    ) -> None:
        settings = {"lr": lr, "rank": rank, "update": update, "period": period, "betas": betas, "eps": eps}
        self._has_agreed = False
        super().__init__(params, settings | {"weight_decay": weight_decay, "seed": check_seed(seed)})

    def _check_group(self, number: int) -> None:
        super()._check_group(number)
        names = self._names_of(number)
        _check_sketches(self.param_groups[number], names)
        register_projections(self, self.param_groups[number], names)

    def _names_of(self, number: int) -> list[str]:
        """Return the names of a group's parameters, equal in all layouts that keep names or else the order."""
        group = self.param_groups[number]
        names = group.get("param_names") or [
            f"parameter {place} of group {number}" for place in range(len(group["params"]))
        ]
        return [_plain(name) for name in names]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of the closure, or None without a closure.

        If matrices are sharded, every rank must call it.

        Raises:
            ValueError: If a gradient is sparse.
            ShapeError: If a matrix has changed its shape since its moments were made.
            DistributedError: On every rank, before anything changes, if ranks have other seeds, or other gradients of
                sharded matrices.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = [
            (name, p, group)
            for number, group in enumerate(self.param_groups)
            for name, p in zip(self._names_of(number), group["params"], strict=True)
        ]
        sketched = [entry for entry in entries if _is_sketched(entry[1], entry[2])]
        layouts = self._sharded_layouts(sketched)
        for name, p, group in entries:
            _check_parameter(name, p, self.state.get(p, {}), group)
        updates = [
            SketchedUpdate(name, p, group, self.state[p], layouts.get(p))
            for name, p, group in sketched
            if p.grad is not None
        ]
        apply_sketched(updates)
        for group in self.param_groups:
            plain = [p for p in group["params"] if p.grad is not None and not _is_sketched(p, group)]
            step_adamw(group, plain, self.state)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; moments keep their dtype, where torch casts them to the parameter's."""
        super().load_state_dict(state_dict)
        places = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for p, index in zip(places, indices, strict=True):
            for key in _SKETCHED_STATES:
                saved = state_dict["state"].get(index, {}).get(key)
                if saved is not None and saved.dtype != self.state[p][key].dtype:
                    self.state[p][key] = saved.to(device=self.state[p][key].device, copy=True)

    def _sharded_layouts(self, sketched: list[tuple[str, Tensor, dict[str, Any]]]) -> dict[Tensor, Any]:
        """Return how the sharded matrices lie, after all ranks agree on their gradients and, once, on their seeds."""
        # Parameters are plain tensors if nothing has imported DTensor, whose import takes a while.
        if "torch.distributed.tensor" not in sys.modules:
            return {}
        from panther.distributed.comm.agreement import agree
        from panther.optim.exchange import check_gradients
        from panther.optim.shards import layout_of

        layouts = {p: layout for _, p, _ in sketched if (layout := layout_of(p)) is not None}
        sharded = [entry for entry in sketched if entry[1] in layouts]
        if not self._has_agreed:
            for ranks in dict.fromkeys(layout.group for layout in layouts.values()):
                agree(
                    _CALL,
                    lambda ranks=ranks: {  # type: ignore[misc]
                        name: f"sketched with the seed {group['seed']} and the rank {group['rank']}"
                        for name, p, group in sharded
                        if layouts[p].group is ranks
                    },
                    ranks,
                    "give all ranks the same seed, rank and names of parameters",
                    "sketches",
                )
            self._has_agreed = True
        check_gradients(
            {name: layouts[p] for name, p, _ in sharded}, {name: p.grad is not None for name, p, _ in sharded}, _CALL
        )
        return layouts


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name


def _is_sketched(p: Tensor, group: Mapping[str, Any]) -> bool:
    return group["rank"] is not None and p.dim() == 2 and p.numel() > 0


def _check_sketches(group: dict[str, Any], names: list[str]) -> None:
    if group["update"] not in UPDATES:
        raise ValueError(f"update={group['update']!r} must be one of {', '.join(map(repr, UPDATES))}")
    check_size("period", group["period"], least=1)
    if group["rank"] is not None:
        check_size("rank", group["rank"], least=1)
    for name, p in zip(names, group["params"], strict=True):
        if _is_sketched(p, group) and group["rank"] > min(p.shape):
            raise ShapeError(
                f"rank={group['rank']} is above the shorter side of {name}, of shape {tuple(p.shape)}: give a smaller "
                "rank, or a group with rank=None, as panther.optim.sketched_param_groups does"
            )


def _check_parameter(name: str, p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    if p.grad is not None and p.grad.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name} is sparse, and SketchedAdamW takes dense gradients: set sparse=False for the "
            "embedding"
        )
    moment = state.get("sketch_avg", state.get("exp_avg"))
    if moment is None:
        return
    expected = tuple(p.shape)
    if _is_sketched(p, group):
        expected = (p.shape[0], group["rank"]) if p.shape[0] >= p.shape[1] else (group["rank"], p.shape[1])
    if tuple(moment.shape) != expected:
        raise ShapeError(
            f"the moments of {name} have the shape {tuple(moment.shape)}, and with its shape {tuple(p.shape)} and "
            f"rank={group['rank']} they have the shape {expected}: make a new optimizer after a change of either"
        )
