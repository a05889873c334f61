"""Trials of choices in the model: the error of its output with all weights changed, and with one weight changed."""

__all__ = ["Trials", "batches_of_losses"]

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import ScoreFill, counted
from panther.compression.calibration.runner import Runner, return_freed_memory, row_blocks, squares
from panther.compression.calibration.steps import Receive, Step
from panther.compression.calibration.survey import watched
from panther.compression.calibration.targets import Further, Survey, Target, replace_modules
from panther.compression.forms import Choice, Fits, Options, Replacement
from panther.compression.forms.conversion import convert_target

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
    """Measurements of choices, which are made once for each choice, with layers that are made once for each option.

    Args:
        runner: The model and its batches.
        survey: Its layers.
        fits: Fits of all weights; empty for seeded sketches.
        seed: Seed of sketches and random directions.
    """

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
        their number. Samples are the entries of the output's first dimension. Weights that no batch reaches, or whose
        outputs in the first batch are not divided into samples, are left out.
        """
        self._make([choice])
        new, passes = self._replacement(choice), self._passes()
        after, saved = self._runner.progress_of(name) or (None, None)
        if saved is None:
            undivided = self._undivided(list(choice))
            targets = [target for target in choice if target not in undivided]
            most = max((self._runner.num_samples(batch) for batch, _ in passes), default=0)
            # Allocated now: small tensors that live between activations would keep malloc from joining freed blocks.
            products = torch.zeros(len(targets), len(passes), most, dtype=torch.float64)
            # Squares and numbers of calls; last, those of the output.
            saved = targets, products, torch.zeros(len(targets) + 1, 2, dtype=torch.float64)
        targets, products, sums = saved
        rows = dict(zip(targets, zip(products, sums, strict=False), strict=True))
        for step in self._runner.steps(passes, targets, gradients=True, description="losses of layers", after=after):
            self._add_step(step, new, rows, sums[-1])
            if step.number == len(passes) - 1:
                self._runner.save_progress(name, step.part, saved)
        sums[:-1, 0] = products.square().sum((1, 2))
        self._runner.sum_([sums])
        energy = sums[-1, 0].item()
        squares_and_calls = zip(targets, sums[:-1].tolist(), strict=True)
        return {target: total / energy for target, (total, calls) in squares_and_calls if calls and energy > 0}

    def _undivided(self, targets: Sequence[Target]) -> set[Target]:
        """Return the targets whose outputs in the first batch are not divided into samples.

        Sizes alone do not tell: a table of positions can have as many rows as the batch has samples, or a multiple. The
        output of one sample is therefore sent back, and no gradient may be outside of this sample.
        """
        undivided: set[Target] = set()
        num_samples = sample = 0

        def note(target: Target, module: nn.Module, x: Tensor, further: Further) -> Receive | None:
            def receive(gradient: Tensor) -> None:
                if (axis := _sample_axis(gradient, num_samples)) is None:
                    undivided.add(target)
                    return
                is_reached = gradient.movedim(axis, 0).reshape(num_samples, -1).any(1)
                is_reached[sample] = False
                if is_reached.any():
                    undivided.add(target)

            return receive if target.kind.tokens_of(further) is None else None

        for step in self._runner.steps([(self._runner.batches[0], self._seed)], targets, gradients=True):
            with watched(step.targets, note, self._runner.model) as watch, torch.enable_grad():
                output = step.forward()
                if output is not None:
                    if output.dim() == 0 or len(output) < 2:
                        continue
                    num_samples, sample = len(output), len(output) // 2
                    is_sample = torch.arange(num_samples, device=output.device) == sample
                    output = torch.where(is_sample.view(-1, *[1] * (output.dim() - 1)), output, output.detach())
                step.backward(output, watch)
        flags = torch.tensor([target in undivided for target in targets], dtype=torch.float64)
        self._runner.sum_([flags])
        return {target for target, flag in zip(targets, flags.tolist(), strict=True) if flag}

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
                counted_output = counted(output.detach(), self._runner.mask(step.batch))
                energy[0] += squares(ScoreFill.of(counted_output).scores(counted_output))
            step.backward(output, watch)


def batches_of_losses(runner: Runner) -> list[Any]:
    """Return the batch of each pass that measures losses, as far as all batches have as many samples as the first."""
    num_passes = min(_MOST_PASSES, -(-_PAIRS // max(runner.num_samples(runner.batches[0]), 1)))
    return [batch for batch in runner.batches for _ in range(_DIRECTIONS)][:num_passes]


def _sample_axis(output: Tensor, num_samples: int) -> int | None:
    """Return the dimension of a layer's output that has the samples, alone or as the outer part; None if there is none.

    The dimension is the first but the last one with the right size. Rows of all samples may also follow each other. An
    output that is not divided into samples can have such sizes by chance; ``Trials._undivided`` finds these.
    """
    sizes = output.shape[:-1]
    if num_samples in sizes:
        return sizes.index(num_samples)
    return 0 if sizes and num_samples and sizes[0] % num_samples == 0 else None


def _keys(choice: Choice) -> Iterator[_Key]:
    return ((target, option.form, option.rank, option.bits) for target, option in choice.items())
