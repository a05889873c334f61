"""Folders in the format compressed-tensors, which transformers, vLLM and SGLang read without Panther.

``layout`` has the names, the packing and the entry of config.json, ``writer`` writes a model and compares the files
with it, and ``adapter`` writes corrections of low rank. What a reader holds is the table
``panther.compression.readers.READERS``.
"""

from .layout import Scheme
from .writer import write_compressed_tensors

__all__ = ["Scheme", "write_compressed_tensors"]
