"""What a form of a weight is: its options, its fit and its layers; and the registry of all forms.

A form is one file beside this one: a subclass of :class:`Form`, an instance of it that :func:`register` enters, and the
layers of ``panther.nn`` that it makes. Nothing else names a form, apart from "dense" and "low_rank", which every model
can have.
"""

__all__ = [
    "DENSE", "LOW_RANK", "Choice", "Fits", "Form", "FormSettings", "Option", "Options", "Replacement", "TargetFit",
    "default_forms", "form_named", "inherit_flags", "known_forms", "least_bytes", "register", "replace_layers",
    "total_bytes", "total_loss",
]  # fmt: skip

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ignored_warnings
from panther._torch import buffers_of, parameters_of
from panther.compression.calibration.targets import LEAST_RANK, Target
from panther.compression.forms.metric import RIDGE, Fit, Metric, QuantizedFit
from panther.compression.readers import Reader, why_weight_is_read
from panther.errors import CompressionError, PerformanceWarning
from panther.nn.factors import inherit_settings
from panther.nn.protocol import CompressedModule, allow_saving

DENSE, LOW_RANK = "dense", "low_rank"

# A weight has multiples of rank_multiple as ranks if its largest rank is at least this many multiples; smaller weights
# have even ranks.
_FINE = 8


@dataclass(frozen=True)
class Option:
    """One way to store a weight.

    The rank is that of the low-rank form, in every group of a convolution, or of the correction. ``loss`` is the
    predicted squared effect on the model's output, and zero if nothing was fitted; ``error`` is the predicted relative
    error of the layer's own output. ``time_s`` is the time of the layers of this weight in one batch, if measured.
    """

    form: str
    bytes: int
    rank: int | None = None
    bits: int | None = None
    loss: float = 0.0
    error: float | None = None
    time_s: float | None = None


Options = Mapping[Target, Sequence[Option]]
"""The options of every weight, the smallest first."""

Choice = dict[Target, Option]
"""One option for every weight."""


def total_loss(choice: Choice) -> float:
    """Return the predicted squared effect of all weights together."""
    return sum(option.loss for option in choice.values())


def total_bytes(choice: Choice) -> int:
    """Return the bytes of all weights on disk."""
    return sum(option.bytes for option in choice.values())


def least_bytes(options: Options) -> int:
    """Return the bytes of all weights in their smallest form."""
    return sum(min(option.bytes for option in target_options) for target_options in options.values())


@dataclass(frozen=True)
class TargetFit:
    """What was computed for one weight, and serves all of its forms.

    Codes are by width in bits. ``special`` has the results of :meth:`Form.fit`, by the name of the form.
    """

    components: Fit
    codes: Mapping[int, QuantizedFit] = field(default_factory=dict)
    special: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FormSettings:
    """The forms that weights may take, and settings from which the options of a weight follow.

    Attributes:
        names: Names of forms.
        rank_multiple: Ranks are multiples of this number; weights too small for eight such ranks have even ranks.
        group_size: Columns of a quantized weight that share a scale; None is the entire row.
        activations: How quantized linear layers round their inputs, None or "int8".
        symmetric: Whether the middle code of every group stands for zero.
        reader: The program that will read the model in another format; None if only Panther will.
    """

    names: tuple[str, ...]
    rank_multiple: int = 8
    group_size: int | None = 128
    activations: str | None = None
    symmetric: bool = False
    reader: Reader | None = None

    @property
    def symmetric_widths(self) -> tuple[int, ...]:
        """Return the widths of codes whose zero point is the middle code: those for which the reader has no other."""
        widths = {form.bits for form in self.forms if form.bits is not None}
        free: Collection[int] = (
            () if self.symmetric else widths if self.reader is None else self.reader.zero_point_widths
        )
        return tuple(widths.difference(free))

    @property
    def forms(self) -> tuple["Form", ...]:
        """Return the forms."""
        return tuple(map(form_named, self.names))

    def forms_of(self, target: Target) -> tuple["Form", ...]:
        """Return the forms that a weight can take, whatever its size."""
        forms = (form for form in self.forms if form.fits_every_kind or target.kind.takes_every_form)
        if self.reader is not None:
            widths = self.reader.widths_of(target.inner, self.group_size, [form.bits for form in self.forms])
            forms = (form for form in forms if form.bits is None or form.bits in widths)
        return tuple(form for form in forms if form.accepts(target))

    def why_not_read(self, target: Target, model: nn.Module, *, is_head: bool) -> str | None:
        """Return why the reader holds a weight only if it is dense; None if the reader holds it in codes."""
        if self.reader is None:
            return None
        name = self.reader.name
        if not self.reader.holds(target.modules):
            return (
                f"is of class {target.class_name}, and reader={name!r} holds codes of {self.reader.held_classes} only"
            )
        if is_head and not self.reader.packs_heads:
            return f"computes the logits, and reader={name!r} does not hold such a layer in codes"
        reasons = (why_weight_is_read(model, name) for name in target.names if self.reader.builds_modules)
        return next(filter(None, reasons), None) or self.reader.why_no_group(target.inner, self.group_size)

    @property
    def has_codes(self) -> bool:
        """Return whether weights of every kind can have one of the forms except for dense."""
        return any(form.fits_every_kind for form in self.forms if form.name != DENSE)

    def options(self, target: Target) -> list[Option]:
        """Return the options of a weight that are not larger than the dense weight, without losses, sorted by bytes."""
        forms = self.forms_of(target)
        if not forms:
            groups = "" if target.groups == 1 else f" in {target.groups} groups"
            raise CompressionError(
                f"layer {target.name!r} is a {target.class_name}{groups}, which none of forms={self.names} can be: add "
                f"'low_rank' or 'int8', or pass exclude=nn.{target.class_name}"
            )
        options = [option for form in forms for option in form.options(target, self)]
        return sorted(options, key=lambda option: option.bytes)

    def smallest_bytes(self, target: Target) -> int:
        """Return the bytes of the smallest option except for dense, or of the dense weight if there is no other."""
        sizes = (option.bytes for option in self.options(target) if option.form != DENSE)
        return min(sizes, default=target.dense_bytes)

    def num_components(self, target: Target, share: float) -> int:
        """Return how many components of a weight to store, if all weights keep ``share`` of their bytes."""
        return max((form.num_components(target, self, share) for form in self.forms_of(target)), default=0)

    def correction_rank(self, target: Target) -> int:
        """Return the largest rank of a correction of the codes; 0 if there are no corrections."""
        return max((form.correction_rank(target, self) for form in self.forms_of(target)), default=0)


class Form:
    """One way to store weights.

    Attributes:
        name: The name by which users ask for it.
        layers: Classes of the layers that it makes. :func:`register` lets saved models contain them.
        bits: Width of its codes; None for a form without codes.
        uses_rounding: Whether its codes are those of :mod:`.codes`, which are fitted once for all forms of a width.
        is_default: Whether :func:`panther.compress` considers the form unless ``forms`` is given.
        has_rank: Whether its options have ranks.
        is_quantized: Whether its layers can round their inputs (``activations``).
        fits_every_kind: Whether weights of every kind can have it, such as embeddings and stacked experts. The kind
            then fits its codes and makes its layers, which have to share their buffers.
    """

    name: str
    layers: tuple[type[CompressedModule], ...] = ()
    bits: int | None = None
    uses_rounding = False
    is_default = False
    has_rank = False
    is_quantized = False
    fits_every_kind = False

    def accepts(self, target: Target) -> bool:
        """Return whether a weight can take the form, whatever its size."""
        return True

    def largest_rank(self, target: Target) -> int:
        """Return the largest rank of the form of a weight."""
        raise NotImplementedError

    def ranks(self, target: Target, settings: FormSettings) -> range:
        """Return the ranks that the form of a weight can have; an empty range for a form without a rank."""
        if not self.has_rank:
            return range(0)
        largest = self.largest_rank(target)
        step = settings.rank_multiple if largest >= _FINE * settings.rank_multiple else min(LEAST_RANK, largest)
        return range(step, largest + 1, step)

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of the form of a weight on disk; ``rank`` is 0 for a form without a rank."""
        raise NotImplementedError

    def options(self, target: Target, settings: FormSettings) -> list[Option]:
        """Return the options of a weight that are smaller than the dense weight, without losses."""
        ranks: Sequence[int | None] = self.ranks(target, settings) if self.has_rank else (None,)
        options = [Option(self.name, self.stored_bytes(target, rank or 0, settings), rank, self.bits) for rank in ranks]
        return [option for option in options if option.bytes < target.dense_bytes]

    def num_components(self, target: Target, settings: FormSettings, share: float) -> int:
        """Return how many components of the weight the form needs, if all weights keep ``share`` of their bytes."""
        return 0

    def correction_rank(self, target: Target, settings: FormSettings) -> int:
        """Return how many components of what the codes leave the form needs."""
        return 0

    def fit(self, metric: Metric, settings: FormSettings, seed: int) -> Any:
        """Return what the form needs besides components and codes; it becomes ``TargetFit.special[name]``."""
        return None

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the losses of an option in the metric and in the layer's own output; None if it was not fitted."""
        raise NotImplementedError

    def convert(
        self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int
    ) -> dict[nn.Module, nn.Module]:
        """Return the new layer of each layer of the target."""
        raise NotImplementedError

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a layer of random numbers: as fast as a fitted layer, with outputs as large as its inputs."""
        raise NotImplementedError


_FORMS: dict[str, Form] = {}


def register(*forms: Form) -> None:
    """Add forms, and let saved models contain their layers."""
    for form in forms:
        _FORMS[form.name] = form
        allow_saving(*form.layers, form_name=form.name)


def known_forms() -> tuple[str, ...]:
    """Return the names of all forms."""
    return tuple(_FORMS)


def default_forms() -> tuple[str, ...]:
    """Return the names of the forms that :func:`panther.compress` considers unless ``forms`` is given.

    Corrected forms and low rank in 8 bits are not among them: on the models that were measured they were hardly ever on
    the hull, and they take an SVD for each width.
    """
    return tuple(name for name, form in _FORMS.items() if form.is_default)


def form_named(name: str) -> Form:
    """Return the form of a name."""
    return _FORMS[name]


@dataclass(frozen=True)
class Fits:
    """The fits of all targets (none for seeded sketches), and their options with losses.

    Losses are shares of the output's squared norm if they are ``comparable``, and zero without gradients. ``ridge`` is
    relative to the mean of a moment's diagonal.
    """

    fits: Mapping[Target, TargetFit] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    settings: FormSettings = field(default_factory=lambda: FormSettings(default_forms()))
    passes: int = 0
    comparable: bool = False
    calibration_notes: tuple[str, ...] = ()
    ridge: float = RIDGE


Replacement = dict[nn.Module, nn.Module]
"""The new layer of each old layer."""


def replace_layers(
    target: Target,
    make: Callable[[nn.Module], CompressedModule],
    bias_change: Tensor | float = 0.0,
    *,
    share_buffers: bool = False,
) -> Replacement:
    """Make a new layer for each layer of the target.

    Each new layer has the bias of its old layer plus ``bias_change``. All share the parameters of the first one, and
    with ``share_buffers``, as codes need it, also its buffers.
    """
    with ignored_warnings(category=PerformanceWarning):  # the report lists the speed of every layer
        new = {module: make(module) for module in target.modules}
    first = new[target.modules[0]]
    for module, layer in new.items():
        bias = getattr(module, "bias", None)
        if bias is not None:
            with torch.no_grad():
                layer.get_parameter("bias").copy_(bias + bias_change)
        for name in parameters_of(first).keys() - {"bias"}:
            layer.register_parameter(name, parameters_of(first)[name])
        if share_buffers:
            buffers_of(layer).update(buffers_of(first))
    return dict(new)


def inherit_flags(replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Give new layers the training mode and flags of the old ones, and what users set on them."""
    for old, new in replacement.items():
        inherit_settings(new, old)


class Dense(Form):
    """The dense weight."""

    name = DENSE
    is_default = True
    fits_every_kind = True

    def options(self, target: Target, settings: FormSettings) -> list[Option]:
        """Return the dense weight."""
        return [Option(DENSE, target.dense_bytes, error=0.0)]

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float]:
        """Return zeros."""
        return 0.0, 0.0

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return no new layers."""
        return {}


register(Dense())
