"""The two functions of the package: compress a model to a budget, or just sketch its layers."""

__all__ = ["compress", "sketch_layers_"]

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.compression.config import HealConfig, SketchConfig
from panther.compression.conversion import Replacement, convert_all, convert_in_sequence, convert_seeded
from panther.compression.forms.allocation import Allocation, allocated, allocated_fast, byte_limit
from panther.compression.forms.arguments import CALIBRATED, check_adapters, check_model, check_options, checked_forms
from panther.compression.forms.fitting import Fits, fit_targets
from panther.compression.forms.latency import check_wish, choose_in_time
from panther.compression.forms.options import INT8_LOW_RANK, INTERPOLATIVE, LOW_RANK, Option, total_loss
from panther.compression.forms.ridge import DOUBTFUL, fitted_with_care
from panther.compression.forms.timing import timed_layers
from panther.compression.install import install_layers
from panther.compression.measurement import Measured, measure
from panther.compression.report import CompressionReport
from panther.compression.runner import Loss, Runner
from panther.compression.survey import survey_targets
from panther.compression.targets import Selector, replace_modules, select_targets
from panther.errors import NumericalWarning, check_size
from panther.sketch import check_seed

# Times the predicted error from which on the batches are doubted.
_FAR = 10.0
# Relative difference of two outputs of one model up to which they are called the same: GPUs sum in varying order.
_SAME = 1e-5


def compress(
    model: nn.Module,
    budget: float | None = None,
    calibration: Any = None,
    *,
    bits: float | None = None,
    max_bytes: int | None = None,
    max_error: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    forms: str | Sequence[str] | None = None,
    allow_slower: bool | None = None,
    rank_multiple: int = 8,
    group_size: int | None = 128,
    activations: str | None = None,
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
    :class:`~panther.nn.SKConv2d`, or with ``forms`` :class:`~panther.nn.QuantizedLinear`,
    :class:`~panther.nn.QuantizedConv2d` and :class:`~panther.nn.InterpolativeLinear`. A few unlabelled batches show
    which directions of each layer's input occur and how the model's output depends on each layer: with A the second
    moment of the inputs (about their mean, where there is a bias) and G that of gradients of random directions of the
    output, W is approximated in the norm :math:`\operatorname{tr}(G \Delta A \Delta^T)`, and bytes go where
    they gain most.

    Args:
        model: A trained model, which is changed in place. If anything fails it stays exactly as it was.
        budget: Bytes of the eligible layers' weights to keep, as a fraction in (0, 1]; layers that stay dense count in
            full, biases do not count. Give this, or one of the next five.
        calibration: Batches, in a list or a DataLoader; they are held in memory, a fifth of them for checks. A tensor
            is fed to the model, a tuple or list as its arguments, a dict as its keywords. Each forward gets a copy,
            which it may change, and starts from the same random numbers, buffers and attributes.
        bits: The same as an average of bits for each eligible weight, scales and factors included.
        max_bytes: Bytes that all tensors of the whole model may take when saved.
        max_error: Relative error of the output that the held-out batches may show; the smallest budget is searched.
        speedup: Required speed-up of the whole model on the first held-out batch. Each form of each layer is timed on
            the layer's input in this batch; the forms with the smallest loss are chosen, whatever their bytes.
        max_latency_ms: The same as milliseconds of that batch, with torch's present number of threads.
        forms: Forms that a layer may take. Each layer gets the form with the largest gain per byte or per second.
            ``"dense"``: it stays as it is. ``"low_rank"``: factors in its dtype. ``"interpolative"``: the same matrix
            as some of its rows or columns and the others' coefficients, in fewer numbers. ``"int8_low_rank"``: factors
            in 8 bits. ``"int8"``, ``"int6"``, ``"int5"``, ``"int4"``, ``"int3"``, ``"int2"``: codes of so many bits,
            rounded with error feedback in the norm above. ``"int4+low_rank"`` and so on: codes, and an 8-bit correction
            of their error. Convolutions are never interpolative, and those in groups take ``"dense"``,
            ``"low_rank"`` and plain widths only. None is these three kinds and ``"interpolative"``.
        allow_slower: Whether layers may take forms that were measured below 0.8 of the dense layer's speed. None: those
            that ``forms`` names; without ``forms``, all of them where the size cannot be reached without them, or where
            they halve the held-out error, or the bytes for ``max_error``, which is a note in the report. False: never.
            Without batches or ``measure_speed`` nothing is timed, and None is True.
        rank_multiple: Ranks are multiples of this even number, because aligned products are faster; a weight with room
            for fewer than eight such ranks has even ranks.
        group_size: Columns of a quantized weight that share a scale; None is a whole row.
        activations: ``"int8"``: quantized linear layers round their inputs to 8 bits and multiply integers, which is
            faster from tens of rows on and adds about 1 % of error to each layer's output, which the measured errors
            and times include and the predicted ones do not; see :class:`~panther.nn.QuantizedLinear`.
        include: Only layers that match: a type (which also admits subclasses), a glob of names, or a function of the
            module and its name; or several.
        exclude: No layers that match.
        method: ``"two_sided"``, in the norm above. ``"activation"``, with G the identity. ``"svd"``, with both.
            ``"random"``: seeded sketches and the unbiased estimator, which destroys a trained model; for comparison.
        allocate: ``"global"`` or ``"uniform"`` forms and ranks; None is global for two_sided and uniform for the
            others. Where global does worse than uniform on the held-out batches, uniform is used, and the report says
            so.
        sequential: Fit every layer to its input in the model whose earlier layers are compressed, and to the mean of
            its own output there and of the original's. Keeps more, with two partial forwards over the batches for each
            set of layers with one input: 2.5 times the time for a transformer of four blocks.
        forward_fn: ``forward_fn(model, batch)`` returns the output to keep, instead of the call above. Of a mapping
            ``logits``, ``sentence_embedding`` or ``last_hidden_state`` is kept, else the first floating tensor that is
            not a single number, such as a loss; the report's ``output`` names it.
        loss_fn: ``loss_fn(output, batch)``, a scalar whose gradients make G, instead of random directions.
        mask_fn: ``mask_fn(batch)`` returns which positions count, (N, T) of booleans; the default is
            ``batch["attention_mask"]`` and, for the positions of a decoder, ``batch["decoder_attention_mask"]``, where
            a batch has them. One or two forwards of a shorter batch show which layers have which positions.
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
        CompressionError: If no layer is eligible, the size or speed is infeasible (the message names the best feasible
            one), the batches are too few, all alike or have NaN, or the model does not run on them.
        ValueError: If an option is unknown or out of range, or options exclude each other.
        DistributedError: If ranks that heal together differ, or are not all ranks.

    Warns:
        PerformanceWarning: If layers got slower, and that was not allowed by name.
        NumericalWarning: If the output has no gradient, so that ``"two_sided"`` becomes ``"activation"``; if layers
            have more inputs than the batches have positions, or read constants; if the held-out error is far above
            the predicted one.

    Cost: forward and backward over the batches for each pass, and with global forms a forward of one batch for each
    layer; for times a fraction of a second for each form of each shape of layer; n^2 and m^2 numbers in float64 for an
    (m, n) weight within a pass, one SVD a weight, and for each of up to four widths ``2 m n (m + n)`` flops a weight.
    Fitting is done twice, with a larger ridge, where the error on the held-out batches is over three times that of the
    fits.
    Peak memory, with that of the model's own forward and backward, which are run once for it on the largest batch, is
    logged beforehand (logger ``panther.compression``, level INFO) and in the report, by phases.

    Example:
        >>> import torch, panther as pr
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> batches = list(torch.randn(512, 64).split(64))
        >>> options = {"calibration": batches, "seed": 0, "measure_speed": False}
        >>> report = pr.compress(model, budget=0.5, forms="low_rank", **options)
        >>> report.eligible_ratio <= 0.5, type(model[0]).__name__
        (True, 'SKLinear')

        In at most 4.5 bits a weight, each layer in the form that suits it:

        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> report = pr.compress(model, bits=4.5, **options)
        >>> [layer.form for layer in report.layers], type(model[0]).__name__
        (['int4', 'int4'], 'QuantizedLinear')

    References: Eckart and Young, 1936, doi:10.1007/BF02288367; the weighted form in Y.-C. Hsu et al., "Language model
    compression with weighted low-rank factorization", ICLR 2022, arXiv:2207.00112; Kronecker factors in J. Martens and
    R. Grosse, ICML 2015, arXiv:1503.05671.
    """
    check_model(model)
    check_adapters(model)
    size: dict[str, Any] = {"budget": budget, "bits": bits, "max_bytes": max_bytes}
    sizes = {**size, "max_error": max_error, "speedup": speedup, "max_latency_ms": max_latency_ms}
    check_options(sizes, method, allocate, loss_fn, sequential, calibration, heal, measure_speed, allow_slower)
    known = checked_forms(forms, rank_multiple, group_size, method, activations)
    in_time = speedup is not None or max_latency_ms is not None
    wary = allow_slower is None and forms is None
    if statistics_memory_bytes is not None:
        check_size("statistics_memory_bytes", statistics_memory_bytes, least=1)
    if heal is not None:
        from panther.compression import healing  # here, because it loads the Trainer and torch.distributed's engines

        healing.check_ranks(group)
    # torch.set_default_device is for the model's forward. Panther's own small tensors are on the CPU.
    default_device = torch.get_default_device()
    forward_device = None if default_device.type == "cpu" else default_device
    on_cpu = nullcontext() if forward_device is None else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), on_cpu:
        runner = Runner(
            model, calibration, forward_fn, mask_fn, group, progress, loss_fn, forward_device=forward_device
        )
        seed = runner.agreed(check_seed(seed))
        healed, write_ = None, None
        with runner.calibrating(seed):
            linear_only = {INT8_LOW_RANK, INTERPOLATIVE}.intersection(known.names) or known.widths
            smallest = known.smallest_bytes if linear_only else None
            survey = select_targets(model, include, exclude, seeded=method == "random", smallest=smallest).check()
            if method in CALIBRATED:  # svd and random look at the weights only
                survey = survey_targets(runner, survey, gradients=method == "two_sided").check()
            # Losses of different layers can be compared through the output's gradients alone.
            allocate = (allocate or "global") if survey.gradients else "uniform"
            for target in survey.targets:
                known.options(target)  # raises before anything is timed, if the weight can take none of the forms
            wish = None
            if in_time or allow_slower is False or (wary and measure_speed and runner.held_out):
                known = replace(
                    known, times=timed_layers(runner, survey.targets, known), slower=allow_slower is not False
                )
            if in_time:
                known = replace(known, by_time=True)
                wish = check_wish(runner, survey, known, speedup, max_latency_ms)
            options = {target: known.options(target) for target in survey.targets}
            limit = byte_limit(model, options, slower=known.slower, **size)

            def allocation_of(fits: Fits) -> Allocation:
                if wish is not None:
                    return choose_in_time(runner, survey, fits, known, allocate, wish, seed)
                if wary and known.times:
                    return allocated_fast(runner, survey, fits, known, allocate, limit, max_error, seed)
                return allocated(runner, survey, fits, allocate, limit, max_error, seed)

            def fitted(ridge: float) -> Fits:
                return fit_targets(
                    runner, survey, known, limit, memory=statistics_memory_bytes, keep=sequential,
                    heal=heal, seed=seed, ridge=ridge,
                )  # fmt: skip

            if method == "random":
                fits = Fits(options=options)
                allocation = allocation_of(fits)
            else:
                fits, allocation = fitted_with_care(fitted, allocation_of)
            replacement = convert_all(survey, fits, allocation.choice, seed)
            notes = [*survey.notes, *allocation.notes]
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
            if wish is not None and measured.speedup is not None and measured.speedup < wish.speedup:
                notes.append(
                    f"{wish.setting} was met when forms were chosen, and missed when the model was timed again"
                )
            notes += _habits(runner)
            notes += (doubts := _doubts(fits, allocation, measured))
            if doubts:
                warnings.warn("; ".join(doubts), NumericalWarning, stacklevel=2)
        fits = replace(fits, fits={}, quantized={}, moments={})  # the memory is for healing
        if heal is not None and replacement:
            healed, write_ = healing.heal(runner, replacement, heal, seed=seed)
            if healed.diverged:
                notes.append(f"healing diverged and ended at step {healed.steps}: use a lower learning_rate")
        elif heal is not None:
            notes.append("nothing was compressed, so there is nothing to heal")
        return install_layers(
            model,
            survey,
            fits,
            allocation,
            replacement,
            measured,
            healed,
            write_,
            notes,
            method,
            seed,
            allow_slower,
            output=runner.output_name,
        )


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
        CompressionError: If no layer is eligible, or layers have adapters of PEFT.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
        >>> report = pr.sketch_layers_(model, pr.SketchConfig(num_terms=1, low_rank=16))
        >>> type(model[0]).__name__, report.skipped[0].name
        ('SKLinear', '2')
    """
    check_model(model)
    check_adapters(model)
    if not isinstance(config, SketchConfig):
        raise TypeError(f"config must be a SketchConfig, not {type(config).__name__}")
    seed = check_seed(seed)
    survey = select_targets(model, include, exclude, rank=config.rank, seeded=config.init != "svd").check()
    replacement: Replacement = {}
    for target, own in survey.seeds(seed).items():
        replacement |= convert_seeded(target, config.num_terms, config.low_rank, config.init, own)
    choice = {target: Option(LOW_RANK, target.bytes(config.rank), config.rank) for target in survey.targets}
    allocation, notes = Allocation(choice, "fixed"), list(survey.notes)
    return install_layers(
        model, survey, Fits(), allocation, replacement, Measured(), None, None, notes, config.init, seed
    )


def _habits(runner: Runner) -> list[str]:
    """Return what the user should know of the original: that it differs from itself, or writes its parameters."""
    notes = []
    if runner.difference is not None and runner.difference > _SAME:
        notes.append(
            f"two outputs of the original model for one batch differ by {runner.difference:.2g}, with the same random "
            "numbers of torch, NumPy and Python: the measured errors contain this difference"
        )
    if written := runner.written_parameters():
        notes.append(
            f"forwards of the model write its parameters in place ({', '.join(written[:3])}), as Panther does not: the "
            "values are those after the calibration"
        )
    return notes


def _doubts(fits: Fits, allocation: Allocation, measured: Measured) -> list[str]:
    """Return why the calibration batches may not suffice."""
    doubts = list(fits.doubts)
    predicted = total_loss(allocation.choice) ** 0.5 if fits.comparable else None
    error = measured.error
    if predicted is not None and error is not None and error > max(DOUBTFUL, _FAR * predicted):
        doubts.append(
            f"the error of the output is {error:.2g} on the held-out batches, where {predicted:.2g} was predicted from "
            "the others: give more batches, in random order"
        )
    return doubts
