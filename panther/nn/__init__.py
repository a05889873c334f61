"""Sketched layers and their functional forms."""

from . import functional
from .conv import SKConv1d, SKConv2d, SKConv3d
from .linear import SKLinear

__all__ = ["SKConv1d", "SKConv2d", "SKConv3d", "SKLinear", "functional"]
