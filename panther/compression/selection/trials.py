"""Make the new layers of choices, and measure them in the model.

Trials measure the error of the output with all weights changed, and with one weight changed. ``measure`` compares the
new layers with the layers that they replace.
"""

__all__ = ["Measured", "Trials", "convert_all", "convert_target", "measure", "model_speed"]

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.batches import ScoreFill, copy_batch, counted
from panther.compression.calibration.runner import Runner, relative_error, return_freed_memory, row_blocks, squares
from panther.compression.calibration.steps import Receive, Step, hooked, watched
from panther.compression.calibration.targets import Further, Survey, Target, replace_modules
from panther.compression.forms import Choice, Fits, Option, Options, Replacement, form_named
from panther.compression.forms.low_rank import convert_seeded
from panther.compression.selection.timing import compare_speed, speed_of
from panther.errors import CompressionError


def convert_all(
    survey: Survey,
    fits: Fits,
    choice: Choice,
    seed: int,
    stored: Callable[[Replacement], Replacement] = lambda layers: layers,
) -> Replacement:
    """Make the new layers of the chosen forms: fitted ones, or seeded sketches where nothing was fitted.

    ``stored`` returns the layers of a weight as they are kept.
    """
    new: Replacement = {}
    for target, target_seed in survey.seeds(seed).items():
        new |= stored(convert_target(target, fits, choice[target], target_seed))
    return new


def convert_target(target: Target, fits: Fits, option: Option, seed: int) -> Replacement:
    """Make the new layers of one weight; ``seed`` is the seed of this weight, not the call's."""
    if target in fits.fits:
        return form_named(option.form).convert(target, option, fits.fits[target], fits.settings, seed)
    return {} if option.rank is None else convert_seeded(target, 1, option.rank // 2, "random", seed)


# Losses of single layers are means over this number of pairs of a sample and a direction, with a relative standard
# deviation of 0.13. Four directions of a batch of 32 sentences cost 12 forwards, where one forward for each layer of an
# encoder of 36 layers cost 36; both kinds of losses differed by a factor of 1.15 (the standard deviation of logarithms)
# from the ones of other batches.
_PAIRS = 128
_DIRECTIONS = 4  # of a batch
_MOST_PASSES = 32
# A measurement corrects a prediction by at most this factor, up or down, because a batch may not reach a layer at all,
# as in a mixture of experts.
_LARGEST_RATIO = 8.0

# Target, form, rank and width of a layer.
_Key = tuple[Target, str, int | None, int | None]


class Trials:
    """Measurements of choices, which are made once for each choice, with layers that are made once for each option."""

    def __init__(self, runner: Runner, survey: Survey, fits: Fits, seed: int) -> None:
        self._runner, self._fits, self._seed = runner, fits, seed
        self._seeds = survey.seeds(seed)
        self._layers: dict[_Key, Replacement] = {}
        self._errors: dict[tuple[_Key, ...], float] = {}
        self._ratios: dict[Target, float] | None = None

    def errors(self, choices: Sequence[Choice], description: str = "error of forms") -> list[float]:
        """Return the relative error of the output on the held-out batches with each choice."""
        keys = [tuple(_keys(choice)) for choice in choices]
        new = {key: choice for key, choice in zip(keys, choices, strict=True) if key not in self._errors}
        if new:
            self._make(new.values())
            variants = [
                partial(replace_modules, self._runner.model, self._replacement(choice)) for choice in new.values()
            ]
            errors = self._runner.remembered(
                self._name_of("errors", new.values()), lambda: self._runner.errors(variants, description)
            )
            self._errors |= zip(new, errors, strict=True)
        return [self._errors[key] for key in keys]

    def corrected(self, options: Options, choice: Choice) -> Options:
        """Return the options, with losses multiplied by measured / predicted loss of each layer.

        The losses of ``choice`` are measured; a second call uses the measurements of the first one. Predictions assume
        that a layer's inputs and gradients are independent, and that positions are. In a sentence encoder, measured
        losses of single layers were 0.4 times (values of attention) to 2.6 times (queries of the first block) the
        predicted ones.
        """
        if self._ratios is None:
            self._ratios = {}
            changed = {target: option for target, option in choice.items() if option.loss > 0}
            name = self._name_of("losses", [changed])
            losses = self._runner.remembered(name, lambda: self._losses(changed, name))
            for target, loss in losses.items():
                ratio = loss / choice[target].loss
                self._ratios[target] = min(max(ratio, 1 / _LARGEST_RATIO), _LARGEST_RATIO)
        ratios = self._ratios
        return {
            target: [replace(option, loss=option.loss * ratios.get(target, 1.0)) for option in target_options]
            for target, target_options in options.items()
        }

    def _name_of(self, kind: str, choices: Iterable[Choice]) -> str:
        """Return a name of measurements of choices, which other choices or fits do not have."""
        keys = [[(target.name, *option) for target, *option in _keys(choice)] for choice in choices]
        digest = hashlib.blake2b(repr((self._fits.ridge, keys)).encode(), digest_size=16)
        return f"{kind}-{digest.hexdigest()}"

    def _make(self, choices: Collection[Choice]) -> None:
        """Make the layers of the choices, and drop all others."""
        needed = dict.fromkeys(key for choice in choices for key in _keys(choice))
        self._layers = {key: layers for key, layers in self._layers.items() if key in needed}
        for choice in choices:
            for key, (target, option) in zip(_keys(choice), choice.items(), strict=True):
                if key not in self._layers:
                    layers = convert_target(target, self._fits, option, self._seeds[target])
                    self._layers[key] = self._runner.kept(layers)
        return_freed_memory()  # of conversions

    def _replacement(self, choice: Choice) -> Replacement:
        return {module: layer for key in _keys(choice) for module, layer in self._layers[key].items()}

    def _losses(self, choice: Choice, name: str) -> dict[Target, float]:
        r"""Return the squared effect of each weight alone on the output, as a share of the output's squared norm.

        To first order, a change :math:`\delta` of a layer's output changes the model's output by :math:`J \delta`.
        With the gradient :math:`g = J^T r` of a normal direction r, the squares of :math:`g^T \delta` of the samples
        have the mean :math:`\lVert J \delta \rVert^2`. A backward pass measures all layers, so the cost is linear in
        their number. Samples are the entries of the output's first dimension. Weights that no batch reaches are left
        out.
        """
        self._make([choice])
        new, passes, targets = self._replacement(choice), self._passes(), list(choice)
        most = max((self._runner.num_samples(batch) for batch, _ in passes), default=0)
        # Allocated now: small tensors that live between activations would keep malloc from joining freed blocks.
        products = torch.zeros(len(targets), len(passes), most, dtype=torch.float64)
        sums = torch.zeros(len(targets) + 1, 2, dtype=torch.float64)  # squares and numbers of calls; last, the output's
        after, (products, sums) = self._runner.progress_of(name) or (None, (products, sums))
        rows = dict(zip(targets, zip(products, sums, strict=False), strict=True))
        for step in self._runner.steps(passes, targets, gradients=True, description="losses of layers", after=after):
            self._add_step(step, new, rows, sums[-1])
            if step.number == len(passes) - 1:
                self._runner.save_progress(name, step.part, (products, sums))
        sums[:-1, 0] = products.square().sum((1, 2))
        self._runner.sum_([sums])
        energy = sums[-1, 0].item()
        squares_and_calls = zip(targets, sums[:-1].tolist(), strict=True)
        return {target: total / energy for target, (total, calls) in squares_and_calls if calls and energy > 0}

    def _passes(self) -> list[tuple[Any, int]]:
        """Return batches, each with the seed of a direction: those of this rank among the first ones of all ranks."""
        runner = self._runner
        counts = runner.gathered([runner.num_samples(batch) for batch in runner.batches[:_MOST_PASSES]])
        numbers = [(rank, number) for rank, rank_counts in enumerate(counts) for number in range(len(rank_counts))]
        passes: list[tuple[Any, int]] = []
        num_pairs = 0
        repeated = ((rank, number) for rank, number in numbers for _ in range(_DIRECTIONS))
        for direction, (rank, number) in enumerate(islice(repeated, _MOST_PASSES)):
            if num_pairs >= _PAIRS:
                break
            if rank == runner.rank:
                passes.append((runner.batches[number], self._seed + direction))
            num_pairs += counts[rank][number]
        return passes

    def _add_step(
        self, step: Step, new: Replacement, rows: Mapping[Target, tuple[Tensor, Tensor]], energy: Tensor
    ) -> None:
        """Add to each target's products, (passes, samples), and its number of calls, and to the output's squares."""
        num_samples = self._runner.num_samples(step.batch)

        def note(target: Target, module: nn.Module, x: Tensor, further: Further) -> Receive:
            x, (args, kwargs) = x.clone(), further  # a clone, because the model may write to its inputs

            def receive(gradient: Tensor) -> None:
                # The calls of experts name the tokens that their rows are.
                tokens, num_tokens = target.kind.tokens_of(further) or (None, 0)
                axis = _sample_axis(gradient, num_samples) if tokens is None else 0
                if axis is None or num_tokens % max(num_samples, 1):
                    return
                num_rows = num_samples if tokens is None else len(gradient)
                with torch.no_grad():
                    # `forward`, because calling the module would call this hook again.
                    change = new[module](x, *args, **kwargs) - module.forward(x, *args, **kwargs)
                    product = (change.to(torch.float32) * gradient).movedim(axis, 0).reshape(1, num_rows, -1)
                    del change
                    sums = torch.cat([block[0].sum(1, dtype=torch.float64) for block in row_blocks(product)])
                    if tokens is not None:
                        samples = tokens // (num_tokens // num_samples)
                        sums = sums.new_zeros(num_samples).index_add_(0, samples, sums)
                products, sums_and_calls = rows[target]
                products[step.number, :num_samples] += sums.cpu()
                sums_and_calls[1] += 1

            return receive

        with watched(step.targets, note, self._runner.model) as watch, torch.enable_grad():
            output = step.forward()
            if output is not None:
                if output.dim() and len(output) != num_samples:
                    raise CompressionError(
                        f"a second output of the original model has {len(output)} samples, where the first one has "
                        f"{num_samples}: return in forward_fn a tensor whose shape does not depend on values"
                    )
                counted_output = counted(output.detach(), self._runner.mask(step.batch))
                energy[0] += squares(ScoreFill.of(counted_output).scores(counted_output))
            step.backward(output, watch)


def _sample_axis(output: Tensor, num_samples: int) -> int | None:
    """Return the dimension of a layer's output that has the samples, alone or as the outer part; None if there is none.

    The dimension is the first but the last one with the right size. Rows of all samples may also follow each other. An
    output that is not divided into samples can have such sizes by chance. The loss of its layer is then wrong by up to
    the largest ratio, and the choice that this makes is used only if its held-out error is smaller.
    """
    sizes = output.shape[:-1]
    if num_samples in sizes:
        return sizes.index(num_samples)
    return 0 if sizes and num_samples and sizes[0] % num_samples == 0 else None


def _keys(choice: Choice) -> Iterator[_Key]:
    return ((target, option.form, option.rank, option.bits) for target, option in choice.items())


_MODEL_S = 2.0  # time for measuring the speed of the model, unless three rounds take longer


@dataclass(frozen=True)
class Measured:
    """Measurements on the held-out batches; empty without calibration.

    Errors are relative, of the model's output and of the outputs of each target's layers (None for a target that was
    never called). Seconds are those of the new model and layers for the first held-out batch.
    """

    error: float | None = None
    errors: Mapping[Target, float | None] = field(default_factory=dict)
    speedup: float | None = None
    latency_s: float | None = None
    speedups: Mapping[Target, float] = field(default_factory=dict)
    times: Mapping[Target, float] = field(default_factory=dict)


def measure(runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool) -> Measured:
    """Measure errors, and speed if ``speed``, on the held-out batches; without such batches, nothing is measured."""
    if not runner.held_out:
        return Measured()
    replaced = [target for target in targets if target.modules[0] in replacement]
    (error,) = runner.errors([partial(_all_replaced, runner.model, replaced, replacement)], "error")
    errors, timings = _measure_layers(runner, replaced, replacement, speed=speed)
    errors = {target: errors.get(target, 0.0) for target in targets}
    dense_s, speedup = model_speed(runner, replacement) if speed and replacement else (None, None)
    return Measured(
        error,
        errors,
        speedup,
        dense_s / speedup if dense_s and speedup else None,
        {target: ratio for target, (ratio, _) in timings.items()},
        {target: seconds for target, (_, seconds) in timings.items()},
    )


@contextmanager
def _all_replaced(model: nn.Module, targets: Sequence[Target], replacement: Replacement) -> Iterator[None]:
    """Put the new layers into the model within the block, and raise if an old layer is still called."""

    def refuse(target: Target, *_: Any) -> None:
        raise CompressionError(
            f"layer {target.name!r} is also called from a place where it is not registered, such as a plain list, and "
            "cannot be replaced there: use an nn.ModuleList, or exclude the layer"
        )

    with replace_modules(model, replacement), hooked(targets, refuse):
        yield


@torch.no_grad()
def _measure_layers(
    runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool
) -> tuple[dict[Target, float | None], dict[Target, tuple[float, float]]]:
    """Compare each new layer with its old layer on the same input in the original model.

    Return the relative error of each target, and the speed-up and seconds of targets that were called.
    """
    sums = torch.zeros(len(targets), 2, dtype=torch.float64)
    sums_of = dict(zip(targets, sums, strict=True))  # squares of the error and of the output
    timings: dict[Target, tuple[float, float]] = {}

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor, further: Further) -> None:
        new, (args, kwargs) = replacement[module], further
        of = masks if target.kind.reads_positions else None
        sums_of[target][0] += squares(counted(new(x, *args, **kwargs) - output, of, module))
        sums_of[target][1] += squares(counted(output, of, module))
        if speed and target not in timings:
            old_s, speedup = speed_of(target, module, new, x, further)
            timings[target] = speedup, old_s / speedup

    with hooked(targets, hook, masks_of=lambda: masks):
        for batch in runner.over(runner.held_out, "layers' errors"):
            masks = runner.mask(batch)
            runner.output(batch)
    runner.sum_([sums])
    figures = zip(targets, sums.tolist(), strict=True)
    return {target: relative_error(lost, total) if total else None for target, (lost, total) in figures}, timings


@torch.no_grad()
def model_speed(runner: Runner, replacement: Replacement) -> tuple[float, float]:
    """Return the model's seconds for the first held-out batch, and how many times faster it is with new layers.

    Both are means over the ranks of the group.
    """

    def run() -> None:
        runner.plain_output(copy_batch(runner.held_out[0]))  # a forward may write to its batch

    with runner.fast_paths():
        figures = compare_speed(run, run, runner.device, _MODEL_S, partial(replace_modules, runner.model, replacement))
    table = torch.tensor(figures, dtype=torch.float64)
    runner.mean_([table])
    dense_s, speedup = table.tolist()
    return dense_s, speedup
