"""Fast orders of operations in torch, one file a feature; each is tested against the reference."""

__all__: list[str] = []
