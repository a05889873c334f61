r"""A module whose parameters are the tensors that healing trains, and whose output is the loss against the original.

With :math:`h` a hidden state or output of the compressed model at the counted positions, and :math:`h^*` the same
tensor of the original model, the loss of a tensor is the share of its variance that is lost,

.. math:: \ell(h) = \frac{\mathrm{mean} \, |h - h^*|^2}{\mathrm{var} \, h^*},

and the loss of a batch is the mean of :math:`\ell` over the blocks' outputs plus :math:`\ell` of the model's output.

Reference: X. Jiao et al., "TinyBERT: distilling BERT for natural language understanding", 2020, arXiv:1909.10351.
"""

__all__ = ["Distillation", "lost_variance"]

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import parameters_of, refresh_flat_weights
from panther.compression.calibration.batches import entries_of
from panther.compression.calibration.masks import Masks, ScoreFill, counted
from panther.compression.calibration.runner import Runner, floating_tensor
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import replace_modules, swap_modules
from panther.compression.config import HealConfig
from panther.compression.forms import Replacement
from panther.nn.quantized.state import train_scales_


class Distillation(nn.Module):
    """The original and the compressed model in one module tree; called with the index of a batch, it returns the loss.

    Scales of quantized layers are trained relative to themselves, by ``train_scales_``, until :meth:`write_`.

    Indices from ``len(runner.batches)`` on mean held-out batches. The trained tensors are float32 copies of the
    parameters (float64 copies of float64 parameters), so that parameters of half precision can be trained, and neither
    the values nor the flags of the model change before :meth:`write_`. The model is not a submodule, so that
    checkpoints, gradients and their exchange between ranks involve the copies only.

    Attributes:
        trained: The parameters to train, by their names in the compressed model.
        kept_bytes: Bytes that :meth:`keep` predicted for the outputs of the original that are kept.
        scaled: Whether the Trainer has to scale the loss, because gradients in float16 overflow and underflow.
    """

    def __init__(self, runner: Runner, replacement: Replacement, config: HealConfig, seed: int) -> None:
        super().__init__()
        self.runner, self.seed, model = runner, seed, runner.model
        self.batches = [*runner.batches, *runner.held_out]
        self._new, self._old = replacement, {new: old for old, new in replacement.items()}
        self._quantized: list[Any] = [layer for layer in replacement.values() if hasattr(layer, "train_scales_")]
        train_scales_(self._quantized)
        factors = {parameter for layer in replacement.values() for parameter in layer.parameters()}
        trains_all = config.train == "all"
        with replace_modules(model, replacement):
            parameters = model.named_parameters()
            self.trained = {name: p for name, p in parameters if p in factors or (trains_all and p.requires_grad)}
            index = {parameter: number for number, parameter in enumerate(self.trained.values())}
            self._parameters_at = [  # all places of each parameter, because a parameter can be shared
                (parameters_of(module), name, index[parameter])
                for module in model.modules()
                for name, parameter in parameters_of(module).items()
                if parameter is not None and parameter in index
            ]
        self.values = nn.ParameterList(
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in index
        )
        self.scaled = any(p.dtype is torch.float16 for p in index)
        # The Trainer scales the loss only under autocast. Without mixed_precision, forward turns autocast off again.
        self._autocast = not self.scaled or config.mixed_precision is not None
        # Recurrent modules such as nn.GRU also read their weights from a list, which has to be refreshed.
        self._rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._blocks = blocks_of(model, set(replacement)) if config.match == "hidden" else []
        self._kept: dict[int, list[list[Tensor]]] = {}  # outputs of the original model, by the index of the batch
        self._remaining_bytes = self.kept_bytes = 0

    def keep(self, limit: int) -> None:
        """Keep the outputs of the original model and of its blocks, instead of computing them in each step.

        Outputs of as many batches as fit into ``limit`` bytes are kept, beginning with the held-out batches, which are
        read first.
        """
        # The sizes of the remaining outputs are predicted from the output of one batch, in proportion to the inputs.
        # That output is not kept, because the Trainer may compute it under autocast.
        size = _bytes(self._run_original(first := len(self.runner.batches)))
        entries = [entries_of(batch) for batch in self.batches]
        self._remaining_bytes, self.kept_bytes = limit, min(size * sum(entries) // max(entries[first], 1), limit)

    def place(self, *, student: bool) -> None:
        """Put the new layers and trained values into the model, or restore the original layers and parameters."""
        swap_modules(self.runner.model, self._new if student else self._old)
        # The cast is differentiable, so that gradients reach the float32 copies.
        pairs = zip(self.values, self.trained.values(), strict=True)
        values = [value.to(p.device, p.dtype) if student else p for value, p in pairs]
        for parameters, name, number in self._parameters_at:
            # nn.Module's setattr would refuse a tensor that is not a Parameter; torch.func.functional_call does the
            # same.
            parameters[name] = values[number]
        for rnn in self._rnns:
            refresh_flat_weights(rnn)

    @contextmanager
    def student(self) -> Iterator[None]:
        """Replace the original model by the compressed one within the block."""
        try:
            self.place(student=True)
            yield
        finally:
            self.place(student=False)

    @torch.no_grad()
    def write_(self) -> None:
        """Write the trained values to the parameters, and the scales' factors into the scales."""
        for parameter, value in zip(self.trained.values(), self.values, strict=True):
            parameter.copy_(value)
        train_scales_(self._quantized, train=False)

    def forward(self, index: Tensor) -> Tensor:  # (1,) -> ()
        """Return the loss on a batch."""
        batch = self.batches[int(index)]
        masks = self.runner.mask(batch)
        with nullcontext() if self._autocast else torch.autocast(self.runner.device.type, enabled=False):
            (target,), *targets = self._original_outputs(int(index))
            # The compressed model stays in place after the call, because activation checkpointing runs layers again in
            # the backward pass.
            self.place(student=True)
            (output,), *outputs = self._observe(batch)
            matched = [
                lost_variance(state, original, masks, block).to(output.device)
                for block, states, originals in zip(self._block_modules(), outputs, targets, strict=True)
                # Under routing, a block can have a different number of inputs in the compressed model.
                if [state.shape for state in states] == [original.shape for original in originals]
                for state, original in zip(states, originals, strict=True)
            ]
            loss = lost_variance(output, target, masks)
            return loss + torch.stack(matched).mean() if matched else loss

    @torch.no_grad()
    def _run_original(self, index: int) -> list[list[Tensor]]:
        """Return the outputs of the original model and of its blocks for a batch."""
        self.place(student=False)
        return self._observe(self.batches[index])

    def _original_outputs(self, index: int) -> list[list[Tensor]]:
        """Return the outputs of the original model for a batch: the kept ones if there are any, or computed ones."""
        if index in self._kept:
            return self._kept[index]
        outputs = self._run_original(index)
        if (size := _bytes(outputs)) > self._remaining_bytes:
            return outputs
        self._remaining_bytes -= size
        # Copies, because a view would keep its base in memory, and a later forward could write to a buffer.
        self._kept[index] = [[state.clone() for state in states] for states in outputs]
        return self._kept[index]

    def _block_modules(self) -> list[nn.Module]:
        return [parent.get_submodule(name) for parent, name in self._blocks]

    def _observe(self, batch: Any) -> list[list[Tensor]]:
        """Return a list that holds the model's output, followed by the list of each block's outputs, one per call."""
        blocks = self._block_modules()
        block_outputs: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}

        def observe(module: nn.Module, _: Any, output: Any) -> None:
            if (first := floating_tensor(output)) is not None:
                block_outputs[module].append(first)

        with ExitStack() as hooks:
            for block in block_outputs:
                hooks.callback(block.register_forward_hook(observe).remove)
            output = self.runner.output(batch)
        return [[output], *(block_outputs[block] for block in blocks)]


def _bytes(outputs: list[list[Tensor]]) -> int:
    return sum(state.nbytes for states in outputs for state in states)


def lost_variance(state: Tensor, original: Tensor, masks: Masks | None, module: nn.Module | None = None) -> Tensor:
    """Return the mean square of ``state - original`` over the variance of ``original``, at the positions that count.

    ``module`` is the block that returned ``state`` and ``original``; None is the model.

    The variance over the positions is averaged over the features, so that a value shared by all positions does not
    count.
    """
    if original.dim() > 3 and (masks is None or masks.rows(original, module) is None):  # (N, C, ...)
        state, original = state.movedim(1, -1), original.movedim(1, -1)
    dtype = torch.promote_types(original.dtype, torch.float32)
    state, original = (
        counted(state, masks, module).to(dtype),
        counted(original, masks, module).to(dtype),
    )  # (positions, features)
    if module is None:
        fill = ScoreFill.of(original)
        state, original = fill.replaced(state), fill.replaced(original)
    positions, features = original.shape
    count = max(positions * features, 1)
    centred = original - (original.mean(0) if positions > 1 else original.mean())
    variance = centred.square().sum() / max((positions - 1) * features, features, 1)
    square = original.square().sum() / count
    square = torch.where(square > 0, square, 1.0)
    # Without variation, the loss is relative to the mean square instead.
    variance = torch.where(variance > 1e-6 * square, variance, square)
    return (state - original).square().sum() / count / variance
