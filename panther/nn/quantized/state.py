"""Saving and loading of a quantized layer: its integers, its scales, and a record of its form.

Scales are buffers, as in other libraries' quantized layers: an optimizer that is made from ``model.parameters()`` does
not see them, and the first floating parameter of a model has the dtype in which the model computes. An int8 scale is
about 1e-3 and the scale of a factor 1e-7, so one step of Adam at any usual rate would be as large as the scale or ten
thousand times as large. Training, which the user asks for by ``train_scales_``, is of the *logarithms* of factors.
"""

__all__ = [
    "SCALE_LOGS", "STORED_SCALES", "QuantizedState", "fold_scales", "form_in", "inference_state", "train_scales_",
]  # fmt: skip

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of, plain_name
from panther.errors import FormatError, SketchMismatchError, check_flag, check_floating
from panther.nn.protocol import TRAINED_SCALES, CompressedModule
from panther.nn.sketch_record import has_values, integers_checksum, is_rounded, plain_state

STORED_SCALES = torch.bfloat16  # the dtype of scales in files, with the range of float32
_INTEGERS = ("codes", "zeros", "left", "right")
# The first number of a record in memory also holds a checksum of the integers, from this bit on. It travels with copies
# and broadcasts of all buffers, and with state_dicts. Records in the inference format have no checksum, because the
# manifest has one of each tensor.
_CHECKSUM_SHIFT = 8
SCALE_LOGS = {"scales": "scale_logs", "factor_scales": "factor_scale_logs"}


class QuantizedState(CompressedModule):
    """Base of a layer whose integers and scales are buffers, which no cast changes."""

    saved_buffer_names = ("codes", "zeros", "scales", "left", "right", "factor_scales", "record")
    checked_names = (*_INTEGERS, "record")
    _checksum: int | None = None  # of the integers that were checked last
    _is_assigned: bool = False  # whether integers were assigned since then, for example to share them
    # None if the form, given by `bits` and `low_rank`, does not have the tensor.
    codes: Tensor
    zeros: Tensor
    scales: Tensor
    left: Tensor
    right: Tensor
    factor_scales: Tensor
    # None unless the scales are trained.
    scale_logs: nn.Parameter | None
    factor_scale_logs: nn.Parameter | None
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
        """Hold ``scales`` and ``factor_scales`` in another dtype, for scales that bfloat16 cannot represent.

        Files hold bfloat16, and a layer whose scales would change by that is not saved. To train the scales, call
        :meth:`train_scales_`.

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
                setattr(self, name, scales.to(dtype))
        return self

    def train_scales_(self, train: bool = True) -> Self:
        """Make the scales trainable, relative to themselves: make an optimizer after that.

        The layer gets parameters ``scale_logs`` and ``factor_scale_logs``, float32 zeros, and multiplies its scales by
        their exponentials. A step of 0.001 changes a scale by 0.1 %, whatever the size of the scale is, so a learning
        rate that suits other parameters suits these too. The product is rounded to the dtype of the scales in each
        call, and derivatives pass through the rounding: the layer that is trained is the layer that is saved. bfloat16
        has steps of 0.4 to 0.8 %, so a scale changes once the sum of several small steps is as large as that.

        Args:
            train: False multiplies the scales by the trained factors and removes the parameters. Outputs stay equal.
                :func:`panther.save_compressed` writes such scales without being told to.

        Example:
            >>> import torch
            >>> from panther.nn import QuantizedLinear
            >>> layer = QuantizedLinear(64, 48).train_scales_()
            >>> [name for name, _ in layer.named_parameters()]
            ['bias', 'scale_logs']
            >>> [name for name, _ in layer.train_scales_(False).named_parameters()]
            ['bias']
        """
        check_flag("train", train)
        train_scales_([self], train)
        return self

    @property
    def record_mode(self) -> str:
        """The kind of the tensors, "quantized"."""
        return "quantized"

    @property
    def trains_scales(self) -> bool:
        """Whether :meth:`train_scales_` was called; the parameters may be frozen nevertheless."""
        return self.scale_logs is not None or self.factor_scale_logs is not None

    def hold_scale_logs_(self, dtype: torch.dtype) -> Self:
        """Hold ``scale_logs`` and ``factor_scale_logs``, if there are any, in a dtype; they become new parameters."""
        for name in SCALE_LOGS.values():
            logs = getattr(self, name)
            if logs is not None and logs.dtype is not dtype:
                setattr(self, name, nn.Parameter(logs.detach().to(dtype), requires_grad=logs.requires_grad))
        return self

    @torch.no_grad()
    def _forget_training(self, *names: str) -> None:
        """Make trained factors 1, all of them unless names of parameters are given."""
        for name in names or SCALE_LOGS.values():
            logs = getattr(self, name)
            if logs is not None:
                logs.zero_()

    def _effective(self, name: str, rows_of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return ``scales`` or ``factor_scales`` with the trained factors, rounded to the dtype of the scales.

        With gradients, the rounding's derivative is 1 and the result is of a wider dtype that holds the same numbers.
        With ``rows_of``, which selects rows of a tensor, only the scales of these rows are computed.
        """
        scales: Tensor = getattr(self, name)
        logs: Tensor | None = getattr(self, SCALE_LOGS[name])
        if rows_of is not None:
            scales, logs = rows_of(scales), None if logs is None else rows_of(logs)
        if logs is None:
            return scales
        if not torch.is_grad_enabled():
            return fold_scales(scales, logs)
        exact = _product(scales, logs)
        rounded = exact.detach().to(scales.dtype).to(exact.dtype)
        return exact + (rounded - exact.detach())  # exactly `rounded`, as the difference is exact

    @property
    def _scales_dtype(self) -> torch.dtype:
        """The dtype in which the scales are held: bfloat16, unless :meth:`hold_scales_` changed it."""
        return (self.factor_scales if self.bits is None else self.scales).dtype

    def recorded_dtypes(self) -> set[torch.dtype]:
        """Return the dtype of the computation: scales are bfloat16 in a layer of any dtype."""
        return {self.dtype}

    def why_not_saved(self) -> str | None:
        """Return why a file would change the scales; None if it holds them, with trained factors multiplied in."""
        scales = [getattr(self, name) for name in SCALE_LOGS]
        if all(each is None or each.is_meta or _is_stored_exactly(each) for each in scales):
            return None
        return (
            f"has scales in {self._scales_dtype}, and a file would change them to bfloat16: call "
            "hold_scales_(torch.bfloat16) first"
        )

    def follow_record_(self, record: Mapping[str, Any]) -> None:
        """Make the scales trainable if they were trained in the recorded layer."""
        if record.get(TRAINED_SCALES) is True:
            self.train_scales_()

    def adopt_values_(self, name: str, *, is_shared: bool = False) -> None:
        """Compute with integers and scales that were put into the buffers, and hold the scales in bfloat16 again."""
        if not is_shared and form_in(self.record) != self._form:
            raise FormatError(f"layer {name!r} was saved in a form that differs from config.json: save the model again")
        super().adopt_values_(name, is_shared=is_shared)
        # transformers converts tensors to float32 that a class names in _keep_in_fp32_modules, as T5 does "wo".
        if self._scales_dtype is not STORED_SCALES:
            self.to(self._scales_dtype).hold_scales_(STORED_SCALES)

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        names = ("codes", "scales", "zeros", "left", "right", "factor_scales")
        return tuple(name for name in names if getattr(self, name) is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _INTEGERS and value is not None:
            self._is_assigned = True

    def _write_record(self) -> None:
        """Write the form, which two layers with tensors of the same shapes may differ in, and the checksum."""
        self._checksum = integers_checksum(getattr(self, name) for name in _INTEGERS)
        # An inference tensor must not be written to outside of inference mode.
        with torch.no_grad(), torch.inference_mode(self.record.is_inference()):
            self.record.copy_(self._new_record(self._checksum))
        self._is_assigned = False
        self.note_writes()

    def _new_record(self, checksum: int | None) -> Tensor:
        first, *rest = self._form
        return torch.tensor([first + ((checksum or 0) << _CHECKSUM_SHIFT), *rest], dtype=torch.int32, device="cpu")

    @property
    def _form(self) -> list[int]:
        return [self.bits or 0, self.group_size or 0, self.low_rank]

    def _described(self, form: list[int]) -> str:
        bits, group_size, low_rank = form
        return f"bits={bits or None}, group_size={group_size or None}, low_rank={low_rank}"

    def check_record(self) -> None:
        """Raise SketchMismatchError unless the integers are valid, and write the record anew if it alone is not.

        Valid integers were assigned, or have the checksum of the record, as after a copy or a broadcast of all buffers,
        or were not changed since they were checked: an average may have rounded the record alone.
        """
        if type(self.record) is not Tensor or not has_values(self.record):
            return
        checksum = integers_checksum(getattr(self, name) for name in _INTEGERS)
        if checksum is None:
            return
        reason = self._record_fault(self.record, checksum)
        is_sound = checksum == self._checksum and is_rounded(self.record, self._new_record(checksum).tolist())
        if reason and not (is_sound or self._is_assigned):
            raise SketchMismatchError(f"{type(self).__name__}({self.extra_repr()}) {reason}")
        if reason and self._is_assigned:
            self.record = self.record.clone()  # Other layers may share it.
        self._checksum, self._is_assigned = checksum, False
        if not torch.equal(self.record.cpu(), self._new_record(checksum)):
            self._write_record()

    def _record_fault(self, record: Tensor, checksum: int | None) -> str | None:
        """Return why a record does not belong to this layer and integers of this checksum; None if it does."""
        form = form_in(record)
        recorded = record.tolist()[0] >> _CHECKSUM_SHIFT
        if form != self._form and recorded in (0, checksum):
            return (
                f"was saved with {self._described(form)} and here has {self.extra_repr()}: build the layer with those"
            )
        if form != self._form or (recorded and checksum and recorded != checksum):
            names = ", ".join(name for name in _INTEGERS if getattr(self, name) is not None)
            return (
                f"has integers ({names}) that do not match the checksum in its record, as after an average or a copy "
                "of some buffers: average parameters alone, copy all buffers together, and load sound values into the "
                "layer"
            )
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing; trained factors of scales are new, or multiplied in, where one side has none."""
        state_dict = self._with_own_logs(state_dict, prefix)
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        layer_tensors = {**parameters_of(self), **buffers_of(self)}
        expected = {name: tensor for name, tensor in layer_tensors.items() if tensor is not None}
        record, fault = state.get("record"), None
        checksum = integers_checksum(state.get(name) for name in _INTEGERS)
        if type(record) is Tensor and (record.shape, record.dtype) == (self.record.shape, torch.int32):
            if has_values(record) and (fault := self._record_fault(record, checksum)):
                fault = f"{type(self).__name__} {prefix[:-1]!r} {fault}."
                if form_in(record) != self._form:
                    args[-1].append(fault)
                    return
            elif has_values(record):
                # A new tensor, because the memory of a state_dict that is assigned may be read-only.
                state_dict[prefix + "record"] = self._new_record(checksum).to(record.device)
        if not self._fits(state, {name: tensor.shape for name, tensor in expected.items()}, prefix, *args):
            return
        wrong = [
            f"{prefix}{name} is {state[name].dtype} and must be {tensor.dtype}: cast only floating tensors."
            for name, tensor in expected.items()
            if not tensor.is_floating_point() and state[name].dtype is not tensor.dtype
        ]
        if wrong := wrong or ([fault] if fault else []):
            args[-1].extend(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._checksum, self._is_assigned = checksum, False
        self.note_writes()

    def _with_own_logs(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return a copy of a state that holds trained factors of scales if, and only if, this layer does."""
        state_dict = dict(state_dict)
        for name, logs_name in SCALE_LOGS.items():
            logs, key = getattr(self, logs_name), prefix + logs_name
            scales = state_dict.get(prefix + name)
            if not isinstance(scales, Tensor) or (logs is None) == (key not in state_dict):
                continue
            if logs is not None:
                state_dict[key] = torch.zeros_like(scales, dtype=logs.dtype)
            elif isinstance(state_dict[key], Tensor) and state_dict[key].shape == scales.shape:
                state_dict[prefix + name] = fold_scales(scales, state_dict.pop(key))
        return state_dict

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, but let casts change the dtype of the computation and of the bias alone."""
        was_meta = self.record.is_meta
        cast = {id(self.bias)} | ({id(self.bias.grad)} if self.bias is not None else set())
        shared = _moved_tensors(fn)

        def keep(tensor: Tensor) -> Tensor:
            if (key := _memory_of(tensor)) in shared:
                return shared[key][1]
            moved = fn(tensor)
            if moved.dtype is not tensor.dtype and id(tensor) not in cast:
                moved = tensor.to(moved.device)
            if not isinstance(tensor, nn.Parameter):  # torch itself keeps parameters shared
                shared[key] = tensor, moved
            return moved

        super()._apply(keep, recurse)
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.record.device)).dtype
        if was_meta and not self.record.is_meta:
            with torch.no_grad():
                self.record.copy_(self._new_record(None))  # The integers have no values yet.
        return self


# What each function that modules apply to their tensors has returned. torch calls one function for all modules of a
# model, and forgets it afterwards.
_MOVED: WeakKeyDictionary[Any, dict[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def _moved_tensors(fn: Callable[[Tensor], Tensor]) -> dict[Any, tuple[Tensor, Tensor]]:
    """Return the buffers that ``fn`` was applied to, by their memory, each with the result, which layers share as well.

    The buffers are held, so that no memory is used twice.
    """
    return _MOVED.setdefault(fn, {})


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that are the same memory in the same layout."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@torch.no_grad()
def train_scales_(layers: Iterable[QuantizedState], train: bool = True) -> None:
    """Call ``train_scales_`` of layers; scales that several layers share stay shared."""
    # A list keeps all tensors alive, so that their ids differ.
    changed = [
        (layer, name, getattr(layer, name), getattr(layer, SCALE_LOGS[name]))
        for layer in layers
        for name in SCALE_LOGS
        if getattr(layer, name) is not None and (getattr(layer, SCALE_LOGS[name]) is None) == train
    ]
    new_tensors: dict[tuple[int, int], tuple[Tensor, nn.Parameter | None]] = {}
    for layer, name, scales, logs in changed:
        key = id(scales), id(logs)
        if key not in new_tensors and logs is None:
            new_tensors[key] = scales, nn.Parameter(torch.zeros_like(scales, dtype=torch.float32))
        elif key not in new_tensors:
            new_tensors[key] = fold_scales(scales, logs), None
        new_scales, new_logs = new_tensors[key]
        setattr(layer, name, new_scales)
        # The logarithms come after the bias, because a model's first parameter has the dtype of its computation.
        parameters_of(layer).pop(SCALE_LOGS[name])
        layer.register_parameter(SCALE_LOGS[name], new_logs)


@torch.no_grad()
def fold_scales(scales: Tensor, logs: Tensor) -> Tensor:
    """Return scales times the exponentials of the logarithms, in the dtype of the scales."""
    return _product(scales, logs).to(scales.dtype)


def _product(scales: Tensor, logs: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(scales.dtype, logs.dtype), torch.float32)
    return scales.to(wide) * logs.to(wide).exp()


def form_in(record: Tensor) -> list[int]:
    """Return the form in a record, without the checksum of the integers."""
    first, *rest = record.tolist()
    return [first % (1 << _CHECKSUM_SHIFT), *rest]


@torch.no_grad()
def inference_state(model: nn.Module, *, keep_logs: bool = False) -> dict[str, Any]:
    """Return the state_dict of a model with the scales of quantized layers as files hold them.

    Trained factors are multiplied in, unless ``keep_logs`` is True, and records have no checksum. Scales that other
    code cast to a wider dtype, for example parameters named in transformers' ``_keep_in_fp32_modules``, are cast back.
    Scales that this would change stay in the wider dtype, and ``module_specs`` refuses them.
    """
    state: dict[str, Any] = {plain_name(name): value for name, value in plain_state(model).items()}
    folded: dict[tuple[int, int], Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, QuantizedState):
            continue
        prefix = plain_name(f"{module_name}.") if module_name else ""
        if prefix + "record" in state and has_values(module.record):
            plain = module._new_record(None).to(module.record.device)
            state[prefix + "record"] = folded.setdefault((id(module.record), 0), plain)
        for name, logs_name in SCALE_LOGS.items():
            scales, logs = getattr(module, name), getattr(module, logs_name)
            key = prefix + name
            if scales is None or key not in state:
                continue
            if logs is not None and not keep_logs:
                state.pop(prefix + logs_name, None)
                scales = folded.setdefault((id(scales), id(logs)), fold_scales(scales, logs))
                state[key] = scales
            if scales.dtype is not STORED_SCALES and _is_stored_exactly(scales):  # Other code cast them.
                state[key] = folded.setdefault((id(scales), 0), scales.to(STORED_SCALES))
    return state


def _is_stored_exactly(scales: Tensor) -> bool:
    return scales.dtype is STORED_SCALES or bool(torch.equal(scales.to(STORED_SCALES).to(scales.dtype), scales))
