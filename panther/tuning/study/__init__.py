"""The Optuna study of a search: where its trials are stored, what is drawn next, and what it is told."""

__all__: list[str] = []
