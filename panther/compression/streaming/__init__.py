"""Compression of models that are larger than memory: part by part, with everything that is kept in files."""

__all__: list[str] = []
