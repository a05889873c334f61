"""The traffic of a rank along each axis in a step, and its time."""

__all__ = ["Traffic", "along", "data_parallel"]

from dataclasses import dataclass, replace

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost.rank import Rank

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
        shard = reduced / n
        replicas = _all_reduce("replicate", cluster, layout.replicate, layout.world, shard, len(units))
        return (dp, replicas) if layout.replicate > 1 else (dp,)
    trained = float(sum(t.nbytes for t in rank.tensors if t.trained))
    if layout.strategy == "replicate":  # FSDP2's engine sends a unit at a time
        return (_all_reduce("dp", cluster, n, span, trained, len(units)),)
    # A bucket is filled, divided by the ranks and read back.
    dp = _all_reduce("dp", cluster, n, span, trained, -(-int(trained) // _BUCKET), copied=4 * trained)
    # DDP also broadcasts buffers in every forward, except for sketches.
    buffers = sum(t.nbytes for t in rank.tensors if t.role == "buffer" and not t.name.endswith("sketch_seed"))
    return (replace(dp, payload=dp.payload + buffers),)


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
