"""The stacked weights of experts in modules of transformers, and layers that stand for them."""

__all__ = ["StackedExperts", "is_experts", "put_layer", "stacked_layers", "stacked_names"]

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._torch import parameters_of, put_module

_FLAGS = ("has_gate", "has_bias", "is_transposed")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the attributes that ``use_experts_implementation`` of transformers sets."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS)


def stacked_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacked weights in a module of experts; empty for all modules of a different kind.

    They have three dimensions, and the first one is the expert. Weights that are compressed already are not among the
    names.
    """
    if not is_experts(module):
        return ()
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    weights = {name: parameters_of(module).get(name) for name in names}
    return tuple(name for name, weight in weights.items() if weight is not None and weight.dim() == 3)


class StackedExperts(nn.Module):
    """The stacked weights of experts as a layer that multiplies by the weight of one expert.

    The layer stands for a parameter of a module of experts, (experts, out, in) or ``transposed``, while the parameter
    is compressed. It is never a module of the model.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        transposed: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.transposed = transposed
        shape = (in_features, out_features) if transposed else (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))
        self.place: tuple[nn.Module, str] | None = None  # A tuple, because a module would become a child.
        self._order: tuple[str, ...] = ()

    @classmethod
    def at(cls, experts: Any, name: str) -> Self:
        """Return the layer that stands for a parameter of a module of experts."""
        weight = parameters_of(experts)[name]
        assert weight is not None
        columns, rows = weight.shape[1:] if experts.is_transposed else weight.shape[:0:-1]
        layer = cls(len(weight), columns, rows, experts.is_transposed, device="meta")
        layer.weight = weight
        layer.place, layer._order = (experts, name), tuple(parameters_of(experts))
        return layer.train(experts.training)

    def twin(self, modules: Mapping[nn.Module, nn.Module]) -> Self:
        """Return the layer that stands for the same parameter of a copy of the model; ``modules`` are the copies."""
        assert self.place is not None
        experts, name = self.place
        return self.at(modules[experts], name)

    def part(self, start: int, stop: int) -> Self:
        """Return a layer of the experts from ``start`` to before ``stop``, which shares the memory of the weight."""
        weight = self.weight.detach()[start:stop]
        layer = type(self)(len(weight), self.in_features, self.out_features, self.transposed, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    @property
    def is_in_place(self) -> bool:
        """Whether the module of experts holds the parameter that this layer stands for."""
        assert self.place is not None
        experts, name = self.place
        return parameters_of(experts).get(name) is self.weight

    def forward(self, input: Tensor, expert: int, tokens: Any = None) -> Tensor:  # (rows, in) -> (rows, out)
        """Multiply rows by the weight of one expert; ``tokens`` tells hooks which tokens the rows are."""
        weight = self.weight[expert]
        return input @ weight if self.transposed else F.linear(input, weight)

    def put_back(self) -> None:
        """Make the weight a parameter of the module of experts again, at its place in the order of parameters."""
        assert self.place is not None
        experts, name = self.place
        put_module(experts, name, self.weight)
        parameters = parameters_of(experts)
        for each in self._order:
            if each in parameters:
                parameters[each] = parameters.pop(each)


def stacked_layers(model: nn.Module) -> dict[str, StackedExperts]:
    """Return a layer for each stacked weight of experts in a model, by the name of the parameter."""
    return {
        f"{name}.{parameter}".removeprefix("."): StackedExperts.at(module, parameter)
        for name, module in model.named_modules(remove_duplicate=False)
        for parameter in stacked_names(module)
    }


def put_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of a module or a stacked weight, or a stacked weight in the place of a layer."""
    put_module(model, name, layer.weight if isinstance(layer, StackedExperts) else layer)
