"""Adapters to other libraries, a file each. Nothing of a library is imported before its file is."""

__all__: list[str] = []
