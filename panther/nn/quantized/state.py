"""What a quantized layer saves and loads: its integers as they are, and a record of the form they are read by."""

__all__ = ["QuantizedState"]

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of
from panther.errors import check_floating
from panther.nn._sketch_record import has_values
from panther.nn._sketched import CompressedModule


class QuantizedState(CompressedModule):
    """Base of a layer whose integers are saved beside its scales and its bias, and are never cast."""

    integer_names = ("codes", "zeros", "left", "right", "record")
    # None where the form has none; told so by `bits` and `low_rank`.
    codes: Tensor
    zeros: Tensor
    scales: nn.Parameter
    left: Tensor
    right: Tensor
    factor_scales: nn.Parameter
    bias: nn.Parameter | None
    record: Tensor
    bits: int | None
    group_size: int | None
    low_rank: int
    _dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of input, output and bias."""
        return self._dtype if self.bias is None else self.bias.dtype

    def hold_scales_(self, dtype: torch.dtype) -> Self:
        """Hold ``scales`` and ``factor_scales`` in another dtype, as new parameters: make an optimizer after that.

        bfloat16, in which they are stored, has steps of 0.4 to 0.8 %, larger than most of an optimizer's. Train them in
        float32 and round them at the end; the step of an optimizer such as Adam must be small beside a scale, which is
        about as large as a step between two weights, or smaller.

        Raises:
            DTypeError: If ``dtype`` is not floating.

        Example:
            >>> import torch
            >>> from panther.nn import QuantizedLinear
            >>> layer = QuantizedLinear(64, 48).hold_scales_(torch.float32)
            >>> layer.scales.dtype, layer.hold_scales_(torch.bfloat16).scales.dtype
            (torch.float32, torch.bfloat16)
        """
        check_floating("dtype", dtype)
        for name in ("scales", "factor_scales"):
            scales = getattr(self, name)
            if scales is not None and scales.dtype is not dtype:
                setattr(self, name, nn.Parameter(scales.detach().to(dtype), requires_grad=scales.requires_grad))
        return self

    def scales_dtype(self) -> torch.dtype:
        """Return the dtype in which the scales are held, bfloat16 unless :meth:`hold_scales_` changed it."""
        return (self.factor_scales if self.bits is None else self.scales).dtype

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        names = ("codes", "scales", "zeros", "left", "right", "factor_scales")
        return tuple(name for name in names if getattr(self, name) is not None)

    def _write_record(self) -> None:
        """Write the form, which two layers with tensors of the same shapes may differ in."""
        with torch.no_grad():
            self.record.copy_(torch.tensor(self._form, dtype=torch.int32, device="cpu"))

    @property
    def _form(self) -> list[int]:
        return [self.bits or 0, self.group_size or 0, self.low_rank]

    def _described(self, form: list[int]) -> str:
        bits, group_size, low_rank = form
        return f"bits={bits or None}, group_size={group_size or None}, low_rank={low_rank}"

    def check_record(self) -> None:
        """Write the record anew, as is done for saving: code that averages or empties buffers may have changed it."""
        if has_values(self.record) and self.record.tolist() != self._form:
            self._write_record()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.check_record()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        own = {**parameters_of(self), **buffers_of(self)}
        expected = {name: tensor for name, tensor in own.items() if tensor is not None}
        record = state.get("record")
        readable = isinstance(record, Tensor) and record.shape == self.record.shape and has_values(record)
        form = record.tolist() if readable else self._form  # type: ignore[union-attr]
        if form != self._form:
            args[-1].append(
                f"{type(self).__name__} {prefix[:-1]!r} was saved with {self._described(form)} and here has "
                f"{self.extra_repr()}: build the layer with those."
            )
            return
        if not self._fits(state, {name: tensor.shape for name, tensor in expected.items()}, prefix, *args):
            return
        wrong = [
            f"{prefix}{name} is {state[name].dtype} and must be {tensor.dtype}: cast only floating tensors."
            for name, tensor in expected.items()
            if not tensor.is_floating_point() and state[name].dtype is not tensor.dtype
        ]
        if wrong:
            args[-1].extend(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, but let casts change the dtype of the computation and of the bias alone."""
        was_meta = self.record.is_meta
        cast = {id(self.bias)} | ({id(self.bias.grad)} if self.bias is not None else set())

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype is tensor.dtype or id(tensor) in cast:
                return moved
            return tensor.to(moved.device)

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.record.device)).dtype
        if was_meta and not self.record.is_meta:
            self._write_record()
        return self
