"""Keep every wait of a rank within a limit: timeouts of groups, positions of ranks, the end of a process."""

__all__: list[str] = []
