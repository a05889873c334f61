"""The space of a search, of all that its dict names: layers, attention, and how a compressed model is healed."""

__all__ = ["WholeSpace", "as_heal", "middle"]

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from panther.compression.config import HealConfig
from panther.errors import ConfigError
from panther.tuning.attention import EXACT
from panther.tuning.prepared import Plan, Prepared
from panther.tuning.spaces.layers import AUTO, AutoSpace, LayerSpace, LayerSpaceBase, Line, unchanged_layers
from panther.tuning.spaces.values import Choice, Spec, as_spec, grid, suggest


class WholeSpace(LayerSpaceBase):
    """Layers by the automatic space, by their own settings, attention, and healing; each part may be missing."""

    def __init__(
        self, prepared: Prepared, lines: Sequence[Line] | None, forms: Sequence[str], heal: Mapping[str, Spec] | None
    ) -> None:
        self.prepared, self._heal = prepared, heal
        self._parts: list[LayerSpaceBase] = []
        notes = unchanged_layers(lines or (), prepared)
        self._attention = []
        for line in lines or ():
            if line.kind == "attention":
                names = prepared.attention.checked(line.label, line.names)
                self._attention.append(replace(line, names=names))
                reasons = prepared.attention.reasons
                notes += [
                    f"{name!r} stays as it is although the space names it: {reasons.get(name, 'cannot be replaced')}"
                    for name in line.names
                    if name not in names
                ]
        of_layers = [line for line in lines or () if line.kind == "layers"]
        auto = {name for line in lines or () if line.kind == AUTO for name in line.names}
        if lines is None:
            self._parts.append(AutoSpace(prepared))
        elif auto:
            self._parts.append(AutoSpace(prepared, auto, forms))
        if of_layers:
            self._parts.append(LayerSpace(prepared, of_layers))
        self.notes = tuple([*notes, *(note for part in self._parts for note in part.notes)])

    @property
    def least(self) -> float:
        """Return the smallest budget, a share of what the layers cost as they are."""
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
            drawn = {name: suggest(trial, f"heal/{name}", spec) for name, spec in self._heal.items()}
            if drawn.get("max_steps", 1) and (layers or attention):
                plan = replace(plan, heal=drawn)
        return plan

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the parameters of :func:`panther.compress` at a budget; attention stays exact if it may."""
        found: dict[str, Any] = {}
        for part in self._parts:
            found |= part.at_budget(budget)
        for line in self._attention:
            kernel = line.specs.get("kernel_fn")
            exact = kernel is not None and EXACT in grid(kernel)
            for name, spec in line.specs.items():
                found[f"{line.label}/{name}"] = EXACT if exact and name == "kernel_fn" else middle(spec)
        for name, spec in (self._heal or {}).items():
            found[f"heal/{name}"] = middle(spec)
        return found

    def below(self, params: Mapping[str, Any], plan: Plan, by: float) -> dict[str, Any]:
        """Return parameters with a budget below what a plan takes, if a part of the space has a budget."""
        for part in self._parts:
            params = part.below(params, plan, by)
        return dict(params)


def middle(spec: Spec) -> Any:
    """Return the middle of a specification's values; of a choice the first one."""
    values = grid(spec)
    return values[0] if isinstance(spec, Choice) else values[len(values) // 2]


def as_heal(given: Any) -> Mapping[str, Spec] | None:
    """Return the specifications of the argument ``heal``: a HealConfig, a dict of its settings, or None.

    Raises:
        ConfigError: If a setting is unknown, or a value is not allowed.
    """
    if given is None:
        return None
    if isinstance(given, HealConfig):
        default = HealConfig()
        given = {
            one.name: getattr(given, one.name)
            for one in fields(HealConfig)
            if getattr(given, one.name) != getattr(default, one.name)
        } | {"max_steps": given.max_steps}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"heal={given!r} must be a HealConfig, or a dict of its settings and what they may be")
    specs = {name: as_spec(f"heal[{name!r}]", value) for name, value in given.items()}
    for name, spec in specs.items():
        for value in grid(spec):
            if name == "train" and value != "factors":
                raise ConfigError("heal trains the new layers alone in a search: leave 'train' out")
            if name == "max_seconds" and value is not None:
                raise ConfigError(
                    "heal in a search has no max_seconds, because trials would then depend on how busy the machine is: "
                    "use max_steps"
                )
            if name in ("checkpoint_dir", "trackers"):
                raise ConfigError(f"heal in a search keeps no {name}: leave it out")
            if not (name == "max_steps" and value == 0):  # which is without healing
                HealConfig(**{name: value})
    return specs
