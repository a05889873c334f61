"""Rules of thumb for a parallelism, from the number of parameters alone."""

__all__ = ["choose_parallelism_strategy"]

from numbers import Real

_BYTES = 4  # bytes of a parameter in float32


def choose_parallelism_strategy(model_size: int, num_gpus: int, memory_per_gpu: float) -> list[str]:
    """Return the list of the kinds of parallelism that rules of thumb suggest; it can be empty.

    The list has ``"data_parallel"`` if the parameters in float32 need less than 70 % of a GPU; ``"model_parallel"`` if
    they need more than one GPU; ``"tensor_parallel"`` with four GPUs or more; and ``"hybrid_parallel"`` with eight or
    more, if the parameters need more than half of a GPU. Gradients, optimizer states and activations are not counted;
    with Adam they are more than three times the parameters. :func:`plan_parallelism` counts them.

    Args:
        model_size: Number of parameters of the model.
        num_gpus: Number of GPUs.
        memory_per_gpu: Memory of a GPU in bytes.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is not positive.

    Example:
        >>> choose_parallelism_strategy(7_000_000_000, 8, 80e9)
        ['data_parallel', 'tensor_parallel']
        >>> choose_parallelism_strategy(70_000_000_000, 16, 80e9)
        ['model_parallel', 'tensor_parallel', 'hybrid_parallel']
    """
    arguments = {"model_size": model_size, "num_gpus": num_gpus, "memory_per_gpu": memory_per_gpu}
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, not {type(value).__name__}")
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive: model_size in parameters, memory_per_gpu in bytes")
    needed = model_size * _BYTES
    rules = {
        "data_parallel": needed < 0.7 * memory_per_gpu,
        "model_parallel": needed > memory_per_gpu,
        "tensor_parallel": num_gpus >= 4,
        "hybrid_parallel": num_gpus >= 8 and needed > 0.5 * memory_per_gpu,
    }
    return [name for name, holds in rules.items() if holds]
