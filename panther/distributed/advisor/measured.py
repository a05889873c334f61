"""Measure the statistics of a model by running it on fake tensors, unsharded or after :func:`tensor_parallel`."""

__all__ = ["measure", "measure_transformer", "plain_transformer"]

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther._process_settings import ignored_warnings
from panther._torch import FakeTensorMode, buffers_of, children_of, parameters_of, untracked_shard
from panther.distributed.advisor.fake_run import Policy, Run, fake_inputs, fake_mesh, make_fake_, meta_copy, run
from panther.distributed.advisor.layer_stats import LayerStats, Line, Measured, TensorStats
from panther.distributed.data.strategies import compute_dtype, fsdp_blocks
from panther.distributed.tensor.activation_checkpoint import inner_product_policy, require_blocks
from panther.distributed.tensor.parallelize import tensor_parallel
from panther.errors import PerformanceWarning
from panther.nn import SKLinear


def measure_transformer(
    *, sequence: int, hidden: int, heads: int, ffn: int, vocab: int, sketch: int | None, **variant: Any
) -> Measured:
    """Return the statistics of a plain transformer of one layer; ``variant`` is arguments of :func:`measure`."""
    with torch.device("meta"), ignored_warnings(category=PerformanceWarning):
        model = plain_transformer(hidden, 1, heads, ffn, vocab, sketch)
    tokens = torch.empty(1, sequence, dtype=torch.int64, device="meta")
    return measure(model, tokens, _loss_of_tokens, **variant)


def _loss_of_tokens(logits: Tensor) -> Tensor:
    # The values of the target do not matter, because fake tensors have only shapes.
    target = torch.zeros(logits.shape[:2].numel(), dtype=torch.int64, device="cpu")
    return F.cross_entropy(logits.flatten(0, 1), target)


def plain_transformer(hidden: int, layers: int, heads: int, ffn: int, vocab: int, sketch: int | None) -> nn.Sequential:
    """Return the model of :meth:`ModelStats.transformer`."""
    model = nn.Sequential(nn.Embedding(vocab, hidden))
    for _ in range(layers):
        layer = nn.TransformerEncoderLayer(
            hidden, heads, ffn, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        if sketch is not None:
            layer.linear1 = SKLinear(hidden, ffn, sketch)  # type: ignore[assignment]
            layer.linear2 = SKLinear(ffn, hidden, sketch)  # type: ignore[assignment]
        model.append(layer)
    return model.append(nn.LayerNorm(hidden)).append(nn.Linear(hidden, vocab, bias=False))


def measure(
    model: nn.Module,
    sample_input: Any,
    loss_fn: Callable[[Any], Tensor] | None,
    mixed_precision: str | None,
    tp: int,
    autocast: bool = False,
    activation_checkpointing: str = "none",
) -> Measured:
    """Return the statistics of one of ``tp`` ranks; the arguments are those of :meth:`ModelStats.of`.

    In mixed precision, parameters have half precision, as FSDP2 gathers them; with ``autocast``, they are cast where
    they are used, as under DDP.
    """
    # Sharding needs a copy on the meta device, and running it needs fake tensors.
    mode, fake_model, half = FakeTensorMode(), meta_copy(model), compute_dtype(mixed_precision)
    dtype, cast = (None, half) if autocast else (half, None)
    with fake_mesh(tp) if tp > 1 else nullcontext() as mesh:
        if mesh is not None:
            tensor_parallel(fake_model, mesh)
        tensors = _tensors(fake_model)
        make_fake_(fake_model, mode, dtype)
        # Two batch sizes determine the line fixed + per_sample * samples.
        first, second = (
            run(
                fake_model,
                _layers_of(fake_model),
                *fake_inputs(sample_input, times, mode, dtype),
                loss_fn,
                mode,
                autocast_dtype=cast,
                output_dtype=dtype and torch.float32,  # as FSDP2 returns it
                blocks=_blocks(fake_model, activation_checkpointing),
            )
            for times in (1, 2)
        )
    layers = tuple(_layer(i, name, first, second) for i, (name, _) in enumerate(_layers_of(fake_model)))
    return Measured(tensors, layers, isinstance(model, nn.Sequential) and all(first.returns_tensor))


def _blocks(model: nn.Module, kind: str) -> list[tuple[nn.Module, Policy | None]]:
    """Return the blocks that a kind of activation checkpointing recomputes, each with the policy of saved tensors."""
    if kind == "none":
        return []
    blocks = fsdp_blocks(model)
    require_blocks(kind, blocks)
    selective = kind == "selective"
    return [(block, inner_product_policy(block, dense_products=True) if selective else None) for block in blocks]


def _layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a Sequential without repeated modules; any other model is returned as a single layer."""
    children = list(children_of(model).items())
    # A module that occurs twice would be counted in both places.
    are_distinct = len({id(child) for _, child in children}) == len(children)
    if isinstance(model, nn.Sequential) and children and are_distinct:
        return children  # type: ignore[return-value]
    return [("", model)]


def _tensors(model: nn.Module) -> tuple[TensorStats, ...]:
    last = {
        id(parameter): i
        for i, (_, layer) in enumerate(_layers_of(model))
        for parameter in layer.parameters()
        if parameter.requires_grad
    }
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {id(inner): names[id(block)] for block in fsdp_blocks(model) for inner in block.modules()}
    layers = {id(m): i for i, (_, layer) in enumerate(_layers_of(model)) for m in layer.modules()}
    stats, seen_ids = [], set()
    for prefix, module in model.named_modules():
        sketches = getattr(module, "sketch_names", ())
        entries: list[tuple[str, Tensor | None, str]] = [
            *((name, p, "parameter") for name, p in parameters_of(module).items()),
            *((name, b, "sketch" if name in sketches else "buffer") for name, b in buffers_of(module).items()),
            # Packed signs are plain attributes of the module, not buffers.
            *((name, vars(module)[name], "sketch") for name in sketches if name in vars(module)),
        ]
        for name, tensor, role in entries:
            if tensor is None or id(tensor) in seen_ids:
                continue
            seen_ids.add(id(tensor))
            local = untracked_shard(tensor)
            stats.append(
                TensorStats(
                    name=f"{prefix}.{name}" if prefix else name,
                    shape=tuple(local.shape),
                    itemsize=tensor.itemsize,
                    role=role,
                    trained=role == "parameter" and tensor.requires_grad,
                    layer=layers.get(id(module), 0),
                    block=blocks.get(id(module), ""),
                    on_mesh=isinstance(tensor, DTensor),
                    global_numel=tensor.numel(),
                    last_layer=last[id(tensor)] if last.get(id(tensor), 0) > layers.get(id(module), 0) else -1,
                )
            )
    return tuple(stats)


def _layer(i: int, name: str, first: Run, second: Run) -> LayerStats:
    def line(count: str) -> Line:
        at_first, at_second = (float(getattr(run, count)[i]) for run in (first, second))
        return _line(at_first, at_second, first.batch, second.batch)

    lines: dict[str, Any] = {
        count: line(count)
        for count in ("activations", "recomputed", "output", "flops", "moved", "tp_bytes", "tp_gathered")
    }
    calls: dict[str, Any] = {count: int(getattr(first, count)[i]) for count in ("calls", "tp_calls", "tp_gathers")}
    return LayerStats(name, largest=_largest(first, second, i), **lines, **calls)


def _line(at_first: float, at_second: float, first: int, second: int) -> Line:
    slope = (at_second - at_first) / (second - first)
    return Line(at_first - slope * first, slope)


def _largest(first: Run, second: Run, i: int) -> Line:
    """Return the size of the tensor that grows most with the batch; other tensors are gradients, or small."""
    sizes = first.made[i], second.made[i]
    if len(sizes[0]) != len(sizes[1]):  # the forward depends on the batch size
        sizes = [max(sizes[0], default=0)], [max(sizes[1], default=0)]
    lines = [_line(*pair, first.batch, second.batch) for pair in zip(*sizes, strict=True)]
    return max(lines, key=lambda line: line.per_sample, default=Line(0.0, 0.0))
