r"""The original and the compressed model in one module tree, and the loss between them.

The original is the same tree with the dense layers put back for one forward without gradients, so no copy of the model
is made. With :math:`h` the compressed model's hidden state or output at the counted positions and :math:`h^*` the
original's, one tensor costs the share of its variance that is lost,

.. math:: \ell(h) = \frac{\mathrm{mean} \, |h - h^*|^2}{\mathrm{var} \, h^*},

and a batch costs the mean of :math:`\ell` over the blocks' outputs plus :math:`\ell` of the model's output.

Reference: X. Jiao et al., "TinyBERT: distilling BERT for natural language understanding", 2020, arXiv:1909.10351.
"""

__all__ = ["Pair", "blocks_of", "lost_variance"]

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Pair:
    """The compressed model and the original, in one module tree, and the loss between them."""

    def __init__(
        self,
        model: nn.Module,
        replaced: Mapping[nn.Module, nn.Module],
        call: Callable[[Any], Tensor],
        mask: Callable[[Any], Tensor | None],
        seed: int,
        *,
        hidden: bool,
    ) -> None:
        self.model, self.call, self.mask, self.seed = model, call, mask, seed
        # Every place, under whatever names. Several new layers can stand for one dense layer, so that the mapping has
        # no inverse, which replace_modules would need.
        self.places = [
            (parent._modules, name, child, replaced[child])
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child is not None and child in replaced
        ]
        lost = set(replaced) - {new for _, _, new, _ in self.places}
        if lost or not replaced:
            what = ", ".join(sorted(type(new).__name__ for new in lost)) or "no layer"
            raise ValueError(
                f"replaced must name layers inside of the model, and {what} is not: give the model whose layers were "
                "replaced (one layer alone in an nn.Sequential)"
            )
        self.blocks = blocks_of(model, set(replaced)) if hidden else []
        self.devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    def keep(self, trained: Iterable[nn.Parameter]) -> None:
        """Keep the values of those of the trained parameters that the original has too."""
        with self.original():
            shared = set(self.model.parameters())
        self.kept = [(p, p.detach().clone()) for p in trained if p in shared]

    def put_back(self) -> None:
        """Give the original's parameters their values again."""
        with torch.no_grad():
            for parameter, value in self.kept:
                parameter.copy_(value)

    @contextmanager
    def original(self) -> Iterator[None]:
        """The dense layers, and the values kept, stand in the model."""
        values = [parameter.data for parameter, _ in self.kept]
        try:
            for modules, name, _, dense in self.places:
                modules[name] = dense
            for parameter, value in self.kept:
                parameter.data = value
            yield
        finally:
            for modules, name, new, _ in self.places:
                modules[name] = new
            for (parameter, _), value in zip(self.kept, values, strict=True):
                parameter.data = value

    def checksum(self) -> int:
        """CRC of the original's parameters: whose checkpoint a file is."""
        total = 0
        with self.original():
            for parameter in self.model.parameters():
                values = parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
                total = zlib.crc32(values, total)
        return total

    def loss(self, batch: Any) -> Tensor:
        """Loss of the compressed model on a batch, with gradients if they are enabled."""
        mask = self.mask(batch)
        with torch.no_grad(), self.original():
            (target,), *targets = self._observe(batch)
        (output,), *outputs = self._observe(batch)
        matched = [
            lost_variance(state, wanted, mask).to(output.device)
            for states, wanteds in zip(outputs, targets, strict=True)
            if [state.shape for state in states] == [wanted.shape for wanted in wanteds]
            for state, wanted in zip(states, wanteds, strict=True)
        ]
        loss = lost_variance(output, target, mask)
        return loss + torch.stack(matched).mean() if matched else loss

    def _observe(self, batch: Any) -> list[list[Tensor]]:
        """The output, and the output of each call of each block."""
        torch.default_generator.manual_seed(self.seed)
        for index in self.devices:
            torch.cuda.default_generators[index].manual_seed(self.seed)
        blocks = [parent.get_submodule(name) for parent, name in self.blocks]
        seen: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}

        def observe(module: nn.Module, _: Any, output: Any) -> None:
            if (first := _first_tensor(output)) is not None:
                seen[module].append(first)

        handles = [block.register_forward_hook(observe) for block in seen]
        try:
            output = self.call(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(f"the model's main output must be a floating tensor, not {kind}: return one in forward_fn")
        return [[output], *(seen[block] for block in blocks)]


def lost_variance(state: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Mean square of the difference over the variance of what is wanted, at the positions that count.

    The variance is that over positions, in the mean of the features: what all positions share has no part in it.
    """
    if mask is not None and wanted.ndim > mask.ndim and wanted.shape[: mask.ndim] == mask.shape:
        counted = mask.to(wanted.device, torch.bool)
        state, wanted = state[counted].flatten(1), wanted[counted].flatten(1)
    elif wanted.ndim > 3:  # (N, C, ...)
        state, wanted = state.movedim(1, -1).flatten(0, -2), wanted.movedim(1, -1).flatten(0, -2)
    elif wanted.ndim == 3:
        state, wanted = state.flatten(0, 1), wanted.flatten(0, 1)
    elif wanted.ndim < 2:
        state, wanted = state.reshape(-1, 1), wanted.reshape(-1, 1)
    dtype = torch.promote_types(wanted.dtype, torch.float32)
    state, wanted = state.to(dtype), wanted.to(dtype)  # (positions, features)
    positions, features = wanted.shape
    count = max(positions * features, 1)
    centred = wanted - (wanted.mean(0) if positions > 1 else wanted.mean())
    variance = centred.square().sum() / max((positions - 1) * features, features, 1)
    square = wanted.square().sum() / count
    square = torch.where(square > 0, square, 1.0)
    variance = torch.where(variance > 1e-6 * square, variance, square)  # nothing varies: against its size
    return (state - wanted).square().sum() / count / variance


def blocks_of(model: nn.Module, new: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where the blocks stand: elements, with a new layer, of the outermost ModuleLists and Sequentials.

    An element that wraps a stack (as a Sequential of an encoder and a head does) stands for the stack's elements; a
    stack has several elements of one class, each with new layers inside.
    """
    inside = {id(module) for module in model.modules() if any(child in new for child in module.modules())}
    found: list[tuple[nn.Module, str]] = []

    def is_stack(module: nn.Module) -> bool:
        kinds = Counter(type(child) for child in module.children() if id(child) in inside and child not in new)
        return isinstance(module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1

    def visit(module: nn.Module) -> None:
        for name, child in module._modules.items():
            if child is None or id(child) not in inside:
                continue
            within = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
            if within and (is_stack(module) or not any(map(is_stack, child.modules()))):
                found.append((module, name))
            else:
                visit(child)

    visit(model)
    return found


def _first_tensor(output: Any) -> Tensor | None:
    """The tensor itself, or the first one of a tuple or mapping; None if it is not floating."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        output = next((item for item in output if isinstance(item, Tensor)), None)
    return output if isinstance(output, Tensor) and output.is_floating_point() else None
