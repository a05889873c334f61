"""Parameter groups: which matrices of a model are hidden, and get orthogonalised updates or sketched moments."""

__all__ = ["param_groups", "sketched_param_groups", "split_groups"]

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from panther.nn.protocol import CompressedModule, compressed_layers

# Layers with tensors of three dimensions that are not stacks of matrices: convolutions, bilinear and sketched kernels.
_WITH_OTHER_STACKS = (nn.Conv1d, nn.ConvTranspose1d, nn.Bilinear, CompressedModule)
_TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
# Parts of names of tables, norms and biases, and of the states of state-space models (A_log).
_NOT_HIDDEN = re.compile(
    r"embed|(^|[._])emb|(^|\.)(wte|wpe|shared)\.|(token|table|vocab|position|pos)s?(\.weight)?$|norm(?!al)|bias|_log$",
    re.IGNORECASE,
)
_HEAD = re.compile(r"(^|\.)((?!multi_)(\w+_)?head|classifier|score|logits|qa_outputs)(\.|$)", re.IGNORECASE)
_VOCABULARY = 10_000  # A longer table, eight times as long as wide, has the tokens of a vocabulary.
_NUMBERS = re.compile(r"\d+")
_BY_NUMBER = re.compile(r"^$|(^|\.)\d+\.weight$")  # a name that does not say what the layer is

_Entry = tuple[str, Tensor]
"""The name of a parameter, which may be empty, and the parameter."""


def param_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    factor_lr: float | None = None,
    weight_decay: float = 0.1,
    include: Callable[[str, nn.Module], bool] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups with names for :class:`MuonAdamW`.

    The groups are: the factors of sketched and low-rank layers, and the other hidden matrices and stacks of experts
    (experts, m, n), which are both orthogonalised; other tensors of two and more dimensions (embeddings, heads,
    convolutions); and vectors (biases, norms), without weight decay.

    Args:
        model: The model.
        lr: Learning rate of parameters that are not orthogonalised, times the factors that their layers state.
        factor_lr: Learning rate of orthogonalised matrices; None is 4 times ``lr``. Layers may state factors of it,
            such as :attr:`MonarchLinear.muon_rate_factors <panther.nn.MonarchLinear.muon_rate_factors>`.
        weight_decay: Weight decay of all parameters except for vectors, at the rate ``lr``: orthogonalised matrices
            decay as fast as the rest.
        include: Whether the matrices of a layer are hidden, from its name and the layer itself. None selects all
            matrices with two rows and columns, except for those of embeddings, of layers that share a weight with
            them, of norms, of the last ``nn.Linear``, and of parameters whose name is that of an embedding or a head.

    Returns:
        The groups that are not empty, with parameters in pairs of a name and a tensor; a shared parameter is in the
        first of its groups.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 256, 8),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> [
        ...     (group["orthogonalize"], [name for name, _ in group["params"]])
        ...     for group in param_groups(model)
        ... ]
        [(True, ['0.S1', '0.S2']), (False, ['2.weight']), (False, ['0.bias', '2.bias'])]
    """
    factor_lr = 4 * lr if factor_lr is None else factor_lr
    decay = weight_decay * lr / factor_lr if factor_lr else weight_decay
    factors = {
        p
        for layer in model.modules()
        if isinstance(layer, CompressedModule) and layer.factor_names
        for p in layer.parameters(recurse=False)
    }
    hidden, rest, vectors = _split(model, include, 2 if include is None else 1, {2, 3})
    muon: dict[str, Any] = {"lr": factor_lr, "orthogonalize": True, "weight_decay": decay}
    # Factors and dense matrices apart: checkpoints in which the latter had AdamW's moments can be loaded.
    groups: list[dict[str, Any]] = [
        *_by_rate(model, [entry for entry in hidden if entry[1] in factors], **muon, attribute="muon_rate_factors"),
        {"params": [entry for entry in hidden if entry[1] not in factors], **muon},
        *_by_rate(model, rest, lr, weight_decay, orthogonalize=False),
        {"params": vectors, "lr": lr, "orthogonalize": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _by_rate(
    model: nn.Module,
    entries: list[_Entry],
    lr: float,
    weight_decay: float,
    attribute: str = "rate_factors",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return groups of the parameters with the rates that their layers state and equal decay."""
    factors: dict[Tensor, float] = {
        p: getattr(layer, attribute)[name]
        for _, layer in compressed_layers(model)
        for name, p in layer.named_parameters(recurse=False)
        if name in getattr(layer, attribute)
    }
    return [
        {"params": [entry for entry in entries if factors.get(entry[1], 1.0) == factor]}
        | {"lr": factor * lr, "weight_decay": weight_decay / factor, **settings}
        for factor in dict.fromkeys(factors.get(p, 1.0) for _, p in entries)
    ]


def sketched_param_groups(
    model: nn.Module,
    *,
    rank: int | None,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    include: Callable[[str, nn.Module], bool] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups with names for :class:`SketchedAdamW`.

    The groups are: the hidden matrices, as in :func:`param_groups`, whose shorter side is longer than ``rank``; other
    tensors of two and more dimensions, which get AdamW; and vectors (biases, norms), which get AdamW without weight
    decay.

    Args:
        model: The model.
        rank: Rows of the projections. With None no matrix is hidden, and the groups serve :class:`torch.optim.AdamW`
            too.
        lr: Learning rate of all groups, except for factors of layers that state another rate, such as
            :attr:`MonarchLinear.rate_factors <panther.nn.MonarchLinear.rate_factors>`.
        weight_decay: Weight decay of all parameters except for vectors.
        include: Whether the matrices of a layer are hidden, from its name and the layer itself; None selects the
            matrices that it selects in :func:`param_groups`.

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
    hidden, rest, vectors = _split(model, include, 1 if rank is None else rank + 1, set() if rank is None else {2})
    groups: list[dict[str, Any]] = [
        {"params": hidden, "rank": rank, "weight_decay": weight_decay, "lr": lr},
        *_by_rate(model, rest, lr, weight_decay, rank=None),
        {"params": vectors, "rank": None, "weight_decay": 0.0, "lr": lr},
    ]
    return [group for group in groups if group["params"]]


def split_groups(
    params: Iterable[Any], setting: str, values: tuple[Any, Any], shortest_side: int, dims: set[int]
) -> tuple[list[dict[str, Any]], bool]:
    """Return groups in which a setting has one value for hidden matrices, and another value for other parameters.

    The second value is whether this function selected the matrices. It is False if a group has the setting: groups are
    then returned as they are.

    The last matrix is a head unless a name tells the head, or names tell that it is in the last one of several blocks.
    The first matrix is an embedding if neither its name nor a bias after it tells a layer. A single matrix is hidden.
    ``values`` are the values for hidden matrices and for the rest; ``dims`` are the numbers of dimensions of hidden
    matrices, where 3 adds stacks whose name has the word "expert".
    """
    groups: list[Any] = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    if any(setting in group or isinstance(group["params"], set) for group in groups):
        return groups, False  # torch refuses sets, which have no order
    lists = [[group["params"]] if isinstance(group["params"], Tensor) else list(group["params"]) for group in groups]
    entries = [_named(entry) for members in lists for entry in members]
    matrices = [(place, *entry) for place, entry in enumerate(entries) if entry[1].ndim == 2]
    excluded = {p for name, p in entries if p.ndim == 3 and "expert" not in name}
    if len(matrices) > 1:
        place, name, first = matrices[0]
        if _BY_NUMBER.search(name) and entries[place + 1][1].shape != first.shape[:1]:
            excluded.add(first)
        *earlier, last = [(_NUMBERS.sub("", name), p.shape) for _, name, p in matrices]
        is_in_block = last in earlier and not _BY_NUMBER.search(matrices[-1][1])
        if not (is_in_block or any(_HEAD.search(name) for name, _ in entries)):
            excluded.add(matrices[-1][-1])
    hidden = {p for name, p in entries if p not in excluded and _fits(p, shortest_side, dims) and _is_hidden(name, p)}
    divided = [
        {**group, "params": part, setting: values[not is_hidden]}
        for group, members in zip(groups, lists, strict=True)
        for is_hidden in (True, False)
        if (part := [entry for entry in members if (_named(entry)[1] in hidden) is is_hidden])
        or not (members or is_hidden)
    ]
    return divided, True


def _named(entry: Any) -> _Entry:
    return entry if isinstance(entry, tuple) else ("", entry)


def _split(
    model: nn.Module, include: Callable[[str, nn.Module], bool] | None, shortest_side: int, dims: set[int]
) -> tuple[list[_Entry], list[_Entry], list[_Entry]]:
    """Return the trained parameters of a model with their names: hidden matrices, other tensors, and vectors."""
    layers = dict(model.named_modules())
    last = next((layer for layer in reversed(layers.values()) if isinstance(layer, nn.Linear)), None)
    tables: set[Tensor] = set()
    hidden: set[Tensor] = set()
    for name, layer in layers.items():
        tensors = list(layer.parameters(recurse=False))
        if isinstance(layer, _WITH_OTHER_STACKS) and not getattr(layer, "has_matrix_stacks", False):
            tensors = [p for p in tensors if p.ndim != 3]
        is_table = layer is last or isinstance(layer, _TABLES) or getattr(layer, "factor_names", None) == ()
        if include is None and is_table:
            tables.update(tensors)
        elif include is None or include(name, layer):
            hidden.update(p for p in tensors if _fits(p, shortest_side, dims))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = {p for name, p in trained if p in hidden - tables and (include is not None or _is_hidden(name, p))}
    return (
        [entry for entry in trained if entry[1] in hidden],
        [entry for entry in trained if entry[1] not in hidden and entry[1].ndim > 1],
        [entry for entry in trained if entry[1].ndim < 2],
    )


def _fits(p: Tensor, shortest_side: int, dims: set[int]) -> bool:
    return p.ndim in dims and p.is_floating_point() and min(p.shape[-2:]) >= shortest_side


def _is_hidden(name: str, p: Tensor) -> bool:
    """Return whether neither the name nor the shape of a matrix is that of an embedding, a norm or a head."""
    is_table = p.shape[0] == 1 if p.ndim == 3 else p.shape[:1] > (max(_VOCABULARY, 8 * p.shape[-1]),)
    return not (is_table or _NOT_HIDDEN.search(name) or _HEAD.search(name))
