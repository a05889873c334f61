"""Select the layers to compress, and give the reason for every layer that is kept dense."""

__all__ = [
    "LEAST_RANK", "TABLES", "Selector", "SkippedLayer", "Survey", "Target", "geometry_of", "is_conv1d", "is_selected",
    "replace_modules", "select_targets", "selectors_of", "swap_modules",
]  # fmt: skip

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from panther._torch import children_of, has_packed_weights, put_child, storage_key
from panther.compression.calibration.sentence_transformers import PLAIN, plain_modules
from panther.errors import CompressionError
from panther.nn.base import CompressedModule
from panther.nn.conv.padded import only_convolves
from panther.nn.factors import settings_refusal, weight_refusal
from panther.nn.quantized.stacked import StackedExperts, is_experts, stacked_names

Selector = type | str | Callable[[nn.Module, str], bool]
"""A type (with its subclasses), a glob of names such as ``"encoder.*.up"``, or a function of module and name."""

TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Layers that look up rows of their weight."""

# Largest number of inputs or outputs of a layer whose second moment is computed. It takes two gigabytes then. If the
# moments of all experts of a stacked weight took more together, the experts share one.
_LARGEST_SIDE = 2**14

LEAST_RANK = 2  # ranks are even, because a sketched layer has two halves
_DONE = "is compressed already"


class SkippedLayer(NamedTuple):
    """A module with a matrix that is kept dense, and the reason."""

    name: str
    """Name of the module."""
    kind: str
    """Class of the module."""
    reason: str
    """Why the module stays dense."""


@dataclass(frozen=True)
class Target:
    """A weight to compress, which belongs to one layer or is shared by nn.Linear layers and embeddings.

    The layer of the stacked weight of experts stands for a parameter, and is not a module of the model.

    Attributes:
        names: The names of all places of the layers in the model, in the model's order.
        modules: The layers, each once.
        groups: Number of groups of a convolution, or of experts; 1 for a linear layer.
        inner: Columns of a group's matrix, in / groups * kernel; embedding_dim of an embedding.
        outer: Rows of a group's matrix, out / groups; num_embeddings of an embedding.
        seeded: Whether the new layer is seeded, so that its sketches take no bytes.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    groups: int
    inner: int
    outer: int
    seeded: bool = False

    @property
    def name(self) -> str:
        """Return the name of the first place."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Return the name of the layers' class, or of the class of the experts."""
        return _kind_of(self.modules[0])

    @property
    def weight(self) -> Tensor:
        """Return the shared weight, in the layer's own layout."""
        return self.modules[0].weight  # type: ignore[return-value]

    @property
    def is_table(self) -> bool:
        """Return whether the rows of the weight are rounded independently of each other.

        They are if some of its layers look up rows, and if the weight is large.
        """
        return self.is_large or self.is_looked_up

    @property
    def is_looked_up(self) -> bool:
        """Return whether some of its layers look up rows."""
        return any(isinstance(module, TABLES) for module in self.modules)

    @property
    def is_large(self) -> bool:
        """Return whether a moment over all outputs, or all inputs, of nn.Linear or an expert would take gigabytes."""
        is_linear = all(isinstance(module, (nn.Linear, StackedExperts)) for module in self.modules)
        return is_linear and (self.is_wide or self.outer > _LARGEST_SIDE)

    @property
    def is_wide(self) -> bool:
        """Return whether only the diagonal of the moment of its inputs is kept."""
        return self.inner > _LARGEST_SIDE

    @property
    def is_stacked(self) -> bool:
        """Return whether the weight is the stacked weight of experts."""
        return isinstance(self.modules[0], StackedExperts)

    def shares_moment(self, size: int) -> bool:
        """Return whether its experts share one moment of this size, because their own would take gigabytes."""
        return self.is_stacked and self.groups * size**2 > _LARGEST_SIDE**2

    @property
    def is_multiplied(self) -> bool:
        """Return whether some of its layers multiply inputs by the weight."""
        return not all(isinstance(module, TABLES) for module in self.modules)

    @property
    def dense_numbers(self) -> int:
        """Return the number of entries of the weight."""
        return self.groups * self.inner * self.outer

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the weight on disk."""
        return self.dense_numbers * self.weight.itemsize

    @property
    def largest_rank(self) -> int:
        """Return the largest even rank of the weight at which its factors take fewer numbers than the dense weight."""
        most = (self.dense_numbers - 1) // (self.numbers(2) // 2 or 1)
        if not self.seeded:
            most = min(most, self.inner, self.outer)
        return max(most // 2 * 2, LEAST_RANK)

    def numbers(self, rank: int | None) -> int:
        """Return the entries on disk at an even rank; None is the dense weight."""
        if rank is None:
            return self.dense_numbers
        if not self.seeded:
            return rank * self.groups * (self.inner + self.outer)
        if isinstance(self.modules[0], nn.Conv2d):
            return rank * self.groups * self.inner
        return rank // 2 * (self.inner + self.outer)

    def bytes(self, rank: int | None) -> int:
        """Return the bytes on disk at a rank; None is the dense weight."""
        return self.numbers(rank) * self.weight.itemsize

    def experts(self, start: int, stop: int) -> Self:
        """Return the target of the experts from ``start`` to before ``stop`` of a stacked weight."""
        (layer,) = self.modules
        assert isinstance(layer, StackedExperts)
        part = layer.part(start, stop)
        return replace(self, modules=(part,), groups=part.num_experts)

    def matrices(self) -> Tensor:  # (groups, outer, inner), float64
        """Return the weight as one matrix for each group."""
        weight = self.weight.detach().to(torch.float64)
        if isinstance(self.modules[0], StackedExperts):
            return weight.mT.contiguous() if self.modules[0].transposed else weight
        if is_conv1d(self.modules[0]):
            weight = weight.mT
        return weight.flatten(1).unflatten(0, (self.groups, self.outer))


@dataclass(frozen=True)
class Survey:
    """The layers to compress, and their order and inputs in the model.

    Attributes:
        targets: The layers to compress, in the order of the model.
        skipped: The layers that are kept dense.
        inputs: Sets of targets that read the same input, in the order in which they run; empty without calibration.
        gradients: Whether the output has gradients that are used.
        notes: Deviations from the arguments, with reasons.
    """

    targets: tuple[Target, ...]
    skipped: tuple[SkippedLayer, ...]
    inputs: tuple[tuple[Target, ...], ...] = ()
    gradients: bool = False
    notes: tuple[str, ...] = ()

    def check(self) -> Self:
        """Return the survey itself, or raise CompressionError if there is nothing to compress."""
        if not self.targets:
            compressed = sum(entry.reason == _DONE for entry in self.skipped)
            if compressed and not self.notes:
                raise CompressionError(
                    f"the model is compressed already, in {compressed} layer{'s' if compressed > 1 else ''}, and no "
                    "further layer can be compressed: compress the original model again, with a smaller budget"
                )
            names: dict[str, list[str]] = {}
            for entry in self.skipped:
                names.setdefault(entry.reason, []).append(entry.name)
            reasons = list(self.notes)
            for reason, (first_name, *other_names) in [*names.items()][:5]:
                reasons.append(f"{first_name!r} {reason}" + (f" ({len(other_names)} more too)" if other_names else ""))
            raise CompressionError(f"the model has no layer to compress: {'; '.join(reasons) or 'it has no weights'}")
        return self

    def seeds(self, seed: int) -> dict[Target, int]:
        """Return the seed of each target, derived from the seed of the call."""
        return {target: (seed + index) % 2**63 for index, target in enumerate(self.targets)}


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    kind = type(module)  # compared by name, because this check must not import transformers
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def geometry_of(module: nn.Module) -> tuple[Any, ...]:
    """Return all that says how a convolution unfolds its input; of other layers an empty tuple."""
    if not isinstance(module, nn.Conv2d):
        return ()
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    # As text, because subclasses may have lists.
    return *map(str, sizes), module.groups, module.padding_mode


def select_targets(
    model: nn.Module,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    *,
    rank: int = LEAST_RANK,
    seeded: bool = False,
    smallest: Callable[[Target], int] | None = None,
    tables: bool = False,
    experts: bool = False,
    refuse: Callable[[Target], str | None] | None = None,
) -> Survey:
    """Find the layers that would shrink, and the reason why each further module with a matrix is kept dense.

    ``smallest`` returns the smallest number of bytes that a weight can take. Without it, a weight shrinks if a low-rank
    layer of rank ``rank`` is smaller. ``tables`` is whether embeddings and large layers are layers to compress, and
    ``experts`` whether stacked weights of experts are. ``refuse`` returns why a weight is kept dense, or None.
    """
    included, excluded = selectors_of("include", include, ("*",)), selectors_of("exclude", exclude, ())
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    # For each module with a matrix: the reason why it is kept dense, or None for a layer to compress.
    reasons: dict[nn.Module, str | None] = {}
    for module, places in [*names.items()]:
        if is_experts(module):
            for parameter_name in stacked_names(module):
                stacked = StackedExperts.at(module, parameter_name)
                names[stacked] = [f"{place}.{parameter_name}".removeprefix(".") for place in places]
                kinds = (StackedExperts,) if experts else ()
                reasons[stacked] = _refusal(stacked, [*names[stacked], *places], included, excluded, kinds)
        elif isinstance(module, CompressedModule):
            reasons[module] = _DONE
        elif _holds_matrix(module) and not isinstance(module, ParametrizationList):
            reasons[module] = _refusal(module, places, included, excluded, TABLES if tables else ())
    for module in plain_modules(model):
        if reasons.get(module, "") is None and not _is_named_type(module, included):
            reasons[module] = PLAIN

    # A weight that layers share becomes one target, so that it is compressed once and stays shared. Layers also share a
    # weight if their Parameters differ and use the same memory, as after `b.weight.data = a.weight.data`.
    owners: dict[Any, dict[nn.Module, None]] = {}
    for module in names:
        stacked_weights = stacked_names(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name in stacked_weights:
                continue
            owners.setdefault(_memory_of(parameter), {})[module] = None
    targets = []
    weights = [module.get_parameter("weight") for module, reason in reasons.items() if reason is None]
    for sharing in dict.fromkeys(tuple(owners[_memory_of(weight)]) for weight in weights):
        sound = [module for module in sharing if reasons.get(module, "") is None]
        if len(sharing) > 1 and not (len(sound) == len(sharing) and _can_share(sharing)):
            for module in sound:  # the message names an owner that is not compressed, if there is one
                owner = next(m for m in sorted(sharing, key=sound.__contains__) if m is not module)
                reasons[module] = f"shares its weight with {names[owner][0]!r} ({type(owner).__name__})"
            continue
        target = _target(tuple(name for module in sharing for name in names[module]), sharing, seeded)
        if refuse is not None and (reason := refuse(target)) is not None:
            reasons |= {module: reason for module in sharing}
            continue
        if target.is_large and not tables and not seeded:
            reasons[sound[0]] = (
                f"has {target.inner:,} inputs and {target.outer:,} outputs, and above {_LARGEST_SIDE:,} only codes are "
                "fitted: add a form such as 'int8'"
            )
            continue
        least, dense = target.numbers(rank), target.dense_numbers
        if least < dense if smallest is None else smallest(target) < target.dense_bytes:
            targets.append(target)
        elif smallest is None or target.groups > 1:
            reasons[sound[0]] = f"would not shrink: matrix rank {rank} takes {least:,} numbers, the layer {dense:,}"
        else:
            reasons[sound[0]] = f"would not shrink: no form takes less than its {target.dense_bytes:,} bytes"
    skipped = [
        SkippedLayer(names[module][0] or "(the model)", _kind_of(module), reason)
        for module, reason in reasons.items()
        if reason is not None
    ]
    places = [name for module_names in names.values() for name in module_names]
    notes = [
        f"{role}={selector!r} matches no name of model.named_modules()"
        for role, selectors in (("include", included), ("exclude", excluded))
        for selector in selectors
        if isinstance(selector, str) and not any(fnmatch.fnmatchcase(name, selector) for name in places)
    ]
    if targets and (compressed := sum(entry.reason == _DONE for entry in skipped)):
        notes.append(
            f"layers that were compressed already: {compressed}; they do not change, and the budget applies to the "
            "remaining layers: to choose all ranks jointly, compress the original model"
        )
    return Survey(tuple(targets), tuple(skipped), notes=tuple(notes))


def _can_share(modules: Sequence[nn.Module]) -> bool:
    """Return whether new layers in the place of these layers can share their weight."""
    has_table = any(isinstance(module, TABLES) for module in modules)
    is_uniform = has_table or len({type(module) for module in modules}) == 1
    return is_uniform and all(isinstance(module, (nn.Linear, *TABLES)) for module in modules)


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module, which is none of torch's, holds more than one matrix in a parameter."""
    is_foreign = not type(module).__module__.startswith("torch.") and not isinstance(module, (nn.Linear, nn.Conv2d))
    return is_foreign and any(
        not is_lazy(parameter) and parameter.dim() == 3 and len(parameter) > 1
        for parameter in module.parameters(recurse=False)
    )


def _kind_of(module: nn.Module) -> str:
    holder = module.place[0] if isinstance(module, StackedExperts) and module.place is not None else module
    return type(holder).__name__


def _memory_of(parameter: Tensor) -> Any:
    """Return a key that is equal for parameters that are views of the same memory with the same layout."""
    if is_lazy(parameter) or parameter.is_meta or parameter.layout is not torch.strided or not parameter.numel():
        return id(parameter)
    return storage_key(parameter), parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype


def selectors_of(role: str, argument: Any, default: tuple[Selector, ...]) -> tuple[Selector, ...]:
    """Return the selectors of an argument ``include`` or ``exclude``, which ``role`` names; None is ``default``."""
    if argument is None:
        return default
    selectors = argument if isinstance(argument, (list, tuple, set, frozenset)) else (argument,)
    for selector in selectors:
        if not (isinstance(selector, (type, str)) or callable(selector)):
            raise TypeError(f"{role} takes types, globs of names and functions, not {type(selector).__name__}")
    return tuple(selectors)


def is_selected(selector: Selector, names: Sequence[str], module: nn.Module) -> bool:
    """Return whether a selector takes a module that has these names."""
    if isinstance(selector, type):
        return isinstance(module, selector)
    if isinstance(selector, str):
        return any(fnmatch.fnmatchcase(name, selector) for name in names)
    return any(selector(module, name) for name in names)


def _holds_matrix(module: nn.Module) -> bool:
    # nn.Linear and nn.Conv2d count even if pruning or weight_norm computes their weight, which is then not in
    # `_parameters`. Quantized layers of torch hold packed weights, which are not parameters either.
    return (
        isinstance(module, (nn.Linear, nn.Conv2d))
        or has_packed_weights(module)
        or any(is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


def _refusal(
    module: nn.Module,
    names: Sequence[str],
    included: Sequence[Selector],
    excluded: Sequence[Selector],
    further_kinds: tuple[type[nn.Module], ...],
) -> str | None:
    """Return why a module that holds a matrix is kept dense, or None if the module can be compressed.

    For a stacked weight, ``names`` are the places of the parameter and of the module of experts, and the checks of a
    forward, of hooks and of the class are those of the module of experts.
    """
    kind, holder = type(module), module
    if isinstance(module, StackedExperts):
        assert module.place is not None
        holder = module.place[0]
        if kind not in further_kinds:
            return (
                "holds the weights of experts, which only codes can store, as forms 'int8' and 'int4' of pr.compress do"
            )
    elif _is_stack(module):
        return (
            "holds a stack of matrices and is not a module of experts as transformers has them, so that nothing tells "
            "what multiplies by it: kept as it is"
        )
    if has_packed_weights(module):
        return "is quantized: compress first, then quantize"
    if not (isinstance(module, (nn.Linear, nn.Conv2d, *further_kinds)) or is_conv1d(module)):
        return "not a Linear, Conv2d or Conv1D layer: kept as it is"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "belongs to nn.MultiheadAttention, which reads its weight and never calls it"
    if names == [""]:
        return "is the model itself, which cannot be replaced in place: wrap it in nn.Sequential"
    # A subclass is admitted only by a type in `include`, because a glob or function could match it by accident.
    is_named_type = _is_named_type(module, included)
    if hasattr(holder, "parametrizations"):
        return "is parametrized: remove the parametrizations first"
    if reason := weight_refusal(module):
        return reason
    weight = module.get_parameter("weight")
    if (
        isinstance(module, (nn.Linear, *further_kinds))
        and kind not in (nn.Linear, *further_kinds)
        and not is_named_type
    ):
        return "is a subclass, whose forward may be different: name its type in include= if it is not"
    # A subclass may pad its input in its forward, so that only its own type counts, and not that of its base.
    own_types = [kind for kind in included if isinstance(kind, type) and kind not in nn.Conv2d.__mro__]
    if isinstance(module, nn.Conv2d) and not only_convolves(module) and not _is_named_type(module, own_types):
        return (
            "is a subclass, whose forward may do more than convolve with its padding: name its type in include= if it "
            "does not"
        )
    if not any(is_selected(selector, names, holder) for selector in included):
        return "is not included"
    if any(is_selected(selector, names, holder) for selector in excluded):
        return "is excluded"
    if weight.is_meta:
        return "is on the meta device: load its weights first"
    if "forward" in vars(holder):
        return "has a forward that was set on it (as accelerate does), which would be lost: remove it first"
    if reason := settings_refusal(module):  # hooks of a module of experts stay
        return reason
    # isfinite would copy the weight, which may be mapped from a file; aminmax returns NaN if any entry is.
    if weight.numel() and not all(map(isfinite, torch.stack(torch.aminmax(weight.detach())).tolist())):
        return "has a weight with NaN or infinite entries"
    if getattr(module, "max_norm", None) is not None:
        return "has max_norm, with which each lookup changes rows of the weight"
    return None


def _is_named_type(module: nn.Module, selectors: Sequence[Selector]) -> bool:
    return any(isinstance(selector, type) and isinstance(module, selector) for selector in selectors)


def _target(names: tuple[str, ...], modules: tuple[nn.Module, ...], seeded: bool) -> Target:
    module = modules[0]
    if isinstance(module, StackedExperts):
        return Target(names, modules, module.num_experts, module.in_features, module.out_features, seeded)
    if isinstance(module, nn.Conv2d):
        groups, inner = module.groups, module.weight[0].numel()
        return Target(names, modules, groups, inner, module.out_channels // groups, seeded)
    out, inner = module.weight.shape  # type: ignore[misc]
    return Target(names, modules, 1, *((out, inner) if is_conv1d(module) else (inner, out)), seeded)


@contextmanager
def replace_modules(model: nn.Module, replacement: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Replace the old modules, in all their places, by the new ones within the block."""
    try:
        swap_modules(model, replacement)
        yield
    finally:
        swap_modules(model, {new: old for old, new in replacement.items()})


def swap_modules(model: nn.Module, replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Replace the old modules, in all their places, by the new ones."""
    for parent in list(model.modules()):
        for name, child in [*children_of(parent).items()]:
            if child is None or (new := replacement.get(child)) is None:
                continue
            if isinstance(new, StackedExperts):
                new.put_back()
            else:
                put_child(parent, name, new)
    for old, new in replacement.items():
        if isinstance(old, StackedExperts) and old.is_in_place and old.place is not None:
            put_child(*old.place, new)
