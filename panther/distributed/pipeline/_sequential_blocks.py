"""The children of an nn.Sequential as the blocks of a pipeline, and stages that begin inside a sketched layer."""

__all__ = ["Children", "begin_inside"]

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from panther.distributed.pipeline.sketched_halves import FirstHalf, Half, SecondHalf, can_halve


@dataclass
class Children:
    """The children of an nn.Sequential. A child may be in two blocks, half of its layer in each."""

    names: list[str]
    halves: list[type[Half] | None]
    model: nn.Sequential

    def __len__(self) -> int:
        return len(self.names)

    def names_in(self, begin: int, end: int) -> set[str]:
        names = set()
        for name, half in zip(self.names[begin:end], self.halves[begin:end], strict=True):
            names |= {name} if half is None else half.names_in(name)
        return names

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module:
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
    if any(after <= before for before, after in pairwise(places)):
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
