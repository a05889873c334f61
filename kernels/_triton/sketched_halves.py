"""The halves of the sketched product by the two kernels of the *pair*, launched separately, on dense signs."""

__all__ = ["pair_inner_plan", "pair_outer_plan"]

from collections.abc import Callable

import torch
from torch import Tensor

from .sketched import inner_launch, outer_launch, reduce_launch


def pair_inner_plan(x: Tensor, S1: Tensor, U2: Tensor, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function of x, S1 and U2 that computes ``scale x [S1 | U2]``.

    A kernel computes parts over the input features, and a second kernel adds them in a fixed order.
    """
    M, R = len(x), S1.shape[1]
    launch_inner, splits = inner_launch(x, S1, U2, 64 if x.element_size() == 2 else 32)
    launch_reduce = reduce_launch(2 * M * R, splits, scale)

    def product(x: Tensor, S1: Tensor, U2: Tensor) -> Tensor:
        partial, inner = x.new_empty(splits, M, 2 * R, dtype=torch.float32), x.new_empty(M, 2 * R)
        launch_inner(x, S1, U2, partial)
        launch_reduce(partial, inner)
        return inner

    return product


def pair_outer_plan(
    inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return the function of a contiguous ``inner``, U1, S2 and the bias that computes ``inner [U1 ; S2] + bias``."""
    M, N = len(inner), S2.shape[1]
    most_rows, BN = (64, 128) if inner.element_size() == 2 else (32, 32)
    launch = outer_launch(inner, U1, S2, bias, 1.0, most_rows, BN, 1, 0, reduce=False)

    def product(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:
        out = inner.new_empty(M, N)
        # ``inner`` also takes the place of the partial sums, which are not read without REDUCE.
        launch(inner, U1, S2, bias, out, inner)
        return out

    return product
