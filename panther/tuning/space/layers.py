"""Spaces of the forms of layers: a budget with weights for groups of layers, settings of individual layers, or both."""

__all__ = ["AutoSpace", "CombinedSpace", "LayerSpace", "LayerSpaceBase", "heal_specs", "unchanged_layers"]

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from panther.compression.calibration.targets import Target
from panther.compression.config import HealConfig
from panther.compression.forms import DENSE, LOW_RANK, Choice, Option
from panther.compression.selection.convex_hull import choose_global
from panther.errors import ConfigError
from panther.tuning.attention import EXACT
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.plan import Plan
from panther.tuning.space.lines import AUTO, Line, form_of, rank_or_share
from panther.tuning.space.values import Float, Spec, as_spec, grid, middle, suggest

# The losses of a group of layers are multiplied by a weight from 1 / MAX_WEIGHT to MAX_WEIGHT.
_MAX_WEIGHT = 8.0
# More groups would be more dimensions than a few dozen trials can explore.
_MAX_GROUPS = 8
# If a group has this many layers, there is a weight of late layers relative to early layers.
_MIN_LAYERS_FOR_DEPTH_WEIGHT = 3
_MAX_NOTES = 5  # notes of one kind


class LayerSpaceBase:
    """Base of the spaces from which a study draws plans."""

    models: CompressedModels
    notes: tuple[str, ...] = ()
    """Parts of the requested space that cannot be used, and why."""

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        return self.models.cost.least(self.models.options) / self.models.dense

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        raise NotImplementedError

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters nearest to :func:`panther.compress` at a budget."""
        raise NotImplementedError

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a budget below the cost of a plan, by ``by`` in the logarithm, if it has one."""
        return dict(params)


class AutoSpace(LayerSpaceBase):
    """A budget, and a weight of the loss of each group of layers, from which ranks and forms follow.

    Every plan is the choice with the smallest weighted loss, so that the space has few dimensions for any number of
    layers. If all weights are 1 it is the choice of :func:`panther.compress`.
    """

    def __init__(
        self, models: CompressedModels, names: Collection[str] | None = None, forms: Collection[str] = ()
    ) -> None:
        """Make a space of the named layers, with these forms, or of all layers and forms if ``names`` is None."""
        self.models = models
        self.targets = [target for target in models.targets if names is None or not set(names).isdisjoint(target.names)]
        self._forms = set(forms)
        self._all_layers = names is None
        self._options = {target: self._options_of(target) for target in self.targets}
        self._dense = sum(map(models.cost.dense, self.targets)) or 1.0
        self._groups = _grouped(self.targets)
        counts = [len(group) for group in self._groups.values()]
        self._by_depth = len(counts) > 1 and max(counts) >= _MIN_LAYERS_FOR_DEPTH_WEIGHT
        # The weight of the first group is 1, because only ratios matter.
        names = [f"emphasis/{name}" for name in list(self._groups)[1:]]
        self._emphases = dict.fromkeys(names, Float(1 / _MAX_WEIGHT, _MAX_WEIGHT, log=True))
        if self._by_depth:
            self._emphases["emphasis of late layers"] = Float(1 / _MAX_WEIGHT, _MAX_WEIGHT, log=True)
        # The bound is rounded up, so that at least the smallest forms fit into the smallest budget.
        self._budget = Float(min(math.ceil(1e4 * self.least) / 1e4, 1.0), 1.0, log=True)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        budget = suggest(trial, "budget", self._budget)
        emphases = {name: suggest(trial, name, spec) for name, spec in self._emphases.items()}
        models = self.models
        if self._all_layers and all(value == 1 for value in emphases.values()):
            return models.plan_of(models.allocation(budget).choice)
        options = {}
        for target, factor in self._factors(emphases).items():
            options[target] = [replace(option, loss=option.loss * factor) for option in self._options[target]]
        return models.plan_of(choose_global(options, budget * self._dense, models.cost))

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of :func:`panther.compress` at a budget."""
        return {"budget": min(max(budget, self._budget.low), 1.0)} | dict.fromkeys(self._emphases, 1.0)

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a smaller budget than the cost of a plan."""
        choice = self.models.choice_of(plan)
        share = sum(self.models.cost.of(choice[target]) for target in self.targets) / self._dense
        budget = share * math.exp(-by)
        return dict(params) | {"budget": min(max(budget, self._budget.low), 1.0)}

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        return self.models.cost.least(self._options) / self._dense

    def _options_of(self, target: Target) -> list[Option]:
        options = list(self.models.options[target])
        if self._all_layers:
            return options
        allowed = [option for option in options if option.form in self._forms or option.form == DENSE]
        return allowed or [Option(DENSE, target.dense_bytes, error=0.0)]

    def _factors(self, emphases: Mapping[str, float]) -> dict[Target, float]:
        """Return the weight of the loss of each layer."""
        late = emphases.get("emphasis of late layers", 1.0)
        last = max(len(self.targets) - 1, 1)
        place = {target: index / last for index, target in enumerate(self.targets)}
        return {
            target: emphases.get(f"emphasis/{name}", 1.0) * late ** (2 * place[target] - 1)
            for name, targets in self._groups.items()
            for target in targets
        }


def _grouped(targets: Sequence[Target]) -> dict[str, list[Target]]:
    """Group layers whose names differ only in numbers, or consecutive layers if this gives too many groups."""
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(re.sub(r"\d+", "*", target.name), []).append(target)
    if 1 < len(groups) <= _MAX_GROUPS or len(targets) <= 1:
        return groups
    count = min(_MAX_GROUPS, len(targets))
    parts = [targets[i * len(targets) // count : (i + 1) * len(targets) // count] for i in range(count)]
    return {f"{part[0].name} to {part[-1].name}" if len(part) > 1 else part[0].name: list(part) for part in parts}


class LayerSpace(LayerSpaceBase):
    """Settings of layers, individually or jointly. Layers that no line names do not change."""

    def __init__(self, models: CompressedModels, lines: Sequence[Line]) -> None:
        self.models = models
        by_name = {name: target for target in models.targets for name in target.names}
        self._targets: dict[str, list[Target]] = {}
        notes: list[str] = []
        for line in lines:
            line_targets = dict.fromkeys(by_name[name] for name in line.names if name in by_name)
            self._targets[line.label] = [target for target in line_targets if target not in self._tuned_targets]
            notes += [
                f"{line.label!r} shares its weight with a layer of an earlier line of the space, whose settings apply"
                for target in line_targets
                if target not in self._targets[line.label]
            ]
        self.lines = [line for line in lines if self._targets[line.label]]
        self._options = {line.label: self._line_candidates(line) for line in self.lines}
        below = [
            note
            for line in self.lines
            for target in self._targets[line.label]
            for note in self._notes_about(line, target)
        ]
        self.notes = (*notes, *_first_notes(below))

    def _notes_about(self, line: Line, target: Target) -> list[str]:
        """Return notes about forms that a layer cannot have, and about ranks and shares that are too small for it.

        Raises:
            ConfigError: If all values of a line are too small.
        """
        notes = []
        combinations = line.values()
        forms = dict.fromkeys(form_of(values) or LOW_RANK for values in combinations)
        for form in forms:
            options = [option for option in self.models.options[target] if option.form == form]
            if not options and form != DENSE:
                notes.append(f"{target.name!r} takes no fewer bytes in the form {form!r}, and stays dense with it")
            form_values = [values for values in combinations if (form_of(values) or LOW_RANK) == form]
            for name in ("rank", "share"):
                requested = [value for values in form_values if (value := rank_or_share(values, name)) is not None]
                if not options or not requested:
                    continue
                ranks, sizes = [option.rank or 0 for option in options], [option.bytes for option in options]
                least = min(ranks) if name == "rank" else min(sizes) / target.dense_bytes
                if min(requested) >= least:
                    continue
                smallest = f"the smallest {name} of {target.name!r} in the form {form!r} is {least:.4g}"
                if max(requested) < least and len(forms) == 1:
                    raise ConfigError(f"{smallest}, and the space asks for at most {max(requested):.4g}: ask for more")
                notes.append(f"{smallest}, which is used where the space asks for less, down to {min(requested):.4g}")
        return notes

    @property
    def _tuned_targets(self) -> set[Target]:
        return {target for targets in self._targets.values() for target in targets}

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        cost = self.models.cost
        least = sum(min(map(cost.of, (option for option, _ in candidates))) for candidates in self._options.values())
        rest = sum(cost.dense(target) for target in self.models.targets if target not in self._tuned_targets)
        return (least + rest) / (self.models.dense or 1.0)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        choice: Choice = {}
        for line in self.lines:
            values = line.draw(trial)
            choice |= {target: self._pick(target, values) for target in self._targets[line.label]}
        return self.models.plan_of(choice)

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of the choice of :func:`panther.compress` among the space's values, at a budget."""
        cost = self.models.cost
        rest = sum(cost.dense(target) for target in self.models.targets if target not in self._tuned_targets)
        options: Any = {label: [option for option, _ in candidates] for label, candidates in self._options.items()}
        choice: Any = choose_global(options, budget * self.models.dense - rest, cost)
        params: dict[str, Any] = {}
        for label, option in choice.items():
            values = next(values for candidate, values in self._options[label] if candidate is option)
            params |= {f"{label}/{name}": value for name, value in values.items()}
        return params

    def _line_candidates(self, line: Line) -> list[tuple[Option, dict[str, Any]]]:
        """Return for each combination of a line's settings its total cost and loss over all layers."""
        candidates = []
        for values in line.values():
            picked = [self._pick(target, values) for target in self._targets[line.label]]
            times = [option.time_s for option in picked if option.time_s is not None]
            option = Option(
                "", sum(option.bytes for option in picked), loss=sum(option.loss for option in picked),
                time_s=sum(times) if times else None,
            )  # fmt: skip
            candidates.append((option, values))
        return candidates

    def _pick(self, target: Target, values: Mapping[str, Any]) -> Option:
        """Return the option of a layer with the form and the largest rank or share that the values allow."""
        form = form_of(values) or LOW_RANK
        options = [option for option in self.models.options[target] if option.form == form]
        if not options:  # The layer cannot have the form, or would not become smaller.
            return Option(DENSE, target.dense_bytes, error=0.0)
        if (rank := rank_or_share(values, "rank")) is not None:
            below = [option for option in options if (option.rank or 0) <= rank]
            return max(below, key=lambda option: option.rank or 0, default=min(options, key=lambda o: o.rank or 0))
        if "share" in values:
            below = [option for option in options if option.bytes <= values["share"] * target.dense_bytes]
            return max(below, key=lambda option: option.bytes, default=min(options, key=lambda o: o.bytes))
        return options[-1]


def unchanged_layers(lines: Sequence[Line], models: CompressedModels) -> list[str]:
    """Return a note for each layer that a line names but that cannot change, with the reason."""
    changeable = {name for target in models.targets for name in target.names}
    reasons = {entry.name: entry.reason for entry in models.survey.skipped}
    left = [name for line in lines if line.kind != "attention" for name in line.names if name not in changeable]
    return _first_notes(
        [f"{name!r} does not change although the space names it: {reasons.get(name, 'cannot change')}" for name in left]
    )


def _first_notes(notes: list[str]) -> list[str]:
    more = len(notes) - _MAX_NOTES
    return notes if more <= 0 else [*notes[:_MAX_NOTES], f"{more} more notes like the last one"]


class CombinedSpace(LayerSpaceBase):
    """The automatic space, settings of layers, attention, and healing. Each part may be missing."""

    def __init__(
        self,
        models: CompressedModels,
        lines: Sequence[Line] | None,
        forms: Sequence[str],
        heal: Mapping[str, Spec] | None,
    ) -> None:
        self.models, self._heal = models, heal
        self._parts: list[LayerSpaceBase] = []
        notes = unchanged_layers(lines or (), models)
        self._attention = []
        for line in lines or ():
            if line.kind == "attention":
                names = models.attention.checked(line.label, line.names)
                self._attention.append(replace(line, names=names))
                reasons = models.attention.reasons
                notes += [
                    f"{name!r} does not change although the space names it: {reasons.get(name, 'cannot be replaced')}"
                    for name in line.names
                    if name not in names
                ]
        of_layers = [line for line in lines or () if line.kind == "layers"]
        auto = {name for line in lines or () if line.kind == AUTO for name in line.names}
        if lines is None:
            self._parts.append(AutoSpace(models))
        elif auto:
            self._parts.append(AutoSpace(models, auto, forms))
        if of_layers:
            self._parts.append(LayerSpace(models, of_layers))
        self.notes = tuple([*notes, *(note for part in self._parts for note in part.notes)])

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        return min((part.least for part in self._parts), default=1.0)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        layers: dict[str, Any] = {}
        for part in self._parts:
            layers |= part.draw(trial).layers
        plan = Plan(layers)
        attention: dict[str, Any] = {}
        for line in self._attention:
            values = line.draw(trial)
            if values.setdefault("kernel_fn", "hermite") != EXACT:
                attention |= dict.fromkeys(line.names, values)
        if attention:
            plan = replace(plan, attention=attention)
        if self._heal is not None:
            heal_settings = {name: suggest(trial, f"heal/{name}", spec) for name, spec in self._heal.items()}
            if heal_settings.get("max_steps", 1) and (layers or attention):
                plan = replace(plan, heal=heal_settings)
        return plan

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of :func:`panther.compress` at a budget; attention is exact if this is a choice."""
        params: dict[str, Any] = {}
        for part in self._parts:
            params |= part.at_budget(budget)
        for line in self._attention:
            kernel = line.specs.get("kernel_fn")
            exact = kernel is not None and EXACT in grid(kernel)
            for name, spec in line.specs.items():
                params[f"{line.label}/{name}"] = EXACT if exact and name == "kernel_fn" else middle(spec)
        for name, spec in (self._heal or {}).items():
            params[f"heal/{name}"] = middle(spec)
        return params

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a smaller budget than the cost of a plan, if a part of the space has a budget."""
        for part in self._parts:
            params = part.below(params, plan, by)
        return dict(params)


def heal_specs(heal: Any) -> Mapping[str, Spec] | None:
    """Return the specifications of the argument ``heal``: a HealConfig, a dict of its settings, or None.

    Raises:
        ConfigError: If a setting is unknown, or a value is not allowed.
    """
    if heal is None:
        return None
    if isinstance(heal, HealConfig):
        default = HealConfig()
        heal = {
            setting.name: getattr(heal, setting.name)
            for setting in fields(HealConfig)
            if getattr(heal, setting.name) != getattr(default, setting.name)
        } | {"max_steps": heal.max_steps}
    if not isinstance(heal, Mapping) or not heal:
        raise ConfigError(f"heal={heal!r} must be a HealConfig, or a dict of its settings and their values")
    specs = {name: as_spec(f"heal[{name!r}]", value) for name, value in heal.items()}
    for name, spec in specs.items():
        for value in grid(spec):
            if name == "train" and value != "factors":
                raise ConfigError("heal only trains the new layers in a search: remove 'train'")
            if name == "max_seconds" and value is not None:
                raise ConfigError(
                    "heal in a search has no max_seconds, because trials would then depend on the machine's load: "
                    "use max_steps"
                )
            if name in ("checkpoint_dir", "trackers"):
                raise ConfigError(f"heal in a search has no {name}: remove it")
            if not (name == "max_steps" and value == 0):  # 0 steps are no healing
                HealConfig(**{name: value})
    return specs
