"""Survey the layers: which are called, which share an input, and which affect the output."""

__all__ = ["blocks_of", "hooked", "input_key", "survey_targets", "watched"]

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther._torch import children_of, is_transformed, parameters_of, version_of
from panther.compression.calibration.masks import Masks
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.steps import SKIPPED_CALL, Receive, Step, Tap, Watch, ignore
from panther.compression.calibration.targets import (
    Further,
    SkippedLayer,
    Survey,
    Target,
    holder_of,
    kind_of_layer,
)
from panther.errors import CompressionError, NumericalWarning


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


@contextmanager
def watched(
    targets: Sequence[Target],
    note: Callable[[Target, nn.Module, Tensor, Further], Receive | None],
    model: nn.Module | None = None,
    unreadable: dict[Target, str] | None = None,
    masks_of: Callable[[], Masks | None] | None = None,
) -> Iterator[Watch]:
    """Call ``note`` with the arguments of every call of the targets, and its result with the gradient at the output.

    With ``model``, the outputs of its layers that look up rows require gradients, as in training. Parameters do not
    require gradients here, and reentrant checkpointing computes no gradients for a block whose input does not require
    one. For ``unreadable`` and ``masks_of`` see :func:`hooked`.
    """
    watch = Watch()

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor, further: Further) -> Tensor | None:
        if watch.is_backward:
            # The same operations as in the first forward, because non-reentrant checkpointing counts saved tensors.
            if not torch.is_grad_enabled():
                return None
            return Tap.apply(output, watch.anchor, watch.receive_again(module, x.detach()))
        receive = note(target, module, x.detach(), further)
        if receive is None:
            return None
        if not torch.is_grad_enabled():
            watch.untracked.append((module, x.detach().clone(), receive))
            return None
        watch.tapped = True
        return Tap.apply(output, watch.anchor, watch.after_forward(receive))

    def start(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        tracked = isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad
        return Tap.apply(output, watch.anchor, ignore) if tracked else None

    modules = [] if model is None else [*model.modules()]
    embeddings = [m for m in modules if (kind := kind_of_layer(m)) is not None and not kind.multiplies(m)]
    with hooked(targets, hook, unreadable, masks_of), ExitStack() as hooks:
        for embedding in embeddings:
            hooks.callback(embedding.register_forward_hook(start).remove)
        yield watch


@contextmanager
def hooked(
    targets: Sequence[Target],
    hook: Callable[[Target, nn.Module, Tensor, Tensor, Further], Tensor | None],
    unreadable: dict[Target, str] | None = None,
    masks_of: Callable[[], Masks | None] | None = None,
) -> Iterator[None]:
    """Call ``hook`` with target, layer, input, output and further arguments of every call.

    A tensor that ``hook`` returns is the new output.

    A target with a call that cannot be read is added to ``unreadable``, with the reason; without this argument such a
    call is an error. ``masks_of`` returns the masks of the present batch: tokens of experts that do not count are not
    read.
    """
    with ExitStack() as hooks:
        for kind in dict.fromkeys(target.kind for target in targets):
            of_kind = [target for target in targets if target.kind is kind]
            hooks.enter_context(kind.routed(of_kind, masks_of, unreadable))
        for target in targets:
            for module in target.modules:
                weight = parameters_of(module).get("weight")

                def call(
                    module: nn.Module,
                    args: Any,
                    kwargs: Any,
                    output: Any,
                    target: Target = target,
                    weight: Tensor | None = weight,
                ) -> Any:
                    if SKIPPED_CALL in vars(module):
                        return None
                    key = None if args or not kwargs else "input" if "input" in kwargs else next(iter(kwargs))
                    x = kwargs[key] if key is not None else next(iter(args), None)
                    if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                        kind = type(x if isinstance(output, Tensor) else output).__name__
                        verb = "takes" if isinstance(output, Tensor) else "returns"
                        raise CompressionError(
                            f"layer {target.name!r} ({target.class_name}) {verb} a {kind}, and a new layer takes and "
                            "returns one tensor: exclude the layer"
                        )
                    if reason := _unreadable_reason(module, x, weight):
                        if unreadable is None:
                            raise CompressionError(f"layer {target.name!r} {reason}: exclude the layer")
                        unreadable.setdefault(target, reason)
                        return None
                    further = args[1:], {name: value for name, value in kwargs.items() if name != key}
                    return hook(target, module, x, output, further)

                hooks.callback(module.register_forward_hook(call, with_kwargs=True).remove)
        yield


def _unreadable_reason(module: nn.Module, x: Tensor, weight: Tensor | None) -> str:
    """Return why the input of a call says nothing about the layer's weight; nothing where it does."""
    if is_transformed(x):
        return "is called within vmap or grad of torch.func, where its input has no values to read"
    if x.is_nested:
        return "reads nested tensors, whose rows cannot be read here"
    if parameters_of(module).get("weight") is not weight:
        return "is called with a weight that is not its own, as by torch.func.functional_call"
    return ""


def input_key(target: Target, module: nn.Module, x: Tensor) -> Any:
    """Return a key that is equal for two inputs, while both are alive, if and only if their moments are equal."""
    # The version distinguishes the values before and after a write. Tensors of inference mode count no writes.
    version = 0 if x.is_inference() else version_of(x)
    # Two convolutions of one input can unfold it differently.
    return x.data_ptr(), x.shape, x.stride(), version, *target.kind.geometry(module)


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
