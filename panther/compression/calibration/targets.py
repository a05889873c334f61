"""The weights to compress, what a kind of weight is, and the registry of all kinds.

A kind of weight is one file in ``panther/compression/weights``: a subclass of :class:`WeightKind`, which finds,
observes and fits weights and makes the new layers, and an instance of it that :func:`register_kind` enters. No other
code asks for the class of a layer.
"""

__all__ = [
    "COMPRESSED", "LEAST_RANK", "Further", "Selector", "SkippedLayer", "Survey", "Target", "WeightKind",
    "holder_of", "kind_of_layer", "register_kind", "replace_modules", "stacked_layers_of", "swap_modules",
]  # fmt: skip

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from panther._torch import children_of, put_child
from panther.compression.calibration.batches import Masks, counted
from panther.errors import CompressionError

# Largest number of inputs or outputs of a layer whose second moment is computed. It takes two gigabytes then. If the
# moments of all experts of a stacked weight took more together, the experts share one.
_LARGEST_SIDE = 2**14

LEAST_RANK = 2  # ranks are even, because a sketched layer has two halves
COMPRESSED = "is compressed already"

Selector = type | str | Callable[[nn.Module, str], bool]
"""A type (with its subclasses), a glob of names such as ``"encoder.*.up"``, or a function of module and name."""

Further = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a call after its input, such as the offsets of nn.EmbeddingBag."""


class SkippedLayer(NamedTuple):
    """A module with a matrix that is kept dense, and the reason."""

    name: str
    """Name of the module."""
    kind: str
    """Class of the module."""
    reason: str
    """Why the module stays dense."""


class WeightKind:
    """A kind of weight: how its layers are found, observed and fitted, and which new layers take their places.

    The weight is a matrix, or one matrix for each group. :mod:`panther.compression.weights.linear` has the observation
    and the fit of weights that multiply rows, so that a further kind of such weights only says what its layers are, how
    rows are read from their inputs, and how a layer of codes is made.

    Attributes:
        classes: Classes of the layers.
        takes_every_form: Whether weights can have every form that accepts them. Otherwise they can have the forms with
            :attr:`~panther.compression.forms.Form.fits_every_kind`, whose layers the kind makes.
        without_codes: Why weights that do not take every form are kept dense if no form with codes is asked for.
        has_metric: Whether the error of a weight is measured with one moment of its inputs and one of its outputs, so
            that it has low-rank components, weights that read one input share the moment, and weights of equal shapes
            are rounded jointly.
        is_linear: Whether a layer that maps ``inner`` features to ``outer`` can take the place of its layers.
        reads_positions: Whether the rows of inputs and outputs are positions of a sequence, and masks select some rows.
    """

    classes: tuple[type[nn.Module], ...] = ()
    takes_every_form = False
    without_codes = "needs a form with codes, such as 'int8'"
    has_metric = True
    is_linear = False
    reads_positions = True

    # Selection

    def holds(self, module: nn.Module) -> bool:
        """Return whether a layer belongs to the kind."""
        return isinstance(module, self.classes)

    def claims(self, target: "Target") -> bool:
        """Return whether the kind observes and fits a weight, whose layers can belong to more than one kind."""
        return all(map(self.holds, target.modules))

    def stacked_layers(self, module: nn.Module) -> Mapping[str, nn.Module] | None:
        """Return a layer for each weight of a module that multiplies by its own parameters, by the parameter's name.

        None: the module is not of this kind. Such a layer has ``place``, the module and the name, ``is_in_place`` and
        ``put_back()``, as :class:`~panther.nn.quantized.stacked.StackedExperts` has them.
        """
        return None

    def why_never_called(self, module: nn.Module) -> str | None:
        """Return why the model never calls a layer, and reads its weight instead; None if it can be called."""
        return None

    def why_other_forward(self, module: nn.Module, named_types: Sequence[type]) -> str | None:
        """Return why the forward of a layer may do more than multiply by the weight; None if it does not.

        ``named_types`` are the types in ``include`` that the module is an instance of.
        """
        if type(module) in self.classes or not isinstance(module, self.classes) or named_types:
            return None
        return "is a subclass, whose forward may be different: name its type in include= if it is not"

    def can_share(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether new layers in the place of these layers can share their weight."""
        return False

    def shape(self, module: nn.Module) -> tuple[int, int, int]:
        """Return the number of groups, and the columns and the rows of a group's matrix."""
        rows, columns = module.get_parameter("weight").flatten(1).shape
        return 1, columns, rows

    def matrices(self, target: "Target") -> Tensor:  # (groups, outer, inner), float64
        """Return the weight as one matrix for each group."""
        return target.weight.detach().to(torch.float64).flatten(1).unflatten(0, (target.groups, target.outer))

    def rows(self, target: "Target") -> Tensor:  # (outer, inner)
        """Return the weight of one group in its own dtype, which shares the memory of the layer's."""
        return target.weight.detach()

    def geometry(self, module: nn.Module) -> tuple[Any, ...]:
        """Return what says how a layer makes rows of its input, apart from the weight's shape."""
        return ()

    # Observation

    def multiplies(self, module: nn.Module) -> bool:
        """Return whether a layer multiplies its input by the weight; otherwise the input is indices of rows."""
        return True

    def routed(
        self,
        targets: Sequence["Target"],
        masks_of: Callable[[], Masks | None] | None,
        unreadable: "dict[Target, str] | None",
    ) -> AbstractContextManager[None]:
        """Let modules call the layers that stand for their parameters, within the block.

        ``masks_of`` returns the masks of the present batch, or None if all positions count. ``unreadable`` takes the
        weights that cannot be followed, with the reason; None: that is an error.
        """
        return nullcontext()

    def group_of(self, further: Further) -> int:
        """Return the group whose matrix a call multiplies by, where each call multiplies by one."""
        return 0

    def tokens_of(self, further: Further) -> tuple[Tensor, int] | None:
        """Return which tokens of the batch the rows of a call are, and the number of tokens; None: all, in order."""
        return None

    def counted_input(self, module: nn.Module, x: Tensor, masks: Masks | None) -> Tensor:
        """Return what :meth:`input_rows` needs of the input of a call: for sequences the positions that count."""
        return counted(x, masks, module) if self.reads_positions else x

    def input_rows(self, module: nn.Module, x: Tensor, groups: int) -> Iterator[Tensor]:
        """Yield the rows that a layer multiplies by its weight, (groups, rows, inner), in float32 or wider, in chunks.

        ``x`` is the result of :meth:`counted_input`.
        """
        yield x.to(torch.promote_types(x.dtype, torch.float32))[None]

    def gradient_rows(self, target: "Target", module: nn.Module, gradient: Tensor, masks: Masks) -> Tensor:
        """Return the gradients at a layer's output, (groups, rows, outer)."""
        return counted(gradient, masks, module)[None]

    def sums(self, targets: Sequence["Target"], gradients: bool, device: torch.device) -> Any:
        """Return the sums of weights that read one input; see :class:`~panther.compression.moments.Sums`."""
        raise NotImplementedError

    def moments_bytes(self, targets: Sequence["Target"], gradients: bool) -> int:
        """Return the bytes of the moments of weights that read one input; with gradients, they do not share A."""
        raise NotImplementedError

    def needs_positions(self, target: "Target") -> bool:
        """Return whether a weight needs as many positions in calibration as it has inputs."""
        return True

    # Fit

    def fit(self, target: "Target", moments: Any, widths: Sequence[int], settings: Any, ridge: float) -> Any:
        """Return the :class:`~panther.compression.forms.TargetFit` of a weight without a metric, in all widths."""
        raise NotImplementedError

    def sensitivity(self, target: "Target", moments: Any, ridge: float) -> float:
        """Return the loss of codes for each position, up to a factor that depends on their width alone."""
        raise NotImplementedError

    # New layers

    def code_bytes(self, target: "Target", width: int | None, rank: int, group_size: int | None) -> int:
        """Return the bytes of a layer of codes on disk; without a width, only of its correction of rank ``rank``."""
        raise NotImplementedError

    def quantized_layer(self, target: "Target", module: nn.Module, bits: int | None, rank: int, settings: Any) -> Any:
        """Return a new layer in the place of ``module``, whose codes and factors are not set."""
        raise NotImplementedError

    def low_rank_layer(self, module: nn.Module, left: Tensor, right: Tensor, seed: int) -> Any:
        """Return a layer with the factors (groups, outer, rank) and (groups, rank, inner) in the place of a layer."""
        raise NotImplementedError

    def seeded_layer(self, module: nn.Module, num_terms: int, low_rank: int, init: str, seed: int) -> Any:
        """Return a sketched layer, or with ``init="svd"`` one of low rank, in the place of a layer.

        ``low_rank`` is the rank in every group. The truncated SVD has twice the rank of a sketch.
        """
        raise NotImplementedError

    def monarch_layer(self, module: nn.Module, fraction: float, seed: int) -> Any:
        """Return the nearest MonarchLinear with a fraction of the numbers, for kinds with ``is_linear``."""
        raise NotImplementedError

    def seeded_numbers(self, target: "Target", rank: int) -> int:
        """Return the entries on disk of a sketched layer at an even rank."""
        return rank // 2 * (target.inner + target.outer)


_KINDS: list[WeightKind] = []


def register_kind(kind: WeightKind) -> None:
    """Add a kind of weight. Kinds that were added later are asked first."""
    _KINDS.insert(0, kind)


def kind_of_layer(module: nn.Module) -> WeightKind | None:
    """Return the kind of weight that a layer has; None for modules of all other classes."""
    return next((kind for kind in _KINDS if kind.holds(module)), None)


def stacked_layers_of(module: nn.Module) -> Mapping[str, nn.Module] | None:
    """Return a layer for each weight that a module multiplies by itself, by the parameter's name; None of others."""
    layers = (kind.stacked_layers(module) for kind in _KINDS)
    return next((each for each in layers if each is not None), None)


def _stands_for_parameter(module: nn.Module) -> bool:
    kind = kind_of_layer(module)
    return kind is not None and getattr(module, "place", None) is not None and hasattr(module, "put_back")


def holder_of(module: Any) -> nn.Module:
    """Return the module of the model that holds a weight: the layer, or the module for whose parameter it stands."""
    holder: nn.Module = module.place[0] if _stands_for_parameter(module) else module
    return holder


@dataclass(frozen=True)
class Target:
    """A weight to compress, which belongs to one layer or is shared by layers.

    The layer of a stacked weight, as experts have it, stands for a parameter, and is not a module of the model.

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

    @cached_property
    def kind(self) -> WeightKind:
        """Return the kind of the weight."""
        return next(kind for kind in _KINDS if kind.claims(self))

    @property
    def name(self) -> str:
        """Return the name of the first place."""
        return self.names[0]

    @property
    def class_name(self) -> str:
        """Return the name of the layers' class, or of the class of the module that holds the weight."""
        return type(holder_of(self.modules[0])).__name__

    @property
    def weight(self) -> Tensor:
        """Return the shared weight, in the layer's own layout."""
        return self.modules[0].weight  # type: ignore[return-value]

    @property
    def is_large(self) -> bool:
        """Return whether a moment over all outputs, or all inputs, would take gigabytes."""
        return self.is_wide or self.outer > _LARGEST_SIDE

    @property
    def is_wide(self) -> bool:
        """Return whether a moment over all inputs would take gigabytes."""
        return self.inner > _LARGEST_SIDE

    @property
    def size_refusal(self) -> str:
        """Return why a large weight is kept dense if no form with codes is asked for."""
        return (
            f"has {self.inner:,} inputs and {self.outer:,} outputs, and above {_LARGEST_SIDE:,} only codes are fitted: "
            "add a form such as 'int8'"
        )

    @property
    def is_stacked(self) -> bool:
        """Return whether the layer stands for a parameter, and is not a module of the model."""
        return _stands_for_parameter(self.modules[0])

    def shares_moment(self, size: int) -> bool:
        """Return whether the groups share one moment of this size, because their own would take gigabytes."""
        return self.groups * size**2 > _LARGEST_SIDE**2

    @property
    def is_multiplied(self) -> bool:
        """Return whether some of its layers multiply inputs by the weight."""
        return any(map(self.kind.multiplies, self.modules))

    @property
    def has_bias(self) -> bool:
        """Return whether all layers have a bias, which can take up a change of the mean of their outputs."""
        return all(getattr(module, "bias", None) is not None for module in self.modules)

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
        return self.kind.seeded_numbers(self, rank) if self.seeded else rank * self.groups * (self.inner + self.outer)

    def bytes(self, rank: int | None) -> int:
        """Return the bytes on disk at a rank; None is the dense weight."""
        return self.numbers(rank) * self.weight.itemsize


@dataclass(frozen=True)
class Survey:
    """The layers to compress, in the order of the model, and the layers that are kept dense.

    ``inputs`` are sets of targets that read the same input, in the order in which they run; empty without calibration.
    ``gradients`` states whether the output has gradients that are used.
    """

    targets: tuple[Target, ...]
    skipped: tuple[SkippedLayer, ...]
    inputs: tuple[tuple[Target, ...], ...] = ()
    gradients: bool = False
    notes: tuple[str, ...] = ()

    def check(self) -> Self:
        """Return the survey itself, or raise CompressionError if there is nothing to compress."""
        if not self.targets:
            compressed = sum(entry.reason == COMPRESSED for entry in self.skipped)
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
            if _stands_for_parameter(new):
                new.put_back()  # type: ignore[operator]
            else:
                put_child(parent, name, new)
    for old, new in replacement.items():
        if _stands_for_parameter(old) and old.is_in_place:
            place: Any = old.place
            holder, name = place
            put_child(holder, name, new)
