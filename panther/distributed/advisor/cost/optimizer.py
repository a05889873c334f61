"""The bytes that an optimizer reads and writes in a step, from which its time is predicted."""

__all__ = ["optimizer_bytes"]


def optimizer_bytes(trained: float, optimizer_states: int) -> float:
    """Return the bytes that the optimizer's step reads and writes for parameters of ``trained`` bytes.

    SGD reads a parameter and its gradient and writes the parameter; each moment of Adam takes about 8 accesses.
    """
    return (3 + 8 * optimizer_states) * trained
