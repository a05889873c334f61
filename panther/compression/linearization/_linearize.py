"""The function that converts a model's attention, and its report."""

__all__ = ["LinearizationReport", "LinearizedLayer", "linearize_"]

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._hints import explain_keywords
from panther._model_libraries import layers_replaced
from panther._text import counted, format_seconds, format_table
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import check_model
from panther.compression.calibration.targets import Selector, SkippedLayer, replace_modules, swap_modules
from panther.compression.config import HealConfig
from panther.compression.forms import Replacement
from panther.compression.linearization.fitting import Quality, Recorder, fit, quality, record, split_layers
from panther.compression.linearization.survey import AttentionModules, find_attention, make_attention
from panther.compression.report import HealResult
from panther.compression.selection.trials import model_speed
from panther.errors import CompressionError, check_size
from panther.files import write_json
from panther.nn import LearnedLinearAttention
from panther.nn.attention.linearized import convert_attention
from panther.sketch import check_seed


@dataclass(frozen=True)
class LinearizedLayer:
    """One converted attention module. Figures are measured on held-out batches, and None without calibration."""

    name: str
    """Name of the module."""
    kind: str
    """Class of the module before the conversion."""
    num_heads: int
    """Number of heads."""
    head_dim: int
    """Width of a head."""
    is_causal: bool | None
    """Whether its calls were causal; None without calibration."""
    far_mass: float | None = None
    """Share of the exact weights beyond the window, on queries that have keys there."""
    divergence: float | None = None
    """Kullback-Leibler divergence of the exact weights from the approximate ones, in nats, on the same queries."""
    error: float | None = None
    """Relative error of the heads' outputs, on the same queries and the inputs of the original model."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearizationReport:
    """The result of :func:`panther.linearize_`. ``print(report)`` shows the table."""

    layers: tuple[LinearizedLayer, ...]
    """The converted modules."""
    skipped: tuple[SkippedLayer, ...]
    """Attention modules that keep their softmax, with the reason."""
    num_features: int
    """Number of features of each head."""
    window: int
    """Number of positions of a block of exact attention."""
    notes: tuple[str, ...] = ()
    """Deviations from the arguments, and why."""
    measured_error: float | None = None
    """Relative error of the model's output on the held-out batches, before healing."""
    healed: HealResult | None = None
    """The result of healing; None without it."""
    measured_speedup: float | None = None
    """Speed-up of the entire model on a held-out batch; see ``length``."""
    length: int | None = None
    """Longest sequence of the calibration batches."""
    passes: int = 0
    """Number of passes over the calibration batches in which queries, keys and values were recorded."""
    fit_s: float = 0.0
    """Seconds that learning the feature maps took, without the passes."""
    seed: int = 0
    """The seed of the call, drawn if none was given."""

    @property
    def healed_error(self) -> float | None:
        """Return the relative error of the model's output on the held-out batches, after healing."""
        return None if self.healed is None else self.healed.error

    def __repr__(self) -> str:
        """Return the totals in one line; ``str`` has the table."""
        return f"<LinearizationReport: {counted(len(self.layers), 'layer')}, {len(self.skipped)} kept exact>"

    def __str__(self) -> str:
        """Return the totals, then the table."""
        lines = [
            f"{counted(len(self.layers), 'attention layer')} converted, {len(self.skipped)} kept exact  "
            f"num_features={self.num_features}, window={self.window}"
        ]
        errors = [("measured", self.measured_error), ("healed", self.healed_error)]
        if self.measured_error is not None:
            errors_text = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
            lines.append(f"relative error of the output  {errors_text}")
        if self.fit_s:
            lines.append(f"learned in {format_seconds(self.fit_s)}, after {counted(self.passes, 'pass', 'passes')}")
        if self.measured_speedup is not None:
            lines.append(f"speed-up of the model  {self.measured_speedup:.2f} at {self.length} positions")
        lines += [f"note: {note}" for note in self.notes]
        rows: list[tuple[str, ...]] = [("layer", "kind", "heads", "causal", "far mass", "divergence", "error")]
        for layer in self.layers:
            figures = [(layer.far_mass, ".1%"), (layer.divergence, ".3g"), (layer.error, ".3g")]
            causal = {None: "", True: "yes", False: "no"}[layer.is_causal]
            heads = f"{layer.num_heads}x{layer.head_dim}"
            figures_text = ("" if value is None else format(value, form) for value, form in figures)
            rows.append((layer.name, layer.kind, heads, causal, *figures_text))
        lines.append(format_table(rows))
        lines += [f"kept exact: {name} ({kind}) {reason}" for name, kind, reason in self.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dicts."""
        skipped = [entry._asdict() for entry in self.skipped]
        return asdict(self) | {"skipped": skipped, "healed_error": self.healed_error}

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file."""
        path = Path(path)
        write_json(path, self.to_dict())
        return path


_MEMORY = 2**30


@explain_keywords
def linearize_(
    model: nn.Module,
    calibration: Any = None,
    *,
    num_features: int = 64,
    window: int = 64,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    max_error: float | None = None,
    steps: int = 300,
    learning_rate: float = 3e-2,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    mask_fn: Callable[[Any], Tensor | None] | None = None,
    heal: HealConfig | None = None,
    samples_memory_bytes: int = _MEMORY,
    seed: int | None = None,
    measure_speed: bool = True,
    progress: bool | None = None,
) -> LinearizationReport:
    r"""Convert a trained transformer's softmax attention to linear attention, in place, with learned feature maps.

    Every converted module attends exactly within a window of its position, and to all other positions through
    features whose products imitate :math:`e^{q \cdot k}`: see :class:`panther.nn.LearnedLinearAttention`. The features
    of each module are learned from its queries and keys on a few unlabelled batches. No other parameter changes, unless
    ``heal`` is given. The function converts nn.MultiheadAttention that attends from a sequence to itself, and modules
    of transformers that take their attention function from its table (BERT, GPT-2, Llama, Qwen, ViT and many more),
    causal or not, with grouped heads, rotary positions and masks of keys.

    Args:
        model: A trained model, which is changed in place. If anything fails it stays exactly as it was.
        calibration: Batches as for :func:`panther.compress`. Sequences must be longer than three windows, and are best
            as long as the sequences of later use. None converts without learning, so that a state_dict of a converted
            model can be loaded. Folders of :func:`panther.save_compressed` and ``save_pretrained`` need no conversion
            before loading.
        num_features: Number of features of each head.
        window: Number of positions in a block; attention is exact within a query's block and the adjacent blocks.
        include: Only attention modules that match: a type, a glob of names, a function of the module and its name, or a
            sequence of these.
        exclude: No modules that match.
        max_error: Keep the softmax of modules whose output has a larger relative error on the held-out batches.
        steps: Steps of Adam for each module.
        learning_rate: Peak of Adam's learning rate.
        forward_fn: ``forward_fn(model, batch)`` returns the output, as for :func:`panther.compress`.
        mask_fn: ``mask_fn(batch)`` returns which positions count in the output's error.
        heal: Distil the original into the converted model afterwards; ``train="factors"`` trains the converted
            modules' parameters, projections included.
        samples_memory_bytes: Memory for recorded queries, keys and values; there are as many passes over the batches
            as needed.
        seed: Seed of the cluster centres, of the sampled queries and of healing; None draws one from torch's default
            CPU generator.
        measure_speed: Whether to time the model before and after.
        progress: Whether to show progress on standard error; None shows it on a terminal.

    Returns:
        A report of every layer, with errors and speed; ``print`` shows it.

    Raises:
        CompressionError: If no module can be converted, the batches are too few or too short, or the model does not
            run on them.
        ShapeError: If a size is not positive.
        ValueError: If an option is out of range.

    Cost: a forward over the batches for each pass, then for each module and step the features of one sequence's keys
    and the weights of 64 queries.

    Example:
        >>> import torch, panther as pr
        >>> from sklearn.datasets import load_digits
        >>> x, y = map(torch.tensor, load_digits(return_X_y=True))
        >>> x = (x.float() / 16).view(-1, 32, 2)  # 32 pairs of pixels
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.TransformerEncoderLayer(
        ...     32, 4, 64, dropout=0.0, batch_first=True
        ... )
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 32),
        ...     torch.nn.TransformerEncoder(
        ...         layer, 2, enable_nested_tensor=False
        ...     ),
        ...     torch.nn.Flatten(),
        ...     torch.nn.Linear(32 * 32, 10),
        ... )
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        >>> for batch in torch.arange(len(x)).split(32):
        ...     loss = torch.nn.functional.cross_entropy(
        ...         model(x[batch]), y[batch]
        ...     )
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> report = pr.linearize_(
        ...     model.eval(),
        ...     list(x[:32].split(8)),
        ...     num_features=8,
        ...     window=8,
        ...     steps=20,
        ...     seed=0,
        ...     measure_speed=False,
        ... )
        >>> len(report.layers), report.measured_error < 0.1
        (2, True)

    References: M. Zhang et al., "The hedgehog and the porcupine: expressive linear attentions with softmax mimicry",
    ICLR 2024, arXiv:2402.04347; M. Zhang et al., "LoLCATs: on low-rank linearizing of large language models", ICLR
    2025, arXiv:2410.10254.
    """
    check_model(model)
    for name, size in (("num_features", num_features), ("window", window), ("steps", steps)):
        check_size(name, size, least=1)
    check_size("samples_memory_bytes", samples_memory_bytes, least=1)
    if not learning_rate > 0 or (max_error is not None and not max_error > 0):
        raise ValueError(f"learning_rate={learning_rate} and max_error={max_error} must be positive: 0.03 is usual")
    if calibration is None and (heal is not None or max_error is not None):
        raise ValueError(f"{'heal' if heal is not None else 'max_error'} needs calibration=, a list of batches")
    if heal is not None:
        if not isinstance(heal, HealConfig):
            raise TypeError(f"heal must be a HealConfig, not {type(heal).__name__}")
        from panther.compression import healing  # here, because it loads the Trainer and torch.distributed's engines

        healing.check_ranks(None)
    attention_modules = find_attention(model, include, exclude)
    new = {name: make_attention(module, num_features, window) for name, module in attention_modules.modules.items()}
    replacement: Replacement = {
        module: convert_attention(module, new[name]) for name, module in attention_modules.modules.items()
    }
    _check_convertible(attention_modules)
    notes, healed, write_, speedup, error = list(attention_modules.notes), None, None, None, None
    seed = check_seed(seed)
    results = _LearningResults()
    if calibration is not None:
        with torch.inference_mode(False), torch.enable_grad():
            runner = Runner(model, calibration, forward_fn, mask_fn, None, progress)
            with runner.calibrating(seed):
                learn = partial(fit, steps=steps, learning_rate=learning_rate, seed=seed)
                results = _learn(runner, replacement, new, learn, max_error, samples_memory_bytes, window, seed)
                for name in results.reasons:
                    del replacement[attention_modules.modules[name]], new[name]
                _check_convertible(attention_modules, results.reasons)
                (error,) = runner.errors([partial(replace_modules, model, replacement)], "error")
                speedup = model_speed(runner, replacement)[1] if measure_speed else None
            _cast(replacement, new)
            if heal is not None:
                healed, write_ = healing.heal(runner, replacement, heal, seed=seed)
                if healed.diverged:
                    notes.append(f"healing diverged and ended at step {healed.steps}: use a lower learning_rate")
    else:
        _cast(replacement, new)
    kinds = {name: type(module).__name__ for name, module in attention_modules.modules.items()}
    report = LinearizationReport(
        layers=tuple(
            LinearizedLayer(
                name, kinds[name], attention.num_heads, attention.head_dim, results.causal.get(name),
                **(vars(results.quality[name]) if name in results.quality else {}),
            )
            for name, attention in new.items()
        ),
        skipped=(*attention_modules.skipped, *(SkippedLayer(n, kinds[n], reason) for n, reason in
        results.reasons.items())), num_features=num_features, window=window, notes=tuple(notes), measured_error=error,
        healed=healed, measured_speedup=speedup, length=results.length, passes=results.passes, fit_s=results.fit_s,
        seed=seed,
    )  # fmt: skip
    # Last, and only assignments: any earlier failure leaves the model unchanged.
    if write_ is not None:
        write_()
    swap_modules(model, replacement)
    layers_replaced(model)
    return report


class _LearningResults:
    """The results of learning, by the names of the modules."""

    def __init__(self) -> None:
        self.quality: dict[str, Quality] = {}
        self.reasons: dict[str, str] = {}  # why a module keeps its softmax
        self.causal: dict[str, bool] = {}
        self.length: int | None = None
        self.passes, self.fit_s = 0, 0.0


def _learn(
    runner: Runner, replacement: Replacement, new: dict[str, LearnedLinearAttention], learn: Callable[..., None],
    max_error: float | None, memory: int, window: int, seed: int,
) -> _LearningResults:  # fmt: skip
    results = _LearningResults()

    def recorded(batches: Sequence[Any], keep: Sequence[str], description: str) -> dict[str, Recorder]:
        with replace_modules(runner.model, replacement):
            recorders = record(runner, batches, new, keep, window, description)
        for name, recorder in recorders.items():
            if recorder.refusal is not None:
                results.reasons.setdefault(name, recorder.refusal)
        return recorders

    first = recorded(runner.batches[:1], (), "survey")
    results.length = max((recorder.longest for recorder in first.values()), default=None)
    for name, recorder in first.items():
        if not recorder.calls and recorder.refusal is None:
            results.reasons[name] = "is not called on the first calibration batch"
    count = len(runner.batches) + len(runner.held_out)
    sizes = {name: recorder.bytes * count for name, recorder in first.items() if name not in results.reasons}
    for number, group in enumerate(split_layers(sizes, memory)):
        training = recorded(runner.batches, group, f"recording {number + 1}")
        held_out = recorded(runner.held_out, group, f"recording {number + 1}")
        results.passes += 1
        begin = time.perf_counter()
        for name in runner.over([each for each in group if each not in results.reasons], "learning"):
            samples, checks = training[name].samples, held_out[name].samples
            if not samples or not checks:
                results.reasons[name] = (
                    f"has no keys beyond the window: its sequences have at most {training[name].longest} positions and "
                    f"the window reaches over {3 * window}"
                )
                continue
            learn(new[name], samples)
            results.quality[name] = quality(new[name], checks, seed)
            results.causal[name] = samples[0].causal
            error = results.quality[name].error
            if not all(parameter.isfinite().all() for parameter in new[name].parameters()):
                results.reasons[name] = "has features that diverged: use a lower learning_rate"
            elif max_error is not None and not error <= max_error:
                results.reasons[name] = f"has an error of {error:.3g}, above max_error={max_error}"
            samples.clear()
            checks.clear()
        results.fit_s += time.perf_counter() - begin
    return results


def _cast(replacement: Replacement, new: dict[str, LearnedLinearAttention]) -> None:
    """Convert the learned parameters to the dtype and ``requires_grad`` flag of the old module's parameters."""
    for (old, _), attention in zip(replacement.items(), new.values(), strict=True):
        first = next((p for p in old.parameters() if p.is_floating_point()), None)
        if first is not None:
            attention.to(first.dtype).requires_grad_(first.requires_grad)


def _check_convertible(attention_modules: AttentionModules, reasons: dict[str, str] | None = None) -> None:
    """Raise CompressionError if there is no attention module to convert."""
    reasons = reasons or {}
    if len(reasons) == len(attention_modules.modules):
        refused = [*attention_modules.skipped, *(SkippedLayer(name, "", reason) for name, reason in reasons.items())]
        reasons_text = "; ".join(f"{entry.name!r} {entry.reason}" for entry in refused[:3])
        raise CompressionError(
            "no attention of the model can be converted"
            + (f": {reasons_text}" if refused else ", which has no attention known")
        )
