"""What a checkpoint holds of a model, its optimizer and the generators, under names that do not depend on the layout.

Tensors and the rest are kept apart: tensors, DTensors among them, go to DCP by name; numbers, strings and containers of
them go to the manifest.
"""

__all__ = [
    "MODEL", "OPTIMIZER", "aliases", "are_stages", "decode", "encode", "fill_model", "fill_optimizer", "model_state",
    "model_targets", "optimizer_state", "optimizer_targets", "parts_of", "random_state", "set_random_state",
]  # fmt: skip

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from panther.distributed.pipeline._modules import StageModules
from panther.errors import CheckpointError
from panther.nn.io import unwrapped

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
MODEL, OPTIMIZER = "model.", "optimizer."


def are_stages(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Whether these are stages of a pipeline, not a model."""
    return isinstance(model, StageModules) or not isinstance(model, nn.Module)


def parts_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules whose names are global: a model without its wrappers, or the stages of this rank."""
    return [unwrapped(stage) for stage in model] if are_stages(model) else [unwrapped(model)]  # type: ignore


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(parts: Iterable[nn.Module]) -> dict[str, Any]:
    """Entries of the state_dicts by global name; tensors are the model's own."""
    state: dict[str, Any] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(f"{name!r} is on the meta device and has no values: initialise the model first")
            state[_plain(name)] = value
    return state


def aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that are another's, as tied weights are, with the first name of each."""
    seen: dict[Any, str] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            local = value.to_local() if isinstance(value, DTensor) else value
            if not local.numel():
                continue
            place = (local.data_ptr(), local.device, value.dtype, value.shape, local.stride())
            if place in seen:
                found[name] = seen[place]
            seen.setdefault(place, name)
    return found


def fill_model(parts: Iterable[nn.Module], values: Mapping[str, Any]) -> None:
    """Load by global name; the modules' own ``load_state_dict`` has the last word, so sketches are drawn anew."""
    for part in parts:
        part.load_state_dict({name: values[_plain(name)] for name in part.state_dict()})


def model_targets(state: Mapping[str, Any], other_names: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Empty tensors to load into, by the names they were saved under, and the saved name of each entry."""
    saved = {name: other_names.get(name, name) for name, value in state.items() if isinstance(value, Tensor)}
    targets = {MODEL + saved[name]: torch.empty_like(value) for name, value in state.items() if name in saved}
    return targets, saved


def _named_parameters(parts: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    return {parameter: _plain(name) for part in parts for name, parameter in part.named_parameters()}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state: of this rank's share, where the states are shared out."""
    return optimizer.optim if _shared_out(optimizer) else optimizer  # type: ignore[attr-defined]


def _shared_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, whose module compiles old functions and warns of it when imported."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _names_of(optimizer: torch.optim.Optimizer, parts: Iterable[nn.Module]) -> list[str]:
    """Names of the optimizer's parameters, by its own numbers."""
    names = _named_parameters(parts)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strangers := sum(parameter not in names for parameter in parameters):
        raise CheckpointError(
            f"{strangers} of the optimizer's {len(parameters)} parameters are not the model's: give the model that it "
            "was made from, or make it anew after wrapping"
        )
    return [names[parameter] for parameter in parameters]


def optimizer_state(
    optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by ``optimizer.<parameter>.<key>``, and the rest: values of states, and settings of every parameter."""
    inner = _inner(optimizer)
    names = _names_of(inner, parts)
    whole = inner.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, state in whole["state"].items():
        name = names[number]
        for key, value in state.items():
            place = f"{OPTIMIZER}{name}.{key}"
            if isinstance(value, Tensor):
                tensors[place] = value
            else:
                values.setdefault(name, {})[key] = encode(value, place, tensors)
    settings = {}
    for group in whole["param_groups"]:
        for number in group["params"]:
            name = names[number]
            chosen = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            settings[name] = {
                key: encode(value, f"{OPTIMIZER}{name}.setting.{key}", tensors) for key, value in chosen.items()
            }
    kind = type(inner).__name__
    return tensors, {"class": kind, "values": values, "settings": settings}


def optimizer_targets(
    optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module], saved: Mapping[str, Any], entries: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Empty tensors for the states of this rank's parameters that were saved."""
    inner = _inner(optimizer)
    if saved["class"] != type(inner).__name__:
        raise CheckpointError(
            f"the checkpoint has the state of {saved['class']}, and the optimizer is {type(inner).__name__}: make the "
            "same, or load without it"
        )
    names = _names_of(inner, parts)
    if missing := [name for name in names if name not in saved["settings"]]:
        raise CheckpointError(
            f"the checkpoint's optimizer did not train {', '.join(missing[:5])}: give this one the same parameters"
        )
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    wanted = dict(zip(names, parameters, strict=True))
    targets = {}
    for place, entry in entries.items():
        # Names of parameters have dots, and so may keys of settings: the parameter is the longest that fits.
        name = next((n for n in _prefixes(place.removeprefix(OPTIMIZER)) if n in wanted), None)
        if name is not None:
            targets[place] = _like(wanted[name], entry)
    return targets


def _prefixes(name: str) -> Iterable[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _like(parameter: Tensor, entry: Mapping[str, Any]) -> Tensor:
    shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape:
        return torch.empty(shape, dtype=dtype)  # steps are counted on the CPU, unless load_state_dict moves them
    if isinstance(parameter, DTensor):  # factors of a second moment, say
        mesh = parameter.device_mesh
        local = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def fill_optimizer(
    optimizer: torch.optim.Optimizer,
    parts: Sequence[nn.Module],
    saved: Mapping[str, Any],
    loaded: Mapping[str, Tensor],
) -> None:
    """Give the optimizer its states and settings, through its own ``load_state_dict``."""
    inner = _inner(optimizer)
    names = _names_of(inner, parts)
    whole = inner.state_dict()
    number_of = {name: number for number, name in enumerate(names)}
    states: dict[int, dict[str, Any]] = {}
    for name, values in saved["values"].items():
        if name in number_of:
            states[number_of[name]] = {key: decode(value, loaded) for key, value in values.items()}
    for place, tensor in loaded.items():
        rest = place.removeprefix(OPTIMIZER)
        name = next((n for n in _prefixes(rest) if n in number_of), None)
        if name is not None and place.startswith(OPTIMIZER) and "." not in (key := rest[len(name) + 1 :]):
            states.setdefault(number_of[name], {})[key] = tensor
    for index, group in enumerate(whole["param_groups"]):
        chosen = [saved["settings"][names[number]] for number in group["params"]]
        if any({**one} != {**chosen[0]} for one in chosen if not _has_tensor(one)):
            raise CheckpointError(
                f"parameters of the optimizer's group {index} had different settings when they were saved: group them "
                "as they were"
            )
        if chosen:
            group.update({key: decode(value, loaded) for key, value in chosen[0].items()})
    whole["state"] = dict(sorted(states.items()))
    inner.load_state_dict(whole)
    if _shared_out(optimizer):
        optimizer._sync_param_groups(inner.param_groups, optimizer.param_groups)  # type: ignore[attr-defined]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$tensor" in value or any(map(_has_tensor, value.values()))
    return isinstance(value, list) and any(map(_has_tensor, value))


def random_state(rank: int) -> tuple[dict[str, Tensor], Any]:
    """States of torch's, Python's and NumPy's generators on this rank."""
    tensors: dict[str, Tensor] = {}
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return tensors, encode(_arrays(states), f"random.{rank}", tensors)


def _arrays(states: dict[str, Any]) -> dict[str, Any]:
    """Long tuples of integers as tensors."""
    version, words, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    python = [version, torch.tensor(words, dtype=torch.int64), gauss]
    return {**states, "python": python, "numpy": [kind, torch.tensor(keys.astype(np.int64)), *rest]}


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set what :func:`random_state` took, decoded."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; tensors go to ``tensors``, under names that begin with ``place``.

    Raises:
        CheckpointError: If it is, or holds, something else than numbers, strings, None, lists, tuples, dicts, tensors.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        tensors[place] = value
        return {"$tensor": place}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [[encode(key, place, {}), encode(item, f"{place}.{key}", tensors)] for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}: a checkpoint holds numbers, strings, None, lists, tuples, dicts and "
        "tensors"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`encode` was given; tensors that were not loaded are left out as None."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors.get(value["$tensor"])
        if "$tuple" in value:
            return tuple(decode(item, tensors) for item in value["$tuple"])
        if "$dict" in value:
            return {_hashable(decode(key, tensors)): decode(item, tensors) for key, item in value["$dict"]}
        return {key: decode(item, tensors) for key, item in value.items()}
    return value


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
