"""Checks and defaults of the sizes of sketched layers and of their spatial dimensions."""

__all__ = [
    "Padding", "check_padding", "default_low_rank", "divisible", "per_dim", "terms_and_rank", "warn_unless_smaller",
]  # fmt: skip

import warnings
from collections.abc import Sequence
from typing import Any

from panther.errors import PerformanceWarning, ShapeError, check_size


def terms_and_rank(
    sizes: tuple[int, ...], num_terms: int | None, low_rank: int | None, sketch_size: int | None
) -> dict[str, Any]:
    """Return ``num_terms`` and ``low_rank`` from the arguments of a constructor, or ``{}`` without a size.

    ``sizes``, the positional arguments, are ``(sketch_size,)`` or ``(num_terms, low_rank)``, or ``(num_terms,)`` if
    ``low_rank`` is a keyword argument.
    """
    if len(sizes) > 2:
        raise TypeError(
            f"{len(sizes)} positional sketch sizes are given, and there are at most two, num_terms and low_rank: give "
            "all arguments after them by name"
        )
    names = ("sketch_size",) if len(sizes) == 1 and low_rank is None else ("num_terms", "low_rank")
    by_name = {"sketch_size": sketch_size, "num_terms": num_terms, "low_rank": low_rank}
    pairs = [*zip(names, sizes, strict=False), *((name, size) for name, size in by_name.items() if size is not None)]
    if not pairs:
        return {}
    size_by_name = dict(pairs)
    if len(size_by_name) < len(pairs) or size_by_name.keys() not in (
        {"sketch_size"},
        {"low_rank"},
        {"num_terms", "low_rank"},
    ):
        raise ShapeError(
            f"{', '.join(f'{name}={size}' for name, size in pairs)}: give either sketch_size, which is one term of "
            "that rank, or both num_terms and low_rank"
        )
    checked = {name: check_size(name, size, least=1) for name, size in size_by_name.items()}
    return {"num_terms": checked.get("num_terms", 1), "low_rank": checked.get("low_rank") or checked["sketch_size"]}


def default_low_rank(inner: int, out: int, groups: int = 1, *, products: int = 2) -> int:
    """Return the largest rank K of one term with which a layer costs at most half of the dense one.

    With ``inner`` inputs per group and ``products`` products at each side, 1 with sparse sketches and 2 with signs, K
    satisfies products K (inner + out / groups) <= inner * out / 2. It is rounded down to a multiple of 8 groups, or of
    groups if it is smaller, and is at least ``groups``. It depends only on shape and kind, so that a checkpoint loads
    everywhere.
    """
    # All terms are multiplied by groups, so that they are integers.
    K = inner * out * groups // (2 * products * (inner * groups + out))
    step = 8 * groups if 8 * groups <= K else groups
    return max(K // step * step, groups)


def warn_unless_smaller(
    layer: str, dense: str, size: str, numbers: int, fan_in: int, outputs: int, stacklevel: int = 2
) -> None:
    """Warn with both counts if a layer multiplies by at least as many numbers as the dense layer."""
    if numbers >= fan_in * outputs:
        warnings.warn(
            f"{layer} with {size} multiplies by {numbers:,} numbers, and a dense layer of {outputs} outputs, each a "
            f"sum over {fan_in} inputs, by {fan_in * outputs:,}: use a smaller size, or {dense}",
            PerformanceWarning,
            stacklevel=stacklevel + 1,
        )


def divisible(name: str, value: int, groups: int) -> int:
    """Return a size that each group has an equal share of: a positive multiple of ``groups``."""
    value = check_size(name, value, least=1)
    if value % groups:
        raise ShapeError(f"{name}={value} must be divisible by groups={groups}")
    return value


def per_dim(name: str, value: Any, dim: int, least: int) -> tuple[int, ...]:
    """Return one size for each spatial dimension, from an integer or a sequence of ``dim`` of them."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (check_size(name, value, least),) * dim  # type: ignore[arg-type]
    if len(value) != dim:
        raise ShapeError(f"{name}={tuple(value)} must be one integer or {dim} of them, one for each spatial dimension")
    return tuple(check_size(f"{name}[{i}]", size, least) for i, size in enumerate(value))


Padding = str | tuple[int, ...] | tuple[tuple[int, ...], ...]
"""A word, one size for each spatial dimension, or for each the sizes before and after it."""


def check_padding(padding: Any, stride: tuple[int, ...], dim: int) -> Padding:
    """Return padding as torch.nn's convolutions store it, ``"same_upper"``, or pairs of sizes before and after."""
    if isinstance(padding, Sequence) and any(isinstance(sides, list | tuple) for sides in padding):
        if len(padding) != dim or not all(isinstance(sides, list | tuple) and len(sides) == 2 for sides in padding):
            raise ShapeError(f"padding={padding!r} must have a pair (before, after) for each of {dim} dimensions")
        return tuple(
            tuple(check_size(f"padding[{i}][{j}]", size, 0) for j, size in enumerate(sides))
            for i, sides in enumerate(padding)
        )
    if not isinstance(padding, str):
        return per_dim("padding", padding, dim, least=0)
    if padding not in ("same", "same_upper", "valid"):
        raise ValueError(f"padding={padding!r} is unknown: use 'same', 'same_upper', 'valid' or integers")
    if padding == "same" and any(step != 1 for step in stride):
        raise ShapeError(
            f"padding='same' keeps the size of the input, which stride={stride} does not: use stride=1, 'same_upper', "
            "or integers"
        )
    return padding
