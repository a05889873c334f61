"""Sketched layers and their functional forms."""

from . import functional
from .attention import RandMultiHeadAttention, make_performer, sinSRPE
from .conv import SKConv1d, SKConv2d, SKConv3d
from .linear import SKLinear

__all__ = [
    "RandMultiHeadAttention",
    "SKConv1d",
    "SKConv2d",
    "SKConv3d",
    "SKLinear",
    "functional",
    "make_performer",
    "sinSRPE",
]
