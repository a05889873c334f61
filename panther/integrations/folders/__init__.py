"""Folders of transformers as a whole: a model, its tokenizer and what else lies beside the weights."""

__all__: list[str] = []
