r"""Starts of LoRA adapters from the weight itself: PiSSA, and the same in the metric of the inputs as in CorDA.

With U (out, r) orthonormal, an adapter starts as :math:`s B A = U U^T W`, and the weight keeps :math:`W - U U^T W`, so
that the layer's function is unchanged. PiSSA takes the leading left singular vectors of W. For inputs with second
moment C, the leading left singular vectors of :math:`W C^{1/2}` give the adapter with the smallest error of its rank on
these inputs, and the last ones the adapter that changes the outputs for these inputs least. In all cases U is computed
from a matrix as small as the layer allows, and without an inverse.

F. Meng, Z. Wang and M. Zhang, "PiSSA: principal singular values and singular vectors adaptation of large language
models", 2024, arXiv:2404.02948; Y. Yang et al., "CorDA: context-oriented decomposition adaptation of large language
models", 2024, arXiv:2406.05223, which decomposes :math:`W C` in place of :math:`W C^{1/2}`.
"""

__all__ = ["InitReport", "InitializedLayer", "init_corda_", "init_pissa_"]

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from panther._text import counted, format_table
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import survey_targets
from panther.compression.calibration.targets import Survey, Target
from panther.compression.moments import Moments, check_calibration, gather_moments, split_passes
from panther.errors import ConfigError, require_extra
from panther.integrations.peft.decomposition import ITERATIONS, initialize_adapter_
from panther.nn.base import CompressedModule
from panther.nn.linear import SKLinear
from panther.nn.quantized import QuantizedLinear
from panther.sketch import check_seed

_lora: Any = require_extra("peft.tuners.lora", "peft")

_MODES = ("instruction_previewed", "knowledge_preserved")
_MOMENTS_BYTES = 1 << 30  # for the moments of one pass
Mode = Literal["instruction_previewed", "knowledge_preserved"]


class InitializedLayer(NamedTuple):
    """A layer whose adapter was initialised."""

    name: str
    """Name of the layer in the model."""
    kind: str
    """Class of the base layer."""
    rank: int
    """Rank of the adapter."""
    error: float
    """Relative error of the adapter alone instead of the weight: in the Frobenius norm of the weight, or, with
    calibration, in the root mean square of the layer's outputs on these inputs. It is computed, not estimated."""


@dataclass(frozen=True)
class InitReport:
    """The result of an initialisation; ``print`` shows a table."""

    layers: tuple[InitializedLayer, ...]
    """The layers whose adapters were initialised."""
    skipped: tuple[tuple[str, str], ...]
    """Names of layers whose adapters were not changed, each with the reason."""
    notes: tuple[str, ...] = ()
    """Reasons why the calibration batches do not suffice for some layers."""

    def __str__(self) -> str:
        """Return a line for each layer."""
        rows = [(layer.name, layer.kind, str(layer.rank), f"{layer.error:.3f}") for layer in self.layers]
        lines = [f"initialised {counted(len(self.layers), 'adapter')}, kept {len(self.skipped)}"]
        lines.append(format_table([("layer", "kind", "rank", "error of the adapter alone"), *rows], "<<>>"))
        return "\n".join([*lines, *(f"kept: {name}, {reason}" for name, reason in self.skipped), *self.notes])


@torch.no_grad()
def init_pissa_(
    model: nn.Module,
    adapter_name: str = "default",
    *,
    n_iter: int | Literal["auto"] = ITERATIONS,
    seed: int | None = None,
) -> InitReport:
    r"""Start a new LoRA adapter from the leading singular vectors of the weights, and subtract it from the weights.

    The model's function is unchanged, up to rounding in the weights' dtype. This is PEFT's
    ``init_lora_weights="pissa"``, computed by :func:`panther.linalg.randomized_svd`: the error is near that of the full
    SVD, and the result is the same for the same seed. It applies to nn.Linear, transformers' Conv1D, LowRankLinear and
    InterpolativeLinear; for the last two, only the factors are decomposed. Layers that cannot hold the remainder of the
    weight (quantized layers, sketched layers and tied weights) keep PEFT's initial adapter, which does not change the
    function either, and the report lists them.

    The base model is changed, so that an adapter saved afterwards does not fit an unchanged copy of the model. Save the
    adapter once before training; after training, PEFT converts both into a LoRA of rank 2 r for the original model::

        init_pissa_(model)
        model.save_pretrained("start")
        ...  # train
        model.save_pretrained(
            "adapter", path_initial_model_for_weight_conversion="start"
        )

    Args:
        model: A model with a new LoRA adapter, as ``peft.get_peft_model`` returns it; changed in place.
        adapter_name: Name of the adapter.
        n_iter: Iterations of the randomized SVD, as for :func:`panther.linalg.randomized_svd`.
        seed: Seed of the randomized SVD; None draws one from torch's default CPU generator.

    Returns:
        The error of each adapter alone, and the layers that were skipped.

    Raises:
        ConfigError: If the model has no such adapter, the adapter was trained already, the model has further adapters,
            or no layer can be initialised.

    Cost: A truncated SVD of rank r of each weight, 2 r in out flops, and the memory of one weight.

    Example:
        >>> import peft, torch
        >>> dense = torch.nn.Sequential(torch.nn.Linear(64, 48))
        >>> x = torch.randn(2, 64)
        >>> before = dense(x)
        >>> model = peft.get_peft_model(
        ...     dense, peft.LoraConfig(r=4, target_modules=["0"])
        ... )
        >>> report = init_pissa_(model, seed=0)
        >>> report.layers[0].rank, torch.allclose(model(x), before, atol=1e-5)
        (4, True)

    Reference: F. Meng, Z. Wang and M. Zhang (2024), arXiv:2404.02948.
    """
    seed = check_seed(seed)
    adapted_layers, skipped = _split_adapted_layers(model, adapter_name)
    entries = []
    for name, layer in adapted_layers:
        error = initialize_adapter_(layer, adapter_name, None, trailing=False, n_iter=n_iter, seed=seed)
        entries.append(_entry(name, layer, adapter_name, error))
    return InitReport(tuple(entries), skipped)


@torch.no_grad()
def init_corda_(
    model: nn.Module,
    calibration: Any,
    mode: Mode = "instruction_previewed",
    adapter_name: str = "default",
    *,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    mask_fn: Callable[[Any], Tensor | None] | None = None,
    n_iter: int | Literal["auto"] = ITERATIONS,
    seed: int | None = None,
    progress: bool | None = None,
) -> InitReport:
    r"""Start a new LoRA adapter from singular vectors of the weights in the metric of the layers' inputs.

    The model's function is unchanged, up to rounding in the weights' dtype. With ``"instruction_previewed"``, give
    batches of the new task: the adapter is the best approximation of the layer's outputs on them. With
    ``"knowledge_preserved"``, give batches of the task that the model should keep: the adapter gets the directions with
    the smallest effect on the outputs for them.

    The decomposition is the SVD of :math:`W C^{1/2}`, where C is the second moment of the inputs, and not of W C as in
    the paper and in PEFT. Errors are therefore errors of the outputs, and no inverse of C is needed. The eligible
    layers and the saving of the adapter are the same as for :func:`init_pissa_`.

    Args:
        model: A model with a new LoRA adapter, as ``peft.get_peft_model`` returns it; changed in place.
        calibration: List or DataLoader of at least two batches, as for :func:`panther.compress`.
        mode: ``"instruction_previewed"`` or ``"knowledge_preserved"``.
        adapter_name: Name of the adapter.
        forward_fn: As for :func:`panther.compress`.
        mask_fn: As for :func:`panther.compress`.
        n_iter: Iterations of the randomized SVD, as for :func:`panther.linalg.randomized_svd`.
        seed: Seed of the randomized SVD; None draws one from torch's default CPU generator.
        progress: Whether to show a progress bar; None shows it on a terminal.

    Returns:
        The error of each adapter alone on the inputs, and the layers that were skipped.

    Raises:
        ConfigError: As for :func:`init_pissa_`, and if ``mode`` is unknown.
        CompressionError: If the batches do not fit the model, or do not suffice for any of its layers.

    Cost: Passes over the batches that sum second moments, in^2 numbers in float64 for each set of layers that read one
    input, up to 1 GB at a time; a Cholesky factorisation of each, O(in^3), and a randomized SVD; for
    ``"knowledge_preserved"`` an eigendecomposition in the smaller of both sizes in place of the last two.

    Example:
        >>> import peft, torch
        >>> dense = torch.nn.Sequential(torch.nn.Linear(64, 48))
        >>> batches = list(torch.randn(4, 32, 64))
        >>> before = dense(batches[0])
        >>> model = peft.get_peft_model(
        ...     dense, peft.LoraConfig(r=4, target_modules=["0"])
        ... )
        >>> report = init_corda_(model, batches, "knowledge_preserved", seed=0)
        >>> torch.allclose(model(batches[0]), before, atol=1e-5)
        True

    Reference: Y. Yang et al. (2024), arXiv:2406.05223.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, _MODES))}")
    seed = check_seed(seed)
    adapted_layers, skipped = _split_adapted_layers(model, adapter_name)
    targets = tuple(
        Target((name,), (base,), 1, base.in_features, base.out_features)
        if hasattr(base := layer.get_base_layer(), "in_features")
        else Target((name,), (base,), 1, *base.weight.shape)  # transformers' Conv1D
        for name, layer in adapted_layers
    )
    layers = dict(zip(targets, (layer for _, layer in adapted_layers), strict=True))
    runner = Runner(model, calibration, forward_fn, mask_fn, None, progress)
    entries: dict[Target, InitializedLayer] = {}
    positions: dict[Target, float] = {}
    constant: list[Target] = []
    with runner.calibrating(seed):
        survey = survey_targets(runner, Survey(targets, ()), gradients=False)
    if not survey.targets:
        raise ConfigError("no layer with an adapter is called on the first calibration batch: give other batches")
    passes = split_passes(survey.inputs, False, runner.spare_bytes(_MOMENTS_BYTES))
    for number, inputs in enumerate(passes):
        label = f"moments, pass {number + 1} of {len(passes)}"
        with runner.calibrating(seed):  # ends before the weights change, because it restores buffers
            gathered = [*gather_moments(runner, inputs, gradients=False, seed=seed, description=label)]
        # Embeddings are not among the targets, and only they have different moments.
        pairs = (pair for each in gathered for pair in each.moments.items())
        moments = {target: moment for target, moment in pairs if isinstance(moment, Moments)}
        positions |= {target: moment.positions for target, moment in moments.items()}
        constant += [target for target, moment in moments.items() if moment.constant]
        check_calibration(positions, constant)  # before anything is changed
        # Adapters are initialised after each pass, so that the moments of only one pass are in memory. This does not
        # change the inputs of later passes, because the layers' functions stay the same.
        for target, moment in moments.items():
            layer, trailing = layers[target], mode == "knowledge_preserved"
            error = initialize_adapter_(layer, adapter_name, moment.A[0], trailing=trailing, n_iter=n_iter, seed=seed)
            entries[target] = _entry(target.name, layer, adapter_name, error)
    notes = check_calibration(positions, constant)
    skipped += tuple((entry.name, entry.reason) for entry in survey.skipped)
    return InitReport(tuple(entries[target] for target in survey.targets), skipped, notes)


def _entry(name: str, layer: Any, adapter_name: str, error: float) -> InitializedLayer:
    return InitializedLayer(name, type(layer.get_base_layer()).__name__, layer.r[adapter_name], error)


def _split_adapted_layers(
    model: nn.Module, adapter_name: str
) -> tuple[list[tuple[str, Any]], tuple[tuple[str, str], ...]]:
    """Return the LoRA layers that can be initialised, with their names, and the remaining ones with the reasons."""
    layers = [
        (name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if isinstance(module, _lora.LoraLayer) and adapter_name in {**module.lora_A, **module.lora_embedding_A}
    ]
    if not layers:
        names = {key for module in model.modules() if isinstance(module, _lora.LoraLayer) for key in module.lora_A}
        raise ConfigError(
            f"the model has no LoRA adapter {adapter_name!r} "
            f"({'it has ' + ', '.join(map(repr, sorted(names))) if names else 'nor any other one'}): make it by "
            "peft.get_peft_model(model, peft.LoraConfig(...)) first"
        )
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    eligible, skipped = [], []
    for name, layer in layers:
        if other_adapters := sorted({*layer.lora_A, *layer.lora_embedding_A} - {adapter_name}):
            raise ConfigError(
                f"layer {name!r} also has the adapter {other_adapters[0]!r}, which was made for the present weights, "
                "and the initialisation changes them: start from a model with one adapter"
            )
        if layer.merged:
            raise ConfigError("the adapter is merged: call unmerge_adapter() first")
        if reason := _skip_reason(layer, adapter_name, owners):
            skipped.append((name, reason))
        else:
            if layer.lora_B[adapter_name].weight.any() and layer.lora_A[adapter_name].weight.any():
                raise ConfigError(
                    f"adapter {adapter_name!r} is not new: in layer {name!r} it is not zero, and would be lost. "
                    "Initialise it right after get_peft_model, with init_lora_weights=True"
                )
            eligible.append((name, layer))
    if not eligible:
        name, reason = skipped[0]
        raise ConfigError(f"no adapter can be initialised: for example, {name!r} is kept because it {reason}")
    return eligible, tuple(skipped)


def _skip_reason(layer: Any, adapter_name: str, owners: Counter[int]) -> str | None:
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        return "is quantized, and its codes cannot hold what is left of the weight without rounding it"
    if isinstance(base, SKLinear):
        return "is sketched, and fixed signs cannot hold what is left of the weight: see SKLinear.to_low_rank"
    if not isinstance(layer, _lora.Linear):  # the class for Conv1D and for compressed layers, too
        return f"is a {type(base).__name__}, and this is for linear layers"
    if layer.lora_variant:
        return f"has a variant of LoRA ({type(next(iter(layer.lora_variant.values()))).__name__})"
    weight = None if isinstance(base, CompressedModule) else base.weight
    if weight is not None and (type(weight.detach()) is not Tensor or not weight.is_floating_point()):
        return "has a weight that is not a plain floating tensor (quantized by another library, or sharded)"
    if any(owners[id(parameter)] > 1 for name, parameter in base.named_parameters(recurse=False) if name != "bias"):
        return "shares its weight with another layer, whose function would change"
    base_rank = getattr(base, "rank", getattr(base, "low_rank", layer.in_features))
    rank, largest_rank = layer.r[adapter_name], min(layer.in_features, layer.out_features, base_rank)
    if rank > largest_rank:
        return f"has an adapter of rank {rank}, and its weight has rank {largest_rank} at most"
    if layer.scaling[adapter_name] <= 0:
        return f"has an adapter with scale {layer.scaling[adapter_name]}, which must be positive"
    return None
