"""Operands of the sketched product with sparse sketches, and the product with dense matrices in float64."""

import torch


def operands(sizes, dtype=torch.float64, rows=5, bias=True, requires_grad=False):
    n_in, n_out, rank = sizes
    generator = torch.Generator().manual_seed(n_in)

    def normal(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return values.to(dtype).requires_grad_(requires_grad)

    def signs(n):
        return (torch.randint(2, (n,), generator=generator) * 2 - 1).to(dtype)

    x, S1, S2 = normal(rows, n_in), normal(n_in, rank), normal(rank, n_out)
    return x, S1, signs(n_out), S2, signs(n_in), normal(n_out) if bias else None


def exact(x, S1, U1, S2, U2, bias, scale):
    """Return the product with matrices that are written down entry by entry."""
    rank = S1.shape[1]
    full_U1, full_U2 = torch.zeros(rank, len(U1)), torch.zeros(len(U2), rank)
    for j, sign in enumerate(U1.tolist()):
        full_U1[j % rank, j] = sign
    for i, sign in enumerate(U2.tolist()):
        full_U2[i, i % rank] = sign
    x, S1, S2, U1, U2 = (tensor.double() for tensor in (x, S1, S2, full_U1, full_U2))
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + (0.0 if bias is None else bias.double())
