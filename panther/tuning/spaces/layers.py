"""Spaces of what layers become: one of a budget and of emphases on groups of layers, and one of settings of layers."""

__all__ = ["AUTO", "AutoSpace", "LayerSpace", "LayerSpaceBase", "Line", "parse_lines", "unchanged_layers"]

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from panther.compression.forms.choice import choose_global
from panther.compression.forms.options import DENSE, INTERPOLATIVE, LOW_RANK, Choice, Option
from panther.compression.targets import Target
from panther.errors import ConfigError
from panther.tuning.attention import EXACT
from panther.tuning.prepared import Plan, Prepared
from panther.tuning.spaces.selection import as_group, selected
from panther.tuning.spaces.settings import OF_ATTENTION, OF_LAYERS, check_settings
from panther.tuning.spaces.values import Float, Spec, as_spec, grid, suggest

_EMPHASIS = 8.0  # most by which a group's losses count more or less than predicted
_GROUPS = 8  # at most: trials are few
_LEAST_DEPTH = 3  # layers of a group, from which on early and late ones are weighted differently
_NOTED = 5  # notes of one kind
_COMBINATIONS = 512  # of the settings of a line, that are looked at for the first trials
AUTO = "auto"


class LayerSpaceBase:
    """What a study draws plans from."""

    prepared: Prepared
    notes: tuple[str, ...] = ()
    """What of the space is not done as it was asked for."""

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

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a budget below what a plan takes, ``by`` in the logarithm, if there is a budget."""
        return dict(params)


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

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a budget below what a plan takes."""
        chosen = self.prepared.choice_of(plan)
        taken = sum(self.prepared.cost.of(chosen[target]) for target in self.targets) / self._dense
        budget = taken * math.exp(-by)
        return dict(params) | {"budget": min(max(budget, self._budget.low), 1.0)}

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
        return "attention" if not self.specs.keys().isdisjoint(OF_ATTENTION) else "layers"

    def draw(self, trial: Any) -> dict[str, Any]:
        """Draw the settings of an Optuna trial; those that the form does not have are not drawn."""
        found: dict[str, Any] = {}
        for name in (*OF_LAYERS, *OF_ATTENTION):
            if name in self.specs and _is_used(name, found):
                found[name] = suggest(trial, f"{self.label}/{name}", self.specs[name])
        return found

    def values(self) -> list[dict[str, Any]]:
        """Return all settings, or of many some that cover them."""
        grids = [grid(self.specs[name]) for name in OF_LAYERS if name in self.specs]
        names = [name for name in OF_LAYERS if name in self.specs]
        total = math.prod(map(len, grids))
        every = (dict(zip(names, several, strict=True)) for several in itertools.product(*grids))
        step = -(-total // _COMBINATIONS)
        found = [
            {name: value for name, value in one.items() if _is_used(name, one)}
            for one in itertools.islice(every, 0, None, step)
        ]
        return [one for index, one in enumerate(found) if one not in found[:index]]


def _is_used(name: str, values: Mapping[str, Any]) -> bool:
    if name in OF_ATTENTION:
        return name == "kernel_fn" or values.get("kernel_fn") not in (EXACT, "taylor")
    form = _form_of(values)
    return name in ("form", "bits") or form in (None, LOW_RANK, INTERPOLATIVE) or form.endswith("low_rank")


def _asked(values: Mapping[str, Any], name: str) -> float | None:
    """Return the rank or the share of a line's values, if they have one."""
    if name == "rank" and "low_rank" in values:  # of an SKLinear with so many terms
        return float(2 * values.get("num_terms", 1) * values["low_rank"])
    return values.get(name)


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
        notes: list[str] = []
        for line in lines:
            found = dict.fromkeys(by_name[name] for name in line.names if name in by_name)
            self._targets[line.label] = [target for target in found if target not in self._moved]
            notes += [
                f"{line.label!r} shares its weight with a layer of an earlier line of the space, and follows that"
                for target in found
                if target not in self._targets[line.label]
            ]
        self.lines = [line for line in lines if self._targets[line.label]]
        self._options = {line.label: self._of_line(line) for line in self.lines}
        below = [
            note for line in self.lines for target in self._targets[line.label] for note in self._below(line, target)
        ]
        self.notes = (*notes, *_some(below))

    def _below(self, line: Line, target: Target) -> list[str]:
        """Return notes of forms that a layer cannot have, and of ranks and shares below its smallest.

        Raises:
            ConfigError: If all values of a line are below the smallest.
        """
        notes = []
        every = line.values()
        forms = dict.fromkeys(_form_of(values) or LOW_RANK for values in every)
        for form in forms:
            several = [option for option in self.prepared.options[target] if option.form == form]
            if not several and form != DENSE:
                notes.append(f"{target.name!r} takes no fewer bytes in the form {form!r}, and stays dense there")
            asked = [values for values in every if (_form_of(values) or LOW_RANK) == form]
            for name in ("rank", "share"):
                wanted = [found for found in (_asked(values, name) for values in asked) if found is not None]
                if not several or not wanted:
                    continue
                ranks, sizes = [option.rank or 0 for option in several], [option.bytes for option in several]
                least = min(ranks) if name == "rank" else min(sizes) / target.dense_bytes
                if min(wanted) >= least:
                    continue
                what = f"the smallest {name} of {target.name!r} in the form {form!r} is {least:.4g}"
                if max(wanted) < least and len(forms) == 1:
                    raise ConfigError(f"{what}, and the space asks for at most {max(wanted):.4g}: ask for more")
                notes.append(f"{what}, and is taken where the space asks for less, down to {min(wanted):.4g}")
        return notes

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
        if (rank := _asked(values, "rank")) is not None:
            below = [option for option in several if (option.rank or 0) <= rank]
            return max(below, key=lambda option: option.rank or 0, default=min(several, key=lambda o: o.rank or 0))
        if "share" in values:
            below = [option for option in several if option.bytes <= values["share"] * target.dense_bytes]
            return max(below, key=lambda option: option.bytes, default=min(several, key=lambda o: o.bytes))
        return several[-1]


def unchanged_layers(lines: Sequence[Line], prepared: Prepared) -> list[str]:
    """Return a note for each layer that a line names and that stays as it is, with the reason."""
    known = {name for target in prepared.targets for name in target.names}
    reasons = {entry.name: entry.reason for entry in prepared.survey.skipped}
    left = [name for line in lines if line.kind != "attention" for name in line.names if name not in known]
    return _some(
        [f"{name!r} stays as it is although the space names it: {reasons.get(name, 'cannot change')}" for name in left]
    )


def _some(notes: list[str]) -> list[str]:
    return notes if len(notes) <= _NOTED else [*notes[:_NOTED], f"{len(notes) - _NOTED} more notes like the last one"]


def parse_lines(model: nn.Module, space: Mapping[Any, Mapping[str, Any]], scratch: bool = False) -> list[Line]:
    """Return the lines of a space that a user wrote; with ``scratch``, of layers that start sketched.

    Raises:
        ConfigError: If a key selects no layer, or a setting is unknown or contradicts another one.
    """
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(f"space={space!r} must be 'auto', or a dict of layers and what their settings may be")
    lines: list[Line] = []
    taken: dict[str, Any] = {}
    for key, given in space.items():
        group = as_group(key)
        if isinstance(given, str) and given == AUTO:
            given = {}
        elif not isinstance(given, Mapping) or not given:
            raise ConfigError(
                f"space[{key!r}]={given!r} must be 'auto' or a dict of settings, such as {{'rank': [16, 32]}}"
            )
        specs = {name: as_spec(f"space[{key!r}][{name!r}]", value) for name, value in given.items()}
        check_settings(key, specs, scratch)
        line = Line(group.label, (), specs)
        names = selected(model, group, attention=line.kind == "attention")
        if twice := next((name for name in names if name in taken), None):
            raise ConfigError(
                f"layer {twice!r} is in two lines of the space, {taken[twice]!r} and {key!r}: leave it out of one"
            )
        taken |= dict.fromkeys(names, key)
        if group.joint or line.kind == AUTO:
            # Lambdas, for example, all have one name; and no layer is in two lines.
            label = group.label if group.label not in {one.label for one in lines} else f"{group.label} ({names[0]})"
            lines.append(Line(label, names, specs))
        else:
            lines += [Line(name, (name,), specs) for name in names]
    return lines
