"""Compare every Triton kernel with float64, by dtype and direction, without pytest and within two minutes.

The order is by breadth: each kernel runs once in bfloat16 before any kernel runs in a second dtype. Most of the time is
compilation, so several processes share the checks, each with all directions of a check in a dtype.
"""

__all__ = ["LEFT_OUT", "Check", "correctness_checks", "run_check"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import panther.kernels
import torch
from panther.kernels import reference
from panther.kernels.ops._crossover import using_path
from panther.kernels.reference.codes import pack_codes
from torch import Tensor

from benchmarks.harness import test_support
from panther.sketch import SparseSketch

LEFT_OUT = (
    "strided operands, sizes 0 and 1, batches, masks, quantized codes of 2, 5, 6 and 7 bits, ranks other than 16, 64 "
    "and 96, packed signs with more than 70 rows, tiles of 64 rows, CUDA graphs, several streams and torch.compile: "
    "the tests marked gpu cover them"
)
"""What these checks leave to the tests."""

_DTYPES = ("bfloat16", "float32", "float16")
_ROWS, _IN, _OUT = 70, 272, 208
# Path, rows and features for which all tiles have 128 rows in half precision, and the tiles of the gradients of the
# first case 128 features.
_TALL_TILES = (("pair", 4096, 8192), ("fused", 16384, 2048))

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Check:
    """A call of a kernel and the same call in float64."""

    kernel: str
    """The module of the kernel, in ``kernels/_triton``."""
    case: str
    function: Function
    exact: Function
    """Computes the same from operands in float64, in torch."""
    operands: Callable[[torch.dtype], Sequence[Tensor]]
    path: str = ""
    """The path to force for the sketched product."""
    differentiable: int = 0
    """How many of the first operands have a gradient that is compared."""


def correctness_checks(
    device: str, share: int = 0, shares: int = 1
) -> Iterator[tuple[dict[str, str], Callable[[], float]]]:
    """Yield the columns that name a check, and a function that returns its relative RMS error.

    Args:
        device: Where the kernels run.
        share: The number of the process, from 0.
        shares: The number of processes that share the checks.
    """
    checks = list(_checks(device))
    for direction in ("forward", "backward"):
        for i, (dtype, check) in enumerate(product(_DTYPES, checks)):
            if i % shares == share and (direction == "forward" or check.differentiable):
                facts = {"case": f"{check.kernel}: {check.case}", "dtype": dtype, "direction": direction}
                yield facts, partial(run_check, check, getattr(torch, dtype), direction == "backward")


def run_check(check: Check, dtype: torch.dtype, backward: bool) -> float:
    """Return the relative RMS error of a check.

    Raises:
        ArithmeticError: If the error is above the tolerance of the tests.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    tolerances = test_support("tolerances")
    operands = [operand.detach() for operand in check.operands(dtype)]
    wide = [operand.double() if operand.is_floating_point() else operand for operand in operands]
    with using_path(check.path) if check.path else nullcontext():
        if backward:
            results = _gradients(check.function, operands, check.differentiable)
        else:
            with torch.no_grad():
                results = [check.function(*operands)]
    exact = _gradients(check.exact, wide, check.differentiable) if backward else [check.exact(*wide)]
    error = max(tolerances.rms_error(result, value) for result, value in zip(results, exact, strict=True))
    bound = tolerances.KERNEL_RMS[dtype] * (4 if backward else 1)  # A gradient passes through several roundings.
    if not error <= bound:
        raise ArithmeticError(f"the relative RMS error is {error:.2e}, above {bound:.1e}")
    return float(error)


def _gradients(function: Function, operands: Sequence[Tensor], count: int) -> list[Tensor]:
    leaves = [operand.requires_grad_() for operand in operands[:count]]
    output = function(*leaves, *operands[count:])
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator).to(output.device, torch.bfloat16).to(output.dtype)
    return list(torch.autograd.grad(output, leaves, grad))


def _checks(device: str) -> Iterator[Check]:
    def randn(*shape: int, scale: float = 1.0) -> Callable[[torch.dtype], Tensor]:
        return lambda dtype: (torch.randn(shape, device=device) * scale).to(dtype)

    yield from _sketched_checks(device)
    yield from _quantized_checks(device)
    yield from _few_rows_checks(device)
    features, values = (1, 2, 200, 64), (1, 2, 200, 48)

    def attention_operands(dtype: torch.dtype) -> list[Tensor]:
        q, k = (randn(*features, scale=0.3)(torch.float32).exp().to(dtype) for _ in range(2))
        return [q, k, randn(*values)(dtype)]

    yield Check(
        "attention", "causal", panther.kernels.causal_linear_attention, reference.causal_linear_attention,
        attention_operands, differentiable=3,
    )  # fmt: skip

    def sketch(A: Tensor) -> SparseSketch:
        return SparseSketch(64, _ROWS, 4, seed=0, device=device, dtype=A.dtype)

    yield Check(
        "sparse", "4 entries a column", lambda A: sketch(A) @ A, lambda A: sketch(A).dense() @ A,
        lambda dtype: [randn(_ROWS, 33)(dtype)], differentiable=1,
    )  # fmt: skip
    place: tuple[Any, ...] = (12345678901234567, 7, 3, range(5, 40), range(100, 900))
    for law in ("sign", "uniform", "normal"):
        draw = getattr(panther.kernels, f"{law}_block")

        def drawn(x: Tensor, draw: Callable[..., Tensor] = draw) -> Tensor:
            return draw(*place, dtype=x.dtype, device=x.device)

        def drawn_exactly(x: Tensor, law: str = law) -> Tensor:
            return reference.random_block(law, *place, dtype=x.dtype, device="cpu").to(x.device)

        yield Check(
            "signs", f"{law}_block", drawn, drawn_exactly, lambda dtype: [torch.zeros(1, device=device).to(dtype)]
        )


def _sketched_checks(device: str) -> Iterator[Check]:
    def product(x: Tensor, S1: Tensor, S2: Tensor, bias: Tensor, U1: Tensor, U2: Tensor) -> Tensor:
        return panther.kernels.sketched_matmul(x, S1, U1, S2, U2, bias, 0.25)

    def packed_product(x: Tensor, S1: Tensor, S2: Tensor, bias: Tensor, U1: Tensor, U2: Tensor) -> Tensor:
        packed = reference.pack_signs(U1), reference.pack_signs(U2.mT.contiguous())
        return panther.kernels.sketched_matmul(x, S1, packed[0], S2, packed[1], bias, 0.25)

    def halves(x: Tensor, S1: Tensor, S2: Tensor, bias: Tensor, U1: Tensor, U2: Tensor) -> Tensor:
        return panther.kernels.sketched_outer(panther.kernels.sketched_inner(x, S1, U2, 0.25), U1, S2, bias)

    def exact(x: Tensor, S1: Tensor, S2: Tensor, bias: Tensor, U1: Tensor, U2: Tensor) -> Tensor:
        return 0.25 * (x @ S1 @ U1 + x @ U2 @ S2) + bias

    def operands(dtype: torch.dtype, rows: int, R: int, K: int = _IN, N: int = _OUT) -> list[Tensor]:
        shapes = (rows, K), (K, R), (R, N), (N,), (R, N), (K, R)
        x, S1, S2, bias, U1, U2 = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        return [x, S1 / 16, S2 / 4, bias, U1.sign(), U2.sign()]

    paths = ("pair", "fused") if device == "cuda" else ("joined",)
    for path in paths:
        for rows in (1, _ROWS):
            make = partial(operands, rows=rows, R=16)
            yield Check("sketched", f"{path}, {rows} rows", product, exact, make, path, 4)
            yield Check("sketched", f"{path}, {rows} rows, packed", packed_product, exact, make, path, 4)
    yield Check("sketched", f"{paths[0]}, R = 96", product, exact, partial(operands, rows=_ROWS, R=96), paths[0], 4)
    for path, rows, features in _TALL_TILES if device == "cuda" else (("joined", 4096, 64),):
        make = partial(operands, rows=rows, R=64, K=features, N=features)
        yield Check("sketched", f"{path}, {rows} rows, R = 64", product, exact, make, path, 4)
    for rows in (1, _ROWS):
        yield Check("sketched_halves", f"{rows} rows", halves, exact, partial(operands, rows=rows, R=16), "", 4)

    def sparse_exact(x: Tensor, S1: Tensor, S2: Tensor, bias: Tensor, out_signs: Tensor, in_signs: Tensor) -> Tensor:
        U1, U2 = reference.dense_sketch(out_signs, len(S2)).mT, reference.dense_sketch(in_signs, len(S2))
        return exact(x, S1, S2, bias, U1, U2)

    def sparse_operands(dtype: torch.dtype, rows: int, R: int) -> list[Tensor]:
        *dense, U1, U2 = operands(dtype, rows, R)
        return [*dense, U1[0].contiguous(), U2[:, 0].contiguous()]

    for rows, R in ((1, 16), (_ROWS, 16), (_ROWS, 96)):
        make = partial(sparse_operands, rows=rows, R=R)
        yield Check("folded", f"{paths[0]}, {rows} rows, R = {R}", product, sparse_exact, make, paths[0], 4)


def _few_rows_checks(device: str) -> Iterator[Check]:
    group_size = 64
    for bits, rank, rows in ((4, 0, 1), (4, 16, 1), (4, 16, 16), (3, 0, 5), (8, 16, 1)):

        def operands(dtype: torch.dtype, bits: int = bits, rank: int = rank, rows: int = rows) -> list[Tensor]:
            codes, factors = _codes(bits, group_size, device), []
            x, bias = torch.randn(rows, _IN, device=device).to(dtype), torch.randn(_OUT, device=device).to(dtype)
            if rank:
                left, right = (
                    torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
                    for shape in ((_OUT, rank), (rank, _IN))
                )
                factors = [left, right, torch.rand(rank, device=device) / 1e5]
            return [x, bias, *codes, *factors]

        def few_rows(*operands: Tensor, bits: int = bits) -> Tensor:
            x, bias, codes, scales, zeros, *factors = operands
            ends = (*(factors or (None, None, None)), bias)
            return torch.ops.panther.quantized_matmul_few_rows(x, codes, bits, scales, zeros, group_size, *ends)

        def exact(*operands: Tensor, bits: int = bits) -> Tensor:
            x, bias, codes, scales, zeros, *factors = operands
            inner = left = None
            if factors:
                left, right, steps = factors
                inner = (x @ right.double().mT) * steps
            return reference.quantized_matmul(x, codes, bits, scales, zeros, group_size, inner, left, bias)

        yield Check("quantized_few_rows", f"{bits} bits, rank {rank}, {rows} rows", few_rows, exact, operands)


def _codes(bits: int, group_size: int, device: str) -> list[Tensor]:
    """Return codes, scales and zeros of a weight (_OUT, _IN)."""
    codes = torch.randint(2**bits, (_OUT, _IN), dtype=torch.uint8, device=device)
    groups = -(-_IN // group_size)
    scales = (torch.rand(_OUT, groups, device=device) / _IN).to(torch.bfloat16)
    zeros = torch.full((_OUT, groups), 2 ** (bits - 1), dtype=torch.uint8, device=device)
    return [pack_codes(codes, bits), scales, zeros]


def _quantized_checks(device: str) -> Iterator[Check]:
    group_size = 64
    for bits, rank, rows in ((4, 0, 1), (4, 16, 1), (4, 16, _ROWS), (3, 0, _ROWS), (8, 0, 1)):

        def operands(dtype: torch.dtype, bits: int = bits, rank: int = rank, rows: int = rows) -> list[Tensor]:
            codes = _codes(bits, group_size, device)
            inner = torch.randn(rows, rank, device=device).to(dtype) / 1024
            left = torch.randint(-127, 128, (_OUT, rank), device=device, dtype=torch.int8)
            x, bias = torch.randn(rows, _IN, device=device).to(dtype), torch.randn(_OUT, device=device).to(dtype)
            return [x, inner, bias, *codes, left]

        def arguments(operands: Sequence[Tensor], bits: int = bits, rank: int = rank) -> tuple[Any, ...]:
            x, inner, bias, codes, scales, zeros, left = operands
            scales = scales.to(torch.bfloat16)
            return x, codes, bits, scales, zeros, group_size, *((inner, left) if rank else (None, None)), bias

        yield Check(
            "quantized",
            f"{bits} bits, rank {rank}, {rows} rows",
            lambda *tensors, arguments=arguments: torch.ops.panther.quantized_matmul(*arguments(tensors)),
            lambda *tensors, arguments=arguments: reference.quantized_matmul(*arguments(tensors)),
            operands,
        )
