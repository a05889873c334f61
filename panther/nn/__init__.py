"""Sketched, low-rank, interpolative and quantized layers and their functional forms."""

from typing import Any

from panther._hints import missing_name

from . import functional
from .attention import (
    AttentionState,
    LearnedLinearAttention,
    RandMultiHeadAttention,
    WindowedAttentionState,
    make_performer,
    sinSRPE,
)
from .conv import SKConv1d, SKConv2d, SKConv3d
from .fusion import fuse_
from .interpolative import InterpolativeLinear
from .linear import SKLinear
from .low_rank import LowRankConv2d, LowRankLinear
from .monarch import MonarchLinear
from .quantized import QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts, QuantizedLinear

__all__ = [
    "AttentionState", "InterpolativeLinear", "LearnedLinearAttention", "LowRankConv2d", "LowRankLinear",
    "MonarchLinear", "QuantizedConv2d", "QuantizedEmbedding", "QuantizedEmbeddingBag", "QuantizedExperts",
    "QuantizedLinear", "RandMultiHeadAttention", "SKConv1d", "SKConv2d", "SKConv3d", "SKLinear",
    "WindowedAttentionState", "functional", "fuse_", "make_performer", "sinSRPE",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name, __all__)
