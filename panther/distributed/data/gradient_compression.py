"""How DDP's gradients are compressed before they are sent: torch's communication hooks, and top-k, by name."""

__all__ = ["HOOKS", "TopK", "check_hook", "hold_group", "register_hook"]

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from panther.errors import check_size

HOOKS = ("fp16", "bf16", "powersgd", "topk")
_RANK, _START_STEP, _FRACTION = 4, 10, 0.01  # what None stands for in a hook's settings
_HOOK_OF = {"powersgd_rank": "powersgd", "powersgd_start_step": "powersgd", "topk_fraction": "topk"}

_groups_with_hooks: set[dist.ProcessGroup] = set()


def hold_group(group: dist.ProcessGroup) -> None:
    """Keep the group of a communication hook until the process ends. Everyone who registers a hook must call it.

    A hook's last futures hold its group, and are freed on gloo's own thread. If theirs were the last reference, that
    thread would destroy the group, wait for itself, and abort the process.
    """
    _groups_with_hooks.add(group)


def check_hook(name: str | None, settings: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if a hook is unknown, or a setting that is not None is out of range or not its."""
    if name is not None and name not in HOOKS:
        raise ValueError(f"comm_hook={name!r} is unknown: use one of {', '.join(map(repr, HOOKS))}, or None")
    for key, value in settings.items():
        if value is None:
            continue
        if name != _HOOK_OF[key]:
            raise ValueError(f"{key}={value} needs comm_hook={_HOOK_OF[key]!r}, not {name!r}: set both")
        if key != "topk_fraction":
            check_size(key, value, least=1 if key == "powersgd_rank" else 2)  # in its first step DDP forms its buckets
        elif not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"topk_fraction={value!r} must be a number above 0 and at most 1")


def register_hook(parallel: DistributedDataParallel, name: str, settings: dict[str, Any]) -> None:
    """Register a hook by its name; settings that are None have their defaults."""
    state: Any = parallel.process_group
    hold_group(state)
    hook: Any = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_hook, "topk": TopK.send}.get(name)
    if name == "powersgd":
        hook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(
            state,
            matrix_approximation_rank=settings["powersgd_rank"] or _RANK,
            start_powerSGD_iter=settings["powersgd_start_step"] or _START_STEP,
        )
    elif name == "topk":
        state = TopK(state, settings["topk_fraction"] or _FRACTION)
    parallel.register_comm_hook(state, hook)


class TopK:
    """Send the largest entries of each bucket, and add the others to the next gradient (error feedback).

    Without the feedback, entries that are never among the largest would never be trained. A rank sends k values and k
    indices of 4 bytes to each other rank, for the mean of what all ranks chose (S. Stich, J.-B. Cordonnier and
    M. Jaggi, 2018, arXiv:1809.07599).

    Args:
        group: The ranks that share gradients.
        fraction: Share of a bucket's entries that is sent, rounded up.
        feedback: Whether entries that were not sent are kept.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float, feedback: bool = True) -> None:
        self.group, self.fraction, self.feedback = group, fraction, feedback
        # By parameter, because DDP forms other buckets after the first step.
        self.residuals: dict[Tensor, Tensor] = {}

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        whole = bucket.buffer()
        parameters, gradients = bucket.parameters(), bucket.gradients()  # the gradients are views of the buffer
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self.residuals:
                gradient.add_(self.residuals[parameter])
        k = math.ceil(self.fraction * len(whole))
        chosen = whole.abs().topk(k, sorted=False).indices
        values = whole[chosen]
        if self.feedback:
            whole[chosen] = 0.0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self.residuals[parameter] = gradient.clone()
        # Indices and values in one message, as bytes.
        mine = torch.cat((chosen.to(torch.int32).view(torch.uint8), values.view(torch.uint8)))
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(every, mine, group=self.group, async_op=True)

        def mean(_: Any) -> Tensor:
            whole.zero_()
            for message in every:
                indices, sent = message[: 4 * k].view(torch.int32), message[4 * k :].clone().view(whole.dtype)
                whole.index_add_(0, indices, sent)
            return whole.div_(len(every))

        return work.get_future().then(mean)


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook under another name: DDP refuses the original by its name on gloo, which does sum bfloat16."""
    return default_hooks._compress_hook(torch.bfloat16, group, bucket)
