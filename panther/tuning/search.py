"""One search, from the unchanged model to the best one: open the study, prepare, run trials, and build the result."""

__all__ = ["Task", "run_search"]

import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from panther._random_state import preserved_generators
from panther.compression.calibration.checks import check_adapters, check_model
from panther.compression.calibration.eligibility import select_targets
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import Selector
from panther.compression.preparation import make_runner
from panther.errors import ConfigError, TuningError
from panther.tuning.compressed_models import CompressedModels, prepare_models
from panther.tuning.config import TuneConfig
from panther.tuning.evaluation import SAME, Evaluator
from panther.tuning.goal import Figures, Goal, check_unchanged
from panther.tuning.plan import Plan, call_model_fn, copy_model, copy_or_call_again
from panther.tuning.result import Trial, TuneResult, pareto_front
from panther.tuning.runners import run_trials
from panther.tuning.space.layers import CombinedSpace, heal_specs
from panther.tuning.space.lines import AUTO, Line, parse_lines, used_forms
from panther.tuning.study.storage import describe_search, open_study
from panther.tuning.study.study import Study

_MOST = 5  # failed trials or names that notes list
_FIRST = (3, 8)  # least and largest number of first trials, the choices of pr.compress
_FIRST_SHARE = 1 / 3  # share of first trials between these bounds


class Task:
    """What a search tunes: the forms of the layers of a trained model."""

    def __init__(self, model: Any, config: TuneConfig) -> None:
        self._config = config
        self._heal = heal_specs(config.heal)
        self._model_fn = None if isinstance(model, nn.Module) else model
        if self._model_fn is not None:
            model = call_model_fn(self._model_fn, "its first call")
        check_model(model)
        check_adapters(model)
        self._copy = copy_model(model, self._model_fn is not None)
        if self._copy is model:
            # The results need further models. If there are none, the search must not start.
            copy_or_call_again(model, self._model_fn)
        self._training = [module.training for module in model.modules()]
        is_automatic = isinstance(config.space, str) and config.space == AUTO
        self._lines = None if is_automatic else parse_lines(model, config.space)
        self._automatic_forms = config.compress_config(config.forms, config.include).form_settings.names
        forms, include = config.forms, config.include
        if self._lines is not None:
            forms, include = self._forms_of(self._lines), _within(self._lines, config.include)
        self._compress_config = config.compress_config(forms, include)
        self.description = self._describe(model, include)

    @property
    def num_first(self) -> int:
        """Return the number of first trials."""
        least, most = _FIRST
        return min(most, max(least, round(_FIRST_SHARE * self._config.trials)))

    def make_runner(self, seed: int) -> Runner:
        """Return the copy of the model, with the calibration batches."""
        return make_runner(self._copy.eval(), self._compress_config)

    def prepare(self, runner: Runner, seed: int) -> tuple[CompressedModels, CombinedSpace]:
        """Fit the layers of the copy, and return the models of plans, and the space of plans."""
        has_layers = self._lines is None or any(line.kind != "attention" for line in self._lines)
        models = prepare_models(
            runner, self._compress_config if has_layers else None, seed, by_time=self._config.goal.budgets_are_times,
            training=self._training, model_fn=self._model_fn,
        )  # fmt: skip
        return models, CombinedSpace(models, self._lines, self._automatic_forms, self._heal)

    def _forms_of(self, lines: Sequence[Line]) -> list[str] | None:
        """Return the forms that the lines of a space need."""
        kinds = {line.kind for line in lines}
        if self._config.forms is not None and AUTO not in kinds:
            raise ConfigError("forms= is for the space 'auto', and this space has its forms: remove forms=")
        line_forms = [form for line in lines if line.kind == "layers" for form in used_forms(line.specs)]
        return list(dict.fromkeys([*(self._automatic_forms if AUTO in kinds else ()), *line_forms])) or None

    def _describe(self, model: nn.Module, include: Any) -> dict[str, str]:
        """Return what must not change when the search is resumed."""
        config, forms = self._config, self._compress_config.form_settings
        space = AUTO if self._lines is None else "; ".join(map(str, self._lines))
        if self._heal is not None:
            space += f"; heal {dict(self._heal)}"
        survey = select_targets(
            model,
            include,
            config.exclude,
            smallest=forms.smallest_bytes,
            has_codes=forms.has_codes,
        )
        return describe_search(
            config, model, space,
            forms=" ".join(forms.names),
            layers=" ".join(target.name for target in survey.targets) or "none",
            settings=f"rank_multiple {forms.rank_multiple}, group_size {forms.group_size}, activations "
            f"{forms.activations}{', symmetric' if forms.symmetric else ''}",
        )  # fmt: skip


def _within(lines: Sequence[Line], include: Any) -> Selector:
    """Return a selector of the layers that a space names, or raise ConfigError if the user also passed ``include``."""
    if include is not None:
        raise ConfigError("include= is for space='auto', and this space names its layers: remove include=")
    names = {name for line in lines if line.kind != "attention" for name in line.names}
    return lambda module, name: name in names


def run_search(task: Task, config: TuneConfig, began: float) -> TuneResult:
    """Run a search, as :func:`panther.tune` describes; ``began`` is the time of the call.

    Raises:
        ConfigError: If the storage has another study.
        TuningError: If a user's function fails, no trial is complete, or no trial satisfies the constraints.
    """
    goal = config.goal
    deadline = None if config.timeout_s is None else began + config.timeout_s
    with open_study(config, task.description) as opened, preserved_generators():  # Making layers draws random numbers.
        seed = opened.seed
        runner = task.make_runner(seed)
        evaluator = Evaluator(runner, seed, config.evaluate, goal, config.repeats, config.caught_exceptions)
        unchanged, evaluate_s = evaluator.measure_unchanged()
        check_unchanged(goal, unchanged)
        opened.check_unchanged_model(goal, unchanged)
        models, space = task.prepare(runner, seed)
        first = task.num_first if config.first is None else config.first
        search = Study(opened.study, space, goal, unchanged, config.sampler, seed, first)
        why = run_trials(search, evaluator, models, config.trials, deadline, config.parallel)
        best = _best(search, goal)
        tuned, report = models.build(best.plan)
        notes = [*opened.notes, *space.notes, *_notes(search, config, why)]
        if best.plan.heal:
            notes += _repeat_notes(evaluator, best, tuned)
        return TuneResult(
            model=tuned,
            best=best,
            trials=tuple(search.trials),
            front=pareto_front(search.trials, goal),
            unchanged=_unchanged_trial(unchanged, goal, evaluate_s),
            report=report,
            objective=goal.name,
            constraints=tuple(constraint.text for constraint in goal.constraints),
            higher_is_better=goal.higher_is_better,
            by_metric=goal.by_metric,
            prepare_s=models.seconds,
            seconds=time.perf_counter() - began,
            seed=seed,
            notes=tuple(notes),
            distributions=search.distributions,
            study=search.study,
            models=models,
        )


def _best(search: Study, goal: Goal) -> Trial:
    """Return the best trial, or raise TuningError if no trial satisfies the constraints."""
    complete = [trial for trial in search.trials if trial.state == "complete"]
    if not complete:
        reasons = list(dict.fromkeys(trial.reason for trial in search.trials if trial.reason)) or ["all were pruned"]
        raise TuningError(
            f"no trial of {len(search.trials)} was completed ({'; '.join(reasons[:3])}): check evaluate, or set more "
            "trials"
        )
    fine = [trial for trial in complete if trial.feasible]
    if fine:
        return min(fine, key=lambda trial: (*goal.order(trial.figures), trial.number))

    def missed(trial: Trial) -> float:
        return sum(max(violation, 0.0) for violation in goal.violations(trial.figures, search.unchanged))

    def distance(trial: Trial) -> tuple[float, ...]:
        return missed(trial), goal.metric_order(trial.figures), *goal.order(trial.figures)

    nearest = min(complete, key=distance)
    texts = " and ".join(repr(constraint.text) for constraint in goal.constraints)
    raise TuningError(
        f"no trial of {len(search.trials)} satisfies constraint={texts}: the best reached is "
        f"{goal.describe(nearest.figures)} (trial {nearest.number}), and the unchanged model has "
        f"{goal.describe(search.unchanged)}: relax the constraint, or set more trials or a larger space"
    )


def _unchanged_trial(unchanged: Figures, goal: Goal, evaluate_s: float) -> Trial:
    return Trial(
        number=-1, params={}, state="complete", metric=unchanged.metric, objective=unchanged.objective,
        size=unchanged.size, latency=unchanged.latency, feasible=goal.feasible(unchanged, unchanged), plan=Plan(),
        evaluate_s=evaluate_s,
    )  # fmt: skip


def _repeat_notes(evaluator: Evaluator, best: Trial, tuned: nn.Module) -> list[str]:
    """Return a note if healing the best model again gave another result."""
    if evaluator.repeats > 1:  # The metric of a varying function cannot be compared.
        return []
    metric = evaluator.metric_of(tuned, "the best model")
    if abs(metric - best.metric) <= SAME * max(abs(metric), abs(best.metric)):
        return []
    return [
        f"the model of trial {best.number} was healed again for the result, and has the metric {metric:.6g} instead of "
        f"{best.metric:.6g} in the trial: fix the order of its data and its random numbers, or use the same number of "
        "threads"
    ]


def _notes(search: Study, config: TuneConfig, why: str) -> list[str]:
    notes = []
    if len(search.trials) < config.trials:
        notes.append(f"ended after {len(search.trials)} of {config.trials} trials: {why}")
    failed = [trial for trial in search.trials if trial.state == "failed"]
    notes += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_MOST]]
    if search.uncalled:
        names = sorted(search.uncalled)
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        notes.append(
            f"evaluate does not call {', '.join(map(repr, names[:_MOST]))}{rest}: the metric does not depend on "
            "the forms of these layers"
        )
    if len(search.goal.directions) > 1 and config.pruner != "none" and any(trial.partial for trial in search.trials):
        notes.append(
            "no trial was pruned by partial metrics: without a constraint of the metric the search has two objectives, "
            "and Optuna cannot prune with two objectives"
        )
    return notes
