"""Parameter groups: which matrices of a model get orthogonalised updates, and which have sketched moments."""

__all__ = ["param_groups", "sketched_param_groups"]

from collections.abc import Callable
from typing import Any

from torch import nn

from panther.nn.base import CompressedModule

# Layers with tensors of three dimensions that are not stacks of matrices: convolutions, bilinear and sketched kernels.
_WITH_OTHER_STACKS = (nn.Conv1d, nn.ConvTranspose1d, nn.Bilinear, CompressedModule)


def param_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    factor_lr: float | None = None,
    weight_decay: float = 0.1,
    include: Callable[[str, nn.Module], bool] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for :class:`MuonAdamW`.

    The groups are: the matrices of the included layers, and their stacks of experts (experts, m, n), which are
    orthogonalised; other tensors of two and more
    dimensions (embeddings, dense layers); and vectors (biases, norms), without weight decay.

    Args:
        model: The model.
        lr: Learning rate of parameters that are not orthogonalised.
        factor_lr: Learning rate of orthogonalised matrices; None is 4 times ``lr``.
        weight_decay: Weight decay of all parameters except for vectors, at the rate ``lr``: orthogonalised matrices
            decay as fast as the rest.
        include: Whether the matrices of a layer are orthogonalised, from its name and the layer itself; None selects
            the sketched and the low-rank layers. Do not include embeddings and the last layer of a model.

    Returns:
        The groups that are not empty; a shared parameter is in the first of its groups.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 256, 8),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> [
        ...     (group["orthogonalize"], len(group["params"]))
        ...     for group in param_groups(model)
        ... ]
        [(True, 2), (False, 1), (False, 2)]
    """
    factor_lr = 4 * lr if factor_lr is None else factor_lr
    if include is None:
        include = _has_factors
    orthogonalized = {
        p
        for name, layer in model.named_modules()
        if include(name, layer)
        for p in layer.parameters(recurse=False)
        if p.is_floating_point() and (p.ndim == 2 or (p.ndim == 3 and not isinstance(layer, _WITH_OTHER_STACKS)))
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p not in orthogonalized and p.ndim > 1]
    rest = {"lr": lr, "orthogonalize": False}
    decay = weight_decay * lr / factor_lr if factor_lr else weight_decay
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trainable if p in orthogonalized],
            "lr": factor_lr,
            "orthogonalize": True,
            "weight_decay": decay,
        },
        {"params": matrices, **rest, "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], **rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _has_factors(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, CompressedModule) and layer.factor_names != ()


def sketched_param_groups(
    model: nn.Module,
    *,
    rank: int,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    include: Callable[[str, nn.Module], bool] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups with names for :class:`SketchedAdamW`.

    The groups are: the matrices of the included layers whose shorter side is longer than ``rank``; other tensors of
    two and more dimensions (embeddings, heads, convolutions), which get AdamW; and vectors (biases, norms), which get
    AdamW without weight decay.

    Args:
        model: The model.
        rank: Rows of the projections.
        lr: Learning rate of all groups.
        weight_decay: Weight decay of all parameters except for vectors.
        include: Whether the moments of a layer's matrices are sketches, from its name and the layer itself; None
            selects all layers but embeddings, the layers that share a weight with them, and the last ``nn.Linear``.

    Returns:
        The groups that are not empty, with parameters in pairs of a name and a tensor.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 256),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> [
        ...     (group["rank"], [name for name, _ in group["params"]])
        ...     for group in sketched_param_groups(model, rank=4)
        ... ]
        [(4, ['0.weight']), (None, ['2.weight']), (None, ['0.bias', '2.bias'])]
    """
    layers = dict(model.named_modules())
    tables = {layer.weight for layer in layers.values() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    last = next((layer for layer in reversed(layers.values()) if isinstance(layer, nn.Linear)), None)
    sketched = {
        p
        for name, layer in layers.items()
        if (layer is not last if include is None else include(name, layer))
        for p in layer.parameters(recurse=False)
        if p.ndim == 2 and min(p.shape) > rank and (include is not None or p not in tables)
    }
    if include is None and last is not None:
        sketched.discard(last.weight)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in trained if p in sketched], "rank": rank, "weight_decay": weight_decay},
        {
            "params": [(name, p) for name, p in trained if p not in sketched and p.ndim > 1],
            "rank": None,
            "weight_decay": weight_decay,
        },
        {"params": [(name, p) for name, p in trained if p.ndim < 2], "rank": None, "weight_decay": 0.0},
    ]
    return [group | {"lr": lr} for group in groups if group["params"]]
