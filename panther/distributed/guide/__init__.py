"""The classes of the distributed guide, as thin wrappers of the library's functions."""

__all__: list[str] = []
