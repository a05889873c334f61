"""Places and numbers of signs of sparse sketches: loss at equal steps, for the same numbers.

A sparse sketch sends each input to one of R sums, and each output takes one of R numbers, by the remainder ``i mod R``
of its index. Beside it stand places by a hash, and two and four signs an entry, whose further places are remainders of
a shuffled index. A row of a sketch has the norm of a single sign, so that a step of a learning rate moves the weight as
far in each variant. The tasks, the sweep of learning rates and the rows are those of trial_optimizers.py.
"""

__all__ = ["METHODS", "Folded"]

import functools

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.train.optimizer_methods import Method, adamw, whole
from benchmarks.train.trial_layers import DENSE, DENSE_RATES, FRACTIONS, KINDS, sketch_rank, with_layers
from benchmarks.train.trial_optimizers import main

SIZE = "a quarter"


class Folded(nn.Module):
    """A sum of two products, each of a trained factor and a sparse sketch that is stored as a dense matrix.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        rank: Columns of both sketches.
        bias: Whether there is a bias.
        signs: Entries of a row of a sketch that are not zero.
        hashed: Whether places are drawn; otherwise they are remainders.
    """

    U1: Tensor
    U2: Tensor

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool, *, signs: int = 1, hashed: bool = False
    ) -> None:
        super().__init__()
        model = pr.nn.SKLinear(in_features, out_features, rank, bias=False)
        self.scale = model.scale
        self.S1, self.S2 = (nn.Parameter(factor.detach().clone()) for factor in (model.S1, model.S2))
        self.register_buffer("U2", _sketch(in_features, rank, signs, hashed))
        self.register_buffer("U1", _sketch(out_features, rank, signs, hashed).T.contiguous())
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in)`` to ``(*, out)``."""
        y = self.scale * ((x @ self.S1) @ self.U1 + (x @ self.U2) @ self.S2)
        return y if self.bias is None else y + self.bias


def _sketch(length: int, rank: int, signs: int, hashed: bool) -> Tensor:  # (length, rank)
    """Return a matrix with random signs in some places of each row; places that meet are added."""
    sketch, rows = torch.zeros(length, rank), torch.arange(length)
    for number in range(signs):
        remainders = (torch.randperm(length) if number else rows) % rank
        places = torch.randint(rank, (length,)) if hashed else remainders
        values = torch.randint(2, (length,)) * 2.0 - 1
        sketch.index_put_((rows, places), values / signs**0.5, accumulate=True)
    return sketch


_VARIANTS = {
    "by remainder": functools.partial(Folded),
    "by a hash": functools.partial(Folded, hashed=True),
    "two signs": functools.partial(Folded, signs=2),
    "four signs": functools.partial(Folded, signs=4),
}


def _build(
    variant: functools.partial[Folded], in_features: int, out_features: int, fraction: float, bias: bool
) -> Folded:
    return variant(in_features, out_features, sketch_rank(in_features, out_features, fraction), bias)


METHODS = {DENSE: Method(DENSE, whole, adamw, DENSE_RATES)} | {
    name: Method(
        name,
        functools.partial(with_layers, functools.partial(_build, variant), FRACTIONS[SIZE]),
        adamw,
        KINDS["sparse"][1],
    )
    for name, variant in _VARIANTS.items()
}

if __name__ == "__main__":
    main(METHODS, ["characters", "images"], "places", __doc__ or "", baseline=DENSE, widths=(192,))
