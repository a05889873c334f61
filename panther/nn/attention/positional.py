"""Stochastic relative positional encoding with sines, for attention that never forms its weights."""

__all__ = ["sinSRPE"]

import math
from typing import Self

import torch
from torch import Tensor, nn

from panther.errors import ShapeError, check_device, check_floating, check_size
from panther.nn.sketch_record import DrawnModule, read_integers
from panther.sketch import GaussianSketch, check_seed


class sinSRPE(DrawnModule):  # noqa: N801  the paper's name
    r"""Encode relative positions into the queries and keys of every head, by multiplication with random codes.

    The covariance of the codes is a stationary kernel of positions for each feature d of a head,

    .. math:: P_d(m - n) = \sum_s \lambda_{ds}^2 \cos(2 \pi f_{ds} (m - n) + \theta_{ds}),

    so that inner products of the results are, in expectation, :math:`\sum_d q_d k_d P_d(m - n)` (A. Liutkus et al.,
    "Relative positional encoding for Transformers with linear complexity", ICML 2021, arXiv:2105.08399). With
    :math:`\Omega_q = \lambda\,[\cos(2 \pi f m + \theta), \sin(2 \pi f m + \theta)]`, :math:`\Omega_k` the same without
    :math:`\theta`, and normal Z, the results are :math:`(q \odot \Omega_q) Z / \sqrt{R}` and likewise for k: R
    realisations of the codes, added over features and sines by one product, so that no code is stored.

    Args:
        num_heads: Heads.
        perHead_in: Width of a head's queries and keys.
        sines: Sines of each feature.
        num_realizations: R, the width of the results; the variance of inner products falls as 1/R.
        seed: The seed of Z; None draws one from torch's default CPU generator.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.

    Attributes:
        frequencies: f, trained, (num_heads, perHead_in, sines), in cycles per position.
        phases: theta, trained, of the same shape.
        gains: lambda, trained, of the same shape; their squares sum to 1 at first, so that P(0) is about 1.
        noise: Z, (num_heads, 2 perHead_in sines, num_realizations), a buffer in the state_dict.

    Shape:
        ``(batch, num_heads, n, perHead_in)`` to ``(batch, num_heads, n, num_realizations)``, for queries and for keys;
        their n may differ.

    Raises:
        ShapeError: If a size is not positive; in a call, if a shape does not fit.
        TypeError: If a size or the seed is not an integer.
        DTypeError: If ``dtype`` is not floating.

    Cost: ``4 perHead_in sines num_realizations`` flops for each position and head.

    Example:
        >>> import torch
        >>> encode = sinSRPE(2, 8, sines=4, num_realizations=64, seed=0)
        >>> q, k = encode(torch.randn(1, 2, 10, 8), torch.randn(1, 2, 12, 8))
        >>> q.shape, k.shape
        (torch.Size([1, 2, 10, 64]), torch.Size([1, 2, 12, 64]))
    """

    frequencies: nn.Parameter
    phases: nn.Parameter
    gains: nn.Parameter
    noise: Tensor

    def __init__(
        self,
        num_heads: int,
        perHead_in: int,
        sines: int,
        num_realizations: int = 256,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = check_size("num_heads", num_heads, least=1)
        self.perHead_in = check_size("perHead_in", perHead_in, least=1)
        self.sines = check_size("sines", sines, least=1)
        self.num_realizations = check_size("num_realizations", num_realizations, least=1)
        check_device(device)
        check_floating("dtype", dtype)
        self.seed_is_given, self.seed, self._draws = seed is not None, check_seed(seed), 0
        shape = (num_heads, perHead_in, sines)
        for name in ("frequencies", "phases", "gains"):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        noise = torch.empty(num_heads, 2 * perHead_in * sines, num_realizations, dtype=dtype, device=device)
        self.register_buffer("noise", noise)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw slow frequencies, small phases and equal gains, and the first noise of the seed again."""
        nn.init.uniform_(self.frequencies, 0, 0.05)
        nn.init.uniform_(self.phases, -0.1, 0.1)
        nn.init.constant_(self.gains, self.sines**-0.5)
        self._draws = 0
        self._draw_noise()

    def redraw_features_(self) -> Self:
        """Draw the next noise of the seed."""
        self._draws += 1
        self._draw_noise()
        return self

    def _draw_noise(self) -> None:
        heads, rows, columns = self.noise.shape
        sketch = GaussianSketch(
            heads * rows, columns, seed=self.seed, stream=self._draws, scale=False, dtype=torch.float64, device="cpu"
        )
        with torch.no_grad():
            self.noise.copy_(sketch.dense().view(heads, rows, columns))

    def get_extra_state(self) -> Tensor:
        """Return the seed, and how often noise was drawn."""
        return torch.tensor([self.seed, self._draws], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the result of :meth:`get_extra_state`."""
        if (integers := read_integers(state)) is not None:
            self.seed, self._draws = integers

    def forward(self, q: Tensor, k: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor]:
        """Encode queries and keys; positions count from ``first_position`` in both."""
        for name, x in (("queries", q), ("keys", k)):
            if x.dim() != 4 or x.shape[1] != self.num_heads or x.shape[3] != self.perHead_in:
                raise ShapeError(
                    f"{name} must have shape (batch, num_heads, n, perHead_in) = (*, {self.num_heads}, *, "
                    f"{self.perHead_in}), not {tuple(x.shape)}"
                )
        return self._encode(q, self.phases, first_position), self._encode(k, None, first_position)

    def _encode(self, x: Tensor, phases: Tensor | None, first_position: int) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(first_position, first_position + x.shape[2], device=x.device, dtype=wide)
        angle = 2 * math.pi * self.frequencies.to(wide)[:, None] * position[None, :, None, None]  # (H, n, d, sines)
        if phases is not None:
            angle = angle + phases.to(wide)[:, None]
        gains = self.gains.to(wide)[:, None]
        waves = torch.cat((angle.cos() * gains, angle.sin() * gains), -1)  # (H, n, d, 2 sines)
        coded = (x[..., None] * waves.to(x.dtype)).flatten(-2)  # (batch, H, n, 2 d sines)
        features: Tensor = coded @ (self.noise.to(x.dtype) * self.num_realizations**-0.5)
        return features

    def extra_repr(self) -> str:
        """Return sizes, as shown by print."""
        return (
            f"{self.num_heads}, perHead_in={self.perHead_in}, sines={self.sines}, "
            f"num_realizations={self.num_realizations}"
        )
