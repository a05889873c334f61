"""The optimizer: AdamW, and Muon's updates for groups of matrices."""

__all__ = ["MuonAdamW"]

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from panther.errors import ShapeError
from panther.optim.newton_schulz import orthogonalize

_RMS = 0.2  # root mean square of the entries of an update at rate 1, as for usual updates of Adam


class MuonAdamW(torch.optim.Optimizer):
    r"""AdamW, except that groups with ``orthogonalize=True`` get Muon's orthogonalised updates.

    With the momentum :math:`M \leftarrow \mu M + G`, such a matrix changes by :math:`-0.2\,\eta \sqrt{\max(m, n)}\;
    \mathrm{orthogonalize}(G + \mu M)`: entries as large as Adam's usually are at the learning rate :math:`\eta`. Weight
    decay is decoupled in both. Make the groups by :func:`param_groups`.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of AdamW's moments.
        eps: Term of AdamW's denominator.
        weight_decay: Weight decay of both kinds of updates.
        momentum: Momentum of the orthogonalised updates.
        orthogonalize: Whether groups without this key are orthogonalised.

    Raises:
        ValueError: If a setting is out of range.
        ShapeError: If an orthogonalised group has a parameter that is not a matrix.

    Cost: the state has one number for each entry of an orthogonalised matrix and two for each entry of other
    parameters. :func:`orthogonalize` runs once for all matrices of a shape.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.SKLinear(256, 256, 8), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> optimizer = pr.optim.MuonAdamW(pr.optim.param_groups(model, lr=1e-3))
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        orthogonalize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"momentum": momentum, "orthogonalize": orthogonalize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after its settings are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of the closure, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["orthogonalize"]:
                self._step_orthogonalized(group, parameters)
            elif parameters:
                self._step_adamw(group, parameters)
        return loss

    def _step_orthogonalized(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        parameters_by_shape: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:
            shape = tuple(p.shape) if p.shape[0] >= p.shape[1] else tuple(p.shape[::-1])
            parameters_by_shape.setdefault((shape, p.dtype, p.device), []).append(p)
        # The matrices are small, so one call orthogonalizes all matrices of a shape.
        for (shape, _, _), matrices in parameters_by_shape.items():
            updates = []
            for p in matrices:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                gradient: Any = p.grad
                buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                update = gradient.add(buffer, alpha=group["momentum"])  # Nesterov's
                updates.append(update if p.shape == shape else update.mT)
            rate = group["lr"]
            for p, update in zip(matrices, orthogonalize(torch.stack(updates)), strict=True):
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(update if p.shape == shape else update.mT, alpha=-_RMS * rate * math.sqrt(shape[0]))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] |= {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        adamw(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, not {group[name]}")
    for name, values in (("betas", group["betas"]), ("momentum", (group["momentum"],))):
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{name} must be in [0, 1), not {group[name]}")
    if group["orthogonalize"]:
        wrong = next((tuple(p.shape) for p in group["params"] if p.dim() != 2), None)
        if wrong is not None:
            raise ShapeError(
                f"a group with orthogonalize=True takes matrices, not a parameter of shape {wrong}: make the groups "
                "by panther.optim.param_groups(model)"
            )
