"""The forward and backward pass of one optimizer step: with the whole model on each rank, or with pipeline stages."""

__all__: list[str] = []
