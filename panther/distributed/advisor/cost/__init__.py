"""What a layout costs each rank: its memory, its traffic and its time."""

__all__: list[str] = []
