"""Files in the format GGUF, which llama.cpp and the programs around it read without Panther.

``architectures`` says which models have a counterpart there and what differs, ``blocks`` has the layout of the codes,
``vocabulary`` writes the tokenizer, and ``writer`` the file.
"""

from .writer import write_gguf

__all__ = ["write_gguf"]
