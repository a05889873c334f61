"""Tensor parallelism: layers sharded over the ranks of one mesh dimension."""

__all__: list[str] = []
