"""How much memory compressing will take at most, predicted phase by phase before it begins.

What the model itself takes is measured on the largest batch: bytes of tensors are counted while it runs. All else
follows from the sizes of the weights.
"""

__all__ = ["KEPT", "LiveBytes", "foresee"]

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import TorchDispatchMode, storage_key, tree_leaves
from panther.compression.calibration.batches import entries_of
from panther.compression.config import HealConfig
from panther.compression.fits import wide_dtype
from panther.compression.forms.options import Forms
from panther.compression.moments.batch import Call, run_batch
from panther.compression.moments.gather import moments_bytes
from panther.compression.moments.sums import Shifted, input_rows
from panther.compression.runner import Runner, floating_tensor, resident_bytes
from panther.compression.survey import blocks_of
from panther.compression.targets import Survey, Target

KEPT = 2**30  # bytes for the original's outputs while healing, where twice as many are free
_DOUBLE = torch.float64.itemsize
_PLANNED = 4  # widths of a weight that are fitted, at most: those next to two choices
_TRAINED = 5  # times the trained numbers: values, gradients, two moments and the best point


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made within, until they are freed: ``now``, and ``peak`` of it.

    Of every device; not the workspace within an operation. ``grown`` is by how much the process's memory rose at most
    over ``before``, or over what it is at first, on Linux: glibc's heap keeps what was freed, and can be half as large
    again as the tensors in it, because an aligned block does not fit where its like was.
    """

    def __init__(self, before: int | None = None) -> None:
        super().__init__()
        self.now = self.peak = self.grown = 0
        self._known: dict[int, Any] = {}
        self._before = resident_bytes() if before is None else before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {storage_key(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # a view, or written to in place
                made.pop(storage_key(leaf), None)
        for key, tensor in made.items():
            if key not in self._known:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                # torch keeps the Python object of a storage as long as the storage, so that it ends with the memory.
                self._known[key] = weakref.ref(storage, self._freed(key, storage.nbytes()))
        self.peak = max(self.peak, self.now)
        self.grown = max(self.grown, resident_bytes() - self._before)
        return result

    def _freed(self, key: int, size: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        return freed


def foresee(
    runner: Runner,
    survey: Survey,
    forms: Forms,
    most: Mapping[Target, int],
    passes: Sequence[Sequence[Sequence[Target]]],
    limit: int | None,
    *,
    keep: bool,
    heal: HealConfig | None,
) -> dict[str, int]:
    """Return the most memory of each phase in bytes, over what is held before.

    ``most`` has how many components of each target are stored, and ``limit`` the bytes that all of them may take.

    Cost: a forward and backward of the largest batch, and a forward of the largest held-out one.
    """
    dense = sum(target.dense_bytes for target in most)
    new = dense if limit is None else limit
    stored = {target: _stored_bytes(forms, target, count) for target, count in most.items()}
    kept = keep * sum(_DOUBLE * target.groups * (target.inner**2 + target.outer**2) for target in most)
    backward = forward = hidden = 0
    stated: dict[str, int] = {}
    if runner.batches:
        sizes = [sum(moments_bytes(several, survey.gradients) for several in one) for one in passes]
        if passes:
            largest = max(range(len(passes)), key=sizes.__getitem__)
            backward, grown = _backward_bytes(runner, passes[largest], gradients=survey.gradients)
            stated["moments"] = max(sizes) + max(backward, grown) + sum(stored.values()) * (len(passes) > 1) + kept
        forward, hidden = _forward_bytes(runner, survey, heal)
    stated["fits"] = kept + max(
        _fitting_bytes(one, stored, survey.gradients, forms) for one in passes or [[list(most)]]
    )
    # Three choices are compared; a layer's weight is made of its codes while it runs.
    widest = max(target.dense_numbers * wide_dtype(target).itemsize for target in most)
    stated["choice"] = kept + sum(stored.values()) + (3 if runner.held_out else 1) * new + forward + 2 * widest
    if heal is not None:
        numbers = max(wide_dtype(target).itemsize / target.weight.itemsize for target in most) * new
        copied = dense  # of quantized weights, in the form in which they are trained
        stated["healing"] = int(new + _TRAINED * numbers + copied + backward + hidden)
    return stated


def _stored_bytes(forms: Forms, target: Target, count: int) -> int:
    """Return the bytes of the components and codes of a weight that are kept for the choice."""
    widths = min(len(forms.widths_of(target)), _PLANNED)
    ranks = count + widths * forms.largest_correction(target)
    components = wide_dtype(target).itemsize * ranks * target.groups * (target.inner + target.outer)
    return components + widths * target.dense_numbers  # codes, a byte each


def _work_bytes(target: Target, forms: Forms) -> int:
    """Return the bytes of the metric of a weight and of what is computed in it."""
    n, m = target.inner, target.outer
    squares = 4 if forms.quantizes(target) else 3  # of each moment; six products or factors of the weight
    return _DOUBLE * target.groups * (squares * (n**2 + m**2) + 6 * n * m)


def _fitting_bytes(
    inputs: Sequence[Sequence[Target]], stored: Mapping[Target, int], gradients: bool, forms: Forms
) -> int:
    """Return the most bytes while the weights of a pass are fitted one by one, each set free with its moments."""
    before = sum(stored.values()) - sum(stored[target] for several in inputs for target in several)
    left = sum(moments_bytes(several, gradients) for several in inputs)
    largest = 0
    for several in inputs:
        for target in several:
            largest = max(largest, before + left + _work_bytes(target, forms))
            left -= moments_bytes([target], gradients) if gradients or target is several[-1] else 0
            before += stored[target]
    return largest


def _backward_bytes(runner: Runner, inputs: Sequence[Sequence[Target]], *, gradients: bool) -> tuple[int, int]:
    """Return the most bytes of tensors in a forward and backward of the largest batch as moments take it.

    And by how much the process has grown by then on the CPU, with what malloc keeps, which later batches use again.
    """

    def add(target: Target, call: Call, slope: Tensor | None) -> None:
        for rows in input_rows(call.module, call.x, target.groups):
            roots = None if slope is None else rows.new_ones(rows.shape[:2])
            Shifted(target.groups, target.inner, rows.device).add(rows, roots)

    targets = [target for several in inputs for target in several]
    compared = {target for several in inputs if len(several) > 1 for target in several}
    number, batch = max(enumerate(runner.batches), key=lambda pair: entries_of(pair[1]))
    with LiveBytes(runner.resident_bytes) as live:
        run_batch(runner, batch, targets, compared, add, number=number, seed=0, gradients=gradients)
    return live.peak, live.grown if runner.device.type == "cpu" else 0


@torch.no_grad()
def _forward_bytes(runner: Runner, survey: Survey, heal: HealConfig | None) -> tuple[int, int]:
    """Return the most bytes in a forward of the largest held-out batch, and those that healing keeps of all batches."""
    batch = max(runner.held_out, key=entries_of)
    sizes = []

    def observe(module: nn.Module, _: Any, output: Any) -> None:
        if (first := floating_tensor(output)) is not None:
            sizes.append(first.nbytes)

    layers = {module for target in survey.targets for module in target.modules}
    places = blocks_of(runner.model, layers) if heal is not None and heal.match == "hidden" else []
    with ExitStack() as hooks, LiveBytes() as live:
        for block in {parent.get_submodule(name) for parent, name in places}:
            hooks.callback(block.register_forward_hook(observe).remove)
        output = runner.output(batch)
    # Convolutions take workspace beside their tensors: in a forward of EfficientNet-lite0 four times as much.
    peak = max(live.peak, live.grown) if runner.device.type == "cpu" else live.peak
    if heal is None:
        return peak, 0
    every = sum(map(entries_of, (*runner.batches, *runner.held_out)))
    hidden = (output.nbytes + sum(sizes)) * every // max(entries_of(batch), 1)
    return peak, min(hidden, runner.spare_bytes(KEPT))
