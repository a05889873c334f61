"""Triton kernels, one file a feature; imported only where Triton is."""

__all__: list[str] = []
