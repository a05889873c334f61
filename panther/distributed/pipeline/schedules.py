"""Schedules of a pipeline: the order in which stages process microbatches, on torch.distributed.pipelining."""

__all__ = ["SCHEDULES", "PipelineSchedule", "ScheduleKind", "check_schedule", "make_schedule"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from panther._torch import forget_shapes
from panther.distributed.comm.agreement import agree, describe_settings
from panther.distributed.comm.diagnostics import watched
from panther.distributed.pipeline.balance import SCHEDULES, ScheduleKind, check_schedule
from panther.distributed.pipeline.losses import DividedLoss, check_reduction, reduction_of
from panther.errors import ShapeError, check_size


class PipelineSchedule:
    """A schedule over this rank's stages; made by :func:`make_schedule`.

    Args:
        make: Function that makes torch's schedule.
        stages: This rank's stages.
        num_microbatches: Number of microbatches of a batch.

    Attributes:
        schedule: torch's schedule; it is replaced by a new one after a batch of a different size.
        stages: This rank's stages.
        is_first: Whether this rank has the first stage, which reads the input.
        is_last: Whether this rank has the last stage, which computes the output and the loss.
    """

    def __init__(self, make: Callable[[], Any], stages: list[PipelineStage], num_microbatches: int) -> None:
        self._make, self.schedule, self.stages, self.num_microbatches = make, make(), stages, num_microbatches
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)
        self._agreed: dict[str, str] | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages, for its optimizer."""
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def step(self, x: Tensor | tuple[Tensor, ...], target: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Run forward and backward of a batch. Every rank must call it, with the same batch.

        The gradients of the loss over the batch are added to ``.grad``. A batch may have any size that is a multiple of
        the number of microbatches, such as a smaller one at the end of an epoch.

        Args:
            x: The input, (samples, ...), or a tuple of inputs.
            target: The target of the loss, (samples, ...).

        Returns:
            The output and the loss of the batch on the rank of the last stage, None elsewhere.

        Raises:
            ShapeError: If the samples are not a multiple of the microbatches, or the stages were traced for a different
                size.
            DistributedError: If the ranks' batches differ in shape or dtype, which is checked when they change, or a
                rank has ended or does not answer in time.

        Cost: if shapes or dtypes differ from the step before, every stage runs forward and backward on one more
        microbatch, of zeros, to find the shapes that stages send.
        """
        inputs = x if isinstance(x, tuple) else (x,)
        group = self.stages[0].group
        described = {"the input": _in_short(inputs), "the target": _in_short((target,))}
        # Compared only when they change. Ranks that disagree would wait for tensors of different shapes.
        if described != self._agreed:

            def check() -> dict[str, str]:
                self._check(inputs, target)
                return described

            agree("PipelineSchedule.step", check, group, "pass every rank of the axis the same batch", "batches")
            # torch's schedule has receive buffers for the shapes of its first batch, so that new shapes need a new one.
            if self._agreed is not None:
                self.schedule = self._make()
            for stage in self.stages:  # which another schedule may have run on other shapes
                forget_shapes(stage)
            self._agreed = described
        losses: list[Tensor] = []  # torch's schedule appends the loss of every microbatch
        step_inputs = tuple(map(_without_gaps, inputs)) if self.is_first else ()
        step_options = {"target": target, "losses": losses} if self.is_last else {}
        with watched(f"a step of {described['the input']}", group):
            output = self.schedule.step(*step_inputs, **step_options)
        if not self.is_last:
            return None, None
        return output, torch.stack(losses).sum()

    def _check(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        counts = sorted({len(tensor) for tensor in (*inputs, target)})
        samples, n = counts[0], self.num_microbatches
        if len(counts) > 1:
            raise ShapeError(
                f"inputs and target must have equal numbers of samples, and have {', '.join(map(str, counts))}"
            )
        if samples == 0 or samples % n:
            divisors = ", ".join(str(d) for d in range(1, samples + 1) if samples % d == 0)
            other = f"set num_microbatches to one of {divisors}, or use" if divisors else "use"
            raise ShapeError(
                f"{samples} samples cannot be split into num_microbatches={n} of equal size: {other} a batch of a "
                f"multiple of {n} samples"
            )
        traced = getattr(self.stages[0], "traced_shapes", None)
        microbatch_shapes = tuple((samples // n, *tensor.shape[1:]) for tensor in inputs)
        if traced is not None and microbatch_shapes != traced:
            raise ShapeError(
                f"the stages were traced with a sample of {_shapes(traced)}, and microbatches are "
                f"{_shapes(microbatch_shapes)}: pass batches of this size, or call split_stages with a sample_input of "
                "one microbatch"
            )


def _without_gaps(x: Tensor) -> Tensor:
    """Return a tensor whose memory has no gaps, because torch 2.11 refuses tensors whose strides it would not keep."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.clone()


def _in_short(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(map(str, shapes))


def make_schedule(
    name: str, stages: Sequence[PipelineStage], num_microbatches: int, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> PipelineSchedule:
    """Make the schedule by which microbatches go through the stages. Every rank of the axis must call it.

    Args:
        name: ``"gpipe"`` or ``"1f1b"``, with one stage per rank; ``"interleaved"``, ``"looped_bfs"`` or
            ``"zero_bubble"``, with more than one.
        stages: The stages of this rank, from :func:`~panther.distributed.split_stages`.
        num_microbatches: Number of microbatches, which must divide the number of samples in a batch.
        loss_fn: ``loss_fn(output, target)``. If its attribute ``reduction`` is ``"sum"``, the losses of microbatches
            are added. Otherwise, and for a function without this attribute, they are averaged. Loss and gradients
            therefore equal those of the unsplit batch. Exceptions are means that are not over samples
            (``ignore_index``, class weights), and BatchNorm, which computes the statistics of a microbatch.

    Raises:
        ValueError: If the schedule is unknown or does not fit the stages, or the loss has a different reduction.
        TypeError: If ``loss_fn`` is not a function.
        ShapeError: If the schedule does not support ``num_microbatches``, or there are no stages.
        DistributedError: If ranks ask for different schedules.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> stages = pr.distributed.split_stages(
        ...     nn.Sequential(nn.Linear(8, 2)), 1
        ... )
        >>> schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
        >>> output, loss = schedule.step(torch.randn(6, 8), torch.zeros(6, 2))
        >>> output.shape
        torch.Size([6, 2])
        >>> pr.distributed.shutdown()
    """
    if not stages:
        raise ShapeError(
            "stages is empty, and must have the stages of this rank: pass the list that split_stages returns"
        )
    schedules: list[PipelineSchedule] = []

    def check() -> dict[str, str]:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of output and target, not a {type(loss_fn).__name__}")
        schedules[:] = [_make(name, list(stages), num_microbatches, loss_fn)]
        return describe_settings(
            {"name": name, "num_microbatches": num_microbatches, "stages": stages[0].num_stages}
        ) | {"the loss's reduction": reduction_of(loss_fn)}

    agree("make_schedule", check, stages[0].group, "pass the same on every rank of the axis", "schedules")
    return schedules[0]


def _make(
    name: str, stages: list[PipelineStage], num_microbatches: int, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> PipelineSchedule:
    check_schedule(name)
    kind = SCHEDULES[name]
    is_looped = kind.stages_per_rank > 1
    check_size("num_microbatches", num_microbatches, least=1)
    ranks, n = stages[0].group_size, stages[0].num_stages
    if not is_looped and len(stages) != 1:
        raise ValueError(f"schedule {name!r} takes one stage a rank, not {len(stages)}: use n={ranks} stages")
    reduction = check_reduction(loss_fn, "loss")
    # torch's scale_grads is not used, because it would also divide gradients that were accumulated in earlier steps.
    share = DividedLoss(loss_fn, num_microbatches) if reduction == "mean" else loss_fn

    def make() -> Any:
        return kind.make(stages if is_looped else stages[0], num_microbatches, share, scale_grads=False)

    try:
        return PipelineSchedule(make, stages, num_microbatches)
    except ValueError as error:
        raise ShapeError(
            f"schedule {name!r} cannot take num_microbatches={num_microbatches} over {n} stages: {error}"
        ) from error
