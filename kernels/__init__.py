"""Kernels for sketched layers: Triton kernels, a torch reference, and one dispatch. It imports nothing from panther."""

__all__ = [
    "PackedCodes",
    "QuantizedCodes",
    "QuantizedFactors",
    "QuantizedOperands",
    "backend",
    "causal_linear_attention",
    "code_bytes",
    "csr_matmul",
    "hadamard_transform",
    "has_compiled_kernel",
    "normal_block",
    "pack_codes",
    "pack_signs",
    "philox_4x32",
    "quantized_matmul",
    "quantized_weight",
    "sign_block",
    "sketched_inner",
    "sketched_matmul",
    "sketched_outer",
    "uniform_block",
    "unpack_codes",
    "unpack_signs",
    "why_not_packed",
    "windowed_linear_attention",
    "word_block",
]

# With the checkout on sys.path, code that looks for Hugging Face's package `kernels`, as transformers does, finds and
# imports this folder under that name. It then stays empty, because a process can register operators only once.
if __name__ != "kernels":
    from .cpu.int4 import PackedCodes, why_not_packed
    from .ops.attention import causal_linear_attention
    from .ops.philox import normal_block, sign_block, uniform_block, word_block
    from .ops.quantized import has_compiled_kernel, quantized_matmul, quantized_weight
    from .ops.quantized_operands import QuantizedCodes, QuantizedFactors, QuantizedOperands
    from .ops.sketched import sketched_matmul
    from .ops.sketched_halves import sketched_inner, sketched_outer
    from .ops.sparse import csr_matmul
    from .ops.windowed_attention import windowed_linear_attention
    from .reference import hadamard_transform, pack_signs, philox_4x32, unpack_signs
    from .reference.codes import code_bytes, pack_codes, unpack_codes
    from .selection import backend
