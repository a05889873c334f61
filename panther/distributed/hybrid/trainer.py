"""Data, tensor and pipeline parallelism combined, on one mesh.

The order is fixed: plan the stages while layers are full, shard layers along tp, wrap the blocks that are recomputed in
backward, make the stages, shard them along dp.
"""

__all__ = ["HybridParallelTrainer"]

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.distributed.comm.agreement import agree
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm
from panther.distributed.comm.mesh import make_mesh
from panther.distributed.comm.ranks import transport
from panther.distributed.comm.supervision.groups import flatten_mesh
from panther.distributed.data.sharded_blocks import fsdp_blocks
from panther.distributed.data.strategies import check_model, fully_shard_, wrap_in_ddp
from panther.distributed.hybrid.configuration import checked_config, layers_of
from panther.distributed.pipeline.losses import DividedLoss, check_reduction, reduction_of
from panther.distributed.pipeline.schedules import SCHEDULES, PipelineSchedule, make_schedule
from panther.distributed.pipeline.stage_modules import StageModules
from panther.distributed.pipeline.stages import StagePlan, plan_stages
from panther.distributed.sync.replicas import broadcast_model, built
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.distributed.tensor.parallelize import TensorParallelReport, describe_plan, shard_model_
from panther.distributed.tensor.sharding_plan import Plan, plan_automatically, plan_by_names
from panther.errors import ShapeError


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
        parallelism_config: ``tensor_parallel_size`` (1), ``pipeline_parallel_size`` (1), ``data_parallel_size`` (the
            rest of the world), ``data_parallel_replicate_size`` (1: the number of replicas that these ranks form, each
            sharded in itself, with ``"fsdp"``), ``num_microbatches`` (the stages), ``schedule`` (``"1f1b"``),
            ``gradient_clipping`` (None), ``data_parallel`` (``"fsdp"``; or ``"replicate"``, ``"ddp"``),
            ``mixed_precision`` (None, as for :func:`data_parallel`), ``activation_checkpointing`` (``"none"``; or
            ``"selective"``, ``"full"``, as in :class:`panther.train.TrainConfig`), and for ``"fsdp"`` ``cpu_offload``
            (False) and ``reshard_after_forward`` (True), as for :func:`data_parallel`. For the stages of a model other
            than an nn.Sequential, ``pipeline_layers``, the name of its ModuleList, and ``sample_input``, the inputs of
            one microbatch, and ``inside_sketched_layers`` (False), as for :func:`split_stages`.

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
        ConfigError: If a key or the kind of data parallelism is unknown.
        ValueError: If any other value is unknown or out of range.
        TypeError: If a value has the wrong type.
        ShapeError: If the product of the sizes is not the world size, or the model cannot be split into stages.
        DistributedError: If there is no process group, the model is wrapped or sharded already, or torch does not
            support the combination: ``"ddp"`` with tensor parallelism (it loses the sharded parameters), or with a
            pipeline (it fails in the second step).

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sizes = [(256, 256), (256, 4)]
        >>> layers = [{"in_features": n, "out_features": m, "sketch_size": 1} for n, m in sizes]
        >>> trainer = HybridParallelTrainer({"layers": layers}, {"gradient_clipping": 1.0})
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
        config = checked_config(parallelism_config)
        # A module is not stored, because it would keep the layers of other ranks in memory.
        self.model_config = None if isinstance(model_config, nn.Module) else model_config
        self.parallelism_config = config
        replicas = config["data_parallel_replicate_size"]
        self.mesh = make_mesh(
            dp=config["data_parallel_size"] // replicas,
            pp=config["pipeline_parallel_size"],
            tp=config["tensor_parallel_size"],
            replicate=replicas if replicas > 1 else None,
        )
        data = self.mesh["replicate", "dp"] if replicas > 1 else self.mesh["dp"]
        self.gradient_clipping, self.schedule_name = config["gradient_clipping"], config["schedule"]
        self.num_microbatches = config["num_microbatches"]
        self.dp_group = (flatten_mesh(data, "data") if replicas > 1 else data).get_group()
        self.tp_group = self.mesh["tp"].get_group()
        self.dp_rank, self.tp_rank = dist.get_rank(self.dp_group), self.mesh["tp"].get_local_rank()
        self._loss_fn: DividedLoss | None = None
        self._schedule: PipelineSchedule | None = None
        if isinstance(model_config, nn.Module) or callable(model_config):
            model, styles = built(model_config), None
        else:
            model, styles = layers_of(model_config)
        strategy, precision = config["data_parallel"], config["mixed_precision"]
        layer_plan: Plan = {}
        stage_plans: list[StagePlan] = []

        def settings() -> dict[str, Any]:
            check_model(model, strategy)
            described = {name: value for name, value in config.items() if name != "sample_input"}
            if config["tensor_parallel_size"] > 1:
                ranks = config["tensor_parallel_size"]
                layer_plan.update(plan_automatically(model, ranks) if styles is None else plan_by_names(model, styles))
            if (
                config["pipeline_parallel_size"] > 1
            ):  # before the layers are sharded, because the trace needs full layers
                stage_plans[:] = [self._plan(model, config)]
                described["sample_input"] = stage_plans[0].sample
            return described | describe_plan(layer_plan)

        # This is the only exchange and the only broadcast of the model; later steps send none of its tensors.
        broadcast_model(model, dist.group.WORLD, "HybridParallelTrainer", settings)  # type: ignore[arg-type]
        self.report: TensorParallelReport | None = None
        # Tensor parallelism comes before data parallelism, because only FSDP can shard a shard again.
        if config["tensor_parallel_size"] > 1:
            self.report = shard_model_(model, self.mesh["tp"], layer_plan)
        halved = stage_plans[0].blocks.halved if stage_plans else ()
        undivided = {module for name, module in model.named_modules() if name not in halved}
        # Recomputing halves of a layer saves nothing, because they keep only their inputs.
        blocks = [block for block in fsdp_blocks(model) if block in undivided]
        checkpoint_blocks_(model, blocks, config["activation_checkpointing"])
        self.stages: list[Any] = stage_plans[0].stages(model, self.mesh["pp"].get_group()) if stage_plans else []
        sharding: dict[str, Any] = {"mixed_precision": precision, "cpu_offload": config["cpu_offload"]}
        if not config["reshard_after_forward"]:
            sharding["reshard_after_forward"] = False  # FSDP2's default keeps only the root unit gathered
        for stage in self.stages:
            fully_shard_(stage.submod, data, strategy, one_block=True, **sharding)
        if self.stages:
            self.model: nn.Module = StageModules(stage.submod for stage in self.stages)
        elif strategy == "ddp":
            self.model = wrap_in_ddp(model, self.dp_group, init_sync=False)
        else:
            self.model = fully_shard_(model, data, strategy, **sharding)

    def _plan(self, model: nn.Module, config: Mapping[str, Any]) -> StagePlan:
        layers = config["pipeline_layers"]
        if layers is None and not isinstance(model, nn.Sequential):
            raise ShapeError(
                f"a pipeline splits an nn.Sequential, not a {type(model).__name__}: make the model one, or name its "
                "ModuleList in pipeline_layers"
            )
        kind, ranks = SCHEDULES[self.schedule_name], self.mesh["pp"].size()
        n, sample_input = ranks * kind.stages_per_rank, config["sample_input"]
        trained = [child for child in model.children() if any(p.requires_grad for p in child.parameters())]
        if layers is None and len(trained) < n:
            raise ShapeError(
                f"every one of {n} stages must have something to train, and {len(trained)} of the model's children "
                "have parameters that require a gradient: use fewer stages"
            )
        inside = config["inside_sketched_layers"]
        return plan_stages(
            model, n, ranks, order=kind.order, layers=layers, sample_input=sample_input, inside_sketched_layers=inside
        )

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
            raise TypeError(f"batch must be a pair of samples and targets, not {type(batch).__name__}")
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
