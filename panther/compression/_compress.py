"""Compress a trained model to a budget, or sketch the layers of a model that will be trained."""

__all__ = ["Outcome", "compress", "compress_with", "install_layers", "plain_tensors", "sketch_layers_"]

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import nn

from panther._hints import explain_keywords, takes_settings
from panther._model_libraries import layers_replaced
from panther.compression.calibration.model_state import deferred_interrupts, without_compiled_blocks
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import check_adapters, check_model, select_targets
from panther.compression.calibration.targets import Selector, Survey, replace_modules, swap_modules
from panther.compression.config import CompressConfig, HealConfig, SketchConfig
from panther.compression.forms import LOW_RANK, Fits, Option, Replacement, inherit_flags, total_loss
from panther.compression.forms.low_rank import convert_seeded
from panther.compression.forms.monarch import convert_to_monarch, monarch_option, monarch_refusal
from panther.compression.preparation import make_runner, prepare
from panther.compression.report import CompressionReport, HealResult, layer_reports
from panther.compression.selection.allocation import SUSPICIOUS_ERROR, Allocation, model_bytes
from panther.compression.selection.speed_target import SpeedTarget
from panther.compression.selection.timing import SLOWER
from panther.compression.selection.trials import Measured, measure
from panther.errors import NumericalWarning, PerformanceWarning
from panther.sketch import check_seed


@dataclass(frozen=True)
class Outcome:
    """What is put into a model, and what the report says about it.

    ``replacement`` has the new layer of each old one. ``write_`` writes the healed parameters of the remaining layers.
    With ``allow_slower``, there is no warning of layers that are slower than the dense ones.
    """

    survey: Survey
    allocation: Allocation
    replacement: Replacement
    method: str
    seed: int
    fits: Fits = field(default_factory=Fits)
    measured: Measured = field(default_factory=Measured)
    healed: HealResult | None = None
    write_: Callable[[], None] | None = None
    notes: Sequence[str] = ()
    allow_slower: bool | None = None
    output: str = ""

    def without_fits(self) -> Self:
        """Return the same without the tensors of the fits."""
        return replace(self, fits=replace(self.fits, fits={}))

    @property
    def predicted_error(self) -> float | None:
        """Return the relative error of the output that the losses predict; None if they are in a different unit."""
        return total_loss(self.allocation.choice) ** 0.5 if self.fits.comparable else None


def install_layers(model: nn.Module, outcome: Outcome) -> CompressionReport:
    """Put the new layers into the model, and return the report."""
    survey, allocation, replacement = outcome.survey, outcome.allocation, outcome.replacement
    fits, measured = outcome.fits, outcome.measured
    with replace_modules(model, replacement):
        bytes_after = model_bytes(model)
    report = CompressionReport(
        layers=layer_reports(allocation.choice, replacement, measured),
        skipped=survey.skipped,
        method=outcome.method,
        allocate=allocation.allocate,
        notes=(*survey.notes, *allocation.notes, *outcome.notes, *_nested_tensor_notes(model, replacement)),
        bytes_before=model_bytes(model),
        bytes_after=bytes_after,
        bytes_in_bfloat16=model_bytes(model, torch.bfloat16),
        predicted_error=outcome.predicted_error,
        measured_error=measured.error,
        uniform_error=allocation.uniform_error,
        healed=outcome.healed,
        measured_speedup=measured.speedup,
        measured_latency_s=measured.latency_s,
        passes=fits.passes,
        seed=outcome.seed,
        output=outcome.output,
    )
    # Lookups of embeddings are a small part of a model's time.
    lookups = {target.name for target in allocation.choice if not target.is_multiplied}
    slow = {layer.names[0]: layer.speedup or 0.0 for layer in report.slower if layer.names[0] not in lookups}
    if not outcome.allow_slower and any(speedup < SLOWER for speedup in slow.values()):
        names = sorted(slow, key=slow.__getitem__)
        warnings.warn(
            f"{len(slow)} of {len(report.layers)} layers are slower than their dense originals ({', '.join(names[:5])}"
            f"{', ...' if len(slow) > 5 else ''}), the slowest at {slow[names[0]]:.2f} of their speed: "
            "allow_slower=False keeps such layers dense, and allow_slower=True accepts them",
            PerformanceWarning,
            stacklevel=5,  # the caller of pr.compress, behind install_layers, compress_with, compress and its decorator
        )
    # The model is changed last, and only by assignments, so that any earlier failure (including a warning turned into
    # an error) leaves it unchanged.
    with deferred_interrupts():
        if outcome.write_ is not None:
            outcome.write_()
        inherit_flags(replacement)
        swap_modules(model, replacement)
        layers_replaced(model)
    return report


def _nested_tensor_notes(model: nn.Module, replacement: Mapping[nn.Module, nn.Module]) -> list[str]:
    """Return a note for each nn.TransformerEncoder whose first layer torch reads instead of calling it."""
    return [
        f"torch reads the dense weights of {name + '.' if name else ''}layers.0 if padding is masked, and computes "
        f"them again for each forward: use_nested_tensor=False of {name or 'the model'} avoids this, and changes the "
        "outputs at padded positions"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder)
        and module.use_nested_tensor
        and not replacement.keys().isdisjoint(module.layers[0].modules())
    ]


# Warn about the calibration batches if the held-out error exceeds the predicted one by this factor.
_SUSPICIOUS_RATIO = 10.0
# Two outputs of one model for one batch are equal up to this relative difference, because GPUs sum in varying order.
_REPEATABLE = 1e-5


@takes_settings(CompressConfig)
def compress(model: nn.Module, config: CompressConfig) -> CompressionReport:  # noqa: D417 (callers pass its fields)
    r"""Compress a trained model in place: replace dense layers by smaller ones that give nearly the same output.

    Weights of nn.Linear, nn.Conv2d and transformers' Conv1D become :class:`~panther.nn.LowRankLinear` and
    :class:`~panther.nn.LowRankConv2d`, or with ``forms`` :class:`~panther.nn.QuantizedLinear`,
    :class:`~panther.nn.QuantizedConv2d` and :class:`~panther.nn.InterpolativeLinear`. Weights of nn.Embedding and
    nn.EmbeddingBag become :class:`~panther.nn.QuantizedEmbedding` and :class:`~panther.nn.QuantizedEmbeddingBag`; a
    head that shares such a weight shares the codes. Stacked experts of transformers become
    :class:`~panther.nn.QuantizedExperts`. A few unlabelled batches show
    which directions of each layer's input occur and how the model's output depends on each layer: with A the second
    moment of the inputs (about their mean, where there is a bias) and G the second moment of gradients of random
    directions of the output, W is approximated in the norm whose square is :math:`\operatorname{tr}(G \Delta A
    \Delta^T)`, and bytes go where they gain most.

    The arguments have four groups: one size (``budget`` to ``max_latency_ms``), the data (``calibration`` to
    ``group``), the forms (``forms`` to ``reader``), and what few models need (from ``method`` on).

    Args:
        model: A trained model, which is changed in place. If anything fails it stays exactly as it was.
        budget: Bytes of the eligible layers' weights to keep, as a fraction in (0, 1]; layers that stay dense count in
            full, biases do not count. Exactly one of ``budget``, ``bits``, ``max_bytes``, ``max_error``, ``speedup``
            and ``max_latency_ms`` must be given.
        bits: The size as an average number of bits for each eligible weight, scales and factors included; weights of
            embeddings are eligible if ``forms`` has widths.
        max_bytes: Bytes that all tensors of the whole model may take when saved.
        max_error: Relative error of the output that the held-out batches may show; the smallest budget is searched.
        speedup: Required speed-up of the whole model on the first held-out batch. Each form of each layer is timed on
            the layer's input in this batch; the forms with the smallest loss are chosen, whatever their bytes.
        max_latency_ms: Largest time of the model for the first held-out batch, in milliseconds, with torch's present
            number of threads.
        calibration: Batches, in a list or a DataLoader; they are held in memory, a fifth of them for checks. A tensor
            is fed to the model, a tuple or list as its arguments, a dict as its keywords. Each forward gets a copy,
            which it may change, and starts from the same random numbers, buffers and attributes. A model of
            sentence-transformers takes texts in one list, lists of texts, or the features of ``model.preprocess``.
        forward_fn: ``forward_fn(model, batch)`` returns the output to keep, instead of the call above. If the output is
            a mapping, ``logits``, ``scores``, ``sentence_embedding`` or ``last_hidden_state`` is compared; otherwise it
            is the first floating tensor that is not a single number (a loss is one). The report's ``output`` names it.
        loss_fn: ``loss_fn(output, batch)``, a scalar whose gradients make G, instead of random directions.
        mask_fn: ``mask_fn(batch)`` returns which positions count, (N, T) of booleans; the default is
            ``batch["attention_mask"]`` and, for the positions of a decoder, ``batch["decoder_attention_mask"]``, where
            a batch has them. One or two forwards of a shorter batch show which layers have which positions.
        group: Ranks that each hold the same model and different batches; moments and errors are summed over the ranks.
            With ``heal`` it must have all ranks.
        forms: Forms that a layer may take. Each layer gets the form with the largest gain per byte or per second.
            ``"dense"``: the layer does not change. ``"low_rank"``: factors in the layer's dtype. ``"interpolative"``:
            a matrix of low rank, stored as some rows or columns of it and the coefficients of the remaining ones, which
            takes fewer numbers than factors. ``"int8_low_rank"``: factors in 8 bits. ``"int8"``, ``"int6"``,
            ``"int5"``, ``"int4"``, ``"int3"``, ``"int2"``: codes of 8 to 2 bits, rounded with error feedback in the
            norm above. ``"int4+low_rank"`` and so on: codes, and an 8-bit correction of their error. Convolutions are
            never interpolative, and grouped convolutions take only ``"dense"``, ``"low_rank"`` and widths without a
            correction. Embeddings, and heads that share their weight, take ``"dense"`` and widths without a
            correction. None allows ``"dense"``, ``"low_rank"``, ``"interpolative"`` and all widths without a
            correction.
        include: Only layers that match: a type (which also admits subclasses), a glob of names, a function of the
            module and its name, or a sequence of these.
        exclude: No layers that match.
        allow_slower: Whether layers may take forms that were measured below 0.8 of the dense layer's speed. True: they
            may. False: never. None: if ``forms`` is given, they may; if it is not, they may only where the size cannot
            be reached otherwise, or where slower forms halve the held-out error (the bytes, with ``max_error``), and
            the report has a note; embeddings may in any case. Without batches or ``measure_speed`` nothing is timed,
            and None is True.
        group_size: Columns of a quantized weight that share a scale; None is an entire row.
        symmetric: Whether quantized weights have the middle code for zero in every group, as engines with signed codes
            need it, instead of a zero point for each group. In 4 bits and groups of 128, the squared error of normal
            weights is 1.16 times as large.
        activations: ``"int8"``: quantized linear layers round their inputs to 8 bits and multiply integers, which is
            faster from tens of rows on and adds about 1 % of error to each layer's output. Measured errors and times
            include this error, and predicted errors do not; see :class:`~panther.nn.QuantizedLinear`.
        rank_multiple: Ranks are multiples of this even number, because aligned products are faster; a weight with room
            for fewer than eight such ranks has even ranks.
        target: ``"compressed-tensors"``: fit only what this format and its reader hold, so that ``panther export --to
            compressed-tensors`` writes the model without loss. Grids are symmetric; embeddings, convolutions and
            layers whose columns ``group_size`` does not divide stay dense. ``"gguf"``: the same for files of llama.cpp,
            with 4, 5 and 8 bits in groups of 32 columns, which are then the default; 8 bits are symmetric, embeddings
            may have codes, and sizes count the bytes of these files. None does not restrict the model.
        reader: The program that will read the format: ``"transformers"`` (the default for compressed-tensors),
            ``"vllm"``, whose layers get one width, because it fuses some of them, or ``"llama.cpp"``, the only one for
            GGUF. It implies ``target``.
        method: How the errors of a weight are weighted. ``"two_sided"``: by the norm above. ``"activation"``: with G
            the identity, as in GPTQ, the fast way, because it needs no backward pass, and with one form, as in
            ``forms="int4"``, no choice. ``"svd"``: with A and G the identity. ``"random"``: seeded sketches, which
            destroy a trained model; for comparison.
        allocate: ``"global"`` or ``"uniform"`` forms and ranks; None is global for two_sided and uniform for the
            remaining methods. Where global does worse than uniform on the held-out batches, uniform is used, and the
            report says so.
        heal: Distil the original into the compressed model afterwards; see :class:`~panther.compression.HealConfig`.
        statistics_memory_bytes: Memory for moments; there are as many passes over the batches as needed. None is half
            of the free memory of the model's device, up to a gigabyte (2^30 bytes), shared by the ranks of ``group``.
        seed: Seed of random directions, sketches and healing; None draws one from torch's default CPU generator.
        measure_speed: Whether to time the layers, whose times are kept on disk, and the model before and after.
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

    Cost: forward and backward over the batches for each pass, with global forms also for 128 samples (at most 32
    times), and about eight forwards over the held-out batches; for times a fraction of a second for each new form of a
    shape of layer; n^2 and m^2 numbers in float64 for an (m, n) weight within a pass, one SVD a weight, and for each of
    one to three widths ``2 m n (m + n)`` flops a weight.
    Weights are fitted a second time, with a larger ridge, where the error on the held-out batches is over three times
    the predicted error.

    Example:
        A network that has learnt handwritten digits, which scikit-learn (extra ``demo``) brings:

        >>> import copy, torch, panther as pr
        >>> from sklearn.datasets import load_digits
        >>> x, y = map(torch.tensor, load_digits(return_X_y=True))
        >>> x = x.float() / 16  # 1,797 digits of 64 pixels
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 256),
        ...     torch.nn.GELU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> for batch in 3 * torch.arange(len(x)).split(32):
        ...     loss = torch.nn.functional.cross_entropy(
        ...         model(x[batch]), y[batch]
        ...     )
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> options = {
        ...     "calibration": list(x[:512].split(64)),
        ...     "seed": 0,
        ...     "measure_speed": False,
        ... }
        >>> small = copy.deepcopy(model)
        >>> report = pr.compress(small, budget=0.5, forms="low_rank", **options)
        >>> report.eligible_ratio <= 0.5, type(small[0]).__name__
        (True, 'LowRankLinear')

        In at most 4.5 bits a weight, each layer in the form that suits it:

        >>> report = pr.compress(model, bits=4.5, **options)
        >>> [layer.form for layer in report.layers], type(model[0]).__name__
        (['int4', 'int4'], 'QuantizedLinear')

    References: Eckart and Young, 1936, doi:10.1007/BF02288367; the weighted form in Y.-C. Hsu et al., "Language model
    compression with weighted low-rank factorization", ICLR 2022, arXiv:2207.00112; Kronecker factors in J. Martens and
    R. Grosse, ICML 2015, arXiv:1503.05671.
    """
    check_model(model)
    check_adapters(model)
    if config.heal is not None:
        from panther.compression import healing  # here, because it loads the Trainer and torch.distributed's engines

        healing.check_ranks(config.group)
    with plain_tensors() as forward_device, without_compiled_blocks(model):
        return compress_with(make_runner(model, config, forward_device=forward_device), config)


def compress_with(runner: Runner, config: CompressConfig) -> CompressionReport:
    """Compress the model of a runner, as :func:`compress` does with a runner in memory."""
    seed = runner.shared_seed(check_seed(config.seed))
    with runner.calibrating(seed):
        prepared = prepare(runner, config, seed)
        replacement = prepared.convert()
        measured = measure(runner, prepared.survey.targets, replacement, speed=config.measure_speed)
        outcome = Outcome(
            prepared.survey, prepared.allocation, replacement, config.method, seed, prepared.fits, measured,
            allow_slower=config.allow_slower, output=runner.output_name,
        )  # fmt: skip
        notes = _speed_notes(prepared.speed_target, measured) + _model_notes(runner)
        if calibration_notes := _calibration_notes(outcome, runner.difference or 0.0):
            warnings.warn("; ".join(calibration_notes), NumericalWarning, stacklevel=4)
    healed, write_ = None, None
    outcome = outcome.without_fits()  # healing needs the memory
    del prepared
    if config.heal is not None and replacement:
        from panther.compression import healing

        healed, write_ = healing.heal(runner, replacement, config.heal, seed=seed)
    notes += calibration_notes + _healing_notes(config.heal, healed)
    return install_layers(runner.model, replace(outcome, healed=healed, write_=write_, notes=notes))


@contextmanager
def plain_tensors() -> Iterator[torch.device | None]:
    """Use plain tensors with gradients, and small ones on the CPU, whatever the caller's modes are.

    Yields the default device that the caller has set for the model's forward, or None for the CPU.
    """
    default_device = torch.get_default_device()
    forward_device = None if default_device.type == "cpu" else default_device
    on_cpu = nullcontext() if forward_device is None else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), on_cpu:
        yield forward_device


@explain_keywords
def sketch_layers_(
    model: nn.Module,
    config: SketchConfig,
    *,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    seed: int | None = None,
) -> CompressionReport:
    """Replace layers by sketched ones of one size, or by low-rank or Monarch ones, without data, in place.

    Low-rank layers are made with ``init="svd"``, and Monarch layers with ``kind="monarch"``. This is for models that
    will be trained afterwards; :func:`compress` preserves the outputs of a trained model.

    Args:
        model: Any module that contains nn.Linear, nn.Conv2d or transformers' Conv1D.
        config: Kind, size and initialization of every layer. Monarch layers replace linear layers only.
        include: Only layers that match, as for :func:`compress`.
        exclude: No layers that match.
        seed: Seed from which the seeds of all layers are derived; None draws one from torch's default CPU generator.

    Returns:
        A report of the replaced layers, and of the layers that stay dense with the reason, such as that a layer would
        not shrink.

    Raises:
        CompressionError: If no layer is eligible, or layers have adapters of PEFT.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(256, 256),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 2),
        ... )
        >>> report = pr.sketch_layers_(
        ...     model, pr.SketchConfig(num_terms=1, low_rank=16)
        ... )
        >>> type(model[0]).__name__, report.skipped[0].name
        ('SKLinear', '2')
    """
    check_model(model)
    check_adapters(model)
    if not isinstance(config, SketchConfig):
        raise TypeError(f"config must be a SketchConfig, not {type(config).__name__}")
    seed = check_seed(seed)
    replacement: Replacement = {}
    method: str = config.init if config.kind == "sketched" else config.kind
    if config.low_rank is None:
        fraction = config.fraction or 1.0  # SketchConfig has checked that it is given
        refuse = partial(monarch_refusal, fraction=fraction)
        survey = select_targets(model, include, exclude, seeded=True, refuse=refuse).check()
        for target, target_seed in survey.seeds(seed).items():
            replacement |= convert_to_monarch(target, fraction, target_seed)
        choice = {target: monarch_option(target, fraction) for target in survey.targets}
    else:
        rank = 2 * config.num_terms * config.low_rank
        survey = select_targets(model, include, exclude, rank=rank, seeded=method != "svd").check()
        for target, target_seed in survey.seeds(seed).items():
            replacement |= convert_seeded(target, config.num_terms, config.low_rank, method, target_seed)
        choice = {target: Option(LOW_RANK, target.bytes(rank), rank) for target in survey.targets}
    return install_layers(model, Outcome(survey, Allocation(choice, "fixed"), replacement, method, seed))


def _speed_notes(speed_target: SpeedTarget | None, measured: Measured) -> list[str]:
    """Return a note if the model met its speed target when forms were chosen, and misses it now."""
    if speed_target is None or measured.speedup is None or measured.speedup >= speed_target.speedup:
        return []
    return [f"the model met {speed_target.setting} when forms were chosen, and missed it when timed again"]


def _healing_notes(heal: HealConfig | None, healed: HealResult | None) -> list[str]:
    """Return a note if healing diverged, or had nothing to heal."""
    if healed is None:
        return [] if heal is None else ["nothing was compressed, so there is nothing to heal"]
    if healed.diverged:
        return [f"healing diverged and ended at step {healed.steps}: use a lower learning_rate"]
    return []


def _model_notes(runner: Runner) -> list[str]:
    """Return notes for the report if the original model is not deterministic or writes its parameters."""
    notes = []
    if runner.difference is not None and runner.difference > _REPEATABLE:
        notes.append(
            f"two outputs of the original model for one batch differ by {runner.difference:.2g}, although torch, NumPy "
            "and Python drew the same random numbers: the measured errors contain this difference"
        )
    if written := runner.written_parameters():
        notes.append(
            f"forwards of the model write its parameters in place ({', '.join(written[:3])}): these parameters now "
            "have the values that the calibration left, because Panther does not restore parameters"
        )
    return notes


def _calibration_notes(outcome: Outcome, difference: float) -> list[str]:
    """Return the reasons, for the report and a warning, why the calibration batches may not suffice.

    ``difference`` is the relative difference of two outputs of the original model for one batch.
    """
    notes = list(outcome.fits.calibration_notes)
    predicted, error = outcome.predicted_error, outcome.measured.error
    if predicted is not None and error is not None and error > max(SUSPICIOUS_ERROR, _SUSPICIOUS_RATIO * predicted):
        advice = "give more batches, in random order"
        if 2 * difference > error:
            advice = (
                f"most of it is the difference of {difference:.2g} between two outputs of the original model for one "
                "batch, which more batches do not change"
            )
        notes.append(
            f"the error of the output is {error:.2g} on the held-out batches, and {predicted:.2g} was predicted from "
            f"the remaining batches: {advice}"
        )
    return notes
