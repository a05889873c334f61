"""Draw the values of a model on the meta device: the same numbers in every layout, a module in full at a time."""

__all__ = ["Draw", "planned_draws", "set_seeds_"]

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther._random_state import preserved_generators, seed_cpu_generators
from panther._torch import buffers_of, drawing_method, parameters_of, unsaved_buffers_of
from panther.distributed.checkpoint.state import module_name
from panther.distributed.checkpoint.storage import placed
from panther.distributed.pipeline.stage_modules import source_of
from panther.distributed.sync.sketches import sketch_ids
from panther.errors import ConfigError
from panther.nn.protocol import CompressedModule


def set_seeds_(parts: Sequence[nn.Module], seed: int) -> None:
    """Derive the seeds of sketches and random features that were not given, from ``seed`` and the module's name."""
    for part in parts:
        for name, module in part.named_modules():
            if not getattr(module, "seed_is_given", True) and module.seed is not None:
                module.seed = _number(f"sketch {seed} {module_name(name)}", 8) >> 1  # below 2^63


class Draw(NamedTuple):
    """A module whose tensors have to be drawn."""

    name: str
    module: nn.Module
    names: list[str]
    """Names of the module's own tensors that have no values."""
    owner: nn.Module
    """The module that draws the values: for the code of a stage, the module of the full model."""
    draw: Callable[[], Any]
    """A function that draws all values of ``owner``."""

    def fill(self, seed: int, filled: set[int]) -> None:
        """Draw the module in full on the CPU, and copy this rank's shards into the tensors that are not filled yet."""
        with _full_tensors(self.owner) as full_values, preserved_generators():
            seed_cpu_generators(_number(f"{seed} {self.name}", 7))
            self.draw()
        for name in self.names:
            tensor, full = getattr(self.module, name), full_values[name]
            if id(tensor) in filled:
                continue
            if full.is_floating_point() and full.sum().isnan():
                raise ConfigError(
                    f"{name!r} of a {type(self.owner).__name__} was not drawn by the initialisation of its model or "
                    "class: give the class a reset_parameters that draws it, or weights that hold it"
                )
            offsets, shard = placed(tensor)
            shard.copy_(full[tuple(slice(o, o + size) for o, size in zip(offsets, shard.shape, strict=True))])
            filled.add(id(tensor))


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest())


def planned_draws(parts: Sequence[nn.Module], draw_all: bool) -> list[Draw]:
    """Return the modules that have to be drawn, or raise if the model cannot be filled."""
    draws = []
    for part in parts:
        source = source_of(part)
        for name, module in part.named_modules():
            tensors = {**parameters_of(module), **buffers_of(module)}
            names = [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]
            if not names or not (draw_all or _is_unsaved(module)):
                continue
            owner = module if source is part else source.get_submodule(name)
            if (draw := _drawing(source, owner)) is None:
                raise ConfigError(
                    f"{name!r}, a {type(owner).__name__}, has tensors and no reset_parameters that draws their values: "
                    "give the class one, or weights that hold them all"
                )
            sketches = _seeded_buffers(module)
            draws.append(Draw(module_name(name), module, [key for key in names if key not in sketches], owner, draw))
    return draws


def _seeded_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that a module draws from its seed when it is allocated."""
    return module.drawn_names() if isinstance(module, CompressedModule) else ()


def _drawing(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """Return a function that draws the values of a module's own tensors, or None if there is none."""
    draw_module: Any = drawing_method(module)
    if _seeded_buffers(module):
        draw_module = module.reset_factors
    initialize = getattr(model, "_init_weights", None)
    if not callable(draw_module) and not callable(initialize):
        return None

    def draw() -> None:
        if callable(draw_module):
            draw_module()
        if callable(initialize):  # called last; models of transformers ignore modules that they do not know
            initialize(module)

    return draw


def _is_unsaved(module: nn.Module) -> bool:
    """Return whether a module has buffers that files do not hold, except for sketches, which are drawn from seeds."""
    sketches = sketch_ids(module)
    return any(
        id(buffer) not in sketches and name in unsaved_buffers_of(module)
        for name, buffer in module.named_buffers(recurse=False)
    )


@contextmanager
def _full_tensors(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace a module's own tensors by full ones on the CPU within the block.

    The dictionary that is yielded has the drawn tensors at the end of the block.
    """
    places: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    saved_places = [dict(place) for place in places]
    packed = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}  # bits of sketches
    seeded = _seeded_buffers(module)
    for place in places:
        for name, tensor in place.items():
            if tensor is not None and name not in seeded:
                full = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                trained = isinstance(tensor, nn.Parameter)
                place[name] = nn.Parameter(full, tensor.requires_grad) if trained else full
    full_values: dict[str, Tensor] = {}
    try:
        yield full_values
        for place in places:
            full_values.update(place)
    finally:
        for place, tensors in zip(places, saved_places, strict=True):
            place.clear()
            place.update(tensors)
        vars(module).update(packed)
