"""Spaces of what layers become: one of a budget and of emphases on groups of layers, and one of settings of layers."""

__all__ = ["AUTO", "AutoSpace", "LayerSpace", "LayerSpaceBase", "Line", "parse_lines", "used_forms"]

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from panther.compression.forms.choice import choose_global
from panther.compression.forms.options import DENSE, INTERPOLATIVE, KNOWN_FORMS, LOW_RANK, Choice, Option
from panther.compression.targets import Target
from panther.errors import ConfigError
from panther.nn.attention.random_features import KERNELS
from panther.tuning.attention import EXACT
from panther.tuning.prepared import Plan, Prepared
from panther.tuning.spaces.selection import as_group, selected
from panther.tuning.spaces.values import Float, Spec, as_spec, grid, suggest

_EMPHASIS = 8.0  # most by which a group's losses count more or less than predicted
_GROUPS = 8  # at most: trials are few
_LEAST_DEPTH = 3  # layers of a group, from which on early and late ones are weighted differently
_COMBINATIONS = 512  # of the settings of a line, that are looked at for the first trials
_SETTINGS = ("form", "rank", "bits", "share", "num_terms", "low_rank")
_OF_ATTENTION = ("kernel_fn", "num_random_features")
AUTO = "auto"


class LayerSpaceBase:
    """What a study draws plans from."""

    prepared: Prepared

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of what the layers cost as they are."""
        return self.prepared.cost.least(self.prepared.options) / self.prepared.dense

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        raise NotImplementedError

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters nearest to :func:`panther.compress` at a budget."""
        raise NotImplementedError


class AutoSpace(LayerSpaceBase):
    """A budget, and by how much the loss of each group of layers counts; ranks and forms follow from the spectra.

    Every choice is the best by the losses so weighted, so that the space has a few dimensions however many layers there
    are. With all weights at 1 it is the choice of :func:`panther.compress`.
    """

    def __init__(self, prepared: Prepared, names: Collection[str] | None = None, forms: Collection[str] = ()) -> None:
        """Make the space of the named layers and forms; None is of all."""
        self.prepared = prepared
        self.targets = [
            target for target in prepared.targets if names is None or not set(names).isdisjoint(target.names)
        ]
        self._forms = set(forms)
        self._whole = names is None
        self._options = {target: self._of(target) for target in self.targets}
        self._dense = sum(map(prepared.cost.dense, self.targets)) or 1.0
        self._groups = _grouped(self.targets)
        counts = [len(several) for several in self._groups.values()]
        self._by_depth = len(counts) > 1 and max(counts) >= _LEAST_DEPTH
        # The first group's counts as it is: only ratios matter.
        names = [f"emphasis/{name}" for name in list(self._groups)[1:]]
        self._emphases = dict.fromkeys(names, Float(1 / _EMPHASIS, _EMPHASIS, log=True))
        if self._by_depth:
            self._emphases["emphasis of late layers"] = Float(1 / _EMPHASIS, _EMPHASIS, log=True)
        # Rounded up: at the smallest budget there is one choice, the smallest forms.
        self._budget = Float(min(math.ceil(1e4 * self.least) / 1e4, 1.0), 1.0, log=True)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        budget = suggest(trial, "budget", self._budget)
        drawn = {name: suggest(trial, name, spec) for name, spec in self._emphases.items()}
        prepared = self.prepared
        if self._whole and all(value == 1 for value in drawn.values()):
            return prepared.plan_of(prepared.allocation(budget).choice)
        options = {}
        for target, factor in self._factors(drawn).items():
            options[target] = [replace(option, loss=option.loss * factor) for option in self._options[target]]
        return prepared.plan_of(choose_global(options, budget * self._dense, prepared.cost))

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of :func:`panther.compress` at a budget."""
        return {"budget": min(max(budget, self._budget.low), 1.0)} | dict.fromkeys(self._emphases, 1.0)

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of what the layers cost as they are."""
        return self.prepared.cost.least(self._options) / self._dense

    def _of(self, target: Target) -> list[Option]:
        several = list(self.prepared.options[target])
        if self._whole:
            return several
        named = [option for option in several if option.form in self._forms or option.form == DENSE]
        return named or [Option(DENSE, target.dense_bytes, error=0.0)]

    def _factors(self, drawn: Mapping[str, float]) -> dict[Target, float]:
        """Return by how much the loss of each layer counts."""
        late = drawn.get("emphasis of late layers", 1.0)
        last = max(len(self.targets) - 1, 1)
        place = {target: index / last for index, target in enumerate(self.targets)}
        return {
            target: drawn.get(f"emphasis/{name}", 1.0) * late ** (2 * place[target] - 1)
            for name, several in self._groups.items()
            for target in several
        }


def _grouped(targets: Sequence[Target]) -> dict[str, list[Target]]:
    """Return groups of layers: those whose names differ in numbers only, or runs of layers where these are too many."""
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(re.sub(r"\d+", "*", target.name), []).append(target)
    if 1 < len(groups) <= _GROUPS or len(targets) <= 1:
        return groups
    count = min(_GROUPS, len(targets))
    parts = [targets[i * len(targets) // count : (i + 1) * len(targets) // count] for i in range(count)]
    return {f"{part[0].name} to {part[-1].name}" if len(part) > 1 else part[0].name: list(part) for part in parts}


@dataclass(frozen=True)
class Line:
    """One line of a space: layers that share its settings, and what these may be."""

    label: str
    names: tuple[str, ...]
    specs: Mapping[str, Spec]

    @property
    def kind(self) -> str:
        """Return what its settings are of: ``"layers"``, ``"auto"`` or ``"attention"``."""
        if not self.specs:
            return AUTO
        return "attention" if not self.specs.keys().isdisjoint(_OF_ATTENTION) else "layers"

    def draw(self, trial: Any) -> dict[str, Any]:
        """Draw the settings of an Optuna trial; those that the form does not have are not drawn."""
        found: dict[str, Any] = {}
        for name in (*_SETTINGS, *_OF_ATTENTION):
            if name in self.specs and _is_used(name, found):
                found[name] = suggest(trial, f"{self.label}/{name}", self.specs[name])
        return found

    def values(self) -> list[dict[str, Any]]:
        """Return all settings, or of many some that cover them."""
        grids = [grid(self.specs[name]) for name in _SETTINGS if name in self.specs]
        names = [name for name in _SETTINGS if name in self.specs]
        total = math.prod(map(len, grids))
        every = (dict(zip(names, several, strict=True)) for several in itertools.product(*grids))
        step = -(-total // _COMBINATIONS)
        found = [
            {name: value for name, value in one.items() if _is_used(name, one)}
            for one in itertools.islice(every, 0, None, step)
        ]
        return [one for index, one in enumerate(found) if one not in found[:index]]


def _is_used(name: str, values: Mapping[str, Any]) -> bool:
    if name in _OF_ATTENTION:
        return name == "kernel_fn" or values.get("kernel_fn") not in (EXACT, "taylor")
    form = _form_of(values)
    return name in ("form", "bits") or form in (None, LOW_RANK, INTERPOLATIVE) or form.endswith("low_rank")


def _form_of(values: Mapping[str, Any]) -> str | None:
    if "form" in values:
        return str(values["form"])
    return f"int{values['bits']}" if "bits" in values else None


class LayerSpace(LayerSpaceBase):
    """Settings of layers, one by one or jointly; layers that no line names stay as they are."""

    def __init__(self, prepared: Prepared, lines: Sequence[Line]) -> None:
        self.prepared = prepared
        by_name = {name: target for target in prepared.targets for name in target.names}
        self._targets: dict[str, list[Target]] = {}
        for line in lines:
            found = (by_name[name] for name in line.names if name in by_name)
            self._targets[line.label] = [target for target in dict.fromkeys(found) if target not in self._moved]
        self.lines = [line for line in lines if self._targets[line.label]]
        self._options = {line.label: self._of_line(line) for line in self.lines}

    @property
    def _moved(self) -> set[Target]:
        return {target for several in self._targets.values() for target in several}

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of what the layers cost as they are."""
        cost = self.prepared.cost
        least = sum(min(map(cost.of, (option for option, _ in several))) for several in self._options.values())
        rest = sum(cost.dense(target) for target in self.prepared.targets if target not in self._moved)
        return (least + rest) / (self.prepared.dense or 1.0)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        choice: Choice = {}
        for line in self.lines:
            values = line.draw(trial)
            choice |= {target: self._pick(target, values) for target in self._targets[line.label]}
        return self.prepared.plan_of(choice)

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of the choice of :func:`panther.compress` among the space's values, at a budget."""
        cost = self.prepared.cost
        rest = sum(cost.dense(target) for target in self.prepared.targets if target not in self._moved)
        options: Any = {label: [option for option, _ in several] for label, several in self._options.items()}
        chosen: Any = choose_global(options, budget * self.prepared.dense - rest, cost)
        found: dict[str, Any] = {}
        for label, option in chosen.items():
            values = next(values for one, values in self._options[label] if one is option)
            found |= {f"{label}/{name}": value for name, value in values.items()}
        return found

    def _of_line(self, line: Line) -> list[tuple[Option, dict[str, Any]]]:
        """Return what a line's settings cost and lose, over all its layers."""
        found = []
        for values in line.values():
            picked = [self._pick(target, values) for target in self._targets[line.label]]
            times = [option.time_s for option in picked if option.time_s is not None]
            option = Option(
                "", sum(one.bytes for one in picked), loss=sum(one.loss for one in picked),
                time_s=sum(times) if times else None,
            )  # fmt: skip
            found.append((option, values))
        return found

    def _pick(self, target: Target, values: Mapping[str, Any]) -> Option:
        """Return what a layer becomes: of its form, the option of the largest rank or share that is not above."""
        form = _form_of(values) or LOW_RANK
        several = [option for option in self.prepared.options[target] if option.form == form]
        if not several:  # the layer cannot take the form, or would not shrink in it
            return Option(DENSE, target.dense_bytes, error=0.0)
        if "low_rank" in values:  # of an SKLinear with so many terms
            values = dict(values) | {"rank": 2 * values.get("num_terms", 1) * values["low_rank"]}
        if "rank" in values:
            below = [option for option in several if (option.rank or 0) <= values["rank"]]
            return max(below, key=lambda option: option.rank or 0, default=min(several, key=lambda o: o.rank or 0))
        if "share" in values:
            below = [option for option in several if option.bytes <= values["share"] * target.dense_bytes]
            return max(below, key=lambda option: option.bytes, default=min(several, key=lambda o: o.bytes))
        return several[-1]


def parse_lines(model: nn.Module, space: Mapping[Any, Mapping[str, Any]]) -> list[Line]:
    """Return the lines of a space that a user wrote, with their layers.

    Raises:
        ConfigError: If a key selects no layer, or a setting is unknown or contradicts another one.
    """
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(f"space={space!r} must be 'auto', or a dict of layers and what their settings may be")
    lines: list[Line] = []
    taken: dict[str, Any] = {}
    for key, given in space.items():
        group = as_group(key)
        if given == AUTO:
            given = {}
        elif not isinstance(given, Mapping) or not given:
            raise ConfigError(
                f"space[{key!r}]={given!r} must be 'auto' or a dict of settings, such as {{'rank': [16, 32]}}"
            )
        specs = {name: as_spec(f"space[{key!r}][{name!r}]", value) for name, value in given.items()}
        _check_settings(key, specs)
        line = Line(group.label, (), specs)
        names = selected(model, group, attention=line.kind == "attention")
        if twice := next((name for name in names if name in taken), None):
            raise ConfigError(
                f"layer {twice!r} is in two lines of the space, {taken[twice]!r} and {key!r}: leave it out of one"
            )
        taken |= dict.fromkeys(names, key)
        if group.joint or line.kind == AUTO:
            lines.append(Line(group.label, names, specs))
        else:
            lines += [Line(name, (name,), specs) for name in names]
    return lines


def _check_settings(key: Any, specs: Mapping[str, Spec]) -> None:
    of_attention = not specs.keys().isdisjoint(_OF_ATTENTION)
    known = _OF_ATTENTION if of_attention else _SETTINGS
    for name in specs:
        if name not in known:
            every = (*_SETTINGS, *_OF_ATTENTION) if not of_attention else known
            raise ConfigError(f"space[{key!r}] has the setting {name!r}, and knows {', '.join(map(repr, every))}")
    if of_attention:
        kernels = grid(specs["kernel_fn"]) if "kernel_fn" in specs else []
        if unknown := [name for name in kernels if name not in (EXACT, *KERNELS)]:
            names = ", ".join(map(repr, (EXACT, *KERNELS)))
            raise ConfigError(f"space[{key!r}]: kernel_fn {unknown[0]!r} is unknown: use some of {names}")
        if "num_random_features" not in specs and not {EXACT, "taylor"}.issuperset(kernels):
            raise ConfigError(f"space[{key!r}] has no number of features: add 'num_random_features'")
        return
    for one, other in (("form", "bits"), ("rank", "share"), ("rank", "low_rank"), ("share", "low_rank")):
        if one in specs and other in specs:
            raise ConfigError(f"space[{key!r}] has both {one!r} and {other!r}, which say the same: leave one out")
    for form in used_forms(specs):
        if form not in KNOWN_FORMS:
            raise ConfigError(f"space[{key!r}]: form {form!r} is unknown: use some of {', '.join(KNOWN_FORMS)}")
    ranked = [form for form in used_forms(specs) if form == INTERPOLATIVE or form.endswith("low_rank")]
    if "num_terms" in specs and "low_rank" not in specs:
        raise ConfigError(f"space[{key!r}] has 'num_terms' and no rank of a term: add 'low_rank'")
    if specs and ranked and not {"rank", "share", "low_rank"} & specs.keys():
        raise ConfigError(f"space[{key!r}] has the form {ranked[0]!r} and no rank: add 'rank' or 'share'")


def used_forms(specs: Mapping[str, Spec]) -> list[str]:
    """Return the forms that a line's layers may take."""
    if "form" in specs:
        return [str(form) for form in grid(specs["form"])]
    if "bits" in specs:
        return [f"int{bits}" for bits in grid(specs["bits"])]
    return [LOW_RANK]
