"""Keep sketches and whole models equal on all ranks."""

__all__: list[str] = []
