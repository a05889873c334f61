"""The dispatch, one file per feature: each operation chooses between Triton kernels and torch by its operands."""

__all__: list[str] = []
