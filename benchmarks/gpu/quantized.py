"""The product with a quantized weight on a GPU, against nn.Linear's product and torch's kernel for 4 bits."""

__all__ = ["quantized_problems"]

from collections.abc import Callable, Iterator
from typing import Any

import torch
from panther.kernels import reference
from panther.kernels.reference.codes import pack_codes
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.timing import Alternative, Problem

_GROUP_SIZE = 128
_RANK = 32  # of the correction, where there is one


def quantized_problems(device: str, tiny: bool = False) -> Iterator[tuple[dict[str, Any], Callable[[], Problem]]]:
    """Return products of square weights in 4, 3 and 8 bits, with a correction and without, by batch."""
    for dtype in ("bfloat16", "float32"):
        for bits, rank in ((4, 0), (4, _RANK), (3, 0), (8, 0)):
            for batch in (1, 5) if tiny else (1, 16, 512):
                width = 96 if tiny else 4096
                case = f"{width}x{width} int{bits}{f' + rank {rank}' if rank else ''} batch {batch}"
                facts = {"case": case, "dtype": dtype, "precision": "high" if dtype == "float32" else ""}
                arguments = (width, bits, rank, batch, getattr(torch, dtype), device)
                yield facts, lambda arguments=arguments: _quantized(*arguments)  # type: ignore[misc]


def _quantized(width: int, bits: int, rank: int, batch: int, dtype: torch.dtype, device: str) -> Problem:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    group_size = min(_GROUP_SIZE, width)
    groups = -(-width // group_size)
    numbers = torch.randint(2**bits, (width, width), dtype=torch.uint8, device=device)
    codes = pack_codes(numbers, bits)
    scales = torch.rand(width, groups, device=device).to(torch.bfloat16) / width
    zeros = torch.full((width, groups), 2 ** (bits - 1), dtype=torch.uint8, device=device)
    x = torch.randn(batch, width, device=device, dtype=dtype)
    right = torch.randn(rank, width, device=device, dtype=dtype) / width**0.5
    left = torch.randint(-127, 128, (width, rank), device=device, dtype=torch.int8)
    factors, is_few_rows = None, batch <= 16  # one kernel takes them with a rank of up to 32
    if is_few_rows and rank:
        right_codes = torch.randint(-127, 128, (rank, width), device=device, dtype=torch.int8)
        factors = left, right_codes, torch.full((rank,), 1e-5, device=device)
    weight = torch.randn(width, width, device=device, dtype=dtype)
    flops, ends = 2.0 * batch * width * width, 2.0 * x.nbytes

    def inner() -> Tensor | None:
        return F.linear(x, right) / 1024 if rank else None

    def few_rows() -> Tensor:
        y: Tensor = torch.ops.panther.quantized_matmul_few_rows(
            x, codes, bits, scales, zeros, group_size, *(factors or (None, None, None)), None
        )
        return y

    def product() -> Tensor:
        # The operator, because quantized_matmul multiplies more than 256 rows by the expanded weight.
        output: Tensor = torch.ops.panther.quantized_matmul(
            x, codes, bits, scales, zeros, group_size, inner(), left if rank else None, None
        )
        return output

    def exact() -> list[Tensor]:
        z = inner()
        if factors is not None:
            z = (x.double() @ factors[1].double().mT) * factors[2].double()
        wide = (x.double(), codes, bits, scales, zeros, group_size, None if z is None else z.double())
        return [reference.quantized_matmul(*wide, left if rank else None)]

    stored = codes.nbytes + scales.nbytes + zeros.nbytes + right.nbytes + left.nbytes
    alternatives: dict[str, Alternative | str] = {
        "nn.Linear": Alternative(lambda: F.linear(x, weight), ends + weight.nbytes, flops),
        "panther": Alternative(
            few_rows if is_few_rows else product,
            ends + stored,
            flops + 4.0 * batch * width * rank,
            exact,
        ),
        "torch int4": "torch's kernel takes 4 bits and bfloat16, on a GPU",
    }
    if device == "cuda" and bits == 4 and not rank and dtype is torch.bfloat16:
        packed = torch._convert_weight_to_int4pack((numbers[:, ::2] << 4 | numbers[:, 1::2]).contiguous(), 8)
        both = torch.stack((scales.mT, torch.zeros_like(scales.mT)), 2).contiguous()
        alternatives["torch int4"] = Alternative(
            lambda: torch._weight_int4pack_mm(x, packed, group_size, both), ends + stored, flops
        )
    return Problem(alternatives, "nn.Linear", "bfloat16" if dtype is torch.bfloat16 else "tf32")
