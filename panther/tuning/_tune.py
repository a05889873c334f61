"""pr.tune: search for the forms of a model's layers."""

__all__ = ["tune"]

import time
from collections.abc import Callable

import torch
from torch import nn

from panther._settings import takes_settings
from panther.tuning.config import TuneConfig
from panther.tuning.result import TuneResult
from panther.tuning.search import Task, run_search


@takes_settings(TuneConfig)
def tune(model: nn.Module | Callable[..., nn.Module], config: TuneConfig) -> TuneResult:  # noqa: D417 (as compress)
    """Search for the best forms of a model's layers, by a metric of your choice.

    :func:`panther.compress` preserves a model's output. Here a function returns the metric of a model, and the search
    finds the smallest or fastest model that is good enough. Moments and decompositions are computed once, as in
    ``compress``. A trial truncates them and calls the function. The first trials are the choices of ``compress`` at
    several budgets, and Optuna draws the rest.

    Args:
        model: A trained model. It is only read: trials run on a copy. Or a function that returns it, which is called
            once (and again for each result if the model cannot be copied).
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
            for as many as the cluster of Ray has cores. A trial whose process died runs again. With more
            than one process, later trials depend on the order in which trials end.
        heal: How each trial's model is healed before ``evaluate``: a :class:`~panther.compression.HealConfig`, or a
            dict of settings and their values, as in ``space``. With ``max_steps`` 0 nothing is healed.
        forms: The forms that layers may have in the space ``"auto"``, as for :func:`panther.compress`.
        rank_multiple: As for :func:`panther.compress`, like all arguments up to ``statistics_memory_bytes``.
        group_size: Columns of a quantized weight that share a scale.
        activations: ``"int8"`` rounds the inputs of quantized linear layers.
        symmetric: Whether the middle code of every group stands for zero.
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
        return run_search(Task(model, config), config, began)
