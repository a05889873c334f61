"""The space of a search that compresses a model: layers, attention, and healing."""

__all__ = ["CombinedSpace", "heal_specs"]

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from panther.compression.config import HealConfig
from panther.errors import ConfigError
from panther.tuning.attention import EXACT
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.plan import Plan
from panther.tuning.space.layers import AutoSpace, LayerSpace, LayerSpaceBase, unchanged_layers
from panther.tuning.space.lines import AUTO, Line
from panther.tuning.space.values import Spec, as_spec, grid, middle, suggest


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
