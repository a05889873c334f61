"""Process group, device mesh, collectives, agreement between ranks, traffic and metrics."""

__all__: list[str] = []
