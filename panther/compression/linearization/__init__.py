"""Softmax attention converted to learned linear attention by :func:`panther.linearize_`.

``_linearize`` is the function; ``survey`` finds the modules, ``samples`` records what they read, ``fitting`` learns the
feature maps from it, ``report`` tells what came of it.
"""

from ._linearize import linearize_
from .report import LinearizationReport, LinearizedLayer

__all__ = ["LinearizationReport", "LinearizedLayer", "linearize_"]
