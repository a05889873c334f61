"""Attention by feature maps, in time linear in the length of the sequence."""

from .multi_head import RandMultiHeadAttention, make_performer
from .positional import sinSRPE

__all__ = ["RandMultiHeadAttention", "make_performer", "sinSRPE"]
