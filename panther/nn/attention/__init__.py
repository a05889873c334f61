"""Attention by feature maps, in time linear in the length of the sequence."""

from .learned import LearnedLinearAttention
from .multi_head import RandMultiHeadAttention, make_performer
from .positional import sinSRPE

__all__ = ["LearnedLinearAttention", "RandMultiHeadAttention", "make_performer", "sinSRPE"]
