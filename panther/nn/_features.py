r"""Feature maps: vectors whose inner products stand for the weights of attention, :math:`\exp(x \cdot y)` or others.

Positive random features of the exponential kernel, for :math:`\omega` normal and any :math:`A \le 0`:

.. math:: \phi_r(x) \propto \exp\!\left(A \|\omega_r\|^2 + \sqrt{1 - 4 A}\; \omega_r \cdot x - \|x\|^2 / 2\right).

A = 0 is FAVOR+ (K. Choromanski et al., "Rethinking attention with Performers", ICLR 2021, arXiv:2009.14794). The A of
least variance depends on the mean square norm :math:`\varphi` of x + y (V. Likhosherstov et al., "Chefs' random tables:
non-trigonometric random features", NeurIPS 2022, arXiv:2205.15317):

.. math:: A = \frac{1 - 1/\rho}{8}, \qquad
    \rho = \frac{\sqrt{(2 \varphi + d)^2 + 8 d \varphi} - 2 \varphi - d}{4 \varphi}.

Features come as :math:`e^{c} \phi` with :math:`\phi \le 1`, every vector with an exponent c of its own, so that they
neither overflow nor depend on one another.
"""

__all__ = ["optimal_shift", "orthogonal_gaussian", "positive_features", "relu_features", "taylor_features"]

import math

import torch
from torch import Tensor

from panther.sketch import GaussianSketch

# Added to every ReLU feature, as in the Performer: every query has some weight.
_RELU_FLOOR = 1e-3


def optimal_shift(phi: float, d: int) -> float:
    """Return the A of least variance if the mean square norm of x + y is ``phi``, in ``d`` dimensions.

    Example:
        >>> round(optimal_shift(4.0, 32), 4)
        -0.0532
    """
    # The formula without the difference of nearly equal numbers; it holds for phi = 0 too.
    rho = 2 * d / (math.sqrt((2 * phi + d) ** 2 + 8 * d * phi) + 2 * phi + d)
    return (1 - 1 / rho) / 8


def orthogonal_gaussian(rows: int, d: int, *, heads: int, seed: int, stream: int, only: range | None = None) -> Tensor:
    """Return directions (heads, rows, d) in float64 on the CPU: each normal, orthogonal within a block of d.

    Drawn from ``stream`` and the one after. Q of a QR factorisation with a positive diagonal is distributed as a random
    rotation; lengths are those of independent normal vectors. With ``only``, just these heads are drawn.
    """
    blocks = -(-rows // d)
    only = range(heads) if only is None else only
    shape = (len(only), blocks, d, d)

    def draw(stream: int) -> Tensor:
        sketch = GaussianSketch(
            heads * blocks * d, d, seed=seed, stream=stream, scale=False, dtype=torch.float64, device="cpu"
        )
        return sketch.block(range(only.start * blocks * d, only.stop * blocks * d), range(d)).view(shape)

    Q, R = torch.linalg.qr(draw(stream))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    length = draw(stream + 1).norm(dim=-1, keepdim=True)
    return (Q.mT * length).flatten(1, 2)[:, :rows].contiguous()


def positive_features(
    x: Tensor,  # (*batch, heads, n, d)
    directions: Tensor,  # (heads, m, d)
    shift: float = 0.0,
) -> tuple[Tensor, Tensor]:  # (*batch, heads, n, m), (*batch, heads, n)
    r"""Return features :math:`\phi` of the exponential kernel, at most 1, and each vector's exponent c, in float32.

    Inner products of :math:`e^{c} \phi` are, in expectation, proportional to :math:`\exp(x \cdot y)`, by a factor that
    is the same for all pairs.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, W = x.to(wide), directions.to(wide)
    logits = x @ (W * math.sqrt(1 - 4 * shift)).mT
    if shift:
        logits = logits + shift * W.square().sum(-1)[:, None, :]
    largest = logits.detach().amax(-1, keepdim=True)  # any number would do, so it needs no gradient
    return (logits - largest).exp(), largest[..., 0] - x.square().sum(-1) / 2


def relu_features(x: Tensor, directions: Tensor) -> Tensor:  # (*batch, heads, n, m)
    """Return ``relu(x . w) + 1e-3``: weights that do not approximate softmax, for layers trained with them."""
    return torch.relu(x @ directions.to(x.dtype).mT) + _RELU_FLOOR


def taylor_features(x: Tensor) -> Tensor:  # (*batch, d) -> (*batch, 1 + d + d (d + 1) / 2)
    r"""Return features with :math:`\phi(x) \cdot \phi(y) = 1 + x \cdot y + (x \cdot y)^2 / 2`, a Taylor polynomial.

    The polynomial has no zeros, so every weight is positive. Products of two entries are taken once, times the square
    root of 2.

    Example:
        >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])
        >>> torch.allclose(taylor_features(x) @ taylor_features(y), 1 + x @ y + (x @ y) ** 2 / 2)
        True
    """
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d, device=x.device)
    weight = torch.where(i == j, math.sqrt(0.5), 1.0).to(x.dtype)
    return torch.cat((x.new_ones(*x.shape[:-1], 1), x, x[..., i] * x[..., j] * weight), -1)
