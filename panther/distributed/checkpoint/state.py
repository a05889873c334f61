"""The state of a model, its optimizer and the random generators, under names that do not depend on the layout.

Tensors and DTensors go to DCP by name; numbers, strings and containers of them go to the manifest.

torch's ``get_optimizer_state_dict`` also names an optimizer's state, but does not support everything that is saved
here: it takes a step on an optimizer without state, after which Adam's step count is 1, and fails if an optimizer has
the parameters of more than one pipeline stage.
"""

__all__ = [
    "are_stages", "decode", "encode", "fill_model", "fill_optimizer", "first_names", "is_tensor", "model_state",
    "module_name", "named_parameters", "optimizer_state", "optimizer_targets", "optimizer_undo", "optimizer_values",
    "parameters_by_name", "parts_of", "places", "plain", "random_state", "set_random_state",
]  # fmt: skip

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from panther._torch import sync_zero_groups
from panther.distributed.checkpoint.manifest import places
from panther.distributed.checkpoint.storage import empty
from panther.distributed.pipeline.stage_modules import StageModules
from panther.errors import CheckpointError
from panther.nn.io import unwrapped
from panther.nn.sketch_record import plain_state

_DEEPEST = 50  # far below Python's recursion limit, as a dict whose keys are numbers takes three levels in the manifest
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # torch inserts these into names


def are_stages(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return whether the argument is the stages of a pipeline instead of a model."""
    return isinstance(model, StageModules) or not isinstance(model, nn.Module)


def parts_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose names are the names in a checkpoint: a model without wrappers, or this rank's stages."""
    return [unwrapped(stage) for stage in model] if are_stages(model) else [unwrapped(model)]  # type: ignore


def plain(name: str) -> str:
    """Return the name of a tensor or module without the names of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def module_name(name: str) -> str:
    """Return the name of a module without the names of its wrappers; the last part may be a wrapper too."""
    return plain(f"{name}.").removesuffix(".")


def model_state(parts: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the entries of the state_dicts by their names in a checkpoint; tensors are not copied."""
    state: dict[str, Any] = {}
    for part in parts:
        for name, value in plain_state(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(f"{name!r} is on the meta device and has no values: initialise the model first")
            state[plain(name)] = value
    return state


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each entry, because tensors such as tied weights have more than one name."""
    first_by_place: dict[Any, str] = {}
    first = {}
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        place: Any = name
        if isinstance(local, Tensor) and local.numel():  # all empty shards have the address 0
            # Shape and strides are compared too, because a view of the first rows has the same address.
            place = (local.data_ptr(), local.device, value.dtype, value.shape, local.stride())
        first[name] = first_by_place.setdefault(place, name)
    return first


def fill_model(parts: Iterable[nn.Module], values: Mapping[str, Any]) -> None:
    """Load values by their names in a checkpoint, by ``load_state_dict``, which also draws sketches of loaded seeds."""
    for part in parts:
        part.load_state_dict({name: values[plain(name)] for name in part.state_dict() if plain(name) in values})


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: the inner one of a ZeroRedundancyOptimizer, or the optimizer itself."""
    return optimizer.optim if _is_zero(optimizer) else optimizer  # type: ignore[attr-defined]


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is a ZeroRedundancyOptimizer, without importing its module, which is slow and warns."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def parameters_by_name(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of modules by their names in a checkpoint."""
    return {plain(name): parameter for part in parts for name, parameter in part.named_parameters()}


def named_parameters(optimizer: torch.optim.Optimizer, parts: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters on this rank with their names, in the optimizer's order."""
    names = {parameter: name for name, parameter in parameters_by_name(parts).items()}
    parameters = [parameter for group in _inner(optimizer).param_groups for parameter in group["params"]]
    if strangers := sum(parameter not in names for parameter in parameters):
        raise CheckpointError(
            f"{strangers} of the optimizer's {len(parameters)} parameters are not the model's: pass the model of this "
            "optimizer, or make the optimizer after wrapping the model"
        )
    return [(names[parameter], parameter) for parameter in parameters]


def optimizer_state(
    optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the optimizer's class, states and settings by parameter, encoded, and the parameters' names by group.

    Tensors are added to ``tensors`` under the names ``optimizer.<parameter>.<key>``.
    """
    inner = _inner(optimizer)
    names = [name for name, _ in named_parameters(inner, parts)]
    state_dict = inner.state_dict()
    states = {
        names[number]: encode(state, f"optimizer.{names[number]}", tensors)
        for number, state in state_dict["state"].items()
    }
    settings = {}
    for group, public in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        # Schedulers set the public groups of a ZeroRedundancyOptimizer, which its next step copies to the inner ones.
        latest = (public if _is_zero(optimizer) else group).items()
        group_settings = {key: value for key, value in latest if key not in ("params", "param_names")}
        for number in group["params"]:
            settings[names[number]] = encode(group_settings, f"optimizer.{names[number]}.setting", tensors)
    groups = _names_by_group(optimizer, parts)
    return {"class": type(inner).__name__, "states": states, "settings": settings, "groups": groups}


def _names_by_group(optimizer: torch.optim.Optimizer, parts: Iterable[nn.Module]) -> list[list[str]]:
    """Return the names of each group's parameters, with those whose state a ZeroRedundancyOptimizer has elsewhere."""
    names = {parameter: name for name, parameter in parameters_by_name(parts).items()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


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
    parameters, groups = named_parameters(inner, parts), _names_by_group(optimizer, parts)
    if missing := [name for group in groups for name in group if name not in saved["settings"]]:
        raise CheckpointError(
            f"the checkpoint's optimizer did not have {', '.join(missing[:5])}: give this one the same parameters"
        )
    settings = {
        place: empty(entries[place]) for group in groups for name in group for place in places(saved["settings"][name])
    }
    return settings | {
        place: _like(parameter, entries[place])
        for name, parameter in parameters
        for place in places([saved["states"].get(name), saved["settings"][name]])
    }


def _like(parameter: Tensor, entry: Mapping[str, Any]) -> Tensor:
    if entry["shape"] == list(parameter.shape):
        return torch.empty_like(parameter, dtype=getattr(torch, entry["dtype"]), requires_grad=False)
    target = empty(entry)
    if not target.dim():
        return target  # a count of steps; load_state_dict moves it if necessary
    target = target.to(parameter.device)
    if isinstance(parameter, DTensor):  # states of a different shape, such as Adafactor's factors, are replicated
        mesh = parameter.device_mesh
        return DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return target


def optimizer_values(
    optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module], saved: Mapping[str, Any], loaded: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return a state_dict for the optimizer, made of saved states and settings whose tensors have been loaded.

    Parameters of one group of the optimizer must have had equal settings.
    """
    names = [name for name, _ in named_parameters(optimizer, parts)]
    state_dict = _inner(optimizer).state_dict()
    # Numbers of parameters differ between layouts; names do not.
    states = {number: saved["states"][name] for number, name in enumerate(names) if name in saved["states"]}
    state_dict["state"] = decode(states, loaded)
    # A rank of a ZeroRedundancyOptimizer may have no parameter of a group, whose settings it needs all the same.
    for index, (group, members) in enumerate(
        zip(state_dict["param_groups"], _names_by_group(optimizer, parts), strict=True)
    ):
        saved_settings = [saved["settings"][name] for name in members]
        # Settings with tensors are not compared, because the names of the tensors differ.
        if any(each != saved_settings[0] for each in saved_settings if not any(places(each))):
            raise CheckpointError(
                f"parameters of the optimizer's group {index} had different settings when they were saved: use the "
                "same groups"
            )
        if saved_settings:
            # These select a kernel of the present device, and a GradScaler asks what the constructor was told.
            kernels = {key: group[key] for key in ("fused", "foreach") if key in group}
            group.update(decode(saved_settings[0], loaded) | kernels)
    return state_dict


def fill_optimizer(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """Load the result of :func:`optimizer_values` by the optimizer's own ``load_state_dict``."""
    inner = _inner(optimizer)
    inner.load_state_dict(values)
    if _is_zero(optimizer):
        sync_zero_groups(optimizer, inner)


def optimizer_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores the present states and settings of the optimizer."""
    inner = _inner(optimizer)
    state, groups = inner.state, inner.param_groups
    state_dict = inner.state_dict()

    def undo() -> None:
        if type(inner).load_state_dict is torch.optim.Optimizer.load_state_dict:
            inner.state, inner.param_groups = state, groups  # torch's load_state_dict replaces both objects
        else:
            inner.load_state_dict(state_dict)
        if _is_zero(optimizer):
            sync_zero_groups(optimizer, inner)

    return undo


def random_state(place: str, tensors: dict[str, Tensor]) -> Any:
    """Return the states of the generators of torch, Python and NumPy on this rank, encoded."""
    version, integers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    states = {
        "torch": torch.get_rng_state(),
        # Tensors instead of long tuples of integers, because tensors are stored in binary.
        "python": [version, torch.tensor(integers, dtype=torch.int64), gauss],
        "numpy": [kind, torch.tensor(keys.astype(np.int64)), *rest],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return encode(states, place, tensors)


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set the decoded states of :func:`random_state`."""
    torch.set_rng_state(states["torch"])
    version, integers, gauss = states["python"]
    random.setstate((version, tuple(integers.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def encode(value: Any, place: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Return a value for JSON. Tensors are added to ``tensors`` under names that begin with ``place``.

    Only numbers, strings, None, tensors, and lists, tuples and dicts of these can be stored.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{place[:60]} is nested more than {_DEEPEST} levels deep: store less")
    if value is None or isinstance(value, bool | str):
        return value
    # Checked before Real, because integers of NumPy are both.
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided:
            kind = "on the meta device and has no values" if value.is_meta else f"of the layout {value.layout}"
            raise CheckpointError(f"{place} is a tensor {kind}: a checkpoint holds dense tensors with values")
        tensors[place] = value
        return {"$tensor": place}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{place}.{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        # Quotes, because {"a": {"b": x}} and {"a.b": y}, or {1: x} and {"1": y}, would have one name.
        steps = [key if isinstance(key, str) and key.isidentifier() else repr(key) for key in value]
        pairs = [
            [encode(key, place, {}, depth + 1), encode(item, f"{place}.{step}", tensors, depth + 1)]
            for step, (key, item) in zip(steps, value.items(), strict=True)
        ]
        # JSON has only string keys. Other keys, and keys that look like the marks of this format, become pairs.
        is_counter = isinstance(value, Counter)  # MultiStepLR's milestones
        if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$counter" if is_counter else "$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}: a checkpoint holds numbers, strings, None, lists, tuples, dicts and "
        "tensors"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`encode`; tensors that were not loaded become None."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors.get(value["$tensor"])
        if "$tuple" in value:
            return tuple(decode(item, tensors) for item in value["$tuple"])
        for mark, mapping in (("$dict", dict), ("$counter", Counter)):
            if mark in value:
                return mapping({_hashable(decode(key, tensors)): decode(item, tensors) for key, item in value[mark]})
        return {key: decode(item, tensors) for key, item in value.items()}
    return value


def is_tensor(value: Any) -> bool:
    """Return whether a value is the encoding of a tensor."""
    return isinstance(value, dict) and "$tensor" in value


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
