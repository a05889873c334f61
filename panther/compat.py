"""Conversion of panther-ml's checkpoints to Panther's names, and the layer whose formula differs."""

__all__ = ["PantherMLAttention", "load_panther_ml"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ignored_warnings, preserved_generators
from panther.errors import PerformanceWarning, ShapeError
from panther.nn import RandMultiHeadAttention, SKConv2d, SKLinear
from panther.nn.attention.decoding.states import AttentionState
from panther.nn.sketch_record import plain_state

_LINEAR = {"S1s", "S2s", "U1s", "U2s"}
_CONV = {"S1s", "U1s"}
_ATTENTION = {"Wq", "Wk", "Wv", "W0", "projection_matrix"}
_BIASES = ("bias", "bq", "bk", "bv", "b0")
_FLOOR = 1e-5


class PantherMLAttention(RandMultiHeadAttention):
    """:class:`~panther.nn.RandMultiHeadAttention` with panther-ml's features, for models that were trained with them.

    panther-ml divides the exponentials of all keys by the largest one, and adds 1e-5 to every feature. If logits
    are large, most features are below this floor, and outputs are near the mean of the values. This function differs
    from ``kernel_fn="softmax"`` of :class:`~panther.nn.RandMultiHeadAttention`, whose features approximate the softmax
    without a floor, so a model that was trained with the floor needs it. ReLU features have panther-ml's floor too.

    The common divisor makes outputs of causal attention depend on later positions, as in panther-ml. For a new model
    use :class:`~panther.nn.RandMultiHeadAttention`, where they do not.

    Args:
        *args: As for :class:`~panther.nn.RandMultiHeadAttention`: ``embed_dim``, ``num_heads``,
            ``num_random_features``.
        kernel_fn: ``"softmax"`` or ``"relu"``.
        **kwargs: As for :class:`~panther.nn.RandMultiHeadAttention`.

    Raises:
        ValueError: If ``kernel_fn`` has another value.

    Cost: as for :class:`~panther.nn.RandMultiHeadAttention`.

    Example:
        >>> import torch
        >>> attention, x = (
        ...     PantherMLAttention(64, 4, num_random_features=32),
        ...     torch.randn(2, 100, 64),
        ... )
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 100, 64])
    """

    def __init__(self, *args: Any, kernel_fn: str = "softmax", **kwargs: Any) -> None:
        if kernel_fn not in ("softmax", "relu"):
            raise ValueError(f"kernel_fn={kernel_fn!r} is not of panther-ml: use 'softmax' or 'relu'")
        super().__init__(*args, kernel_fn=kernel_fn, **kwargs)

    def _features(self, q: Tensor | None, k: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor | None]:
        assert self.directions is not None
        wide = torch.promote_types(dtype, torch.float32)
        k, W = k.to(wide), self.directions.to(wide)
        q = k[..., :0, :] if q is None else q.to(wide)
        if self.kernel_fn == "relu":
            scale = self.head_dim**0.25 * W.shape[1] ** -0.5  # its queries and keys are not divided by d^(1/4)
            return torch.relu(q @ W.mT * scale) + _FLOOR, torch.relu(k @ W.mT * scale) + _FLOOR, None
        of_q, of_k = q @ W.mT, k @ W.mT
        largest = of_q.detach().amax(-1, keepdim=True), of_k.detach().amax((-2, -1), keepdim=True)
        return (
            (of_q - largest[0] - q.square().sum(-1, keepdim=True) / 2).exp() + _FLOOR,
            (of_k - largest[1] - k.square().sum(-1, keepdim=True) / 2).exp() + _FLOOR,
            None,
        )

    def _no_state(self, k: Tensor, v: Tensor) -> AttentionState:
        if self.kernel_fn == "softmax":
            raise ValueError(
                "panther-ml divides the features of keys by their maximum over the whole sequence, which is not known "
                "before its end: pass all queries with all keys, or use RandMultiHeadAttention"
            )
        return super()._no_state(k, v)


def load_panther_ml(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``state_dict`` of a model with panther-ml's layers to the names and shapes of Panther's.

    The result goes to ``load_state_dict`` of the same model, built with Panther's layers of the same sizes. Tensors of
    SKLinear, SKLinear_triton, SKConv2d and RandMultiHeadAttention are converted; all remaining entries are returned
    unchanged. The numbers are copied, in their dtype and on their device. A linear or convolutional layer computes the
    same up to rounding, and so does attention in :class:`PantherMLAttention`.

    The sketches, which panther-ml keeps fixed, are trained parameters in a loaded layer (*fitted*): call
    ``layer.U1.requires_grad_(False)`` to keep them fixed. The tensors of attention do not say which kernel it has or
    whether it is causal: pass ``kernel_fn`` and ``iscausal`` again.

    panther-ml is imported as ``panther`` too, so the two cannot be installed side by side. A ``state_dict`` needs
    neither library: it contains only tensors, and ``torch.load(file, weights_only=True)`` reads it.

    Args:
        state_dict: Result of ``state_dict()`` of a panther-ml model, of version 0.1.2.

    Returns:
        A new dictionary; tensors that need no conversion are shared with the argument.

    Raises:
        TypeError: If it is not a mapping of names to tensors: a module, for example.
        ValueError: If no layer of panther-ml is in it.
        ShapeError: If the shapes of a layer's tensors do not fit together, for example of convolutions before 0.1.2.

    Cost: a copy of the converted tensors.

    Example:
        >>> import torch, panther as pr
        >>> old = {
        ...     "fc.S1s": torch.randn(1, 64, 8),
        ...     "fc.U1s": torch.randn(1, 8, 32),
        ...     "fc.S2s": torch.randn(1, 8, 32),
        ...     "fc.U2s": torch.randn(1, 64, 8),
        ...     "fc.bias": torch.randn(32),
        ... }
        >>> state = load_panther_ml(old)
        >>> sorted(state)
        ['fc.S1', 'fc.S2', 'fc.U1', 'fc.U2', 'fc.bias', 'fc.sketch_seed']
        >>> model = torch.nn.ModuleDict(
        ...     {"fc": pr.nn.SKLinear(64, 32, num_terms=1, low_rank=8)}
        ... )
        >>> model.load_state_dict(state)
        <All keys matched successfully>
    """
    if not isinstance(state_dict, Mapping):
        type_name = type(state_dict).__name__
        raise TypeError(f"load_panther_ml takes a state_dict, not {type_name}: pass what model.state_dict() returned")
    layers: dict[str, dict[str, Any]] = {}
    for name, value in state_dict.items():
        prefix, _, local_name = name.rpartition(".")
        layers.setdefault(prefix, {})[local_name] = value
    converted, has_layer = dict[str, Any](), False
    for prefix, tensors in layers.items():
        layer = _layer(prefix, tensors)
        if layer is not None:
            has_layer = True
            replaced_names = {*_LINEAR, *_ATTENTION, *_BIASES}
            state = plain_state(layer)
            if isinstance(layer, RandMultiHeadAttention):
                state["_extra_state"][2] = 0  # The tensors do not say which kernel they had, so loading compares none.
            tensors = {name: value for name, value in tensors.items() if name not in replaced_names} | state
        converted |= {f"{prefix}.{name}" if prefix else name: value for name, value in tensors.items()}
    if not has_layer:
        inner = [name for name, value in state_dict.items() if isinstance(value, Mapping)]
        if inner:
            raise ValueError(
                f"this is not a state_dict, but a checkpoint with one in it: pass checkpoint[{inner[0]!r}], or the "
                f"entry of {', '.join(map(repr, state_dict))} that has the model's tensors"
            )
        raise ValueError(
            "the state_dict has no layer of panther-ml: none of its names ends in S1s and U1s, as of SKLinear and "
            "SKConv2d, or in projection_matrix and Wq, as of RandMultiHeadAttention"
        )
    return converted


def _layer(prefix: str, tensors: dict[str, Any]) -> nn.Module | None:
    """Return Panther's layer with the tensors of a panther-ml layer, or None if they belong to another layer."""
    of_layer = tensors.keys() & {*_LINEAR, *_ATTENTION}
    if not (of_layer >= _CONV or of_layer >= _ATTENTION):
        return None
    for name in of_layer:
        if not isinstance(tensors[name], Tensor):
            raise TypeError(f"{prefix}.{name} must be a tensor, not {type(tensors[name]).__name__}")
    if of_layer >= _ATTENTION:
        rows, columns = tensors["Wq"].shape[:1].numel(), tensors["projection_matrix"].shape[1:].numel()
        if rows % (columns or 1):
            raise ShapeError(
                f"projection_matrix of {prefix or 'the layer'} has {columns} columns, which must divide the {rows} "
                "rows of Wq into heads. With sinSRPE they are its num_realizations, and panther-ml saves no other "
                "tensor of it: train the model again with panther.nn.sinSRPE"
            )
    layer_tensors = {name: tensors[name] for name in (*of_layer, *_BIASES) if tensors.get(name) is not None}
    gpus = {tensor.device.index for tensor in layer_tensors.values() if tensor.is_cuda}
    try:
        # The layers of the model give the warning.
        with ignored_warnings(category=PerformanceWarning), preserved_generators(gpus):
            layer = _built(layer_tensors)
        layer.load_state_dict(layer_tensors)
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(layer_tensors.items()))
        raise ShapeError(
            f"the tensors of {prefix or 'the layer'} do not fit a layer of panther-ml 0.1.2: {shapes}: load them "
            "with the version that wrote them"
        ) from error
    return layer


def _built(tensors: dict[str, Tensor]) -> nn.Module:
    """Return a new layer with the sizes of the tensors."""
    first = tensors["Wq" if "Wq" in tensors else "S1s"]
    options: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
    if "Wq" in tensors:
        features, width = tensors["projection_matrix"].shape
        heads = len(first) // width
        return RandMultiHeadAttention(
            len(first), heads, features, bias="bq" in tensors, kernel_fn="softmax", kdim=tensors["Wk"].shape[1],
            vdim=tensors["Wv"].shape[1], **options,
        )  # fmt: skip
    options["bias"] = "bias" in tensors
    terms, low_rank, out = tensors["U1s"].shape
    if "S2s" in tensors:
        return SKLinear(first.shape[1], out, num_terms=terms, low_rank=low_rank, **options)
    _, channels, *kernel = first.shape
    if terms % 2 or len(kernel) != 2:
        raise ShapeError("not a convolution")
    return SKConv2d(channels, out, tuple(kernel), num_terms=terms // 2, low_rank=low_rank, **options)
