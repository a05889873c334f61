r"""A module whose parameters are those that healing trains, and whose output is the loss against the original.

With :math:`h` the compressed model's hidden state or output at the counted positions and :math:`h^*` the original's,
one tensor costs the share of its variance that is lost,

.. math:: \ell(h) = \frac{\mathrm{mean} \, |h - h^*|^2}{\mathrm{var} \, h^*},

and a batch costs the mean of :math:`\ell` over the blocks' outputs plus :math:`\ell` of the model's output.

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
from panther.compression.calibration.masks import Masks, counted
from panther.compression.config import HealConfig
from panther.compression.conversion import Replacement
from panther.compression.runner import Runner, floating_tensor
from panther.compression.survey import blocks_of
from panther.compression.targets import replace_modules, swap_modules
from panther.nn.quantized.state import QuantizedState, train_scales_


class Distillation(nn.Module):
    """The original and the compressed model in one module tree; called with the index of a batch, it returns the loss.

    Scales of quantized layers are trained relative to themselves, by ``train_scales_``, until :meth:`write_`.

    Indices from ``len(runner.batches)`` on are those of held-out batches. The trained tensors are float32 copies of the
    parameters (of float64 ones in float64), so that parameters of half precision can be trained, and neither the values
    nor the flags of the model change before :meth:`write_`. The model is not a submodule: checkpoints, gradients and
    their exchange between ranks are of the copies only.

    Attributes:
        trained: The parameters to train by their names in the compressed model.
        kept_bytes: Bytes for outputs of the original that are kept, as :meth:`keep` predicted them.
        scaled: Whether the Trainer has to scale the loss, as the gradients of float16 overflow and underflow.
    """

    def __init__(self, runner: Runner, replacement: Replacement, config: HealConfig, seed: int) -> None:
        super().__init__()
        self.runner, self.seed, model = runner, seed, runner.model
        self.batches = [*runner.batches, *runner.held_out]
        self._new, self._old = replacement, {new: old for old, new in replacement.items()}
        self._quantized = [layer for layer in replacement.values() if isinstance(layer, QuantizedState)]
        train_scales_(self._quantized)
        factors = {parameter for layer in replacement.values() for parameter in layer.parameters()}
        every = config.train == "all"
        with replace_modules(model, replacement):
            named = model.named_parameters()
            self.trained = {name: p for name, p in named if p in factors or (every and p.requires_grad)}
            index = {parameter: number for number, parameter in enumerate(self.trained.values())}
            self._parameters_at = [  # every place, because a parameter can be shared
                (parameters_of(module), name, index[parameter])
                for module in model.modules()
                for name, parameter in parameters_of(module).items()
                if parameter is not None and parameter in index
            ]
        self.values = nn.ParameterList(
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in index
        )
        self.scaled = any(p.dtype is torch.float16 for p in index)
        # The Trainer scales under autocast alone; where no mixed precision was asked for, the forward turns that off.
        self._autocast = not self.scaled or config.mixed_precision is not None
        # nn.GRU and the like read their weights from a list besides `_parameters`.
        self._rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._blocks = blocks_of(model, set(replacement)) if config.match == "hidden" else []
        self._kept: dict[int, list[list[Tensor]]] = {}  # what the original gives, by the index of the batch
        self._left = self.kept_bytes = 0

    def keep(self, limit: int) -> None:
        """Keep what the original gives, its output and those of its blocks, in place of computing it in each step.

        As many batches as fit into ``limit`` bytes are kept, held-out ones first, because they are read first.
        """
        # The sizes of the remaining outputs are predicted from the output of one batch, in proportion to the inputs.
        # That output is not kept, because the Trainer may compute it under autocast.
        size = _bytes(self._original(first := len(self.runner.batches)))
        entries = [entries_of(batch) for batch in self.batches]
        self._left, self.kept_bytes = limit, min(size * sum(entries) // max(entries[first], 1), limit)

    def place(self, *, student: bool) -> None:
        """Put the new layers and the trained values into the model, or the original layers and parameters back."""
        swap_modules(self.runner.model, self._new if student else self._old)
        # With the gradient of the float32 copies.
        pairs = zip(self.values, self.trained.values(), strict=True)
        values = [value.to(p.device, p.dtype) if student else p for value, p in pairs]
        for parameters, name, number in self._parameters_at:
            # Past nn.Module's setattr, which takes only a Parameter here; torch.func.functional_call does the same.
            parameters[name] = values[number]
        for rnn in self._rnns:
            refresh_flat_weights(rnn)

    @contextmanager
    def student(self) -> Iterator[None]:
        """Put the compressed model in the place of the original for a while."""
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
            (target,), *targets = self._wanted(int(index))
            # It stays until the next call, because layers under activation checkpointing run again in backward.
            self.place(student=True)
            (output,), *outputs = self._observe(batch)
            matched = [
                lost_variance(state, wanted, masks, block).to(output.device)
                for block, states, wanteds in zip(self._block_modules(), outputs, targets, strict=True)
                if [state.shape for state in states] == [wanted.shape for wanted in wanteds]  # not so under routing
                for state, wanted in zip(states, wanteds, strict=True)
            ]
            loss = lost_variance(output, target, masks)
            return loss + torch.stack(matched).mean() if matched else loss

    @torch.no_grad()
    def _original(self, index: int) -> list[list[Tensor]]:
        """Return what the original gives for a batch."""
        self.place(student=False)
        return self._observe(self.batches[index])

    def _wanted(self, index: int) -> list[list[Tensor]]:
        """Return the same, kept or computed."""
        if index in self._kept:
            return self._kept[index]
        found = self._original(index)
        if (size := _bytes(found)) > self._left:
            return found
        self._left -= size
        # Copies: a view would keep all it is a view of, and a buffer could be written to.
        self._kept[index] = [[state.clone() for state in states] for states in found]
        return self._kept[index]

    def _block_modules(self) -> list[nn.Module]:
        return [parent.get_submodule(name) for parent, name in self._blocks]

    def _observe(self, batch: Any) -> list[list[Tensor]]:
        """Return the output, and the output of each call of each block."""
        blocks = self._block_modules()
        seen: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}

        def observe(module: nn.Module, _: Any, output: Any) -> None:
            if (first := floating_tensor(output)) is not None:
                seen[module].append(first)

        with ExitStack() as hooks:
            for block in seen:
                hooks.callback(block.register_forward_hook(observe).remove)
            output = self.runner.output(batch)
        return [[output], *(seen[block] for block in blocks)]


def _bytes(found: list[list[Tensor]]) -> int:
    return sum(state.nbytes for states in found for state in states)


def lost_variance(state: Tensor, wanted: Tensor, masks: Masks | None, module: nn.Module | None = None) -> Tensor:
    """Return the mean square of the difference over the variance of ``wanted``, at the positions that count.

    ``module`` is the block whose output both are; None for the model.

    The variance is that over positions, averaged over the features: a value that all positions share does not count.
    """
    if wanted.dim() > 3 and (masks is None or masks.rows(wanted, module) is None):  # (N, C, ...)
        state, wanted = state.movedim(1, -1), wanted.movedim(1, -1)
    dtype = torch.promote_types(wanted.dtype, torch.float32)
    state, wanted = (
        counted(state, masks, module).to(dtype),
        counted(wanted, masks, module).to(dtype),
    )  # (positions, features)
    positions, features = wanted.shape
    count = max(positions * features, 1)
    centred = wanted - (wanted.mean(0) if positions > 1 else wanted.mean())
    variance = centred.square().sum() / max((positions - 1) * features, features, 1)
    square = wanted.square().sum() / count
    square = torch.where(square > 0, square, 1.0)
    variance = torch.where(variance > 1e-6 * square, variance, square)  # nothing varies: against its size
    return (state - wanted).square().sum() / count / variance
