"""Data, tensor and pipeline parallelism together."""

__all__: list[str] = []
