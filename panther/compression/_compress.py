"""The two functions of the package: compress a model to a budget, or just sketch its layers."""

__all__ = ["compress", "sketch_layers_"]

import math
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from panther.compression.config import HealConfig, SketchConfig
from panther.compression.conversion import Replacement, convert_all, convert_in_sequence, convert_seeded, inherit_flags
from panther.compression.forms.allocation import Allocation, allocated, byte_limit, model_bytes
from panther.compression.forms.fitting import Fits, fit_targets
from panther.compression.forms.options import (
    DEFAULT_FORMS,
    DENSE,
    INT8_LOW_RANK,
    INTERPOLATIVE,
    KNOWN_FORMS,
    LOW_RANK,
    Forms,
    Option,
    total_loss,
)  # fmt: skip
from panther.compression.measurement import Measured, measure
from panther.compression.report import CompressionReport, HealResult, layer_reports
from panther.compression.runner import Loss, Runner, calibrating
from panther.compression.survey import survey_targets
from panther.compression.targets import Selector, Survey, replace_modules, select_targets, swap_modules
from panther.errors import CompressionError, NumericalWarning, PerformanceWarning, check_size
from panther.sketch import check_seed

_METHODS = ("two_sided", "activation", "svd", "random")
_CALIBRATED = ("two_sided", "activation")
# A held-out error above so much, and above so many times the predicted one, is of batches that differ from the others.
_DOUBTFUL, _FAR = 0.05, 10.0
_SLOWER = 0.8  # of the dense layer's speed: below it a layer is warned about, as one near 1 can be noise


def compress(
    model: nn.Module,
    budget: float | None = None,
    calibration: Any = None,
    *,
    bits: float | None = None,
    max_bytes: int | None = None,
    max_error: float | None = None,
    forms: str | Sequence[str] = DEFAULT_FORMS,
    rank_multiple: int = 8,
    group_size: int | None = 128,
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
    r"""Compress a trained model in place: replace dense layers by smaller ones that give nearly the same output.

    Weights of nn.Linear, nn.Conv2d and transformers' Conv1D become fitted :class:`~panther.nn.SKLinear` and
    :class:`~panther.nn.SKConv2d`, or with ``forms`` :class:`~panther.nn.QuantizedLinear` and
    :class:`~panther.nn.InterpolativeLinear`. A few unlabelled batches show
    which directions of each layer's input occur and how the model's output depends on each layer: with A the second
    moment of the inputs (about their mean, where there is a bias) and G that of gradients of random directions of the
    output, W is approximated in the norm :math:`\operatorname{tr}(G \Delta A \Delta^T)`, and bytes go where
    they gain most.

    Args:
        model: A trained model, which is changed in place. If anything fails it stays exactly as it was.
        budget: Bytes of the eligible layers' weights to keep, as a fraction in (0, 1]; layers that stay dense count in
            full, biases do not count. Give this, or ``bits``, ``max_bytes`` or ``max_error``.
        calibration: Batches, in a list or a DataLoader; they are held in memory, a fifth of them for checks. A tensor
            is fed to the model, a tuple or list as its arguments, a dict as its keywords.
        bits: The same as an average of bits for each eligible weight, scales and factors included.
        max_bytes: Bytes that all tensors of the whole model may take when saved.
        max_error: Relative error of the output that the held-out batches may show; the smallest budget is searched.
        forms: What a layer may become; of all, that which gains most per byte is chosen for each. ``"dense"``: it stays
            as it is. ``"low_rank"``: factors in its dtype. ``"interpolative"``: the same matrix as some of its rows or
            columns and the others' coefficients, in fewer numbers. ``"int8_low_rank"``: factors in 8 bits. ``"int8"``,
            ``"int6"``, ``"int5"``, ``"int4"``, ``"int3"``, ``"int2"``: codes of so many bits, rounded with error
            feedback in the norm above. ``"int4+low_rank"`` and so on: codes, and an 8-bit correction of what they
            leave. Convolutions take ``"dense"`` and ``"low_rank"`` only.
        rank_multiple: What ranks are multiples of, even, because aligned products are faster; a weight with room for
            fewer than eight of it has even ranks.
        group_size: Columns of a quantized weight that share a scale; None is a whole row.
        include: Only layers that match: a type (which also admits subclasses), a glob of names, or a function of the
            module and its name; or several.
        exclude: No layers that match.
        method: ``"two_sided"``, in the norm above. ``"activation"``, with G the identity. ``"svd"``, with both.
            ``"random"``: seeded sketches and the unbiased estimator, which destroys a trained model; for comparison.
        allocate: ``"global"`` or ``"uniform"`` forms and ranks; None is global for two_sided and uniform for the
            others. Where global does worse than uniform on the held-out batches, uniform is used, and the report says
            so.
        sequential: Fit every layer to its input in the model whose earlier layers are compressed. Takes two partial
            forwards over the batches for each set of layers with one input.
        forward_fn: ``forward_fn(model, batch)`` returns the output to keep, instead of the call above; if the output
            is a mapping, ``logits`` or ``last_hidden_state`` is kept, of a tuple the first floating tensor.
        loss_fn: ``loss_fn(output, batch)``, a scalar whose gradients make G, instead of random directions.
        mask_fn: ``mask_fn(batch)`` returns which positions count, (N, T) of booleans; the default is
            ``batch["attention_mask"]`` if there is one.
        heal: Distil the original into the compressed model afterwards; see :class:`HealConfig`.
        statistics_memory_bytes: Memory for moments; there are as many passes over the batches as needed. None is half
            of what is free on the model's device, up to a gigabyte (2^30 bytes), shared by the ranks of ``group``.
        group: Ranks that each hold the same model and their own batches; moments and errors are summed over them.
            With ``heal`` it must have all ranks.
        seed: Seed of random directions, sketches and healing; None draws one from torch's default CPU generator.
        measure_speed: Whether to time the layers and the model before and after.
        progress: Whether to show progress on standard error; None shows it on a terminal.

    Returns:
        A report of every layer, with totals, errors and speed; ``print`` shows it.

    Raises:
        CompressionError: If no layer is eligible, the budget is infeasible (the message names the smallest feasible
            one), the batches are too few, all alike or have NaN, or the model does not run on them.
        ValueError: If an option is unknown or out of range, or options exclude each other.
        DistributedError: If ranks that heal together differ, or are not all ranks.

    Warns:
        PerformanceWarning: If layers got slower.
        NumericalWarning: If the output has no gradient, so that ``"two_sided"`` becomes ``"activation"``; if layers
            have more inputs than the batches have positions, or read constants; if the held-out error is far above
            the predicted one.

    Cost: forward and backward over the batches for each pass, and with global forms a forward of one batch for each
    layer; n^2 and m^2 numbers in float64 for an (m, n) weight within a pass, one SVD a weight, and for each of up to
    four widths ``2 m n (m + n)`` flops a weight. Peak memory, besides that of the model's own forward and backward, is
    logged beforehand (logger ``panther.compression``, level INFO) and in the report.

    Example:
        >>> import torch, panther as pr
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> batches = list(torch.randn(512, 64).split(64))
        >>> report = pr.compress(model, budget=0.5, calibration=batches, seed=0, measure_speed=False)
        >>> report.eligible_ratio <= 0.5, type(model[0]).__name__
        (True, 'SKLinear')

        In at most 4.5 bits a weight, each layer in the form that suits it:

        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> forms = ("int8_low_rank", "int5", "int4", "int3", "int4+low_rank")
        >>> report = pr.compress(model, bits=4.5, calibration=batches, forms=forms, seed=0, measure_speed=False)
        >>> max(layer.bits for layer in report.layers) <= 6, type(model[0]).__name__
        (True, 'QuantizedLinear')

    References: Eckart and Young, 1936, doi:10.1007/BF02288367; the weighted form in Y.-C. Hsu et al., "Language model
    compression with weighted low-rank factorization", ICLR 2022, arXiv:2207.00112; Kronecker factors in J. Martens and
    R. Grosse, ICML 2015, arXiv:1503.05671.
    """
    _check_model(model)
    _check_options(budget, bits, max_bytes, max_error, method, allocate, loss_fn, sequential, calibration, heal)
    known = _checked_forms(forms, rank_multiple, group_size, method)
    if statistics_memory_bytes is not None:
        check_size("statistics_memory_bytes", statistics_memory_bytes, least=1)
    if heal is not None:
        from panther.compression import healing  # here, because it loads the Trainer and torch.distributed's engines

        healing.check_ranks(group)
    with torch.inference_mode(False), torch.enable_grad():
        runner = Runner(model, calibration, forward_fn, mask_fn, group, progress, loss_fn)
        seed = runner.agreed(check_seed(seed))
        healed, write_ = None, None
        with calibrating(model, seed):
            linear_only = {INT8_LOW_RANK, INTERPOLATIVE}.intersection(known.names) or known.widths
            smallest = known.smallest_bytes if linear_only else None
            survey = select_targets(model, include, exclude, seeded=method == "random", smallest=smallest).check()
            if method in _CALIBRATED:  # svd and random look at the weights only
                survey = survey_targets(runner, survey, gradients=method == "two_sided").check()
            # Losses of different layers can be compared through the output's gradients alone.
            allocate = (allocate or "global") if survey.gradients else "uniform"
            options = {target: known.options(target) for target in survey.targets}
            limit = byte_limit(model, options, budget=budget, bits=bits, max_bytes=max_bytes)
            fits = Fits(options=options) if method == "random" else fit_targets(
                runner, survey, known, limit, memory=statistics_memory_bytes, keep=sequential, healing=heal is not None,
                seed=seed,
            )  # fmt: skip
            allocation = allocated(runner, survey, fits, allocate, limit, max_error, seed)
            replacement, notes = convert_all(survey, fits, allocation.choice, seed), [*survey.notes, *allocation.notes]
            if sequential:
                refitted = convert_in_sequence(runner, survey, fits, allocation.choice, seed)
                if max_error is not None:
                    (error,) = runner.errors([partial(replace_modules, model, refitted)], "error, sequential")
                if max_error is None or error <= max_error:
                    replacement = refitted
                else:
                    notes.append(
                        f"layers are fitted independently, because fitting them in sequence has an error of {error:.3g}"
                    )
            measured = measure(runner, survey.targets, replacement, speed=measure_speed)
            notes += (doubts := _doubts(fits, allocation, measured))
            if doubts:
                warnings.warn("; ".join(doubts), NumericalWarning, stacklevel=2)
        if heal is not None and replacement:
            healed, write_ = healing.heal(runner, replacement, heal, seed=seed)
            if healed.diverged:
                notes.append(f"healing diverged and ended at step {healed.steps}: use a lower learning_rate")
        elif heal is not None:
            notes.append("nothing was compressed, so there is nothing to heal")
        return _finish(model, survey, fits, allocation, replacement, measured, healed, write_, notes, method, seed)


def sketch_layers_(
    model: nn.Module,
    config: SketchConfig,
    *,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    seed: int | None = None,
) -> CompressionReport:
    """Replace layers by sketched ones of one size, without data, in place.

    For models that will be trained afterwards; :func:`compress` keeps the outputs of a trained one.

    Args:
        model: Any module with nn.Linear, nn.Conv2d or transformers' Conv1D in it.
        config: Size and start of every layer.
        include: Only layers that match, as for :func:`compress`.
        exclude: No layers that match.
        seed: Seed of the sketches, from which each layer's own is derived; None draws one from torch's default CPU
            generator.

    Returns:
        The layers replaced, and those kept dense with the reason: layers that would not shrink are among them.

    Raises:
        CompressionError: If no layer is eligible.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
        >>> report = pr.sketch_layers_(model, pr.SketchConfig(num_terms=1, low_rank=16))
        >>> type(model[0]).__name__, report.skipped[0].name
        ('SKLinear', '2')
    """
    _check_model(model)
    if not isinstance(config, SketchConfig):
        raise TypeError(f"config must be a SketchConfig, not {type(config).__name__}")
    seed = check_seed(seed)
    survey = select_targets(model, include, exclude, rank=config.rank, seeded=config.init != "svd").check()
    replacement: Replacement = {}
    for target, own in survey.seeds(seed).items():
        replacement |= convert_seeded(target, config.num_terms, config.low_rank, config.init, own)
    choice = {target: Option(LOW_RANK, target.bytes(config.rank), config.rank) for target in survey.targets}
    allocation, notes = Allocation(choice, "fixed"), list(survey.notes)
    return _finish(model, survey, Fits(), allocation, replacement, Measured(), None, None, notes, config.init, seed)


def _finish(
    model: nn.Module, survey: Survey, fits: Fits, allocation: Allocation, replacement: Replacement, measured: Measured,
    healed: HealResult | None, write_: Callable[[], None] | None, notes: list[str], method: str, seed: int,
) -> CompressionReport:  # fmt: skip
    """Put the new layers into the model, and return the report."""
    # With nested tensors torch would read `weight` of a sketched layer, which forms the dense matrix.
    encoders = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder)
        and module.use_nested_tensor
        and not replacement.keys().isdisjoint(module.modules())
    }
    notes += [
        f"use_nested_tensor is off in {repr(name) if name else 'the model'}: with it torch reads the dense weight of "
        "sketched layers where padding is masked"
        for name in encoders
    ]
    with replace_modules(model, replacement):
        bytes_after = model_bytes(model)
    report = CompressionReport(
        layers=layer_reports(allocation.choice, replacement, measured),
        skipped=survey.skipped,
        method=method,
        allocate=allocation.allocate,
        notes=tuple(notes),
        bytes_before=model_bytes(model),
        bytes_after=bytes_after,
        predicted_error=total_loss(allocation.choice) ** 0.5 if fits.comparable else None,
        measured_error=measured.error,
        uniform_error=allocation.uniform_error,
        healed=healed,
        measured_speedup=measured.speedup,
        passes=fits.passes,
        extra_bytes=max(fits.extra_bytes, 0 if healed is None else fits.healing_bytes + healed.kept_bytes),
        seed=seed,
    )
    slow = {layer.names[0]: layer.speedup or 0.0 for layer in report.slower}
    if any(speedup < _SLOWER for speedup in slow.values()):
        names = sorted(slow, key=slow.__getitem__)
        warnings.warn(
            f"{len(slow)} of {len(report.layers)} layers are slower than their dense originals ({', '.join(names[:5])}"
            f"{', ...' if len(slow) > 5 else ''}), the slowest at {slow[names[0]]:.2f} of their speed: exclude them, "
            "or see `speedup` in the report",
            PerformanceWarning,
            stacklevel=3,
        )
    # Last, and only assignments: any earlier failure, also a warning turned into an error, leaves the model unchanged.
    if write_ is not None:
        write_()
    inherit_flags(replacement)
    swap_modules(model, replacement)
    for encoder in encoders.values():
        encoder.use_nested_tensor = False
    return report


def _doubts(fits: Fits, allocation: Allocation, measured: Measured) -> list[str]:
    """Return why the calibration batches may not suffice."""
    doubts = list(fits.doubts)
    predicted = total_loss(allocation.choice) ** 0.5 if fits.comparable else None
    error = measured.error
    if predicted is not None and error is not None and error > max(_DOUBTFUL, _FAR * predicted):
        doubts.append(
            f"the error of the output is {error:.2g} on the held-out batches, where {predicted:.2g} was predicted from "
            "the others: give more batches, in random order"
        )
    return doubts


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        instance = f"the class {model.__name__}: pass an instance of it" if isinstance(model, type) else None
        raise TypeError(f"the model must be an nn.Module, not {instance or f'a {type(model).__name__}'}")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise CompressionError(
            f"the model is wrapped in {type(model).__name__}, which holds on to the old parameters: compress "
            "model.module, and wrap it again"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):  # a DTensor, known by its method: torch may be built without them
            raise CompressionError(
                f"{name!r} is a DTensor, on a device mesh: compress the model before it is sharded, or compress "
                "panther.distributed.unshard_module(model)"
            )


def _checked_forms(forms: Any, rank_multiple: int, group_size: int | None, method: str) -> Forms:
    names = (forms,) if isinstance(forms, str) else tuple(forms)
    for name in names:
        if name not in KNOWN_FORMS:
            close = get_close_matches(str(name), KNOWN_FORMS, 1)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"form {name!r} is unknown{guess}: use some of {', '.join(map(repr, KNOWN_FORMS))}")
    if not set(names) - {DENSE}:
        raise ValueError(f"forms={names} has no form but 'dense', which changes nothing: add one, such as 'low_rank'")
    if method == "random" and not {DENSE, LOW_RANK}.issuperset(names):
        raise ValueError("method='random' makes seeded sketches only: leave forms out, or use another method")
    if check_size("rank_multiple", rank_multiple, least=2) % 2:
        raise ValueError(f"rank_multiple={rank_multiple} must be even, because a low-rank layer has two halves")
    if group_size is not None:
        check_size("group_size", group_size, least=1)
    return Forms(tuple(dict.fromkeys(names)), rank_multiple, group_size)


def _check_options(
    budget: Any, bits: Any, max_bytes: Any, max_error: Any, method: str, allocate: str | None, loss_fn: Any,
    sequential: bool, calibration: Any, heal: Any,
) -> None:  # fmt: skip
    for name, value, known in (("method", method, _METHODS), ("allocate", allocate or "global", ("global", "uniform"))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")
    sizes = {"budget": budget, "bits": bits, "max_bytes": max_bytes, "max_error": max_error}
    given = {name: value for name, value in sizes.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"exactly one of budget, bits, max_bytes and max_error must be given, not {' and '.join(given) or 'none'}: "
            "budget=0.5 keeps half of the eligible layers' bytes"
        )
    for name, value in given.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(
                f"{name} must be a number, not {type(value).__name__}: give one, such as budget=0.5 or bits=4.25"
            )
        if not 0 < value < math.inf or (name == "budget" and value > 1):
            rule = "a fraction in (0, 1]" if name == "budget" else "positive and finite"
            raise ValueError(f"{name}={value!r} must be {rule}")
    if calibration is None and (method in _CALIBRATED or max_error is not None or heal is not None):
        asker = f"method={method!r}" if method in _CALIBRATED else "max_error" if max_error is not None else "heal"
        raise ValueError(f"{asker} needs calibration=, a list of batches: or use method='svd' with a budget")
    if method != "two_sided" and (allocate == "global" or loss_fn is not None):
        asker = "allocate='global'" if allocate == "global" else "loss_fn"
        raise ValueError(f"{asker} needs method='two_sided', the only one that uses the output's gradients")
    if sequential and method not in _CALIBRATED:
        raise ValueError(f"sequential=True fits layers to their inputs, which method={method!r} does not: leave it out")
    if heal is not None and not isinstance(heal, HealConfig):
        raise TypeError(f"heal must be a HealConfig, not {type(heal).__name__}")
