"""SKLinear and each path it may take against nn.Linear, on a GPU, at the sizes it was designed for.

*SKLinear* takes the path that the dispatch chooses; *chain*, *joined*, *pair* and *fused* are forced. *optimum* is two
library products on factors that were joined beforehand.
"""

__all__ = ["sklinear_problems"]

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from panther.kernels.ops._crossover import PATHS, using_path
from torch import Tensor, nn

from benchmarks.gpu.timing import Alternative, Problem
from panther.nn import SKLinear

SHAPES = ((8192, 1, 16), (4096, 2, 64))  # width, terms, rank
BATCHES = (512, 8192, 1, 16, 64)  # those with an aim of their own first
PRECISIONS = (("bfloat16", "highest", "bfloat16"), ("float32", "high", "tf32"), ("float32", "highest", "float32"))
_MAX_FUSED_RANK = 64
_TINY_SHAPES, _TINY_BATCHES = ((256, 1, 4), (256, 2, 16)), (1, 3)

Build = Callable[[], Problem]


def sklinear_problems(device: str, tiny: bool = False) -> Iterator[tuple[dict[str, Any], Build]]:
    """Return the cases to measure: the columns that say what it is, and a function that makes it."""
    for dtype, precision, rate in PRECISIONS:
        for backward in (False, True):
            for width, terms, rank in _TINY_SHAPES if tiny else SHAPES:
                for batch in _TINY_BATCHES if tiny else BATCHES:
                    facts = {
                        "case": f"{width}x{width} R {terms * rank} batch {batch}",
                        "dtype": dtype,
                        "precision": precision if dtype == "float32" else "",
                        "direction": "forward+backward" if backward else "forward",
                    }
                    make = _training if backward else _inference
                    arguments = (width, terms, rank, batch, getattr(torch, dtype), device, precision, rate)
                    yield facts, lambda make=make, arguments=arguments: make(*arguments)  # type: ignore[misc]


def _operands(
    width: int, terms: int, rank: int, batch: int, dtype: torch.dtype, device: str, precision: str
) -> tuple[nn.Linear, SKLinear, Tensor]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(precision)
    linear = nn.Linear(width, width, device=device, dtype=dtype)
    layer = SKLinear(width, width, terms, rank, sketch="signs", device=device, dtype=dtype)
    return linear, layer, torch.randn(batch, width, device=device, dtype=dtype)


def _inference(
    width: int, terms: int, rank: int, batch: int, dtype: torch.dtype, device: str, precision: str, rate: str
) -> Problem:
    linear, layer, x = _operands(width, terms, rank, batch, dtype, device, precision)
    size, R = x.element_size(), terms * rank
    transfers = 2 * batch * width * size
    flops = 8.0 * R * width * batch
    weights = 4 * R * width * size + width * size
    unsigned = layer.S1.nbytes + layer.S2.nbytes + width * size

    def exact() -> list[Tensor]:
        return [_exact(x.double(), layer)]

    def sketched(call: Callable[[], Tensor], weight_bytes: float) -> Alternative:
        def run() -> Tensor:
            with torch.no_grad():
                return call()

        return Alternative(run, transfers + weight_bytes, flops, exact)

    def exact_linear() -> list[Tensor]:
        parameters = linear.weight.detach().double(), linear.bias.detach().double()
        return [nn.functional.linear(x.double(), *parameters)]

    def run_linear() -> Tensor:
        with torch.no_grad():
            return linear(x)

    A, B = (t.detach() for t in (torch.cat((layer.S1, layer.U2), 1), torch.cat((layer.U1, layer.S2), 0)))
    bias, scale = layer.bias, layer.scale
    dense_bytes = transfers + linear.weight.nbytes + width * size
    alternatives: dict[str, Alternative | str] = {
        "nn.Linear": Alternative(run_linear, dense_bytes, 2.0 * width**2 * batch, exact_linear),
        "SKLinear": sketched(lambda: layer(x), weights),
        "optimum": sketched(lambda: torch.addmm(bias, x @ A, B, alpha=scale), weights),  # type: ignore[arg-type]
    }
    for path in PATHS:
        taken = _on_path(path, lambda: layer(x), R, device)
        alternatives[path] = taken if isinstance(taken, str) else sketched(taken, weights)
    packed = copy.deepcopy(layer).pack_()
    for path in ("", "pair", "fused"):
        name = f"{path or 'SKLinear'}, packed"
        taken = _on_path(path, lambda: packed(x), R, device)
        alternatives[name] = taken if isinstance(taken, str) else sketched(taken, unsigned + 2 * R * width / 8)
    return Problem(alternatives, "nn.Linear", rate)


def _on_path(path: str, call: Callable[[], Any], R: int, device: str) -> Callable[[], Any] | str:
    """Return the call with its sketched products forced onto a path, or why that cannot be."""
    if path in ("pair", "fused") and device != "cuda":
        return "this path runs on a GPU"
    if path == "fused" and R > _MAX_FUSED_RANK:
        return f"this path takes a rank of at most {_MAX_FUSED_RANK}"
    if not path:
        return call

    def forced() -> Any:
        with using_path(path):
            return call()

    return forced


def _training(
    width: int, terms: int, rank: int, batch: int, dtype: torch.dtype, device: str, precision: str, rate: str
) -> Problem:
    """Compute the gradients of the input and of everything that is trained."""
    linear, layer, x = _operands(width, terms, rank, batch, dtype, device, precision)
    x.requires_grad_()
    grad = torch.randn_like(x)
    size, R = x.element_size(), terms * rank
    transfers = 5.0 * batch * width * size  # x, y and the gradient; then x again and its gradient
    A, B = torch.cat((layer.S1, layer.U2), 1).detach(), torch.cat((layer.U1, layer.S2), 0).detach()
    bias = layer.bias
    # Trained factors are read twice and their gradients written; fixed sketches are read twice.
    weights = 10 * R * width * size + 3 * width * size
    flops = 20.0 * R * width * batch  # 8 forward, and backward 1.5 times that

    def exact_layer() -> list[Tensor]:
        leaves = [t.detach().double().requires_grad_() for t in (x, layer.S1, layer.S2, bias)]  # type: ignore[union-attr]
        y = _product(leaves[0], leaves[1], layer.U1.double(), leaves[2], layer.U2.double(), leaves[3], layer.scale)
        return list(torch.autograd.grad(y, leaves, grad.double()))

    def exact_linear() -> list[Tensor]:
        leaves = [t.detach().double().requires_grad_() for t in (x, linear.weight, linear.bias)]
        return list(torch.autograd.grad(nn.functional.linear(*leaves), leaves, grad.double()))

    def optimum() -> Sequence[Tensor]:
        with torch.no_grad():
            inner = x @ A
            torch.addmm(bias, inner, B, alpha=layer.scale)  # type: ignore[arg-type]
            dinner = (grad @ B.mT) * layer.scale
            return (
                dinner @ A.mT,
                x.mT @ dinner[:, :R],
                (inner[:, R:] * layer.scale).mT @ grad,
                grad.sum(0),
            )

    leaves = [x, layer.S1, layer.S2, bias]
    dense_leaves = [x, linear.weight, linear.bias]
    dense_bytes = transfers + 3.0 * linear.weight.nbytes
    alternatives: dict[str, Alternative | str] = {
        "nn.Linear": Alternative(
            lambda: torch.autograd.grad(linear(x), dense_leaves, grad),
            dense_bytes,
            6.0 * width**2 * batch,
            exact_linear,
        ),
        "SKLinear": Alternative(
            lambda: torch.autograd.grad(layer(x), leaves, grad),  # type: ignore[arg-type]
            transfers + weights,
            flops,
            exact_layer,
        ),
        "optimum": Alternative(optimum, transfers + weights, flops, exact_layer),
    }
    for path in PATHS:
        taken = _on_path(path, lambda: torch.autograd.grad(layer(x), leaves, grad), R, device)  # type: ignore[arg-type]
        alternatives[path] = (
            taken if isinstance(taken, str) else Alternative(taken, transfers + weights, flops, exact_layer)
        )
    return Problem(alternatives, "nn.Linear", rate)


def _exact(x: Tensor, layer: SKLinear) -> Tensor:
    S1, U1, S2, U2, bias = (t.detach().double() for t in (layer.S1, layer.U1, layer.S2, layer.U2, layer.bias))  # type: ignore[union-attr]
    return _product(x, S1, U1, S2, U2, bias, layer.scale)


def _product(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor, scale: float
) -> Tensor:  # (batch, out)
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + bias
