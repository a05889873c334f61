"""The state of a model, its optimizer and the random generators, under names that do not depend on the layout.

Tensors and DTensors go to DCP by name; numbers, strings and containers of them go to the manifest.

torch's ``get_optimizer_state_dict`` names an optimizer's state too, but not for all that is saved here: it takes a step
on an optimizer without state, which leaves Adam's count at 1, and fails where one optimizer has the parameters of
several pipeline stages.
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

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # added to names by torch
MODEL, OPTIMIZER = "model.", "optimizer."


def are_stages(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return whether these are the stages of a pipeline, and not a model."""
    return isinstance(model, StageModules) or not isinstance(model, nn.Module)


def parts_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose names are global: a model without its wrappers, or the stages of this rank."""
    return [unwrapped(stage) for stage in model] if are_stages(model) else [unwrapped(model)]  # type: ignore


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(parts: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the entries of the state_dicts by global name; tensors are the model's own."""
    state: dict[str, Any] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(f"{name!r} is on the meta device and has no values: initialise the model first")
            state[_plain(name)] = value
    return state


def aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of tensors that have several, such as tied weights, with the first name of each."""
    seen: dict[Any, str] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            local = value.to_local() if isinstance(value, DTensor) else value
            # Empty shards all have the address 0.
            if not local.numel():
                continue
            # Shape and strides too: a view of the first rows has the same address, and is not an alias.
            place = (local.data_ptr(), local.device, value.dtype, value.shape, local.stride())
            if place in seen:
                found[name] = seen[place]
            seen.setdefault(place, name)
    return found


def fill_model(parts: Iterable[nn.Module], values: Mapping[str, Any]) -> None:
    """Load values by global name through ``load_state_dict``, which also draws the sketches of a loaded seed."""
    for part in parts:
        part.load_state_dict({name: values[_plain(name)] for name in part.state_dict()})


def model_targets(state: Mapping[str, Any], other_names: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return empty tensors to load into, by the names they were saved under, and the saved name of each entry."""
    saved = {name: other_names.get(name, name) for name, value in state.items() if isinstance(value, Tensor)}
    targets = {MODEL + saved[name]: torch.empty_like(value) for name, value in state.items() if name in saved}
    return targets, saved


def _named_parameters(parts: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    return {parameter: _plain(name) for part in parts for name, parameter in part.named_parameters()}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: of a ZeroRedundancyOptimizer that of this rank's parameters."""
    return optimizer.optim if _is_zero(optimizer) else optimizer  # type: ignore[attr-defined]


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is a ZeroRedundancyOptimizer, without importing its module, which is slow and warns."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _names_of(optimizer: torch.optim.Optimizer, parts: Iterable[nn.Module]) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its own numbers."""
    names = _named_parameters(parts)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strangers := sum(parameter not in names for parameter in parameters):
        raise CheckpointError(
            f"{strangers} of the optimizer's {len(parameters)} parameters are not the model's: pass the model that it "
            "was made from, or make the optimizer after wrapping the model"
        )
    return [names[parameter] for parameter in parameters]


def optimizer_state(
    optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors by ``optimizer.<parameter>.<key>``; and the class, other values, and settings by parameter."""
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
    """Return empty tensors for the saved states of this rank's parameters."""
    inner = _inner(optimizer)
    if saved["class"] != type(inner).__name__:
        raise CheckpointError(
            f"the checkpoint has the state of {saved['class']}, but the optimizer is {type(inner).__name__}: make the "
            "same kind, or load without an optimizer"
        )
    names = _names_of(inner, parts)
    if missing := [name for name in names if name not in saved["settings"]]:
        raise CheckpointError(
            f"the checkpoint's optimizer did not have {', '.join(missing[:5])}: give this one the same parameters"
        )
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    wanted = dict(zip(names, parameters, strict=True))
    targets = {}
    for place, entry in entries.items():
        # Both names of parameters and keys of settings may have dots: the longest matching parameter is meant.
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
    # Scalars such as step counts.
    if not shape:
        return torch.empty(shape, dtype=dtype)  # a count of steps; load_state_dict moves it if necessary
    if isinstance(parameter, DTensor):  # a state of a different shape, such as Adafactor's factors, is replicated
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
    """Load states and settings through the optimizer's own ``load_state_dict``."""
    inner = _inner(optimizer)
    names = _names_of(inner, parts)
    whole = inner.state_dict()
    # Numbers of parameters differ between layouts; names do not.
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
        if any(one != chosen[0] for one in chosen if not _has_tensor(one)):  # tensors differ by name alone
            raise CheckpointError(
                f"parameters of the optimizer's group {index} had different settings when they were saved: use the "
                "same groups"
            )
        if chosen:
            group.update({key: decode(value, loaded) for key, value in chosen[0].items()})
    # In the order of the numbers, as torch writes it.
    whole["state"] = dict(sorted(states.items()))
    inner.load_state_dict(whole)
    if _is_zero(optimizer):
        # Private, but what its own load_state_dict calls: its groups, which users see, are copies of the inner ones.
        optimizer._sync_param_groups(inner.param_groups, optimizer.param_groups)  # type: ignore[attr-defined]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$tensor" in value or any(map(_has_tensor, value.values()))
    return isinstance(value, list) and any(map(_has_tensor, value))


def random_state(rank: int) -> tuple[dict[str, Tensor], Any]:
    """Return the states of the generators of torch, Python and NumPy on this rank."""
    tensors: dict[str, Tensor] = {}
    # Every rank has its own generators: dropout differs between ranks with different samples.
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return tensors, encode(_arrays(states), f"random.{rank}", tensors)


def _arrays(states: dict[str, Any]) -> dict[str, Any]:
    """Replace long tuples of integers by tensors, which are stored in binary."""
    version, words, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    python = [version, torch.tensor(words, dtype=torch.int64), gauss]
    return {**states, "python": python, "numpy": [kind, torch.tensor(keys.astype(np.int64)), *rest]}


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set the decoded states of :func:`random_state`."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value for JSON. Tensors are added to ``tensors`` under names that begin with ``place``.

    Raises:
        CheckpointError: If it has anything except numbers, strings, None, tensors, and lists, tuples, dicts of them.
    """
    if value is None or isinstance(value, bool | str):
        return value
    # Before Real: integers of NumPy are both.
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
        # JSON has only string keys; others, and keys like the marks of this format, become pairs.
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}: a checkpoint holds numbers, strings, None, lists, tuples, dicts and "
        "tensors"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`encode` was given; tensors that were not loaded become None."""
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
