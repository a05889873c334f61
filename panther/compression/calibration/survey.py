"""Find the layers to compress, and give the reason for every layer that is kept dense.

Layers are selected by their structure. A run of the model then shows which of them are called, which share an input,
and which affect the output.
"""

__all__ = [
    "blocks_of", "check_adapters", "check_model", "is_selected", "select_targets", "selectors_of", "survey_targets",
    "unmatched_notes",
]  # fmt: skip

import fnmatch
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from panther._torch import children_of, has_packed_weights, storage_key
from panther.compression.calibration.batches import PLAIN, plain_modules
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.steps import Receive, Step, input_key, watched
from panther.compression.calibration.targets import (
    COMPRESSED,
    LEAST_RANK,
    Further,
    Selector,
    SkippedLayer,
    Survey,
    Target,
    holder_of,
    kind_of_layer,
    stacked_layers_of,
)
from panther.errors import CompressionError, NumericalWarning
from panther.nn.factors import settings_refusal, weight_refusal
from panther.nn.protocol import CompressedModule


def check_model(model: Any) -> None:
    """Raise unless the argument is a module whose layers can be replaced."""
    if not isinstance(model, nn.Module):
        instance = f"the class {model.__name__}: pass an instance of it" if isinstance(model, type) else None
        raise TypeError(f"the model must be an nn.Module, not {instance or f'a {type(model).__name__}'}")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise CompressionError(
            f"the model is wrapped in {type(model).__name__}, which keeps references to the old parameters: compress "
            "model.module, and wrap it again"
        )
    for name, parameter in model.named_parameters():
        # A DTensor is recognized by its method, because torch may be built without DTensor.
        if hasattr(parameter, "full_tensor"):
            raise CompressionError(
                f"{name!r} is a DTensor, on a device mesh: compress the model before it is sharded, or compress "
                "panther.distributed.unshard_module(model)"
            )


def check_adapters(model: nn.Module) -> None:
    """Raise if layers have adapters of PEFT.

    PEFT merges adapters into a dense weight, and would lose them if the layer was replaced. The adapters themselves are
    pairs of nn.Linear, and would be compressed too.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # no model has adapters before this module is imported
    if peft is None:
        return
    adapted = [name for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)]
    if adapted:
        raise CompressionError(
            f"{len(adapted)} of the layers have adapters of PEFT (first {adapted[0]!r}), which would be compressed "
            "too: detach them (unload() of the PEFT model) or merge them (merge_and_unload()), compress the base "
            "model, and attach adapters to the result"
        )


def select_targets(
    model: nn.Module,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    *,
    rank: int = LEAST_RANK,
    seeded: bool = False,
    smallest: Callable[[Target], int] | None = None,
    has_codes: bool = False,
    refuse: Callable[[Target], str | None] | None = None,
) -> Survey:
    """Find the layers that would shrink, and the reason why each further module with a matrix is kept dense.

    ``smallest`` returns the smallest number of bytes that a weight can take. Without it, a weight shrinks if a low-rank
    layer of rank ``rank`` is smaller. ``has_codes`` is whether weights that can only have codes are layers to compress,
    such as embeddings. ``refuse`` returns why a weight is kept dense, or None.
    """
    included, excluded = selectors_of("include", include, ("*",)), selectors_of("exclude", exclude, ())
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    # For each module with a matrix: the reason why it is kept dense, or None for a layer to compress.
    reasons: dict[nn.Module, str | None] = {}
    stacked_names: dict[nn.Module, Mapping[str, nn.Module]] = {}
    for module, places in [*names.items()]:
        if (stacked_layers := stacked_layers_of(module)) is not None:
            stacked_names[module] = stacked_layers
            for parameter_name, layer in stacked_layers.items():
                names[layer] = [f"{place}.{parameter_name}".removeprefix(".") for place in places]
                reasons[layer] = _refusal(layer, [*names[layer], *places], included, excluded, has_codes=has_codes)
        elif isinstance(module, CompressedModule):
            reasons[module] = COMPRESSED
        elif _holds_matrix(module) and not isinstance(module, ParametrizationList):
            reasons[module] = _refusal(module, places, included, excluded, has_codes=has_codes)
    for module in plain_modules(model):
        if reasons.get(module, "") is None and not _named_types(module, included):
            reasons[module] = PLAIN

    # A weight that layers share becomes one target, so that it is compressed once and stays shared. Layers also share a
    # weight if their Parameters differ and use the same memory, as after `b.weight.data = a.weight.data`.
    owners: dict[Any, dict[nn.Module, None]] = {}
    for module in names:
        for name, parameter in module.named_parameters(recurse=False):
            if name not in stacked_names.get(module, ()):
                owners.setdefault(_memory_of(parameter), {})[module] = None
    targets = []
    weights = [module.get_parameter("weight") for module, reason in reasons.items() if reason is None]
    for sharing in dict.fromkeys(tuple(owners[_memory_of(weight)]) for weight in weights):
        sound = [module for module in sharing if reasons.get(module, "") is None]
        if len(sharing) > 1 and not (len(sound) == len(sharing) and _can_share(sharing)):
            for module in sound:  # the message names an owner that is not compressed, if there is one
                owner = next(m for m in sorted(sharing, key=sound.__contains__) if m is not module)
                reasons[module] = f"shares its weight with {names[owner][0]!r} ({type(owner).__name__})"
            continue
        target = _target(tuple(name for module in sharing for name in names[module]), sharing, seeded=seeded)
        if refuse is not None and (reason := refuse(target)) is not None:
            reasons |= {module: reason for module in sharing}
            continue
        if not (has_codes or seeded or target.kind.takes_every_form):
            reasons[sound[0]] = target.size_refusal
            continue
        minimum, dense = target.numbers(rank), target.dense_numbers
        if minimum < dense if smallest is None else smallest(target) < target.dense_bytes:
            targets.append(target)
        elif smallest is None or target.groups > 1:
            reasons[sound[0]] = f"would not shrink: matrix rank {rank} takes {minimum:,} numbers, the layer {dense:,}"
        else:
            reasons[sound[0]] = f"would not shrink: no form takes less than its {target.dense_bytes:,} bytes"
    skipped = [
        SkippedLayer(names[module][0] or "(the model)", type(holder_of(module)).__name__, reason)
        for module, reason in reasons.items()
        if reason is not None
    ]
    notes = unmatched_notes(included, excluded, [name for module_names in names.values() for name in module_names])
    if targets and (compressed := sum(entry.reason == COMPRESSED for entry in skipped)):
        notes.append(
            f"layers that were compressed already: {compressed}; they do not change, and the budget applies to the "
            "remaining layers: to choose all ranks jointly, compress the original model"
        )
    return Survey(tuple(targets), tuple(skipped), notes=tuple(notes))


def _can_share(modules: Sequence[nn.Module]) -> bool:
    """Return whether new layers in the place of these layers can share their weight."""
    kinds = dict.fromkeys(map(kind_of_layer, modules))
    return any(kind is not None and kind.can_share(modules) for kind in kinds)


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module, which is none of torch's, holds more than one matrix in a parameter."""
    is_foreign = not type(module).__module__.startswith("torch.") and kind_of_layer(module) is None
    return is_foreign and any(
        not is_lazy(parameter) and parameter.dim() == 3 and len(parameter) > 1
        for parameter in module.parameters(recurse=False)
    )


def _memory_of(parameter: Tensor) -> Any:
    """Return a key that is equal for parameters that are views of the same memory with the same layout."""
    if is_lazy(parameter) or parameter.is_meta or parameter.layout is not torch.strided or not parameter.numel():
        return id(parameter)
    return storage_key(parameter), parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype


def selectors_of(role: str, argument: Any, default: tuple[Selector, ...]) -> tuple[Selector, ...]:
    """Return the selectors of an argument ``include`` or ``exclude``, which ``role`` names; None is ``default``."""
    if argument is None:
        return default
    selectors = argument if isinstance(argument, (list, tuple, set, frozenset)) else (argument,)
    for selector in selectors:
        if not (isinstance(selector, (type, str)) or callable(selector)):
            raise TypeError(f"{role} takes types, globs of names and functions, not {type(selector).__name__}")
    return tuple(selectors)


def unmatched_notes(included: Sequence[Selector], excluded: Sequence[Selector], names: Sequence[str]) -> list[str]:
    """Return a note for each glob that matches no name."""
    return [
        f"{role}={selector!r} matches no name of model.named_modules()"
        for role, selectors in (("include", included), ("exclude", excluded))
        for selector in selectors
        if isinstance(selector, str) and not any(fnmatch.fnmatchcase(name, selector) for name in names)
    ]


def is_selected(selector: Selector, names: Sequence[str], module: nn.Module) -> bool:
    """Return whether a selector takes a module that has these names."""
    if isinstance(selector, type):
        return isinstance(module, selector)
    if isinstance(selector, str):
        return any(fnmatch.fnmatchcase(name, selector) for name in names)
    return any(selector(module, name) for name in names)


def _holds_matrix(module: nn.Module) -> bool:
    # Linear layers and convolutions count even if pruning or weight_norm computes their weight, which is then not in
    # `_parameters`. Quantized layers of torch hold packed weights, which are not parameters either.
    kind = kind_of_layer(module)
    return (
        (kind is not None and kind.takes_every_form)
        or has_packed_weights(module)
        or any(is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


def _refusal(
    module: nn.Module,
    names: Sequence[str],
    included: Sequence[Selector],
    excluded: Sequence[Selector],
    *,
    has_codes: bool,
) -> str | None:
    """Return why a module that holds a matrix is kept dense, or None if the module can be compressed.

    For a stacked weight, ``names`` are the places of the parameter and of the module that holds it, and the checks of a
    forward, of hooks and of the class are those of the module.
    """
    kind, holder = kind_of_layer(module), holder_of(module)
    if _is_stack(module):
        return (
            "holds a stack of matrices and is not a module of experts as transformers has them, so that nothing tells "
            "what multiplies by it: kept as it is"
        )
    if has_packed_weights(module):
        return "is quantized: compress first, then quantize"
    if kind is None:
        return "holds a matrix, and is not a Linear, Conv2d or Conv1D layer: kept as it is"
    if not (has_codes or kind.takes_every_form):
        return kind.without_codes
    if reason := kind.why_never_called(module):
        return reason
    if names == [""]:
        return "is the model itself, which cannot be replaced in place: wrap it in nn.Sequential"
    if hasattr(holder, "parametrizations"):
        return "is parametrized: remove the parametrizations first"
    if reason := weight_refusal(module):
        return reason
    weight = module.get_parameter("weight")
    # A subclass is admitted only by a type in `include`, because a glob or function could match it by accident.
    if reason := kind.why_other_forward(module, _named_types(module, included)):
        return reason
    if not any(is_selected(selector, names, holder) for selector in included):
        return "is not included"
    if any(is_selected(selector, names, holder) for selector in excluded):
        return "is excluded"
    if weight.is_meta:
        return "is on the meta device: load its weights first"
    if "forward" in vars(holder):
        return "has a forward that was set on it (as accelerate does), which would be lost: remove it first"
    if reason := settings_refusal(module):  # hooks of a module of experts stay
        return reason
    # isfinite would copy the weight, which may be mapped from a file; aminmax returns NaN if any entry is.
    if weight.numel() and not all(map(isfinite, torch.stack(torch.aminmax(weight.detach())).tolist())):
        return "has a weight with NaN or infinite entries"
    if getattr(module, "max_norm", None) is not None:
        return "has max_norm, with which each lookup changes rows of the weight"
    return None


def _named_types(module: nn.Module, selectors: Sequence[Selector]) -> list[type]:
    return [selector for selector in selectors if isinstance(selector, type) and isinstance(module, selector)]


def _target(names: tuple[str, ...], modules: tuple[nn.Module, ...], *, seeded: bool) -> Target:
    kind = kind_of_layer(modules[0])
    assert kind is not None  # because the layers of a target are eligible
    return Target(names, modules, *kind.shape(modules[0]), seeded)


def survey_targets(runner: Runner, survey: Survey, *, gradients: bool) -> Survey:
    """Run batches until each layer was called, and skip layers that are not called or do not affect the output.

    The first batch calls all layers of most models. If it does not, further batches run forward until each layer was
    called, and backward where they call a further layer.
    """
    keys: dict[Target, list[Any]] = {}  # keys of the inputs of a target's calls, in the first batch that calls it
    reached: set[Target] = set()
    unreadable: dict[Target, str] = {}  # targets whose calls cannot be read, with the reason
    notes = list(survey.notes)
    for number, batch in enumerate(runner.batches):
        pending = [target for target in survey.targets if target not in keys and target not in unreadable]
        if not pending:
            break
        if number and not _calls_any(runner, batch, pending):
            continue
        batch_keys, has_gradient = _survey_batch(runner, batch, pending, reached, unreadable, gradients=gradients)
        keys |= {target: [(number, *key) for key in places] for target, places in batch_keys.items()}
        # The first batch that calls a layer tells. Without such a call nothing has a gradient.
        is_first = bool(batch_keys) and len(batch_keys) == len(keys)
        if is_first and gradients and not has_gradient:
            gradients = False
            notes.append("the output has no gradient, so G is the identity and ranks are uniform (method 'activation')")
            warnings.warn(f"method='two_sided' is not possible: {notes[-1]}", NumericalWarning, stacklevel=3)
    groups = _agreed_groups(runner, survey.targets, keys, reached, gradients=gradients)
    reasons: dict[Target, str] = {}
    inputs: dict[Any, list[Target]] = {}
    for target, (group, is_reached) in groups.items():
        if target in unreadable:
            reasons[target] = f"{unreadable[target]}: kept as it is"
        elif group is None:
            reasons[target] = "is not called on any calibration batch"
        elif not is_reached:
            reasons[target] = (
                f"has no gradient: {runner.output_name}, which is compared, does not depend on it, or only through "
                "no_grad, detach, zeros or reentrant checkpointing"
            )
        else:
            # Without a metric, the moments are not those of the input, so that no target shares them.
            inputs.setdefault(group if target.kind.has_metric else (group, target), []).append(target)
    return Survey(
        # `inputs` is in the order in which the layers run; layers that only other ranks call come last.
        targets=tuple(target for target in survey.targets if target not in reasons),
        skipped=(*survey.skipped, *(SkippedLayer(t.name, t.class_name, reason) for t, reason in reasons.items())),
        inputs=tuple(map(tuple, inputs.values())),
        gradients=gradients,
        notes=tuple(notes),
    )


def _survey_batch(
    runner: Runner,
    batch: Any,
    targets: Sequence[Target],
    reached: set[Target],
    unreadable: dict[Target, str],
    *,
    gradients: bool,
) -> tuple[dict[Target, list[Any]], bool]:
    """Run one batch: return the keys of the inputs of the targets' calls, and whether the output has a gradient.

    Targets with a gradient that is not zero are added to ``reached``, and targets with a call that cannot be read to
    ``unreadable``, with the reason.
    """
    parts: dict[int, dict[Target, list[Any]]] = {}  # for each part of the model, in the order of the first calls
    alive = []  # inputs, kept so that no address is used twice within a forward
    has_gradient = False
    for step in runner.steps([(batch, 0)], targets, gradients=gradients):
        keys = parts.setdefault(step.part, {})

        def note(
            target: Target, module: nn.Module, x: Tensor, _: Further, step: Step = step, keys: dict[Target, Any] = keys
        ) -> Receive:
            alive.append(x)
            keys.setdefault(target, []).append((step.part, *input_key(target, module, x)))
            return lambda gradient: reached.update([target] if gradient.any() else [])

        with watched(step.targets, note, runner.model, unreadable) as watch, torch.set_grad_enabled(gradients):
            output = step.forward()
            alive.clear()
            has_gradient |= step.backward(output, watch)
    all_keys: dict[Target, list[Any]] = {}
    for _, keys in sorted(parts.items()):
        for target, target_keys in keys.items():
            all_keys.setdefault(target, []).extend(target_keys)
    return all_keys, has_gradient


def _calls_any(runner: Runner, batch: Any, targets: Sequence[Target]) -> bool:
    """Return whether a batch calls one of the targets."""
    called = []
    with torch.no_grad(), watched(targets, lambda target, *_: called.append(target), unreadable={}):
        runner.output(batch)
    return bool(called)


def _agreed_groups(
    runner: Runner, targets: Sequence[Target], keys: dict[Target, list[Any]], reached: set[Target], *, gradients: bool
) -> dict[Target, tuple[Any, bool]]:
    """Return two results for each target: a key, and whether the target has a gradient.

    The key is equal for targets that share an input on each rank of the group, and None for a target that is not
    called. All ranks of a group get the same results.
    """
    numbers = {target: number for number, target in enumerate(targets)}
    first: dict[Any, int] = {}
    for target, places in keys.items():
        first.setdefault(tuple(places), numbers[target])
    group_of = [first[tuple(keys[target])] if target in keys else -1 for target in targets]
    table = torch.tensor([group_of, [target in reached or not gradients for target in targets]], device=runner.device)
    tables = [table]
    if runner.group is not None:
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size(runner.group))]
        dist.all_gather(tables, table, group=runner.group)
    groups = torch.stack([each[0] for each in tables], 1).tolist()
    is_reached = torch.stack([each[1] for each in tables]).any(0).tolist()
    order = [*keys, *(target for target in targets if target not in keys)]
    if runner.group is not None:  # the order of the calls can differ if the ranks call different layers
        order = list(targets)
    agreed: dict[Target, tuple[Any, bool]] = {}
    for target in order:
        group, has_gradient = groups[numbers[target]], is_reached[numbers[target]]
        agreed[target] = (tuple(group) if max(group) >= 0 else None), has_gradient
    return agreed


def blocks_of(model: nn.Module, layers: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the places of the blocks, as pairs of the parent module and the name of the block in it.

    Blocks are the elements of the outermost ModuleLists and Sequentials that contain some of ``layers``. If an element
    wraps a stack, as in a Sequential of an encoder and a head, the stack's elements are blocks instead. A stack is a
    ModuleList or Sequential with at least two elements of one class that contain some of the layers.
    """
    layers = layers | set(map(holder_of, layers))
    inside = {id(module) for module in model.modules() if any(child in layers for child in module.modules())}
    places: list[tuple[nn.Module, str]] = []

    def is_stack(module: nn.Module) -> bool:
        kinds = Counter(type(child) for child in module.children() if id(child) in inside and child not in layers)
        return isinstance(module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1

    def visit(module: nn.Module) -> None:
        for name, child in children_of(module).items():
            if child is None or id(child) not in inside:
                continue
            within = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
            if within and (is_stack(module) or not any(map(is_stack, child.modules()))):
                places.append((module, name))
            else:
                visit(child)

    visit(model)
    return places
