"""The distributed guide's trainer of a model over up to three axes of ranks: one step on any layout."""

__all__ = ["HybridParallelTrainer"]

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed.comm.agreement import agree
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm
from panther.distributed.comm.ranks import transport
from panther.distributed.guide.layers import check_configs
from panther.distributed.parallelize.build import parallelize
from panther.distributed.parallelize.config import ParallelismConfig
from panther.distributed.pipeline.losses import DividedLoss, check_reduction, reduction_of
from panther.distributed.pipeline.schedules import PipelineSchedule, make_schedule
from panther.distributed.tensor.styles import ColwiseSKParallel
from panther.errors import ShapeError
from panther.nn import SKLinear


@dataclass(frozen=True, kw_only=True)
class _HybridConfig(ParallelismConfig):
    """The settings of a HybridParallelTrainer: how the model is distributed, and how gradients are clipped."""

    _title: ClassVar[str] = "parallelism_config"

    gradient_clipping: float | None = None
    """Largest allowed norm of the gradient of the whole model. None does not clip."""


class HybridParallelTrainer:
    """Train a model over up to three axes of ranks. Every rank must make it and call it.

    Layers are sharded along tp (:func:`tensor_parallel`), the model is split into stages along pp
    (:func:`split_stages`), and every stage is replicated or sharded along dp. All ranks get the weights and sketches of
    rank 0.

    Args:
        model_config: A module. Or a module on the meta device, or a function that builds one, which is called with
            ``torch.device("meta")``: it is sharded without values, and ``materialize_(trainer.model)`` fills this
            rank's shards. Or ``{"layers": [...]}``, for each SKLinear a mapping with ``in_features``, ``out_features``
            and ``sketch_size``, without activations between them. If any mapping has the key ``tensor_parallel``,
            layers with the value True are sharded along tp by their outputs, which are gathered, and all other layers
            are replicated. Without this key, pairs are sharded, as by :func:`tensor_parallel`.
        parallelism_config: A mapping of settings of :class:`ParallelismConfig` to values, and of ``gradient_clipping``
            to the largest norm of the gradient of the whole model (None, which does not clip).

    Attributes:
        model_config: The mapping or function that was passed; None for a module.
        parallelism_config: The settings that were passed, completed by defaults.
        model: The module, or an nn.ModuleList of this rank's stages. The optimizer is made from
            ``model.parameters()``.
        mesh: The mesh, with the axes dp, pp and tp, preceded by replicate if there is more than one replica.
        report: The report of tensor parallelism, or None.
        dp_group: The ranks that have the same stages and shards.
        tp_group: The ranks that share this rank's layers.
        dp_rank: The rank of this process in ``dp_group``.
        tp_rank: The rank of this process in ``tp_group``.

    Raises:
        ConfigError: If a setting or its value is unknown, has the wrong type or is out of range, or settings contradict
            each other or do not suit the world size.
        TypeError: If the model or the settings have the wrong type.
        ShapeError: If the model cannot be split into stages.
        DistributedError: If the process group is missing, or the model is wrapped or sharded already.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sizes = [(256, 256), (256, 4)]
        >>> layers = [
        ...     {"in_features": n, "out_features": m, "sketch_size": 1}
        ...     for n, m in sizes
        ... ]
        >>> trainer = HybridParallelTrainer(
        ...     {"layers": layers}, {"gradient_clipping": 1.0}
        ... )
        >>> optimizer = torch.optim.Adam(trainer.model.parameters())
        >>> batch = torch.randn(8, 256), torch.randint(4, (8,))
        >>> loss = trainer.train_step(batch, optimizer, nn.CrossEntropyLoss())
        >>> pr.distributed.shutdown()
    """

    def __init__(
        self,
        model_config: nn.Module | Callable[[], nn.Module] | Mapping[str, Any],
        parallelism_config: Mapping[str, Any],
    ) -> None:
        if not isinstance(parallelism_config, Mapping):
            kind = type(parallelism_config).__name__
            raise TypeError(f"parallelism_config must be a mapping of names to values, not {kind}")
        config = _HybridConfig(**{str(name): value for name, value in parallelism_config.items()})
        # A module is not stored, because it would keep the layers of other ranks in memory.
        self.model_config = None if isinstance(model_config, nn.Module) else model_config
        model, styles = _layers_of(model_config)
        parallel = parallelize(model, config, styles=styles, all_axes=True)
        layout = parallel.layout
        self.model, self.stages = parallel.model, parallel.stages
        self.mesh, self.report = parallel.mesh, parallel.report
        self.dp_group, self.tp_group = parallel.groups.data, self.mesh["tp"].get_group()
        self.dp_rank, self.tp_rank = dist.get_rank(self.dp_group), dist.get_rank(self.tp_group)
        self.parallelism_config = vars(config) | layout.sizes() | {"num_microbatches": layout.num_microbatches}
        self.gradient_clipping, self.schedule_name = config.gradient_clipping, config.schedule
        self.num_microbatches = layout.num_microbatches
        self._loss_fn: DividedLoss | None = None
        self._schedule: PipelineSchedule | None = None

    def train_step(
        self,
        batch: tuple[Tensor, Tensor],
        optimizer: torch.optim.Optimizer,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> float:
        """Do one step of the optimizer.

        Args:
            batch: Samples and targets, equal on all ranks with the same dp rank. Different dp ranks may have different
                numbers of samples, by which the loss is weighted; with a pipeline, the numbers must be equal.
            optimizer: The optimizer of ``model.parameters()``.
            criterion: A loss function that returns the mean over samples, or their sum if its attribute ``reduction``
                is ``"sum"``.

        Returns:
            The mean loss over the samples of all dp ranks, or their sum, on every rank. The gradients are the gradients
            of this loss.

        Raises:
            ShapeError: If a rank has no samples, or a different number of targets, or they cannot be split into
                microbatches of equal size.
            TypeError: If the batch is not a pair, or the criterion not a function.
            ValueError: If the criterion's ``reduction`` is neither ``"mean"`` nor ``"sum"``.
            DistributedError: If ranks that share layers, or with a pipeline any ranks, pass batches of different shapes
                or dtypes, or a rank has ended or does not answer in time.
        """
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise TypeError(f"batch must be a pair of samples and targets, not a {type(batch).__name__}{size}")
        data, targets = batch
        with watched(f"a step of HybridParallelTrainer on {data.dtype} {tuple(data.shape)}"):
            divisor = self._divisor_of(data, targets, criterion)
            device = self._device()
            optimizer.zero_grad()
            loss = self._forward_and_backward(data.to(device), targets.to(device), criterion, divisor)
            if self.gradient_clipping is not None:
                # The norm over all stages and shards; torch's own norm includes only this rank's stages.
                norm = gradient_norm(self.model.parameters(), stages=self.mesh["pp"].size())
                clip_gradients(self.model.parameters(), self.gradient_clipping, norm)
            optimizer.step()
            # Only ranks with the last stage have a loss, which is equal on their tp ranks.
            total = torch.zeros((), dtype=torch.float64, device=device)
            if loss is not None:
                total += loss.detach()
            dist.all_reduce(total)
            return total.item() / (dist.get_world_size(self.dp_group) * self.mesh["tp"].size())

    def _device(self) -> torch.device:
        """Return the device on which the model computes; with ``cpu_offload``, its parameters are on the CPU."""
        if self.parallelism_config["cpu_offload"]:
            return transport(None)
        return next(self.model.parameters()).device

    def _divisor_of(self, data: Tensor, targets: Tensor, criterion: Any) -> float:
        """Return the divisor of the loss with which the average of gradients along dp is the gradient of the full loss.

        Ranks exchange the sizes of their batches in every step, because any rank's size can change.
        """
        form = partial(_form, data, targets, criterion)
        try:
            digest = hashlib.blake2b(repr(form()).encode(), digest_size=8).digest()
            numbers = [len(data), int.from_bytes(digest, signed=True), int(reduction_of(criterion) == "sum")]
        except Exception:  # agree, below, raises the error on every rank; raising here would leave other ranks waiting
            numbers = [0, 0, 0]
        dp, pp = dist.get_world_size(self.dp_group), self.mesh["pp"].size()
        # Three numbers per rank are exchanged in every step, and the full descriptions only if they differ.
        local_numbers = torch.tensor(numbers, device=transport(None))
        rank_numbers = [torch.empty_like(local_numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(rank_numbers, local_numbers)
        places = (
            torch.stack(rank_numbers).cpu().view(1 if pp > 1 else dp, -1, 3)
        )  # (dp ranks that may differ, ranks, 3)
        samples, are_equal = places[..., 0], (places == places[:, :1]).all() and len(places[..., 2].unique()) == 1
        if not (samples.all() and are_equal):
            fix = "every rank batches of one size and shape" if pp > 1 else "ranks with the same dp rank the same batch"
            agree("train_step", form, dist.group.WORLD, f"pass {fix}", "batches")
        if reduction_of(criterion) == "sum":
            return 1 / dp  # undoes the average of the gradients in data parallelism
        return int(samples[:, 0].sum()) / (len(data) * len(places))

    def _forward_and_backward(self, data: Tensor, targets: Tensor, criterion: Any, divisor: float) -> Tensor | None:
        # torch's schedule is made for one loss function; the divisor may change in every step.
        if self._loss_fn is None or self._loss_fn.loss_fn is not criterion:
            self._loss_fn, self._schedule = DividedLoss(criterion), None
        self._loss_fn.divisor = divisor
        if self.stages:
            if self._schedule is None:
                self._schedule = make_schedule(self.schedule_name, self.stages, self.num_microbatches, self._loss_fn)
            return self._schedule.step(data, targets)[1]
        loss = self._loss_fn(self.model(data), targets)
        loss.backward()
        return loss


def _layers_of(model_config: Any) -> tuple[Any, dict[str, ParallelStyle] | None]:
    """Return the model, and the styles of the layers to shard; None to plan them."""
    if isinstance(model_config, nn.Module) or callable(model_config):
        return model_config, None
    if not isinstance(model_config, Mapping):
        raise TypeError(f"model_config must be a module or a mapping, not {type(model_config).__name__}")
    if set(model_config) != {"layers"}:
        keys = ", ".join(map(str, model_config)) or "none"
        raise ValueError(f"model_config must be a module or have the key 'layers', and has {keys}")
    layers = model_config["layers"]
    sizes = check_configs(layers, optional=("tensor_parallel",))
    model = nn.Sequential(*(SKLinear(*layer_sizes) for layer_sizes in sizes))
    if not any("tensor_parallel" in layer for layer in layers):
        return model, None
    for index, layer in enumerate(layers):
        if not isinstance(flag := layer.get("tensor_parallel", False), bool):
            raise TypeError(f"layers[{index}]['tensor_parallel']={flag!r} must be True or False")
    gathered = ColwiseSKParallel(output_layouts=Replicate())
    return model, {str(index): gathered for index, layer in enumerate(layers) if layer.get("tensor_parallel")}


def _form(data: Tensor, targets: Tensor, criterion: Any) -> dict[str, str]:
    """Describe a batch, or raise if it cannot be used for a step."""
    if len(data) == 0 or len(targets) != len(data):
        raise ShapeError(
            f"a batch must have samples and a target for each, and has {len(data)} and {len(targets)}: give every rank "
            "some of the samples, or skip the batch on all"
        )
    reduction = check_reduction(criterion, "criterion")
    forms = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in (("the samples", data), ("the targets", targets))}
    return {**forms, "the criterion's reduction": reduction}
