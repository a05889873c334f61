"""Attention by feature maps, in time linear in the length of the sequence."""

from .decoding.states import AttentionState, WindowedAttentionState
from .learned import LearnedLinearAttention
from .multi_head import RandMultiHeadAttention, make_performer
from .positional import sinSRPE

__all__ = [
    "AttentionState", "LearnedLinearAttention", "RandMultiHeadAttention", "WindowedAttentionState", "make_performer",
    "sinSRPE",
]  # fmt: skip
