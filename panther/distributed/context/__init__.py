"""Context parallelism: the ranks hold consecutive shards of a sequence, and linear attention exchanges its states."""

__all__: list[str] = []
