"""Give a model on the meta device its values, drawn or read, shard by shard."""

__all__: list[str] = []
