"""What planning needs to know of a model, counted by running it on fake tensors."""

__all__: list[str] = []
