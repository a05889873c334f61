r"""Starts of LoRA adapters from the weight itself: PiSSA, and the same in the metric of the inputs as in CorDA.

With U (out, r) orthonormal, an adapter starts as :math:`s B A = U U^T W`, and the weight keeps :math:`W - U U^T W`, so
that the layer's function is unchanged. PiSSA takes the leading left singular vectors of W. For inputs with second
moment C, those of :math:`W C^{1/2}` make the adapter the best of its rank on the inputs, and the last ones make it what
the inputs say least about. In all cases U comes from a matrix as small as the layer allows, and no inverse is taken.

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
from panther.compression.moments import check_calibration, gather_moments, split_passes
from panther.compression.runner import Runner
from panther.compression.survey import survey_targets
from panther.compression.targets import Survey, Target
from panther.errors import ConfigError, require_extra
from panther.integrations.peft.decomposition import ITERATIONS, start_
from panther.nn.interpolative import InterpolativeLinear
from panther.nn.linear import SKLinear
from panther.nn.quantized import QuantizedLinear
from panther.sketch import check_seed

_lora: Any = require_extra("peft.tuners.lora", "peft")

_MODES = ("instruction_previewed", "knowledge_preserved")
_MOMENTS_BYTES = 1 << 30  # at a time
Mode = Literal["instruction_previewed", "knowledge_preserved"]


class InitializedLayer(NamedTuple):
    """A layer whose adapter was initialised."""

    name: str
    """Its name in the model."""
    kind: str
    """The class of the layer that the adapter is on."""
    rank: int
    """Rank of the adapter."""
    error: float
    """Relative error of the adapter alone in the place of the whole weight: of the weight's Frobenius norm, or, with
    calibration, of the layer's outputs (root of the mean square) on those inputs. It is computed, not estimated."""


@dataclass(frozen=True)
class InitReport:
    """What an initialisation did; ``print`` shows a table."""

    layers: tuple[InitializedLayer, ...]
    """The layers whose adapters were initialised."""
    kept: tuple[tuple[str, str], ...]
    """Names of layers whose adapters were left as they were, each with the reason."""
    notes: tuple[str, ...] = ()
    """What the calibration batches say too little about."""

    def __str__(self) -> str:
        """Return a line for each layer."""
        rows = [(layer.name, layer.kind, str(layer.rank), f"{layer.error:.3f}") for layer in self.layers]
        lines = [f"initialised {counted(len(self.layers), 'adapter')}, kept {len(self.kept)}"]
        lines.append(format_table([("layer", "kind", "rank", "error of the adapter alone"), *rows], "<<>>"))
        return "\n".join([*lines, *(f"kept: {name}, {reason}" for name, reason in self.kept), *self.notes])


@torch.no_grad()
def init_pissa_(
    model: nn.Module,
    adapter_name: str = "default",
    *,
    n_iter: int | Literal["auto"] = ITERATIONS,
    seed: int | None = None,
) -> InitReport:
    r"""Start a new LoRA adapter from the leading singular vectors of the weights, which keep what is left.

    The model's function is unchanged, to rounding in the weights' dtype. This is PEFT's ``init_lora_weights="pissa"``
    by :func:`panther.linalg.randomized_svd`: near the error of the full SVD, in the time of the randomized one, and the
    same for the same seed. It serves nn.Linear, transformers' Conv1D, fitted SKLinear and InterpolativeLinear; of the
    last two the factors alone are decomposed. Layers that cannot hold what is left (quantized and seeded ones, tied
    weights) keep the adapter's own start, which changes nothing either, and the report says so.

    The base model is changed, so an adapter that is saved afterwards fits no other copy of it. Before training, save it
    once; after training, PEFT turns both into a LoRA of rank 2 r for the original model::

        init_pissa_(model)
        model.save_pretrained("start")
        ...  # train
        model.save_pretrained("adapter", path_initial_model_for_weight_conversion="start")

    and :func:`resize_lora` makes that one smaller.

    Args:
        model: A model with a new LoRA adapter, as ``peft.get_peft_model`` returns it; changed in place.
        adapter_name: Name of the adapter.
        n_iter: Iterations of the randomized SVD, as for :func:`panther.linalg.randomized_svd`.
        seed: Of the randomized SVD; None draws one from torch's default CPU generator.

    Returns:
        The error of each adapter alone, and the layers that were left.

    Raises:
        ConfigError: If the model has no such adapter, it was trained already, there are others beside it, or no layer
            can be initialised.

    Cost: A truncated SVD of rank r of each weight, 2 r in out flops, and the memory of one weight.

    Example:
        >>> import peft, torch
        >>> dense = torch.nn.Sequential(torch.nn.Linear(64, 48))
        >>> x = torch.randn(2, 64)
        >>> before = dense(x)
        >>> model = peft.get_peft_model(dense, peft.LoraConfig(r=4, target_modules=["0"]))
        >>> report = init_pissa_(model, seed=0)
        >>> report.layers[0].rank, torch.allclose(model(x), before, atol=1e-5)
        (4, True)

    Reference: F. Meng, Z. Wang and M. Zhang (2024), arXiv:2404.02948.
    """
    seed = check_seed(seed)
    found, kept = _adapted(model, adapter_name)
    done = []
    for name, layer in found:
        error = start_(layer, adapter_name, None, trailing=False, n_iter=n_iter, seed=seed)
        done.append(_entry(name, layer, adapter_name, error))
    return InitReport(tuple(done), kept)


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

    The model's function is unchanged, to rounding in the weights' dtype. With ``"instruction_previewed"`` the adapter
    holds what matters most for the calibration batches, which are of the new task: it is the best approximation of the
    layer's outputs on them. With ``"knowledge_preserved"`` it holds what matters least, and the batches are of what the
    model is to keep.

    The decomposition is that of :math:`W C^{1/2}`, C the second moment of the inputs, and not of W C as in the paper
    and in PEFT: so the errors are those of the outputs, and no inverse of C is needed. Which layers it serves, and how
    the adapter is saved, is as for :func:`init_pissa_`.

    Args:
        model: A model with a new LoRA adapter, as ``peft.get_peft_model`` returns it; changed in place.
        calibration: List or DataLoader of at least two batches, as for :func:`panther.compress`.
        mode: ``"instruction_previewed"`` or ``"knowledge_preserved"``.
        adapter_name: Name of the adapter.
        forward_fn: As for :func:`panther.compress`.
        mask_fn: As for :func:`panther.compress`.
        n_iter: Iterations of the randomized SVD, as for :func:`panther.linalg.randomized_svd`.
        seed: Of the randomized SVD; None draws one from torch's default CPU generator.
        progress: Whether to show a progress bar; None does on a terminal.

    Returns:
        The error of each adapter alone on the inputs, and the layers that were left.

    Raises:
        ConfigError: As for :func:`init_pissa_`, and if ``mode`` is unknown.
        CompressionError: If the batches do not fit the model, or say nothing about its layers.

    Cost: Passes over the batches that sum second moments, in^2 numbers in float64 for each set of layers that read one
    input, up to 1 GB at a time; a Cholesky factorisation of each, O(in^3), and a randomized SVD; for
    ``"knowledge_preserved"`` an eigendecomposition in the smaller of both sizes in place of the last two.

    Example:
        >>> import peft, torch
        >>> dense = torch.nn.Sequential(torch.nn.Linear(64, 48))
        >>> batches = list(torch.randn(4, 32, 64))
        >>> before = dense(batches[0])
        >>> model = peft.get_peft_model(dense, peft.LoraConfig(r=4, target_modules=["0"]))
        >>> report = init_corda_(model, batches, "knowledge_preserved", seed=0)
        >>> torch.allclose(model(batches[0]), before, atol=1e-5)
        True

    Reference: Y. Yang et al. (2024), arXiv:2406.05223.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, _MODES))}")
    seed = check_seed(seed)
    found, kept = _adapted(model, adapter_name)
    targets = tuple(
        Target((name,), (base,), 1, base.in_features, base.out_features)
        if hasattr(base := layer.get_base_layer(), "in_features")
        else Target((name,), (base,), 1, *base.weight.shape)  # transformers' Conv1D
        for name, layer in found
    )
    layers = dict(zip(targets, (layer for _, layer in found), strict=True))
    runner = Runner(model, calibration, forward_fn, mask_fn, None, progress)
    done: dict[Target, InitializedLayer] = {}
    positions: dict[Target, float] = {}
    constant: list[Target] = []
    with runner.calibrating(seed):
        survey = survey_targets(runner, Survey(targets, ()), gradients=False)
    if not survey.targets:
        raise ConfigError("no layer with an adapter is called on the first calibration batch: give other batches")
    passes = split_passes(survey.inputs, False, runner.spare_bytes(_MOMENTS_BYTES))
    for number, inputs in enumerate(passes):
        label = f"moments, pass {number + 1} of {len(passes)}"
        with runner.calibrating(seed):  # not around what follows: it puts buffers back as they were
            moments, _, _ = gather_moments(runner, inputs, gradients=False, seed=seed, description=label)
        positions |= {target: moment.positions for target, moment in moments.items()}
        constant += [target for target, moment in moments.items() if moment.constant]
        check_calibration(positions, constant)  # before anything is changed
        # Started at once, so that moments of one pass are held: functions stay the same, so later inputs do too.
        for target, moment in moments.items():
            layer, trailing = layers[target], mode == "knowledge_preserved"
            error = start_(layer, adapter_name, moment.A[0], trailing=trailing, n_iter=n_iter, seed=seed)
            done[target] = _entry(target.name, layer, adapter_name, error)
    notes = check_calibration(positions, constant)
    kept += tuple((entry.name, entry.reason) for entry in survey.skipped)
    return InitReport(tuple(done[target] for target in survey.targets), kept, notes)


def _entry(name: str, layer: Any, adapter_name: str, error: float) -> InitializedLayer:
    return InitializedLayer(name, type(layer.get_base_layer()).__name__, layer.r[adapter_name], error)


def _adapted(model: nn.Module, adapter_name: str) -> tuple[list[tuple[str, Any]], tuple[tuple[str, str], ...]]:
    """Return the LoRA layers that can be initialised, by the names of the layers, and the others with the reasons."""
    layers = [
        (name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if isinstance(module, _lora.LoraLayer) and adapter_name in {**module.lora_A, **module.lora_embedding_A}
    ]
    if not layers:
        known = {key for module in model.modules() if isinstance(module, _lora.LoraLayer) for key in module.lora_A}
        raise ConfigError(
            f"the model has no LoRA adapter {adapter_name!r} "
            f"({'it has ' + ', '.join(map(repr, sorted(known))) if known else 'nor any other one'}): make it by "
            "peft.get_peft_model(model, peft.LoraConfig(...)) first"
        )
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found, kept = [], []
    for name, layer in layers:
        if others := sorted({*layer.lora_A, *layer.lora_embedding_A} - {adapter_name}):
            raise ConfigError(
                f"layer {name!r} has the adapter {others[0]!r} too, which was made for the weights as they are, and "
                "this changes them: start from a model with one adapter"
            )
        if layer.merged:
            raise ConfigError("the adapter is merged: call unmerge_adapter() first")
        if reason := _why_kept(layer, adapter_name, owners):
            kept.append((name, reason))
        else:
            if layer.lora_B[adapter_name].weight.any() and layer.lora_A[adapter_name].weight.any():
                raise ConfigError(
                    f"adapter {adapter_name!r} is not new: in layer {name!r} it is not zero, and would be lost. "
                    "Initialise it right after get_peft_model, with init_lora_weights=True"
                )
            found.append((name, layer))
    if not found:
        raise ConfigError(f"no adapter can be initialised: {kept[0][0]!r}, for one, is kept because it {kept[0][1]}")
    return found, tuple(kept)


def _why_kept(layer: Any, adapter_name: str, owners: Counter[int]) -> str | None:
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        return "is quantized, and its codes cannot hold what is left of the weight without rounding it"
    if isinstance(base, SKLinear) and not base.is_fitted:
        return "is seeded, and fixed signs cannot hold what is left of the weight"
    if not isinstance(layer, _lora.Linear):  # the class for Conv1D and for compressed layers, too
        return f"is a {type(base).__name__}, and this is for linear layers"
    if layer.lora_variant:
        return f"has a variant of LoRA ({type(next(iter(layer.lora_variant.values()))).__name__})"
    weight = None if isinstance(base, SKLinear | InterpolativeLinear) else base.weight
    if weight is not None and (type(weight.detach()) is not Tensor or not weight.is_floating_point()):
        return "has a weight that is not a plain floating tensor (quantized by another library, or sharded)"
    if any(owners[id(parameter)] > 1 for name, parameter in base.named_parameters(recurse=False) if name != "bias"):
        return "shares its weight with another layer, whose function would change"
    own = 2 * base.S1.shape[1] if isinstance(base, SKLinear) else getattr(base, "low_rank", layer.in_features)
    rank, most = layer.r[adapter_name], min(layer.in_features, layer.out_features, own)
    if rank > most:
        return f"has an adapter of rank {rank}, and its weight has rank {most} at most"
    if layer.scaling[adapter_name] <= 0:
        return f"has an adapter with scale {layer.scaling[adapter_name]}, which must be positive"
    return None
