"""Operands of the product with a quantized weight, and the product in float64."""

import torch
from panther.kernels import pack_codes


def operands(rows, columns, outputs, group_size, rank, bits, dtype, bias=True):
    generator = torch.Generator().manual_seed(rows + columns + bits)

    def integers(top, *shape):
        return torch.randint(top, shape, generator=generator)

    groups = -(-columns // group_size)
    numbers = integers(2**bits, outputs, columns).to(torch.uint8)
    scales = torch.rand(outputs, groups, generator=generator).to(torch.bfloat16)
    zeros = integers(2**bits, outputs, groups).to(torch.uint8)
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    factors = (None, None, None)
    if rank:
        left, right = ((integers(255, *shape) - 127).to(torch.int8) for shape in ((outputs, rank), (rank, columns)))
        factors = left, right, torch.rand(rank, generator=generator) * 2**bits / 8000
    bias = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    return (x, pack_codes(numbers, bits), bits, scales, zeros, group_size, *factors, bias), numbers


def exact(args, numbers):
    x, _, _, scales, zeros, group_size, left, right, factor_scales, bias = args
    s, z = (t.double().repeat_interleave(group_size, 1)[:, : numbers.shape[1]] for t in (scales, zeros))
    weight = (numbers.double() - z) * s
    if left is not None:
        weight += left.double() * factor_scales.double() @ right.double()
    y = x.double() @ weight.mT
    return y if bias is None else y + bias.double()
