"""Folders in the format compressed-tensors, which transformers, vLLM and SGLang read without Panther.

``layout`` has the names, the packing and the entry of config.json, and ``writer`` writes a model, with corrections of
low rank as an adapter, and compares the files with it. What a reader holds is the table
``panther.compression.readers.READERS``.
"""

from .layout import Scheme
from .writer import write_compressed_tensors

__all__ = ["Scheme", "write_compressed_tensors"]
