"""The computing time of a rank in a step, given the speeds of the cluster."""

__all__ = ["microbatch_seconds", "optimizer_seconds"]

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost.optimizer import optimizer_bytes
from panther.distributed.advisor.cost.rank import Rank
from panther.distributed.advisor.statistics.layer_stats import LayerStats


def microbatch_seconds(rank: Rank, cluster: ClusterSpec, itemsize: int) -> float:
    """Return the time of computing a microbatch, forward and backward, in numbers of ``itemsize`` bytes."""
    speed = cluster.operation_bandwidth or cluster.memory_bandwidth
    total, seconds_by_products = 0.0, dict[int, float]()
    for layer in rank.layers:
        # Equal layers share the tuple of products, so that its time is computed once.
        if id(layer.products) not in seconds_by_products:
            seconds_by_products[id(layer.products)] = _products_seconds(layer, cluster, itemsize, rank.samples)
        total += seconds_by_products[id(layer.products)]
        total += layer.moved.at(rank.samples) / speed + layer.calls * cluster.operation_seconds
    return total


def _products_seconds(layer: LayerStats, cluster: ClusterSpec, itemsize: int, samples: float) -> float:
    flops, total = cluster.flops(itemsize), 0.0
    for product in layer.products:
        computing = product.flops.at(samples) / flops * cluster.slowdown(product.narrowest)
        total += product.times * (computing + product.moved.at(samples) / cluster.memory_bandwidth)
    return total


def optimizer_seconds(rank: Rank, cluster: ClusterSpec) -> float:
    """Return the time of the optimizer's step, which moves memory."""
    trained = [tensor for tensor in rank.tensors if tensor.trained]
    # About (1 + 4 states) operations for each tensor, which take a third of the usual time without autograd.
    calls = len(trained) * (1 + 4 * rank.optimizer_states) / 3 * cluster.operation_seconds
    moved = optimizer_bytes(rank.bytes_of(trained), rank.optimizer_states)
    return moved / (cluster.optimizer_bandwidth or cluster.memory_bandwidth) + calls
