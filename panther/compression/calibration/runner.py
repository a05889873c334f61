"""Run a model on calibration batches: its arguments, the output that is compared, and the positions that count.

The model is the user's. Its forward may write its input in place, draw random numbers, keep state in buffers or
attributes, or return a dictionary with a loss first. Each forward therefore gets a copy of the batch, the same random
numbers as every other forward of this batch, and the same state of the model.
"""

__all__ = [
    "MOMENTS", "Loss", "Runner", "free_bytes", "logged_items", "relative_error", "return_freed_memory", "row_blocks",
    "squares",
]  # fmt: skip

import ctypes
import datetime
import inspect
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._process_settings import ProcessSetting, preserved_generators, seed_cpu_generators
from panther._torch import compiler_stance, is_dynamo_loaded, set_compiler_stance
from panther.compression.calibration.batches import (
    MASK_NAMES,
    Masks,
    Places,
    ScoreFill,
    Shapes,
    check_calibration,
    copy_batch,
    counted,
    describe_batch,
    find_places,
    floating_tensor,
    is_empty,
    is_sentence_model,
    main_output,
    positions_of,
    read_batches,
    with_features,
)
from panther.compression.calibration.model_state import ModelState, deferred_interrupts
from panther.compression.calibration.steps import Step, Watch, send
from panther.compression.calibration.targets import Target
from panther.errors import CompressionError

_Item = TypeVar("_Item")


_log = logging.getLogger(__name__)
_EAGER = ProcessSetting(compiler_stance, set_compiler_stance, ("force_eager", False, None))
_SLOW_PATH = ProcessSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)
Loss = Callable[[Tensor, Any], Tensor]

MOMENTS = "moments-"  # the beginning of the names of remembered moments
_HELD_OUT = 5  # every fifth batch is held out
_BLOCK_ENTRIES = 2**20  # of a tensor that is added in float64
# Limit and use of a container's memory, which /proc/meminfo does not show: control groups of version 2 and 1.
_CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Runner:
    """A model, and the batches for which it runs, if there are any.

    Attributes:
        batches: Batches for the moments and for healing, on the model's device.
        held_out: Batches on which errors are measured.
        rank: The rank in the group; 0 without one.
        first_number: Number of the first batch among those of all ranks, which are in the order of the ranks.
        show: Whether progress is shown.
        output_name: Expression for the place of the compared tensor in the model's output; empty before the first run.
        is_streaming: Whether steps are parts of the model, and what is kept for long is kept in files.
        difference: Relative difference of two outputs of the model for one batch; None before an error is measured. It
            is not zero if the model draws from a generator that is not seeded here.
    """

    is_streaming = False

    def __init__(
        self,
        model: nn.Module,
        calibration: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None,
        mask_fn: Callable[[Any], Tensor | None] | None,
        group: dist.ProcessGroup | None,
        progress: bool | None,
        loss_fn: Loss | None = None,
        forward_device: torch.device | None = None,
    ) -> None:
        self.model, self.forward_fn, self.mask_fn, self.group = model, forward_fn, mask_fn, group
        self.loss_fn, self.rank = loss_fn, 0 if group is None else dist.get_rank(group)
        self.show = sys.stderr.isatty() if progress is None else progress
        self._logged_phases: set[str] = set()
        self.batches: list[Any] = []
        self.held_out: list[Any] = []
        self.output_name = ""
        self.difference: float | None = None
        self.first_number = self._first_held_out = 0
        self._num_samples: dict[int, int] = {}  # by the number of the batch
        self.seed = 0  # seed of the random numbers of forwards
        self._state: ModelState | None = None
        self._places: Places | None = None
        # The indices of the GPUs that hold parameters.
        self._gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        self._takes_features = is_sentence_model(model)  # in one dictionary
        self._forward_device = forward_device  # the default device within forwards; None leaves it as it is
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.device = next((tensor.device for _, tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        if calibration is None:
            return
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise CompressionError(
                    f"{name!r} of the model has no values yet, and calibration would make them: run the model on a "
                    "batch first"
                )
        if self._takes_features:
            calibration = with_features(model, calibration)
        check_calibration(calibration)
        # All batches are moved to the device now, because each pass reads them again.
        batches = read_batches(calibration, self.device)
        number_read = len(batches)
        # The last batch of a loader that filters its samples can be empty. It says nothing, least of all if held out.
        batches = [batch for batch in batches if not is_empty(batch)]
        if len(batches) < 2:
            empty = f" ({number_read - len(batches)} more without entries)" if len(batches) < number_read else ""
            raise CompressionError(
                f"calibration has {len(batches)} batch{'' if len(batches) == 1 else 'es'}{empty} and needs at least 2, "
                "because one is held out: give more, or split it into smaller ones"
            )
        count = max(1, len(batches) // _HELD_OUT)
        # Evenly spaced, because the batches can be sorted.
        held = {(index + 1) * len(batches) // count - 1 for index in range(count)}
        self.batches = [batch for index, batch in enumerate(batches) if index not in held]
        self.held_out = [batch for index, batch in enumerate(batches) if index in held]
        counts = self.gathered((len(self.batches), len(self.held_out)))
        earlier = counts[: self.rank]
        self.first_number = sum(count for count, _ in earlier)
        num_batches = sum(count for count, _ in counts)
        self._first_held_out = num_batches + sum(count for _, count in earlier)

    @contextmanager
    def calibrating(self, seed: int) -> Iterator[None]:
        """Run the model in eval mode, uncompiled, without gradients of parameters, and restore everything at the end.

        Within the block, each forward of a batch starts from the same state of the model and the same random numbers,
        and attention takes no fast path, which would read weights without calling their layers. Buffers, attributes,
        flags and hooks are restored as the same objects, even after Ctrl-C.
        """
        model, before = self.model, (self._state, self.seed)
        state = ModelState(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not is_lazy(parameter)]
        # A compiled model would be compiled again for every layer that is replaced temporarily. If torch._dynamo is not
        # loaded, nothing is compiled; loading it here would take a second and 40 MB.
        eager = _EAGER.held() if is_dynamo_loaded() else nullcontext()
        paths = ExitStack()
        is_restored = False

        def restore() -> None:
            nonlocal is_restored
            paths.close()
            for parameter in trained:
                parameter.requires_grad_(True)
            state.restore()
            self._state, self.seed = before
            is_restored = True

        with preserved_generators(self._gpus), eager:
            try:
                self._state, self.seed = state, seed
                self._seed_generators(seed)
                paths.enter_context(_SLOW_PATH.held())
                model.eval()
                for parameter in trained:
                    parameter.requires_grad_(False)
                yield
            finally:
                try:
                    with deferred_interrupts():
                        restore()
                finally:
                    if not is_restored:  # an interrupt came before interrupts were deferred
                        restore()

    def fast_paths(self) -> AbstractContextManager[None]:
        """Let attention take the fast paths that it takes outside of a calibration.

        While a different thread calibrates, the block keeps to the slow paths.
        """
        return _SLOW_PATH.suspended()

    def _seed_generators(self, seed: int) -> None:
        """Seed the generators of the CPU and of the model's GPUs; torch.manual_seed would seed every GPU."""
        seed_cpu_generators(seed % 2**63)
        for index in self._gpus:
            torch.cuda.default_generators[index].manual_seed(seed % 2**63)

    def written_parameters(self) -> list[str]:
        """Return the names of the parameters that forwards of this calibration have written in place."""
        return [] if self._state is None else self._state.written_parameters()

    def output(self, batch: Any) -> Tensor:
        """Return the output of the model for a batch. The forward gets a copy of the batch."""
        number = self._number_of(batch)
        if self._state is None:  # outside of a calibration the generators are the caller's
            output = self.plain_output(copy_batch(batch))
        else:
            is_held_out = number >= len(self.batches)
            first = self._first_held_out - len(self.batches) if is_held_out else self.first_number
            self._seed_generators(self.seed + first + number)
            # The state is restored before a forward and not after it: backward reads what the forward has saved.
            with self._state.forward():
                output = self.plain_output(copy_batch(batch))
        self._num_samples[number] = len(output) if output.dim() else 1
        return output

    def plain_output(self, batch: Any) -> Tensor:
        """Return the output for a batch, which forward may change, without seeding generators or restoring state."""
        try:
            with self._forward_device or nullcontext():
                output = self._call(batch)
        except CompressionError:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}".removesuffix(": ")  # of errors without a text
            raise CompressionError(
                f"{message}: the model raised this for a calibration batch ({describe_batch(batch)})"
                f"{self._advice(batch, error)}"
            ) from error
        self.output_name, tensor = main_output(output)
        return tensor

    def _call(self, batch: Any) -> Any:
        if self.forward_fn is not None:
            return self.forward_fn(self.model, batch)
        if isinstance(batch, Mapping) and not self._takes_features:
            return self.model(**batch)
        if isinstance(batch, (tuple, list)):
            return self.model(*batch)
        return self.model(batch)

    def _advice(self, batch: Any, error: Exception) -> str:
        """Return advice for a message if the cause of the error of a forward is certain."""
        if self._state is not None and "does not require grad" in str(error):
            return (
                ", whose forward computes gradients: no parameter requires one during a calibration, so call "
                "requires_grad_(True) of those parameters in forward_fn"
            )
        if isinstance(error, StopIteration) and not any(True for _ in self.model.parameters()):
            return (
                ", and the compressed model has no parameter left, because quantized layers have buffers: read dtype "
                "and device from a buffer or the input, or keep a layer dense by exclude="
            )
        if self.forward_fn is not None:
            return ""
        arguments = [] if isinstance(batch, Mapping) else [*batch] if isinstance(batch, (tuple, list)) else [batch]
        try:
            inspect.signature(self.model.forward).bind(*arguments, **(batch if isinstance(batch, Mapping) else {}))
        except TypeError as error:
            call = "model(batch['x'])" if isinstance(batch, Mapping) else "model(batch[0])"
            return (
                f", which does not fit the arguments of forward ({error}): pass batches that hold only these, or use "
                f"forward_fn=lambda model, batch: {call}"
            )
        except ValueError:  # a forward without a signature
            pass
        return ""

    def kept(self, value: _Item) -> _Item:
        """Return a value that is kept for long; a runner that streams returns it with its tensors in files."""
        return value

    def register(self, targets: Sequence[Target]) -> None:
        """Tell the runner of the weights that values can contain which are kept or remembered."""

    def remembered(self, name: str, make: Callable[[], _Item]) -> _Item:
        """Return ``make()``; a runner that streams returns what it returned in a process that was killed.

        ``name`` says for which weights, options and batches the value holds.
        """
        return make()

    def progress_of(self, name: str) -> tuple[int, Any] | None:
        """Return the part after which the work on a remembered value was saved last, and what was saved."""
        return None

    def save_progress(self, name: str, part: int, value: Any) -> None:
        """Save the work on a remembered value, after all steps of a part; only a runner that streams does so."""

    def steps(
        self,
        passes: Sequence[tuple[Any, int]],
        targets: Sequence[Target],
        *,
        gradients: bool,
        description: str = "",
        after: int | None = None,
    ) -> Iterator[Step]:
        """Yield the steps of passes: here one for each pass, and elsewhere one for each part of the model and pass.

        A pass is a batch, and the seed of the direction of its gradients. ``after`` is the part after whose steps to
        continue.
        """
        assert after is None, "only parts are steps to continue after"
        for number, (batch, seed) in enumerate(self.over(passes, description) if description else passes):

            def backward(output: Tensor | None, watch: Watch, batch: Any = batch, seed: int = seed) -> bool:
                assert output is not None
                if not output.requires_grad or not torch.is_grad_enabled():
                    return False
                if watch.tapped or watch.untracked:
                    send([self.differentiated(output, batch, seed)], watch)
                return True

            completed = targets if number == len(passes) - 1 else ()
            yield Step(number, batch, targets, partial(self.output, batch), backward, completed=completed)

    def differentiated(self, output: Tensor, batch: Any, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return the loss and None, or the output and a normal direction of it."""
        if self.loss_fn is not None:
            loss = self.loss_fn(output, copy_batch(batch))
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
                raise CompressionError(
                    "loss_fn must return one number as a tensor with a gradient to the output, and its result has "
                    f"{kind}{'' if getattr(loss, 'requires_grad', False) else ' and no gradient'}: end it with "
                    ".mean(), and remove .detach() and .item() from it"
                )
            return loss, None
        # Drawn on the CPU, so that every device gets the same directions.
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
        rows = self.mask(batch).rows(output)
        if rows is not None:
            direction[~rows] = 0
        fill = ScoreFill.of(output)
        if fill.threshold is not None:
            direction[output <= fill.threshold] = 0
        return output, direction

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch, the entries of the output's first dimension."""
        if (number := self._number_of(batch)) not in self._num_samples:
            with torch.no_grad():
                self.output(batch)
        return self._num_samples[number]

    def _number_of(self, batch: Any) -> int:
        """Return the place of a batch among all batches; 0 for a batch that is not among them."""
        return next((n for n, stored in enumerate(chain(self.batches, self.held_out)) if stored is batch), 0)

    def mask(self, batch: Any) -> Masks:
        """Return which positions of a batch count."""
        if self.mask_fn is not None:
            mask = self.mask_fn(copy_batch(batch))
            if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
                kind = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
                raise CompressionError(
                    f"mask_fn must return a tensor (N, T) of booleans, or None for all positions, not one of {kind}"
                )
            return Masks((None if mask is None else mask.to(self.device, torch.bool),))
        values = [batch.get(name) if isinstance(batch, Mapping) else None for name in MASK_NAMES]
        positions = [positions_of(mask) for mask in values]
        masks = [None if mask is None else mask.to(self.device) for mask in positions]
        if all(mask is None or bool(mask.all()) for mask in masks):
            return Masks(())
        if self._places is None:
            first = next((each for each in self.batches if isinstance(each, Mapping)), batch)
            self._places = find_places(first, self._shapes)
        return Masks(tuple(masks), self._places)

    @torch.no_grad()
    def _shapes(self, batch: Any) -> Shapes:
        """Return the shape of the first output of each module, and of the model's."""
        shapes: Shapes = {}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if (tensor := floating_tensor(output)) is not None and not tensor.is_nested:
                shapes.setdefault(module, tensor.shape)

        handles = []
        try:
            handles += [module.register_forward_hook(note) for module in self.model.modules()]
            shapes[None] = self.output(batch).shape
        finally:
            for handle in handles:
                handle.remove()
        return shapes

    def over(self, batches: Collection[_Item], description: str, every_s: float = 10.0) -> Iterable[_Item]:
        """Return batches or other items, under a progress bar if progress is shown and tqdm is installed.

        Where it is not shown, the phase is logged: when it begins for the first time, and every ``every_s`` seconds.
        """
        if not self.show:
            is_new = description not in self._logged_phases
            self._logged_phases.add(description)
            return logged_items(batches, description, announce=is_new, every_s=every_s)
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return batches
        return tqdm(batches, desc=description, leave=False)

    def shared_seed(self, seed: int) -> int:
        """Return the seed of the first rank of the group."""
        if self.group is None:
            return seed
        # Without an argument, every rank has drawn a different seed.
        shared = torch.tensor([seed], device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        return int(shared.item())

    def gathered(self, value: _Item) -> list[_Item]:
        """Return the values of all ranks of the group."""
        if self.group is None:
            return [value]
        from panther.distributed.comm.agreement import gather_objects  # here, because one process needs none of it

        return gather_objects(value, self.group)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add float64 tensors over the ranks of the group, in place."""
        if self.group is not None:
            for tensor in tensors:
                moved = tensor.to(self.device)  # NCCL reduces GPU tensors only
                dist.all_reduce(moved, group=self.group)
                tensor.copy_(moved)

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace float64 tensors by their mean over the ranks of the group."""
        self.sum_(tensors)
        if self.group is not None:
            for tensor in tensors:
                tensor /= dist.get_world_size(self.group)

    def spare_bytes(self, most: int) -> int:
        """Return half of the free memory of the device in bytes, up to ``most``, and the smallest number of all ranks.

        The memory is divided by the number of ranks, because all ranks of a group can be on one node.
        """
        free = free_bytes(self.device)
        spare = most if free is None else min(most, free // 2)
        if self.group is None:
            return spare
        return min(self.gathered(spare // dist.get_world_size(self.group)))

    @torch.no_grad()
    def errors(
        self,
        variants: Sequence[Callable[[], AbstractContextManager[Any]]],
        description: str,
        batches: Sequence[Any] = (),
    ) -> list[float]:
        """Return the relative error of the output within each of the contexts ``variants``, which change the model.

        The errors are measured on ``batches``, by default on the held-out batches.
        """
        # The squared difference of each variant; then the squared norm and the number of entries of the exact outputs.
        sums = torch.zeros(len(variants) + 2, dtype=torch.float64)
        with self.fast_paths():
            for batch in self.over(batches or self.held_out, description):
                mask = self.mask(batch)
                # A copy, because the model may write its next output into the same memory.
                exact = counted(self.output(batch), mask).clone()
                fill = ScoreFill.of(exact)
                scores, exact = fill.scores(exact), fill.replaced(exact)
                if self.difference is None:
                    repeated = counted(self.output(batch), mask)
                    _check_shapes(repeated, exact, "a second output of the original model")
                    self.difference = relative_error(squares(fill.replaced(repeated) - exact), squares(scores))
                sums[-2] += squares(scores)
                sums[-1] += scores.numel()
                for index, variant in enumerate(variants):
                    with variant():
                        output = counted(self.output(batch), mask)
                    _check_shapes(output, exact, "the output of the compressed model")
                    sums[index] += squares(fill.replaced(output) - exact)
        self.sum_([sums])
        *lost, total, num_entries = sums.tolist()
        place = "a calibration batch" if batches else f"the held-out batches, 1 in {_HELD_OUT}"
        if not isfinite(total):
            raise CompressionError(
                f"the model's output is NaN or infinite on {place}: check the batches and the model, or return a "
                "finite part of the output in forward_fn"
            )
        if num_entries == 0:
            raise CompressionError(
                f"the model's output has no entries on {place}, so that no error can be measured: give other batches, "
                "or return another tensor in forward_fn"
            )
        return [relative_error(each, total) for each in lost]


def _check_shapes(output: Tensor, exact: Tensor, name: str) -> None:
    if output.shape != exact.shape:
        raise CompressionError(
            f"{name} has {tuple(output.shape)} rows and columns that count, where the original has "
            f"{tuple(exact.shape)}: return in forward_fn a tensor whose shape does not depend on values, such as the "
            "scores before a threshold"
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device without swapping, or None if the system does not report it."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])]
    for limit, usage in _CONTAINERS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            free.append(max(int(Path(limit).read_text()) - int(Path(usage).read_text()), 0))
    return min(free, default=None)


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system, where the C library is glibc; elsewhere do nothing.

    glibc's heap shrinks at its end only. The fits of a pass are small and live long, and lie between the memory of
    activations and of factors that are freed already: a sentence encoder of 91 MB, fitted in three passes, held 370 MB
    for 95 MB of fits.
    """
    with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows, CDLL needs a name
        ctypes.CDLL(None).malloc_trim(0)


def row_blocks(x: Tensor) -> Sequence[Tensor]:  # (groups, rows, columns)
    """Return a tensor in blocks of rows that are small enough to be copied in float64."""
    return x.split(max(1, _BLOCK_ENTRIES // max(x.shape[0] * x.shape[2], 1)), dim=1)


def squares(x: Tensor) -> float:
    """Return the sum of squares, accumulated in float64; block by block, because torch copies what it adds so."""
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in x.reshape(-1).split(_BLOCK_ENTRIES)]
    return torch.stack(norms).square().sum().item()


def relative_error(lost: float, total: float) -> float:
    """Return the root of the ratio of two squared norms; 0 if ``lost`` is 0, even if both are zero."""
    if lost == 0:
        return 0.0
    return (lost / total) ** 0.5 if total > 0 and isfinite(lost) else inf


def logged_items(
    items: Collection[_Item], description: str, *, announce: bool = True, every_s: float = 10.0
) -> Iterator[_Item]:
    """Yield items, and log how many there are and, every ``every_s`` seconds, how many are left and for how long.

    ``description`` names the phase, whose items take equally long; ``announce`` logs their number before the first one.
    """
    if announce:
        _log.info("%s: %d to do", description, len(items))
    begin = logged = time.monotonic()
    for number, item in enumerate(items):
        now = time.monotonic()
        if number and now - logged >= every_s:
            left = datetime.timedelta(seconds=round((now - begin) / number * (len(items) - number)))
            _log.info("%s: %d of %d, %s left", description, number, len(items), left)
            logged = now
        yield item
