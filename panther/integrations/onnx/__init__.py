"""ONNX files of compressed models, which onnxruntime runs without Panther.

``layers`` writes quantized weights with the operators that ONNX has for them, and ``writer`` names inputs, outputs and
their sizes, writes the file, and compares it with the model by onnxruntime.
"""

from .writer import Agreement, compare_onnx, write_onnx

__all__ = ["Agreement", "compare_onnx", "write_onnx"]
