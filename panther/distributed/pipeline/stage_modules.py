"""The modules of stages, without the code that traces models; and the halves of a sketched layer in two stages.

Between the halves, 2R numbers per row are sent instead of all features.

The first stage computes the product x [S1 | U2], and the second stage its expansion by [U1 ; S2]. The halves keep the
names and the seed of the layer, and share its tensors, so that the union of their state_dicts is the layer's.
"""

__all__ = [
    "Children", "FirstHalf", "Half", "SecondHalf", "StageModules", "begin_inside", "can_halve", "from_source_",
    "source_of",
]  # fmt: skip

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, forward_pre_hooks_of, has_hooks, parameters_of, unsafe_view
from panther.kernels import sketched_inner, sketched_outer
from panther.kernels.ops.library import autocast
from panther.nn import SKLinear
from panther.nn.protocol import CompressedModule, keep_own_forward
from panther.sketch import signs


class StageModules(nn.ModuleList):
    """The modules of this rank's stages; checkpoints use the full model's names, without the index of a stage."""


def from_source_(stage: nn.Module, model: nn.Module | None) -> None:
    """Store the model of a stage without values, whose classes draw the values; None removes it."""
    # In __dict__, because the model would otherwise become a submodule of the stage.
    stage.__dict__.pop("_source", None)
    if model is not None:
        stage.__dict__["_source"] = model


def source_of(module: nn.Module) -> nn.Module:
    """Return the model of a stage without values; for any other module, the module itself."""
    return vars(module).get("_source", module)


def can_halve(module: Any) -> bool:
    """Return whether a stage may end inside a module, an unsharded SKLinear that is not packed and has no hooks."""
    if type(module) is not SKLinear or module.packed:
        return False
    foreign = [hook for hook in forward_pre_hooks_of(module).values() if hook is not keep_own_forward]
    return not foreign and not has_hooks(module, beside_forward_pre=True)


class Half(SKLinear):
    """Base of both halves of a layer, whose tensors they share."""

    @classmethod
    def names_in(cls, name: str) -> set[str]:
        """Return the names of the tensors that the half has; ``name`` is the name of the layer."""
        keys = (*cls.factor_names, *cls.sketch_names, *(("bias",) if cls is SecondHalf else ()))
        return {f"{name}.{key}" for key in keys}

    def __init__(self, layer: SKLinear) -> None:
        CompressedModule.__init__(self)  # not SKLinear's, which draws and allocates
        for name in (
            "in_features",
            "out_features",
            "fan_in",
            "num_terms",
            "low_rank",
            "seed",
            "seed_is_given",
            "training",
        ):
            setattr(self, name, getattr(layer, name))
        for name in (*self.factor_names, *self.sketch_names):
            if name in parameters_of(layer):
                self.register_parameter(name, parameters_of(layer)[name])
            else:
                self.register_buffer(name, buffers_of(layer)[name], persistent=False)
        self._mirror_seed()

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = self.sketch_shapes()[name]
        stream = SKLinear.sketch_names.index(name)  # the stream of the layer, although a half has only one sketch
        return signs(self.seed, stream, range(rows), range(cols), dtype=dtype, device=device)  # type: ignore[arg-type]


class FirstHalf(Half):
    """Maps ``(*, in)`` to ``(*, 2R)``."""

    factor_names = ("S1",)  # type: ignore[assignment]
    sketch_names = ("U2",)  # type: ignore[assignment]

    def __init__(self, layer: SKLinear) -> None:
        super().__init__(layer)
        # A checkpoint records whether the layer has a bias, and the records of both halves must be equal.
        self.__dict__["bias"] = None if layer.bias is None else "in the second half"

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each sketch, by name."""
        return {"U2": tuple(self.S1.shape)}  # type: ignore[dict-item]

    def forward(self, input: Tensor) -> Tensor:
        """Return the inner numbers, scaled."""
        x, S1, U2 = autocast(input.device, input, self.S1, self.U2.to(self.S1.dtype))
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        inner = sketched_inner(rows, S1, U2, self.scale)
        return _with_rows_of(inner, x)


class SecondHalf(Half):
    """Maps ``(*, 2R)`` to ``(*, out)``."""

    factor_names = ("S2",)  # type: ignore[assignment]
    sketch_names = ("U1",)  # type: ignore[assignment]

    def __init__(self, layer: SKLinear) -> None:
        super().__init__(layer)
        self.register_parameter("bias", layer.bias)
        self._mirror_seed()  # the record stays last

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each sketch, by name."""
        return {"U1": tuple(self.S2.shape)}  # type: ignore[dict-item]

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        h, S2, U1, bias = autocast(input.device, input, self.S2, self.U1.to(self.S2.dtype), self.bias)
        rows = h.reshape(math.prod(h.shape[:-1]), h.shape[-1])
        bias = bias if bias is None else bias.to(h.dtype)
        return _with_rows_of(sketched_outer(rows, U1, S2, bias), h)


def _with_rows_of(y: Tensor, x: Tensor) -> Tensor:  # (rows, n) -> (*, n)
    """Return rows with the dimensions of the input, not as a view: FSDP2 warns about stages that end in a view."""
    return y if x.dim() == 2 else unsafe_view(y, [*x.shape[:-1], y.shape[1]])


@dataclass
class Children:
    """The children of an nn.Sequential. A child may be in two blocks, half of its layer in each."""

    names: list[str]
    halves: list[type[Half] | None]
    model: nn.Sequential

    def __len__(self) -> int:
        return len(self.names)

    def names_in(self, begin: int, end: int) -> set[str]:
        """Return the names of the parameters and modules in the blocks from ``begin`` to before ``end``."""
        names = set()
        for name, half in zip(self.names[begin:end], self.halves[begin:end], strict=True):
            names |= {name} if half is None else half.names_in(name)
        return names

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module:
        """Return the stage that consists of the blocks from ``begin`` to before ``end``."""
        children = OrderedDict((name, model.get_submodule(name)) for name in self.names[begin:end])
        for name, half in zip(self.names[begin:end], self.halves[begin:end], strict=True):
            if half is not None:  # a stage never has both halves, because it begins or ends between them
                children[name] = half(children[name])  # type: ignore[arg-type]
        return nn.Sequential(children)

    @property
    def halved(self) -> set[str]:
        """The names of layers that are in two stages."""
        return {name for name, half in zip(self.names, self.halves, strict=True) if half is not None}


def begin_inside(children: Children, begins: list[int]) -> tuple[Children, list[int]]:
    """Move stages that begin with a sketched layer, or after one, to the middle of the layer."""
    model, halved = children.model, set()
    places: list[tuple[int, int]] = [(0, 0)]  # the child with which each stage begins, and the half of this child
    for begin in begins[1:]:
        inside = next((i for i in (begin, begin - 1) if i not in halved and can_halve(model[i])), None)
        # Stages stay in order, so that a child is not divided before the place where a stage begins with it.
        if inside is not None and (inside, 1) > places[-1]:
            halved.add(inside)
            places.append((inside, 1))
        else:
            places.append((begin, 0))
    if any(place <= previous for previous, place in pairwise(places)):
        return children, begins
    names: list[str] = []
    halves: list[type[Half] | None] = []
    at: dict[tuple[int, int], int] = {}
    for i, name in enumerate(children.names):
        for half, kind in enumerate((FirstHalf, SecondHalf) if i in halved else (None,)):
            at[i, half] = len(names)
            names.append(name)
            halves.append(kind)
    return Children(names, halves, model), [at[place] for place in places]
