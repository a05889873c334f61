"""The cost of a layout for each rank: memory, traffic and time."""

__all__: list[str] = []
