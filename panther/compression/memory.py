"""Predict the peak memory of compressing, and the bytes of the files of a streamed model, before the work begins.

The memory of the model's forward and backward is measured on the largest batch, by counting the bytes of tensors while
the model runs. The remaining memory follows from the sizes of the weights.
"""

__all__ = ["KEPT_OUTPUT_BYTES", "LiveBytes", "TargetFiles", "fit_bytes", "predict_disk_bytes", "predict_peak_bytes"]

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import TorchDispatchMode, storage_key, tree_leaves
from panther.compression.calibration.batches import entries_of
from panther.compression.calibration.runner import Runner, floating_tensor, resident_bytes, return_freed_memory
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import Survey, Target
from panther.compression.config import HealConfig
from panther.compression.forms import FormSettings
from panther.compression.forms.metric import wide_dtype
from panther.compression.moments.gather import moments_bytes, run_step
from panther.compression.moments.sums import Call, ShiftedSum

KEPT_OUTPUT_BYTES = 2**30  # for the original's outputs while healing, if at least twice as many bytes are free
_DOUBLE = torch.float64.itemsize
_HEAP = 1.5  # glibc's heap, over the tensors in it at their peak, while factors of many sizes are made and freed
_PLANNED = 3  # largest number of widths of a weight that are usually fitted
_CHOICES = 3  # compared, with a new layer of each form of a weight that one of them has
_DESCRIPTION_BYTES = 4000  # of a fit, its options and the names of both, beside the tensors
_TRAINED = 5  # tensors per trained parameter: value, gradient, two moments and best value


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made within the block and not freed yet.

    ``now`` is the present number of bytes on all devices, and ``peak`` the largest one; the workspace within an
    operation is not counted. ``grown`` is the largest increase of the process's memory over ``before`` (or over the
    memory at the start) on Linux. It exceeds the bytes of tensors, because glibc's heap keeps freed memory: the heap
    can be half as large again as the tensors in it, as an aligned block does not fit where a block of its size was.
    """

    def __init__(self, before: int | None = None) -> None:
        super().__init__()
        self.now = self.peak = self.grown = 0
        self._known: dict[int, Any] = {}
        self._before = resident_bytes() if before is None else before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new_tensors = {storage_key(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # a view, or written to in place
                new_tensors.pop(storage_key(leaf), None)
        for key, tensor in new_tensors.items():
            if key not in self._known:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                # torch keeps the Python object of a storage alive as long as the storage, so that the weak reference
                # ends when the memory is freed.
                self._known[key] = weakref.ref(storage, self._freed(key, storage.nbytes()))
        self.peak = max(self.peak, self.now)
        self.grown = max(self.grown, resident_bytes() - self._before)
        return result

    def _freed(self, key: int, size: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        return freed


def predict_peak_bytes(
    runner: Runner,
    survey: Survey,
    settings: FormSettings,
    num_components: Mapping[Target, int],
    widths: Mapping[Target, Sequence[int]],
    passes: Sequence[Sequence[Sequence[Target]]],
    limit: int | None,
    *,
    keep: bool,
    heal: HealConfig | None,
) -> dict[str, int]:
    """Return the predicted peak memory of each phase, in bytes on top of the present memory.

    ``num_components`` is the number of components of each target that are stored, ``widths`` the widths of its codes in
    bits. ``limit`` is the number of bytes that all new layers may take.

    Cost: a forward and backward of the largest batch, and a forward of the largest held-out one.
    """
    dense = sum(target.dense_bytes for target in num_components)
    new = dense if limit is None else limit
    stored = {
        target: fit_bytes(target, count, min(len(widths[target]), _PLANNED), settings)
        for target, count in num_components.items()
    }
    heap, unwritten = _HEAP, dict.fromkeys(stored, 0)
    if runner.is_streaming:  # fits and new layers are in files, and freed blocks are returned
        unwritten = {target: fit_bytes(target, 0, len(widths[target]), settings) for target in stored}
        new, stored, heap = 0, dict.fromkeys(stored, 0), 1.0
    kept_bytes = keep * sum(
        _DOUBLE * target.groups * (target.inner**2 + target.outer**2)
        for target in num_components
        if target.kind.has_metric
    )
    backward = grown = forward = hidden = outputs = 0
    stated: dict[str, int] = {}
    if runner.batches:
        sizes = [sum(moments_bytes(targets, survey.gradients) for targets in inputs) for inputs in passes]
        if passes:
            largest = max(range(len(passes)), key=sizes.__getitem__)
            backward, grown = _backward_bytes(runner, passes[largest], gradients=survey.gradients)
            stated["moments"] = (
                max(sizes) + max(backward, grown) + sum(stored.values()) * (len(passes) > 1) + kept_bytes
            )
        forward, hidden, outputs = _forward_bytes(runner, survey, heal)
    stated["fits"] = kept_bytes + max(
        _fitting_bytes(inputs, stored, unwritten, survey.gradients, widths, heap, in_files=runner.is_streaming)
        for inputs in passes or [[list(num_components)]]
    )
    # Up to three choices are compared, after a backward pass has measured single layers. While a quantized layer runs,
    # its dense weight can be computed: on CPUs in blocks, or as a whole where they have no products of integers.
    widest = max(target.dense_numbers * wide_dtype(target).itemsize for target in num_components)
    stated["choice"] = kept_bytes + sum(stored.values()) + (3 if runner.held_out else 1) * new
    stated["choice"] += (1 if runner.is_streaming else 2) * widest
    stated["choice"] += max(forward, max(backward, grown) + outputs)
    if heal is not None:
        numbers = max(wide_dtype(target).itemsize / target.weight.itemsize for target in num_components) * new
        copied = dense  # copies of quantized weights, in the form in which they are trained
        stated["healing"] = int(new + _TRAINED * numbers + copied + backward + hidden)
    return stated


def fit_bytes(target: Target, num_components: int, num_widths: int, settings: FormSettings) -> int:
    """Return the bytes of the components and codes of a weight that are kept for the choice."""
    ranks = min(num_components, target.inner, target.outer) + num_widths * settings.correction_rank(target)
    components = wide_dtype(target).itemsize * ranks * target.groups * (target.inner + target.outer)
    # Codes take a byte each, and so do zeros; scales are in bfloat16.
    num_scales = target.groups * target.outer * -(-target.inner // (settings.group_size or target.inner))
    return components + num_widths * (target.dense_numbers + 3 * num_scales)


def _fitting_bytes(
    inputs: Sequence[Sequence[Target]],
    stored: Mapping[Target, int],
    unwritten: Mapping[Target, int],
    gradients: bool,
    widths: Mapping[Target, Sequence[int]],
    heap: float,
    *,
    in_files: bool,
) -> int:
    """Return the peak bytes while the weights of a pass are fitted one by one, and their moments freed.

    ``unwritten`` are the bytes of the codes of a weight until they are in a file. ``in_files`` states whether moments
    are in files already.
    """
    before = sum(stored.values()) - sum(stored[target] for targets in inputs for target in targets)
    left = 0 if in_files else sum(moments_bytes(targets, gradients) for targets in inputs)
    largest = 0
    for targets in inputs:
        for target in targets:
            work = target.kind.work_bytes(target, len(widths[target]), heap) + unwritten[target]
            largest = max(largest, before + left + work)
            if not in_files:
                left -= moments_bytes([target], gradients) if gradients or target is targets[-1] else 0
            before += stored[target]
    return largest


def _backward_bytes(runner: Runner, inputs: Sequence[Sequence[Target]], *, gradients: bool) -> tuple[int, int]:
    """Return the peak bytes of tensors in a forward and backward of the largest batch that gathers moments.

    The second number is the growth of the process on the CPU. It includes freed memory that malloc keeps, which later
    batches use again.
    """

    def add(target: Target, call: Call, slope: Tensor | None) -> None:
        if not target.kind.has_metric:
            return
        for rows in target.kind.input_rows(call.module, call.x, target.groups):
            roots = None if slope is None else rows.new_ones(rows.shape[:2])
            ShiftedSum(target.groups, target.inner, rows.device).add(rows, roots)

    targets = [target for group in inputs for target in group]
    compared = {target for group in inputs if len(group) > 1 for target in group}
    batch = max(runner.batches, key=entries_of)
    return_freed_memory()  # otherwise the process would not grow while it uses this memory again
    with LiveBytes(runner.resident_bytes) as live:
        for step in runner.steps([(batch, 0)], targets, gradients=gradients):
            run_step(runner, step, compared, add, gradients=gradients)
    return live.peak, live.grown if runner.device.type == "cpu" else 0


@torch.no_grad()
def _forward_bytes(runner: Runner, survey: Survey, heal: HealConfig | None) -> tuple[int, int, int]:
    """Return the peak bytes in a forward of the largest held-out batch, and of outputs that are kept.

    The second number is that of the outputs that healing keeps. In a model that runs part by part, nothing larger hides
    the outputs that are compared: the first number counts three outputs of the model, and the third number is that of
    three outputs of the layer with the largest output, whose loss is measured. Otherwise the third number is 0.
    """
    batch = max(runner.held_out, key=entries_of)
    sizes: list[int] = []
    layer_sizes = [0]

    def observe(sizes: list[int], module: nn.Module, _: Any, output: Any) -> None:
        if (first := floating_tensor(output)) is not None:
            sizes.append(first.nbytes)

    layers = {module for target in survey.targets for module in target.modules}
    places = blocks_of(runner.model, layers) if heal is not None and heal.match == "hidden" else []
    with ExitStack() as hooks, LiveBytes() as live:
        for block in {parent.get_submodule(name) for parent, name in places}:
            hooks.callback(block.register_forward_hook(partial(observe, sizes)).remove)
        for layer in layers if runner.is_streaming else ():
            hooks.callback(layer.register_forward_hook(partial(observe, layer_sizes)).remove)
        output = runner.output(batch)
        if runner.is_streaming:
            exact = output.clone()
            output = runner.output(batch)
            output - exact
    # Convolutions also need workspace: in a forward of EfficientNet-lite0 four times the bytes of the tensors.
    peak = max(live.peak, live.grown) if runner.device.type == "cpu" else live.peak
    if heal is None:
        return peak, 0, 3 * max(layer_sizes)
    entries = sum(map(entries_of, (*runner.batches, *runner.held_out)))
    hidden = (output.nbytes + sum(sizes)) * entries // max(entries_of(batch), 1)
    return peak, min(hidden, runner.spare_bytes(KEPT_OUTPUT_BYTES)), 0


@dataclass(frozen=True)
class TargetFiles:
    """The bytes of the files of one weight of a streamed model.

    Attributes:
        fit: Its fit in all forms.
        moments: Its moments.
        places: The parts that contain it, by their number in the order in which the parts gather moments.
    """

    fit: int
    moments: int
    places: Sequence[int]


def predict_disk_bytes(
    targets: Sequence[TargetFiles],
    num_parts: int,
    results: int,
    gradients: int,
    measured_gradients: int,
    new_layers: int,
    *,
    keeps_moments: bool,
) -> dict[str, int]:
    """Return the largest bytes of all files while moments are gathered and weights fitted, and of the choice.

    Args:
        targets: The weights.
        num_parts: Number of parts of the model.
        results: Bytes of the results of all parts for all batches.
        gradients: Largest bytes of the gradients at these results that wait for a part.
        measured_gradients: The same, while losses of the fitted weights are measured.
        new_layers: Bytes that the new layers may take.
        keeps_moments: Whether the moments of all weights stay until the weights are fitted, and longer.
    """
    fits = states = complete = largest = 0
    for part in range(num_parts):
        completed = [target for target in targets if max(target.places) == part]
        fits += sum(target.fit + _DESCRIPTION_BYTES for target in completed)
        if completed:  # its file also has the sums of weights that are called in this part and in later ones
            states += sum(target.moments for target in targets if min(target.places) <= part < max(target.places))
        # The weights are fitted from their moments, which are in a file until the last of them is fitted.
        moments = sum(target.moments for target in completed)
        complete += keeps_moments * moments  # in another file
        largest = max(largest, results + gradients + fits * (not keeps_moments) + states + moments + complete)
    choice = complete + fits + states + results + max(measured_gradients + new_layers, _CHOICES * new_layers)
    return {"forward": results, "moments": largest, "choice": choice}
