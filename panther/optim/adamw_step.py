"""What optimizers that contain AdamW have in common: the checks of their groups, AdamW's step, and its rounding.

The random bits of stochastic rounding to bfloat16 are the same in every layout.
"""

__all__ = ["CheckedGroups", "check_adamw_settings", "copy_rounded", "moment_dtype", "step_adamw"]

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from panther._hints import advice_for
from panther.errors import CheckpointError
from panther.kernels import word_block
from panther.optim.matrix_updates import local_part, moment_dtype, placed_like
from panther.sketch.streams import Kind, tag

_WIDE_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "sketch_avg", "sketch_avg_sq", "update_norm")
# Settings of torch.optim.AdamW that would change a step, and that these optimizers do not have.
_ABSENT_SETTINGS = ("amsgrad", "maximize", "capturable", "differentiable")
# Keys that change no step: of torch's groups, of its schedulers, and labels that schedulers of other libraries read.
_PASSIVE_KEYS = {
    *("params", "param_names", "foreach", "fused", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"),
    *("swa_lr", "name", "lr_scale"),
}
_FACTORS = (0x9E3779B9 - (1 << 32), 0xBB67AE85 - (1 << 32))  # odd, with bits of the golden ratio and of the root of 3


class CheckedGroups(torch.optim.Optimizer):
    """An optimizer that checks each group as it is added."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, unless its settings or parameters are refused."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.compiler.disable  # the step takes locks, compares ranks, and depends on counts, which a graph cannot hold
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of the closure, or None without a closure.

        If matrices are sharded, every rank must call it.

        Raises:
            ValueError: If a gradient is sparse.
            ShapeError: If a parameter has changed its shape since its moments were made.
            RuntimeError: If a CUDA graph captures the step.
            TrainingError: Before a matrix changes, if a sketched update is not finite, although its gradient is.
            DistributedError: On every rank, before anything changes, if ranks have other gradients or settings of
                sharded matrices, or if shards are not the chunks of torch.chunk; if a rank has ended or is late; if the
                momentum of a sharded matrix is not sharded.
        """
        self._refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    def _step_all(self) -> None:
        """Take the step of every parameter that has a gradient."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; moments are float32 or wider, where torch has the parameter's dtype."""
        sizes = [
            [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"the state has groups of {sizes[0]} parameters, and the optimizer has {sizes[1]}: make groups of the "
                "same parameters; earlier versions made one group of parameters without groups, and gave it the setting"
            )
        super().load_state_dict(state_dict)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {key: value for key, value in self.defaults.items() if key not in group}  # of earlier versions
            for p, index in zip(group["params"], saved_group["params"], strict=True):
                dtype = moment_dtype(p)
                saved, state = state_dict["state"].get(index, {}), self.state.get(p, {})
                for key in _WIDE_STATES:
                    if key in saved and state[key].dtype != dtype:
                        state[key] = saved[key].to(state[key].device, dtype, copy=True)

    def _agreed_layouts(self, matrices: Iterable[tuple[str, Tensor]]) -> dict[Tensor, Any]:
        """Return how the sharded ones of some matrices lie, after all ranks agree on the gradients that exist."""
        # Parameters are plain tensors if nothing has imported DTensor, whose import takes a while.
        if "torch.distributed.tensor" not in sys.modules:
            return {}
        from panther.optim.exchange import check_gradients
        from panther.optim.shards import layout_of

        sharded = [(name, layout, p) for name, p in matrices if (layout := layout_of(p)) is not None]
        call_name = f"{type(self).__name__}.step"
        check_gradients([(name, layout, p.grad is not None) for name, layout, p in sharded], call_name)
        return {p: layout for _, layout, p in sharded}

    def _refuse_sparse(self, name: str, p: Tensor) -> None:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse, and {type(self).__name__} takes dense gradients: set sparse=False "
                "for the embedding"
            )

    def _check_kind(self, subject: str, saved: Mapping[str, Any], keys: Iterable[str]) -> None:
        """Raise CheckpointError if a part of a saved state lacks one of the keys that this kind of optimizer has."""
        if missing := [key for key in keys if key not in saved]:
            raise CheckpointError(
                f"{subject} has no {missing[0]!r}, so that it is of another kind of optimizer than "
                f"{type(self).__name__}: make an optimizer of this kind, or load no state"
            )

    def _refuse_capture(self) -> None:
        """Raise RuntimeError in the capture of a CUDA graph, which would replay the present count of steps."""
        if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph cannot capture {type(self).__name__}.step(), because the count of steps is on the CPU, "
                "and each replay would repeat the step of the capture: call step() outside of the graph"
            )

    def _check_group(self, number: int) -> None:
        """Raise an error if the group of this number cannot be used."""
        group = self.param_groups[number]
        check_adamw_settings(group)
        unknown = group.keys() - self.defaults.keys() - _PASSIVE_KEYS - set(_ABSENT_SETTINGS)
        if unknown:
            key = min(unknown)
            advice = advice_for(key, type(self).__name__)
            raise ValueError(
                f"a group has {key}={group[key]!r}, which {type(self).__name__} does not read: "
                f"{advice or 'leave it out, or add labels for other code to optimizer.param_groups'}"
            )


def check_adamw_settings(group: dict[str, Any]) -> None:
    """Raise ValueError if a setting of AdamW is out of range, or has no effect here."""
    for name in _ABSENT_SETTINGS:
        if group.get(name):
            raise ValueError(f"a group has {name}={group[name]}, and this optimizer has no such setting: leave it out")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not of shape {tuple(group['lr'].shape)}")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, not {group[name]}")
    if not all(0 <= value < 1 for value in group["betas"]):
        raise ValueError(f"betas must be in [0, 1), not {group['betas']}")


def step_adamw(
    group: dict[str, Any],
    parameters: list[Tensor],
    states: MutableMapping[Any, Any],
    names: Mapping[Tensor, str] | None = None,
) -> None:
    """Change parameters that have gradients by AdamW, with the settings of their group.

    Parameters of half precision are changed in float32, one after the other, and rounded once. Empty states are filled.
    """
    for p in parameters:
        if not states[p]:
            states[p] |= {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p, dtype=moment_dtype(p)),
                "exp_avg_sq": torch.zeros_like(p, dtype=moment_dtype(p)),
            }
    batches: dict[Any, list[tuple[Tensor, list[Tensor]]]] = {}
    for p in parameters:
        tensors = [p, p.grad, states[p]["exp_avg"], states[p]["exp_avg_sq"]]
        shards = [local_part(placed_like(p, tensor)) for tensor in tensors]
        key = _takes_fused_kernel(shards), p.dtype == moment_dtype(p) or id(p)
        batches.setdefault(key, []).append((p, shards))
    beta1, beta2 = group["betas"]
    settings: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay", "eps")}
    for (is_fused, _), batch in batches.items():
        rows = [[shard.to(moment_dtype(shard)) for shard in shards] for _, shards in batch]
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        if is_fused:  # the kernel counts steps on its device
            for p, shards in batch:
                states[p]["step"] = states[p]["step"].to(shards[0].device)
        steps: Any = [states[p]["step"] for p, _ in batch]
        settings |= {"fused": is_fused or None, "amsgrad": False, "maximize": False, "beta1": beta1, "beta2": beta2}
        adamw(columns[0], columns[1], columns[2], columns[3], [], steps, **settings)
        for (p, _), changed in zip(batch, columns[0], strict=True):
            if p.dtype != changed.dtype:
                name = "" if names is None else names[p]
                copy_rounded(p, changed, group, name, int(states[p]["step"]))


def _takes_fused_kernel(tensors: Sequence[Tensor]) -> bool:
    """Return whether torch's fused kernel takes tensors; on a CPU it takes their memory for equally ordered."""
    formats = (torch.contiguous_format, torch.channels_last) if tensors[0].dim() == 4 else (torch.contiguous_format,)
    is_ordered = any(all(tensor.is_contiguous(memory_format=form) for tensor in tensors) for form in formats)
    return is_ordered and tensors[0].is_floating_point() and _has_fused_kernel(tensors[0].device.type)


@functools.cache
def _has_fused_kernel(device_type: str) -> bool:
    try:
        torch.optim.AdamW([torch.empty(0, device=device_type, requires_grad=True)], fused=True)
    except RuntimeError:
        return False
    return True


def copy_rounded(parameter: Any, values: Tensor, group: dict[str, Any], name: str, step: int) -> None:
    """Copy the new values of a parameter to its shard on this rank, rounded to the nearest number of its dtype.

    If the group has ``bf16_stochastic_round`` and the dtype is bfloat16, a value between two numbers becomes either,
    the upper one with the probability that keeps the mean. The random bits of an entry depend on the seed, the name,
    the step and the index in the complete parameter, and so are equal in every layout.
    """
    target = local_part(parameter)
    if group.get("bf16_stochastic_round") and target.dtype is torch.bfloat16:
        # The upper half of a float32 number is the bfloat16 number below it in absolute value.
        rounded = values.view(torch.int32) + _bits(parameter, f"{group.get('seed', 0)} {step} {name}")
        rounded = rounded.bitwise_and_(-1 << 16).view(torch.float32)
        values = torch.where(values == values, rounded, values)  # some NaN would become a number
    target.copy_(values)


def _bits(parameter: Any, key: str) -> Tensor:
    """Return 16 random bits for each entry of this rank's shard, in int32.

    Philox draws a word for each row and each column, and two multiplications mix them. Drawing a word for each entry
    takes ten times as long. The spectral norm of the rounding errors of a matrix is that of independent errors.
    """
    local = local_part(parameter)
    offsets, sizes = [0] * local.dim(), list(local.shape)
    if local is not parameter:
        from panther._torch import local_offsets

        offsets = list(local_offsets(parameter))
    inner = math.prod(parameter.shape[2:])
    starts, lengths = [*offsets, 0, 0], [*sizes, 1, 1]
    parts = range(starts[0], starts[0] + lengths[0]), range(starts[1] * inner, (starts[1] + lengths[1]) * inner)
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
    start = min(part.start for part in parts)
    places = range(start, max(part.stop for part in parts))
    words = word_block(seed, 0, tag(Kind.ROUNDING), range(2), places, device=local.device).sub_(1 << 31).int()
    rows, columns = (words[i, part.start - start : part.stop - start] for i, part in enumerate(parts))
    bits = rows[:, None] ^ columns
    bits.mul_(_FACTORS[0])
    bits ^= bits >> 15
    bits = bits.mul_(_FACTORS[1]).bitwise_right_shift_(16).bitwise_and_((1 << 16) - 1)
    bits = bits.view(lengths[0], lengths[1], *parameter.shape[2:])
    for dim in range(2, local.dim()):
        bits = bits.narrow(dim, offsets[dim], sizes[dim])
    return bits.reshape(local.shape)
