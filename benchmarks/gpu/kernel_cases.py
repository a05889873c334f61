"""The launches that kernel_resources.py compiles: together they reach every kernel and every tile of it.

A case is a name and a call of a launcher on meta tensors of a given dtype, whose shapes decide what is specialised and
which tile is chosen. One line a case; the first to reach a kernel is that kernel's quick case.
"""

__all__ = ["CASES", "Case"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from panther.kernels._triton import (
    attention,
    folded,
    quantized,
    quantized_few_rows,
    signs,
    sketched,
    sketched_gradients,
    sparse,
)
from panther.kernels.reference.codes import code_bytes
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


Launch = Callable[[torch.dtype], object]


@dataclass(frozen=True)
class Case:
    """One way to launch."""

    name: str
    launch: Launch
    dtypes: tuple[torch.dtype, ...] = (BF16, F32)
    precisions: tuple[str, ...] = ("highest", "high")
    """Of float32 products, where there are any."""

    def variants(self) -> list[tuple[torch.dtype, str]]:
        """Return each dtype with each of torch's float32 matmul precisions that changes anything."""
        return [(t, precision) for t in self.dtypes for precision in self.precisions[: None if t is F32 else 1]]


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """Make a tensor without memory; its pointer counts as aligned, as those of torch's allocator are."""
    return torch.empty(shape, dtype=dtype, device="meta")


def factors(rows: int, width: int, R: int, signs: str, dtype: torch.dtype, odd: int = 0) -> tuple[Any, ...]:
    """Return the arguments of a sketched product, its signs ``"dense"`` or ``"packed"``; ``odd`` spoils alignment."""
    K, N = width + odd, width + 2 * odd
    U = {
        "dense": (meta(R, N, dtype=dtype), meta(K, R, dtype=dtype)),
        "packed": (meta(R, -(-N // 32), dtype=torch.int32), meta(R, -(-K // 32), dtype=torch.int32)),
    }[signs]
    bias = None if odd else meta(N, dtype=dtype)
    return meta(rows, K, dtype=dtype), meta(K, R, dtype=dtype), U[0], meta(R, N, dtype=dtype), U[1], bias, 0.5


def fused(rows: int, width: int, R: int, signs: str = "dense", bias: bool = True) -> Launch:
    """Run the fused product on aligned sizes, as the dispatch does: with odd sizes the pair runs."""

    def launch(t: torch.dtype) -> None:
        x, S1, U1, S2, U2, b, scale = factors(rows, width, R, signs, t)
        b = b if bias else None
        sketched.fused_plan(x, S1, U1, S2, U2, b, scale)(x, S1, U1, S2, U2, b)

    return launch


def pair(rows: int, width: int, R: int, signs: str = "dense", odd: int = 0) -> Launch:
    def launch(t: torch.dtype) -> None:
        x, S1, U1, S2, U2, bias, scale = factors(rows, width, R, signs, t, odd)
        sketched.pair_plan(x, S1, U1, S2, U2, bias, scale)(x, S1, U1, S2, U2, bias)

    return launch


def sparse_signs(rows: int, width: int, R: int, odd: int = 0) -> Launch:
    """Run the product with sparse sketches."""

    def launch(t: torch.dtype) -> None:
        x, S1, U1, S2, U2, bias, scale = factors(rows, width, R, "dense", t, odd)
        operands = x, S1, U1[0], S2, U2[:, 0].contiguous(), bias
        folded.folded_plan(*operands, scale)(*operands)

    return launch


def gradients(rows: int, width: int, R: int, bias: bool = True) -> Launch:
    """Compute the gradients of the factors and the bias."""

    def launch(t: torch.dtype) -> None:
        x, inner = meta(rows, width, dtype=t), meta(rows, 2 * R, dtype=t)
        plan = sketched_gradients.gradients_plan(x, x, inner, True, bias)
        assert plan is not None
        plan(x, x, inner, inner)

    return launch


def attend(D: int, E: int, scaled: bool = False) -> Launch:
    """Run causal linear attention, forward and backward."""

    def launch(t: torch.dtype) -> None:
        q, v = meta(16, 4096, D, dtype=t), meta(16, 4096, E, dtype=t)
        c = meta(16, 4096, dtype=F32) if scaled else None
        operands = (q, q, v, c)
        y, den = attention.forward_plan(*operands)(*operands)
        attention.backward_plan(v, *operands, y, den)(v, *operands, y, den)

    return launch


def quantized_product(rows: int, K: int, N: int, bits: int, rank: int = 0, group_size: int = 128) -> Launch:
    """Multiply by a quantized weight, with a correction and a bias if it has a rank."""

    def launch(t: torch.dtype) -> None:
        groups, ends = -(-K // group_size), (None, None, None)
        if rank:
            ends = (meta(rows, rank, dtype=t), meta(N, rank, dtype=torch.int8), meta(N, dtype=t))  # type: ignore[assignment]
        operands = meta(rows, K, dtype=t), meta(N, code_bytes(K, bits), dtype=torch.uint8)
        steps = meta(N, groups, dtype=BF16), meta(N, groups, dtype=torch.uint8)
        plan = quantized.quantized_plan(*operands, bits, *steps, group_size, *ends)
        plan(*operands, *steps, *ends)

    return launch


def few_rows(rows: int, K: int, N: int, bits: int, rank: int = 0, group_size: int = 128) -> Launch:
    """Multiply up to 16 rows by a quantized weight in one kernel, with a correction if it has a rank, and a bias."""

    def launch(t: torch.dtype) -> None:
        groups, factors = -(-K // group_size), (None, None, None)
        if rank:
            factors = (  # type: ignore[assignment]
                meta(N, rank, dtype=torch.int8), meta(rank, K, dtype=torch.int8), meta(rank, dtype=F32),
            )  # fmt: skip
        operands = meta(rows, K, dtype=t), meta(N, code_bytes(K, bits), dtype=torch.uint8)
        steps = meta(N, groups, dtype=BF16), meta(N, groups, dtype=torch.uint8)
        ends = (*factors, meta(N, dtype=t))
        plan = quantized_few_rows.few_rows_plan(*operands, bits, *steps, group_size, *ends)
        plan(*operands, *steps, *ends)

    return launch


def gather(m: int, n: int, d: int, vec_nnz: int, transposed: bool = False) -> Launch:
    """Make a sparse sketch; its entries are float64 where the other operand is."""

    def launch(t: torch.dtype) -> None:
        A = meta(n, m, dtype=t).mT if transposed else meta(m, n, dtype=t)
        index = meta(vec_nnz * m, dtype=torch.int32)
        value = meta(vec_nnz * m, dtype=torch.float64 if t is torch.float64 else F32)
        sparse.csr_matmul(meta(d + 1, dtype=torch.int64), index, value, A)

    return launch


FULL = ("highest",)  # the precision that takes more registers
ALL = (BF16, F16, F32)

CASES = [
    Case("signs", lambda t: signs.fill_signs_(meta(100, 1000, dtype=t), 5, 0, 3, 2**40, 0), ALL, FULL),
    Case("fused R 64", fused(8192, 8192, 64)),
    Case("fused R 64, packed", fused(8192, 8192, 64, "packed"), precisions=FULL),
    Case("fused R 64, tall tiles", fused(16384, 8192, 64), (BF16,)),
    Case("fused R 64, packed, tall tiles", fused(16384, 8192, 64, "packed"), (BF16,)),
    Case("fused R 64, low tiles", fused(4096, 8192, 64), (BF16,)),
    Case("fused R 64, packed, low tiles", fused(4096, 8192, 64, "packed"), (BF16,)),
    Case("fused R 16, low tiles", fused(4096, 8192, 16), (BF16,)),
    Case("fused R 64, packed, low tiles, float32", fused(4096, 8192, 64, "packed"), (F32,), FULL),
    Case("fused R 16", fused(8192, 8192, 16), precisions=FULL),
    Case("fused R 16, packed", fused(8192, 8192, 16, "packed"), precisions=FULL),
    Case("fused R 48, no bias", fused(100, 1008, 48, bias=False), ALL, FULL),
    Case("pair batch 1", pair(1, 8192, 16)),
    Case("pair batch 1, packed", pair(1, 8192, 16, "packed"), precisions=FULL),
    Case("pair batch 64, R 64", pair(64, 8192, 64)),
    Case("pair batch 16, R 128", pair(16, 4096, 128)),
    Case("pair batch 64, R 128, packed", pair(64, 4096, 128, "packed"), precisions=FULL),
    Case("pair batch 512, R 16", pair(512, 8192, 16)),
    Case("pair batch 512, R 64, packed", pair(512, 8192, 64, "packed"), precisions=FULL),
    Case("pair batch 16, R 100, narrow", pair(16, 1024, 100), (BF16,)),
    Case("pair batch 64, R 128, packed, narrow", pair(64, 1024, 128, "packed"), (BF16,)),
    Case("pair batch 64, R 128, narrow", pair(64, 1024, 128), (BF16,)),
    Case("pair batch 4096, R 64", pair(4096, 8192, 64), precisions=FULL),
    Case("pair batch 4096, R 64, packed", pair(4096, 8192, 64, "packed"), (BF16,)),
    Case("pair R 33, odd sizes", pair(3, 1000, 33, odd=1), ALL, FULL),
    Case("sparse signs, batch 1, R 16", sparse_signs(1, 8192, 16)),
    Case("sparse signs, batch 16, R 128", sparse_signs(16, 4096, 128), precisions=FULL),
    Case("sparse signs, batch 64, R 64", sparse_signs(64, 8192, 64)),
    Case("sparse signs, batch 512, R 16", sparse_signs(512, 8192, 16), precisions=FULL),
    Case("sparse signs, batch 16, R 100, narrow", sparse_signs(16, 1024, 100), precisions=FULL),
    Case("sparse signs, batch 8192, R 64", sparse_signs(8192, 8192, 64), precisions=FULL),
    Case("sparse signs, R 33, odd sizes", sparse_signs(3, 1000, 33, odd=1), ALL, FULL),
    Case("sparse signs, R 3, odd sizes", sparse_signs(70, 1000, 3, odd=1), (BF16,), FULL),
    Case("gradients R 64", gradients(8192, 8192, 64)),
    Case("gradients R 64, narrow tiles", gradients(8192, 4096, 64), (BF16,)),
    Case("gradients R 16", gradients(8192, 8192, 16), precisions=FULL),
    Case("gradients batch 1, R 16, no bias", gradients(1, 8192, 16, bias=False), precisions=FULL),
    Case("gradients batch 64, R 128", gradients(64, 4096, 128), precisions=FULL),
    Case("gradients R 33, odd sizes", gradients(70, 1001, 33), ALL, FULL),
    Case("attention D 64", attend(64, 64)),
    Case("attention D 64, scaled", attend(64, 64, scaled=True), precisions=FULL),
    Case("attention D 128", attend(128, 128), precisions=FULL),
    Case("attention D 16 E 256", attend(16, 256), precisions=FULL),
    Case("attention D 256 E 16", attend(256, 16), precisions=FULL),
    Case("attention D 256, scaled", attend(256, 256, scaled=True), precisions=FULL),
    Case("attention D 33 E 17, scaled", attend(33, 17, scaled=True), (F16, F32), FULL),
    Case("quantized int4 batch 1, rank 32", quantized_product(1, 4096, 4096, 4, rank=32)),
    Case("quantized int4 batch 512, rank 32", quantized_product(512, 4096, 4096, 4, rank=32), ALL, FULL),
    Case("quantized int8 batch 16, whole rows", quantized_product(16, 4096, 4096, 8, group_size=4096), precisions=FULL),
    Case("quantized int3 batch 512", quantized_product(512, 4096, 4096, 3), precisions=FULL),
    Case("quantized int7, odd sizes", quantized_product(70, 1001, 777, 7, rank=5, group_size=33), ALL, FULL),
    *(
        Case(
            f"quantized int{bits} batch {rows}, few rows, rank 32", few_rows(rows, 4096, 4096, bits, rank=32), ALL, FULL
        )
        for bits in range(2, 9)
        for rows in (1, 16)
    ),
    Case("quantized int4 batch 1, few rows", few_rows(1, 4096, 8192, 4), precisions=FULL),
    Case("quantized int4 batch 16, few rows", few_rows(16, 4096, 11008, 4), precisions=FULL),
    Case(
        "quantized int8 batch 16, few rows, whole rows", few_rows(16, 4096, 4096, 8, group_size=4096), precisions=FULL
    ),
    Case("quantized int7, few rows, odd sizes", few_rows(5, 1001, 777, 7, rank=5, group_size=33), ALL, FULL),
    Case("quantized int4, one row, odd sizes", few_rows(1, 1001, 777, 4, rank=5, group_size=33), ALL, FULL),
    Case("sparse sketch", gather(65536, 512, 1024, 4), (BF16, F32, F16, torch.float64), FULL),
    Case("sparse sketch, transpose", gather(65536, 512, 1024, 4, transposed=True), precisions=FULL),
    Case("sparse sketch of a vector", gather(65536, 1, 1024, 4), precisions=FULL),
    Case("sparse sketch, few entries a row", gather(1024, 512, 65536, 4), precisions=FULL),
]
