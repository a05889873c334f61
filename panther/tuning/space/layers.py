"""Spaces of the forms of layers: a budget with weights for groups of layers, settings of individual layers, or both."""

__all__ = ["AutoSpace", "LayerSpace", "Space", "heal_specs"]

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from panther.compression.calibration.targets import SkippedLayer, Target
from panther.compression.config import HealConfig
from panther.compression.forms import DENSE, Choice, Option
from panther.compression.selection.allocation import choose_global
from panther.errors import ConfigError
from panther.tuning.attention import EXACT
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.plan import Plan
from panther.tuning.space.lines import AUTO, Line, Request, request_of
from panther.tuning.space.values import Float, Spec, as_spec, grid, middle, suggest

# The losses of a group of layers are multiplied by a weight from 1 / MAX_WEIGHT to MAX_WEIGHT.
_MAX_WEIGHT = 8.0
# More groups would be more dimensions than a few dozen trials can explore.
_MAX_GROUPS = 8
# If a group has this many layers, there is a weight of late layers relative to early layers.
_MIN_LAYERS_FOR_DEPTH_WEIGHT = 3
_MAX_NOTES = 5  # notes of one kind


class AutoSpace:
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
        self._all_layers = names is None
        allowed_forms = {DENSE, *forms}
        self._options: dict[Target, list[Option]] = {}
        for target in self.targets:
            options = [option for option in models.options[target] if names is None or option.form in allowed_forms]
            self._options[target] = options or [Option(DENSE, target.dense_bytes, error=0.0)]
        self._dense = sum(map(models.cost.dense, self.targets)) or 1.0
        self._groups = _grouped(self.targets)
        # The weight of the first group is 1, because only ratios matter.
        weights = [f"emphasis/{name}" for name in list(self._groups)[1:]]
        if weights and max(map(len, self._groups.values())) >= _MIN_LAYERS_FOR_DEPTH_WEIGHT:
            weights.append("emphasis of late layers")
        self._emphases = dict.fromkeys(weights, Float(1 / _MAX_WEIGHT, _MAX_WEIGHT, log=True))
        # The bound is rounded up, so that at least the smallest forms fit into the smallest budget.
        self._budget = Float(min(math.ceil(1e4 * self.smallest_budget) / 1e4, 1.0), 1.0, log=True)

    def draw(self, trial: Any) -> Choice:
        """Draw the choice of an Optuna trial."""
        budget = suggest(trial, "budget", self._budget)
        emphases = {name: suggest(trial, name, spec) for name, spec in self._emphases.items()}
        models = self.models
        if self._all_layers and all(value == 1 for value in emphases.values()):
            return models.choose(budget)
        late_emphasis = emphases.get("emphasis of late layers", 1.0)
        last_index = max(len(self.targets) - 1, 1)
        place = {target: index / last_index for index, target in enumerate(self.targets)}
        options = {}
        for name, targets in self._groups.items():
            for target in targets:
                factor = emphases.get(f"emphasis/{name}", 1.0) * late_emphasis ** (2 * place[target] - 1)
                options[target] = [replace(option, loss=option.loss * factor) for option in self._options[target]]
        return choose_global(options, budget * self._dense, models.cost)

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of :func:`panther.compress` at a budget."""
        return {"budget": min(max(budget, self._budget.low), 1.0)} | dict.fromkeys(self._emphases, 1.0)

    @property
    def smallest_budget(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        return self.models.cost.least(self._options) / self._dense


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


class LayerSpace:
    """Settings of layers, individually or jointly. Layers that no line names do not change."""

    def __init__(self, models: CompressedModels, lines: Sequence[Line]) -> None:
        self.models = models
        by_name = {name: target for target in models.targets for name in target.names}
        self._targets: dict[str, list[Target]] = {}
        rest = dict.fromkeys(models.targets)
        for line in lines:
            # A target of an earlier line that shares its weight keeps the settings of that line.
            line_targets = dict.fromkeys(by_name[name] for name in line.names if by_name.get(name) in rest)
            self._targets[line.label] = list(line_targets)
            rest = {target: None for target in rest if target not in self._targets[line.label]}
        self._cost_of_rest = sum(map(models.cost.dense, rest))
        self.lines = [line for line in lines if self._targets[line.label]]
        self._candidates = {line.label: self._line_candidates(line) for line in self.lines}
        for line in self.lines:
            self._check_limits(line)

    def _check_limits(self, line: Line) -> None:
        """Raise ConfigError if all ranks or shares of a line with one form are too small for one of its layers."""
        requests = [request_of(values) for values in line.values()]
        form, measure, _ = requests[0]
        if not measure or any(request[:2] != (form, measure) for request in requests):
            return
        largest = max(request.limit for request in requests)
        for target in self._targets[line.label]:
            options = [option for option in self.models.options[target] if option.form == form]
            unit = target.dense_bytes if measure == "share" else 1
            smallest = min((_measured(option, measure) / unit for option in options), default=0.0)
            if largest < smallest:
                raise ConfigError(
                    f"the smallest {measure} of {target.name!r} in the form {form!r} is {smallest:.4g}, and the space "
                    f"asks for at most {largest:.4g}: ask for more"
                )

    @property
    def smallest_budget(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        cost = self.models.cost
        smallest = [min(cost.of(option) for option, _ in candidates) for candidates in self._candidates.values()]
        return (sum(smallest) + self._cost_of_rest) / (self.models.dense_cost or 1.0)

    def draw(self, trial: Any) -> Choice:
        """Draw the choice of an Optuna trial."""
        choice: Choice = {}
        for line in self.lines:
            request = request_of(line.draw(trial))
            choice |= {target: self._pick(target, request) for target in self._targets[line.label]}
        return choice

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of the choice of :func:`panther.compress` among the space's values, at a budget."""
        options: Any = {label: [option for option, _ in candidates] for label, candidates in self._candidates.items()}
        limit = budget * self.models.dense_cost - self._cost_of_rest
        choice: Any = choose_global(options, limit, self.models.cost)
        params: dict[str, Any] = {}
        for label, option in choice.items():
            values = next(values for candidate, values in self._candidates[label] if candidate is option)
            params |= {f"{label}/{name}": value for name, value in values.items()}
        return params

    def _line_candidates(self, line: Line) -> list[tuple[Option, dict[str, Any]]]:
        """Return for each combination of a line's settings its total cost and loss over all layers."""
        candidates = []
        for values in line.values():
            options = [self._pick(target, request_of(values)) for target in self._targets[line.label]]
            times = [option.time_s for option in options if option.time_s is not None]
            option = Option(
                "", sum(option.bytes for option in options), loss=sum(option.loss for option in options),
                time_s=sum(times) if times else None,
            )  # fmt: skip
            candidates.append((option, values))
        return candidates

    def _pick(self, target: Target, request: Request) -> Option:
        """Return the option of a layer with the form and the largest rank or share that a request allows."""
        options = [option for option in self.models.options[target] if option.form == request.form]
        if not options:  # The layer cannot have the form, or would not become smaller.
            return Option(DENSE, target.dense_bytes, error=0.0)
        if not request.measure:
            return options[-1]
        limit = request.limit * (target.dense_bytes if request.measure == "share" else 1)
        measured = partial(_measured, measure=request.measure)
        allowed = [option for option in options if measured(option) <= limit]
        return max(allowed, key=measured, default=min(options, key=measured))


def _measured(option: Option, measure: str) -> float:
    """Return an option's rank, or its bytes, which a share limits."""
    return option.bytes if measure == "share" else option.rank or 0


def _first_notes(notes: list[str]) -> list[str]:
    more = len(notes) - _MAX_NOTES
    return notes if more <= 0 else [*notes[:_MAX_NOTES], f"{more} more notes like the last one"]


class Space:
    """The plans of a search: the automatic space, settings of layers, attention, and healing. Any may be missing.

    The notes say which parts of the requested space cannot be used, and why.
    """

    def __init__(
        self,
        models: CompressedModels,
        lines: Sequence[Line] | None,
        forms: Sequence[str],
        heal: Mapping[str, Spec] | None,
    ) -> None:
        self._models, self._heal = models, heal or {}
        of_kind = {kind: [line for line in lines or () if line.kind == kind] for kind in (AUTO, "layers", "attention")}
        changeable = {name for target in models.targets for name in target.names}
        layer_lines = [line for line in lines or () if line.kind != "attention"]
        notes = _first_notes(_unchanged(layer_lines, changeable, models.survey.skipped))
        self._attention = []
        for line in of_kind["attention"]:
            names = tuple(name for name in line.names if name in models.attention.modules)
            if not names:
                skipped = [entry for entry in models.attention.skipped if entry.name in line.names]
                reasons = "; ".join(f"{entry.name!r} {entry.reason}" for entry in skipped)
                raise ConfigError(
                    f"{line.label!r} of the space matches no attention that can be replaced"
                    f"{': ' if reasons else ''}{reasons}: nn.MultiheadAttention and transformers' modules "
                    "that take an attention function can"
                )
            self._attention.append(replace(line, names=names))
            notes += _unchanged([line], models.attention.modules, models.attention.skipped)
        auto = [name for line in of_kind[AUTO] for name in line.names]
        self._auto = AutoSpace(models, auto if lines is not None else None, forms) if auto or lines is None else None
        self._layers = LayerSpace(models, of_kind["layers"]) if of_kind["layers"] else None
        self._parts = [part for part in (self._auto, self._layers) if part is not None]
        self.notes = tuple(notes)

    @property
    def smallest_budget(self) -> float:
        """Return the smallest budget, a share of the unchanged layers' cost."""
        return min((part.smallest_budget for part in self._parts), default=1.0)

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        choice: Choice = {}
        for part in self._parts:
            choice |= part.draw(trial)
        plan = self._models.plan_of(choice)
        attention: dict[str, Any] = {}
        for line in self._attention:
            values = line.draw(trial)
            if values.setdefault("kernel_fn", "hermite") != EXACT:
                attention |= dict.fromkeys(line.names, values)
        heal = {name: suggest(trial, f"heal/{name}", spec) for name, spec in self._heal.items()}
        has_layers = bool(plan.layers or attention)
        return Plan(plan.layers, attention, heal if has_layers and heal.get("max_steps", 1) else {})

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters nearest to :func:`panther.compress` at a budget; attention is exact if it can be."""
        params: dict[str, Any] = {}
        for part in self._parts:
            params |= part.at_budget(budget)
        for line in self._attention:
            kernel = line.specs.get("kernel_fn")
            exact = kernel is not None and EXACT in grid(kernel)
            for name, spec in line.specs.items():
                params[f"{line.label}/{name}"] = EXACT if exact and name == "kernel_fn" else middle(spec)
        return params | {f"heal/{name}": middle(spec) for name, spec in self._heal.items()}


def _unchanged(lines: Sequence[Line], changeable: Collection[str], skipped: Sequence[SkippedLayer]) -> list[str]:
    """Return a note for each module that a line names but that cannot change, with the reason."""
    reasons = {entry.name: entry.reason for entry in skipped}
    return [
        f"{name!r} does not change although the space names it: {reasons.get(name, 'cannot change')}"
        for line in lines
        for name in line.names
        if name not in changeable
    ]


def heal_specs(heal: Any) -> Mapping[str, Spec] | None:
    """Return the specifications of the argument ``heal``: a HealConfig, a dict of its settings, or None."""
    if heal is None:
        return None
    if isinstance(heal, HealConfig):
        defaults = vars(HealConfig())
        changed = {name: value for name, value in vars(heal).items() if value != defaults[name]}
        heal = changed | {"max_steps": heal.max_steps}
    if not isinstance(heal, Mapping) or not heal:
        raise ConfigError(f"heal={heal!r} must be a HealConfig, or a dict of its settings and their values")
    specs = {name: as_spec(f"heal[{name!r}]", value) for name, value in heal.items()}
    for name, spec in specs.items():
        for value in grid(spec):
            if name == "train" and value != "factors":
                raise ConfigError("heal only trains the new layers in a search: remove 'train'")
            if not (name == "max_steps" and value == 0):  # 0 steps are no healing
                HealConfig(**{name: value})
    return specs
