"""The guide's trainers on one axis: an epoch with data parallelism, and the microbatches of a batch in one process."""

__all__ = ["AdvancedDistributedTrainer", "MicrobatchPipelineTrainer"]

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm
from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.data.strategies import data_parallel
from panther.distributed.pipeline.losses import check_reduction
from panther.distributed.sync.sketches import verify_sketches
from panther.errors import DistributedError, ShapeError, check_size


class AdvancedDistributedTrainer:
    """Train a model with data parallelism and clipped gradients, on ranks with any numbers of batches.

    Args:
        model: The model, built in the same way on every rank, on its device. The weights and sketches of the first rank
            are used.
        rank: Rank of this process.
        world_size: Number of processes.
        gradient_clipping: Largest norm of the averaged gradient.
        find_unused_parameters: Whether a forward may leave some parameters unused. False saves a pass over the graph in
            every step, and avoids DDP's warning if all parameters are used.

    Attributes:
        model: The model.
        ddp_model: The model wrapped by DistributedDataParallel.

    Raises:
        DistributedError: If there is no process group, or its rank or world size differs from the arguments.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> trainer = AdvancedDistributedTrainer(
        ...     pr.nn.SKLinear(256, 4, 1), 0, 1
        ... )
        >>> batches = [
        ...     (torch.randn(8, 256), torch.randint(4, (8,))) for _ in range(3)
        ... ]
        >>> optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), lr=0.1)
        >>> loss = trainer.train_epoch(
        ...     batches, optimizer, nn.CrossEntropyLoss()
        ... )
        >>> pr.distributed.shutdown()
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        world_size: int,
        *,
        gradient_clipping: float = 1.0,
        find_unused_parameters: bool = True,
    ) -> None:
        if not in_process_group() or (rank, world_size) != (get_rank(), get_world_size()):
            raise DistributedError(
                f"rank={rank} and world_size={world_size} must equal the process group's, {get_rank()} and "
                f"{get_world_size()}: call panther.distributed.init() first, and pass get_rank() and get_world_size()"
            )
        if not gradient_clipping > 0:
            raise ValueError(f"gradient_clipping={gradient_clipping} must be positive: use math.inf to clip nothing")
        self.model, self.rank, self.world_size, self.gradient_clipping = model, rank, world_size, gradient_clipping
        self.ddp_model = data_parallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
        )

    def synchronize_sketching_matrices(self) -> None:
        """Check that every rank has the same sketches. Nothing is sent again.

        Raises:
            SketchMismatchError: On every rank, if the sketches differ.
        """
        verify_sketches(self.model)

    def train_epoch(
        self,
        dataloader: Iterable[tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> float:
        """Train for one epoch. Every rank must call it, with its own batches.

        A rank that has used all of its batches takes part in the collectives of the remaining ranks, without
        contributing gradients, until all ranks are finished (torch's Join, which sends a message per batch).

        Args:
            dataloader: Batches of samples and targets.
            optimizer: The optimizer of ``ddp_model.parameters()``.
            criterion: A loss function that returns the mean over samples.

        Returns:
            The mean loss over the samples of all ranks.

        Raises:
            ShapeError: On every rank, if no rank has a batch.
            DistributedError: If a rank has ended or does not answer in time.
        """
        self.synchronize_sketching_matrices()
        self.ddp_model.train()
        device = next(self.model.parameters()).device
        # In float64, because a sum over an epoch loses digits in float32.
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of samples
        joined: list[Joinable] = [self.ddp_model]
        if isinstance(optimizer, Joinable):  # such as ZeroRedundancyOptimizer, which broadcasts in its step
            joined.append(optimizer)
        with watched("train_epoch"), Join(joined):
            for data, target in dataloader:
                data, target = data.to(device), target.to(device)
                optimizer.zero_grad()
                loss = criterion(self.ddp_model(data), target)
                loss.backward()
                parameters = list(self.ddp_model.parameters())
                clip_gradients(parameters, self.gradient_clipping, gradient_norm(parameters))
                optimizer.step()
                sums += torch.stack([loss.detach().double() * len(data), sums.new_tensor(len(data))])
        with watched("train_epoch"):
            dist.all_reduce(sums)
        if not sums[1]:
            raise ShapeError(
                "no rank has a batch, so nothing was trained: pass a loader, which can be read more than once"
            )
        return (sums[0] / sums[1]).item()


class MicrobatchPipelineTrainer:
    """Train on the microbatches of a batch, with the gradients of the unsplit batch.

    Args:
        model: Any module, for example a :class:`PipelineParallelSketchedModel`.
        num_microbatches: Number of microbatches; a batch of fewer samples has fewer.

    Raises:
        ShapeError: If ``num_microbatches`` is not positive.

    Example:
        >>> model = nn.Linear(8, 2)
        >>> trainer = MicrobatchPipelineTrainer(model, num_microbatches=4)
        >>> x, y = torch.randn(10, 8), torch.randint(2, (10,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = trainer.forward_backward_pipeline(
        ...     x, y, nn.CrossEntropyLoss(), optimizer
        ... )
    """

    def __init__(self, model: nn.Module, num_microbatches: int = 4) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
        self.model = model
        self.num_microbatches = check_size("num_microbatches", num_microbatches, least=1)

    def forward_backward_pipeline(
        self,
        batch_data: Tensor,  # (samples, ...)
        batch_targets: Tensor,  # (samples, ...)
        criterion: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> float:
        """Do one step of the optimizer on all samples; earlier gradients are cleared.

        The sizes of microbatches differ by at most one sample. If ``criterion`` takes the mean (by its ``reduction``,
        or because it has none), the loss of each microbatch is weighted by its samples; if it takes the sum, losses are
        added. Loss and gradients are therefore equal to the loss and gradients of the unsplit batch. Exceptions are
        means that are not over samples (``ignore_index``, class weights), and BatchNorm, which computes the statistics
        of a microbatch.

        Returns:
            The loss of the batch.

        Raises:
            ShapeError: If there are no samples, or a different number of targets.
            TypeError: If the batch does not consist of tensors, or the criterion is not a function.
            ValueError: If the criterion has a different reduction.
        """
        for name, part in (("batch_data", batch_data), ("batch_targets", batch_targets)):
            if not isinstance(part, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(part).__name__}")
        samples = len(batch_data)
        if samples == 0 or len(batch_targets) != samples:
            raise ShapeError(
                f"the batch must have samples and a target for each, and has {samples} and {len(batch_targets)}"
            )
        reduction = check_reduction(criterion, "criterion")
        # More microbatches than samples would leave some of them empty.
        count = min(self.num_microbatches, samples)
        optimizer.zero_grad()
        total = 0.0
        for data, targets in zip(batch_data.tensor_split(count), batch_targets.tensor_split(count), strict=True):
            output = self.model(data)
            loss = criterion(output, targets.to(output.device))
            if loss.dim():
                raise ValueError(
                    f"the criterion returned a tensor of shape {tuple(loss.shape)}: it must reduce to one number"
                )
            if reduction == "mean":
                loss = loss * (len(data) / samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total
