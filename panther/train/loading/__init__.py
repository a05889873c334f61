"""How data is read: streams of unequal length, and the worker processes of DataLoaders."""

__all__: list[str] = []
