"""What the operators of attention share: their gradients, their second derivatives and their batches."""

__all__ = ["check_rows", "define_attention"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .library import define


def check_rows(name: str, rows: dict[str, Tensor], shape: torch.Size) -> None:
    """Raise unless tensors with one number for each position have a shape and numbers, or bools in a ``key_mask``."""
    for row_name, x in rows.items():
        if x.shape != shape:
            raise ValueError(
                f"{row_name} of {name} must have shape (*batch, n) = {tuple(shape)}, not {tuple(x.shape)}: expand it"
            )
        if row_name == "key_mask":
            if x.dtype is not torch.bool:
                raise TypeError(f"key_mask of {name} must be boolean, True where a key takes part, not {x.dtype}")
        elif not x.is_floating_point():
            raise TypeError(f"{row_name} of {name} must be floating, not {x.dtype}: cast it to float32")


def define_attention(
    name: str,
    operands: str,
    settings: str,
    denominator: str,
    *,
    check: Callable[..., None],
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor | None, ...]],
    reference: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Define the operators of an attention and of its gradients, and return a function that calls the first of them.

    ``operands``, ``settings`` (each after a comma) and ``denominator``, the name of the second result, are in the
    language of schemas. The operator takes operands (q is the first, v the third, and the last ones may be None), and
    settings that are not tensors. ``forward`` returns the output, of the shape of v, and one number for each row, both
    contiguous. ``backward`` takes the gradient, the operands, both results and settings. ``reference`` is the output in
    torch, differentiable any number of times.
    """
    count = operands.count("Tensor")

    def all_gradients(*args: Any) -> tuple[Tensor, ...]:  # An operator cannot return None.
        return tuple(
            [
                args[1].new_empty(0) if x is None or part is None else part.reshape(x.shape).to(x.dtype).contiguous()
                for x, part in zip(args[1 : count + 1], backward(*args), strict=True)
            ]
        )

    def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
        check(*args)
        q, v = args[0], args[2]
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        return v.new_empty(v.shape), q.new_empty(q.shape[:-1], dtype=dtype)

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(args[1].new_empty(0) if x is None else x.new_empty(x.shape) for x in args[1 : count + 1])

    def set_up_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.settings = inputs[count:]

    def set_up_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: count + 1])
        ctx.settings = inputs[count + 3 :]

    def differentiate_forward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = backward_operator(grad, *saved, *ctx.settings)
        return *(None if x is None else part for x, part in zip(saved[:count], grads, strict=True)), *(
            [None] * len(ctx.settings)
        )

    def differentiate_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute second derivatives by torch; both results get no gradient, because they depend on the operands."""
        grad, *operands = ctx.saved_tensors
        present_indices = [i for i, x in enumerate(operands) if x is not None]

        def attention(*present: Tensor) -> Tensor:
            full: list[Tensor | None] = [None] * count
            for i, x in zip(present_indices, present, strict=True):
                full[i] = x
            return reference(*full, *ctx.settings)

        def gradients(grad: Tensor, *present: Tensor) -> tuple[Tensor, ...]:
            products: tuple[Tensor, ...] = torch.func.vjp(attention, *present)[1](grad)
            return products

        present = [operands[i] for i in present_indices]
        seconds = torch.func.vjp(gradients, grad, *present)[1](tuple(grads[i] for i in present_indices))
        results: list[Tensor | None] = [None] * (count + 3 + len(ctx.settings))
        for i, second in zip([0, *(i + 1 for i in present_indices)], seconds, strict=True):
            results[i] = second
        return tuple(results)

    backward_operator: Callable[..., tuple[Tensor, ...]] = define(
        f"{name}_backward(Tensor grad, {operands}, Tensor y, Tensor {denominator}{settings}) "
        f"-> ({', '.join(['Tensor'] * count)})",
        all_gradients,
        fake_backward,
        setup_context=set_up_backward,
        backward=differentiate_backward,
        vmap=_batched(lambda: backward_operator),
    )
    operator: Callable[..., tuple[Tensor, Tensor]] = define(
        f"{name}({operands}{settings}) -> (Tensor, Tensor)",
        forward,
        fake_forward,
        setup_context=set_up_forward,
        backward=differentiate_forward,
        vmap=_batched(lambda: operator),
    )
    return operator


def _batched(function: Callable[[], Callable[..., Any]]) -> Callable[..., tuple[Any, Any]]:
    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Treat the mapped dimension as one more batch dimension."""
        moved = [
            arg
            if not isinstance(arg, Tensor)
            else arg.expand(info.batch_size, *arg.shape)
            if dim is None
            else arg.movedim(dim, 0)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results = function()(*moved)
        # A missing exponent has an empty gradient, which has no dimension to map over.
        return results, tuple(None if result.shape == (0,) else 0 for result in results)

    return rule
