r"""AdamW with orthogonalised updates of selected matrices, for training sketched layers from scratch.

A factor of a sketched layer is a tall or a wide matrix. The orthogonalised update of a matrix M (m, n) with momentum
:math:`M = P \Sigma Q^T` is :math:`P Q^T`: all its singular values are 1, so that every direction the factor can learn
is learned at the same pace, and the change of the layer's weight :math:`s\,(\Delta S_1 U_1 + U_2 \Delta S_2)` has a
known size, as U1 and U2 are fixed. It is the update of Muon (K. Jordan et al., 2024), applied to the factors of a
factorised weight as in Spectron (2026, arXiv:2602.12429), which for plain low rank also limits the product.
"""

__all__ = ["MuonAdamW", "orthogonalize", "param_groups"]

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from panther.errors import ShapeError
from panther.nn.base import CompressedModule

# Coefficients of Muon's polynomial a s + b s^3 + c s^5, whose slope at 0 is steep: five rounds bring the singular
# values from [0.01, 1] to about [0.7, 1.2], which serves as well as 1 does and costs half of the rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_RMS = 0.2  # root mean square of the entries of an update at rate 1, as for usual updates of Adam


def orthogonalize(matrices: Tensor) -> Tensor:
    r"""Return matrices with the same singular vectors and with singular values between 0.6 and 1.3.

    A polynomial of the Gram matrix of the smaller side multiplies the matrix once:
    :math:`M\,p_5(M^T M)`. Directions whose singular value is below a hundredth of the Frobenius norm become smaller.

    Args:
        matrices: ``(*, m, n)``, any floating dtype.

    Returns:
        A tensor of the same shape and dtype; zero where the matrix is zero.

    Raises:
        ShapeError: If there are fewer than two dimensions.

    Cost: ``4 m n r + 30 r^3`` flops for each matrix, r = min(m, n), in float32 or wider.

    Example:
        >>> import torch
        >>> factor = torch.randn(256, 16) * torch.logspace(0, -1, 16)
        >>> values = torch.linalg.svdvals(orthogonalize(factor))
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    if matrices.dim() < 2:
        raise ShapeError(f"orthogonalize takes matrices (*, m, n), not a tensor of shape {tuple(matrices.shape)}")
    if matrices.shape[-2] < matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    M = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    norms = torch.linalg.matrix_norm(M, keepdim=True)
    M = M / torch.where(norms > 0, norms, 1)
    gram = M.mT @ M
    # The product of the rounds is (level I + product): without I as a tensor, sharded matrices (DTensors) work too.
    level, product = 1.0, torch.zeros_like(gram)
    for left in range(_ROUNDS - 1, -1, -1):
        p = _B * gram + _C * (gram @ gram)  # The term _A I is added below.
        product = level * p + _A * product + product @ p
        level *= _A
        if left:
            twice = p @ gram
            gram = _A**2 * gram + 2 * _A * twice + twice @ p
    return (level * M + M @ product).to(matrices.dtype)


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


def param_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    factor_lr: float | None = None,
    weight_decay: float = 0.1,
    include: Callable[[str, nn.Module], bool] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for :class:`MuonAdamW`.

    The groups are: the matrices of the included layers, which are orthogonalised; other tensors of two and more
    dimensions (embeddings, dense layers); and vectors (biases, norms), without weight decay.

    Args:
        model: The model.
        lr: Learning rate of parameters that are not orthogonalised.
        factor_lr: Learning rate of orthogonalised matrices; None is 4 times ``lr``.
        weight_decay: Weight decay of all parameters except for vectors, at the rate ``lr``: orthogonalised matrices
            decay as fast as the rest.
        include: Whether the matrices of a layer are orthogonalised, from its name and the layer itself; None selects
            the sketched and the low-rank layers. Do not include embeddings and the last layer of a model.

    Returns:
        The groups that are not empty; a shared parameter is in the first of its groups.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.SKLinear(256, 256, 8), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> [(group["orthogonalize"], len(group["params"])) for group in param_groups(model)]
        [(True, 2), (False, 1), (False, 2)]
    """
    factor_lr = 4 * lr if factor_lr is None else factor_lr
    if include is None:
        include = _has_factors
    orthogonalized = {
        p
        for name, layer in model.named_modules()
        if include(name, layer)
        for p in layer.parameters(recurse=False)
        if p.ndim == 2
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p not in orthogonalized and p.ndim > 1]
    rest = {"lr": lr, "orthogonalize": False}
    decay = weight_decay * lr / factor_lr if factor_lr else weight_decay
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trainable if p in orthogonalized],
            "lr": factor_lr,
            "orthogonalize": True,
            "weight_decay": decay,
        },
        {"params": matrices, **rest, "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], **rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _has_factors(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, CompressedModule) and layer.factor_names != ()


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
