"""Modules of experts whose products with stacked weights are seen by hooks.

A module of experts of transformers multiplies by its parameters in a function, where no hook sees the input of the
second product. Within :func:`routed_experts` it computes the same expert by expert, and calls the layers that stand for
its weights.
"""

__all__ = ["expert_of", "routed_experts", "tokens_of"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import children_of, is_transformed
from panther.compression.calibration.masks import Masks
from panther.compression.calibration.targets import Target
from panther.errors import CompressionError
from panther.nn.quantized.experts import QuantizedExperts
from panther.nn.quantized.stacked import StackedExperts

# The output of a module's own forward and the output here differ by less than this share, in 16 bits too.
_SAME = 0.02


def expert_of(further: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int:
    """Return the expert from the further arguments of a call of a layer that stands for a stacked weight."""
    expert: int = further[0][0]
    return expert


def tokens_of(further: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[Tensor, int]:
    """Return the indices of the tokens that the rows of a call are, and the number of all tokens of the batch."""
    tokens: tuple[Tensor, int] = further[0][1]
    return tokens


@contextmanager
def routed_experts(
    targets: Sequence[Target],
    masks_of: Callable[[], Masks | None] | None = None,
    unreadable: dict[Target, str] | None = None,
) -> Iterator[None]:
    """Let the modules of experts of stacked targets call the targets' layers, within the block.

    Targets whose weight is replaced already are left alone. ``masks_of`` returns the masks of the present batch: tokens
    that do not count are multiplied without calling the layers.

    A module that cannot be followed runs its own forward, and its targets are added to ``unreadable``, with the reason;
    without this argument that is an error. With it, outputs are compared with the outputs of the module's own forward.
    """
    routes: dict[nn.Module, _Route] = {}
    for target in targets:
        layer = target.modules[0]
        if isinstance(layer, StackedExperts) and layer.is_in_place and layer.place is not None:
            experts, name = layer.place
            route = routes.setdefault(experts, _Route(experts, {}, {}, masks_of, unreadable))
            route.layers[name], route.targets[name] = layer, target
    with ExitStack() as restored:
        for experts, route in routes.items():
            attributes = vars(experts)
            before = attributes.get("forward")
            undo = partial(attributes.pop, "forward") if before is None else partial(attributes.update, forward=before)
            attributes["forward"] = route
            restored.callback(undo)
        yield


@dataclass
class _Route:
    """The forward of a module of experts that calls the layers of its stacked weights.

    Attributes:
        experts: The module.
        layers: The layers that stand for weights, by the names of the parameters.
        targets: The targets of the layers.
        masks_of: Returns the masks of the batch.
        unreadable: Targets that cannot be followed, with the reason.
    """

    experts: Any
    layers: dict[str, StackedExperts]
    targets: dict[str, Target]
    masks_of: Callable[[], Masks | None] | None
    unreadable: dict[Target, str] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for tokens, (tokens, hidden), the experts of each token and their weights."""
        values = (*args, *kwargs.values())
        if reason := self._reason_against(values):
            return self._refused(reason, args, kwargs)
        output = self._routed(*values)
        if self.unreadable is not None:
            with torch.no_grad():
                expected = self._own_forward(args, kwargs)
                is_same = isinstance(expected, Tensor) and expected.shape == output.shape
                if is_same:
                    difference, size = (torch.linalg.vector_norm(x) for x in (expected - output, expected))
                    is_same = bool(difference <= _SAME * size)
            if not is_same:
                return self._refused("computes something else than experts of transformers do", args, kwargs)
        return output

    def _own_forward(self, args: Any, kwargs: Any) -> Any:
        return type(self.experts).forward(self.experts, *args, **kwargs)

    def _reason_against(self, values: Sequence[Any]) -> str:
        """Return why a call cannot be followed; nothing where it can."""
        if len(values) != 3 or not all(isinstance(value, Tensor) and value.dim() == 2 for value in values):
            return "is called with something else than tokens, their experts and the experts' weights"
        if is_transformed(values[0]):
            return "is called within vmap or grad of torch.func, where its input has no values to read"
        if not all(layer.is_in_place for layer in self.layers.values()):
            return "is called with a weight that is not its own, as by torch.func.functional_call"
        if getattr(self.experts, "_is_expert_parallel", False):
            return "holds a part of the experts, and other ranks hold the remaining ones"
        return ""

    def _refused(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Return the output of the module's own forward, whose products no hook can read."""
        for target in self.targets.values():
            if self.unreadable is None:
                raise CompressionError(f"layer {target.name!r} {reason}: exclude the layer")
            self.unreadable.setdefault(target, reason)
        return self._own_forward(args, kwargs)

    def _routed(self, hidden: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
        masks = None if self.masks_of is None else self.masks_of()
        counted = None if masks is None else masks.rows(hidden, self.experts)
        total = torch.zeros_like(hidden)
        for expert in torch.unique(experts_of_token).tolist():
            tokens, places = torch.where(experts_of_token == expert)
            does_count = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted[tokens]
            for is_counted in (True, False):
                group = does_count == is_counted
                if len(rows := tokens[group]):
                    output = self._output(hidden[rows], expert, (rows, len(hidden)), is_counted)
                    output = output * weights[rows, places[group], None]
                    total = total.index_add(0, rows, output.to(total.dtype))
        return total

    def _output(self, x: Tensor, expert: int, tokens: tuple[Tensor, int], is_counted: bool) -> Tensor:
        """Return the output of one expert; layers are called, so that hooks see it, if the rows count."""
        experts = self.experts
        x = self._product("gate_up_proj" if experts.has_gate else "up_proj", x, expert, tokens, is_counted)
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = self._product("down_proj", x, expert, tokens, is_counted)
        return experts.post_expert_norm(x) if getattr(experts, "has_post_expert_norm", False) else x

    def _product(self, name: str, x: Tensor, expert: int, tokens: tuple[Tensor, int], is_counted: bool) -> Tensor:
        layer = self.layers.get(name) or children_of(self.experts).get(name)
        if isinstance(layer, (StackedExperts, QuantizedExperts)):
            y: Tensor = layer(x, expert, tokens) if is_counted else layer.forward(x, expert)
        else:
            weight = getattr(self.experts, name)[expert]
            y = x @ (weight if self.experts.is_transposed else weight.mT)
        return y + getattr(self.experts, f"{name}_bias")[expert] if self.experts.has_bias else y
