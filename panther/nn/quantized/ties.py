"""The tied weights of transformers models whose embedding and head are compressed and share their tensors.

A transformers model names pairs of tied parameters, such as ``lm_head.weight`` and ``transformer.wte.weight``. Saving
drops the first tensor of a pair, and loading makes it the second one again. Compressed layers have a pair for each of
their tensors.
"""

__all__ = ["declare_ties_", "tied_layers"]

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of
from panther.nn.protocol import CompressedModule
from panther.nn.quantized.state import SCALE_LOGS

_WEIGHT = ".weight"


class _CompressedTies(dict[str, str]):
    """Ties with names of compressed layers; ``declared`` are the ties by the class or the constructor of the model."""

    def __init__(self, ties: Mapping[str, str], declared: Mapping[str, str]) -> None:
        super().__init__(ties)
        self.declared = declared

    def __reduce__(self) -> Any:  # for copies of the model
        return _CompressedTies, (dict(self), self.declared)


def declare_ties_(model: Any, pretrained_class: type[nn.Module]) -> None:
    """Name the tied tensors of the layers that a model of transformers has now; models in it as well."""
    for module in model.modules():
        if not isinstance(module, pretrained_class):
            continue
        present = getattr(module, "_tied_weights_keys", None)
        declared = getattr(present, "declared", present)
        ties = _ties_of(module, declared) if isinstance(declared, Mapping) else declared
        if ties != present:
            module._tied_weights_keys = declared if ties == declared else _CompressedTies(ties, declared)  # type: ignore
    # Names of tensors also follow from ties of whole modules and from patterns.
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def tied_layers(model: Any, ties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of compressed layers whose weights a model ties by pairs of names: target and source."""
    for target_name, source_name in ties.items():
        names = target_name.removesuffix(_WEIGHT), source_name.removesuffix(_WEIGHT)
        layers = [_compressed_at(model, name) for name in names]
        if target_name.endswith(_WEIGHT) and source_name.endswith(_WEIGHT) and None not in layers:
            yield names


def _ties_of(model: nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    ties: dict[str, str] = {}
    compressed = dict.fromkeys(tied_layers(model, declared))
    for target_name, source_name in declared.items():
        names = target_name.removesuffix(_WEIGHT), source_name.removesuffix(_WEIGHT)
        if names in compressed:
            target, source = (model.get_submodule(name) for name in names)
            if _share_all(target, source):
                ties |= {
                    f"{names[0]}.{key}": f"{names[1]}.{key}" for key, x in buffers_of(target).items() if x is not None
                }
        elif not any(_compressed_at(model, name) for name in set(names) - {target_name, source_name}):
            ties[target_name] = source_name
    return ties


def _share_all(target: nn.Module, source: nn.Module) -> bool:
    """Return whether all buffers of a layer, and the parameters of its scales, are those of the source."""
    tensors, source_tensors = buffers_of(target), buffers_of(source)
    logs = [parameters_of(module).get(SCALE_LOGS["scales"]) for module in (target, source)]
    return logs[0] is logs[1] and all(
        _is_same(x, source_tensors.get(key)) for key, x in tensors.items() if x is not None
    )


def _is_same(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None:
        return False
    return tensor is other or (not tensor.is_meta and tensor.data_ptr() == other.data_ptr() and tensor.numel() > 0)


def _compressed_at(model: nn.Module, name: str) -> CompressedModule | None:
    """Return the compressed layer of a name; None if there is none, or the name is a pattern."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if isinstance(module, CompressedModule) else None
