"""Sketched convolutions.

``geometry`` checks the arguments that all convolutions share, ``product`` computes, and ``layers`` has the layers.
"""

from .layers import SKConv1d, SKConv2d, SKConv3d

__all__ = ["SKConv1d", "SKConv2d", "SKConv3d"]
