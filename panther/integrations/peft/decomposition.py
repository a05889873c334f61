"""Split a weight into an adapter on orthonormal directions and the remainder, which the base layer keeps."""

__all__ = ["ITERATIONS", "initialize_adapter_"]

from typing import Any, Literal

import torch
from torch import Tensor

from panther.linalg import randomized_svd
from panther.nn.interpolative import InterpolativeLinear
from panther.nn.low_rank import LowRankLinear

# With four iterations, the norm of the remainder was at most 0.2 % above the optimum on weights with slowly falling
# singular values; torch.svd_lowrank(niter=4) was up to 0.9 % above it in about the same time.
ITERATIONS = 4
_RIDGE = 1e-6  # relative to the mean of the diagonal, so that the second moment of few positions has a Cholesky root


def initialize_adapter_(
    layer: Any,  # PEFT's LoRA layer
    adapter_name: str,
    moment: Tensor | None,  # (in, in), float64
    *,
    trailing: bool,
    n_iter: int | Literal["auto"],
    seed: int,
) -> float:
    """Set the adapter to U U^T W, and subtract it from the layer's weight; return the adapter's relative error.

    U are the leading left singular vectors of W, or of W C^(1/2) for a moment C; the last ones if ``trailing``.
    """
    rank = layer.r[adapter_name]
    Q, core = _core(layer)
    if trailing:
        if core.shape[0] > core.shape[1]:  # directions outside the range of the weight would leave A zero
            inner, core = torch.linalg.qr(core)
            Q = inner if Q is None else Q @ inner
        assert moment is not None
        wide = core.double()
        U = torch.linalg.eigh(wide @ moment @ wide.mT).eigenvectors[:, :rank].to(core.dtype)
    else:
        operand: Any = core if moment is None else _Weighted(core, _root(moment).to(core.dtype))
        U = randomized_svd(operand, rank, n_iter=n_iter, seed=seed).U
    T = U.mT @ core
    adapter_energy, energy = (float(_energy(part, moment)) for part in (T, core))
    if Q is not None:
        U = Q @ U
    # Balanced as in PiSSA: columns of B have the norms of rows of A. If a row of A is zero, the column of B is not, so
    # that the row can learn.
    scale = layer.scaling[adapter_name]
    root = torch.linalg.vector_norm(T, dim=1).div(scale).sqrt()
    root = torch.where(root > 0, root, 1.0)
    A, B = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    A.copy_(T / (scale * root)[:, None])
    B.copy_(U * root)
    _subtract_adapter_(layer, U, scale * B.to(U.dtype), A.to(U.dtype))
    return (max(energy - adapter_energy, 0.0) / energy) ** 0.5 if energy else 0.0


def _core(layer: Any) -> tuple[Tensor | None, Tensor]:
    """Return Q with orthonormal columns and a smaller matrix whose product is the weight, (out, in).

    None stands for Q = I.
    """
    base = layer.get_base_layer()
    if isinstance(base, LowRankLinear | InterpolativeLinear):
        left, right = base.factors()
    else:
        weight = _wide(base.weight)
        return None, weight.mT if layer.fan_in_fan_out else weight
    if left.shape[1] >= left.shape[0]:
        return None, _wide(left) @ _wide(right)
    Q, R = torch.linalg.qr(_wide(left))
    return Q, R @ _wide(right)


def _subtract_adapter_(layer: Any, U: Tensor, B: Tensor, A: Tensor) -> None:
    """Subtract the adapter from the weight, in place.

    From a dense weight, the rounded product ``B A`` is subtracted. Factors are projected by I - U U^T, so that their
    rank does not grow.
    """
    base = layer.get_base_layer()
    if isinstance(base, LowRankLinear):
        rows = _wide(base.up)
        base.up.copy_(rows - (rows @ U) @ U.mT)
    elif isinstance(base, InterpolativeLinear):
        left, right = map(_wide, base.factors())
        base.set_factors_(left - U @ (U.mT @ left), right)
    else:
        left, right = (A.mT, B.mT) if layer.fan_in_fan_out else (B, A)
        if base.weight.dtype is B.dtype:
            base.weight.addmm_(left, right, alpha=-1)
        else:
            base.weight.copy_(torch.addmm(_wide(base.weight), left, right, alpha=-1))


class _Weighted:
    """The matrix W F as an operator: the randomized SVD needs only its products."""

    def __init__(self, W: Tensor, F: Tensor) -> None:
        self.factors, self.shape, self.dtype, self.device = (W, F), (len(W), F.shape[1]), W.dtype, W.device

    def __matmul__(self, X: Tensor) -> Tensor:
        W, F = self.factors
        return W @ (F @ X)

    @property
    def T(self) -> "_Weighted":
        """The transpose."""
        W, F = self.factors
        return _Weighted(F.mT, W.mT)


def _root(moment: Tensor) -> Tensor:
    """Return F with F F^T = C."""
    ridge = _RIDGE * moment.diagonal().mean().clamp_min(torch.finfo(moment.dtype).tiny)
    return torch.linalg.cholesky(moment + ridge * torch.eye(len(moment), dtype=moment.dtype, device=moment.device))


def _energy(T: Tensor, moment: Tensor | None) -> Tensor:
    """Return tr(T C T^T), which without a moment is the squared Frobenius norm."""
    if moment is None:
        return torch.linalg.vector_norm(T, dtype=torch.float64).square()
    T = T.double()
    return ((T @ moment) * T).sum()


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
