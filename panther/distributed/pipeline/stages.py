"""Stages of a pipeline: split a model, and keep the stages of this rank, with the names of the full model.

:func:`plan_stages` checks, traces and divides a model without any communication, so that callers can make it a part of
their own exchange between ranks. :func:`split_stages` also compares and broadcasts the model.
"""

__all__ = ["split_stages"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from panther._torch import children_of, is_view, tree_map_only
from panther.distributed.comm.mesh import get_distributed_info, groups_of
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.pipeline._export import trace_stages
from panther.distributed.pipeline._stage_graph import StageGraph
from panther.distributed.pipeline.balance import balance_stages
from panther.distributed.pipeline.stage_modules import Children, from_source_
from panther.distributed.sync.replicas import broadcast_model, built
from panther.errors import ShapeError, check_size

Blocks = Children | StageGraph
"""The blocks of a model: a stage is a run of consecutive blocks."""


def split_stages(
    model: nn.Module | Callable[[], nn.Module],
    n: int,
    points: Sequence[str] | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    layers: str | None = None,
    sample_input: Tensor | tuple[Tensor, ...] | None = None,
) -> list[PipelineStage]:
    """Split a model into n stages, and return the stages of this rank. Every rank of the axis must call it.

    An nn.Sequential is split between its children. Any other model is split before modules that its forward calls:
    either the modules named in ``points``, or children of the ModuleList ``layers``. The code before the list is then
    in the first stage, and the code after it in the last stage. torch.export traces the code of the forward between its
    modules, with ``sample_input``, and tensors that a later stage needs are sent to it. Modules are not traced but
    called, so that their modes, hooks, sketches and checkpoints do not change. The trace is valid for the sizes of the
    sample input, and for the present mode of the model (training or evaluation).

    The stages keep the names of the full model, so that their checkpoints fit together. All ranks get the weights and
    sketches of the axis's first rank.

    Args:
        model: The model, built in the same way on every rank, on its device. It is not changed; its layers are shared
            with the stages. Or a model on the meta device, or a function that builds one, which is called with
            ``torch.device("meta")``: ``materialize_([stage.submod for stage in stages])`` fills the stages.
        n: Number of stages, a multiple of the ranks. Rank r has the stages r, r + ranks, ...
        points: Names of the modules at which stages begin, except the first stage, such as ``["layers.4"]``. None makes
            the largest stage as small as possible, in parameters.
        mesh: The pp axis, a one-dimensional mesh or a process group; None is the world.
        layers: Name of the ModuleList, or nn.Sequential, between whose children to split; instead of ``points``.
        sample_input: Inputs of one microbatch, without the target; for models other than nn.Sequential.

    Returns:
        This rank's stages, in the order of their indices.

    Raises:
        ShapeError: If n is not a multiple of the ranks, there are fewer children than stages, ``points`` or ``layers``
            names the wrong modules, the model cannot be traced, or more than one stage would train a parameter.
        TypeError: If the model is not an nn.Sequential and ``sample_input``, or both ``points`` and ``layers``, are
            missing.
        DistributedError: On every rank, if models or arguments differ between ranks, or there is no process group.

    Cost: a broadcast of the model; the trace runs it twice, on fake tensors.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [stage] = split_stages(model, 1)
        >>> sorted(name for name, _ in stage.submod.named_parameters())
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> encoder = nn.TransformerEncoder(
        ...     nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4
        ... )
        >>> first, second = split_stages(
        ...     encoder, 2, layers="layers", sample_input=torch.randn(1, 5, 8)
        ... )
        >>> sorted(name for name, _ in second.submod.layers.named_children())
        ['2', '3']
        >>> pr.distributed.shutdown()
    """
    model = built(model)
    group = groups_of(mesh)[0] if isinstance(mesh, DeviceMesh) else mesh
    if group is None and in_process_group():
        group = dist.group.WORLD
    plans: list[StagePlan] = []

    def check() -> dict[str, Any]:
        ranks = dist.get_world_size(group) if group else 1
        plans[:] = [plan_stages(model, n, ranks, points, layers=layers, sample_input=sample_input)]
        # Ranks that disagree would wait for messages that no other rank sends.
        settings = {"n": n, "points": None if points is None else list(points), "layers": layers}
        return settings | {"sample_input": plans[0].sample}

    broadcast_model(model, group, "split_stages", check)  # type: ignore[arg-type]
    assert group is not None
    return plans[0].stages(model, group)


@dataclass
class StagePlan:
    """Where the stages of a model begin."""

    blocks: Blocks
    begins: list[int]
    sample: list[tuple[tuple[int, ...], torch.dtype]] | None
    """Shapes and dtypes of the sample input, which must be equal on all ranks."""

    def stages(self, model: nn.Module, group: dist.ProcessGroup) -> list[PipelineStage]:
        """Build this rank's stages of the planned model, whose layers may have been sharded in the meantime."""
        ends = [*self.begins[1:], len(self.blocks)]
        # The device is read from the entire model, because a stage may have no parameters.
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        is_empty = device.type == "meta"
        if is_empty:
            device = get_distributed_info().device  # where materialize_ allocates
        stages: list[PipelineStage] = []
        for i in range(dist.get_rank(group), len(ends), dist.get_world_size(group)):
            module = self.blocks.module(model, self.begins[i], ends[i])
            from_source_(module, model if is_empty else None)
            stage = _Stage(module, i, len(ends), device, group=group)
            if isinstance(self.blocks, StageGraph):  # a trace is valid for one shape of each input
                stage.traced_shapes = tuple(shape for shape, _ in self.sample or ())
            stages.append(stage)
        return stages


class _Stage(PipelineStage):
    """Torch's stage, with three defects fixed.

    Before the first step with a new size, torch runs every stage once on uninitialised memory, to find the shapes of
    its outputs. This can fail (indices out of range), changes buffers, and drops gradients that an FSDP stage has from
    earlier steps. Schedules that split the backward also detach a stage's output in place, which fails for a view.
    """

    traced_shapes: tuple[tuple[int, ...], ...] | None = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward_maybe_with_nosync(*args, **kwargs)
        return outputs if self.is_last else tree_map_only(Tensor, lambda x: x.clone() if is_view(x) else x, outputs)

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        with torch.no_grad():
            for x in args if not self.is_first else ():
                x.zero_()  # uninitialised indices may be out of range
        self._remember(module)
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        self._restore()

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 calls this method for its run, whose inputs are zeros.
        self._remember(self.submod)
        shapes: Any = super()._shape_inference(*args, **kwargs)  # type: ignore[misc]
        reshard_(self.submod)
        self._restore()
        inputs: Any = getattr(self, "inputs_meta", None) or ()  # torch 2.13 has no such attribute
        integers = [x.dtype for x in inputs if not (x.is_floating_point() or x.is_complex())]
        if integers and not self.is_first and self.has_backward:
            raise ShapeError(
                f"stage {self.stage_index} receives a tensor of {integers[0]}, and torch {torch.__version__} sends "
                "only floating-point tensors between stages that are trained: use torch 2.13 or later, or begin the "
                "stage elsewhere"
            )
        return shapes

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # In torch 2.11, a rank with two adjacent stages sends a greeting to itself, which gloo refuses.
        greetings = super()._get_init_p2p_neighbors_ops()
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]

    def _remember(self, module: nn.Module) -> None:
        """Save buffers and gradients, which the run would change, and set gradients to None."""
        self._buffers_before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        reshard_(module)  # gradients belong to the shards, not to the gathered parameters
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, previous in self.__dict__.pop("_buffers_before", ()):  # for example BatchNorm's statistics
                buffer.copy_(previous)
        for parameter, gradient in self.__dict__.pop("_gradients", ()):
            parameter.grad = gradient


def reshard_(module: nn.Module) -> None:
    """Free the gathered parameters of the modules that FSDP shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def plan_stages(
    model: nn.Module,
    n: int,
    ranks: int,
    points: Sequence[str] | None = None,
    *,
    layers: str | None = None,
    sample_input: Tensor | tuple[Tensor, ...] | None = None,
) -> StagePlan:
    """Check the arguments of :func:`split_stages` for ``ranks`` ranks, trace the model, and choose where stages begin.

    Nothing is communicated: ranks with equal models and arguments get equal plans.
    """
    check_size("n", n, least=1)
    if n % ranks:
        raise ShapeError(f"n={n} stages must be a multiple of the ranks ({ranks}): use n={-(-n // ranks) * ranks}")
    if points is not None and (isinstance(points, str) or not all(isinstance(point, str) for point in points)):
        raise TypeError(f"points={points!r} must be a list of names of modules at which stages begin, such as ['2']")
    if points is not None and layers is not None:
        raise TypeError("split_stages takes points or layers, not both: points are the names at which stages begin")
    inputs = (sample_input,) if isinstance(sample_input, Tensor) else sample_input
    if inputs is not None and not (isinstance(inputs, tuple) and all(isinstance(x, Tensor) for x in inputs)):
        raise TypeError(f"sample_input must be a tensor or a tuple of tensors, not {type(sample_input).__name__}")
    blocks: Blocks
    if isinstance(model, nn.Sequential) and layers is None and not any("." in point for point in points or ()):
        names = list(children_of(model))
        begins = [0, *(names.index(point) if point in names else -1 for point in points or ())]
        if points is not None and (len(begins) != n or begins != sorted(set(begins))):
            raise ShapeError(
                f"points={list(points)} must be {n - 1} different names of children after the first, in order, of "
                f"{', '.join(names)}"
            )
        blocks = Children(names)
    else:
        starts = _starts(model, n, points, layers)
        if inputs is None:
            raise TypeError(
                f"a {type(model).__name__} is split by tracing it: pass sample_input=, the inputs of one microbatch"
            )
        blocks, begins = trace_stages(model, starts, inputs), list(range(n))
    if points is None:
        begins = balance_stages(_sizes_in_parameters(model, blocks), n)
    # Checked last, because it depends on the stages whether a shared parameter is in only one of them.
    _check_shared(model, blocks, begins)
    sample = None if inputs is None else [(tuple(x.shape), x.dtype) for x in inputs]
    return StagePlan(blocks, begins, sample)


def _starts(model: nn.Module, n: int, points: Sequence[str] | None, layers: str | None) -> list[str]:
    """Return the names of the modules at which the blocks of a traced model begin, except the first block."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"split_stages takes an nn.Module, not {model!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
    if layers is not None:
        if layers not in lists:
            raise ShapeError(
                f"layers={layers!r} must be the name of a ModuleList or nn.Sequential of the model: it has "
                f"{', '.join(map(repr, lists)) or 'none'}"
            )
        return [f"{layers}.{key}" for key in list(children_of(modules[layers]))[1:]]
    if points is None:
        hint = f" ({', '.join(map(repr, lists))} here)" if lists else ""
        raise TypeError(
            f"split_stages splits an nn.Sequential by itself, but not a {type(model).__name__}: pass layers=, "
            f"the name of its ModuleList{hint}, or points="
        )
    unknown = [point for point in points if point not in modules or not point]
    if unknown or len(set(points)) != n - 1:
        fault = f"the model has no {unknown[0]!r}" if unknown else f"there are {len(set(points))}"
        raise ShapeError(f"points={list(points)} must be {n - 1} different names of modules that begin stages: {fault}")
    return list(points)


def _tensors(model: nn.Module, names: set[str]) -> dict[str, nn.Parameter]:
    """Return the parameters whose name, or whose module's name, is in ``names``."""
    inside = tuple(f"{name}." for name in names)
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in parameters if name in names or name.startswith(inside)}


def _sizes_in_parameters(model: nn.Module, blocks: Blocks) -> list[int]:
    """Return the number of parameters of each block; a parameter that is shared within a block counts once."""
    parts = (_tensors(model, blocks.names_in(i, i + 1)) for i in range(len(blocks)))
    return [sum(parameter.numel() for parameter in set(part.values())) for part in parts]


def _check_shared(model: nn.Module, blocks: Blocks, begins: list[int]) -> None:
    """Raise if more than one stage trains a parameter, because each stage would apply only a part of the gradient."""
    first_uses: dict[nn.Parameter, tuple[str, int]] = {}
    for stage, (begin, end) in enumerate(pairwise([*begins, len(blocks)])):
        for name, parameter in _tensors(model, blocks.names_in(begin, end)).items():
            other, first = first_uses.setdefault(parameter, (name, stage))
            # A frozen parameter has no gradient that would be incomplete.
            if first != stage and parameter.requires_grad:
                alias = "" if other == name else f", which is also {name!r},"
                raise ShapeError(
                    f"parameter {other!r}{alias} is used by the stages {first} and {stage}, and torch's pipelines do "
                    "not sum gradients across stages: put all its uses into one stage, or untie it"
                )
