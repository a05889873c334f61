"""ONNX files of compressed models, which onnxruntime runs without Panther.

``layers`` writes quantized weights with the operators that ONNX has for them, ``signature`` names inputs, outputs and
their sizes, ``writer`` writes the file, and ``comparison`` runs it with onnxruntime.
"""

from .comparison import Agreement, compare_onnx
from .writer import write_onnx

__all__ = ["Agreement", "compare_onnx", "write_onnx"]
