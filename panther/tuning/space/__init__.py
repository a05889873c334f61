"""What a search draws from: values, selections of layers, and the spaces of layers, attention and healing."""

__all__: list[str] = []
