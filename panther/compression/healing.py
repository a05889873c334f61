"""Healing: a short run of the Trainer that distils the original into a compressed model, on unlabelled batches.

The parameters with the smallest held-out loss are kept, the ones before the first step included. Healing ends early if
it diverges, at a loss that is not finite, or a held-out loss above twice the best one.

Parameters differ in size by orders of magnitude, and AdamW moves every entry by about its learning rate. Unless the
user gives a rate, each parameter therefore has a rate relative to its size, as in N. Shazeer and M. Stern, "Adafactor",
ICML 2018, arXiv:1804.04235. Scales of quantized weights are trained as logarithms, so that their rate is relative too.
"""

__all__ = ["Distillation", "check_ranks", "heal", "lost_variance", "shuffled"]

import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from panther._process_settings import ignored_warnings
from panther._torch import parameters_of, refresh_flat_weights
from panther.compression.calibration.batches import Masks, ScoreFill, counted, floating_tensor
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import replace_modules, swap_modules
from panther.compression.config import HealConfig
from panther.compression.forms import Replacement
from panther.compression.report import HealResult
from panther.distributed import get_world_size
from panther.distributed.comm.agreement import agree, describe_settings, gather_objects
from panther.errors import CompressionError, DistributedError
from panther.nn.protocol import CompressedModule
from panther.nn.quantized.state import train_scales_
from panther.train import Callback, Trainer
from panther.train.trackers import ProgressLines


class Distillation(nn.Module):
    r"""The original and the compressed model in one module tree; called with the index of a batch, it returns the loss.

    With :math:`h` a hidden state or output of the compressed model at the counted positions, and :math:`h^*` the same
    tensor of the original model, the loss of a tensor is the share of its variance that is lost,

    .. math:: \ell(h) = \frac{\mathrm{mean} \, |h - h^*|^2}{\mathrm{var} \, h^*},

    and the loss of a batch is the mean of :math:`\ell` over the blocks' outputs plus :math:`\ell` of the model's output
    (X. Jiao et al., "TinyBERT: distilling BERT for natural language understanding", 2020, arXiv:1909.10351).

    Scales of quantized layers are trained relative to themselves, by ``train_scales_``, until :meth:`write_`.

    Indices from ``len(runner.batches)`` on mean held-out batches. The trained tensors are float32 copies of the
    parameters (float64 copies of float64 parameters), so that parameters of half precision can be trained, and neither
    the values nor the flags of the model change before :meth:`write_`. The model is not a submodule, so that
    checkpoints, gradients and their exchange between ranks involve the copies only.

    Attributes:
        trained: The parameters to train, by their names in the compressed model.
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
        self._remaining_bytes = 0

    def keep(self, limit: int) -> None:
        """Keep the outputs of the original model and of its blocks, instead of computing them in each step.

        Outputs of as many batches as fit into ``limit`` bytes are kept, beginning with the held-out batches, which are
        read first.
        """
        self._remaining_bytes = limit

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


_BETAS = (0.9, 0.95)  # after 200 steps, the loss was 2 to 6 % smaller than with 0.999 as the second number
# Learning rates relative to a parameter's root mean square, of low-rank factors and of all other parameters. The loss
# of a sentence encoder in half of its parameters went from 0.431 to 0.356 in 40 steps with 0.01 for all parameters, and
# to 0.472 with 0.03. In 3 bits it went from 0.0961 to 0.0887 in 60 steps with 0.003, and to 0.0903 with 0.01, because a
# scale moves an entire group of weights. With the form "interpolative" in half of the parameters and 0.01, healing
# diverges at first, from a loss of 0.298 to 0.464.
_FACTOR_RATE, _OTHER_RATE = 0.01, 0.003
_LEAST_BIAS = 0.01  # smallest root mean square that the rate of a bias is relative to; a bias may be zero
_KEPT_OUTPUT_BYTES = 2**30  # for the original's outputs, if at least twice as many bytes are free
_DIVERGED = 2.0  # a held-out loss above this multiple of the best one is divergence
_log = logging.getLogger(__name__)


def heal(
    runner: Runner, replacement: Replacement, config: HealConfig, *, seed: int
) -> tuple[HealResult, Callable[[], None]]:
    """Train the new layers so that the compressed model's outputs approach the original's.

    Return the result, and a function that writes the best values to the parameters; before it is called, the model, its
    flags and torch's generators are unchanged. Extra memory: five times the trained parameters (values, gradients, two
    moments, best values), a copy of the parameters of half precision, the hidden states of one batch, twice, and the
    original's outputs and hidden states of all batches: up to a gigabyte, and at most half of the free memory.
    """
    began = time.perf_counter()
    # Made before the calibration turns off `requires_grad`, by which the distillation chooses the trained parameters.
    distillation = Distillation(runner, replacement, config, seed)
    held_out = max(gather_objects(len(runner.held_out), None))
    settings = config.train_config(seed=seed, progress=runner.show, scaled=distillation.scaled, held_out=held_out)
    # The Trainer moves what it trains to the current GPU.
    gpu = torch.cuda.device(runner.device) if runner.device.type == "cuda" else nullcontext()
    with runner.calibrating(seed), gpu:
        training, total = len(runner.batches), len(distillation.batches)
        # Without a batch size, because each index stands for an entire batch.
        batches = DataLoader(_Stream(shuffled(training, config.max_steps, seed)), batch_size=None)
        checked = DataLoader(_Stream(torch.arange(training, total)), batch_size=None)
        if get_world_size() > 1:
            agree(
                "heal",
                partial(_identity, distillation, config),
                None,
                "load the same weights and pass the same arguments on every rank",
            )
        distillation.keep(runner.spare_bytes(_KEPT_OUTPUT_BYTES))
        _log.info("healing: at most %d steps, a check every %d", config.max_steps, settings.validate_every_n_steps)
        groups = _groups(distillation, replacement, config)
        progress = _Progress(distillation, checked)
        optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=config.weight_decay)
        lines = [] if runner.show else [ProgressLines("healing: ")]
        trainer = Trainer(distillation, optimizer, config=settings, callbacks=[progress, *lines])
        try:
            # The stream has numbers of batches, which are equal on all ranks. Each rank has batches of its own.
            with ignored_warnings("the streams of all", UserWarning):
                trainer.fit(batches, checked)
        finally:
            distillation.place(student=False)
        progress.restore_()
        (error,) = runner.errors([distillation.student], "error, healed")
    return progress.result(trainer, error, time.perf_counter() - began), distillation.write_


def check_ranks(group: dist.ProcessGroup | None) -> None:
    """Raise DistributedError unless the group has all ranks, because the Trainer trains on all ranks."""
    # Under torchrun, where no process group exists yet, the Trainer would start one with all ranks.
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    members = 1 if group is None else dist.get_world_size(group)
    if members != world:
        raise DistributedError(
            f"healing trains on all {world} ranks together, and the group of this call has {members}: call compress on "
            "every rank with group=torch.distributed.group.WORLD, after panther.distributed.init()"
        )


def _groups(distillation: Distillation, replacement: Replacement, config: HealConfig) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with their learning rates."""
    if config.learning_rate is not None:
        return [{"params": list(distillation.values), "lr": config.learning_rate}]
    factors = {
        parameter
        for layer in replacement.values()
        if isinstance(layer, CompressedModule) and layer.factor_names
        for parameter in layer.parameters()
        if parameter.dim() > 1
    }
    groups = []
    for (name, parameter), value in zip(distillation.trained.items(), distillation.values, strict=True):
        if name.endswith("scale_logs"):
            groups.append({"params": [value], "lr": _OTHER_RATE})
            continue
        norm = torch.linalg.vector_norm(value.detach(), dtype=torch.float64).item()
        size = norm / max(value.numel(), 1) ** 0.5
        least = _LEAST_BIAS if name.endswith("bias") or not size > 0 else 0.0
        rate = _FACTOR_RATE if parameter in factors else _OTHER_RATE
        groups.append({"params": [value], "lr": rate * max(size, least)})
    return groups


class _Stream(IterableDataset[Tensor]):
    # Iterable, because the Trainer would divide a map-style dataset among the ranks, and every rank has its own
    # batches.
    def __init__(self, indices: Tensor) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.indices.split(1))


def shuffled(count: int, steps: int, seed: int) -> Tensor:
    """Return the index of the batch of each step: a sequence of seeded permutations."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-steps // count))])[:steps]


class _Progress(Callback):
    """The state of healing: the best values, and whether the run diverged."""

    def __init__(self, distillation: Distillation, held_out: DataLoader[Tensor]) -> None:
        self._values, self._held_out = list(distillation.values), held_out
        self.best = [value.detach().clone() for value in self._values]
        self.loss_before = self.best_loss = math.nan
        self.best_step = 0
        self.diverged = False

    def on_start(self, trainer: Trainer) -> None:
        self.loss_before = self.best_loss = trainer.evaluate(self._held_out)["loss"]
        if not math.isfinite(self.loss_before):
            raise CompressionError(
                f"the loss on the held-out batches is {self.loss_before} before the first step and must be finite: "
                "look for NaN or infinite values in the model's output, or in float16 that overflows"
            )

    def on_skip(self, trainer: Trainer) -> None:
        self.diverged = trainer.stop = True

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        loss = record.get("validation_loss")
        if loss is None:
            return
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, trainer.step
            for best, value in zip(self.best, self._values, strict=True):
                best.copy_(value.detach())
        elif not loss <= _DIVERGED * self.best_loss:  # NaN too
            self.diverged = trainer.stop = True

    @torch.no_grad()
    def restore_(self) -> None:
        """Restore the values with the smallest held-out loss."""
        for value, best in zip(self._values, self.best, strict=True):
            value.copy_(best)

    def result(self, trainer: Trainer, error: float, seconds: float) -> HealResult:
        """Return the figures of the finished run."""
        checked = {record["step"]: record.get("validation_loss") for record in trainer.history}
        steps = [(record["step"], record["loss"]) for record in trainer.history if "loss" in record]
        return HealResult(
            steps=trainer.step,
            loss_before=self.loss_before,
            loss_after=self.best_loss,
            error=error,
            best_step=self.best_step,
            diverged=self.diverged,
            history=tuple((step, loss, checked[step]) for step, loss in steps),
            seconds=seconds,
        )


def _identity(distillation: Distillation, config: HealConfig) -> dict[str, str]:
    """Return what has to be equal on all ranks: the arguments, the trained parameters, and the original's values."""
    checksum = 0
    for parameter in distillation.runner.model.parameters():
        checksum = zlib.crc32(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return {
        **describe_settings(asdict(config) | {"seed": distillation.seed}),
        **{name: f"{tuple(p.shape)} {p.dtype}" for name, p in distillation.trained.items()},
        "the original": f"checksum {checksum:08x}",
    }
