"""Tensor parallelism of a whole model: which layers pair up, and what is done to every module."""

__all__ = ["Placed", "TensorParallelReport", "tensor_parallel"]

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from panther.distributed.collectives import chunk_sizes
from panther.distributed.sync import start_alike
from panther.distributed.tensor import ColwiseSKParallel, RowwiseSKParallel
from panther.errors import ShapeError
from panther.nn import SKLinear

# Feed-forward blocks by the names of their layers: those that widen, whose outputs are cut, and the one that narrows.
# Between them stand only functions of single entries.
_FEED_FORWARD = (
    (("linear1",), "linear2"),  # torch
    (("gate_proj", "up_proj"), "down_proj"),  # Llama and its kin
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("up",), "down"),
)
_ELEMENTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish, nn.ReLU6,
    nn.Dropout, nn.Identity,
)  # fmt: skip


_ON_MESH = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)  # DTensor has all their operations


class Placed(NamedTuple):
    """What was done to a module."""

    name: str
    kind: str
    action: str
    """``"outputs cut"``, ``"inputs cut"``, ``"copied"``, or the style that the plan named."""
    reason: str


@dataclass(frozen=True)
class TensorParallelReport:
    """What :func:`tensor_parallel` did to every module that has parameters; ``print`` shows it."""

    placed: tuple[Placed, ...]

    def __str__(self) -> str:
        """A line a module."""
        rows = [("module", "kind", "action", "reason"), *self.placed]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, ParallelStyle] = "auto"
) -> TensorParallelReport:
    """Share a model's layers over the ranks of a mesh axis, in place. Every rank must call it.

    ``"auto"`` looks for pairs of linear layers, sketched or dense, between which only functions of single entries
    stand: neighbours in an nn.Sequential, and feed-forward blocks that name their layers as torch's and common
    transformers do (linear1 and linear2; gate_proj, up_proj and down_proj; fc1 and fc2; ...). The outputs of the first
    and the inputs of the second are cut, so that one sum a pair is all that is sent; widths that the ranks do not
    divide are cut as :func:`torch.chunk` cuts them if all layers of the pair are sketched. Everything else is copied:
    each rank computes it whole, attention too. Weights and sketches are those of the axis's first rank.

    Ranks must draw the same random numbers where dropout acts on what is not cut: seed them alike along the axis.

    Args:
        model: Built alike on every rank, on its device.
        mesh: One-dimensional, ``mesh["tp"]``.
        plan: ``"auto"``, or styles by globs of names, :class:`ColwiseSKParallel`, :class:`RowwiseSKParallel` or
            torch's.

    Returns:
        What was done to every module that has parameters of its own, and why.

    Raises:
        ShapeError: If the mesh has several dimensions, a name of the plan matches nothing, or a layer that it names has
            fewer outputs or inputs than ranks.
        ValueError: If ``plan`` is another string.
        DistributedError: If there is no process group.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> layers = [pr.nn.SKLinear(256, 512, 4), nn.ReLU(), pr.nn.SKLinear(512, 256, 4), nn.LayerNorm(256)]
        >>> model = nn.Sequential(*layers)
        >>> report = tensor_parallel(model, pr.distributed.make_mesh(tp=1)["tp"])
        >>> [(entry.name, entry.action) for entry in report.placed]
        [('0', 'outputs cut'), ('2', 'inputs cut'), ('3', 'copied')]
        >>> pr.distributed.shutdown()
    """
    if mesh.ndim != 1:
        raise ShapeError(f"tensor_parallel takes one mesh axis, and the mesh has {mesh.mesh_dim_names}: use mesh['tp']")
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan={plan!r} must be 'auto', or a mapping of names to styles")
    start_alike(model, mesh.get_group())
    if isinstance(plan, str):
        styles, why = _automatic(model, mesh.size())
    else:
        styles, why = _named(model, plan)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    parallelize_module(model, mesh, dict(styles))
    placed = []
    for name, module in list(model.named_modules()):
        if name in styles:
            style = type(styles[name])
            placed.append(Placed(name, kinds[name], _ACTIONS.get(style, style.__name__), why[name]))
        elif any(name.startswith(other + ".") for other in styles):
            continue
        elif any(parameter is not None for parameter in module._parameters.values()):
            how = _copy(module, mesh)
            placed.append(Placed(name, kinds[name], "copied", why.get(name, how)))
    return TensorParallelReport(tuple(placed))


_ACTIONS = {
    ColwiseSKParallel: "outputs cut",
    RowwiseSKParallel: "inputs cut",
    ColwiseParallel: "outputs cut",
    RowwiseParallel: "inputs cut",
}


def _named(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> tuple[dict[str, ParallelStyle], dict[str, str]]:
    names = [name for name, _ in model.named_modules() if name]
    styles, why = {}, {}
    for pattern, style in plan.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ShapeError(f"plan names {pattern!r}, which matches no module of {', '.join(names[:10])}")
        for name in matched:
            styles[name], why[name] = style, f"by the plan's {pattern!r}"
    return styles, why


def _automatic(model: nn.Module, ranks: int) -> tuple[dict[str, ParallelStyle], dict[str, str]]:
    """Styles for the layers of every pair, and for the rest of the linear layers why they have none."""
    styles: dict[str, ParallelStyle] = {}
    why: dict[str, str] = {}
    uses: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[module] = uses.get(module, 0) + 1
    for firsts, last in _pairs(model):
        layers = [*firsts, last]
        modules = [model.get_submodule(name) for name in layers]
        widths = {_sizes(module)[1] for module in modules[:-1]}
        if any(name in styles for name in layers):
            continue
        if any(uses[module] > 1 for module in modules):
            reason = "stands in several places"
        elif widths != {_sizes(modules[-1])[0]}:
            reason = (
                f"gives {', '.join(map(str, sorted(widths)))} features, and {last!r} takes {_sizes(modules[-1])[0]}"
            )
        elif not _can_cut(next(iter(widths)), ranks):
            reason = f"has {next(iter(widths))} features between, too few for {ranks} ranks"
        elif next(iter(widths)) % ranks and not all(isinstance(module, SKLinear) for module in modules):
            # torch's RowwiseParallel takes all ranks' parts to be as large as its own.
            reason = f"has {next(iter(widths))} features between, which {ranks} ranks do not divide, and is dense"
        else:
            for name, module in zip(firsts, modules, strict=False):
                styles[name] = ColwiseSKParallel() if isinstance(module, SKLinear) else ColwiseParallel()
                why[name] = f"paired with {last!r}"
            styles[last] = RowwiseSKParallel() if isinstance(modules[-1], SKLinear) else RowwiseParallel()
            why[last] = f"paired with {' and '.join(map(repr, firsts))}"
            continue
        for name in layers:
            why[name] = reason
    for name, module in model.named_modules():
        if _is_linear(module) and name not in why:
            why[name] = "has no partner across functions of single entries"
    return styles, why


def _pairs(model: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Names of layers whose outputs are to be cut, and of the one whose inputs are."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        children = dict(module.named_children())
        for firsts, last in _FEED_FORWARD:
            if last in children and all(_is_linear(children.get(name)) for name in (*firsts, last)):
                yield [dot + name for name in firsts], dot + last
                break
        if isinstance(module, nn.Sequential):
            before: str | None = None
            for name, child in children.items():
                if _is_linear(child):
                    if before is None:
                        before = name
                    else:
                        yield [dot + before], dot + name
                        before = None
                elif not isinstance(child, _ELEMENTWISE):
                    before = None


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, SKLinear)


def _sizes(module: Any) -> tuple[int, int]:
    return module.in_features, module.out_features


def _can_cut(size: int, ranks: int) -> bool:
    try:
        chunk_sizes(size, ranks)
    except ShapeError:
        return False
    return True


def _copy(module: nn.Module, mesh: DeviceMesh) -> str:
    """Put a module's own parameters on the mesh, as norms of gradients over several axes need them, and say so."""
    if type(module) not in _ON_MESH:
        return "computed whole by every rank; its parameters stay plain tensors"

    def to_mesh(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(x, mesh, [Replicate()], run_check=False) if isinstance(x, Tensor) else x for x in inputs
        )

    def to_local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        # A copy: of a view, changed in place, FSDP2 would lose the hook that gathers its parameters in backward.
        return output.to_local().clone() if isinstance(output, DTensor) else output

    distribute_module(module, mesh, None, to_mesh, to_local)
    return "computed whole by every rank"
