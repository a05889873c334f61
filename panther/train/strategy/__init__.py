"""How the Trainer distributes a model: which settings go together, what "auto" stands for, and the building."""

__all__: list[str] = []
