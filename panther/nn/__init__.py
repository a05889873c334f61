"""Sketched layers and their functional forms."""

from . import functional
from .linear import SKLinear

__all__ = ["SKLinear", "functional"]
