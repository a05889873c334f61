"""The time of a rank in a step: computing, the optimizer, and the traffic along each axis."""

__all__ = ["Traffic", "along", "data_parallel", "microbatch_seconds", "optimizer_seconds"]

from dataclasses import dataclass, replace

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost.rank import Rank, optimizer_bytes
from panther.distributed.advisor.statistics.layer_stats import LayerStats

_BUCKET = 25 * 2**20  # bytes of a gradient bucket, torch's default for DDP


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank along an axis in one step."""

    axis: str
    link: str
    """``"intra"`` (within a node) or ``"inter"`` (between nodes)."""
    payload: float
    """Bytes of the tensors that are communicated, as :class:`CommunicationCounter` counts them."""
    sent_bytes: float
    """Bytes that the rank sends over its link, with ring algorithms."""
    seconds: float


def along(rank: Rank, axis: str, cluster: ClusterSpec) -> Traffic:
    """Return the traffic along tp or pp."""
    layout, m = rank.layout, rank.layout.num_microbatches
    if axis == "tp":
        return _tensor_parallel(rank, cluster)
    # A stage sends its output forward and the gradient of its input back. With V schedules, neighbouring stages can be
    # on the same rank, which sends nothing between them.
    last, own_stages = len(rank.stages) - 1, set(rank.own_stages)
    messages = [rank.output_of(s) for s in rank.own_stages if s < last and s + 1 not in own_stages]
    messages += [rank.input_of(s) for s in rank.own_stages if s > 0 and s - 1 not in own_stages]
    sent_bytes = m * sum(messages)
    return _traffic(axis, cluster, layout.pp * layout.tp, sent_bytes, sent_bytes, m * len(messages), "broadcast")


def _tensor_parallel(rank: Rank, cluster: ClusterSpec) -> Traffic:
    """Return the traffic along tp. Its messages are small, so that the number of calls and the latency matter."""
    m, n = rank.layout.num_microbatches, rank.layout.tp
    gathered = m * sum(layer.tp_gathered.at(rank.samples) for layer in rank.layers)
    gathers = m * sum(layer.tp_gathers for layer in rank.layers)
    reduced = m * sum(layer.tp_bytes.at(rank.samples) for layer in rank.layers) - gathered
    calls = m * sum(layer.tp_calls for layer in rank.layers) - gathers
    gather = _traffic("tp", cluster, n, gathered, (n - 1) * gathered, (n - 1) * gathers, "tp all_gather")
    return _both(_all_reduce("tp", cluster, n, n, reduced, calls, "tp all_reduce"), gather)


def data_parallel(rank: Rank, cluster: ClusterSpec) -> tuple[Traffic, ...]:
    """Return the traffic along dp and replicate, with the time of filling and emptying buffers."""
    layout, n, units = rank.layout, rank.layout.dp, rank.units
    span = n * layout.pp * layout.tp
    if n == 1:
        return (_traffic("dp", cluster, 1, 0.0, 0.0, 0),)
    if layout.strategy == "fsdp":
        # A block is gathered for its forward and again for its backward pass; the root unit and stages stay gathered.
        gathers = {name: 2 if name and layout.pp == 1 else 1 for name in units}
        gathered = sum(gathers[name] * full for name, (full, _) in units.items())
        reduced = sum(summed for _, summed in units.values())
        share, calls = (n - 1) / n, sum(gathers.values())
        gather = _traffic(
            "dp", cluster, span, gathered / n, share * gathered, (n - 1) * calls, "all_gather", 2 * gathered
        )
        scatter = _traffic(
            "dp", cluster, span, reduced, share * reduced, (n - 1) * len(units), "reduce_scatter", 2 * reduced
        )
        dp = _both(gather, scatter)
        if layout.replicate == 1:
            return (dp,)
        shard = _compressed_bytes(rank) if rank.messages.applies_to("fsdp", layout.replicate) else reduced / n
        return dp, _between_replicas(rank, cluster, "replicate", layout.replicate, layout.world, shard, len(units))
    trained = float(sum(t.nbytes for t in rank.tensors if t.trained))
    if layout.strategy == "replicate":  # FSDP2's engine sends a unit at a time
        return (_all_reduce("dp", cluster, n, span, trained, len(units)),)
    # A bucket is filled, divided by the ranks and read back.
    calls, payload = -(-int(trained) // _BUCKET), trained
    if rank.messages.hook is not None:
        payload = _compressed_bytes(rank)
    dp = _between_replicas(rank, cluster, "dp", n, span, payload, calls, copied=4 * trained)
    # DDP also broadcasts buffers in every forward, except for sketches.
    buffers = sum(t.nbytes for t in rank.tensors if t.role == "buffer" and not t.name.endswith("sketch_seed"))
    return (replace(dp, payload=dp.payload + buffers),)


def _compressed_bytes(rank: Rank) -> float:
    return rank.messages.payload_bytes(rank.gradient_shapes(), max(t.itemsize for t in rank.tensors if t.trained))


def _between_replicas(
    rank: Rank, cluster: ClusterSpec, axis: str, n: int, span: int, payload: float, calls: int, copied: float = 0.0
) -> Traffic:
    """Return the traffic of gradients, compressed or not, between ranks that have equal parameters."""
    if rank.messages.is_gathered and rank.messages.applies_to(rank.layout.strategy, rank.layout.replicate):
        sent_bytes = (n - 1) * payload
        return _traffic(axis, cluster, span, payload, sent_bytes, (n - 1) * calls, "all_gather", copied)
    return _all_reduce(axis, cluster, n, span, payload, calls, copied=copied)


def _both(first: Traffic, second: Traffic) -> Traffic:
    return replace(
        first,
        payload=first.payload + second.payload,
        sent_bytes=first.sent_bytes + second.sent_bytes,
        seconds=first.seconds + second.seconds,
    )


def _all_reduce(
    axis: str,
    cluster: ClusterSpec,
    n: int,
    span: int,
    payload: float,
    calls: int,
    operation: str = "all_reduce",
    copied: float = 0.0,
) -> Traffic:
    sent_bytes, rounds = 2 * (n - 1) / n * payload, 2 * (n - 1) * calls
    return _traffic(axis, cluster, span, payload, sent_bytes, rounds, operation, copied)


def _traffic(
    axis: str,
    cluster: ClusterSpec,
    span: int,
    payload: float,
    sent_bytes: float,
    rounds: float,
    operation: str = "all_reduce",
    copied: float = 0.0,
) -> Traffic:
    """Return the traffic of calls of a collective; ``copied`` bytes are read and written to fill and empty buffers."""
    seconds = sent_bytes / cluster.bandwidth(span, operation) + rounds * cluster.latency(span, operation)
    seconds += copied / cluster.memory_bandwidth
    return Traffic(axis, cluster.link(span), payload, sent_bytes, seconds if payload else 0.0)


def microbatch_seconds(rank: Rank, cluster: ClusterSpec, itemsize: int) -> float:
    """Return the time of computing a microbatch, forward and backward, in numbers of ``itemsize`` bytes.

    A GPU waits if its host takes longer to queue the operations than the GPU takes to run them.
    """
    speed = cluster.operation_bandwidth or cluster.memory_bandwidth
    total, seconds_by_products = 0.0, dict[int, float]()
    for layer in rank.layers:
        # Equal layers share the tuple of products, so that its time is computed once.
        if id(layer.products) not in seconds_by_products:
            seconds_by_products[id(layer.products)] = _products_seconds(layer, cluster, itemsize, rank.samples)
        total += seconds_by_products[id(layer.products)]
        total += layer.moved.at(rank.samples) / speed + layer.calls * cluster.operation_seconds
    return max(total, sum(layer.calls for layer in rank.layers) * cluster.host_seconds)


def _products_seconds(layer: LayerStats, cluster: ClusterSpec, itemsize: int, samples: float) -> float:
    flops, total = cluster.flops(itemsize), 0.0
    for product in layer.products:
        computing = product.flops.at(samples) / flops * cluster.slowdown(product.narrowest)
        total += product.times * (computing + product.moved.at(samples) / cluster.memory_bandwidth)
    return total


def between_shards(rank: Rank, cluster: ClusterSpec) -> Traffic:
    """Return the traffic of the optimizer's step, between ranks that share matrices."""
    layout = rank.layout
    trained = [tensor for tensor in rank.tensors if tensor.trained]
    sent_bytes = 0.0
    for tensor in trained:
        ranks = rank.shards * max(1, round(tensor.global_numel / max(1, tensor.numel)))
        sent_bytes += rank.optimizer_states.sent_bytes(tensor.name, rank.shape_of(tensor), ranks)
    span = layout.tp if rank.shards == 1 else layout.dp * layout.pp * layout.tp
    return _traffic("optimizer", cluster, span, sent_bytes, sent_bytes, 0)


def optimizer_seconds(rank: Rank, cluster: ClusterSpec) -> float:
    """Return the time of the optimizer's step, which moves memory."""
    trained = [tensor for tensor in rank.tensors if tensor.trained]
    # One operation for each tensor and four for each state, which take a third of the usual time without autograd.
    states = sum(rank.optimizer_states.count(tensor.name) for tensor in trained)
    calls = (len(trained) + 4 * states) / 3 * cluster.operation_seconds
    moved = optimizer_bytes(rank.bytes_of(trained), rank.state_bytes)
    return moved / (cluster.optimizer_bandwidth or cluster.memory_bandwidth) + calls
