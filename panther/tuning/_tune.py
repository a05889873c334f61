"""pr.tune: search for the forms of a model's layers."""

__all__ = ["tune"]

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from panther._random_state import preserved_generators
from panther.compression.calibration.checks import check_adapters, check_model
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import Selector
from panther.compression.config import HealConfig, form_settings
from panther.compression.forms import FormSettings, default_forms
from panther.errors import ConfigError, check_size, require_extra
from panther.train import TrainConfig
from panther.tuning.evaluation import Evaluator
from panther.tuning.finish import finish_search
from panther.tuning.goal import Goal, check_unchanged, make_goal
from panther.tuning.hashing import identity
from panther.tuning.models import call_model_fn, copy_model, copy_or_call_again
from panther.tuning.prepared import Settings, prepare
from panther.tuning.result import TuneResult
from panther.tuning.runners import check_parallel, run_trials
from panther.tuning.scratch import tune_from_scratch
from panther.tuning.search.run import Run
from panther.tuning.search.samplers import check_sampler
from panther.tuning.search.storage import check_agrees
from panther.tuning.search.study import Study
from panther.tuning.spaces.layers import AUTO, Line, parse_lines
from panther.tuning.spaces.settings import used_forms
from panther.tuning.spaces.whole import WholeSpace, as_heal

_FIRST = (3, 8)  # least and largest number of first trials, the choices of pr.compress
_FIRST_SHARE = 1 / 3  # share of first trials between these bounds


def tune(
    model: nn.Module | Callable[..., nn.Module],
    evaluate: Callable[[nn.Module], Any],
    calibration: Any = None,
    *,
    train: Callable[[nn.Module, TrainConfig], Any] | None = None,
    space: Any = "auto",
    objective: str | Callable[[nn.Module], float] = "size",
    constraint: Any = None,
    direction: str | None = None,
    trials: int = 30,
    first: int | None = None,
    timeout_s: float | None = None,
    sampler: Any = "tpe",
    pruner: Any = "median",
    storage: Any = None,
    repeats: int = 1,
    catch: type[Exception] | Sequence[type[Exception]] = (),
    parallel: int | str = 1,
    heal: HealConfig | Mapping[str, Any] | None = None,
    forms: str | Sequence[str] | None = None,
    rank_multiple: int = 8,
    group_size: int | None = 128,
    activations: str | None = None,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    loss_fn: Any = None,
    mask_fn: Callable[[Any], Tensor | None] | None = None,
    statistics_memory_bytes: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """Search for the best forms of a model's layers, by a metric of your choice.

    :func:`panther.compress` preserves a model's output. Here a function returns the metric of a model, and the search
    finds the smallest or fastest model that is good enough. Moments and decompositions are computed once, as in
    ``compress``. A trial truncates them and calls the function. The first trials are the choices of ``compress`` at
    several budgets, and Optuna draws the rest.

    Args:
        model: A trained model. It is only read: trials run on a copy. Or a function that returns it, which is called
            once (and again for each result if the model cannot be copied). With ``train``, a function that returns a
            new model.
        evaluate: ``evaluate(model)`` returns the metric of a model, or yields it for growing parts of the data, so that
            poor trials end early. It must not change weights, modules and hooks, and must return the same number for
            the same model; training modes are restored. torch's, Python's and NumPy's generators are seeded before each
            call.
        calibration: Batches as for :func:`panther.compress`. None fits factors only to the weights, which is less
            accurate.
        train: ``train(model, config)`` trains a new model of a trial in place, by a :class:`panther.train.TrainConfig`.
            The space then has layers that are sketched before training, with settings ``"low_rank"`` and
            ``"num_terms"``; ``"train"``, a dict of the configuration's settings; and ``"model"``, a dict of the
            function's arguments. Batches, forms and healing cannot be combined with it.
        space: ``"auto"`` is a budget and a weight of each group of layers, from which ranks and forms follow by the
            layers' spectra. Otherwise a dict: keys select layers, by a glob of names, a class, a function of the module
            and its name, or a :class:`Group`; values are dicts of settings, each an :class:`Int`, a :class:`Float`, a
            :class:`Choice`, a list, a range, or a value:

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
        sampler: ``"tpe"``, ``"gp"`` (a Gaussian process), ``"random"``, or a sampler of Optuna. With ``"tpe"`` and a
            constraint, two of three trials after the first ones are small steps from the best trial so far, at a
            smaller budget, in spaces that have one.
        pruner: ``"median"``, ``"asha"`` (successive halving), ``"none"``, or a pruner of Optuna.
        storage: A path, to which each trial is written when it ends, a URL of a database, or a storage of Optuna. The
            same call resumes the stored search. Only one search at a time can open a storage. None keeps trials in
            memory.
        repeats: Calls of ``evaluate`` for each model. The metric is the mean. This is for functions that vary.
        catch: Exceptions of your functions, such as ``torch.OutOfMemoryError``, after which the search continues: the
            trial has failed, and the report says why. All other exceptions end the search, and so do exceptions for the
            unchanged model.
        parallel: Trials at a time: a number of processes of this machine, each with a copy of the model; or ``"ray"``,
            for as many as the cluster has cores, which Ray Tune runs. A trial whose process died runs again. With more
            than one process, later trials depend on the order in which trials end.
        heal: How each trial's model is healed before ``evaluate``: a :class:`panther.HealConfig`, or a dict of
            settings and their values, as in ``space``. With ``max_steps`` 0 nothing is healed.
        forms: The forms that layers may have in the space ``"auto"``, as for :func:`panther.compress`.
        rank_multiple: As for :func:`panther.compress`, like all arguments up to ``statistics_memory_bytes``.
        group_size: Columns of a quantized weight that share a scale.
        activations: ``"int8"`` rounds the inputs of quantized linear layers.
        include: Only layers that match.
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
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> x = torch.randn(512, 64)
        >>> labels = net(x).argmax(-1)
        >>> def accuracy(net):
        ...     with torch.no_grad():
        ...         return (net(x[256:]).argmax(-1) == labels[256:]).float().mean()
        >>> result = pr.tune(net, accuracy, list(x[:256].split(32)), constraint=">= 0.9", trials=10, seed=0)
        >>> result.best.metric >= 0.9, result.best.size < result.unchanged.size / 4
        (True, True)

    References: J. Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011 (TPE); T. Akiba et al.,
    "Optuna: a next-generation hyperparameter optimization framework", KDD 2019, arXiv:1907.10902.
    """
    require_extra("optuna", "tune")
    began = time.perf_counter()
    if not (isinstance(model, nn.Module) or callable(model)):
        raise TypeError(f"the model must be an nn.Module, or a function that returns one, not a {type(model).__name__}")
    if not callable(evaluate):
        raise TypeError(f"evaluate must be a function of a model, not a {type(evaluate).__name__}")
    goal = make_goal(objective, constraint, direction)
    check_size("trials", trials, least=1)
    check_size("repeats", repeats, least=1)
    if first is not None:
        check_size("first", first, least=0)
    _check_timeout(timeout_s)
    check_sampler(sampler)
    parallel = check_parallel(parallel)
    run = Run(
        trials, first, timeout_s, began, sampler, pruner, storage, repeats, parallel, seed, progress, _checked(catch)
    )  # fmt: skip
    settings = Settings(
        FormSettings(default_forms()), include, exclude, forward_fn, loss_fn, mask_fn, statistics_memory_bytes
    )
    # The search needs gradients and no inference tensors in any mode of the caller.
    with torch.inference_mode(False), torch.enable_grad():
        if train is None:
            method = "svd" if calibration is None else "two_sided"

            def checked(names: Any) -> FormSettings:
                return form_settings(names, rank_multiple, group_size, method, activations)

            return _compressed(model, evaluate, calibration, space, goal, heal, forms, checked, settings, run)
        compression_arguments = {
            "calibration": calibration, "heal": heal, "forms": forms, "activations": activations, "include": include,
            "exclude": exclude, "forward_fn": forward_fn, "loss_fn": loss_fn, "mask_fn": mask_fn,
            "statistics_memory_bytes": statistics_memory_bytes,
            "rank_multiple": None if rank_multiple == 8 else rank_multiple,
            "group_size": None if group_size == 128 else group_size,
        }  # fmt: skip
        for name, value in compression_arguments.items():
            if value is not None:
                raise ConfigError(
                    f"{name}= cannot be combined with train=, which trains new models instead of compressing one: "
                    f"remove {name}="
                )
        return tune_from_scratch(model, evaluate, train, space, goal, run)


def _compressed(
    model: Any,
    evaluate: Callable[[nn.Module], Any],
    calibration: Any,
    space: Any,
    goal: Goal,
    heal: Any,
    forms: Any,
    checked: Callable[[Any], FormSettings],
    settings: Settings,
    run: Run,
) -> TuneResult:
    """Search over the forms of the layers of a trained model, as :func:`tune` describes."""
    if goal.timed and calibration is None:
        raise ConfigError("latency needs calibration=, a list of batches, because models are timed on one of them")
    healing = as_heal(heal)
    if healing is not None and calibration is None:
        raise ConfigError("heal needs calibration=, a list of batches, on which the original is distilled")
    model_fn = None if isinstance(model, nn.Module) else model
    if model_fn is not None:
        model = call_model_fn(model_fn, {}, "its first call")
    check_model(model)
    check_adapters(model)
    model_copy = copy_model(model, model_fn is not None)
    if model_copy is model:
        # The results need further models. If there are none, the search must not start.
        copy_or_call_again(model, model_fn)
    training = [module.training for module in model.modules()]
    lines = None if isinstance(space, str) and space == "auto" else parse_lines(model, space)
    automatic = search_forms = checked(forms)
    if lines is not None:
        kinds = {line.kind for line in lines}
        if forms is not None and AUTO not in kinds:
            raise ConfigError("forms= is for the space 'auto', and this space has its forms: remove forms=")
        line_forms = [form for line in lines if line.kind == "layers" for form in used_forms(line.specs)]
        names = list(dict.fromkeys([*(automatic.names if AUTO in kinds else ()), *line_forms]))
        search_forms = checked(names or None)
        settings = replace(settings, include=_within(lines, settings.include))
    settings = replace(settings, forms=search_forms)
    words = identity(model, calibration, goal, lines, settings, run.repeats, healing)
    with run.opened(goal, words) as opened, preserved_generators():  # Making layers draws random numbers.
        seed = run.seed_of(opened)
        runner = Runner(
            model_copy.eval(), calibration, settings.forward_fn, settings.mask_fn, None, run.progress, settings.loss_fn
        )  # fmt: skip
        evaluator = Evaluator(runner, seed, evaluate, goal, run.repeats, run.catch)
        unchanged, evaluate_s = evaluator.measure_unchanged()
        check_unchanged(goal, unchanged)
        check_agrees(opened, goal, unchanged, seed)
        of_layers = lines is None or any(line.kind != "attention" for line in lines)
        prepared = prepare(
            runner, settings, timed=goal.budgets_are_times, training=training, seed=seed, layers=of_layers,
            model_fn=model_fn,
        )  # fmt: skip
        layers = WholeSpace(prepared, lines, automatic.names, healing)
        least, most = _FIRST
        first = min(most, max(least, round(_FIRST_SHARE * run.trials))) if run.first is None else run.first
        search = Study(opened.study, layers, goal, unchanged, run.sampler, seed, first)
        why = run_trials(search, evaluator, prepared, run.trials, run.deadline, run.parallel)
        notes = (*opened.notes, *layers.notes)
        return finish_search(search, evaluator, prepared, evaluate_s, run, why, seed, notes)


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s} must be positive and finite: use None for no bound")


def _checked(catch: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of ``catch`` as a tuple."""
    kinds = (catch,) if isinstance(catch, type) else catch
    kinds = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else (kinds,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"catch must be exception classes, such as torch.OutOfMemoryError, and has {kind!r}")
    return kinds


def _within(lines: Sequence[Line], include: Any) -> Selector:
    """Return a selector of the layers that a space names, or raise ConfigError if the user also passed ``include``."""
    if include is not None:
        raise ConfigError("include= is for space='auto', and this space names its layers: remove include=")
    names = {name for line in lines if line.kind != "attention" for name in line.names}
    return lambda module, name: name in names
