"""Running a model on calibration batches: its arguments, the output that is compared, and the positions that count."""

__all__ = [
    "Loss", "Runner", "calibrating", "check_calibration", "counted", "entries_of", "floating_tensor", "free_bytes",
    "main_output", "relative_error", "resident_bytes", "rows_of", "seed_generators", "squares",
]  # fmt: skip

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._torch import buffers_of, is_dynamo_loaded, tree_leaves, tree_map_only
from panther.errors import CompressionError

_Item = TypeVar("_Item")
Loss = Callable[[Tensor, Any], Tensor]

_OUTPUTS = ("logits", "last_hidden_state")
_HELD_OUT = 5  # every fifth batch
# Limit and use of a container's memory, which /proc/meminfo does not know: control groups of version 2 and 1.
_CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def floating_tensor(output: Any) -> Tensor | None:
    """Return the first floating tensor of an output, of a mapping ``logits`` or ``last_hidden_state`` before others."""
    if isinstance(output, Mapping):
        output = (*map(output.get, _OUTPUTS), *output.values())
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return next((part for part in parts if isinstance(part, Tensor) and part.is_floating_point()), None)


def main_output(output: Any) -> Tensor:
    """Return the tensor that stands for the output of a model, or raise CompressionError if there is none."""
    found = floating_tensor(output)
    if found is None:
        raise CompressionError(
            f"the model returned a {type(output).__name__} without a floating tensor: pass forward_fn=, a function of "
            "the model and a batch that returns the tensor to keep"
        )
    return found


class Runner:
    """One model and the batches it is called on, if there are any.

    Attributes:
        batches: Batches for the moments and for healing, on the model's device.
        held_out: Batches that errors are measured on.
        show: Whether progress is shown.
        resident_bytes: What the process held before anything ran.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None,
        mask_fn: Callable[[Any], Tensor | None] | None,
        group: dist.ProcessGroup | None,
        progress: bool | None,
        loss_fn: Loss | None = None,
    ) -> None:
        self.model, self.forward_fn, self.mask_fn, self.loss_fn, self.group = model, forward_fn, mask_fn, loss_fn, group
        self.show = sys.stderr.isatty() if progress is None else progress
        self.resident_bytes = resident_bytes()
        self.batches: list[Any] = []
        self.held_out: list[Any] = []
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
        check_calibration(calibration)
        # On the device at once: each pass reads them again.
        every = [_to(batch, self.device) for batch in calibration]
        if len(every) < 2:
            raise CompressionError(
                f"calibration has {len(every)} batch{'' if len(every) == 1 else 'es'} and needs at least 2, because "
                "one is held out: give more, or split it into smaller ones"
            )
        count = max(1, len(every) // _HELD_OUT)
        # Evenly over the batches: these can be sorted.
        held = {(index + 1) * len(every) // count - 1 for index in range(count)}
        self.batches = [batch for index, batch in enumerate(every) if index not in held]
        self.held_out = [batch for index, batch in enumerate(every) if index in held]

    def output(self, batch: Any) -> Tensor:
        """Return the output of the model for a batch."""
        model = self.model
        try:
            if self.forward_fn is not None:
                return main_output(self.forward_fn(model, batch))
            if isinstance(batch, Mapping):
                return main_output(model(**batch))
            if isinstance(batch, (tuple, list)):
                return main_output(model(*batch))
            return main_output(model(batch))
        except CompressionError:
            raise
        except Exception as error:
            raise CompressionError(
                f"the model does not run on a calibration batch ({_shape(batch)}): {type(error).__name__}: {error}: "
                "pass batches that hold only the arguments of forward, without labels, or use forward_fn=lambda model, "
                "batch: model(batch[0])"
            ) from error

    def mask(self, batch: Any) -> Tensor | None:
        """Return which positions of a batch count: (N, T) of booleans, or None for all."""
        if self.mask_fn is not None:
            mask = self.mask_fn(batch)
        else:
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is None or (self.mask_fn is None and mask.dim() != 2):
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shown = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
            raise CompressionError(
                f"mask_fn must return a tensor (N, T) of booleans, or None for all positions, not one of {shown}"
            )
        return mask.to(self.device, torch.bool)

    def over(self, batches: Collection[_Item], description: str) -> Iterable[_Item]:
        """Return batches or other items, under a progress bar if progress is shown and tqdm is installed."""
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return batches
        return tqdm(batches, desc=description, leave=False, disable=not self.show)

    def agreed(self, seed: int) -> int:
        """Return the seed of the first rank of the group."""
        if self.group is None:
            return seed
        # Drawn on every rank where none was given, and then different.
        shared = torch.tensor([seed], device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        return int(shared.item())

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
        """Return half of the memory that is free on the device, up to ``most``, the least of all ranks.

        Ranks of one group can be on one machine, so each takes its share.
        """
        free = free_bytes(self.device)
        spare = most if free is None else min(most, free // 2)
        if self.group is None:
            return spare
        shared = torch.tensor([spare // dist.get_world_size(self.group)], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group)
        return int(shared.item())

    @torch.no_grad()
    def errors(
        self,
        variants: Sequence[Callable[[], AbstractContextManager[Any]]],
        description: str,
        batches: Sequence[Any] = (),
    ) -> list[float]:
        """Return the relative error of the output in each of the contexts, which change it.

        It is measured on the held-out batches unless others are given.
        """
        sums = torch.zeros(len(variants) + 1, dtype=torch.float64)
        for batch in self.over(batches or self.held_out, description):
            mask = self.mask(batch)
            exact = counted(self.output(batch), mask)
            sums[-1] += squares(exact)
            for index, variant in enumerate(variants):
                with variant():
                    sums[index] += squares(counted(self.output(batch), mask) - exact)
        self.sum_([sums])
        *lost, whole = sums.tolist()
        if not isfinite(whole):
            place = "a calibration batch" if batches else f"the held-out batches, 1 in {_HELD_OUT}"
            raise CompressionError(
                f"the model's output is NaN or infinite on {place}: check the batches and the model, or return a "
                "finite part of the output in forward_fn"
            )
        return [relative_error(each, whole) for each in lost]


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device without swapping; None where the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    found = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])]
    for limit, used in _CONTAINERS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            found.append(max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
    return min(found, default=None)


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def squares(x: Tensor) -> float:
    """Return the sum of squares, accumulated in float64 without a float64 copy."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


def relative_error(lost: float, whole: float) -> float:
    """Return the root of the ratio of two squared norms; 0 if nothing is lost, also where both are zero."""
    if lost == 0:
        return 0.0
    return (lost / whole) ** 0.5 if whole > 0 and isfinite(lost) else inf


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return a mask (N, T) as x has its positions: x begins with (N, T) or (T, N), or has N T rows; None if neither."""
    if mask is None:
        return None
    if x.dim() > 2 and x.shape[:2] == mask.shape:
        return mask
    if x.dim() > 2 and x.shape[:2] == mask.shape[::-1]:
        return mask.mT
    return mask.flatten() if x.dim() == 2 and len(x) == mask.numel() != len(mask) else None


def counted(x: Tensor, mask: Tensor | None) -> Tensor:  # (*, n) -> (rows, n)
    """Return the rows that count."""
    if x.dim() < 2:
        return x.reshape(1, -1)
    rows = rows_of(x, mask)
    return (x if rows is None else x[rows]).flatten(0, -2)


def _gpus_of(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that hold parameters."""
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def seed_generators(model: nn.Module, seed: int) -> None:
    """Seed the generators of the CPU and of the model's GPUs; torch.manual_seed would seed every GPU."""
    torch.default_generator.manual_seed(seed)
    for index in _gpus_of(model):
        torch.cuda.default_generators[index].manual_seed(seed)


@contextmanager
def calibrating(model: nn.Module, seed: int) -> Iterator[None]:
    """Run a model in eval mode, uncompiled, without gradients of parameters, and put everything back at the end.

    Within it the model's generators start from ``seed``, and attention takes no fast path. What is put back includes
    buffers, such as counters that forwards increase.
    """
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not is_lazy(parameter)]
    buffers = [
        (buffers_of(module), name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and not is_lazy(buffer)
    ]
    # A compiled model would be compiled again for every layer that is replaced for a while. Without its module nothing
    # is compiled, and loading it for that takes a second and 40 MB.
    eager = torch.compiler.set_stance("force_eager") if is_dynamo_loaded() else nullcontext()
    with torch.random.fork_rng(_gpus_of(model)), eager:
        try:
            seed_generators(model, seed)
            torch.backends.mha.set_fastpath_enabled(False)  # its outputs have other lengths where batches are padded
            model.eval()
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, flag in training.items():
                module.training = flag
            for parameter in trained:
                parameter.requires_grad_(True)
            for owner, name, buffer, value in buffers:
                owner[name] = buffer  # a forward may have put another tensor there
                with torch.no_grad():
                    buffer.copy_(value)


def entries_of(batch: Any) -> int:
    """Return the entries of all tensors of a batch."""
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def check_calibration(calibration: Any) -> None:
    """Raise CompressionError unless the batches can be read, more than once."""
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        fix = "for one tensor use calibration=list(tensor.split(32))"
        if not isinstance(calibration, Tensor):
            fix = "each batch is the model's input: a tensor, a dict or a tuple"
        raise CompressionError(f"calibration must be a list or a DataLoader of batches, not a {kind}: {fix}")
    if isinstance(calibration, Iterator):
        raise CompressionError(
            f"calibration is a {type(calibration).__name__}, which can be read only once: pass a list of its batches "
            "(list(itertools.islice(batches, 32))) or a DataLoader"
        )


def _to(batch: Any, device: torch.device) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # BatchEncoding of transformers is not a dict
    return tree_map_only(Tensor, lambda x: x.to(device), batch)


def _shape(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}, passed as separate arguments"
    return f"of type {type(batch).__name__}"
