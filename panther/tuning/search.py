"""pr.tune: open the study, evaluate the unchanged model, prepare, run trials, and build the result."""

__all__ = ["tune"]

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from panther._descriptions import describe_function
from panther._hints import takes_settings
from panther._process_settings import preserved_generators
from panther.compression.calibration.descriptions import checksum, described_batches, shortened
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import check_adapters, check_model, select_targets
from panther.compression.calibration.targets import Selector
from panther.compression.preparation import make_runner
from panther.errors import ConfigError, TuningError
from panther.nn.sketch_record import plain_state
from panther.tuning.compressed_models import CompressedModels, prepare_models
from panther.tuning.config import TuneConfig
from panther.tuning.evaluation import Evaluator
from panther.tuning.goal import Goal, check_unchanged
from panther.tuning.plan import Plan, call_model_fn, copy_model
from panther.tuning.result import Trial, TuneResult, pareto_front
from panther.tuning.runners import run_trials
from panther.tuning.space.layers import Space, heal_specs
from panther.tuning.space.lines import AUTO, Line, parse_lines, used_forms
from panther.tuning.study import DESCRIBED_FUNCTIONS, Study, open_study

_MOST = 5  # failed trials that notes list
_SMALLEST_FIRST, _LARGEST_FIRST = 3, 8  # bounds of the number of first trials, the choices of pr.compress
_FIRST_SHARE = 1 / 3  # share of first trials between these bounds


@takes_settings(TuneConfig)
def tune(model: nn.Module | Callable[..., nn.Module], config: TuneConfig) -> TuneResult:  # noqa: D417 (as compress)
    """Search for the best forms of a model's layers, by a metric of your choice.

    :func:`panther.compress` preserves a model's output. Here a function returns the metric of a model, and the search
    finds the smallest or fastest model that is good enough. Moments and decompositions are computed once, as in
    ``compress``. A trial truncates them and calls the function. The first trials are the choices of ``compress`` at
    several budgets, and Optuna draws the rest.

    Args:
        model: A trained model. It is only read: trials run on a copy. Or a function that returns it, which is called
            once.
        evaluate: ``evaluate(model)`` returns the metric of a model, or yields it for growing parts of the data, so that
            poor trials end early. It must not change weights, modules and hooks, and must return the same number for
            the same model; training modes are restored. torch's, Python's and NumPy's generators are seeded before each
            call.
        calibration: Batches as for :func:`panther.compress`. None fits factors only to the weights, which is less
            accurate.
        space: ``"auto"`` is a budget and a weight of each group of layers, from which ranks and forms follow by the
            layers' spectra. Otherwise a dict: keys select layers, by a glob of names, a class, a function of the module
            and its name, or a :class:`panther.tuning.Group`; values are dicts of settings, each an
            :class:`~panther.tuning.Int`, a :class:`~panther.tuning.Float`, a :class:`~panther.tuning.Choice`, a list,
            a range, or a value:

            - ``"form"``: a form of :func:`panther.compress`, ``"low_rank"`` if it is left out; or ``"bits"``, a width.
            - ``"rank"``: the matrix's rank, or ``"share"``, a share of the layer's bytes, for forms that have a rank.
              It is rounded down to a rank or share that the layer can have. ``"low_rank"``, and ``"num_terms"``, of
              :class:`panther.nn.SKLinear` stand for a rank of twice their product.
            - ``"kernel_fn"`` and ``"num_random_features"`` of attention modules, which become
              :class:`panther.nn.RandMultiHeadAttention`, fitted to the first batch; ``"exact"`` is a kernel for modules
              that do not change.

            Instead of a dict, ``"auto"`` selects layers for the automatic space. Layers that no key selects do not
            change.
        objective: The value to minimise: ``"size"``, the bytes of the saved model; ``"latency"``, the seconds of the
            first held-out batch, measured alternately with the unchanged model; or a function of the model. With
            ``"metric"`` the search is for the best metric.
        constraint: A condition of the model: ``">= 0.91"``, ``">= 99 %"`` (of the unchanged model's metric), ``"<=
            2.5"``, ``"size <= 10 MB"``, ``"latency <= 5 ms"``, a function of the metric, or a list of conditions.
            Without a condition of the metric the search is for the Pareto front of metric and objective, and the best
            trial has the best metric.
        direction: ``"maximize"`` or ``"minimize"`` the metric, if the constraint does not say it; None maximizes.
        trials: Number of trials, including trials in the storage.
        first: Number of first trials that are choices of :func:`panther.compress`, at budgets that approach the
            smallest one that satisfies the constraints. None is a third, from 3 to 8.
        timeout_s: Seconds after which no trial begins; None sets no bound.
        sampler: ``"tpe"``, ``"gp"`` (a Gaussian process), ``"random"``, or a sampler of Optuna.
        pruner: ``"median"``, ``"asha"`` (successive halving), ``"none"``, or a pruner of Optuna.
        storage: A path, to which each trial is written when it ends, a URL of a database, or a storage of Optuna. The
            same call resumes the stored search. Only one search at a time can open a file; a second search of a
            database ends the first one with an error. None keeps trials in memory.
        repeats: Calls of ``evaluate`` for each model. The metric is the mean. This is for functions that vary.
        catch: Exceptions of your functions, such as ``torch.OutOfMemoryError``, after which the search continues: the
            trial has failed, and the report says why. All other exceptions end the search, and so do exceptions for the
            unchanged model.
        parallel: Trials at a time: a number of processes of this machine, each with a copy of the model; or ``"ray"``,
            for as many as the cluster of Ray has cores. A trial whose process died runs again. With more
            than one process, later trials depend on the order in which trials end.
        heal: How each trial's model is healed before ``evaluate``: a :class:`~panther.compression.HealConfig`, or a
            dict of settings and their values, as in ``space``. With ``max_steps`` 0 nothing is healed.
        forms: The forms that layers may have in the space ``"auto"``, as for :func:`panther.compress`.
        rank_multiple: Ranks are multiples of this even number, as for :func:`panther.compress`.
        group_size: Columns of a quantized weight that share a scale; None is an entire row.
        activations: ``"int8"`` rounds the inputs of quantized linear layers.
        symmetric: Whether the middle code of every group stands for zero.
        include: Only layers that match: globs of names, types or functions, as for :func:`panther.compress`.
        exclude: No layers that match.
        forward_fn: How the model is called on a calibration batch.
        loss_fn: A loss whose gradients say how the output depends on layers.
        mask_fn: Which positions of a batch count.
        statistics_memory_bytes: Memory for moments.
        seed: Seed of the search and of all random numbers; None draws one, or uses the seed in the storage.
        progress: Whether to show progress on standard error; None shows it on a terminal.

    Returns:
        The best model and all trials.

    Raises:
        TuningError: If ``evaluate`` raises an exception that is not in ``catch``, returns no finite number, changes the
            model, or varies for the same model; or if no trial satisfies the constraints (the message names the best
            one).
        ConfigError: If an argument is not understood, or the storage has another study.
        CompressionError: If the calibration batches cannot be used, or no layer is eligible.
        MissingExtraError: If Optuna is not installed.

    Cost: the preparation takes as long as ``compress``, without a bound on the fitted widths and components. Each trial
    takes a fraction of a second and one evaluation. The unchanged model is evaluated twice at first. Memory: a copy of
    the model, the components of all its layers, about twice its size, and the moments.

    Example:
        >>> import torch, panther as pr
        >>> from sklearn.datasets import load_digits
        >>> x, y = map(torch.tensor, load_digits(return_X_y=True))
        >>> x = x.float() / 16  # 1,797 digits of 64 pixels
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 256),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> for batch in 3 * torch.arange(1500).split(32):
        ...     loss = torch.nn.functional.cross_entropy(
        ...         net(x[batch]), y[batch]
        ...     )
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> def accuracy(net):
        ...     with torch.no_grad():
        ...         right = net(x[1500:]).argmax(-1) == y[1500:]
        ...     return right.float().mean()
        >>> result = pr.tune(
        ...     net,
        ...     accuracy,
        ...     list(x[:256].split(32)),
        ...     constraint=">= 99 %",
        ...     trials=10,
        ...     seed=0,
        ... )
        >>> (
        ...     result.best.metric >= 0.99 * result.unchanged.metric,
        ...     result.best.size < result.unchanged.size / 4,
        ... )
        (True, True)

    References: J. Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011 (TPE); T. Akiba et al.,
    "Optuna: a next-generation hyperparameter optimization framework", KDD 2019, arXiv:1907.10902.
    """
    began = time.perf_counter()
    if not (isinstance(model, nn.Module) or callable(model)):
        raise TypeError(f"the model must be an nn.Module, or a function that returns one, not a {type(model).__name__}")
    # The search needs gradients and no inference tensors in any mode of the caller.
    with torch.inference_mode(False), torch.enable_grad():
        return _search(_Task(model, config), config, began)


class _Task:
    """What a search tunes: the forms of the layers of a trained model."""

    def __init__(self, model: Any, config: TuneConfig) -> None:
        self._config = config
        self._heal = heal_specs(config.heal)
        if not isinstance(model, nn.Module):
            model = call_model_fn(model)
        check_model(model)
        check_adapters(model)
        self.model = copy_model(model).eval()
        self._training = [module.training for module in model.modules()]
        is_automatic = isinstance(config.space, str) and config.space == AUTO
        self._lines = None if is_automatic else parse_lines(model, config.space)
        self._automatic_forms = config.compress_config(config.forms, config.include).form_settings.names
        forms, include = config.forms, config.include
        if self._lines is not None:
            forms, include = self._selection(self._lines)
        self.compress_config = config.compress_config(forms, include)
        self.description = self._describe(model, include)

    def prepare(self, runner: Runner, seed: int) -> tuple[CompressedModels, Space]:
        """Fit the layers of the copy, and return the models of plans, and the space of plans."""
        has_layers = self._lines is None or any(line.kind != "attention" for line in self._lines)
        models = prepare_models(
            runner, self.compress_config if has_layers else None, seed, by_time=self._config.goal.budgets_are_times,
            training=self._training,
        )  # fmt: skip
        return models, Space(models, self._lines, self._automatic_forms, self._heal)

    def _selection(self, lines: Sequence[Line]) -> tuple[list[str] | None, Selector]:
        """Return the forms that the lines of a space need, and a selector of their layers."""
        kinds = {line.kind for line in lines}
        if self._config.forms is not None and AUTO not in kinds:
            raise ConfigError("forms= is for the space 'auto', and this space has its forms: remove forms=")
        if self._config.include is not None:
            raise ConfigError("include= is for space='auto', and this space names its layers: remove include=")
        line_forms = [form for line in lines if line.kind == "layers" for form in used_forms(line.specs)]
        forms = dict.fromkeys([*(self._automatic_forms if AUTO in kinds else ()), *line_forms])
        names = {name for line in lines if line.kind != "attention" for name in line.names}
        return list(forms) or None, lambda module, name: name in names

    def _describe(self, model: nn.Module, include: Any) -> dict[str, str]:
        """Return what must not change when the search is resumed."""
        config, forms, goal = self._config, self.compress_config.form_settings, self._config.goal
        space = AUTO if self._lines is None else "; ".join(map(str, self._lines))
        if self._heal is not None:
            space += f"; heal {dict(self._heal)}"
        survey = select_targets(
            model, include, config.exclude, smallest=forms.smallest_bytes, has_codes=forms.has_codes
        )
        tensors = [(name, value) for name, value in plain_state(model).items() if isinstance(value, Tensor)]
        description = {
            "objective": goal.name,
            "constraint": " and ".join(constraint.text for constraint in goal.constraints) or "none",
            "direction": "maximize" if goal.higher_is_better else "minimize",
            "space": space,
            **{name: describe_function(getattr(config, name)) for name in DESCRIBED_FUNCTIONS},
            "repeats": str(config.repeats),
            "model": f"{type(model).__name__} {checksum(tensors):08x}",
            "calibration": "none" if config.calibration is None else described_batches(config.calibration),
            "forms": " ".join(forms.names),
            "layers": " ".join(target.name for target in survey.targets) or "none",
            "settings": f"rank_multiple {forms.rank_multiple}, group_size {forms.group_size}, activations "
            f"{forms.activations}{', symmetric' if forms.symmetric else ''}",
        }
        return {name: shortened(text) for name, text in description.items()}


def _search(task: _Task, config: TuneConfig, began: float) -> TuneResult:
    goal = config.goal
    deadline = None if config.timeout_s is None else began + config.timeout_s
    with open_study(config, task.description) as opened, preserved_generators():  # Making layers draws random numbers.
        seed = opened.seed
        runner = make_runner(task.model, task.compress_config)
        evaluator = Evaluator(runner, seed, config.evaluate, goal, config.repeats, config.caught_exceptions)
        unchanged, evaluate_s = evaluator.measure_unchanged()
        check_unchanged(goal, unchanged)
        opened.check_unchanged_model(goal, unchanged)
        models, space = task.prepare(runner, seed)
        first = config.first
        if first is None:
            first = min(_LARGEST_FIRST, max(_SMALLEST_FIRST, round(_FIRST_SHARE * config.trials)))
        search = Study(opened.study, space, goal, unchanged, config.sampler, seed, first)
        end_reason = run_trials(search, evaluator, models, config.trials, deadline, config.parallel)
        best = _best(search, goal)
        tuned, report = models.build(best.plan)
        notes = [*opened.notes, *space.notes, *_notes(search, config, end_reason)]
        unchanged_trial = Trial(
            number=-1, params={}, state="complete", **asdict(unchanged), evaluate_s=evaluate_s, plan=Plan(),
            feasible=goal.feasible(unchanged, unchanged),
        )  # fmt: skip
        return TuneResult(
            model=tuned,
            best=best,
            trials=tuple(search.trials),
            front=pareto_front(search.trials, goal),
            unchanged=unchanged_trial,
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
    if (best := search.best) is not None:
        return best
    complete = [trial for trial in search.trials if trial.state == "complete"]
    if not complete:
        reasons = list(dict.fromkeys(trial.reason for trial in search.trials if trial.reason)) or ["all were pruned"]
        raise TuningError(
            f"no trial of {len(search.trials)} was completed ({'; '.join(reasons[:3])}): check evaluate, or set more "
            "trials"
        )

    def distance(trial: Trial) -> tuple[float, ...]:
        figures = trial.figures
        violation = goal.total_violation(figures, search.unchanged)
        return violation, goal.metric_order(figures), *goal.order(figures)

    nearest = min(complete, key=distance)
    texts = " and ".join(repr(constraint.text) for constraint in goal.constraints)
    raise TuningError(
        f"no trial of {len(search.trials)} satisfies constraint={texts}: the best reached is "
        f"{goal.describe(nearest.figures)} (trial {nearest.number}), and the unchanged model has "
        f"{goal.describe(search.unchanged)}: relax the constraint, or set more trials or a larger space"
    )


def _notes(search: Study, config: TuneConfig, end_reason: str) -> list[str]:
    notes = []
    if len(search.trials) < config.trials:
        notes.append(f"ended after {len(search.trials)} of {config.trials} trials: {end_reason}")
    failed = [trial for trial in search.trials if trial.state == "failed"]
    notes += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_MOST]]
    return notes
