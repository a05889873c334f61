"""The two functions of the package: compress a model to a budget, or just sketch its layers."""

__all__ = ["compress", "sketch_layers_"]

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from panther.compression._job import Job
from panther.compression.calibration import Loss
from panther.compression.config import SketchConfig
from panther.compression.conversion import convert_plainly
from panther.compression.healing import HealConfig
from panther.compression.planning import Selector, make_plan
from panther.compression.report import CompressionReport
from panther.compression.running import Runner, buffers_kept, calibrating
from panther.errors import CompressionError, PerformanceWarning, check_size
from panther.sketch import check_seed

_METHODS = ("two_sided", "activation", "svd", "random")
_CALIBRATED = ("two_sided", "activation")
_ALLOCATIONS = ("global", "uniform")
_SLOWER = 0.8  # of the dense layer's speed, below which a layer is warned of


def compress(
    model: nn.Module,
    budget: float | None = None,
    calibration: Any = None,
    *,
    max_bytes: int | None = None,
    max_error: float | None = None,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    method: str = "two_sided",
    allocate: str | None = None,
    sequential: bool = False,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    loss_fn: Loss | None = None,
    mask_fn: Callable[[Any], Tensor | None] | None = None,
    heal: HealConfig | None = None,
    statistics_memory_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int | None = None,
    measure_speed: bool = True,
    progress: bool | None = None,
) -> CompressionReport:
    r"""Replace a trained model's dense layers by low-rank ones that keep what it does, in place.

    Weights of nn.Linear, nn.Conv2d and transformers' Conv1D become fitted :class:`~panther.nn.SKLinear` and
    :class:`~panther.nn.SKConv2d`. A few unlabelled batches say which directions of each layer's input occur and how
    the model's output depends on each layer: with A the second moment of the inputs (about their mean, where there is
    a bias) and G that of gradients of random directions of the output, W is approximated in the norm
    :math:`\operatorname{tr}(G \Delta A \Delta^T)`, and ranks go where they gain most per byte.

    Args:
        model: A trained model. If anything fails it is left exactly as it was.
        budget: Bytes of the eligible layers' weights to keep, as a fraction in (0, 1]; layers that stay dense count in
            full, biases do not count. Give this, or ``max_bytes``, or ``max_error``.
        calibration: Batches, in a list or a DataLoader; they are held in memory, a fifth of them for checks. A tensor
            is fed to the model, a tuple or list as its arguments, a dict as its keywords.
        max_bytes: Bytes that all tensors of the whole model may take when saved.
        max_error: Relative error of the output that the held-out batches may show; the smallest budget is searched.
        include: Only layers that match: a type (which also admits subclasses), a glob of names, or a function of the
            module and its name; or several.
        exclude: No layers that match.
        method: ``"two_sided"``, in the norm above. ``"activation"``, with G the identity. ``"svd"``, with both.
            ``"random"``: seeded sketches and the unbiased estimator, which destroys a trained model; for comparison.
        allocate: ``"global"`` or ``"uniform"`` ranks; None is global for two_sided and uniform for the others. Where
            global does worse than uniform on the held-out batches, uniform is used, and the report says so.
        sequential: Fit every layer to what it reads once those before it are compressed. Takes two partial forwards
            over the batches for each set of layers with one input.
        forward_fn: ``forward_fn(model, batch)`` returns the output to keep, in the place of the call above; if the
            output is a mapping, ``logits`` or ``last_hidden_state`` is kept, of a tuple the first floating tensor.
        loss_fn: ``loss_fn(output, batch)``, a scalar whose gradients make G, instead of random directions.
        mask_fn: ``mask_fn(batch)``, which positions count, (N, T) of booleans; ``batch["attention_mask"]`` if there is
            one.
        heal: Distil the original into the compressed model afterwards; see :class:`HealConfig`.
        statistics_memory_bytes: Memory for moments; the batches are passed through as often as it takes. None is what
            the three largest layers need.
        group: Ranks that each hold the same model and batches of their own; moments and errors are summed over them.
        seed: Of random directions, sketches and healing; None draws one from torch's default CPU generator.
        measure_speed: Whether to time the layers and the model before and after.
        progress: Whether to show progress on standard error; None shows it on a terminal.

    Returns:
        What happened to every layer, with totals, errors and speed; ``print`` shows it.

    Raises:
        CompressionError: If no layer is eligible, the budget is infeasible (the message names the smallest feasible
            one), the batches are too few or have NaN, or the model does not run on them.
        ValueError: If an option is unknown or out of range, or options exclude each other.

    Warns:
        PerformanceWarning: If layers got slower.
        NumericalWarning: If the output has no gradient, so that ``"two_sided"`` becomes ``"activation"``.

    Cost: forward and backward over the batches for each pass, n^2 and m^2 numbers in float64 for an (m, n) weight
    within a pass, and one SVD a weight. Peak memory, besides what the model's own forward and backward take, is stated
    beforehand (``progress``) and in the report.

    Example:
        >>> import torch, panther as pr
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> batches = list(torch.randn(512, 64).split(64))
        >>> report = pr.compress(model, budget=0.5, calibration=batches, seed=0, measure_speed=False)
        >>> report.eligible_ratio <= 0.5, type(model[0]).__name__
        (True, 'SKLinear')

    References: Eckart and Young, 1936, doi:10.1007/BF02288367; the weighted form in Y.-C. Hsu et al., "Language model
    compression with weighted low-rank factorization", ICLR 2022, arXiv:2207.00112; Kronecker factors in J. Martens and
    R. Grosse, ICML 2015, arXiv:1503.05671.
    """
    _check_options(budget, max_bytes, max_error, method, allocate, loss_fn, sequential, calibration, heal)
    if statistics_memory_bytes is not None:
        check_size("statistics_memory_bytes", statistics_memory_bytes, least=1)
    _check_model(model)
    with torch.inference_mode(False), torch.enable_grad(), buffers_kept(model):
        plan = make_plan(model, include, exclude, seeded=method == "random")
        allocate = allocate or ("global" if method == "two_sided" else "uniform")
        seed = check_seed(seed)
        runner = None if calibration is None else Runner(model, calibration, forward_fn, mask_fn, group, progress)
        if runner is not None:
            seed = runner.agreed(seed)
        job = Job(model, plan, runner, seed, method, allocate)
        with nullcontext() if runner is None else calibrating(model, seed, runner.device):
            if runner is not None and method in _CALIBRATED:
                job.survey(loss_fn)
            job.check_targets()
            limit = None if max_error is not None else job.limit(budget, max_bytes)
            job.fit(limit, loss_fn, statistics_memory_bytes, keep=sequential, healing=heal is not None)
            if limit is None:
                limit = job.least_limit(max_error)  # type: ignore[arg-type]
            ranks = job.choose(limit)
            replacement = job.refit(ranks, max_error) if sequential else job.replacement(ranks)
            job.measure(replacement, measure_speed)
        try:
            job.place(replacement)
            if heal is not None:
                job.heal(replacement, heal)
            result = job.report(ranks, replacement)
            _warn_of_slower(result)
        except BaseException:
            job.undo(replacement)
            raise
    return result


def sketch_layers_(
    model: nn.Module, config: SketchConfig, filter_fn: Callable[[nn.Module, str], bool] | None = None, *,
    seed: int | None = None,
) -> CompressionReport:  # fmt: skip
    """Replace layers by sketched ones of one size, without data, in place.

    For models that will be trained afterwards; :func:`compress` keeps what a trained model knows.

    Args:
        model: Any module with nn.Linear, nn.Conv2d or transformers' Conv1D in it.
        config: Size and start of every layer.
        filter_fn: ``filter_fn(module, name)``, whether to replace a layer; all are if None.
        seed: Of the sketches, each layer's own derived from it; None draws one from torch's default CPU generator.

    Returns:
        The layers replaced, and those left with the reason: layers that would not shrink are left.

    Raises:
        CompressionError: If no layer is eligible.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
        >>> report = pr.sketch_layers_(model, pr.SketchConfig(num_terms=1, low_rank=16))
        >>> type(model[0]).__name__, report.left[0].name
        ('SKLinear', '2')
    """
    _check_model(model)
    if not isinstance(config, SketchConfig):
        raise TypeError(f"config must be a SketchConfig, not {type(config).__name__}")
    seeded = config.init != "svd"
    plan = make_plan(model, filter_fn, rank=config.rank, seeded=seeded)
    job = Job(model, plan, None, check_seed(seed), f"sketch, {config.init}", "as given")
    job.check_targets()
    replacement: dict[nn.Module, nn.Module] = {}
    ranks: dict = {}
    for index, target in enumerate(plan.targets):
        low_rank = config.low_rank * target.groups if isinstance(target.modules[0], nn.Conv2d) else config.low_rank
        replacement |= convert_plainly(target, config.num_terms, low_rank, config.init, job.seed_of(index))
        ranks[target] = config.rank
    job.place(replacement)
    return job.report(ranks, replacement)


def _warn_of_slower(report: CompressionReport) -> None:
    slow = [layer.names[0] for layer in report.layers if layer.speedup is not None and layer.speedup < _SLOWER]
    if slow:
        warnings.warn(
            f"{len(slow)} of {len(report.layers)} layers are slower than their dense originals ({', '.join(slow[:5])}"
            f"{', ...' if len(slow) > 5 else ''}): exclude them, or see `speedup` in the report",
            PerformanceWarning,
            stacklevel=3,
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, not a {type(model).__name__}")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise CompressionError(
            f"the model is wrapped in {type(model).__name__}, which holds on to the old parameters: compress "
            "model.module, and wrap it again"
        )


def _check_options(
    budget: Any, max_bytes: Any, max_error: Any, method: str, allocate: str | None, loss_fn: Any, sequential: bool,
    calibration: Any, heal: Any,
) -> None:  # fmt: skip
    for name, value, known in (("method", method, _METHODS), ("allocate", allocate or "global", _ALLOCATIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")
    given = {name: value for name, value in (("budget", budget), ("max_bytes", max_bytes), ("max_error", max_error))
             if value is not None}  # fmt: skip
    if len(given) != 1:
        raise ValueError(
            f"exactly one of budget, max_bytes and max_error must be given, not {' and '.join(given) or 'none'}: "
            "budget=0.5 keeps half of the eligible layers' bytes"
        )
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf or (name == "budget" and value > 1):
            rule = "a fraction in (0, 1]" if name == "budget" else "positive and finite"
            raise ValueError(f"{name}={value!r} must be {rule}")
    if calibration is None and (method in _CALIBRATED or max_error is not None or heal is not None):
        asker = f"method={method!r}" if method in _CALIBRATED else "max_error" if max_error is not None else "heal"
        raise ValueError(f"{asker} needs calibration=, a list of batches: or use method='svd' with a budget")
    if method != "two_sided" and (allocate == "global" or loss_fn is not None):
        asker = "allocate='global'" if allocate == "global" else "loss_fn"
        raise ValueError(f"{asker} needs method='two_sided', which alone knows what layers do to the output")
    if sequential and method not in _CALIBRATED:
        raise ValueError(f"sequential=True fits layers to their inputs, which method={method!r} does not: leave it out")
    if heal is not None and not isinstance(heal, HealConfig):
        raise TypeError(f"heal must be a HealConfig, not {type(heal).__name__}")
    if heal is not None and heal.checkpoint is not None and not Path(heal.checkpoint).parent.is_dir():
        raise ValueError(f"checkpoint={str(heal.checkpoint)!r} must be a file in a folder that exists: make the folder")
