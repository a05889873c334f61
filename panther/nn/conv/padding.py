"""The padding of convolutions: the sizes of each kind, and the padding that subclasses of torch's layers add."""

__all__ = ["CONVOLUTIONS", "is_plain", "only_pads", "pad_input", "padding_of", "padding_sides"]

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from panther._random_state import preserved_generators
from panther._torch import copy_without_values, has_forward_of_convolution, has_hooks
from panther.nn.sketch_sizes import Padding

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_FEWEST_TRIALS = 4

_Sides = tuple[tuple[int, int], ...]


def is_plain(padding: Padding) -> TypeGuard[tuple[int, ...]]:
    """Return whether padding is one size for each dimension, which torch's functions take."""
    return not isinstance(padding, str) and all(isinstance(size, int) for size in padding)


def padding_sides(
    padding: Padding, size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> _Sides:
    """Return how much is added before and after each dimension of an input of a size.

    ``"same_upper"`` (the name of ONNX) gives outputs of ``ceil(size / stride)``, as in TensorFlow. If the total is odd,
    more is added after, as for torch's ``"same"``.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernel_size)
    if isinstance(padding, str):
        totals = [step * (taps - 1) for taps, step in zip(kernel_size, dilation, strict=True)]
        if padding == "same_upper":
            steps = zip(size, stride, totals, strict=True)
            totals = [max((-(-extent // step) - 1) * step + reach + 1 - extent, 0) for extent, step, reach in steps]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((sides, sides) if isinstance(sides, int) else (sides[0], sides[1]) for sides in padding)


def pad_input(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    padding_mode: str,
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input, padded as far as a convolution cannot do it, and the padding that it can do itself."""
    if padding_mode == "zeros" and is_plain(padding):
        return x, padding
    sides = padding_sides(padding, x.shape[-len(kernel_size) :], kernel_size, stride, dilation)
    # For unequal padding before and after, torch would also pad a copy, and warn about it.
    if padding_mode == "zeros" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode), (0,) * len(sides)


def padding_of(conv: Any) -> Padding:
    """Return the padding of a convolution of torch.nn, or the padding that the forward of its subclass adds.

    The padding of a subclass whose forward does more (see :func:`only_pads`) is the attribute of the layer.
    """
    padding: Padding = conv.padding
    return padding if has_forward_of_convolution(conv) else _padding_by_trial(conv) or padding


def only_pads(conv: Any) -> bool:
    """Return whether the forward of a convolution is known to compute torch's convolution of a padded input.

    The forward of a subclass is called for inputs of a few sizes, in training and in evaluation mode. It must call
    torch's convolution once, with the weight, bias, stride, dilation and groups of the layer, on the input with zeros
    around it, and return the result. If the number of zeros depends on the size of the input, then it must be the
    padding ``"same_upper"``. The subclass must not have tensors besides the weight and the bias. The calls compute no
    products. They use a copy of the layer, and do not change the random generators.
    """
    return has_forward_of_convolution(conv) or _padding_by_trial(conv) is not None


def _padding_by_trial(conv: Any) -> Padding | None:
    _, *inner_modules = conv.modules()
    state_names = {name for tensors in (conv.named_parameters(), conv.named_buffers()) for name, _ in tensors}
    if conv.padding_mode != "zeros" or not state_names <= {"weight", "bias"} or any(map(has_hooks, inner_modules)):
        return None
    geometry = (conv.kernel_size, conv.stride, conv.dilation)
    if not all(isinstance(sizes, list | tuple) and len(sizes) == conv.weight.dim() - 2 for sizes in geometry):
        return None  # the subclass gives the attribute another meaning
    spans = [step * (taps - 1) + 1 for taps, step in zip(conv.kernel_size, conv.dilation, strict=True)]
    # In each dimension, the sizes have all remainders of the stride, which the padding can depend on.
    num_trials = max(_FEWEST_TRIALS, *conv.stride)
    sizes = [[span + (trial + axis) % num_trials for axis, span in enumerate(spans)] for trial in range(num_trials)]
    x = _trial_input(conv.in_channels, [span + num_trials for span in spans])
    paddings: list[Any] = []
    copy = copy_without_values(conv)
    with torch.no_grad(), preserved_generators():
        for is_training, size in ((True, sizes[0]), *((False, size) for size in sizes)):
            copy.train(is_training)
            corner: tuple[Any, ...] = (..., *map(slice, size))
            paddings.append(_padding_of_call(copy, x[corner]))
            if paddings[-1] is None:
                return None
    in_training, *paddings = paddings
    if in_training != paddings[0]:
        return None
    if all(a == b for a, b in pairwise(paddings)):
        sides = paddings[0]
        is_symmetric = all(before == after for before, after in sides)
        return tuple(before for before, _ in sides) if is_symmetric else sides
    expected = [padding_sides("same_upper", size, conv.kernel_size, conv.stride, conv.dilation) for size in sizes]
    return "same_upper" if paddings == expected else None


def _trial_input(channels: int, size: Sequence[int]) -> Tensor:  # (1, channels, *size), float64
    """Return numbers of both signs and of many magnitudes, so that a clamp or an activation changes them; no zeros."""
    count = channels * math.prod(size)
    magnitudes = torch.logspace(-12, 12, count, base=2, dtype=torch.float64, device="cpu")
    magnitudes[::2] *= -1
    return magnitudes.reshape(1, channels, *size)


class _Recorder(TorchFunctionMode):
    """Keep the arguments of convolutions, and return a tensor of their dtype in place of each result."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in CONVOLUTIONS:
            return function(*args, **(kwargs or {}))
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        result = torch.empty_like(arguments["input"])
        self.calls.append((arguments, result))
        return result


def _padding_of_call(conv: Any, x: Tensor) -> _Sides | None:
    """Return how many zeros the layer adds before and after each dimension of its input, or None if it does more."""
    received, size = x.clone(), x.shape[2:]
    try:
        with _Recorder() as recorder:
            output = type(conv).forward(conv, received)
        ((arguments, result),) = recorder.calls
    except Exception:  # of any kind: the forward of somebody else, on an input that it was not written for
        return None
    defaults = {"stride": 1, "dilation": 1, "groups": 1}
    geometry = {name: arguments.get(name, default) for name, default in defaults.items()}
    is_changed = arguments.get("weight") is not conv.weight or arguments.get("bias") is not conv.bias
    is_changed |= any(_per_dim(geometry[name], size) != _per_dim(getattr(conv, name), size) for name in geometry)
    if output is not result or is_changed or not torch.equal(received, x):
        return None
    padding = arguments.get("padding", 0)
    padding = padding if isinstance(padding, str) else _per_dim(padding, size)
    added = padding_sides(padding, size, conv.kernel_size, conv.stride, conv.dilation)
    return _zeros_around(x, arguments["input"], added)


def _per_dim(sizes: int | Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * len(like) if len(sizes) == 1 else sizes


def _zeros_around(x: Tensor, padded: Tensor, added: _Sides) -> _Sides | None:
    """Return the zeros around ``x`` in ``padded``, to which the sides ``added`` are added; None if it holds more."""
    if padded.dtype is not x.dtype or padded.dim() != x.dim():
        return None
    sides = []
    for axis in range(2, x.dim()):
        places = padded.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist()
        if not places:
            return None
        sides.append((places[0], padded.shape[axis] - 1 - places[-1]))
    inner: tuple[Any, ...] = (..., *(slice(before, -after or None) for before, after in sides))
    if not torch.equal(padded[inner], x):
        return None
    pairs = zip(sides, added, strict=True)
    return tuple((before + more_before, after + more_after) for (before, after), (more_before, more_after) in pairs)
