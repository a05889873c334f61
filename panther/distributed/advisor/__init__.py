"""Predict memory, traffic and time of each layout of a model on a cluster, and choose one."""

__all__: list[str] = []
